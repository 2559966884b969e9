"""The table of rules, and `match`: what the rule of an op says about one call of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Union

import torch
from torch import Tensor

from sbpc._compat import OpOverload
from sbpc.errors import RuleError
from sbpc.rules.binding import Bound, Signature, bind, divides, flat_outputs, signatures
from sbpc.rules.grammar import Rule, parse
from sbpc.rules.phases import Phases, take_apart
from sbpc.rules.predicate import holds

aten = torch.ops.aten
Call = Callable[..., Any]
Arguments = Mapping[str, Any]
Text = Union[
    str, "tuple[str, dict[str, int]]", None
]  # a rule string, if need be with sizes that the shapes do not tell
Write = Callable[[Arguments, Any], Text]
FREE = "0"  # flops of views and factories
WRITTEN = "written"  # one flop per element of the outputs


@dataclass(frozen=True)
class Entry:
    """One row of the table: how the rule of `op` is written, what it costs, how it runs on shards.

    source: "" for a rule of sbpc's own, else "proved", "unproved" or "reviewed, FILE:LINE".
    """

    op: OpOverload
    text: str | Write
    flops: str | Count | None
    local: Kernel | None
    nonempty: tuple[str, ...]
    view: bool
    source: str = ""


@dataclass(frozen=True)
class Match:
    """A rule bound to one call at global sizes.

    sizes: factor -> global size. signatures: all-B first. divides: factors that lead a group; every axis that cuts one
    must divide its (local) size. nonempty: factors that may leave no rank an empty shard. view: the outputs alias an
    input. shifts: factors of which `localize` wants the offset where they are split. phases: what runs in the place of the
    op where a factor is split `via` a function.
    """

    op: OpOverload
    rule: Rule
    sizes: dict[str, int]
    signatures: tuple[Signature, ...]
    divides: frozenset[str]
    nonempty: frozenset[str]
    view: bool
    bound: Bound
    entry: Entry
    phases: Phases | None = None

    @cached_property
    def shifts(self) -> frozenset[str]:
        return frozenset(
            factor for factor in self.sizes if any(factor.split(".")[0] == name for name, _ in self.rule.idx)
        )

    def flops(self, local: Mapping[str, Any]) -> Any:
        """The flops of the op at these factor sizes (numbers, arrays, sympy): by default `each` per point of its space."""
        text = self.entry.flops(self) if callable(self.entry.flops) else self.entry.flops
        if text is None:
            return math.prod((local[factor] for factor in self.points), start=self.each)
        if text == WRITTEN:
            outputs = [value.dims for value in self.bound.outputs if value.dims is not None]
            return sum(math.prod((dim.size(local) for dim in dims), start=1) for dims in outputs)
        number, *names = text.split()
        chosen = [
            f
            for name in names
            for f in self.sizes
            if (f.split(".")[0] if name.startswith("*") else f) == name.lstrip("*")
        ]
        top, _, bottom = number.partition("/")
        found = math.prod((local[factor] for factor in chosen), start=int(top))
        return found / int(bottom) if bottom else found

    @cached_property
    def each(self) -> int:
        """Flops per point: 1, or as many as an op has parts of that many points; one kernel does what they would do."""
        parts = self.phases.parts if self.phases is not None else ()
        return sum(not part.match.view and part.match.space == self.space for part in parts) or 1

    @cached_property
    def space(self) -> int:
        """The number of points at global sizes."""
        return math.prod(self.sizes[factor] for factor in self.points)

    @cached_property
    def points(self) -> tuple[str, ...]:
        """The factors that some tensor of the call has."""
        held = {
            f for value in (*self.bound.inputs, *self.bound.outputs) for dim in value.dims or () for f in dim.factors
        }
        return tuple(factor for factor in self.sizes if factor in held)

    def output_shape(self, at: int, local: Mapping[str, int]) -> list[int]:
        """The local shape of output `at`."""
        dims = self.bound.outputs[at].dims
        assert dims is not None
        return [dim.size(local) for dim in dims]

    def localize(
        self,
        call: Call,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        local: Mapping[str, int],
        offsets: Mapping[str, Any],
    ) -> Any:
        """Run (or emit) the op on shards by `call(op, *args, **kwargs)`, once or more; what it returns, or a tuple.

        args: those of the call with local values for tensors. local: factor -> local size. offsets: factor -> 0-dim
        int64 tensor, the global index of the first local element, for the factors of `shifts` that are split.
        """
        shard = Shard(self, call, args, kwargs, local, offsets)
        return shard.plain() if self.entry.local is None else self.entry.local(shard)


@dataclass(frozen=True)
class Shard:
    """One call on the shards of one rank, which a local kernel is to run (or emit); the fields of `Match.localize`."""

    match: Match
    call: Call
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    local: Mapping[str, int]
    offsets: Mapping[str, Any]

    @cached_property
    def given(self) -> dict[str, Any]:
        """The arguments by name, defaults included; integer arguments at global sizes."""
        return named_arguments(self.match.op, self.args, self.kwargs)

    def plain(self, /, **changed: Any) -> Any:
        """The op itself, its integer arguments at local sizes, and with these arguments in the place of its own."""
        placed, named = list(self.args), dict(self.kwargs)
        for fill in self.match.bound.fills:
            sizes = [dim.size(self.local) for dim in fill.dims]
            if fill.at < len(placed) or fill.name in named:
                changed.setdefault(fill.name, sizes[0] if fill.single else sizes)
        places = {argument.name: at for at, argument in enumerate(self.match.op._schema.arguments)} if changed else {}
        for name, value in changed.items():
            if places[name] < len(placed):
                placed[places[name]] = value
            else:
                named[name] = value
        return self.call(self.match.op, *placed, **named)

    def shape(self, at: int = 0) -> list[int]:
        """The local shape of output `at`."""
        return self.match.output_shape(at, self.local)

    def zeros(self) -> Any:
        """All outputs as zeros, in the dtype of the first argument."""
        like = next(iter(self.given.values()))
        made = [self.call(aten.new_zeros.default, like, self.shape(at)) for at in range(len(self.match.bound.outputs))]
        return made[0] if len(made) == 1 else tuple(made)


Count = Callable[[Match], str]
Kernel = Callable[[Shard], Any]
TABLE: dict[OpOverload, Entry] = {}
GENERATORS: list[Callable[[OpOverload], Entry | None]] = []
MATCHES: dict[Any, Match | None] = {}


def rule(
    op: OpOverload,
    text: str | Write,
    *,
    flops: str | Count | None = None,
    local: Kernel | None = None,
    nonempty: str = "",
    view: bool = False,
    replace: bool = False,
) -> None:
    """Give `op` a rule: its string, or a function of its (fake) arguments by name and its outputs that returns one.

    flops: "2 m k n" (or "1/3 m k"), FREE, WRITTEN, or a function of the match; by default one per point. local:
    what runs on shards where the op alone is not enough.
    nonempty: factors (without the digits that a function appends) that may leave no rank an empty shard.

    Raises RuleError for a malformed string, or for an op that has a rule already unless `replace` is set.
    """
    if isinstance(text, str):
        parse(text)
    if op in TABLE and not replace:
        raise RuleError(
            f"{op} has a rule already\n  {TABLE[op].text}\n  Pass replace=True to put another in its place."
        )
    put(op, entry(op, text, flops=FREE if view else flops, local=local, nonempty=nonempty, view=view))


def put(op: OpOverload, made: Entry | None) -> None:
    """Make this the row of `op`; None takes its row away."""
    TABLE.pop(op, None)
    if made is not None:
        TABLE[op] = made
    MATCHES.clear()


def entry(
    op: OpOverload,
    text: str | Write,
    *,
    flops: str | Count | None = None,
    local: Kernel | None = None,
    nonempty: str = "",
    view: bool = False,
) -> Entry:
    """A row for the table."""
    return Entry(op, text, flops, local, tuple(nonempty.split()), view)


def row(op: OpOverload) -> Entry | None:
    """The row of `op`: registered, or else generated."""
    if op in TABLE:
        return TABLE[op]
    return next((made for made in (generate(op) for generate in GENERATORS) if made is not None), None)


def match(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> Match | None:
    """The rule of `op` bound to this call, or None if there is none for it. Tensors stand in the place of nodes.

    >>> import torch, sbpc.rules
    >>> x, w = torch.ones(4, 6), torch.ones(6, 8)
    >>> for signature in match(torch.ops.aten.mm.default, (x, w), {}, x @ w).signatures:
    ...     print(signature)
    B, B -> B
    S(0), B -> S(0)    split m
    S(1), S(0) -> P    split k
    B, S(1) -> S(1)    split n
    P, B -> P
    B, P -> P

    Raises RuleError if the rule does not fit the call.
    """
    key = (op, _key(args), _key(kwargs), _key(outputs))
    try:
        if key in MATCHES:
            return MATCHES[key]
    except TypeError:  # symbolic sizes have no hash
        return _match(op, args, kwargs, outputs)
    MATCHES[key] = _match(op, args, kwargs, outputs)
    return MATCHES[key]


def named_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    found = {}
    for at, argument in enumerate(op._schema.arguments):
        given = args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
        found[argument.name] = given
    return found


def _match(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> Match | None:
    made = row(op)
    if made is None:
        return None
    named = named_arguments(op, args, kwargs)
    written = made.text if isinstance(made.text, str) else made.text(named, outputs)
    if written is None:
        return None
    text, known = (written, {}) if isinstance(written, str) else written
    bound = applied(op, text, named, outputs, known)
    if bound is None:
        return None
    parsed = bound.rule
    nonempty = frozenset(f for f in bound.sizes if f in made.nonempty or f.rstrip("0123456789.") in made.nonempty)
    found, phases = signatures(bound), None
    through = {name: function for factors, function in parsed.via for name in factors}
    factors = frozenset(s.factor for s in found if s.factor is not None and s.factor.split(".")[0] in through)
    if factors:
        (name,) = set(through.values())
        phases = take_apart(name, named, flat_outputs(outputs), factors, found, match)
        found = tuple(s for s in found if s.factor not in factors or s in phases.ways)
    return Match(op, parsed, bound.sizes, found, divides(bound), nonempty, made.view, bound, made, phases)


def applied(
    op: OpOverload, text: str, named: Arguments, outputs: Any, known: Mapping[str, int] = MappingProxyType({})
) -> Bound | None:
    """A rule string bound to a call, None if its when(...) does not hold. Raises RuleError if it does not fit the call."""
    parsed = parse(text)
    try:
        bound = bind(parsed, op._schema, named, outputs, known)
    except RuleError as error:
        raise RuleError(f"{op}: {error}") from None
    return bound if parsed.when is None or holds(parsed.when, {**named, **bound.sizes}) else None


def _key(value: Any) -> Any:
    """A hashable picture of an argument: tensors by shape and dtype."""
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return (list, *map(_key, value))
    if isinstance(value, Mapping):
        return (dict, *((name, _key(item)) for name, item in value.items()))
    return type(value), value


__all__ = [
    "FREE",
    "GENERATORS",
    "TABLE",
    "WRITTEN",
    "Arguments",
    "Call",
    "Count",
    "Entry",
    "Kernel",
    "Match",
    "Shard",
    "Signature",
    "Write",
    "applied",
    "entry",
    "match",
    "named_arguments",
    "put",
    "row",
    "rule",
]
