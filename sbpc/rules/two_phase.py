"""Two-phase splits: an op taken apart into ATen calls, in which a factor may be split that the op alone cannot bear.

A softmax over a split dim takes each rank's maxima, then the largest of them, each rank's sum, then the sum of those.
The calls are traced at global shapes from a plain function, and each signature of the op gives every one of them a
signature by its ordinary rule; where a factor is split through the function, what comes out P is boxed to B at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from sbpc._compat import OpOverload, TorchDispatchMode
from sbpc.errors import RuleError
from sbpc.graph.operands import leaves
from sbpc.mesh.states import B, Partial, State
from sbpc.rules.binding import Signature, flat_outputs
from sbpc.rules.match import Arguments, Match, Phases, SubOp, ValueNumber, Way, filled

aten = torch.ops.aten
NARROW = (torch.float16, torch.bfloat16)
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {}


def decomposition(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets rules name `function` in `via f = NAME`: it takes the arguments of the op in schema order and returns its
    outputs.

    It is written in ATen calls that have rules. Where a rule splits a dim through it, partial results are completed
    at once, by small collectives between the calls. Tensors of 16 bits come in as float32; outputs are cast to the
    dtypes of the op's. What the op does not return may be anything.
    """
    DECOMPOSITIONS[function.__name__] = function
    return function


def take_apart(
    name: str,
    named: Arguments,
    outputs: Sequence[Any],
    factors: frozenset[str],
    signatures: Sequence[Signature],
    match: Callable[..., Match | None],
) -> Phases:
    """The phases of a call of an op. named: its arguments. match: what finds the rule of a sub-op.

    Raises RuleError if there is no function of this name, or if it does not give what the op gives.
    """
    if name not in DECOMPOSITIONS:
        raise RuleError(f"no decomposition is called {name!r}\n  There are {', '.join(sorted(DECOMPOSITIONS))}.")
    recorder, wanted = _traced(DECOMPOSITIONS[name], named, outputs)
    live, parts = {number for number in wanted if number is not None}, []
    for number, op, args, kwargs, val in reversed(recorder.calls):
        if number in live:
            reads = tuple(place.number for place in leaves((args, kwargs), ValueNumber))
            matched = match(op, *filled((args, kwargs), recorder.values), val)
            if matched is None:
                raise RuleError(f"{name} calls {op}, which has no rule\n  Write it in ops that have one.")
            parts.append(SubOp(number, matched, args, kwargs, reads, val))
            live.update(reads)
    ordered = tuple(reversed(parts))
    ways = {s: way for s in signatures if (way := _way(s, ordered, wanted, s.factor in factors, name)) is not None}
    return Phases(factors, ordered, tuple(wanted), ways)


def _way(
    signature: Signature, parts: Sequence[SubOp], outputs: Sequence[int | None], at_once: bool, name: str
) -> Way | None:
    """The signatures of all sub-ops where the op has `signature`, None if they do not go together.

    at_once: partial results are boxed to B at once, except for outputs that the op claims to leave partial.
    """
    states: dict[int, State] = dict(enumerate(signature.inputs))
    claims = {number: claimed for number, claimed in zip(outputs, signature.outputs) if number is not None}
    for part in reversed(parts):
        if part.match.op is aten._to_copy.default and part.number in claims:  # before an output is cast
            claims.setdefault(part.reads[0], claims[part.number])
    chosen = []
    for part in parts:
        read = tuple(states[number] for number in part.reads)
        fitting = next((s for s in part.match.signatures if s.inputs == read), None)
        if fitting is None:
            return None
        chosen.append(fitting)
        made = fitting.outputs[0]
        reduced = at_once and isinstance(made, Partial) and claims.get(part.number) != made
        states[part.number] = B if reduced else made
    for number, claimed in claims.items():
        if states[number] != claimed:
            if at_once:
                raise RuleError(f"{name} gives {states[number]} for {claimed} in {signature}\n  Mend the rule or it.")
            return None
    return Way(tuple(chosen), states)


# --- tracing ----------------------------------------------------------------------------------------------------------
class Recorded(NamedTuple):
    """A call that gives value `number`; places stand among its arguments for what it reads."""

    number: int
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Tensor


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records the ATen calls made on tensors without data, and which value each argument is."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Tensor] = {}
        self.numbers: dict[int, int] = {}
        self.calls: list[Recorded] = []

    def add(self, value: Tensor) -> Tensor:
        """Give a value its number."""
        self.numbers[id(value)] = len(self.values)  # it stays in `values`, so that its id is its own
        self.values[len(self.values)] = value
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # an op made of others is not taken apart where another mode is tracing
            made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        made = func(*args, **(kwargs or {}))
        assert isinstance(made, Tensor), f"{func} gives several values: use ops that give one"
        number = len(self.values)
        self.calls.append(Recorded(number, func, *map_aggregate((tuple(args), dict(kwargs or {})), self.place), made))
        return self.add(made)

    def place(self, value: Any) -> Any:
        """A tensor as its place; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        assert id(value) in self.numbers, "a decomposition makes no tensors of its own"
        return ValueNumber(self.numbers[id(value)])


def _traced(
    function: Callable[..., Any], named: Arguments, outputs: Sequence[Any]
) -> tuple[_Recorder, list[int | None]]:
    """The calls that a function makes, and the numbers of what it returns; checked against the op's own outputs,
    which may be fewer."""
    recorder = _Recorder()

    def operand(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return recorder.add(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))

    given = map_aggregate(list(named.values()), operand)
    with torch.no_grad(), recorder:
        made = flat_outputs(function(*map_aggregate(given, _widened)))
        found: list[int | None] = []
        for value, expected in itertools.zip_longest(made[: len(outputs)], outputs):
            if not isinstance(expected, Tensor):
                found.append(None)
                continue
            if value is None or value.shape != expected.shape:
                shape = None if value is None else list(value.shape)
                what = f"{function.__name__} gives {shape} for {list(expected.shape)}"
                raise RuleError(f"{what}\n  Return what the op does.")
            found.append(recorder.numbers[id(value.to(expected.dtype))])
    return recorder, found


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in NARROW else value
