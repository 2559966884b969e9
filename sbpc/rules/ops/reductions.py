"""Reductions: a sum over a split dim is P, a maximum P(max), a mean the local sum over the GLOBAL count."""

from __future__ import annotations

import math
from typing import Any

from sbpc.rules.binding import flat_outputs
from sbpc.rules.match import Arguments, Shard, Write
from sbpc.rules.ops.dims import joined
from sbpc.rules.registry import rule


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
    total = shard.aten("sum.dim_IntList", given["self"], dims or list(range(len(sizes))), *keep, **typed)
    return shard.aten("div.Scalar", total, math.prod(sizes[name] for name in reduced))


for function, names in {
    "all_of": "all all.dim",
    "any_of": "any any.dim",
    "deviation": "std.correction std_mean.correction",
    "logsumexp": "logsumexp",
    "variance": "var.correction var_mean.correction",
    "vector_norm": "linalg_vector_norm norm.Scalar norm.ScalarOpt_dim",
}.items():
    rule(names, reduction(f"via R = {function}"))
rule("argmax argmin max.dim min.dim prod prod.dim_int", reduction("fix R"))
rule("amax max", reduction("max R"), nonempty="r")
rule("amin min", reduction("min R"), nonempty="r")
rule("mean mean.dim", reduction("+R", "lin(0)"), local=mean)
rule("sum sum.dim_IntList", reduction("+R", "lin(0)"))
rule("all.dims", reduction("via R = all_of", empty=False))
rule("any.dims", reduction("via R = any_of", empty=False))
