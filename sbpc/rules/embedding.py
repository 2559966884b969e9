"""Embeddings: a table split over its rows is a masked local lookup whose results add up (vocabulary parallelism)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sbpc.rules.registry import FREE, Call, Match, named_arguments, rule

aten = torch.ops.aten


def local_index(call: Call, index: Any, offset: Any, size: int) -> tuple[Any, Any, Any]:
    """Indices on the rank that holds `size` (> 0) elements from `offset` on: shifted, clamped, which lie outside."""
    shifted = call(aten.sub.Tensor, index, offset)
    nearest = call(aten.clamp.default, shifted, 0, size - 1)
    return shifted, nearest, call(aten.ne.Tensor, nearest, shifted)


def embedding(
    m: Match,
    call: Call,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    local: Mapping[str, int],
    offsets: Mapping[str, Any],
) -> Any:
    if "v" not in offsets:
        return m.plain(call, args, kwargs, local)
    weight, indices = args[:2]
    if local["v"] == 0:
        return call(aten.new_zeros.default, weight, m.output_shape(0, local))
    _, nearest, outside = local_index(call, indices, offsets["v"], local["v"])
    found = call(aten.embedding.default, weight, nearest)
    return call(aten.masked_fill.Scalar, found, call(aten.unsqueeze.default, outside, -1), 0)


def embedding_backward(
    m: Match,
    call: Call,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    local: Mapping[str, int],
    offsets: Mapping[str, Any],
) -> Any:
    """Rows of other ranks, and the padding row, get index -1, which the op is told to be the padding."""
    if "v" not in offsets:
        return m.plain(call, args, kwargs, local)
    given = named_arguments(m.op, args, kwargs)
    if local["v"] == 0:
        return call(aten.new_zeros.default, given["grad_output"], m.output_shape(0, local))
    shifted, _, skipped = local_index(call, given["indices"], offsets["v"], local["v"])
    if given["padding_idx"] >= 0:
        skipped = call(aten.logical_or.default, skipped, call(aten.eq.Scalar, given["indices"], given["padding_idx"]))
    index = call(aten.masked_fill.Scalar, shifted, skipped, -1)
    return call(m.op, given["grad_output"], index, local["v"], -1, False)


rule(aten.embedding.default, "v d, *b -> *b d ; idx v @ 1 ; +v ; lin(0)", local=embedding, flops=FREE)
rule(
    aten.embedding_dense_backward.default,
    "*b d, *b, [v] -> v d ; +b ; idx v @ 1 ; lin(0) ; when(not scale_grad_by_freq)",
    local=embedding_backward,
    flops="1 *b d",
)
