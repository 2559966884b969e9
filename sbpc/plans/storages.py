"""The storages that the calls of a boxed graph read and make on the busiest rank.

A storage is counted once however many values share it: a view, a boxing that changes nothing. It lives from the call
that makes it to the last one that reads a value in it. What the caller holds (parameters, inputs) lives throughout,
results to the end. A boxing step is counted as it is emitted: with its padded, gathered and reordered copies.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from sbpc._compat import storage_of, tree_leaves
from sbpc.boxing.lower import lower
from sbpc.boxing.steps import Step
from sbpc.graph.about import is_boxing
from sbpc.graph.operands import is_sum, nodes_in, operands, value_of
from sbpc.mesh.layout import Layout, chunk, numel
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.routing import ANY
from sbpc.plans.written_calls import written

CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
POSITION = 8  # bytes of a rank's position on one axis
# copy all memory that their first operand is a view of
WHOLE = torch.ops.aten.slice_scatter.default, torch.ops.aten.select_scatter.default


def local_bytes(node: Node, mesh: Mesh) -> int:
    """Returns the bytes of all outputs of a node on the rank at the origin."""
    return sum(sizes_of(node, mesh))


def sizes_of(node: Node, mesh: Mesh) -> list[int]:
    """Returns the bytes of each output of a node on the rank at the origin."""
    value, sbp = node.meta.get("val"), node.meta.get("sbp")
    pairs = zip(value, sbp) if isinstance(value, (tuple, list)) and isinstance(sbp, tuple) else [(value, sbp)]
    return [
        shard_bytes(layout, v.shape, v.dtype, mesh.sizes, mesh.routing.most)
        if isinstance(v, torch.Tensor) and isinstance(layout, Layout)
        else 0
        for v, layout in pairs
    ]


@functools.lru_cache(maxsize=1 << 14)
def shard_bytes(
    layout: Layout, shape: tuple[int, ...], dtype: torch.dtype, sizes: tuple[int, ...], most: float = ANY
) -> int:
    """Returns the bytes of the largest shard of a tensor. most: times the mean, of rows that are shared out."""
    return dtype.itemsize * int(numel(*layout.busiest(shape, sizes, most), sizes))


class Moment(NamedTuple):
    """One call: the storages that it reads, and those that it makes, with their bytes."""

    node: Node
    reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]


class Sent(NamedTuple):
    """Where the calls of a node that sends something are cut if it is waited for apart. at: how many of them run
    before that. wait: reads what is read until then. gives: the storages of its results. step: what goes in a message
    with others; None of rows of experts, and of what sends nothing."""

    at: int
    wait: Moment
    gives: tuple[int, ...]
    step: Step | None


class Storages:
    """The storages of a boxed graph, and which of them its calls read and make, in whatever order these run.

    size, owner: by storage. values: by node the storages of its outputs, of one that another waits for those before
    that. moments: by node its calls. sent: of those that send something. kept: what is alive at the end.
    """

    def __init__(self, boxed: GraphModule, mesh: Mesh) -> None:
        self.mesh = mesh
        self.size, self.owner = list[int](), list[Node]()
        self.values = values = dict[Node, tuple[int, ...]]()
        self.moments = dict[Node, list[Moment]]()
        self.sent, self.kept = dict[Node, Sent](), set[int]()
        for node in boxed.graph.nodes:
            self.moments[node] = []
            reads = tuple(chain.from_iterable(values[used] for used in node.all_input_nodes))
            if node.op == "output":
                self.kept.update(chain.from_iterable(values[used] for used in nodes_in(node.args)))
            elif "step" in node.meta:
                values[node] = self.add_boxing(node, reads[0])
            elif "awaits" in node.meta:
                start = node.all_input_nodes[0]
                values[node] = self.sent[start].gives if start in self.sent else values[start]
            elif node.target is operator.getitem:
                values[node] = (reads[int(node.args[1])],)
                self.add_call(node, reads, ())
            elif is_view(node):
                values[node] = values[operands(node)[0]][:1] * len(sizes_of(node, mesh))
                self.add_call(node, reads, ())
            else:
                sizes = sizes_of(node, mesh)
                sizes = [max(self.size[reads[0]], *sizes)] if node.target in WHOLE else sizes
                calls, reads = written(node, mesh), self.add_copies(node, reads)
                values[node] = self.add_call(node, reads, sizes) if calls is None else self.add_written(node, *calls)
                if node.op == "placeholder":
                    self.kept.add(values[node][0])

    def add_call(self, node: Node, reads: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Adds a call that makes storages of these sizes, and returns their numbers. Those behind a wait are the
        calls of the node that waits."""
        first = len(self.size)
        made = tuple(range(first, first + len(sizes)))
        self.moments[node].append(Moment(node, tuple(reads), tuple(zip(made, sizes))))
        self.size += sizes
        self.owner += [node] * len(sizes)
        return made

    def add_copies(self, node: Node, reads: tuple[int, ...]) -> tuple[int, ...]:
        """Adds the copies of operands that are laid out as when captured, since the op may read strides: one without
        a rule, or with one of the user's. Returns what it reads."""
        match = node.meta.get("match")
        if node.op != "call_function" or (match is not None and not match.entry.source):
            return reads
        found: tuple[int, ...] = ()
        for operand in operands(node):
            lies = self.values[operand]
            found += self.add_call(node, lies, sizes_of(operand, self.mesh)) if moved_in_memory(operand) else lies
        return found

    def add_written(
        self, node: Node, calls: Sequence[tuple[Sequence[int], Sequence[int]]], results: Sequence[int], wait: int | None
    ) -> tuple[int, ...]:
        """Adds the calls that are written for one, and returns the storages of its results."""
        storages = [self.values[operand][0] for operand in operands(node)]
        for reads, sizes in calls:
            storages += self.add_call(node, [storages[at] for at in reads], sizes)
        gives = tuple(storages[at] for at in results)
        if wait is None:
            return gives
        before = len(self.moments[node]) - len(calls) + wait
        read, left = (tuple(storages[at] for at in calls[each][0]) for each in (wait - 1, wait))
        return self.cut(node, before, read, left, gives)

    def add_boxing(self, node: Node, source: int) -> tuple[int, ...]:
        """Adds the calls of a boxing step, and returns the storage of its result."""
        calls, storages = self.calls_of(node), [source]
        for call in calls:
            storages += self.add_call(node, [storages[at] for at in call.reads], call.makes)
        at, gives = wait_at(calls), (storages[calls[-1].result],)
        left, given = storages[calls[at - 1].result], (storages[each] for each in calls[at - 1].reads)
        return self.cut(node, at, (left, *given), (left,), gives, node.meta["step"] if at < len(calls) else None)

    def cut(
        self,
        node: Node,
        at: int,
        read: tuple[int, ...],
        left: tuple[int, ...],
        gives: tuple[int, ...],
        step: Step | None = None,
    ) -> tuple[int, ...]:
        """Notes where the calls of a node are cut by a wait, and returns the storages of its results, or `left`, what
        it has made before that, if a node waits for it. read: up to the wait."""
        end = next((user for user in node.users if "awaits" in user.meta), node)
        self.sent[node] = Sent(at, Moment(end, read, ()), gives, step)
        if end is node:
            return gives
        self.moments[node][at:] = [Moment(end, each.reads, each.makes) for each in self.moments[node][at:]]
        for storage, _ in chain.from_iterable(each.makes for each in self.moments[node][at:]):
            self.owner[storage] = end
        return left

    def calls_of(self, node: Node) -> Sequence[Emitted]:
        """Returns the calls of a boxing step that begins at a node. What it sends is copied before, unless its
        elements lie in order."""
        source, value, mesh = node.all_input_nodes[0], node.meta["val"], self.mesh
        while is_boxing(source) and self.values[source] == self.values[source.all_input_nodes[0]]:
            source = source.all_input_nodes[0]
        in_order = is_boxing(source) or lies_in_order(source)
        return emitted(node.meta["step"], tuple(value.shape), value.dtype, mesh, in_order, mesh.routing.most)


