"""Matrix products."""

from __future__ import annotations

import math
from typing import Any

import torch

from sbpc.mesh.states import of_8_bits
from sbpc.rules.grouped_product import GROUPED, grouped_local
from sbpc.rules.match import Arguments, Call, Match, Shard, Write
from sbpc.rules.ops.dims import joined
from sbpc.rules.registry import rule


def biased(dims: str, sign: str) -> Write:
    """A product whose first operand may lack leading ones of these dims."""
    names = dims.split()
    return lambda given, outputs: f"{joined(names[len(names) - given['self'].dim() :])}, {sign}"


def einsum(given: Arguments, outputs: Any) -> str | None:
    """The rule is the equation: letters become factors, those that the output lacks are summed."""
    left, arrow, right = given["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    twice = any(len(set(term)) < len(term) for term in (*terms, right))
    if not arrow or not (left + right).replace(",", "").isalpha() or twice:
        return None
    operands = map(joined, terms)
    summed = "".join(f" {letter}" for letter in dict.fromkeys("".join(terms)) if letter not in right)
    linear = [f"lin({at + 1})" for at in range(len(terms))]
    sign = f"_, {', '.join(operands)} -> {joined(right)}"
    return " ; ".join([sign, *([f"+{summed}"] if summed else []), *linear])


def einsum_local(shard: Shard) -> Any:
    """A product of two operands as one mm or bmm: dims in order and flattened, which copies nothing that is
    contiguous."""
    args, call, local = shard.args, shard.aten, shard.local
    terms, out = args[0].replace(" ", "").split("->")[0].split(","), args[0].replace(" ", "").split("->")[1]
    alone = [letter for term in terms for letter in term if letter not in out and sum(letter in t for t in terms) == 1]
    if len(terms) != 2 or alone or args[2:]:
        return shard.plain()
    first, second = terms
    batch = [letter for letter in out if letter in first and letter in second]
    rows, columns = ([c for c in out if c in term and c not in batch] for term in terms)
    inner = [letter for letter in first if letter not in out]

    def flat(x: Any, term: str, *groups: list[str]) -> Any:
        x = ordered(call, x, term, "".join(letter for group in groups for letter in group))
        shape = [math.prod(local[letter] for letter in group) for group in groups]
        return x if all(len(group) == 1 for group in groups) else call("reshape", x, shape)

    lead = [batch] if batch else []
    op = "bmm" if batch else "mm"
    made = call(op, flat(args[1][0], first, *lead, rows, inner), flat(args[1][1], second, *lead, inner, columns))
    names = [*batch, *rows, *columns]
    if any(len(group) != 1 for group in (*lead, rows, columns)):
        made = call("reshape", made, [local[letter] for letter in names])
    return ordered(call, made, "".join(names), out)


def ordered(call: Call, x: Any, before: str, after: str) -> Any:
    """x, whose dims are named `before`, with its dims in the order `after`."""
    return x if before == after else call("permute", x, [before.index(letter) for letter in after])


def grouped(given: Arguments, outputs: Any) -> tuple[str, dict[str, int]] | None:
    """Products of groups of rows that end at `offs`; rows behind the last end hold nothing."""
    x, text = given["self"], GROUPED.get((given["self"].dim(), given["mat2"].dim()))
    wide = 16 // x.element_size()
    return None if text is None or given["bias"] is not None else (text, {"e": wide, "f": wide})


def grouped_flops(m: Match) -> str:
    """Every row meets the matrix of its own group; the groups are taken to be equally long."""
    return "2 g m k e n f" if m.rule.text == GROUPED[3, 3] else f"2/{m.sizes['g']} g m k e n f"


def linear(given: Arguments, outputs: Any) -> str:
    if given["bias"] is None:
        return "*b k, n k -> *b n ; +k ; lin(0) ; lin(1)"
    return "*b k, n k, n -> *b n ; +k ; add(2) ; lin(0,2) ; lin(1,2)"


def linear_local(shard: Shard) -> Any:
    """One mm or addmm over the rows of all leading dims."""
    call, shape = shard.aten, shard.shape()
    x, weight, bias = shard.given.values()
    turned = call("permute", weight, [1, 0])
    if len(shape) != 2:
        x = call("reshape", x, [math.prod(shape[:-1]), shard.local["k"]])
    made = call("addmm", bias, x, turned) if bias is not None else call("mm", x, turned)
    return made if len(shape) == 2 else call("reshape", made, shape)


def scaled(given: Arguments, outputs: Any) -> tuple[str, dict[str, int]] | None:
    """A product of float8 matrices that have one scale each, or one for each row of the first and each column of the
    second; others have no rule.

    Kernels of GPUs want rows of a multiple of 16 bytes, of each shard, too. What is rounded to float8 is no sum.
    """
    (m, k), n = given["self"].shape, given["mat2"].shape[1]
    scales = given["scale_a"], given["scale_b"]
    single = all(scale.numel() == 1 for scale in scales)
    if not single and [*map(tuple, (scale.shape for scale in scales))] != [(m, 1), (1, n)]:
        return None
    if given["scale_result"] is not None or any(scale.dtype != torch.float32 for scale in scales):
        return None
    rows, columns = (joined("1" * scale.dim()) for scale in scales) if single else ("m 1", "1 (n f)")
    bias, added = ("_", "") if given["bias"] is None else ("(n f)", " ; add(4)")
    summed = "fix k" if of_8_bits(outputs.dtype) else f"+k{added}"
    text = f"m (k e), (k e) (n f), {rows}, {columns}, {bias} -> m (n f) ; {summed} ; fix e f"
    return text, {"e": math.gcd(k, 16), "f": math.gcd(n, 16)}


def two_per_point(m: Match) -> str:
    return " ".join(["2", *m.points])


rule("_grouped_mm", grouped, flops=grouped_flops, local=grouped_local, nonempty="m k n")
rule("_scaled_mm", scaled, flops="2 m k e n f", nonempty="m k n")
rule("addmm", biased("m n", "m k, k n -> m n ; +k ; add(0) ; lin(0,1) ; lin(0,2)"), flops="2 m k n")
BATCHED = "b m k, b k n -> b m n ; +k"
rule("baddbmm", biased("b m n", f"{BATCHED} ; add(0) ; lin(0,1) ; lin(0,2)"), flops="2 b m k n")
rule("bmm", f"{BATCHED} ; lin(0) ; lin(1)", flops="2 b m k n")
rule("dot", "k, k -> () ; +k ; lin(0) ; lin(1)", flops="2 k")
rule("einsum", einsum, flops=two_per_point, local=einsum_local)
rule("linear", linear, flops="2 *b n k", local=linear_local)
rule("mm", "m k, k n -> m n ; +k ; lin(0) ; lin(1)", flops="2 m k n")
rule("mv", "m k, k -> m ; +k ; lin(0) ; lin(1)", flops="2 m k")
