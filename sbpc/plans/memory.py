"""Counts the bytes that are alive on the busiest rank at every moment of a step, from the boxed graph alone.

A storage is counted once however many values share it: a view, a boxing that changes nothing. It lives from the call
that makes it to the last one that reads a value in it. What the caller holds (parameters, inputs) lives throughout,
results to the end. A boxing step is counted as it is emitted: with its padded, gathered and reordered copies.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

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


@dataclass
class Moment:
    """One call: the storages that it reads, and those that it makes, with their bytes."""

    node: Node
    reads: tuple[int, ...]
    makes: tuple[tuple[int, int], ...]


@dataclass
class SharedBuffer:
    """The memory of collectives that go in one message. missing: how many of them have not started. sent, received:
    bytes so far. operands: the storages that it is joined from. joined, result: its own, before and after. ended:
    whether one was waited for.
    """

    missing: int
    sent: int = 0
    received: int = 0
    operands: list[int] = field(default_factory=list)
    joined: int = 0
    result: int = 0
    ended: bool = False


@dataclass
class Life:
    """All moments of a step.

    size, owner, last: by storage its bytes, the node that made it, and the last moment at which it is alive. live:
    bytes at each moment. values: by node the storages of its outputs. flying: by boxing its storages. buckets: by
    name. saved: bytes alive just before the backward begins, 0 where there is none.
    """

    moments: list[Moment] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    owner: list[Node] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    values: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    flying: dict[Node, list[int]] = field(default_factory=dict)
    buckets: dict[str, SharedBuffer] = field(default_factory=dict)
    saved: int = 0

    @property
    def peak(self) -> int:
        """The most bytes alive at any moment."""
        return max(self.live, default=0)

    @classmethod
    def of(cls, boxed: GraphModule, mesh: Mesh) -> Life:
        """Replays a boxed graph."""
        life = cls()
        values = life.values
        starts = Counter(node.meta["bucket"] for node in boxed.graph.nodes if "bucket" in node.meta)
        life.buckets = {name: SharedBuffer(count) for name, count in starts.items()}
        for node in boxed.graph.nodes:
            reads = tuple(chain.from_iterable(values[used] for used in node.all_input_nodes))
            if node.op == "output":
                for storage in chain.from_iterable(values[used] for used in nodes_in(node.args)):
                    life.last[storage] = math.inf
            elif "step" in node.meta:
                values[node] = (life.add_boxing(node, reads[0], mesh),)
            elif "awaits" in node.meta:
                values[node] = (life.end_boxing(node, reads[0], mesh),)
            elif node.target is operator.getitem:
                values[node] = (reads[int(node.args[1])],)
                life.add_call(node, reads, ())
            elif is_view(node):
                values[node] = values[operands(node)[0]][:1] * len(sizes_of(node, mesh))
                life.add_call(node, reads, ())
            else:
                sizes = sizes_of(node, mesh)
                sizes = [max(life.size[reads[0]], *sizes)] if node.target in WHOLE else sizes
                calls, reads = written(node, mesh), life.add_copies(node, reads, mesh)
                values[node] = life.add_call(node, reads, sizes) if calls is None else life.add_written(node, *calls)
                if node.op == "placeholder":
                    life.last[values[node][0]] = math.inf
        life.count(POSITION * len(mesh.axes))
        return life

    def add_call(self, node: Node, reads: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """Adds a call that makes storages of these sizes, and returns their numbers."""
        at, first = len(self.moments), len(self.size)
        made = tuple(range(first, first + len(sizes)))
        self.moments.append(Moment(node, tuple(reads), tuple(zip(made, sizes))))
        self.size += sizes
        self.owner += [node] * len(sizes)
        self.last += [at] * len(sizes)
        for storage in reads:
            self.last[storage] = max(self.last[storage], at)
        return made

    def add_copies(self, node: Node, reads: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """Adds the copies of operands that are laid out as when captured, since the op may read strides: one without
        a rule, or with one of the user's. Returns what it reads."""
        match = node.meta.get("match")
        if node.op != "call_function" or (match is not None and not match.entry.source):
            return reads
        found: tuple[int, ...] = ()
        for operand in operands(node):
            lies = self.values[operand]
            found += self.add_call(node, lies, sizes_of(operand, mesh)) if moved_in_memory(operand) else lies
        return found

    def add_written(
        self, node: Node, calls: Sequence[tuple[Sequence[int], Sequence[int]]], results: Sequence[int], wait: int | None
    ) -> tuple[int, ...]:
        """Adds the calls that are written for one, up to its wait where that is a node of its own, and returns the
        storages of its results."""
        start = node.all_input_nodes[0] if "awaits" in node.meta else node
        if start is node:
            self.flying[node] = [self.values[operand][0] for operand in operands(node)]
        storages, first, last = self.flying[start], 0, len(calls)
        if wait is not None and start is not node:  # until here what is sent is read
            self.add_call(node, [storages[at] for at in calls[wait - 1][0]], ())
            first = wait
        elif wait is not None and any("awaits" in user.meta for user in node.users):
            last, results = wait, calls[wait][0]
        for reads, sizes in calls[first:last]:
            storages += self.add_call(node, [storages[at] for at in reads], sizes)
        return tuple(storages[at] for at in results)

    def add_boxing(self, node: Node, source: int, mesh: Mesh) -> int:
        """Adds the calls of a boxing step, up to its wait where that is a node of its own. Returns the storage of
        its result."""
        calls = self.calls_of(node, node.meta["step"], mesh)
        awaited = any("awaits" in user.meta for user in node.users)
        storages = self.flying[node] = [source]
        if "bucket" in node.meta:
            return self.add_member(node, calls, storages, self.buckets[node.meta["bucket"]], mesh)
        return self.add_calls(node, calls[: wait_at(calls)] if awaited else calls, storages)

    def calls_of(self, node: Node, step: Step, mesh: Mesh) -> Sequence[Emitted]:
        """Returns the calls of a boxing step that begins at a node. What it sends is copied before, unless its
        elements lie in order."""
        source, value = node.all_input_nodes[0], node.meta["val"]
        while is_boxing(source) and self.values[source] == self.values[source.all_input_nodes[0]]:
            source = source.all_input_nodes[0]
        in_order = is_boxing(source) or lies_in_order(source)
        return emitted(step, tuple(value.shape), value.dtype, mesh, in_order, mesh.routing.most)

    def add_member(
        self, node: Node, calls: Sequence[Emitted], storages: list[int], bucket: SharedBuffer, mesh: Mesh
    ) -> int:
        """Adds the calls of a boxing step up to its collective, which its bucket does. Behind the last of a bucket
        is that."""
        at, step = wait_at(calls) - 1, node.meta["step"]
        result = self.add_calls(node, calls[:at], storages)
        if at < len(calls) - 1:  # else nothing is sent
            received, ranks = sum(calls[at].makes), math.prod(mesh.sizes[axis] for axis in step.axes)
            sent = {"reduce_scatter": received * ranks, "all_gather": received // ranks}.get(step.carrier, received)
            bucket.sent, bucket.received = bucket.sent + sent, bucket.received + received
            bucket.operands += [storages[used] for used in calls[at].reads]
        bucket.missing -= 1
        if not bucket.missing:
            (bucket.joined,) = self.add_call(node, bucket.operands, [bucket.sent])
            (bucket.result,) = self.add_call(node, [bucket.joined], [bucket.received])
        return result

    def end_boxing(self, node: Node, source: int, mesh: Mesh) -> int:
        """Adds the calls of a boxing step from its wait on, and returns the storage of its result.

        Until here the collective reads what it was given; a bucket, what its operands were joined to, up to the
        first wait for it.
        """
        start = node.all_input_nodes[0]
        if "step" not in start.meta and (written_for := written(start, mesh)) is not None:  # an op that sends rows
            return self.add_written(node, *written_for)[0]
        calls = self.calls_of(start, node.meta["awaits"], mesh)
        first = wait_at(calls)
        storages = self.flying[start]
        if "bucket" in start.meta and first < len(calls):
            bucket, received = self.buckets[start.meta["bucket"]], calls[first - 1].makes
            self.add_call(node, [bucket.result] if bucket.ended else [bucket.joined, bucket.result], ())
            bucket.ended = True
            copied = node.meta["awaits"].carrier in ("all_gather", "all_to_all")
            storages += self.add_call(node, [bucket.result], received) if copied else [bucket.result]
            return self.add_calls(node, calls[first:], storages)
        given = [storages[at] for call in calls[first - 1 : first] for at in call.reads]
        self.add_call(node, [source, *given], ())
        return self.add_calls(node, calls[first:], storages)

    def add_calls(self, node: Node, calls: Sequence[Emitted], storages: list[int]) -> int:
        """Adds calls of a boxing step, and returns the storage of the last one's result. storages: those of the step
        so far."""
        result = 0
        for call in calls:
            storages += self.add_call(node, [storages[at] for at in call.reads], call.makes)
            result = call.result
        return storages[result]

    def count(self, always: int) -> None:
        """Counts the bytes alive at every moment, `always` of them throughout."""
        dying: dict[float, int] = {}
        for size, last in zip(self.size, self.last):
            dying[last] = dying.get(last, 0) + size
        live, turn = always, turn_of([phase_of(moment.node) for moment in self.moments])
        for at, moment in enumerate(self.moments):
            if at == turn:
                self.saved = live - always
            live += sum(size for _, size in moment.makes)
            self.live.append(live)
            live -= dying.get(at, 0)

    def alive(self, at: int) -> list[int]:
        """Returns the storages that are alive at a moment."""
        made = (storage for moment in self.moments[: at + 1] for storage, _ in moment.makes)
        return [storage for storage in made if self.last[storage] >= at]

    def at_peak(self) -> Iterator[tuple[Node, int]]:
        """Yields what is alive at the peak: the node that made it, and its bytes."""
        for storage in self.alive(self.live.index(self.peak)):
            yield self.owner[storage], self.size[storage]


def phase_of(node: Node) -> str:
    """Returns the phase of a call; what is stored is there before the forward."""
    return "stored" if node.op == "placeholder" else str(node.meta.get("phase", "forward"))


def turn_of(phases: Sequence[str]) -> int | None:
    """Returns the moment at which the backward begins: fewest calls of it stand before, and of the forward behind.
    None without one.

    A schedule may start early what the backward only sends, and end late what the forward only sends.

    >>> turn_of(["stored", "backward", "forward", "forward", "backward", "forward", "backward"])
    4
    """
    misplaced = list(accumulate(({"forward": -1, "backward": 1}.get(phase, 0) for phase in phases), initial=0))
    return misplaced.index(min(misplaced)) if "backward" in phases else None


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
