"""How a rank takes rows of experts to the ranks that have their groups, and back (`sbpc.graph.expert_rows`)."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from sbpc.mesh.routing import ANY, most_rows
from sbpc.rules.match import Shard

c10d = torch.ops._c10d_functional
own = torch.ops.sbpc


def gathered(shard: Shard) -> Any:
    """The rows, of which each rank sends those that it has where rows are shared out."""
    x, index, ends, *_ = shard.given.values()
    index = within(shard, index)
    if shard.sharing is None:
        return shard.aten("index.Tensor", x, [index])
    ends = allowed(shard, ends)
    rows, sent, _ = by_number(shard, index, ends)
    _, places, taken = by_place(shard, index, ends)
    moved = exchanged(shard, shard.aten("index_select", x, 0, rows), sent, taken)
    return shard.aten("index_select", moved, 0, places)


def scattered(shard: Shard) -> Any:
    """The sums, likewise. Values come from rank after rank, so that they are added in the order of their places."""
    values, index, ends, *_ = shard.given.values()
    index = within(shard, index)
    if shard.sharing is None:
        zeros = shard.aten("new_zeros", values, shard.shape())
        return shard.aten("index_put", zeros, [index], values, True)
    ends = allowed(shard, ends)
    order, _, sent = by_place(shard, index, ends)
    rows, taken, held = by_number(shard, index, ends)
    moved = exchanged(shard, shard.aten("index_select", values, 0, order), sent, taken)
    return shard.call(own.add_rows.default, moved, rows, held)


def within(shard: Shard, index: Any) -> Any:
    """The numbers as those within the part of which the rank has rows, where it has its own."""
    size = shard.sizes["v"]
    return index if size == shard.match.sizes["v"] else shard.aten("remainder.Scalar", index, size)


def allowed(shard: Shard, ends: Any) -> Any:
    """Where groups end, once no rank has more rows of them than it may, of any part of the tokens: all ranks stop."""
    sharing, sizes = shard.sharing, shard.sizes
    assert sharing is not None
    if sharing.most == ANY:
        return ends
    size, ranks = sizes["i" if shard.given["by_place"] else "v"], math.prod(sharing.sizes)
    most = most_rows(size, ranks, sharing.most)
    rows = shard.call(own.rows_of_ranks.default, ends, sharing.ends(sizes["g"]), size, most)
    for parts, group in reversed(sharing.across):
        gathered = shard.call(c10d.all_gather_into_tensor.default, rows, parts, group)
        rows = shard.call(c10d.wait_tensor.default, gathered)
    return shard.call(own.rows_within.default, ends, rows, ranks, sharing.where)


def by_place(shard: Shard, index: Any, ends: Any) -> tuple[Any, ...]:
    """The places that the rank holds, see `rows_by_place`; numbers of them by rank as a list."""
    most = shard.local["i"]
    order, places, counts = results(shard, own.rows_by_place.default, *about(shard, index, ends), most)
    return order, places, shard.call(own.row_counts.default, counts, most)


def by_number(shard: Shard, index: Any, ends: Any) -> tuple[Any, ...]:
    """The rows that it holds, see `rows_by_number`; numbers of them by rank as a list."""
    most, copies = shard.sizes["i"], shard.given["copies"]
    most = most if copies is None else min(most, copies * shard.local["v"])
    args = *about(shard, index, ends), most, shard.local["v"]
    rows, counts, held = results(shard, own.rows_by_number.default, *args)
    return rows, shard.call(own.row_counts.default, counts, most), held


def about(shard: Shard, index: Any, ends: Any) -> tuple[Any, ...]:
    """What both are told."""
    sizes, by_place, sharing = shard.sizes, shard.given["by_place"], shard.sharing
    assert sharing is not None
    chunks = sharing.ends(sizes["v" if by_place else "i"])
    return index, ends, sharing.rank, sharing.ends(sizes["g"]), chunks, by_place, sizes["v"]


def results(shard: Shard, op: Any, *args: Any) -> tuple[Any, ...]:
    """The three results of a call."""
    made = shard.call(op, *args)
    return tuple(shard.call(operator.getitem, made, at) for at in range(3))


def exchanged(shard: Shard, x: Any, sent: Any, taken: Any) -> Any:
    """What comes from the other ranks, where so many rows go to each, and come from it."""
    assert shard.sharing is not None
    moved = shard.call(c10d.all_to_all_single.default, x, taken, sent, shard.sharing.group)
    return shard.call(c10d.wait_tensor.default, moved)
