"""A rule bound to the shapes of one call: the sizes of its factors, and the signatures that follow from them.

Derivation: for each factor f that is not fixed, an input with f is S(dim) if f leads exactly one of its dims (else f
gives no signature); an input without f is P if f is summed and the input is additive, else B; an output with f is
S(dim), one without it P, P(max) or P(min) if f is reduced, else B. Each lin(I -> O) adds: I are P, other inputs B, O
are P, other outputs B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbpc.errors import RuleError
from sbpc.mesh.states import B, P, Partial, Split, State
from sbpc.rules.grammar import Dim, Operand, Rule


@dataclass(frozen=True)
class Signature:
    """The states of a call on one axis: one per tensor operand (lists flattened, None left out), one per output.

    factor: the factor that is split; None for all-B and for linear signatures. An absent output is B.
    """

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    factor: str | None = None

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"
        return text + (f"    split {self.factor}" if self.factor else "")


@dataclass(frozen=True)
class BoundDim:
    """A dim of a call: the product of `literal` and of its factors, major first."""

    factors: tuple[str, ...]
    literal: int = 1

    def size(self, sizes: Mapping[str, Any]) -> Any:
        """The number of elements at these factor sizes."""
        return math.prod((sizes[factor] for factor in self.factors), start=self.literal)


Dims = tuple[BoundDim, ...]


@dataclass(frozen=True)
class Value:
    """One value of a call: `operand` is its number in the string, `dims` is None for what `_` stands for."""

    operand: int
    dims: Dims | None
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Fill:
    """An integer argument that depends on factor sizes: argument `at` of the schema becomes these dims' sizes."""

    at: int
    name: str
    dims: Dims
    single: bool


@dataclass(frozen=True)
class Bound:
    """A rule at the sizes of one call; `inputs` are the tensors, `outputs` one per output (absent: dims None)."""

    rule: Rule
    sizes: dict[str, int]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    fills: tuple[Fill, ...]


def flat_outputs(outputs: Any) -> list[Any]:
    """The outputs of an op as a flat list, absent ones as None."""
    return [outputs] if not isinstance(outputs, (list, tuple)) else list(outputs)


def bind(rule: Rule, schema: Any, named: Mapping[str, Any], outputs: Any, known: Mapping[str, int]) -> Bound:
    """Match the operands of `rule` with the arguments (by name) and outputs of a call.

    Raises RuleError if shapes and rule disagree.
    """
    pairs = _arguments(rule, schema, named)
    flat = flat_outputs(outputs)
    if len(flat) != len(rule.outputs) and not (not flat and rule.outputs[0].kind == "none"):
        raise _misfit(rule, f"the op has {len(flat)} outputs, the rule {len(rule.outputs)}")
    results = list(zip(range(len(flat)), rule.outputs, flat))
    shaped = [
        (operand, tuple(value.shape), True)
        for _, operand, value in pairs
        if operand.kind == "tensor" and isinstance(value, Tensor)
    ]
    shaped += [
        (operand, _sizes(value), False) for _, operand, value in pairs if operand.kind == "sizes" and value is not None
    ]
    shaped += [
        (operand, tuple(value.shape), False)
        for _, operand, value in results
        if operand.kind == "tensor" and isinstance(value, Tensor)
    ]
    lengths = _stars(rule, shaped)
    opened = [(_open(operand, lengths), shape, loose) for operand, shape, loose in shaped]
    sizes = _solve(rule, opened, known)
    inputs = [
        Value(
            number,
            _close(rule, operand, lengths, sizes, tuple(value.shape)) if operand.kind == "tensor" else None,
            value.dtype,
        )
        for number, operand, value in pairs
        if isinstance(value, Tensor)
    ]
    made = [
        Value(
            at,
            _close(rule, operand, lengths, sizes, None)
            if operand.kind == "tensor" and isinstance(value, Tensor)
            else None,
            getattr(value, "dtype", None),
        )
        for at, operand, value in results
    ]
    places = {argument.name: at for at, argument in enumerate(schema.arguments)}
    names = _names(rule, schema, named)
    fills = tuple(
        Fill(
            places[names[number]],
            names[number],
            _close(rule, operand, lengths, sizes, None),
            not isinstance(value, (list, tuple)),
        )
        for number, operand, value in pairs
        if operand.kind == "sizes" and value is not None
    )
    return Bound(rule, sizes, tuple(inputs), tuple(made), fills)


