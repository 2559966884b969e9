"""Attention and softmax: no rank can normalise over a shard; the dim of a softmax is split through a function.

A causal mask speaks of places in the whole sequence: on a rank that has a part of the queries, or in the backward of
the keys, it is written out from where that part begins. The pairs that it hides are among the flops: with a written
mask they are computed.

Each of g key heads serves r query heads. The ops of CUDA run on no CPU: their rules are proved on formulas in their
place, which give what the kernels are documented to give.
"""

from __future__ import annotations

from typing import Any

from sbpc.rules.match import Arguments, Write
from sbpc.rules.registry import rule
from sbpc.rules.written_mask import written_mask

Q, K, V, OUT = "b (g r) s d", "b g t d", "b g t e", "b (g r) s e"
EXACT, PADDED = "b (g r) s", "b (g r) l"  # logsumexp: one number per query, or padded to a multiple of 32


def _bias(given: Arguments, name: str) -> str | None:
    """The dims of a mask or bias, which align from the right with b (g r) s t."""
    value = given.get(name)
    if value is None:
        return None
    dims = ("b", "(g r)", "s", "t")[4 - value.dim() :]
    return " ".join("1" if size == 1 else dim for dim, size in zip(dims, value.shape))


def _fixed(given: Arguments, mask: str, lse: str) -> str:
    """The queries may be split, unless the logsumexp is padded, or the mask is causal and the op takes no other."""
    return "d e t" + (" l s" if lse == PADDED else " s" if given["is_causal"] and not mask else "")


def _place(given: Arguments) -> str:
    """A causal mask needs to know where a rank's queries and keys begin."""
    return " ; idx s ; idx t" if given["is_causal"] else ""


def forward(mask: str, lse: str, absent: int = 0) -> Write:
    """mask: the argument that holds a bias. absent: how many outputs hold no values (states of random numbers)."""

    def write(given: Arguments, outputs: Any) -> str:
        dims = _bias(given, mask)
        more = f", {mask}={dims}" if dims is not None else ""
        sums = lse + " 1" * (outputs[1].dim() - 3)
        sign = f"{Q}, {K}, {V}{more} -> {OUT}, {sums}{', _' * absent}"
        return f"{sign} ; fix {_fixed(given, mask, lse)} ; lin(2 -> 0) ; when(dropout_p == 0){_place(given)}"

    return write


def backward(mask: str, lse: str, more: str = "") -> Write:
    """Linear in grad_out, and jointly in value and out: dS = P (grad_out value^T - rowsum(grad_out out)).

    Since P comes from the whole logsumexp, the keys may be split, unless the mask is causal and the op takes no other.
    """

    def write(given: Arguments, outputs: Any) -> str:
        dims = _bias(given, mask)
        sums = lse + " 1" * (given["logsumexp"].dim() - 3)
        operands = [OUT, Q, K, V, f"out={OUT}", f"logsumexp={sums}", *([f"{mask}={dims}"] if dims is not None else [])]
        results, linear, summed = [Q, K, V], "0,1", ["r"]
        if len(outputs) == 4:
            wanted = outputs[3] is not None and dims is not None
            results.append(str(dims) if wanted else "_")
            linear += ",3" if wanted else ""
            summed += [name for name in ("b", "g") if wanted and name not in str(dims)]
        fixed = " ".join(
            name for name in _fixed(given, mask, lse).split() if name != "t" or (given["is_causal"] and not mask)
        )
        summed += [name for name in ("s", "t") if name not in fixed.split()]
        seeds = " p o" if more else ""
        sign = f"{', '.join(operands)}{more} -> {', '.join(results)}"
        clauses = f"+{' '.join(summed)} ; fix {fixed}{seeds} ; lin(0) ; lin(3,4 -> {linear})"
        return f"{sign} ; {clauses} ; when(dropout_p == 0){_place(given)}"

    return write


def along(operands: int, function: str, *clauses: str) -> Write:
    """The rule of an op along dim `dim` of operands of one shape, that dim split through `function`."""

    def write(given: Arguments, outputs: Any) -> str:
        names = [f"d{at}" for at in range(outputs.dim())]
        fixed = [f"via {names[given['dim']]} = {function}"] if names else []
        dims = " ".join(names) or "()"
        return " ; ".join([f"{', '.join([dims] * operands)} -> {dims}", *fixed, *clauses])

    return write


SEEDS = ", philox_seed=*p, philox_offset=*o"
ENDS = ", max_q=[s], max_k=[t]"
AHEAD, BACK = "4 b g r s t d", "10 b g r s t d"

rule("_log_softmax", along(1, "log_softmax"))
rule("_log_softmax_backward_data", along(2, "log_softmax_backward", "lin(0)"))
rule("_safe_softmax", along(1, "safe_softmax"))
for name, mask, lse, absent, more, nonempty in (
    ("cudnn_attention", "attn_bias", EXACT, 7, SEEDS + ENDS, "b g"),
    ("efficient_attention", "attn_bias", PADDED, 2, SEEDS, "b g"),
    ("flash_attention", "", EXACT, 7, ENDS + SEEDS, "b g"),
    ("flash_attention_for_cpu", "attn_mask", EXACT, 0, "", "g"),
):
    op, local, sequence = f"_scaled_dot_product_{name}", written_mask(mask), " s t" if more else " t"
    rule(op, forward(mask, lse, absent), flops=AHEAD, nonempty=f"{nonempty} s", local=local)
    rule(f"{op}_backward", backward(mask, lse, more), flops=BACK, nonempty=nonempty + sequence, local=local)
rule("_softmax", along(1, "softmax"))
rule("_softmax_backward_data", along(2, "softmax_backward", "lin(0)"))
