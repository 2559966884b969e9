"""Has attention whose values are not as wide as its keys, as that of DeepSeek, take the fused kernel of CPUs while a
model is captured.

That kernel takes one width alone, and torch would write the products out, whose scores grow with the square of the
sequence. Zeros behind the narrower ones change no score, and give zeros in the output, which are cut off.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

attention = F.scaled_dot_product_attention


@contextlib.contextmanager
def of_one_width() -> Iterator[None]:
    """Has `scaled_dot_product_attention` pad what it is given while this lasts."""
    before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, padded
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Returns what torch does, by its fused kernel where that would take operands of one width. query: [..., L, E],
    key: [..., S, E], value: [..., S, Ev]."""
    options: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
    wide, narrow = query.shape[-1], value.shape[-1]
    fused = query.dim() == 4 and query.device.type == "cpu" and not dropout_p
    if wide == narrow or not fused or (attn_mask is not None and attn_mask.requires_grad):
        return attention(query, key, value, attn_mask, scale=scale, **options)
    scale = 1 / math.sqrt(wide) if scale is None else scale
    more = max(wide, narrow)
    query, key, value = (x if x.shape[-1] == more else F.pad(x, (0, more - x.shape[-1])) for x in (query, key, value))
    return attention(query, key, value, attn_mask, scale=scale, **options)[..., :narrow]
