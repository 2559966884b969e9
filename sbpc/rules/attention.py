"""Attention and softmax: the reduced dim is fixed, for no rank can normalise over a shard."""

from __future__ import annotations

from typing import Any

import torch

from sbpc.rules.registry import Arguments, Write, rule

aten = torch.ops.aten
Q, K = "b h s d", "b h t d"


def _mask(given: Arguments) -> str:
    """The mask as an operand: its dims align from the right with b h s t."""
    mask = given.get("attn_mask")
    return f", attn_mask={' '.join('bhst'[4 - mask.dim() :])}" if mask is not None else ""


def flash(given: Arguments, outputs: Any) -> str:
    """Without a causal mask, which speaks of absolute positions, the queries may be split."""
    causal = " s" if given["is_causal"] else ""
    return f"{Q}, {K}, {K}{_mask(given)} -> {Q}, b h s ; fix d t{causal} ; lin(2 -> 0) ; when(dropout_p == 0)"


def flash_backward(given: Arguments, outputs: Any) -> str:
    """Linear in grad_out, and jointly in value and out: dS = P (grad_out value^T - rowsum(grad_out out))."""
    causal = "fix d t s" if given["is_causal"] else "fix d t ; +s"
    sign = f"{Q}, {Q}, {K}, {K}, {Q}, b h s{_mask(given)} -> {Q}, {K}, {K}"
    return f"{sign} ; {causal} ; lin(0) ; lin(3,4 -> 0,1) ; when(dropout_p == 0)"


def along(operands: int, *clauses: str) -> Write:
    """The rule of an op along dim `dim` of operands of one shape, that dim fixed."""

    def write(given: Arguments, outputs: Any) -> str:
        names = [f"d{at}" for at in range(outputs.dim())]
        fixed = [f"fix {names[given['dim']]}"] if names else []
        dims = " ".join(names) or "()"
        return " ; ".join([f"{', '.join([dims] * operands)} -> {dims}", *fixed, *clauses])

    return write


rule(aten._log_softmax.default, along(1))
rule(aten._log_softmax_backward_data.default, along(2, "lin(0)"))
rule(aten._safe_softmax.default, along(1))
rule(aten._scaled_dot_product_flash_attention_for_cpu.default, flash, flops="4 b h s t d", nonempty="h s")
rule(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    flash_backward,
    flops="10 b h s t d",
    nonempty="h",
)
rule(aten._softmax.default, along(1))
rule(aten._softmax_backward_data.default, along(2, "lin(0)"))
