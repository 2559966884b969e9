"""What the programs of a chunk cost a rank: seconds, flops, bytes sent and bytes of memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from sbpc._compat import tree_leaves
from sbpc.graph.operands import value_of
from sbpc.graph.ports import BUFFER, GRADIENT, PARAMETER, SEED, Port, placeholders
from sbpc.graph.recomputed import is_recomputed
from sbpc.plans.measure import comm_totals, compute_totals, kernel_of, layout_at, sum_kernel, transfer_of
from sbpc.plans.plan import Plan
from sbpc.plans.staged.chunk_programs import Chunk, ChunkPrograms
from sbpc.plans.staged.part_memory import Kept, bytes_at, rise
from sbpc.plans.staged.schedules import FORWARD, WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, Parts
from sbpc.plans.timeline import COMPUTE, busy_seconds, makespan, timeline, works

GATHERED, SAVED, HANDED, HOME, ADDED, LEFT = "gathered", "saved", "handed", "home", "added", "left"


@dataclass(frozen=True)
class ProgramCost:
    """What a program costs. seconds: from its start to its end. compute, comm: those in which it computes, and its links are busy.
    flops, flops_one_device: of a rank, and of one device doing it all. again: seconds of computing values again. sent: bytes by axis."""

    seconds: float = 0.0
    compute: float = 0.0
    comm: float = 0.0
    flops: float = 0.0
    flops_one_device: float = 0.0
    again: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, chunk: ChunkPrograms, which: Parts) -> ProgramCost:
        """Measures the program of some parts."""
        gm, mesh = chunk.program(which).gm, chunk.plan.mesh
        events = timeline(gm, mesh)
        busy = busy_seconds(events)
        moved = Counter(transfer_of(node) for node in gm.graph.nodes if "step" in node.meta)
        kernels = Counter(kernel_of(n) for n in gm.graph.nodes if "choice" in n.meta and n.op == "call_function")
        again = sum(work.seconds for node, work in works(gm, mesh).items() if is_recomputed(node))
        compute, comm = busy[COMPUTE], sum(seconds for stream, seconds in busy.items() if stream != COMPUTE)
        flops = compute_totals(kernels, mesh)[1:]
        return cls(makespan(events), compute, comm, *flops, again, Counter(comm_totals(moved, mesh)[1]))


@dataclass(frozen=True)
class ChunkCost:
    """What a chunk costs on the busiest rank.

    homes: bytes by parameter. trained: of trained ones. buffers: of these, and of the seed of random numbers. added: of gradients
    while they add up. left: of those that add up in their home; a program that brings the first ones home keeps no others. kept: see
    `Kept`. program: by parts of a step, what the program costs that runs these. rise: the most bytes that this has alive besides what
    is there before; whether its gradients are the first ones. adds: seconds in which the gradients of a micro-batch are added to others.
    """

    homes: dict[str, int]
    trained: int
    buffers: int
    added: int
    left: int
    kept: Kept
    program: Callable[[Parts], ProgramCost]
    rise: Callable[[Parts, bool], int]
    adds: float

    def held(self, kind: str) -> int:
        """Returns the bytes of a kind that stays while other programs run: those of `Kept`, or ADDED or LEFT."""
        return int(getattr(self if kind in (ADDED, LEFT) else self.kept, kind))

    @classmethod
    def of(cls, plan: Plan, in_loop: Container[Port], overlaps: bool = True) -> ChunkCost:
        """Measures a chunk by its plan. in_loop: what is boxed for every micro-batch. overlaps: whether anything runs beside computing."""
        return cls.by(ChunkPrograms(plan, in_loop, overlaps))

    @classmethod
    def by(cls, chunk: ChunkPrograms) -> ChunkCost:
        """Measures a chunk by its programs."""
        plan = chunk.plan
        stored = {port: bytes_at(value, plan.given[port], plan.mesh) for port, value in plan.shapes.items()}
        homes = {port.name: size for port, size in stored.items() if port.kind == PARAMETER}
        buffers = sum(size for port, size in stored.items() if port.kind in (BUFFER, SEED))
        trained = sum(homes[port.name] for port in plan.ports.outputs if port.kind == GRADIENT)
        sums = dict.fromkeys(chunk.homes.values())
        size = {node: bytes_at(node.meta["val"], layout_at(node), plan.mesh) for node in sums}
        left = sum(size[node] for node in sums if node in chunk.homes)

        @functools.cache
        def program(which: Parts) -> ProgramCost:
            return ProgramCost.of(chunk, which) if which else ProgramCost()

        @functools.cache
        def most(which: Parts, first: bool) -> int:
            return rise(chunk, which, chunk.program(which, not first).gm)

        return cls(
            homes, trained, buffers, sum(size.values()), left, Kept.by(chunk), lambda which: program(chunk.of(which)),
            lambda which, first: most(which, first and bool(chunk.makes(which))),
            compute_totals(Counter(map(sum_kernel, sums)), plan.mesh)[0],
        )  # fmt: skip


def costs_of(chunks: Sequence[Chunk], in_loop: Container[Port], programs: Sequence[ChunkPrograms]) -> list[ChunkCost]:
    """Returns what chunks of one model cost. Those that are alike, as equal blocks are, are measured once."""
    known, costs, numbers = dict[Hashable, ChunkCost](), list[ChunkCost](), Numbers()
    for at, chunk in enumerate(chunks):
        key = likeness(chunk, in_loop, numbers)
        if key not in known:
            known[key] = ChunkCost.by(programs[at])
        names = [port.name for port in chunk.ports.inputs if port.kind == PARAMETER]
        costs.append(replace(known[key], homes=dict(zip(names, known[key].homes.values(), strict=True))))
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
    """Returns what is equal for chunks that cost the same: calls in order, with shapes, layouts and what is in the loop, but no names."""
    number = {node: at for at, node in enumerate(chunk.graph.graph.nodes)}
    kinds = {node: (port.kind, port in in_loop) for port, node in placeholders(chunk.graph).items()}
    choices, aliases = chunk.assignment.choices, chunk.assignment.aliases

    def about(node: Node) -> Hashable:
        called = node.target if node.op == "call_function" else kinds.get(node)
        read = repr(map_arg((node.args, node.kwargs), lambda used: f"%{number[used]}"))
        values = tuple((v.dtype, tuple(v.shape), v.stride()) for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor))
        producer, index = value_of(node)
        layouts = numbers.of(choices.get(node.name)), numbers.of(aliases.get((producer.name, index)))
        return called, read, values, node.meta.get("phase"), *layouts, is_recomputed(node)

    ends = [(port.kind, port in in_loop, layout) for port, layout in chunk.left.items()]
    return tuple(map(about, chunk.graph.graph.nodes)), tuple(ends)


def together(costs: Sequence[ChunkCost]) -> ChunkCost:
    """Returns the cost of pieces of a model that run one after the other, and back again."""

    @functools.cache
    def program(which: Parts) -> ProgramCost:
        each = [cost.program(which) for cost in costs]
        seconds = sum(one.seconds for one in each)
        for side, main in ((BEFORE, FORWARD), (AFTER, WEIGHTS)):
            if side in which and main in which:
                seconds = beside(costs, which, side)
        sent = sum((one.sent for one in each), Counter[str]())
        compute, comm, flops, whole, again = (
            sum(getattr(one, name) for one in each) for name in ("compute", "comm", "flops", "flops_one_device", "again")
        )
        return ProgramCost(seconds, compute, comm, flops, whole, again, sent)

    @functools.cache
    def most(which: Parts, first: bool) -> int:
        left = [
            (FORWARD in which) * cost.kept.saved + (BEFORE in which) * cost.kept.gathered + (AFTER in which) * cost.kept.home
            + (first and WEIGHTS in which) * (cost.left if AFTER in which else cost.added)
            for cost in costs
        ]  # fmt: skip
        return sum(left) + max(cost.rise(which, first) - stays for cost, stays in zip(costs, left))

    homes = {"": sum(sum(cost.homes.values()) for cost in costs)}
    kept = Kept(*(sum(getattr(cost.kept, name) for cost in costs) for name in ("gathered", "saved", "handed", "home")))
    trained, buffers, added, left = (sum(getattr(cost, name) for cost in costs) for name in ("trained", "buffers", "added", "left"))
    return ChunkCost(homes, trained, buffers, added, left, kept, program, most, sum(cost.adds for cost in costs))


def beside(costs: Sequence[ChunkCost], which: Parts, side: str) -> float:
    """Returns the seconds of a program of pieces in which one part, collectives alone, runs beside the others.

    A backward goes from the last piece to the first, and what it sends home is in flight while the next one is computed. A forward
    with what is gathered for it is the same, seen from its end.
    """
    now = sent = 0.0
    for cost in reversed(costs):
        alone = cost.program((side,)).seconds
        sent = max(sent, now + cost.program(which).seconds - alone) + alone
        now += cost.program(tuple(part for part in which if part != side)).seconds
    return max(now, sent)
