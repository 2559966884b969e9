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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbpc.errors import RuleError
from sbpc.mesh.states import B, P, Partial, Shape, Split, State, is_ordered, of_8_bits
from sbpc.rules.grammar import Dim, Operand, Rule


@dataclass(frozen=True)
class Signature:
    """The states of a call on one axis: one per tensor operand (lists flattened, None left out), one per output.

    factor: the factor that is split; None for all-B and for linear signatures. An absent output is B. ragged: the
    factor whose rows are shared out by their groups, which tensors hold in R. own: the factor of rows of which each
    rank has its own, which tensors hold in L; it is cut as `factor` is, that of what the rows come from, and evenly.
    Beside `ragged` it is that factor itself: each rank has sorted the rows of its own part before it sends them.
    """

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    factor: str | None = None
    ragged: str | None = None
    own: str | None = None

    @property
    def ordered(self) -> bool:
        """Whether rows that ranks hold stand in an order of which no boxing knows."""
        return any(map(is_ordered, (*self.inputs, *self.outputs)))

    @property
    def text(self) -> str:
        """The states alone: `S(0), B -> P`."""
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"

    def __str__(self) -> str:
        return self.text + (f"    split {self.factor}" if self.factor else "")


Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class BoundValue:
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

    def value(self, sizes: Mapping[str, Any]) -> Any:
        """What the argument becomes at these factor sizes."""
        found = [dim.size(sizes) for dim in self.dims]
        return found[0] if self.single else found