def signatures(bound: Bound) -> tuple[Signature, ...]:
    """All signatures of a bound rule, all-B first, then by factor in the order of the text, then the linear ones."""
    rule = bound.rule
    found = [Signature((B,) * len(bound.inputs), (B,) * len(bound.outputs))]
    held = {*rule.fixed, *(factor for factor, *_ in rule.halo)}
    for factor, size in bound.sizes.items():
        if size > 1 and _base(factor) not in held and not rule.rng:
            found += _split(bound, factor)
    for ins, outs in rule.linear:
        inputs = tuple(P if value.operand in ins and value.dims is not None else B for value in bound.inputs)
        outputs = tuple(P if value.operand in outs and value.dims is not None else B for value in bound.outputs)
        if P in inputs and _linear_types(bound, inputs, outputs):
            found.append(Signature(inputs, outputs))
    kept: dict[tuple[Any, ...], Signature] = {}
    for signature in found:
        if _allowed(bound, signature):
            kept.setdefault((signature.inputs, signature.outputs), signature)
    return tuple(kept.values())


def divides(bound: Bound) -> frozenset[str]:
    """The factors that lead a group with a further factor of more than one element."""
    every = [dim for value in (*bound.inputs, *bound.outputs) for dim in value.dims or ()]
    leading = set()
    for dim in every:
        big = [factor for factor in dim.factors if bound.sizes[factor] > 1]
        leading.update(big[:1] if len(big) > 1 else [])
    return frozenset(leading)


# --- derivation -------------------------------------------------------------------------------------------------------
def _split(bound: Bound, factor: str) -> list[Signature]:
    """The signature in which `factor` is split, if there is one."""
    rule, base = bound.rule, _base(factor)
    reduced: Partial | None = None
    for op, factors in (("sum", rule.summed), ("max", rule.maxed), ("min", rule.minned)):
        reduced = Partial(op) if base in factors else reduced
    inputs: list[State] = []
    for value in bound.inputs:
        place = _place(value.dims, factor, bound.sizes)
        if place is None:
            return []
        additive = reduced == P and value.operand in rule.added
        inputs.append(Split(place) if place >= 0 else P if additive else B)
    outputs: list[State] = []
    for value in bound.outputs:
        place = _place(value.dims, factor, bound.sizes)
        if place is None:
            return []
        same = any(base in factors and value.operand in outs for factors, outs in rule.same)
        lacks = B if value.dims is None or same or reduced is None else reduced
        outputs.append(Split(place) if place >= 0 else lacks)
    return [Signature(tuple(inputs), tuple(outputs), factor)]


def _place(dims: Dims | None, factor: str, sizes: Mapping[str, int]) -> int | None:
    """The dim that `factor` leads, -1 if no dim has it, None if it cannot be split there."""
    places = [(at, dim) for at, dim in enumerate(dims or ()) if factor in dim.factors]
    if not places:
        return -1
    at, dim = places[0]
    before = dim.factors[: dim.factors.index(factor)]
    return at if len(places) == 1 and all(sizes[other] == 1 for other in before) else None


def _linear_types(bound: Bound, inputs: Sequence[State], outputs: Sequence[State]) -> bool:
    """Whether what is linear in numbers is so in these dtypes: all floating, or one integer type throughout."""
    types = [value.dtype for value, state in zip((*bound.inputs, *bound.outputs), (*inputs, *outputs)) if state == P]
    smooth = all(dtype is not None and (dtype.is_floating_point or dtype.is_complex) for dtype in types)
    return smooth or len(set(types)) == 1 or not any(state == P for state in outputs)


def _allowed(bound: Bound, signature: Signature) -> bool:
    """P is never bool, and what is mutated keeps its layout."""
    for value, state in zip((*bound.inputs, *bound.outputs), (*signature.inputs, *signature.outputs)):
        if isinstance(state, Partial) and value.dtype == torch.bool:
            return False
    states = {value.operand: state for value, state in zip(bound.inputs, signature.inputs)}
    return all(states.get(number, output) == output for number, output in zip(bound.rule.mutated, signature.outputs))


# --- binding ----------------------------------------------------------------------------------------------------------
def _arguments(rule: Rule, schema: Any, named: Mapping[str, Any]) -> list[tuple[int, Operand, Any]]:
    """(number, operand, value) in schema order, value None if absent; tensor lists take one operand per element."""
    names = _names(rule, schema, named)
    numbers: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        numbers.setdefault(name, []).append(number)
    found: list[tuple[int, Operand, Any]] = []
    for argument in schema.arguments:
        value, mine = named.get(argument.name), numbers.get(argument.name, [])
        if is_list(argument) and isinstance(value, (list, tuple)):
            found += [(number, rule.inputs[number], item) for number, item in zip(mine, value)]
        elif mine:
            number = mine[0]
            found.append((number, rule.inputs[number], value))
        elif isinstance(value, Tensor):
            raise _misfit(rule, f"it has no operand for the tensor argument {argument.name!r}")
    return found


