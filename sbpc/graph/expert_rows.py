"""Rows that stand group by group, as those of a mixture of experts do, and are cut where the data says: the ops that
take rows there and back, and those by which each rank tells which rows it sends to whom.

`gather_rows` is x[index] and `scatter_rows` adds values[i] to row index[i] of zeros; both know besides that rows stand
in groups that end at `ends`. by_place: the places of the index do (what is gathered, or what is added), else the
rows of which it holds the numbers do. Of both sides one, whose rows stand in groups, is cut where the groups of the
ranks end, and the other one in equal chunks. What a rank holds of the index is all of it. copies: how often a number
stands in the index at most, where that is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sbpc.errors import RoutingError
from sbpc.graph.random_bits import LIBRARY

MOVED = "bool by_place, int? copies=None"
LIBRARY.define(f"gather_rows(Tensor x, Tensor index, Tensor ends, {MOVED}) -> Tensor")
LIBRARY.define(f"scatter_rows(Tensor values, Tensor index, Tensor ends, int size, {MOVED}) -> Tensor")
LIBRARY.define("add_rows(Tensor values, Tensor rows, Tensor held) -> Tensor")
LIBRARY.define("row_count(Tensor x, int dim) -> int")
LIBRARY.define("row_counts(Tensor counts, int most) -> int[]")
LIBRARY.define("rows_of_ranks(Tensor ends, int[] groups, int size, int most) -> Tensor")
LIBRARY.define("rows_within(Tensor ends, Tensor rows, int ranks, str where) -> Tensor")
LIBRARY.define("within_capacity(Tensor ids, int experts, int most) -> (Tensor, Tensor)")
ABOUT = "Tensor index, Tensor ends, Tensor rank, int[] groups, int[] chunks, bool by_place, int size, int most"
LIBRARY.define(f"rows_by_place({ABOUT}) -> (Tensor, Tensor, Tensor)")
PEERS = "Tensor ends, Tensor rank, int[] groups, int size, int most, bool back"
LIBRARY.define(f"rows_of_peers({PEERS}) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(f"rows_by_number({ABOUT}, int held) -> (Tensor, Tensor, Tensor)")


def gather_rows(x: Tensor, index: Tensor, ends: Tensor, by_place: bool, copies: int | None = None) -> Tensor:
    """The rows of x with these numbers."""
    return x[index]


def scatter_rows(
    values: Tensor, index: Tensor, ends: Tensor, size: int, by_place: bool, copies: int | None = None
) -> Tensor:
    """So many rows, each the sum of the values whose index is its number."""
    return values.new_zeros([size, *values.shape[1:]]).index_put_((index,), values, accumulate=True)


def add_rows(values: Tensor, rows: Tensor, held: Tensor) -> Tensor:
    """As many rows as `held` has elements, each the sum of the values for it."""
    return values.new_zeros([len(held), *values.shape[1:]]).index_add_(0, rows, values)


def rows_of_ranks(ends: Tensor, groups: Sequence[int], size: int, most: int) -> Tensor:
    """How many of so many rows each rank has, and behind these how many one may have. groups: so many are those of the
    ranks up to each."""
    if ends.is_meta:
        return torch.empty(len(groups) + 1, dtype=torch.int64, device="meta")
    return torch.tensor([*rows_by_rank(ends, groups, size), most], device=ends.device)


def rows_within(ends: Tensor, rows: Tensor, ranks: int, where: str) -> Tensor:
    """Where groups end, if each rank has no more rows of them than it may. Raises RoutingError on every rank else, as
    all know all counts. rows: those of so many ranks, see `rows_of_ranks`, part after part of the tokens whose rows
    some ranks share out among themselves. where: who has them."""
    if ends.is_meta:
        return torch.empty_like(ends)
    parts = [(part, most) for *part, most in rows.view(-1, ranks + 1).tolist()]
    beyond = [(max(part) / sum(part), at) for at, (part, most) in enumerate(parts) if max(part) > most]
    if not beyond:
        return ends.clone()
    share, at = max(beyond)
    counts, most = parts[at]
    whose = f", part {at} of {len(parts)} of the tokens," if len(parts) > 1 else ""
    what = f"rank {counts.index(max(counts))} of {ranks} gets {max(counts):,} of {sum(counts):,} rows of experts"
    shown = ", ".join(map(str, counts[:SHOWN])) + (", ..." if len(counts) > SHOWN else "")
    todo = (
        f"It needs capacity={math.ceil(100 * share * ranks) / 100:g}. Plan with that, or without capacity=, which fits "
        'any routing; or overflow="drop" leaves out what is too much for an expert.'
    )
    said = f"{what} in {where}{whose or ','} and {most:,} are what capacity= allows\n  Rows by rank: {shown}.\n  {todo}"
    raise RoutingError(said)


def within_capacity(ids: Tensor, experts: int, most: int) -> tuple[Tensor, Tensor]:
    """The expert of each row where none takes more than `most`, the first ones; and whether it is the one that is
    asked for. Others stand with experts that have room.

    >>> [each.tolist() for each in within_capacity(torch.tensor([1, 1, 0, 1]), 2, 2)]
    [[1, 1, 0, 0], [True, True, True, False]]
    """
    if ids.is_meta:
        return as_given(ids, experts, most)
    order, counts = torch.argsort(ids, stable=True), torch.bincount(ids, minlength=experts)
    starts = counts.cumsum(0) - counts
    kept = torch.empty_like(ids, dtype=torch.bool)
    kept[order] = torch.arange(len(ids), device=ids.device) - starts[ids[order]] < most
    room = torch.repeat_interleave(torch.arange(experts, device=ids.device), (most - counts[:experts]).clamp(min=0))
    found, lost = ids.clone(), ~kept
    found[lost] = room[: int(lost.sum())]
    return found, kept


def as_given(ids: Tensor, experts: int, most: int) -> tuple[Tensor, Tensor]:
    """Tensors like those that `within_capacity` gives."""
    return torch.empty_like(ids), torch.empty_like(ids, dtype=torch.bool)


def rows_by_rank(ends: Tensor, groups: Sequence[int], size: int) -> list[int]:
    """How many of so many rows each rank has. ends, groups: see `rows_of_ranks`."""
    last = torch.nn.functional.pad(ends, (1, 0))[torch.tensor(groups[:-1], device=ends.device)].tolist()
    return [end - start for start, end in itertools.pairwise([0, *last, size])]


def row_count(x: Tensor, dim: int) -> int:
    """How many rows stand on a dim."""
    return x.shape[dim]


def row_counts(counts: Tensor, most: int) -> list[int]:
    """The numbers; of a tensor without data numbers of which `most` is the sum."""
    if not counts.is_meta:
        return counts.tolist()
    return [most // len(counts) + (at < most % len(counts)) for at in range(len(counts))]


def bounds(
    ends: Tensor, groups: Sequence[int], chunks: Sequence[int], by_place: bool, count: int, size: int
) -> tuple[Tensor, Tensor]:
    """Where the places of each rank end, of so many, and its rows. Those behind the last group are the last rank's."""
    cut = torch.tensor([groups, chunks], device=ends.device)
    shared = torch.nn.functional.pad(ends.to(torch.int64), (1, 0))[cut[0]]
    shared[-1] = count if by_place else size
    return (shared, cut[1]) if by_place else (cut[1], shared)


