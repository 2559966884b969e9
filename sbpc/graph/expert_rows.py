"""Rows that stand group by group, as those of a mixture of experts do, and are cut where the data says: the ops that
take rows there and back, and those by which each rank tells which rows it sends to whom.

`gather_rows` is x[index] and `scatter_rows` adds values[i] to row index[i] of zeros; both know besides that rows stand
in groups that end at `ends`. by_place: the places of the index do (what is gathered, or what is added), else the
rows of which it holds the numbers do. Of both sides one, whose rows stand in groups, is cut where the groups of the
ranks end, and the other one in equal chunks. What a rank holds of the index is all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sbpc.graph.random_bits import LIBRARY

LIBRARY.define("gather_rows(Tensor x, Tensor index, Tensor ends, bool by_place) -> Tensor")
LIBRARY.define("scatter_rows(Tensor values, Tensor index, Tensor ends, int size, bool by_place) -> Tensor")
LIBRARY.define("add_rows(Tensor values, Tensor rows, Tensor held) -> Tensor")
LIBRARY.define("row_counts(Tensor counts, int most) -> int[]")
ABOUT = "Tensor index, Tensor ends, Tensor rank, int[] groups, int[] chunks, bool by_place, int size, int most"
LIBRARY.define(f"rows_by_place({ABOUT}) -> (Tensor, Tensor, Tensor)")
LIBRARY.define(f"rows_by_number({ABOUT}, int held) -> (Tensor, Tensor, Tensor)")


def gather_rows(x: Tensor, index: Tensor, ends: Tensor, by_place: bool) -> Tensor:
    """The rows of x with these numbers."""
    return x[index]


def scatter_rows(values: Tensor, index: Tensor, ends: Tensor, size: int, by_place: bool) -> Tensor:
    """So many rows, each the sum of the values whose index is its number."""
    return values.new_zeros([size, *values.shape[1:]]).index_put_((index,), values, accumulate=True)


def add_rows(values: Tensor, rows: Tensor, held: Tensor) -> Tensor:
    """As many rows as `held` has elements, each the sum of the values for it."""
    return values.new_zeros([len(held), *values.shape[1:]]).index_add_(0, rows, values)


def row_counts(counts: Tensor, most: int) -> list[int]:
    """The numbers; of a tensor without data numbers of which `most` is the sum."""
    if not counts.is_meta:
        return counts.tolist()
    return [most // len(counts) + (at < most % len(counts)) for at in range(len(counts))]


class Owners(NamedTuple):
    """Where the numbers of each rank end; the numbers of the index, from 0 on; by place the rank that holds it, and
    that which holds the row whose number stands there."""

    ends: Tensor
    number: Tensor
    of_place: Tensor
    of_number: Tensor


def owners(
    index: Tensor, ends: Tensor, groups: Sequence[int], chunks: Sequence[int], by_place: bool, size: int
) -> Owners:
    """Who holds what. Rows behind the last group are the last rank's."""
    cut, count = torch.tensor([groups, chunks], device=index.device), len(index)
    shared = torch.nn.functional.pad(ends.to(torch.int64), (1, 0))[cut[0]]
    shared[-1] = count if by_place else size
    places, numbers = (shared, cut[1]) if by_place else (cut[1], shared)
    index = torch.where(index < 0, index + size, index)
    at = torch.arange(count, device=index.device)
    of_place, of_number = (torch.bucketize(x, cuts, right=True) for x, cuts in ((at, places), (index, numbers)))
    return Owners(numbers, index, of_place, of_number)


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
    held = owners(index, ends, groups, chunks, by_place, size)
    peers = held.of_number[held.of_place == rank]
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
    found = owners(index, ends, groups, chunks, by_place, size)
    first, last = torch.nn.functional.pad(found.ends, (1, 0))[rank], found.ends[rank]
    ours = found.of_number == rank
    marks = torch.empty(int(last - first), dtype=torch.bool, device=index.device)
    return found.number[ours] - first, torch.bincount(found.of_place[ours], minlength=len(groups)), marks


for function in (add_rows, gather_rows, row_counts, rows_by_number, rows_by_place, scatter_rows):
    LIBRARY.impl(function.__name__, function, "CompositeExplicitAutograd")
for function in (gather_rows, scatter_rows):
    torch.library.register_fake(f"sbpc::{function.__name__}", function, lib=LIBRARY)
GATHER, SCATTER = torch.ops.sbpc.gather_rows.default, torch.ops.sbpc.scatter_rows.default
COUNTS = torch.ops.sbpc.row_counts.default
COUNTING = COUNTS, torch.ops.sbpc.rows_by_number.default, torch.ops.sbpc.rows_by_place.default  # by what data says
MESSAGE = {GATHER: 3, SCATTER: 0}  # which of the operands and the result is sent where rows are shared out
