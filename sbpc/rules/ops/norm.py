"""Normalisations: the dims over which statistics are taken are split through functions that reduce among the ranks."""

from __future__ import annotations

from typing import Any

import torch

from sbpc.rules.match import Arguments, Write
from sbpc.rules.registry import rule

aten = torch.ops.aten


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


def by_slice(text: str) -> Write:
    """The rule of an op on slices along one dim k: V is all dims, G k alone, R those that a slice has."""

    def write(given: Arguments, outputs: Any) -> str:
        dims = next(iter(given.values())).dim()
        names = ["k" if at == given["dim"] % dims else f"r{at}" for at in range(dims)]
        one, rest = [name if name == "k" else "1" for name in names], [name for name in names if name != "k"]
        return text.replace("V", " ".join(names)).replace("G", " ".join(one)).replace("R", " ".join(rest))

    return write


WEIGHT_NORM_BACKWARD = "V, V, G, G -> V, G ; via R = weight_norm_backward ; lin(0) ; lin(2 -> 0)"

rule("_fused_rms_norm", "*b *d, [*d], *d -> *b *d, *b *e ; fix e ; via d = rms_norm")
rule(
    "_fused_rms_norm_backward",
    "*b *d, *b *d, [*d], *b *e, *d -> *b *d, *d ; +b ; fix e ; via d = rms_norm_backward ; lin(0)",
)
rule("_native_batch_norm_legit.no_stats", "n c *h, c, c -> n c *h, c, c ; via n h = batch_norm", nonempty="c")
rule(
    "_native_batch_norm_legit_functional",
    "n c *h, c, c, c, c -> n c *h, c, c, c, c ; via n h = batch_norm ; when(training)",
    nonempty="c",
)
rule("_native_batch_norm_legit_no_training", "n c *h, c, c, c, c -> n c *h, 0, 0 ; same(n c h -> 1,2)")
rule("_weight_norm_interface", by_slice("V, G -> V, G ; via R = weight_norm ; lin(1 -> 0)"), nonempty="k r")
rule("_weight_norm_interface_backward", by_slice(WEIGHT_NORM_BACKWARD), nonempty="k r")
rule("native_batch_norm", batch_norm, nonempty="c")
rule("native_batch_norm_backward", batch_norm_backward, nonempty="n c h")
rule(
    "native_group_norm",
    "n (g c) *s, (g c), (g c), [n], [(g c)], _, [g] -> n (g c) *s, n g, n g ; via c s = group_norm",
    nonempty="g",
)
rule(
    "native_group_norm_backward",
    "n (g c) *s, n (g c) *s, n g, n g, (g c), [n], [(g c)], _, [g] -> n (g c) *s, (g c), (g c)"
    " ; +n s ; via c s = group_norm_backward ; lin(0)",
    nonempty="g",
)
rule(
    "native_layer_norm",
    "*b *d, [*d], *d, *d -> *b *d, *b *e, *b *e ; fix e ; via d = layer_norm",  # e: as many ones as there are d
)
rule(
    "native_layer_norm_backward",
    "*b *d, *b *d, [*d], *b *e, *b *e, *d, *d -> *b *d, *d, *d ; +b ; fix e ; via d = layer_norm_backward ; lin(0)",
)
rule("renorm", by_slice("V -> V ; fix R"))
