"""The table of rules, and `match`: what the rule of an op says about one call of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from sbpc._compat import OpOverload
from sbpc.errors import RuleError
from sbpc.graph.operands import hashable, named_arguments
from sbpc.rules.binding import Bound, base, bind, divides, flat_outputs, signatures
from sbpc.rules.grammar import parse
from sbpc.rules.match import FREE, Arguments, Count, Entry, Kernel, Match, Write, overloads
from sbpc.rules.predicate import holds
from sbpc.rules.two_phase import take_apart

TABLE: dict[OpOverload, Entry] = {}
GENERATORS: list[Callable[[OpOverload], Entry | None]] = []
MATCHES: dict[Any, Match | None] = {}
KEPT = 4_000  # of MATCHES, which take some 16 KB each; a large step has some hundreds


def rule(
    ops: OpOverload | str,
    text: str | Write,
    *,
    flops: str | Count | None = None,
    local: Kernel | None = None,
    nonempty: str = "",
    view: bool = False,
    replace: bool = False,
) -> None:
    """Give an op, or those of ATen that a text names, a rule: its string, or a function of its (fake) arguments by
    name and its outputs that returns one.

    flops: "2 m k n" (or "1/3 m k"), FREE, WRITTEN, or a function of the match; by default one per point. local:
    what runs on shards where the op alone is not enough.
    nonempty: factors (without the digits that a function appends) that may leave no rank an empty shard.

    Raises RuleError for a malformed string, or for an op that has a rule already unless `replace` is set.
    """
    if isinstance(text, str):
        parse(text)
    for op in overloads(ops) if isinstance(ops, str) else [ops]:
        if op in TABLE and not replace:
            todo = "Pass replace=True to put another in its place."
            raise RuleError(f"{op} has a rule already\n  {TABLE[op].text}\n  {todo}")
        put(op, Entry(op, text, FREE if view else flops, local, tuple(nonempty.split()), view))


def put(op: OpOverload, made: Entry | None) -> None:
    """Make this the row of `op`; None takes its row away."""
    TABLE.pop(op, None)
    if made is not None:
        TABLE[op] = made
    MATCHES.clear()


def row(op: OpOverload) -> Entry | None:
    """The row of `op`: registered, or else generated."""
    if op in TABLE:
        return TABLE[op]
    return next((made for made in (generate(op) for generate in GENERATORS) if made is not None), None)


def match(op: OpOverload, args: Sequence[Any], kwargs: Arguments, outputs: Any) -> Match | None:
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
    key = op, hashable((args, kwargs, outputs), lambda value: (Tensor, tuple(value.shape), value.dtype))
    try:
        if key in MATCHES:
            return MATCHES[key]
    except TypeError:  # symbolic sizes have no hash
        return _match(op, args, kwargs, outputs)
    found = MATCHES[key] = _match(op, args, kwargs, outputs)
    if len(MATCHES) > KEPT:
        del MATCHES[next(iter(MATCHES))]
    return found


def match_of(node: Node) -> Match | None:
    """The rule of a node's op bound to its call, None if there is none."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
    return match(node.target, args, dict(kwargs), node.meta["val"])


def _match(op: OpOverload, args: Sequence[Any], kwargs: Arguments, outputs: Any) -> Match | None:
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
    offered, phases = signatures(bound), None
    through = {name: function for factors, function in parsed.via for name in factors}
    factors = frozenset(s.factor for s in offered if s.factor is not None and base(s.factor) in through)
    if factors:
        (name,) = set(through.values())
        phases = take_apart(name, named, flat_outputs(outputs), factors, offered, match)
        offered = tuple(s for s in offered if s.factor not in factors or s in phases.ways)
    return Match(op, parsed, bound.sizes, offered, divides(bound), nonempty, made.view, bound, made, phases)


def applied(
    op: OpOverload, text: str, named: Arguments, outputs: Any, known: Mapping[str, int] = MappingProxyType({})
) -> Bound | None:
    """A rule string bound to a call, None if its when(...) does not hold. Raises RuleError if it does not fit the
    call."""
    parsed = parse(text)
    try:
        bound = bind(parsed, op._schema, named, outputs, known)
    except RuleError as error:
        raise RuleError(f"{op}: {error}") from None
    return bound if parsed.when is None or holds(parsed.when, {**named, **bound.sizes}) else None
