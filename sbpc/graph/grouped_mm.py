"""What `aten._grouped_mm` gives: torch itself says that of bfloat16 alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbpc._compat import on_meta


def shape_of_grouped_mm(
    x: Tensor, weights: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """What `aten._grouped_mm` gives, without values: as torch's own shape function, but of any floating-point type.

    Torch's refuses all types but bfloat16, while its kernels also take float32 and float16.
    """
    sides, shapes = (x.dim(), weights.dim()), f"{list(x.shape)} and {list(weights.shape)}"
    strides = [sorted(side.stride(dim) * side.element_size() for dim in (-2, -1)) for side in (x, weights)]
    checks = {
        f"its operands {shapes} have not 2 or 3 dims": {*sides} <= {2, 3},
        f"it multiplies {x.dtype} and {weights.dtype}": x.is_floating_point() and x.dtype == weights.dtype,
        "it takes ends of groups unless both operands have 3 dims": (offs is None) == (sides == (3, 3)),
        "it takes no bias yet": bias is None,
        f"{shapes} do not go together": sides == (2, 2) or x.shape[-1] == weights.shape[-2],
        f"a multiple of 16 bytes has to lie between rows: {strides[0][1]} and {strides[1][1]} do": all(
            near == x.element_size() and far % 16 == 0 for near, far in strides
        ),
    }
    for problem, right in checks.items():
        if not right:
            raise RuntimeError(f"grouped_mm: {problem}")
    groups = {(2, 2): () if offs is None else offs.shape, (3, 3): x.shape[:1]}.get(sides, ())
    return x.new_empty([*groups, x.shape[-2], weights.shape[-1]], dtype=out_dtype)


on_meta(torch.ops.aten._grouped_mm.default, shape_of_grouped_mm)
