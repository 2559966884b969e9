"""Convolutions and pooling: samples and channels may be split, spatial dims are fixed."""

from __future__ import annotations

from typing import Any

import torch

from sbpc.rules.match import Arguments, Match
from sbpc.rules.registry import rule

aten = torch.ops.aten


def _dims(given: Arguments) -> tuple[str, str, str]:
    """Input, weight and output; one group makes g a factor of size 1, so that the channels behind it lead."""
    weight = "(g ci) co *k" if given["transposed"] else "(g co) ci *k"
    return "n (g ci) *h", weight, "n (g co) *o"


def convolution(given: Arguments, outputs: Any) -> str:
    x, weight, y = _dims(given)
    return f"{x}, {weight}, (g co), groups=[g] -> {y} ; +ci ; add(2) ; fix h k o ; lin(0,2) ; lin(1,2)"


def convolution_backward(given: Arguments, outputs: Any) -> str:
    """The weight gradient is bilinear in grad_output and input, the input gradient in grad_output and weight."""
    x, weight, y = _dims(given)
    bias = "[(g co)]" if any(given["bias_sizes"] or ()) else "_"
    sign = f"{y}, {x}, {weight}, {bias}, groups=[g] -> {x}, {weight}, (g co)"
    return f"{sign} ; +n co ; same(ci -> 2) ; fix h k o ; lin(0) ; lin(1 -> 1) ; lin(2 -> 0)"


def convolution_flops(m: Match) -> str:
    return "2 n g co ci *k " + ("*h" if " co *k," in m.rule.text else "*o")


def convolution_backward_flops(m: Match) -> str:
    """As much as the forward for each of the two gradients that is wanted."""
    wanted = sum(value.dims is not None for value in m.bound.outputs[:2])
    return convolution_flops(m).replace("2", str(2 * wanted), 1)


FIXED = "fix h w ho wo"
DOWN = "*n c h w -> *n c ho wo"
GIVEN = "lin(0) ; lin(1 -> )"  # of the input of the forward only the shape is read
rule("convolution", convolution, flops=convolution_flops, nonempty="g ci co")
rule("convolution_backward", convolution_backward, flops=convolution_backward_flops, nonempty="g ci co")
rule("_adaptive_avg_pool2d avg_pool2d", f"{DOWN} ; {FIXED} ; lin(0)", nonempty="c", flops="1 *n c h w")
rule(
    "_adaptive_avg_pool2d_backward avg_pool2d_backward",
    f"*n c ho wo, *n c h w -> *n c h w ; {FIXED} ; {GIVEN}",
    nonempty="c",
    flops="1 *n c h w",
)
rule("max_pool2d_with_indices", f"{DOWN}, *n c ho wo ; {FIXED}", nonempty="c", flops="1 *n c h w")
rule(
    "max_pool2d_with_indices_backward",
    f"*n c ho wo, *n c h w, indices=*n c ho wo -> *n c h w ; {FIXED} ; {GIVEN}",
    nonempty="c",
    flops="1 *n c h w",
)
UP = "upsample_bilinear2d{0} upsample_nearest2d{0}"
rule(UP.format(""), f"n c h w -> n c ho wo ; {FIXED} ; lin(0)", nonempty="c", flops="1 n c ho wo")
rule(UP.format("_backward"), f"n c ho wo, _, [n c h w] -> n c h w ; {FIXED} ; lin(0)", flops="1 n c ho wo")
