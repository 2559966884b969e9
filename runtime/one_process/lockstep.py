"""All ranks in one process: one fx program per rank, run in lockstep, with collectives as plain Python over the ranks.

It needs no process group and no cost model: bytes are counted message by message as a ring would send them, memory
storage by storage. Each rank runs up to its next collective; once all ranks of a group stand at it, it is done.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from sbpc.errors import VerifyError, at_node, where
from sbpc.mesh.states import REDUCE

c10d = torch.ops._c10d_functional
REPORT = "All ranks of a group run the same collectives in the same order: mend the pass that wrote these programs."


@dataclass(frozen=True)
class Run:
    """The flat outputs of every rank; of the busiest rank, the bytes sent by group name and the peak of live bytes."""

    outputs: list[list[Any]]
    bytes_sent: dict[str, float]
    peak_memory: int


@dataclass(frozen=True)
class Call:
    """A collective at which a rank stands, with the tensor it brings."""

    node: Node
    tensor: Tensor
    rest: tuple[Any, ...]

    @property
    def group(self) -> str:
        """The name of the group: the last argument of every functional collective."""
        return self.rest[-1]


def lockstep(
    programs: Sequence[GraphModule],
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[str, Sequence[Sequence[int]]],
) -> Run:
    """Run one program per rank; `groups` gives, by the name in the programs, the ranks of each group in order.

    Raises VerifyError where the ranks of a group disagree on a collective, or wait for each other for ever.
    """
    memory = [Memory() for _ in programs]
    sent: list[Counter[str]] = [Counter() for _ in programs]
    with torch.no_grad():
        ranks = [run_rank(*each) for each in zip(programs, inputs, memory)]
        waiting: dict[int, Call] = {}
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
    return Run([outputs[rank] for rank in range(len(programs))], busiest(sent, groups), max(m.peak for m in memory))


def run_rank(gm: GraphModule, inputs: Sequence[Any], memory: Memory) -> Generator[Call, Tensor | None, list[Any]]:
    """Interpret one program, yielding at each collective and going on with its result; returns the flat outputs."""
    places = sum(node.op == "placeholder" for node in gm.graph.nodes)
    if len(inputs) != places:
        raise VerifyError(f"{len(inputs)} inputs for a program with {places} placeholders\n  Give one for each.")
    last = {used: node for node in gm.graph.nodes for used in node.all_input_nodes}
    values: dict[Node, Any] = {}
    given = iter(inputs)
    for node in gm.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return list(leaves(args[0]))
        if node.op == "placeholder":
            value = next(given)
            memory.hold(value)  # once more, for the caller: inputs stay alive
        elif node.op == "get_attr":
            value = attribute(gm, node)
        elif node.target in COLLECTIVES:
            value = yield Call(node, args[0], tuple(args[1:]))
        else:
            value = run_node(node, args, kwargs)
        values[node] = value
        memory.hold(value)
        for used in dict.fromkeys((node, *node.all_input_nodes)):
            if last.get(used, node) is node:
                memory.drop(values.pop(used))
    raise AssertionError("a graph without an output node")


def run_node(node: Node, args: Any, kwargs: Any) -> Any:
    """Run one node that is no collective, and say which one it was if it fails."""
    if node.target is c10d.wait_tensor.default:
        return args[0]
    if node.op != "call_function" or not callable(node.target):
        raise VerifyError(at_node(f"{node.op} is not run in lockstep", node, "Programs hold calls of functions only."))
    if "c10d" in str(node.target):
        known = ", ".join(map(str, COLLECTIVES))
        raise VerifyError(at_node(f"{node.target} is not run in lockstep", node, f"Use one of {known}."))
    try:
        return node.target(*args, **kwargs)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise VerifyError(at_node(what, node, "Mend the pass that wrote this node.")) from error


def attribute(gm: GraphModule, node: Node) -> Any:
    """The value that a get_attr node names."""
    value: Any = gm
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested tuples and lists, in order."""
    if isinstance(value, (tuple, list)):
        yield from itertools.chain.from_iterable(map(leaves, value))
    else:
        yield value


