"""Reductions: a sum over a split dim is P, a maximum P(max), a mean the local sum over the GLOBAL count."""

from __future__ import annotations

import math
from typing import Any

import torch

from sbpc.rules.binding import flat_outputs
from sbpc.rules.match import Arguments, Shard, Write
from sbpc.rules.ops.dims import joined
from sbpc.rules.registry import rule

aten = torch.ops.aten


def reduction(*clauses: str, empty: bool = True) -> Write:
    """The rule of a reduction over `dim` (absent: all; empty: all, or none if not `empty`): kept k0.., reduced r0.."""

    def write(given: Arguments, outputs: Any) -> str:
        ndim, dims = given["self"].dim(), given.get("dim")
        asked = [dims] if isinstance(dims, int) else dims or (range(ndim) if empty or dims is None else [])
        chosen = {dim % ndim for dim in asked} if ndim else set()
        names = [f"r{at}" if at in chosen else f"k{at}" for at in range(ndim)]
        reduced = " ".join(name for name in names if name[0] == "r")
        outs = joined(name if name[0] == "k" else "1" for name in names if name[0] == "k" or given.get("keepdim"))
        sign = f"{joined(names)} -> {', '.join([outs] * len(flat_outputs(outputs)))}"
        return " ; ".join([sign, *(each.replace("R", reduced) for each in clauses if "R" not in each or reduced)])

    return write


def mean(shard: Shard) -> Any:
    """Where a reduced dim is split: the local sum, divided by the global count. A mean of local means is wrong."""
    sizes, given = shard.match.sizes, shard.given
    reduced = [name for name in sizes if name[0] == "r"]
    if all(shard.local[name] == sizes[name] for name in reduced):
        return shard.plain()
    typed = {} if given["dtype"] is None else {"dtype": given["dtype"]}
    dims, keep = given.get("dim"), [given["keepdim"]] if given.get("keepdim") or given.get("dim") else []
    total = shard.call(aten.sum.dim_IntList, given["self"], dims or list(range(len(sizes))), *keep, **typed)
    return shard.call(aten.div.Scalar, total, math.prod(sizes[name] for name in reduced))


SUM, FIXED = reduction("+R", "lin(0)"), reduction("fix R")

for op in (aten.all.default, aten.all.dim):
    rule(op, reduction("via R = all_of"))
rule(aten.all.dims, reduction("via R = all_of", empty=False))
rule(aten.amax.default, reduction("max R"), nonempty="r")
rule(aten.amin.default, reduction("min R"), nonempty="r")
for op in (aten.any.default, aten.any.dim):
    rule(op, reduction("via R = any_of"))
rule(aten.any.dims, reduction("via R = any_of", empty=False))
rule(aten.argmax.default, FIXED)
rule(aten.argmin.default, FIXED)
rule(aten.linalg_vector_norm.default, reduction("via R = vector_norm"))
rule(aten.logsumexp.default, reduction("via R = logsumexp"))
rule(aten.max.default, reduction("max R"), nonempty="r")
rule(aten.max.dim, FIXED)
rule(aten.mean.default, SUM, local=mean)
rule(aten.mean.dim, SUM, local=mean)
rule(aten.min.default, reduction("min R"), nonempty="r")
rule(aten.min.dim, FIXED)
for op in (aten.norm.Scalar, aten.norm.ScalarOpt_dim):
    rule(op, reduction("via R = vector_norm"))
rule(aten.prod.default, FIXED)
rule(aten.prod.dim_int, FIXED)
rule(aten.std.correction, reduction("via R = deviation"))
rule(aten.std_mean.correction, reduction("via R = deviation"))
rule(aten.sum.default, SUM)
rule(aten.sum.dim_IntList, SUM)
rule(aten.var.correction, reduction("via R = variance"))
rule(aten.var_mean.correction, reduction("via R = variance"))
