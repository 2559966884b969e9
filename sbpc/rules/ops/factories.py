"""Factories: made of sizes alone, so any split is free; arange and random bits start where the shard starts."""

from __future__ import annotations

from typing import Any

import torch

from sbpc.graph.random_bits import BITS, row_major
from sbpc.rules.match import FREE, Arguments, Shard
from sbpc.rules.registry import rule


def arange(shard: Shard) -> Any:
    """start + step * (offset + 0, 1, 2, ...)"""
    if "a" not in shard.offsets:
        return shard.plain()
    call, given = shard.aten, shard.given
    where = {} if given["device"] is None else {"device": given["device"]}
    index = call("arange", shard.local["a"], dtype=torch.int64, **where)
    index = call("add.Tensor", index, shard.offsets["a"])
    dtype = shard.match.bound.outputs[0].dtype
    if dtype != torch.int64:  # rounded once, at the end: a narrow type cannot hold what lies between
        index = call("_to_copy", index, dtype=torch.float64)
    if given.get("step", 1) != 1:
        index = call("mul.Scalar", index, given["step"])
    if given.get("start", 0) != 0:
        index = call("add.Scalar", index, given["start"])
    return index if dtype == torch.int64 else call("_to_copy", index, dtype=dtype)


def bits(shard: Shard) -> Any:
    """The bits of this rank's elements, by where they stand in the whole tensor."""
    if not shard.offsets:
        return shard.plain()
    sizes, start = shard.match.sizes, shard.given["start"]  # given for a part of a batch, as strides are
    strides = dict(zip(sizes, shard.given["strides"] or row_major(list(sizes.values()))))
    for factor, offset in shard.offsets.items():
        here = shard.aten("mul.Scalar", offset, strides[factor])
        start = here if start is None else shard.aten("add.Tensor", start, here)
    return shard.plain(strides=list(strides.values()), start=start)


def bits_dims(given: Arguments, outputs: Any) -> str:
    """seed, size, stream (, strides, start)"""
    return f"(), [*a], _{'' if given.get('start') is None else ', start=()'} -> *a ; idx a"


rule("arange arange.start arange.start_step", "_ -> a ; idx a", local=arange, flops=FREE)
rule("empty.memory_format empty_permuted full ones zeros", "[*a] -> *a", flops=FREE)
rule("empty_like full_like ones_like zeros_like", "*a -> *a ; lin(0 -> )", flops=FREE)  # of self only the shape is read
rule("new_empty new_full new_ones new_zeros", "*s, [*a] -> *a ; same(s -> 0) ; lin(0 -> )", flops=FREE)
rule("scalar_tensor", "_ -> ()", flops=FREE)
rule(BITS, bits_dims, local=bits, flops="16 *a")
