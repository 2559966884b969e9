"""Embeddings: a table split over its rows is a masked local lookup whose results add up (vocabulary parallelism)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sbpc.rules.match import FREE, Kernel, Shard
from sbpc.rules.registry import rule


class Lookup(NamedTuple):
    """Global indices on the rank that holds a part: counted from its start, clamped into it, whether they lie
    outside."""

    shifted: Any
    nearest: Any
    outside: Any


def addressed(factor: str, index: str, kernel: Callable[[Shard, Lookup], Any]) -> Kernel:
    """The kernel of an op whose argument `index` addresses `factor`: `kernel` where that is split and not empty
    here."""

    def local(shard: Shard) -> Any:
        if factor not in shard.offsets:
            return shard.plain()
        if shard.local[factor] == 0:
            return shard.zeros()
        shifted = shard.aten("sub.Tensor", shard.given[index], shard.offsets[factor])
        nearest = shard.aten("clamp", shifted, 0, shard.local[factor] - 1)
        return kernel(shard, Lookup(shifted, nearest, shard.aten("ne.Tensor", nearest, shifted)))

    return local


def without(shard: Shard, lookup: Lookup, index: Any, skipped: int, mark: int) -> Any:
    """The shifted indices, with `mark` for those of other ranks and those that are `skipped` (a number below 0:
    none)."""
    gone = lookup.outside
    if skipped >= 0:
        gone = shard.aten("logical_or", gone, shard.aten("eq.Scalar", index, skipped))
    return shard.aten("masked_fill.Scalar", lookup.shifted, gone, mark)


def embedding(shard: Shard, lookup: Lookup) -> Any:
    rows = shard.plain(indices=lookup.nearest)
    return shard.aten("masked_fill.Scalar", rows, shard.aten("unsqueeze", lookup.outside, -1), 0)


def embedding_backward(shard: Shard, lookup: Lookup) -> Any:
    """Rows of other ranks, and the padding row, get index -1, which the op is told to be the padding."""
    rows = without(shard, lookup, shard.given["indices"], shard.given["padding_idx"], -1)
    return shard.plain(indices=rows, padding_idx=-1)


local = addressed("v", "indices", embedding)
rule("embedding", "v d, *b -> *b d ; idx v @ 1 ; +v ; lin(0)", local=local, flops=FREE)
rule(
    "embedding_dense_backward",
    "*b d, *b, [v] -> v d ; +b ; idx v @ 1 ; lin(0) ; when(not scale_grad_by_freq)",
    local=addressed("v", "indices", embedding_backward),
    flops="1 *b d",
)