def lies_in_order(node: Node) -> bool:
    """Returns whether the elements of what a call gives lie in memory in order on a rank: as when captured, but for
    the backward of a convolution over one dim, which is given its weight in order."""
    value = node.meta["val"]
    return value.is_contiguous() or (value.dim() == 3 and value_of(node)[0].target is CONVOLUTION_BACKWARD)


def moved_in_memory(operand: Node) -> bool:
    """Returns whether the dims of an operand lie in memory in another order than when captured, or with gaps."""
    value = operand.meta["val"]
    dims = range(value.dim())
    order = dims if value.is_contiguous() else sorted(dims, key=lambda dim: -value.stride(dim))
    held = torch.empty(value.shape, device="meta") if is_boxing(operand) else value
    return not held.permute([*order]).is_contiguous()


def is_view(node: Node) -> bool:
    """Returns whether what a call gives lies in the memory of its first operand: a view, or a sum to which it adds."""
    match = node.meta.get("match")
    return is_sum(node) or (node.op == "call_function" and match is not None and match.view and bool(operands(node)))


@dataclass(frozen=True)
class Emitted:
    """One call of a boxing step: which storages it reads (0 is the step's own operand), the bytes of those it makes
    (numbered on), in which storage its result lies, and whether it waits for the collective before it."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    result: int
    waits: bool = False


def wait_at(calls: Sequence[Emitted]) -> int:
    """Returns the number of the call that waits for the collective; that after the last if there is none."""
    return next((at for at, call in enumerate(calls) if call.waits), len(calls))


@functools.lru_cache(maxsize=1 << 14)
def emitted(
    step: Step, shape: tuple[int, ...], dtype: torch.dtype, mesh: Mesh, in_order: bool = True, most: float = ANY
) -> tuple[Emitted, ...]:
    """Returns the calls that `lower` emits for a step on the rank at the origin. They run on tensors without data.

    in_order: whether the elements of the step's operand lie in its memory in order. most: see `Routing`.
    """
    origin = (0,) * len(mesh.sizes)
    sized, cuts = step.before.busiest(shape, mesh.sizes, most)
    local = tuple(chunk(size, axes, mesh.sizes, origin)[1] for size, axes in zip(sized, cuts))
    x = torch.empty(local if in_order else (), dtype=dtype, device="meta").expand(local)
    positions = [torch.zeros(1, dtype=torch.int64, device="meta") for _ in mesh.sizes]
    numbers = {storage_of(x): 0}  # of storages
    calls: list[Emitted] = []
    alive = [x]  # all tensors, so that no storage's address is used twice

    def call(op: Any, *args: Any, **kwargs: Any) -> Any:
        given = [storage_of(value) for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
        reads = tuple(dict.fromkeys(numbers[storage] for storage in given if storage in numbers))
        waits = "wait_tensor" in str(op)
        out = args[0] if waits else op(*args, **kwargs)
        storage = storage_of(out)
        makes: tuple[int, ...] = ()
        if storage not in numbers and storage not in map(storage_of, positions):
            numbers[storage] = len(numbers)
            makes = (out.untyped_storage().nbytes(),)
        alive.append(out)
        calls.append(Emitted(reads, makes, numbers.get(storage, 0), waits))
        return out

    result = numbers[storage_of(lower(step, x, call, shape, mesh.sizes, origin, positions, mesh.group_name, dtype))]
    if not calls or calls[-1].result != result:
        calls.append(Emitted((result,), (), result))
    return tuple(calls)
