"""Run all ranks in one process: one fx program per rank in lockstep, with collectives as plain Python over the ranks.

Each rank runs up to its next collective, which is done once all ranks of its group have reached it. No process group
and no cost model is needed: bytes are counted message by message as a ring would send them, memory storage by storage.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from sbpc._compat import tree_leaves
from sbpc.errors import RoutingError, VerifyError, at_node, where
from sbpc.graph.flex import DENSE
from sbpc.graph.held_bytes import held_bytes
from sbpc.mesh.states import REDUCE
from sbpc.rules.strides import laid_out

c10d = torch.ops._c10d_functional
Groups = Mapping[str, Sequence[Sequence[int]]]  # by the name in the programs, the ranks of each group in order
Collective = Callable[[list[Tensor], list[tuple[Any, ...]]], tuple[list[Tensor], int]]
REPORT = "All ranks of a group run the same collectives in the same order: mend the pass that wrote these programs."


@dataclass(frozen=True)
class LockstepResult:
    """The flat outputs of every rank; of the busiest rank, the bytes sent by group name and the peak of live bytes."""

    outputs: list[list[Any]]
    bytes_sent: dict[str, float]
    peak_memory: int


@dataclass(frozen=True)
class PendingCollective:
    """A collective at which a rank waits, with the tensor that it brings and the further arguments."""

    node: Node
    tensor: Tensor
    rest: tuple[Any, ...]

    @property
    def group(self) -> str:
        """Returns the name of the group: the last argument of every functional collective."""
        return self.rest[-1]


def lockstep(
    programs: Sequence[GraphModule], inputs: Sequence[Sequence[Any]], groups: Groups, gpus: bool = False
) -> LockstepResult:
    """Runs one program per rank. gpus: whether it stands for ranks with kernels for what is dense here, so that what
    those calls hold while they run does not count.

    Raises VerifyError where the ranks of a group disagree on a collective, or wait for each other for ever.
    """
    memory = [Memory(gpus) for _ in programs]
    sent: list[Counter[str]] = [Counter() for _ in programs]
    with torch.no_grad():
        ranks = [run_rank(*each) for each in zip(programs, inputs, memory)]
        waiting: dict[int, PendingCollective] = {}
        outputs: dict[int, list[Any]] = {}
        answers: list[tuple[int, Tensor | None]] = [(rank, None) for rank in range(len(programs))]
        while answers:
            for rank, answer in answers:
                try:
                    waiting[rank] = ranks[rank].send(answer)
                except StopIteration as end:
                    outputs[rank] = end.value
            answers = list(meet(waiting, groups, sent))
            for rank, _ in answers:
                del waiting[rank]
    if waiting:
        raise VerifyError(stuck(waiting, outputs))
    peak = max(each.peak for each in memory)
    return LockstepResult([outputs[rank] for rank in range(len(programs))], busiest(sent, groups), peak)


def run_rank(
    gm: GraphModule, inputs: Sequence[Any], memory: Memory
) -> Generator[PendingCollective, Tensor | None, list[Any]]:
    """Interprets one program. It yields each collective, goes on with its result, and returns the flat outputs."""
    places = sum(node.op == "placeholder" for node in gm.graph.nodes)
    if len(inputs) != places:
        raise VerifyError(f"{len(inputs)} inputs for a program with {places} placeholders\n  Give one for each.")
    last = {used: node for node in gm.graph.nodes for used in (*node.all_input_nodes, *given_to(node))}
    values: dict[Node, Any] = {}
    given = iter(inputs)
    for node in gm.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return tree_leaves(args[0])
        if node.op == "placeholder":
            value = next(given)
            memory.hold(value)  # once more, for the caller: inputs stay alive
        elif node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(gm)
        elif node.target in COLLECTIVES:
            value = yield PendingCollective(node, args[0], tuple(args[1:]))
        elif node.target in DENSE and not memory.gpus:
            value, held = held_bytes(run_node, (node, args, kwargs))
            memory.peak = max(memory.peak, memory.live + held)
        else:
            value = run_node(node, args, kwargs)
        values[node] = value
        memory.hold(value)
        for used in dict.fromkeys((node, *node.all_input_nodes, *given_to(node))):
            if last.get(used, node) is node:
                memory.drop(values.pop(used))
    raise AssertionError("a graph without an output node")


def given_to(node: Node) -> list[Node]:
    """Returns what the collective reads that a node waits for: it is alive until then."""
    return node.all_input_nodes[0].all_input_nodes if node.target is c10d.wait_tensor.default else []


def run_node(node: Node, args: Any, kwargs: Any) -> Any:
    """Runs one node that is no collective. Raises VerifyError that names the node if it fails."""
    if node.target is c10d.wait_tensor.default:
        return args[0]
    if node.op != "call_function" or not callable(node.target):
        raise VerifyError(at_node(f"{node.op} is not run in lockstep", node, "Programs hold calls of functions only."))
    if "c10d" in str(node.target):
        known = ", ".join(map(str, COLLECTIVES))
        raise VerifyError(at_node(f"{node.target} is not run in lockstep", node, f"Use one of {known}."))
    try:
        target: Any = DENSE.get(node.target) or laid_out(node.target)
        return target(*args, **kwargs)
    except RoutingError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise VerifyError(at_node(what, node, "Mend the pass that wrote this node.")) from error


class Memory:
    """The live bytes of one rank and their peak. A storage counts once, however many values share it. gpus: as of
    `lockstep`."""

    def __init__(self, gpus: bool = False) -> None:
        self.gpus = gpus
        self.live = self.peak = 0
        self.holders: Counter[int] = Counter()

    def hold(self, value: Any) -> None:
        """Counts the storages of a new value."""
        for storage in storages(value):
            self.holders[storage.data_ptr()] += 1
            self.live += storage.nbytes() if self.holders[storage.data_ptr()] == 1 else 0
        self.peak = max(self.peak, self.live)

    def drop(self, value: Any) -> None:
        """Takes a value back."""
        for storage in storages(value):
            self.holders[storage.data_ptr()] -= 1
            self.live -= storage.nbytes() if self.holders[storage.data_ptr()] == 0 else 0


def storages(value: Any) -> list[torch.UntypedStorage]:
    """Returns the storages of the tensors in a value."""
    return [leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def meet(
    waiting: dict[int, PendingCollective], groups: Groups, sent: list[Counter[str]]
) -> Iterator[tuple[int, Tensor]]:
    """Does every collective at which all ranks of the group wait, and yields the ranks with their results."""
    done: set[int] = set()
    for rank in sorted(waiting):
        call = waiting[rank]
        if rank in done:
            continue
        if call.group not in groups:
            known = ", ".join(groups)
            raise VerifyError(at_node(f"no group is called {call.group!r}", call.node, f"Known are {known}."))
        members = next((list(group) for group in groups[call.group] if rank in group), None)
        if members is None:
            raise VerifyError(at_node(f"rank {rank} is in no group {call.group!r}", call.node, REPORT))
        calls = [waiting[member] for member in members if member in waiting and waiting[member].group == call.group]
        if len(calls) == len(members):
            check(members, calls)
            collective = COLLECTIVES[call.node.target]
            results, total = collective([each.tensor for each in calls], [each.rest for each in calls])
            done.update(members)
            for member, result in zip(members, results):
                sent[member][call.group] += total
                yield member, result


def check(members: Sequence[int], calls: Sequence[PendingCollective]) -> None:
    """Raises VerifyError unless the calls are one legal collective: the same op, arguments, dtype and shape."""
    first, rest, ranks = calls[0], calls[0].rest, len(calls)
    target: Any = first.node.target
    uneven = target is c10d.all_to_all_single.default
    for rank, call in zip(members, calls):
        same = (call.node.target, call.tensor.dtype) == (target, first.tensor.dtype)
        if not uneven:
            same = same and (call.tensor.shape, call.rest) == (first.tensor.shape, rest)
        if not same:
            other = f"rank {rank} is at {call.node.target} of {list(call.tensor.shape)} with {call.rest}"
            what = f"{other}, rank {members[0]} at {target} of {list(first.tensor.shape)} with {rest}"
            raise VerifyError(at_node(f"{what}\n{where(call.node)}", first.node, REPORT))
    sent = [call.rest[1] for call in calls] if uneven else []
    wrong = {
        c10d.all_gather_into_tensor.default: lambda: rest[0] != ranks,
        c10d.all_reduce.default: lambda: rest[0] not in REDUCE,
        c10d.all_to_all_single.default: lambda: any(
            call.rest[0] != [s[at] for s in sent] for at, call in enumerate(calls)
        ),
        c10d.broadcast.default: lambda: not 0 <= rest[0] < ranks,
        c10d.reduce_scatter_tensor.default: lambda: (
            rest[0] not in REDUCE or rest[1] != ranks or first.tensor.shape[0] % ranks != 0
        ),
    }[target]
    if wrong():
        what = f"{target} of {list(first.tensor.shape)} with {rest} does not fit a group of {ranks}"
        raise VerifyError(at_node(what, first.node, REPORT))


def stuck(waiting: Mapping[int, PendingCollective], outputs: Mapping[int, Any]) -> str:
    """Returns the message about ranks that wait for ranks which wait elsewhere or have ended."""
    rank = min(waiting)
    places = [f"rank {other} at %{call.node.name}" for other, call in sorted(waiting.items()) if other != rank]
    places += [f"rank {other} at its end" for other in sorted(outputs)]
    what = f"rank {rank} waits in {waiting[rank].group!r} for ever, with {', '.join(places) or 'no other rank'}"
    return at_node(what, waiting[rank].node, REPORT)


def busiest(sent: Sequence[Counter[str]], groups: Groups) -> dict[str, float]:
    """Returns by group name the bytes of the busiest rank: its group's total divided by the size of the group."""
    most = {}
    for name, members in groups.items():
        size = {rank: len(group) for group in members for rank in group}
        most[name] = max((sent[rank][name] / size[rank] for rank in size), default=0.0)
    return most


