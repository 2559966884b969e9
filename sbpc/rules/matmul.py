"""Matrix products."""

from __future__ import annotations

from typing import Any

import torch

from sbpc.rules.registry import Arguments, Match, rule

aten = torch.ops.aten


def addmm(given: Arguments, outputs: Any) -> str:
    """The bias may lack the rows, or be a number."""
    bias = " ".join(("m", "n")[2 - given["self"].dim() :]) or "()"
    return f"{bias}, m k, k n -> m n ; +k ; add(0) ; lin(0,1) ; lin(0,2)"


def baddbmm(given: Arguments, outputs: Any) -> str:
    bias = " ".join(("b", "m", "n")[3 - given["self"].dim() :]) or "()"
    return f"{bias}, b m k, b k n -> b m n ; +k ; add(0) ; lin(0,1) ; lin(0,2)"


def einsum(given: Arguments, outputs: Any) -> str | None:
    """The rule is the equation: letters become factors, those that the output lacks are summed."""
    left, arrow, right = given["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    if (
        not arrow
        or not (left + right).replace(",", "").isalpha()
        or any(len(set(term)) < len(term) for term in (*terms, right))
    ):
        return None
    operands = [" ".join(term) or "()" for term in terms]
    summed = "".join(f" {letter}" for letter in dict.fromkeys("".join(terms)) if letter not in right)
    linear = [f"lin({at + 1})" for at in range(len(terms))]
    return " ; ".join(
        [f"_, {', '.join(operands)} -> {' '.join(right) or '()'}", *([f"+{summed}"] if summed else []), *linear]
    )


def two_per_point(m: Match) -> str:
    return " ".join(["2", *m.points])


rule(aten.addmm.default, addmm, flops="2 m k n")
rule(aten.baddbmm.default, baddbmm, flops="2 b m k n")
rule(aten.bmm.default, "b m k, b k n -> b m n ; +k ; lin(0) ; lin(1)", flops="2 b m k n")
rule(aten.dot.default, "k, k -> () ; +k ; lin(0) ; lin(1)", flops="2 k")
rule(aten.einsum.default, einsum, flops=two_per_point)
rule(aten.mm.default, "m k, k n -> m n ; +k ; lin(0) ; lin(1)", flops="2 m k n")
rule(aten.mv.default, "m k, k -> m ; +k ; lin(0) ; lin(1)", flops="2 m k")
