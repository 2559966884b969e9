"""What the programs of a chunk cost a rank: seconds, flops, bytes sent and bytes of memory."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from sbpc._compat import tree_leaves
from sbpc.graph.about import is_recomputed
from sbpc.graph.operands import value_of
from sbpc.graph.ports import BUFFER, GRADIENT, PARAMETER, SEED, Port, placeholders
from sbpc.plans.chunk import Chunk
from sbpc.plans.measure import comm_totals, compute_totals, kernels_and_transfers, layout_at, sum_kernel
from sbpc.plans.memory import Life
from sbpc.plans.staged.chunk_programs import ChunkPrograms
from sbpc.plans.staged.part_memory import ADDED, GATHERED, HOME, LEFT, SAVED, Kind, bytes_at, in_flight, kept_by, rise
from sbpc.plans.staged.pieces import pieces_in
from sbpc.plans.staged.schedules import FORWARD, WEIGHTS, piece_of
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, Parts
from sbpc.plans.timeline import COMPUTE, Left, Work, bucket_of, busy_seconds, makespan, played, timeline, works

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class ProgramCost:
    """What a program costs.

    seconds: from its start to its end. busy: those in which it computes, longer where collectives run beside.
    compute, comm: what kernels and collectives take by themselves. flops, flops_one_device: of a rank, and of one
    device doing it all. again, flops_again: seconds of computing values again, and one device's flops. sent: bytes by
    axis.
    """

    seconds: float = 0.0
    busy: float = 0.0
    compute: float = 0.0
    comm: float = 0.0
    flops: float = 0.0
    flops_one_device: float = 0.0
    again: float = 0.0
    flops_again: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, chunk: ChunkPrograms, which: Parts) -> ProgramCost:
        """Measures the program of some parts."""
        gm, mesh = chunk.program(which).gm, chunk.chunk.mesh
        events = timeline(gm, mesh)
        kernels, again, transfers = kernels_and_transfers(gm.graph.nodes, mesh)
        compute, flops, one_device = compute_totals(kernels, mesh)
        comm, sent = comm_totals(transfers, mesh)
        again_seconds, _, flops_again = compute_totals(again, mesh)
        return cls(
            makespan(events),
            busy_seconds(events)[COMPUTE],
            compute,
            comm,
            flops,
            one_device,
            again_seconds,
            flops_again,
            Counter(sent),
        )


def once(method: Method) -> Method:
    """Keeps what a method of a `ChunkCost` returns, by its arguments, for it and its copies."""

    @functools.wraps(method)
    def kept(self: ChunkCost, *args: Hashable) -> Any:
        key = method.__name__, args
        if key not in self.known:
            self.known[key] = method(self, *args)
        return self.known[key]

    return kept  # type: ignore[return-value]


class ChunkCost:
    """What a chunk costs on the busiest rank, measured by its programs when it is asked.

    homes: bytes by parameter. trained: of trained ones. buffers: of these, and of the seed of random numbers.
    """

    def __init__(self, programs: ChunkPrograms) -> None:
        chunk = programs.chunk
        stored = {port: bytes_at(value, chunk.given[port], chunk.mesh) for port, value in chunk.shapes.items()}
        self.programs, self.known = programs, dict[Hashable, Any]()
        self.homes = {port.name: size for port, size in stored.items() if port.kind == PARAMETER}
        self.buffers = sum(size for port, size in stored.items() if port.kind in (BUFFER, SEED))
        self.trained = sum(self.homes[port.name] for port in chunk.ports.outputs if port.kind == GRADIENT)

    @once
    def program(self, which: Parts) -> ProgramCost:
        """Returns what the program costs that runs some parts of a step."""
        if (runs := self.programs.of(which)) != which:
            return self.program(runs)
        return ProgramCost.of(self.programs, which) if which else ProgramCost()

    @once
    def held(self, kind: Kind) -> Any:
        """Returns the bytes of a kind that stays while other programs run, see `kept_by`, or of what comes late of
        some parts, whose gradients may be the first ones."""
        if not isinstance(kind, tuple):
            return self.kept()[0][kind]
        which, first = kind
        if first and not self.programs.begins(which):
            return self.held((which, False))
        life, storages = in_flight(self.programs, which, self.programs.program(which, not first))
        return sum(map(self.size_of(life).__getitem__, sorted(storages)))

    @once
    def kept(self) -> tuple[dict[Kind, Any], dict[str, list[int]]]:
        """Returns what `kept_by` does."""
        return kept_by(self.programs, self.size_of, self.bytes_of)

    def size_of(self, life: Life) -> Sequence[Any]:
        """Returns the bytes of the storages of a program."""
        return life.size

    def bytes_of(self, node: Node) -> Any:
        """Returns the bytes of a value by itself."""
        return bytes_at(node.meta["val"], layout_at(node), self.programs.chunk.mesh)

    def keeps(self, kind: str) -> Sequence[int]:
        """Returns the inputs, by number, that a micro-batch keeps of a kind."""
        return self.kept()[1][kind]

    @once
    def rise(self, which: Parts, first: bool) -> tuple[int, int]:
        """Returns what `part_memory.rise` does. first: whether the gradients of these parts may be the first ones: a
        program that brings such home keeps no sums but those that are LEFT."""
        if first and not self.programs.begins(which):
            return self.rise(which, False)
        return rise(self.programs, which, self.programs.program(which, not first))

    @once
    def adds(self) -> float:
        """Returns the seconds of adding gradients to their sums."""
        return compute_totals(Counter(map(sum_kernel, self.programs.summed)), self.programs.chunk.mesh)[0]

    @once
    def run(self, which: Parts, owner: Hashable, before: Left) -> tuple[float, Left]:
        """Returns the seconds of a program, or of a piece of it (see `piece_of`), and what is on its way then. owner:
        what its messages are called by. before: what is on its way before."""
        work = self.work_of(self.programs.of(which), piece_of(which)[1]) if which else {}
        return played(work, self.programs.chunk.mesh, owner, before)[1:]

    @once
    def work_of(self, which: Parts, piece: int) -> dict[Node, Work]:
        """Returns the work of a piece of a program."""
        gm = self.programs.program(which).gm
        piece_at = pieces_in(gm)
        return {
            node: work for node, work in works(gm, self.programs.chunk.mesh).items() if piece_at.get(node, 0) == piece
        }

    @once
    def late(self, which: Parts) -> Sequence[frozenset[str]]:
        """Returns by piece of what comes late the messages that it waits for."""
        if not self.programs.of(which):
            return ()
        program = self.programs.program(which)
        found = [set[str]() for _ in program.late]
        for node, piece in pieces_in(program.gm).items():
            if "awaits" in node.meta:  # which nothing does that comes early
                found[piece - 1].add(bucket_of(node.all_input_nodes[0]))
        return list(map(frozenset, found))

    def early(self, which: Parts) -> bool:
        """Returns whether something of the program of some parts comes early."""
        return bool(self.programs.of(which) and self.programs.program(which).early)

    def parted(self, which: Parts) -> bool:
        """Returns whether a program runs in pieces."""
        return self.early(which) or bool(self.late(which))


def costs_of(chunks: Sequence[Chunk], in_loop: Container[Port], programs: Sequence[ChunkPrograms]) -> list[ChunkCost]:
    """Returns what chunks of one model cost. Those that are alike, as equal blocks are, are measured once."""
    if len(chunks) == 1:
        return [ChunkCost(programs[0])]
    known, costs, numbers = dict[Hashable, ChunkCost](), list[ChunkCost](), Numbers()
    for at, chunk in enumerate(chunks):
        key = likeness(chunk, in_loop, numbers)
        if key not in known:
            known[key] = ChunkCost(programs[at])
        names = [port.name for port in chunk.ports.inputs if port.kind == PARAMETER]
        cost = copy.copy(known[key])
        cost.homes = dict(zip(names, cost.homes.values(), strict=True))
        costs.append(cost)
    return costs


class Numbers:
    """Small numbers for objects, one for equal ones. What is asked for often is hashed once."""

    def __init__(self) -> None:
        self.by_value, self.by_id = dict[Hashable, int](), dict[int, tuple[int, Hashable]]()

    def of(self, each: Hashable) -> int:
        """Returns the number of an object, which is kept, so that no other has its id."""
        if id(each) not in self.by_id:
            self.by_id[id(each)] = self.by_value.setdefault(each, len(self.by_value)), each
        return self.by_id[id(each)][0]


def likeness(chunk: Chunk, in_loop: Container[Port], numbers: Numbers) -> Hashable:
    """Returns what is equal for chunks that cost the same: calls in order, with shapes, layouts and what is in the
    loop, the orders that are known, but no names."""
    number = {node: at for at, node in enumerate(chunk.bare.graph.nodes)}
    kinds = {node: (port.kind, port in in_loop) for port, node in placeholders(chunk.bare).items()}
    choices, aliases = chunk.assignment.choices, chunk.assignment.aliases

    def about(node: Node) -> Hashable:
        called = node.target if node.op == "call_function" else kinds.get(node)
        read = repr(map_arg((node.args, node.kwargs), lambda used: f"%{number[used]}"))
        values = tuple(
            (v.dtype, tuple(v.shape), v.stride()) for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor)
        )
        producer, index = value_of(node)
        layouts = numbers.of(choices.get(node.name)), numbers.of(aliases.get((producer.name, index)))
        return called, read, values, node.meta.get("phase"), *layouts, is_recomputed(node)

    ends = [(port.kind, port in in_loop, layout) for port, layout in chunk.left.items()]
    return tuple(map(about, chunk.bare.graph.nodes)), tuple(ends), repr(chunk.orders)


class JoinedCost(ChunkCost):
    """What pieces of a model cost that run one after the other, and back again."""

    def __init__(self, costs: Sequence[ChunkCost]) -> None:
        self.costs, self.known = costs, dict[Hashable, Any]()
        self.homes = {"": sum(sum(cost.homes.values()) for cost in costs)}
        self.trained = sum(cost.trained for cost in costs)
        self.buffers = sum(cost.buffers for cost in costs)

    @once
    def program(self, which: Parts) -> ProgramCost:
        each = [cost.program(which) for cost in self.costs]
        seconds = sum(one.seconds for one in each)
        for side, main in ((BEFORE, FORWARD), (AFTER, WEIGHTS)):
            if side in which and main in which:
                seconds = beside(self.costs, which, side)
        sent = sum((one.sent for one in each), Counter[str]())
        names = "busy", "compute", "comm", "flops", "flops_one_device", "again", "flops_again"
        return ProgramCost(seconds, sent=sent, **{name: sum(getattr(one, name) for one in each) for name in names})

    @once
    def held(self, kind: Kind) -> Any:
        return sum(cost.held(kind) for cost in self.costs)

    def keeps(self, kind: str) -> Sequence[int]:
        return ()

    @once
    def rise(self, which: Parts, first: bool) -> tuple[int, int]:
        kinds = {SAVED: FORWARD in which, GATHERED: BEFORE in which, HOME: AFTER in which}
        kinds[LEFT if AFTER in which else ADDED] = first and WEIGHTS in which
        left = [sum(cost.held(kind) for kind, stays in kinds.items() if stays) for cost in self.costs]
        return sum(left) + max(cost.rise(which, first)[0] - stays for cost, stays in zip(self.costs, left)), 0

    def adds(self) -> float:
        return sum(cost.adds() for cost in self.costs)

    def run(self, which: Parts, owner: Hashable, before: Left) -> tuple[float, Left]:
        return self.program(which).seconds, ()

    def late(self, which: Parts) -> Sequence[frozenset[str]]:
        return ()

    def early(self, which: Parts) -> bool:
        return False


def beside(costs: Sequence[ChunkCost], which: Parts, side: str) -> float:
    """Returns the seconds of a program of pieces in which one part, collectives alone, runs beside the others.

    A backward goes from the last piece to the first, and what it sends home is in flight while the next one is
    computed. A forward with what is gathered for it is the same, seen from its end.
    """
    now = sent = 0.0
    for cost in reversed(costs):
        alone = cost.program((side,)).seconds
        sent = max(sent, now + cost.program(which).seconds - alone) + alone
        now += cost.program(tuple(part for part in which if part != side)).seconds
    return max(now, sent)
