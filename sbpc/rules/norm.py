"""Normalisations: the dims over which statistics are taken are split through functions that reduce among the ranks."""

from __future__ import annotations

from typing import Any

import torch

from sbpc.rules.registry import Arguments, rule

aten = torch.ops.aten


def _dims(given: Arguments) -> tuple[str, str]:
    """The normalized dims, and as many ones."""
    count = len(given["normalized_shape"])
    return " ".join(f"d{at}" for at in range(count)), " ".join(["1"] * count)


def layer_norm(given: Arguments, outputs: Any) -> str:
    d, ones = _dims(given)
    return f"*b {d}, [{d}], {d}, {d} -> *b {d}, *b {ones}, *b {ones} ; via {d} = layer_norm"


def layer_norm_backward(given: Arguments, outputs: Any) -> str:
    d, ones = _dims(given)
    sign = f"*b {d}, *b {d}, [{d}], *b {ones}, *b {ones}, {d}, {d} -> *b {d}, {d}, {d}"
    return f"{sign} ; +b ; via {d} = layer_norm_backward ; lin(0)"


def rms_norm(given: Arguments, outputs: Any) -> str:
    d, ones = _dims(given)
    return f"*b {d}, [{d}], {d} -> *b {d}, *b {ones} ; via {d} = rms_norm"


def rms_norm_backward(given: Arguments, outputs: Any) -> str:
    d, ones = _dims(given)
    sign = f"*b {d}, *b {d}, [{d}], *b {ones}, {d} -> *b {d}, {d}"
    return f"{sign} ; +b ; via {d} = rms_norm_backward ; lin(0)"


def batch_norm(given: Arguments, outputs: Any) -> str | None:
    """Training with running statistics updates them in place: that is no function, so it has no rule."""
    if not given["training"]:
        return "n c *h, c, c, c, c -> n c *h, 0, 0 ; same(n c h -> 1,2)"
    return None if given["running_mean"] is not None else "n c *h, c, c -> n c *h, c, c ; via n h = batch_norm"


def batch_norm_backward(given: Arguments, outputs: Any) -> str:
    """In evaluation the statistics are constants: then samples are independent and the saved ones are empty."""
    if given["train"]:
        return "n c *h, n c *h, c, c, c, c, c -> n c *h, c, c ; via n h = batch_norm_backward ; lin(0)"
    return "n c *h, n c *h, c, c, c, *e, *f -> n c *h, c, c ; +n h ; fix e f ; lin(0)"


rule(aten._fused_rms_norm.default, rms_norm)
rule(aten._fused_rms_norm_backward.default, rms_norm_backward)
rule(aten._native_batch_norm_legit.no_stats, "n c *h, c, c -> n c *h, c, c ; via n h = batch_norm", nonempty="c")
rule(
    aten._native_batch_norm_legit_functional.default,
    "n c *h, c, c, c, c -> n c *h, c, c, c, c ; via n h = batch_norm ; when(training)",
    nonempty="c",
)
rule(aten._native_batch_norm_legit_no_training.default, "n c *h, c, c, c, c -> n c *h, 0, 0 ; same(n c h -> 1,2)")
rule(aten.native_batch_norm.default, batch_norm, nonempty="c")
rule(aten.native_batch_norm_backward.default, batch_norm_backward, nonempty="n c h")
rule(aten.native_group_norm.default, "n (g c) *s, (g c), (g c), [n], [(g c)], _, [g] -> n (g c) *s, n g, n g ; via c s = group_norm")
rule(
    aten.native_group_norm_backward.default,
    "n (g c) *s, n (g c) *s, n g, n g, (g c), [n], [(g c)], _, [g] -> n (g c) *s, (g c), (g c)"
    " ; +n s ; via c s = group_norm_backward ; lin(0)",
)
rule(aten.native_layer_norm.default, layer_norm)
rule(aten.native_layer_norm_backward.default, layer_norm_backward)