# Collectives: the tensors of the ranks of a group, and their arguments -> the results, and the bytes of all messages.


def all_gather(tensors: list[Tensor], rest: list[tuple[Any, ...]]) -> tuple[list[Tensor], int]:
    """Sends every chunk once round the ring: p - 1 messages."""
    return [torch.cat(tensors) for _ in tensors], sum(t.nbytes for t in tensors for _ in tensors[1:])


def all_reduce(tensors: list[Tensor], rest: list[tuple[Any, ...]]) -> tuple[list[Tensor], int]:
    """Reduce-scatters chunks, then all-gathers them: twice p - 1 messages for each chunk."""
    total = reduced(tensors, rest[0][0])
    chunks = total.flatten().chunk(len(tensors))
    return [total.clone() for _ in tensors], sum(2 * chunk.nbytes for chunk in chunks for _ in tensors[1:])


def reduce_scatter(tensors: list[Tensor], rest: list[tuple[Any, ...]]) -> tuple[list[Tensor], int]:
    """Sends every chunk once round the ring, where each rank adds to it: p - 1 messages."""
    ranks = len(tensors)
    chunks = reduced(tensors, rest[0][0]).tensor_split(ranks)
    return [chunk.clone() for chunk in chunks], sum(chunk.nbytes for chunk in chunks for _ in tensors[1:])


