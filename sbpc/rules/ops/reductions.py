"""Reductions: a sum over a split dim is P, a maximum P(max), a mean the local sum over the GLOBAL count."""

from __future__ import annotations

import math
from typing import Any

import torch

from sbpc.rules.match import Arguments, Shard, Write
from sbpc.rules.registry import rule

aten = torch.ops.aten


def reduction(*clauses: str, empty: bool = True) -> Write:
    """The rule of a reduction over `dim` (absent: all; empty: all, or none if not `empty`): kept k0.., reduced r0.."""

    def write(given: Arguments, outputs: Any) -> str:
        if given.get("dim") == [] and not empty:
            names = [f"k{at}" for at in range(given["self"].dim())]
            reduced: list[str] = []
        else:
            names, reduced = _dims(given["self"].dim(), given.get("dim"))
        outs = [name if name[0] == "k" else "1" for name in names if name[0] == "k" or given.get("keepdim")]
        flat = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        sign = f"{' '.join(names) or '()'} -> " + ", ".join([" ".join(outs) or "()"] * len(flat))
        filled = [clause.replace("R", " ".join(reduced)) for clause in clauses if "R" not in clause or reduced]
        return " ; ".join([sign, *filled])

    return write


def _dims(ndim: int, given: Any) -> tuple[list[str], list[str]]:
    """The names of all dims, and of those that are reduced."""
    asked = [given] if isinstance(given, int) else list(given or range(ndim))
    chosen = {dim % ndim for dim in asked} if ndim else set()
    names = [f"r{at}" if at in chosen else f"k{at}" for at in range(ndim)]
    return names, [name for name in names if name[0] == "r"]


def mean(shard: Shard) -> Any:
    """Where a reduced dim is split: the local sum, divided by the global count. A mean of local means is wrong."""
    sizes, given = shard.match.sizes, shard.given
    reduced = [name for name in sizes if name[0] == "r"]
    if all(shard.local[name] == sizes[name] for name in reduced):
        return shard.plain()
    typed = {} if given["dtype"] is None else {"dtype": given["dtype"]}
    if "dim" not in given or not given["dim"]:
        keep = [given["keepdim"]] if given.get("keepdim") else []
        total = shard.call(aten.sum.dim_IntList, given["self"], list(range(len(sizes))), *keep, **typed)
    else:
        total = shard.call(aten.sum.dim_IntList, given["self"], given["dim"], given["keepdim"], **typed)
    return shard.call(aten.div.Scalar, total, math.prod(sizes[name] for name in reduced))


SUM, FIXED = reduction("+R", "lin(0)"), reduction("fix R")

rule(aten.all.default, reduction("via R = all_of"))
rule(aten.all.dim, reduction("via R = all_of"))
rule(aten.all.dims, reduction("via R = all_of", empty=False))
rule(aten.amax.default, reduction("max R"), nonempty="r")
rule(aten.amin.default, reduction("min R"), nonempty="r")
rule(aten.any.default, reduction("via R = any_of"))
rule(aten.any.dim, reduction("via R = any_of"))
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
