"""Attention with a causal mask on a rank that has a part of the queries or keys."""

from __future__ import annotations

import math
from typing import Any

import torch

from sbpc.rules.match import Kernel, Shard


def written_mask(name: str) -> Kernel:
    """Runs the op where queries or keys are split with its causal mask written out as argument `name`: -inf where a
    key comes later."""

    def local(shard: Shard) -> Any:
        if not shard.offsets:
            return shard.plain()
        call, query = shard.aten, shard.given["query"]

        def places(dim: str) -> Any:
            here = call("cumsum", call("new_ones", query, [shard.local[dim]], dtype=torch.int64), 0)
            return call("add.Tensor", here, shard.offsets[dim]) if dim in shard.offsets else here

        later = call("gt.Tensor", places("t"), call("unsqueeze", places("s"), 1))
        mask = call("new_zeros", query, [1, 1, shard.local["s"], shard.local["t"]])
        mask = call("masked_fill.Scalar", mask, later, -math.inf)
        if shard.given[name] is not None:
            mask = call("add.Tensor", shard.given[name], mask)
        return shard.plain(is_causal=False, **{name: mask})

    return local
