"""Take each rank's own rows of a batch to where its plan takes them, and the rows of results back: `inputs="data"`.

Whatever the ranks have in all is the batch, in the order of their places on the named axes. Where they hold as many
rows as the plan cuts for them, nothing is sent but their number.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from sbpc.errors import PlanError
from sbpc.graph.ports import INPUT
from sbpc.mesh.layout import Layout, chunk
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import layout_of_rows, leaves_with_rows
from sbpc.runtime.start import lost_ranks, process_groups

Spans = tuple[tuple[int, int], ...]  # by rank: the first row, and how many
UNEQUAL = -1


@dataclass(frozen=True)
class Rows:
    """The rows of one batch. spans: those that each rank gives. beside: the ranks that share the batch with this
    one. total: how many there are. results: which results have rows, by their structure, as first seen."""

    mesh: Mesh
    spans: Spans
    beside: frozenset[int]
    total: int
    results: dict[str, list[bool]]

    def planned(self, layout: Layout) -> Spans:
        """Returns the rows that each rank has of a batch in a layout, one of a stage's mesh where it is whole."""
        cuts = layout.cuts.get(0, ())
        places = map(self.mesh.coordinates, range(self.mesh.ranks))
        return tuple(chunk(self.total, cuts, self.mesh.sizes, place) for place in places)

    def given(self, own: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's shard in a layout, of all ranks' own rows."""
        return self.moved(own, self.spans, self.planned(layout))

    def left(self, shards: Sequence[Any], layouts: Sequence[Layout], structure: Any) -> list[Any]:
        """Returns this rank's own rows of results in some layouts; results without the rows of the batch as they are.

        Those have rows that are as long as the batch in the first call with results of this structure: one that is so
        long in a later call by chance stays whole. Raises PlanError for one that no longer is.
        """
        has = [
            isinstance(shard, Tensor) and shard.dim() > 0 and shard.shape[0] == self.planned(layout)[dist.get_rank()][1]
            for shard, layout in zip(shards, layouts)
        ]
        known = self.results.setdefault(repr(structure), has)
        lost = [at for at, pair in enumerate(zip(known, has)) if pair == (True, False)]
        if lost:
            raise PlanError(
                f"result {lost[0]} was as long as the batch in the first call, and of a batch of {self.total} rows it "
                "is not: a rank got some of it there\n"
                "  Give it another shape, such as [1, n], or say outputs=[...], a layout for each result."
            )
        whole = ((0, self.total),) * self.mesh.ranks
        return [
            self.moved(shard, self.planned(layout), self.spans if own else whole) if as_long else shard
            for shard, layout, as_long, own in zip(shards, layouts, has, known)
        ]

    def moved(self, rows: Tensor, have: Spans, want: Spans) -> Tensor:
        """Returns the rows that this rank wants of those that the ranks have."""
        if have == want:
            return rows
        moved: Tensor = Moved.apply(rows, have, want, self.beside)
        return moved


class OwnRows:
    """Finds out at every call how many rows each rank gives, and whether all make the same call. names: the axes that
    share rows, None where all ranks give the same."""

    def __init__(self, names: str | None, mesh: Mesh) -> None:
        self.names, self.mesh = names, mesh
        axes = () if names is None else layout_of_rows(names, mesh).cuts.get(0, ())
        self.places = [tuple(mesh.coordinates(rank)[axis] for axis in axes) for rank in range(mesh.ranks)]
        others = [axis for axis in range(len(mesh.axes)) if axis not in axes]
        self.others = [tuple(mesh.coordinates(rank)[axis] for axis in others) for rank in range(mesh.ranks)]
        self.group = process_groups.everyone() if mesh.ranks > 1 else None
        self.results: dict[str, list[bool]] = {}

    def of(self, leaves: Sequence[Tensor], has_rows: Sequence[bool], about: Any) -> Rows:
        """Returns the rows of a call. has_rows: which of its tensors have them. about: what else is to be the same on
        all ranks. Every rank must call this at the same point.

        Raises PlanError, the same on all ranks, where their arguments do not go together.
        """
        counts = [leaf.shape[0] for leaf, has in zip(leaves, has_rows) if has and not isinstance(leaf, DTensor)]
        rows = counts[0] if len({*counts}) == 1 else UNEQUAL if counts else 0
        kinds = [
            (str(leaf.dtype), leaf.requires_grad, tuple(leaf.shape)[has and not isinstance(leaf, DTensor) :])
            for leaf, has in zip(leaves, has_rows)
        ]
        by_rank = self.everywhere(rows, [kinds, about])
        first: dict[Any, int] = {}
        for rank, count in enumerate(by_rank):
            if count == UNEQUAL:
                what = f"the tensors that rank {rank} gives have other numbers of rows than each other: {counts}"
                raise PlanError(f"{what}\n  {self.told}.")
            if count != by_rank[first.setdefault(self.places[rank], rank)]:
                before = first[self.places[rank]]
                what = f"rank {before} gives {by_rank[before]} rows, rank {rank} {count}, and both share one place"
                raise PlanError(f"{what} on inputs={self.names!r}\n  Give both the same rows of the same batch.")
        by_place = {place: by_rank[rank] for place, rank in sorted(first.items())}
        starts, total = {}, 0
        for place, count in by_place.items():
            starts[place], total = total, total + count
        spans = tuple((starts[place], by_place[place]) for place in self.places)
        me = self.others[dist.get_rank()]
        beside = frozenset(rank for rank, other in enumerate(self.others) if other == me)
        return Rows(self.mesh, spans, beside, total, self.results)

    def everywhere(self, rows: int, about: Any) -> list[int]:
        """Returns the number of rows by rank. about: what is to be the same on all."""
        if self.group is None:
            return [rows]
        mine = torch.tensor([rows, zlib.crc32(repr(about).encode())])
        found = [torch.empty_like(mine) for _ in range(self.mesh.ranks)]
        with lost_ranks.watched("a call"):
            dist.all_gather(found, mine, self.group)
        for rank, each in enumerate(found):
            if each[1] != found[0][1]:
                there = process_groups.from_all_ranks(about, self.group)
                what = (
                    f"rank {rank} gives other arguments than rank 0\n  rank 0: {there[0]}\n  rank {rank}: {there[rank]}"
                )
                raise PlanError(f"{what}\n  {self.told}.")
        return [int(each[0]) for each in found]

    @property
    def told(self) -> str:
        """What says which tensors have rows, and how to say it otherwise."""
        if self.names is None:
            return "Give the same batch on all ranks, in the same mode"
        return (
            "Give as many rows of each, and all else alike on all ranks. Rows have the tensors whose dim 0 was as long "
            "as that of the first one when planned; a list of layouts, inputs=[...], says it tensor by tensor"
        )


def inputs_with_rows(plan: Any) -> list[bool]:
    """Returns of which arguments of a plan each rank gives its own rows."""
    shapes = [value.shape for port, value in plan.shapes.items() if port.kind == INPUT]
    return [False] * len(shapes) if plan.options.own_rows is None else leaves_with_rows(shapes)


def check_rows_alike(plan: Any, other: Any) -> None:
    """Raises PlanError unless the same arguments have rows in two plans of one module."""
    names, others = plan.options.own_rows, other.options.own_rows
    if names != others:
        raise PlanError(f"plans of one module have inputs={names!r} and inputs={others!r}\n  Give all the same.")
    has = [inputs_with_rows(each) for each in (plan, other)]
    if plan.ports.arguments == other.ports.arguments and has[0] != has[1]:
        at = [one == two for one, two in zip(*has)].index(False)
        raise PlanError(
            f"argument {at} is as long as the batch of one plan by chance, and not as that of another, with "
            f"inputs={names!r}\n  Give that tensor another shape, or leave it in an attribute of the model."
        )


def own_of(plan: Any, batch: Sequence[Tensor], on_first: bool = False) -> list[Tensor]:
    """Returns what this rank gives of a whole batch that every rank has, all of it where it does not give its own rows.

    on_first: the first rank along the axes gives all rows, so that it gets those of all results.
    """
    if plan.options.own_rows is None:
        return list(batch)
    mesh, layout = plan.mesh, layout_of_rows(plan.options.own_rows, plan.mesh)
    place = mesh.coordinates(dist.get_rank())
    others = on_first and any(place[axis] for axis in layout.order)
    pairs = zip(batch, leaves_with_rows([each.shape for each in batch]))
    return [
        each if not has else each[: 0 if others else None] if on_first else layout.shard(each, mesh.sizes, place)
        for each, has in pairs
    ]


class Moved(Function):
    """Rows taken from the ranks that have them to those that want them. Gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, have: Spans, want: Spans, beside: frozenset[int]) -> Tensor:
        """Returns the rows that this rank wants."""
        ctx.ways = want, have, beside
        return exchanged(rows, have, want, beside)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Returns the gradients of the rows that this rank had."""
        return exchanged(grads[0], *ctx.ways), None, None, None


def exchanged(rows: Tensor, have: Spans, want: Spans, beside: frozenset[int]) -> Tensor:
    """Returns the rows that this rank wants of those that it and the ranks beside it have. They go as bytes."""
    me = dist.get_rank()
    (start, count), (first, wanted) = have[me], want[me]
    if all(has[0] <= asks[0] and sum(asks) <= sum(has) for has, asks in zip(have, want)):
        return rows.narrow(0, first - start, wanted).clone()
    ranks, each = range(len(have)), rows[0].nbytes if count else rows.new_empty((1, *rows.shape[1:])).nbytes
    sent = [overlap(have[me], want[rank]) if rank in beside else (0, 0) for rank in ranks]
    come = [overlap(have[rank], want[me])[1] if rank in beside else 0 for rank in ranks]
    data = torch.cat([rows.narrow(0, at - start, size) for at, size in sent if size] or [rows.narrow(0, 0, 0)])
    result = rows.new_empty((wanted, *rows.shape[1:]))
    group = dist.group.WORLD if rows.is_cuda else process_groups.everyone()
    with lost_ranks.watched("the exchange of rows"):
        dist.all_to_all_single(
            as_bytes(result), as_bytes(data), [size * each for size in come], [size * each for _, size in sent], group
        )
    return result


def overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """Returns the rows that two spans share.

    >>> overlap((0, 5), (3, 4)), overlap((0, 2), (3, 4))
    ((3, 2), (3, 0))
    """
    first = max(one[0], other[0])
    return first, max(0, min(sum(one), sum(other)) - first)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a tensor as a vector of bytes, whatever its dtype: its memory, where it is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)
