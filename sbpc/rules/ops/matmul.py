"""Matrix products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sbpc.rules.match import Arguments, Call, Match, Shard
from sbpc.rules.registry import rule

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
    twice = any(len(set(term)) < len(term) for term in (*terms, right))
    if not arrow or not (left + right).replace(",", "").isalpha() or twice:
        return None
    operands = [" ".join(term) or "()" for term in terms]
    summed = "".join(f" {letter}" for letter in dict.fromkeys("".join(terms)) if letter not in right)
    linear = [f"lin({at + 1})" for at in range(len(terms))]
    sign = f"_, {', '.join(operands)} -> {' '.join(right) or '()'}"
    return " ; ".join([sign, *([f"+{summed}"] if summed else []), *linear])


def einsum_local(shard: Shard) -> Any:
    """A product of two operands as one mm or bmm: dims in order and flattened, which copies nothing that is contiguous."""
    args, call, local = shard.args, shard.call, shard.local
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
        return x if all(len(group) == 1 for group in groups) else call(aten.reshape.default, x, shape)

    lead = [batch] if batch else []
    op = aten.bmm.default if batch else aten.mm.default
    made = call(op, flat(args[1][0], first, *lead, rows, inner), flat(args[1][1], second, *lead, inner, columns))
    names = [*batch, *rows, *columns]
    if any(len(group) != 1 for group in (*lead, rows, columns)):
        made = call(aten.reshape.default, made, [local[letter] for letter in names])
    return ordered(call, made, "".join(names), out)


def ordered(call: Call, x: Any, before: str, after: str) -> Any:
    """x, whose dims are named `before`, with its dims in the order `after`."""
    return x if before == after else call(aten.permute.default, x, [before.index(letter) for letter in after])


GROUPED = {  # by the number of dims of both operands; e and f: what 16 bytes hold, by which the kernel aligns rows
    (2, 2): "(k e) m, m (n f), h -> g (k e) (n f) ; +m ; idx m ; idx g ; fix h e f ; lin(0) ; lin(1)",
    (2, 3): "m (k e), g (k e) (n f), h -> m (n f) ; +k g ; idx m ; idx g ; fix h e f ; lin(0) ; lin(1)",
    (3, 3): "g m (k e), g (k e) (n f) -> g m (n f) ; +k ; fix e f ; lin(0) ; lin(1)",
}


def grouped(given: Arguments, outputs: Any) -> tuple[str, dict[str, int]] | None:
    """Products of groups of rows that end at `offs`; rows behind the last end hold nothing."""
    x, text = given["self"], GROUPED.get((given["self"].dim(), given["mat2"].dim()))
    wide = 16 // x.element_size()
    return None if text is None or given["bias"] is not None else (text, {"e": wide, "f": wide})


def grouped_flops(m: Match) -> str:
    """Every row meets the matrix of its own group; the groups are taken to be equally long."""
    return "2 g m k e n f" if m.rule.text == GROUPED[3, 3] else f"2/{m.sizes['g']} g m k e n f"


def grouped_local(shard: Shard) -> Any:
    """A shard of the rows has its own ends of groups. Where groups are split, their rows are rolled to the front."""
    call, local, offsets, text = shard.call, shard.local, shard.offsets, shard.match.rule.text
    if text == GROUPED[3, 3]:
        return product(shard, shard.given)
    given, turned, sums = dict(shard.given), text == GROUPED[2, 2], text == GROUPED[2, 3]
    rows = call(aten.permute.default, given["self"], [1, 0]) if turned else given["self"]
    number = start = None
    if "m" in offsets:
        ends = call(aten.clamp.default, call(aten.sub.Tensor, given["offs"], offsets["m"]), 0, local["m"])
        given["offs"] = call(aten._to_copy.default, ends, dtype=torch.int32)
    if "g" in offsets:
        number, group = (numbers(call, given["offs"], local[factor]) for factor in ("m", "g"))
        before = call(aten.constant_pad_nd.default, given["offs"], [1, 0])
        start = call(aten.index_select.default, before, 0, call(aten.view.default, offsets["g"], [1]))
        ends = call(aten.index_select.default, given["offs"], 0, call(aten.add.Tensor, group, offsets["g"]))
        given["offs"] = call(aten.sub.Tensor, ends, start)
    rows = dense(call, rows, local["m"], number, start)
    given["self"] = call(aten.permute.default, rows, [1, 0]) if turned else rows
    if turned:
        given["mat2"] = dense(call, given["mat2"], local["m"], number, start)
    made = product(shard, given)
    if start is None or not sums:
        return made
    last = call(aten.slice.Tensor, given["offs"], 0, local["g"] - 1, local["g"])
    behind = call(aten.unsqueeze.default, call(aten.ge.Tensor, number, last), 1)
    made = call(aten.masked_fill.Scalar, made, behind, 0)
    return dense(call, made, local["m"], number, call(aten.neg.default, start))


def product(shard: Shard, given: Mapping[str, Any]) -> Any:
    """The op itself, or for float64, which its kernels do not take, one product for each group, of all rows with zeros for the others."""
    if shard.match.bound.outputs[0].dtype != torch.float64:
        return shard.plain(**given)
    call, local, x, y, text = shard.call, shard.local, given["self"], given["mat2"], shard.match.rule.text
    if text == GROUPED[3, 3]:
        return call(aten.bmm.default, x, y)
    number = numbers(call, given["offs"], local["m"])
    below = call(aten.lt.Tensor, number, call(aten.unsqueeze.default, given["offs"], 1))  # [g, m]
    first = call(aten.slice.Tensor, below, 0, 0, local["g"] - 1)  # behind the end of one group is the start of the next
    behind = call(aten.constant_pad_nd.default, first, [0, 0, 1, 0])
    other = call(aten.unsqueeze.default, call(aten.eq.Tensor, below, behind), 2)

    def alone(rows: Any) -> Any:
        return call(aten.masked_fill.Scalar, call(aten.unsqueeze.default, rows, 0), other, 0)

    if text == GROUPED[2, 3]:
        return call(aten.sum.dim_IntList, call(aten.bmm.default, alone(x), y), [0])
    rows = alone(call(aten.permute.default, x, [1, 0]))
    return call(aten.bmm.default, call(aten.permute.default, rows, [0, 2, 1]), alone(y))


def numbers(call: Call, like: Any, count: int) -> Any:
    """0, 1, 2, ... on the device of `like`."""
    return call(aten.sub.Scalar, call(aten.cumsum.default, call(aten.new_ones.default, like, [count]), 0), 1)


def dense(call: Call, rows: Any, count: int, number: Any, start: Any) -> Any:
    """Rows one after the other in memory, from number `start` on and then around."""
    if start is not None:
        around = call(aten.remainder.Scalar, call(aten.add.Tensor, number, start), count)
        return call(aten.index_select.default, rows, 0, around)
    one = {"memory_format": torch.contiguous_format}  # a lone row counts as contiguous whatever its stride
    return call(aten.clone.default, rows, **one) if count == 1 else call(aten.contiguous.default, rows)


def linear(given: Arguments, outputs: Any) -> str:
    if given["bias"] is None:
        return "*b k, n k -> *b n ; +k ; lin(0) ; lin(1)"
    return "*b k, n k, n -> *b n ; +k ; add(2) ; lin(0,2) ; lin(1,2)"


def linear_local(shard: Shard) -> Any:
    """One mm or addmm over the rows of all leading dims."""
    call, shape = shard.call, shard.shape()
    x, weight, bias = shard.given.values()
    turned = call(aten.permute.default, weight, [1, 0])
    if len(shape) != 2:
        x = call(aten.reshape.default, x, [math.prod(shape[:-1]), shard.local["k"]])
    made = call(aten.addmm.default, bias, x, turned) if bias is not None else call(aten.mm.default, x, turned)
    return made if len(shape) == 2 else call(aten.reshape.default, made, shape)


def two_per_point(m: Match) -> str:
    return " ".join(["2", *m.points])


rule(aten._grouped_mm.default, grouped, flops=grouped_flops, local=grouped_local, nonempty="g m k n")
rule(aten.addmm.default, addmm, flops="2 m k n")
rule(aten.baddbmm.default, baddbmm, flops="2 b m k n")
rule(aten.bmm.default, "b m k, b k n -> b m n ; +k ; lin(0) ; lin(1)", flops="2 b m k n")
rule(aten.dot.default, "k, k -> () ; +k ; lin(0) ; lin(1)", flops="2 k")
rule(aten.einsum.default, einsum, flops=two_per_point, local=einsum_local)
rule(aten.linear.default, linear, flops="2 *b n k", local=linear_local)
rule(aten.mm.default, "m k, k n -> m n ; +k ; lin(0) ; lin(1)", flops="2 m k n")
rule(aten.mv.default, "m k, k -> m ; +k ; lin(0) ; lin(1)", flops="2 m k")