def _names(rule: Rule, schema: Any, named: Mapping[str, Any]) -> list[str]:
    """The name of the argument that each operand of the string stands for."""
    order: list[str] = []
    for argument in schema.arguments:
        value = named.get(argument.name)
        order += [argument.name] * (len(value) if is_list(argument) and isinstance(value, (list, tuple)) else 1)
    found = []
    for number, operand in enumerate(rule.inputs):
        if operand.name is None and number >= len(order):
            if operand.kind == "none":
                continue
            raise _misfit(rule, f"the op has {len(order)} arguments")
        name = operand.name or order[number]
        if name not in order:
            raise _misfit(rule, f"the op has no argument {name!r}")
        found.append(name)
    return found


def is_list(argument: Any) -> bool:
    """Whether an argument of a schema is a list of tensors."""
    text = str(argument.type)
    return text.startswith("List[") and "Tensor" in text


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _stars(rule: Rule, shaped: Sequence[tuple[Operand, tuple[int, ...], bool]]) -> dict[str, int]:
    """How many dims each starred factor stands for."""
    lengths: dict[str, int] = {}
    for _ in shaped:
        for operand, shape, _loose in shaped:
            stars = [dim.factors[0] for dim in operand.dims if dim.star]
            unknown = [name for name in stars if name not in lengths]
            if len(set(unknown)) == 1:
                rest = len(shape) - (len(operand.dims) - len(stars)) - sum(lengths.get(name, 0) for name in stars)
                if rest < 0:
                    raise _misfit(rule, f"an operand has the shape {list(shape)}")
                lengths[unknown[0]] = rest // len(unknown)
    return lengths


def _open(operand: Operand, lengths: Mapping[str, int]) -> list[Dim]:
    """The dims with the stars written out: `*a` of length 2 is a.0 a.1."""
    found: list[Dim] = []
    for dim in operand.dims:
        found += (
            [Dim((f"{dim.factors[0]}.{at}",)) for at in range(lengths.get(dim.factors[0], 0))] if dim.star else [dim]
        )
    return found


def _solve(
    rule: Rule, opened: Sequence[tuple[list[Dim], tuple[int, ...], bool]], known: Mapping[str, int]
) -> dict[str, int]:
    """The sizes of all factors in the order of the text; those that are a dim alone tell the rest of each group."""
    order = [factor for dims, _, _ in opened for dim in dims for factor in dim.factors]
    sizes = dict(known)
    for dims, shape, _loose in opened:
        if len(dims) != len(shape):
            raise _misfit(rule, f"an operand of {len(dims)} dims has the shape {list(shape)}")
        for dim, size in zip(dims, shape):
            if len(dim.factors) == 1 and size != -1:
                factor = dim.factors[0]
                sizes[factor] = (
                    max(sizes[factor], size)
                    if factor in sizes and 1 in (size, sizes[factor])
                    else sizes.get(factor, size)
                )
    groups = [
        (dim, size)
        for dims, shape, _ in opened
        for dim, size in zip(dims, shape)
        if len(dim.factors) > 1 and size != -1
    ]
    for _ in range(len(order)):
        for dim, size in groups:
            unknown = [factor for factor in dim.factors if factor not in sizes]
            rest = math.prod(sizes[factor] for factor in dim.factors if factor in sizes)
            if len(unknown) == 1 and rest:
                sizes[unknown[0]] = size // rest
    lost = [factor for factor in order if factor not in sizes]
    if lost:
        raise _misfit(rule, f"the size of {lost[0]!r} cannot be told")
    for dims, shape, loose in opened:
        for dim, size in zip(dims, shape):
            mine = math.prod((sizes[factor] for factor in dim.factors), start=dim.literal)
            if size not in (mine, -1) and not (loose and size == 1 and len(dim.factors) == 1):
                raise _misfit(rule, f"{' '.join(dim.factors) or dim.literal} is {mine} and {size}")
    return {factor: sizes[factor] for factor in dict.fromkeys(order)}


def _close(
    rule: Rule, operand: Operand, lengths: Mapping[str, int], sizes: Mapping[str, int], shape: tuple[int, ...] | None
) -> Dims:
    """The dims with stars written out; a dim of size 1 that is broadcast to a larger factor loses the factor."""
    dims = []
    for at, dim in enumerate(_open(operand, lengths)):
        lone = len(dim.factors) == 1 and shape is not None and shape[at] == 1 and sizes[dim.factors[0]] != 1
        dims.append(BoundDim((), 1) if lone else BoundDim(dim.factors, dim.literal))
    return tuple(dims)


def _base(factor: str) -> str:
    return factor.split(".")[0]


def _misfit(rule: Rule, why: str) -> RuleError:
    return RuleError(
        f"the rule does not fit the call: {why}\n  {rule.text}\n  Write one operand per argument, one name per dim."
    )
