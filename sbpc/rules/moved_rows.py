"""How a rank takes rows of experts to the ranks that have their groups, and back (`sbpc.graph.expert_rows`)."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from sbpc.graph.expert_rows import GATHER
from sbpc.mesh.routing import ANY, most_rows
from sbpc.rules.match import Match, Shard

c10d = torch.ops._c10d_functional
own = torch.ops.sbpc


def gathered(shard: Shard) -> Any:
    """The rows, of which each rank sends those that it has where rows are shared out."""
    x, index, ends, *_ = shard.given.values()
    index = within(shard, index)
    if shard.sharing is None:
        return shard.aten("index.Tensor", x, [index])
    if shard.sharing.apart:
        order, sent, taken = of_peers(shard, ends, back=False)
        moved = exchanged(shard, shard.aten("index_select", x, 0, index), sent, taken)
        return shard.aten("index_select", moved, 0, order)
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
    if shard.sharing.apart:
        order, taken, sent = of_peers(shard, ends, back=True)
        moved = exchanged(shard, shard.aten("index_select", values, 0, order), sent, taken)
        dims = shard.match.bound.outputs[0].dims or ()
        zeros = shard.aten("new_zeros", moved, [dim.size(shard.local) for dim in dims])
        return shard.aten("index_add", zeros, 0, index, moved)
    ends = allowed(shard, ends)
    order, _, sent = by_place(shard, index, ends)
    rows, taken, held = by_number(shard, index, ends)
    moved = exchanged(shard, shard.aten("index_select", values, 0, order), sent, taken)
    return shard.call(own.add_rows.default, moved, rows, held)


def within(shard: Shard, index: Any) -> Any:
    """The numbers as those within the part of which the rank has rows, where it has its own."""
    apart = shard.sharing is not None and shard.sharing.apart
    size = (shard.local if apart else shard.sizes)["v"]
    return index if size == shard.match.sizes["v"] else shard.aten("remainder.Scalar", index, size)


def of_peers(shard: Shard, ends: Any, back: bool) -> tuple[Any, ...]:
    """The order of the rows that come from ranks which have each sorted their own, see `rows_of_peers`; numbers of rows
    that the rank sends to each, and of those that come from there, as lists. Every rank learns the ends of all."""
    sharing, size = shard.sharing, shard.sizes["i"]
    assert sharing is not None
    ranks = math.prod(sharing.sizes)
    gathered = shard.call(c10d.all_gather_into_tensor.default, ends, ranks, sharing.group)
    gathered = shard.call(c10d.wait_tensor.default, gathered)
    if sharing.most != ANY:
        of_each = shard.aten("view", gathered, [ranks, shard.sizes["g"]])
        total = shard.aten("sum.dim_IntList", of_each, [0])
        gathered = allowed(shard, total, gathered)
    mine, most = size // ranks, shard.local["i"]
    args = sharing.rank, sharing.ends(shard.sizes["g"]), mine, most, back
    order, sent, taken = results(shard, own.rows_of_peers.default, gathered, *args)
    counts = (sent, mine), (taken, most)
    return order, *(shard.call(own.row_counts.default, each, size) for each, size in counts)


def asks(match: Match) -> bool:
    """Returns whether it is this call that has to learn the ends of all ranks, as prices have it: one in each phase
    takes rows of a matrix to their experts, or the gradients of what comes from there. All others read the same."""
    return match.op is GATHER and len(match.bound.outputs[0].dims or ()) > 1


def allowed(shard: Shard, ends: Any, given: Any = None) -> Any:
    """Where groups end, or what is given, once no rank has more rows of them than it may, of any part of the tokens:
    all ranks stop."""
    sharing, sizes = shard.sharing, shard.sizes
    assert sharing is not None
    given = ends if given is None else given
    if sharing.most == ANY:
        return given
    size, ranks = sizes["i" if shard.given["by_place"] else "v"], math.prod(sharing.sizes)
    most = most_rows(size, ranks, sharing.most)
    rows = shard.call(own.rows_of_ranks.default, ends, sharing.ends(sizes["g"]), size, most)
    for parts, group in reversed(sharing.across):
        gathered = shard.call(c10d.all_gather_into_tensor.default, rows, parts, group)
        rows = shard.call(c10d.wait_tensor.default, gathered)
    return shard.call(own.rows_within.default, given, rows, ranks, sharing.where)


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