class Memory:
    """The live bytes of one rank, each storage counted once however many values share it, and their peak."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.holders: Counter[int] = Counter()

    def hold(self, value: Any) -> None:
        """Count the storages of a new value."""
        for tensor in leaves(value):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.holders[storage.data_ptr()] += 1
                self.live += storage.nbytes() if self.holders[storage.data_ptr()] == 1 else 0
        self.peak = max(self.peak, self.live)

    def drop(self, value: Any) -> None:
        """Take a value back."""
        for tensor in leaves(value):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.holders[storage.data_ptr()] -= 1
                self.live -= storage.nbytes() if self.holders[storage.data_ptr()] == 0 else 0


def meet(
    waiting: dict[int, Call], groups: Mapping[str, Sequence[Sequence[int]]], sent: list[Counter[str]]
) -> Iterator[tuple[int, Tensor]]:
    """Do every collective at which all ranks of the group stand; the ranks with their results."""
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
            results, total = COLLECTIVES[call.node.target](
                [each.tensor for each in calls], [each.rest for each in calls]
            )
            done.update(members)
            for member, result in zip(members, results):
                sent[member][call.group] += total
                yield member, result


def check(members: Sequence[int], calls: Sequence[Call]) -> None:
    """Raise VerifyError unless the calls are one legal collective: the same op, arguments, dtype and shape."""
    first, rest, ranks = calls[0], calls[0].rest, len(calls)
    target: Any = first.node.target
    uneven = target is c10d.all_to_all_single.default
    for rank, call in zip(members, calls):
        same = (call.node.target, call.tensor.dtype) == (target, first.tensor.dtype)
        if not uneven:
            same = same and (call.tensor.shape, call.rest) == (first.tensor.shape, rest)
        if not same:
            found = f"rank {rank} is at {call.node.target} of {list(call.tensor.shape)} with {call.rest}"
            what = f"{found}, rank {members[0]} at {target} of {list(first.tensor.shape)} with {rest}"
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


def stuck(waiting: Mapping[int, Call], outputs: Mapping[int, Any]) -> str:
    """The message about ranks that wait for ranks that stand elsewhere or have ended."""
    rank = min(waiting)
    places = [f"rank {other} at %{call.node.name}" for other, call in sorted(waiting.items()) if other != rank]
    places += [f"rank {other} at its end" for other in sorted(outputs)]
    what = f"rank {rank} waits in {waiting[rank].group!r} for ever, with {', '.join(places) or 'no other rank'}"
    return at_node(what, waiting[rank].node, REPORT)


def busiest(sent: Sequence[Counter[str]], groups: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, float]:
    """By group name, the bytes of the busiest rank: its group's total divided by the size of the group."""
    found = {}
    for name, members in groups.items():
        size = {rank: len(group) for group in members for rank in group}
        found[name] = max((sent[rank][name] / size[rank] for rank in size), default=0.0)
    return found


# The collectives: what the ranks of a group bring, and their arguments -> what they get, and the bytes of all messages.


def all_gather(tensors: list[Tensor], rest: list[tuple[Any, ...]]) -> tuple[list[Tensor], int]:
    """Every chunk goes once round the ring: p - 1 messages."""
    return [torch.cat(tensors) for _ in tensors], sum(t.nbytes for t in tensors for _ in tensors[1:])


def all_reduce(tensors: list[Tensor], rest: list[tuple[Any, ...]]) -> tuple[list[Tensor], int]:
    """A reduce-scatter of chunks, then an all-gather of them: twice p - 1 messages for each chunk."""
    total = reduced(tensors, rest[0][0])
    chunks = total.flatten().chunk(len(tensors))
    return [total.clone() for _ in tensors], sum(2 * chunk.nbytes for chunk in chunks for _ in tensors[1:])


def reduce_scatter(tensors: list[Tensor], rest: list[tuple[Any, ...]]) -> tuple[list[Tensor], int]:
    """Every chunk goes once round the ring, added to on its way: p - 1 messages."""
    ranks = len(tensors)
    chunks = reduced(tensors, rest[0][0]).tensor_split(ranks)
    return [chunk.clone() for chunk in chunks], sum(chunk.nbytes for chunk in chunks for _ in tensors[1:])


def all_to_all(tensors: list[Tensor], rest: list[tuple[Any, ...]]) -> tuple[list[Tensor], int]:
    """Every rank sends one piece to each other rank."""
    pieces = [tensor.split(splits[1]) for tensor, splits in zip(tensors, rest)]
    total = sum(piece.nbytes for at, row in enumerate(pieces) for to, piece in enumerate(row) if to != at)
    return [torch.cat([row[to] for row in pieces]) for to in range(len(tensors))], total


def broadcast(tensors: list[Tensor], rest: list[tuple[Any, ...]]) -> tuple[list[Tensor], int]:
    """One rank's tensor goes once round the ring."""
    source = tensors[rest[0][0]]
    return [source.clone() for _ in tensors], sum(source.nbytes for _ in tensors[1:])


def reduced(tensors: list[Tensor], op: str) -> Tensor:
    """The elementwise sum, max or min."""
    combine: Any = REDUCE[op]
    return functools.reduce(combine, tensors[1:], tensors[0].clone())


COLLECTIVES: dict[Any, Callable[[list[Tensor], list[tuple[Any, ...]]], tuple[list[Tensor], int]]] = {
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.all_reduce.default: all_reduce,
    c10d.all_to_all_single.default: all_to_all,
    c10d.broadcast.default: broadcast,
    c10d.reduce_scatter_tensor.default: reduce_scatter,
}
