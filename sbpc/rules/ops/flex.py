"""FlexAttention (`sbpc.graph.flex`): every dim of its scores may be cut, since tensors say where a rank's part stands.

What its functions have captured is whole on every rank, so that they find in it what they look for.
"""

from __future__ import annotations

from typing import Any

from sbpc.graph.flex import BACKWARD, FORWARD, PLACES, reads
from sbpc.rules.match import Arguments
from sbpc.rules.ops.attention import AHEAD, BACK, EXACT, OUT, K, Q, V
from sbpc.rules.registry import rule


def functions(given: Arguments) -> tuple[list[str], list[str]]:
    """The operands of both functions, and the factors that may not be cut on their account: those of what they have
    captured, and of a dim whose places they read and are not told."""
    captured = [f"x{at}" for at in range(len(given["scores"]) + len(given["masks"]))]
    held = [f"scores=*{name}" for name in captured[: len(given["scores"])]]
    held += [f"masks=*{name}" for name in captured[len(held) :]]
    read = reads(given["score_mod"]) | reads(given["mask_mod"])
    dims = dict(zip(PLACES, ("b", "g r", "s", "t")))
    untold = [dims[name] for name in PLACES if name in read and given[name] is None]
    return [*(f"{name}=({factors})" for name, factors in dims.items()), *held], [*captured, *untold]


def ahead(given: Arguments, outputs: Any) -> str:
    """No rank can normalise over a part of the keys."""
    operands, fixed = functions(given)
    return f"{', '.join([Q, K, V, *operands])} -> {OUT}, {EXACT} ; fix {' '.join(['t d e', *fixed])} ; lin(2 -> 0)"


def back(given: Arguments, outputs: Any) -> str:
    """As that of other attention, see `sbpc.rules.ops.attention.backward`; what a captured tensor gets is added up
    over all pairs."""
    operands, fixed = functions(given)
    wanted = [f"*x{at}" for at, want in enumerate(given["wanted"]) if want]
    sign = ", ".join([OUT, f"grad_lse={EXACT}", f"query={Q}", f"key={K}", f"value={V}", f"out={OUT}", f"lse={EXACT}"])
    linear = ",".join(str(at) for at in range(3 + len(wanted)) if at != 2)
    linear = f"lin(0) ; lin(4,5 -> {linear})" if given["grad_lse"] is None else "lin(0,1)"
    clauses = f"+r s t{' b g' if wanted else ''} ; fix {' '.join(['d e', *fixed])} ; {linear}"
    return f"{', '.join([sign, *operands])} -> {', '.join([Q, K, V, *wanted])} ; {clauses}"


rule(FORWARD, ahead, flops=AHEAD, nonempty="b g s t")
rule(BACKWARD, back, flops=BACK, nonempty="b g s t")
