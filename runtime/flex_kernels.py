"""FlexAttention on GPUs: the operators of torch, of which Inductor makes kernels that leave hidden blocks out.

The blocks are found anew by `create_block_mask`, from what a rank's part of the mask hides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sbpc._compat import flex_parts
from sbpc.graph.flex import BACKWARD, FORWARD, PLACES, compute, reads

aten = torch.ops.aten
OPTIONS = {
    "BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False, "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False,
}  # fmt: skip


def call(op: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Returns what a call gives; of an index with a gradient that Inductor knows."""
    return flex_parts()[1](*args) if op is aten.index.Tensor else op(*args, **kwargs)


def function(text: str, places: Sequence[Tensor | None], scored: bool) -> Callable[..., Tensor]:
    """Returns what torch calls with places of this rank's part, then with the places of those in the whole as far as
    they are told, and what is captured."""
    told = [name for name, place in zip(PLACES, places) if place is not None]

    def at_one(*given: Tensor) -> Tensor:
        score, given = (given[0], given[1:]) if scored else (None, given)
        here, captured = dict(zip(PLACES, given)), given[len(PLACES) + len(told) :]
        for name, numbers in zip(told, given[len(PLACES) :]):
            here[name] = aten.index.Tensor(numbers, [here[name]])
        if not text:
            return score if score is not None else here["b"].new_ones((), dtype=torch.bool)
        known = {"score": score} if score is not None else {}
        read = {f"x{at}": x for at, x in enumerate(captured)}
        return compute(text, {**known, **here, **read}, call)

    return at_one


def blocks_of(query: Tensor, key: Tensor, mask: Callable[..., Tensor], text: str, given: Sequence[Tensor]) -> Any:
    """Returns the blocks of a mask as the operators take them."""
    from torch.nn.attention.flex_attention import create_block_mask

    batches, heads = (size if name in reads(text) else None for name, size in zip("bh", query.shape))
    made = create_block_mask(
        lambda b, h, q, kv: mask(b, h, q, kv, *given), batches, heads, query.shape[2], key.shape[2], query.device
    )
    *blocks, _ = made.as_tuple()
    return (*blocks, mask)


def functions(
    query: Tensor, key: Tensor, given: Sequence[Any], masks: Sequence[Tensor], score_mod: str, mask_mod: str
) -> tuple[tuple[Tensor, ...], Callable[..., Tensor], Any]:
    """Returns the places that are told, what changes scores, and the blocks of the mask."""
    told = tuple(place for place in given if place is not None)
    mask = function(mask_mod, given, False)
    return told, function(score_mod, given, True), blocks_of(query, key, mask, mask_mod, (*told, *masks))


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, b: Any, h: Any, q: Any, kv: Any, scores: Any, masks: Any,
    score_mod: str, mask_mod: str, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the op of `sbpc.graph.flex` gives."""
    told, changed, blocks = functions(query, key, (b, h, q, kv), masks, score_mod, mask_mod)
    captured = (*told, *scores), (*told, *masks)
    hop = torch.ops.higher_order.flex_attention
    out, lse, _ = hop(query, key, value, changed, blocks, scale, OPTIONS, *captured)
    return out, lse * math.log(2)


def flex_attention_backward(
    grad_out: Tensor, grad_lse: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, b: Any,
    h: Any, q: Any, kv: Any, scores: Any, masks: Any, score_mod: str, mask_mod: str, scale: float,
    wanted: Sequence[bool],
) -> list[Tensor]:  # fmt: skip
    """What that of its backward gives."""
    told, changed, blocks = functions(query, key, (b, h, q, kv), masks, score_mod, mask_mod)
    leaves = [x.detach().requires_grad_(want) for x, want in zip(scores, wanted)]
    captured = (*told, *leaves), (*told, *masks)
    places, score = [query.new_zeros((), dtype=torch.int)] * 4, query.new_zeros((), requires_grad=True)
    with torch.enable_grad():
        _, joint = flex_parts()[0](changed, (score, *places), captured[0])
    grad_lse = None if grad_lse is None else grad_lse * math.log(2)
    saved = query, key, value, out, lse / math.log(2), grad_out, grad_lse
    hop = torch.ops.higher_order.flex_attention_backward
    *heads, of_captured = hop(*saved, changed, joint, blocks, scale, OPTIONS, *captured)
    return [*heads, *(x for x, want in zip(of_captured[len(told) :], wanted) if want)]


OPERATORS: dict[Any, Callable[..., Any]] = {FORWARD: flex_attention, BACKWARD: flex_attention_backward}
"""By op what calls the operators of torch in its place."""