def span(ends: Tensor, rank: Tensor) -> list[int]:
    """The first of what a rank has, and the one behind its last."""
    return torch.cat([torch.nn.functional.pad(ends, (1, 0))[rank], ends[rank]]).tolist()


def from_front(index: Tensor, size: int) -> Tensor:
    """The numbers, each counted from the front."""
    return torch.where(index < 0, index + size, index)


def rows_by_place(
    index: Tensor,
    ends: Tensor,
    rank: Tensor,
    groups: Sequence[int],
    chunks: Sequence[int],
    by_place: bool,
    size: int,
    most: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the places of the index that a rank holds: their order by the rank that holds the row with the number there,
    where each stands in this order, and how many there are by that rank.

    rank: of the group, [1]. groups, chunks: so many groups, and so many elements of the other side, are those of the
    ranks up to each. size: the number of rows. most: the most places that a rank holds, as a tensor without data has.
    """
    if index.is_meta:
        return index.new_empty(most), index.new_empty(most), index.new_empty(len(groups))
    places, numbers = bounds(ends, groups, chunks, by_place, len(index), size)
    first, last = span(places, rank)
    peers = torch.bucketize(from_front(index[first:last], size), numbers, right=True)
    order = torch.argsort(peers, stable=True)
    return order, torch.argsort(order), torch.bincount(peers, minlength=len(groups))


def rows_by_number(
    index: Tensor,
    ends: Tensor,
    rank: Tensor,
    groups: Sequence[int],
    chunks: Sequence[int],
    by_place: bool,
    size: int,
    most: int,
    held: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of a rank, as it counts them, whose numbers stand in the index, in the order of their places; how many
    there are by the rank that holds the place; and an empty mark for each row that the rank holds.

    most, held: how many there are at most of the first and of the last. For the others see `rows_by_place`.
    """
    if index.is_meta:
        return index.new_empty(most), index.new_empty(len(groups)), index.new_empty(held, dtype=torch.bool)
    places, numbers = bounds(ends, groups, chunks, by_place, len(index), size)
    first, last = span(numbers, rank)
    rows = from_front(index, size)
    (ours,) = torch.where((rows >= first) & (rows < last))
    holders = torch.bucketize(ours, places, right=True)
    marks = torch.empty(last - first, dtype=torch.bool, device=index.device)
    return rows[ours] - first, torch.bincount(holders, minlength=len(groups)), marks


def rows_of_peers(
    ends: Tensor, rank: Tensor, groups: Sequence[int], size: int, most: int, back: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the rows of a rank's groups, as they come from ranks that have sorted `size` of their own each: which of them
    stands at each place by group, and within a group in the order of the ranks; how many rows it sends to each rank,
    and how many come from it. back: which of those in that order stands at each place as they came.

    ends: where the groups of each rank's own rows end, rank after rank. rank, groups, most: see `rows_by_place`.

    >>> ends, first = torch.tensor([1, 3, 2, 2]), torch.tensor([0])  # rows of two experts: 0 1 1 on one rank, 0 0 on
    >>> [each.tolist() for each in rows_of_peers(ends, first, [2, 2], 3, 6, False)]  # the other, whose third has none
    [[0, 3, 4, 1, 2], [3, 0], [3, 2]]
    """
    ranks = len(groups)
    if ends.is_meta:
        order, sent, came = (ends.new_empty(count, dtype=torch.int64) for count in (most, ranks, ranks))
        return order, sent, came
    edges = torch.nn.functional.pad(ends.view(ranks, -1).to(torch.int64), (1, 0))
    counts = torch.nn.functional.pad(edges, (0, 1), value=size).diff()  # [ranks, groups]; the last one is behind them
    cuts = torch.tensor([0, *groups[:-1], counts.shape[1]], device=ends.device)
    by_rank = torch.nn.functional.pad(counts.cumsum(1), (1, 0))[:, cuts].diff()  # [from, to]
    group = torch.arange(counts.shape[1], device=ends.device)
    counts = counts * ((group >= cuts[rank]) & (group < cuts[rank + 1]))
    came, wanted = (each.flatten().cumsum(0) - each.flatten() for each in (counts, counts.T))
    came, wanted = came.view_as(counts), wanted.view_as(counts.T)
    moved, lengths = (wanted.T - came, counts) if back else (came.T - wanted, counts.T)
    order = torch.repeat_interleave(moved.flatten(), lengths.flatten())
    return order + torch.arange(len(order), device=ends.device), by_rank[rank].flatten(), by_rank[:, rank].flatten()


OPS = (
    add_rows,
    gather_rows,
    row_count,
    row_counts,
    rows_by_number,
    rows_by_place,
    rows_of_peers,
    rows_of_ranks,
    rows_within,
    scatter_rows,
    within_capacity,
)
for function in OPS:
    LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
for function in (gather_rows, scatter_rows):
    torch.library.register_fake(f"sbpc::{function.__name__}", function, lib=LIBRARY)


torch.library.register_fake("sbpc::within_capacity", as_given, lib=LIBRARY)
GATHER, SCATTER = torch.ops.sbpc.gather_rows.default, torch.ops.sbpc.scatter_rows.default
COUNT, COUNTS = torch.ops.sbpc.row_count.default, torch.ops.sbpc.row_counts.default
PLACES = torch.ops.sbpc.rows_by_place.default
OF_PEERS = torch.ops.sbpc.rows_of_peers.default
SHOWN = 64  # counts of a message
SCANS = 10  # times that each rank reads the whole index, or writes as much, to tell which rows it sends to whom
COUNTING = COUNTS, torch.ops.sbpc.rows_by_number.default, PLACES, OF_PEERS  # by what data says
ENDS = 2  # which operand of them says where groups end
MESSAGE = {GATHER: 3, SCATTER: 0}  # which of the operands and the result is sent where rows are shared out