def all_to_all(tensors: list[Tensor], rest: list[tuple[Any, ...]]) -> tuple[list[Tensor], int]:
    """Sends one piece from every rank to every other rank."""
    pieces = [tensor.split(splits[1]) for tensor, splits in zip(tensors, rest)]
    total = sum(piece.nbytes for at, row in enumerate(pieces) for to, piece in enumerate(row) if to != at)
    return [torch.cat([row[to] for row in pieces]) for to in range(len(tensors))], total


def broadcast(tensors: list[Tensor], rest: list[tuple[Any, ...]]) -> tuple[list[Tensor], int]:
    """Sends one rank's tensor once round the ring."""
    source = tensors[rest[0][0]]
    return [source.clone() for _ in tensors], sum(source.nbytes for _ in tensors[1:])


def reduced(tensors: list[Tensor], op: str) -> Tensor:
    """Returns the elementwise sum, max or min."""
    combine: Any = REDUCE[op]
    return functools.reduce(combine, tensors[1:], tensors[0].clone())


COLLECTIVES: dict[Any, Collective] = {
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.all_reduce.default: all_reduce,
    c10d.all_to_all_single.default: all_to_all,
    c10d.broadcast.default: broadcast,
    c10d.reduce_scatter_tensor.default: reduce_scatter,
}