@dataclass(frozen=True)
class Bound:
    """A rule at the sizes of one call; `inputs` are the tensors, `outputs` one per output (absent: dims None)."""

    rule: Rule
    sizes: dict[str, int]
    inputs: tuple[BoundValue, ...]
    outputs: tuple[BoundValue, ...]
    fills: tuple[Fill, ...]

    def integers(self, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
        """By name what the integer arguments of a call, as far as it gives them, become at these factor sizes."""
        given = [fill for fill in self.fills if fill.at < len(args) or fill.name in kwargs]
        return {fill.name: fill.value(sizes) for fill in given}

    @property
    def values(self) -> tuple[BoundValue, ...]:
        """The inputs and the outputs."""
        return (*self.inputs, *self.outputs)


def flat_outputs(outputs: Any) -> list[Any]:
    """The outputs of an op as a flat list, absent ones as None."""
    return [outputs] if not isinstance(outputs, (list, tuple)) else list(outputs)


class Given(NamedTuple):
    """What stands for an operand of a rule string in a call.

    number: the place in the string. name: of the argument, "" for an output. shape: the sizes of its dims, None for
    what the string does not name, and what is absent.
    """

    number: int
    operand: Operand
    value: Any
    name: str
    shape: Shape | None

    @classmethod
    def of(cls, number: int, operand: Operand, value: Any, name: str = "") -> Given:
        shape = None
        if operand.kind == "tensor" and isinstance(value, Tensor):
            shape = tuple(value.shape)
        elif operand.kind == "sizes" and value is not None:
            shape = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        return cls(number, operand, value, name, shape)

    @property
    def loose(self) -> bool:
        """Whether a dim of size 1 may stand for a larger factor, as in a broadcast."""
        return self.name != "" and self.operand.kind == "tensor"


def bind(rule: Rule, schema: Any, named: Mapping[str, Any], outputs: Any, known: Mapping[str, int]) -> Bound:
    """Match the operands of `rule` with the arguments (by name) and outputs of a call.

    Raises RuleError if shapes and rule disagree.
    """
    arguments, flat = _arguments(rule, schema, named), flat_outputs(outputs)
    if len(flat) != len(rule.outputs) and not (not flat and rule.outputs[0].kind == "none"):
        raise _misfit(rule, f"the op has {len(flat)} outputs, the rule {len(rule.outputs)}")
    results = [Given.of(at, operand, value) for at, (operand, value) in enumerate(zip(rule.outputs, flat))]
    ordered = (*sorted(arguments, key=lambda given: given.operand.kind == "sizes"), *results)
    lengths = _stars(rule, [(given.operand, given.shape) for given in ordered if given.shape is not None])
    opened = {id(given): _open(given.operand, lengths) for given in ordered if given.shape is not None}
    sizes = _solve(rule, [(opened[id(given)], given) for given in ordered if given.shape is not None], known)

    def bound(given: Given) -> BoundValue:
        dims = None
        if given.shape is not None and given.operand.kind == "tensor":
            places = zip(opened[id(given)], given.shape)
            dims = tuple(Dim() if given.loose and _is_broadcast(dim, size, sizes) else dim for dim, size in places)
        return BoundValue(given.number, dims, getattr(given.value, "dtype", None))

    at = {argument.name: at for at, argument in enumerate(schema.arguments)}
    fills = [
        Fill(at[given.name], given.name, tuple(opened[id(given)]), not isinstance(given.value, (list, tuple)))
        for given in arguments
        if given.operand.kind == "sizes" and given.shape is not None
    ]
    inputs = tuple(bound(given) for given in arguments if isinstance(given.value, Tensor))
    return Bound(rule, sizes, inputs, tuple(map(bound, results)), tuple(fills))


def signatures(bound: Bound) -> tuple[Signature, ...]:
    """All signatures of a bound rule, all-B first, then by factor in the order of the text, then the linear ones."""
    rule = bound.rule
    derived = [Signature((B,) * len(bound.inputs), (B,) * len(bound.outputs))]
    for factor, size in bound.sizes.items():
        if size > 1 and base(factor) not in rule.fixed:
            signature = _split(bound, factor)
            derived += [] if signature is None else [signature]
    for ins, outs in rule.linear:
        inputs = tuple(P if value.operand in ins and value.dims is not None else B for value in bound.inputs)
        outputs = tuple(P if value.operand in outs and value.dims is not None else B for value in bound.outputs)
        if P in inputs and _linear_types(bound, inputs, outputs):
            derived.append(Signature(inputs, outputs))
    distinct: dict[tuple[Any, ...], Signature] = {}
    for signature in derived:
        if _allowed(bound, signature):
            distinct.setdefault((signature.inputs, signature.outputs), signature)
    return tuple(distinct.values())


def divides(bound: Bound) -> frozenset[str]:
    """The factors that lead a group with a further factor of more than one element."""
    dims = [dim for value in bound.values for dim in value.dims or ()]
    large = [[factor for factor in dim.factors if bound.sizes[factor] > 1] for dim in dims]
    return frozenset(factors[0] for factors in large if len(factors) > 1)


# --- derivation -------------------------------------------------------------------------------------------------------
def _split(bound: Bound, factor: str) -> Signature | None:
    """The signature in which `factor` is split, None if there is none."""
    rule, name = bound.rule, base(factor)
    reduced: State = B
    for op, factors in (("sum", rule.summed), ("max", rule.maxed), ("min", rule.minned)):
        reduced = Partial(op) if name in factors else reduced
    unread = {out for factors, outs in rule.same if name in factors for out in outs}
    without: list[State] = [P if reduced == P and value.operand in rule.added else B for value in bound.inputs]
    without += [B if value.dims is None or value.operand in unread else reduced for value in bound.outputs]
    states: list[State] = []
    for value, state in zip(bound.values, without):
        place = _place(value.dims, factor, bound.sizes)
        if place is None:
            return None
        states.append(Split(place) if place >= 0 else state)
    count = len(bound.inputs)
    return Signature(tuple(states[:count]), tuple(states[count:]), factor)


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
    types = [value.dtype for value, state in zip(bound.values, (*inputs, *outputs)) if state == P]
    smooth = all(dtype is not None and (dtype.is_floating_point or dtype.is_complex) for dtype in types)
    return smooth or len(set(types)) == 1 or not any(state == P for state in outputs)


def _allowed(bound: Bound, signature: Signature) -> bool:
    """P is never bool, nor of 8 bits with a point: a sum of what is rounded to so few is no rounded sum."""
    pairs = zip(bound.values, (*signature.inputs, *signature.outputs))
    return all(has_sums(value.dtype) for value, state in pairs if isinstance(state, Partial))


def has_sums(dtype: torch.dtype | None) -> bool:
    """Whether tensors of a type can be in P."""
    return dtype is None or not (dtype == torch.bool or of_8_bits(dtype))


# --- binding ----------------------------------------------------------------------------------------------------------
def slots(schema: Any, named: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What the operands of a rule string stand for: name and value in schema order, a list of tensors element by
    element."""
    found: list[tuple[str, Any]] = []
    for argument in schema.arguments:
        value = named[argument.name]
        several = is_list(argument) and isinstance(value, (list, tuple))
        found += [(argument.name, item) for item in (value if several else [value])]
    return found


def _arguments(rule: Rule, schema: Any, named: Mapping[str, Any]) -> list[Given]:
    """What stands for each operand, in schema order."""
    places = slots(schema, named)
    numbers: dict[str, list[int]] = {name: [] for name, _ in places}
    for number, operand in enumerate(rule.inputs):
        if operand.name is None and number >= len(places):
            if operand.kind == "none":
                continue
            raise _misfit(rule, f"the op has {len(places)} arguments")
        name = operand.name or places[number][0]
        if name not in numbers:
            raise _misfit(rule, f"the op has no argument {name!r}")
        numbers[name].append(number)
    found: list[Given] = []
    for name, value in places:
        if numbers[name]:
            number = numbers[name].pop(0)
            found.append(Given.of(number, rule.inputs[number], value, name))
        elif isinstance(value, Tensor):
            raise _misfit(rule, f"it has no operand for the tensor argument {name!r}")
    return found


def is_list(argument: Any) -> bool:
    """Whether an argument of a schema is a list of tensors."""
    text = str(argument.type)
    return text.startswith("List[") and "Tensor" in text


def _stars(rule: Rule, shaped: list[tuple[Operand, Shape]]) -> dict[str, int]:
    """How many dims each starred factor stands for."""
    lengths: dict[str, int] = {}
    for operand, shape in shaped * len(shaped):
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
        name = dim.factors[0] if dim.star else ""
        found += [Dim((f"{name}.{at}",)) for at in range(lengths.get(name, 0))] if dim.star else [dim]
    return found


def _solve(rule: Rule, opened: Sequence[tuple[list[Dim], Given]], known: Mapping[str, int]) -> dict[str, int]:
    """The sizes of all factors in the order of the text; those that are a dim alone tell the rest of each group."""
    sizes, sized = dict(known), list[tuple[Dim, int, bool]]()
    for dims, given in opened:
        shape = given.shape or ()
        if len(dims) != len(shape):
            raise _misfit(rule, f"an operand of {len(dims)} dims has the shape {list(shape)}")
        sized += [(dim, size, given.loose) for dim, size in zip(dims, shape)]
    for dim, size, _ in sized:
        if len(dim.factors) == 1 and size != -1:
            before = sizes.setdefault(dim.factors[0], size)
            if 1 in (before, size):  # one of them is broadcast
                sizes[dim.factors[0]] = max(before, size)
    order = dict.fromkeys(factor for dim, *_ in sized for factor in dim.factors)
    groups = [(dim, size) for dim, size, _ in sized if len(dim.factors) > 1 and size != -1]
    for dim, size in groups * len(order):
        unknown = [factor for factor in dim.factors if factor not in sizes]
        rest = math.prod(sizes[factor] for factor in dim.factors if factor in sizes)
        if len(unknown) == 1 and rest:
            sizes[unknown[0]] = size // rest
    lost = [factor for factor in order if factor not in sizes]
    if lost:
        raise _misfit(rule, f"the size of {lost[0]!r} cannot be told")
    for dim, size, loose in sized:
        product = dim.size(sizes)
        if size not in (product, -1) and not (loose and _is_broadcast(dim, size, sizes)):
            raise _misfit(rule, f"{' '.join(dim.factors) or dim.literal} is {product} and {size}")
    return {factor: sizes[factor] for factor in order}


def _is_broadcast(dim: Dim, size: int, sizes: Mapping[str, int]) -> bool:
    return len(dim.factors) == 1 and size == 1 and sizes[dim.factors[0]] != 1


def base(factor: str) -> str:
    """The name in a rule of a factor: of one dim of a starred factor, such as a.0, that one."""
    return factor.split(".")[0]


def _misfit(rule: Rule, why: str) -> RuleError:
    todo = "Write one operand per argument, one name per dim."
    return RuleError(f"the rule does not fit the call: {why}\n  {rule.text}\n  {todo}")
