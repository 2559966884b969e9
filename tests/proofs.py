"""The proof of rules: every signature of a call is run on shards and compared with the op on whole tensors.

`shards` and `whole` of `sbpc.states` are the definition of S, B and P; a rule is right if running `Match.localize` on
the shards of the inputs gives the shards of the outputs. A check that cannot fail proves nothing, so `mutations` flips
each output state and asks that the check then fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sbpc.errors import LayoutError
from sbpc.layout import Layout
from sbpc.rules import Match, Signature, match
from sbpc.rules.registry import named_arguments
from sbpc.states import B, P, Split, State, chunk_sizes

AXES = ("x", "y")
STAND_INS: dict[Any, Callable[..., Any]] = {}  # for ops that no CPU runs: their formulas


@dataclass(frozen=True)
class Case:
    """One call of an op. zero: outputs that are zero by definition, where B and P are the same.

    tolerance: 0 asks for equality, which integer-valued data gives wherever the op is linear in what is split.
    values: whether the outputs hold values at all (not for `empty`).
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    zero: tuple[int, ...] = ()
    values: bool = True

    def run(self) -> Any:
        return call(self.op, *self.args, **self.kwargs)

    def match(self) -> Match:
        found = match(self.op, self.args, self.kwargs, self.run())
        assert found is not None, f"{self} has no rule"
        return found

    def __str__(self) -> str:
        named = [f"{name}={_text(value)}" for name, value in self.kwargs.items()]
        return f"{self.op}({', '.join([*map(_text, self.args), *named])})"


class Inapplicable(Exception):
    """The signature refuses these numbers of ranks: a group does not divide, or a shard is empty."""


def case(op: Any, *args: Any, **kwargs: Any) -> Case:
    """A case of an exact op."""
    return Case(op, args, kwargs)


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op at once."""
    return STAND_INS.get(op, op)(*args, **kwargs)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in an argument, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [found for item in value for found in tensors(item)] if isinstance(value, (list, tuple)) else []


def operands(one: Case) -> list[Tensor]:
    """The tensors of a call in schema order."""
    return [found for value in named_arguments(one.op, one.args, one.kwargs).values() for found in tensors(value)]


def check(
    one: Case,
    m: Match,
    chosen: Sequence[Signature],
    ranks: Sequence[int],
    order: Sequence[int] = (),
    mutant: Sequence[tuple[State, ...]] = (),
) -> None:
    """Run `one` under one signature per axis on a mesh of `ranks`; AssertionError or LayoutError if it is wrong.

    order: the order in which the axes cut a dim that several of them cut. mutant: output states to claim instead.
    """
    axes = AXES[: len(ranks)]
    generator = torch.Generator().manual_seed(7)
    ins = [Layout(axes, tuple(s.inputs[at] for s in chosen), tuple(order)) for at in range(len(chosen[0].inputs))]
    claims = mutant or [tuple(s.outputs[at] for s in chosen) for at in range(len(chosen[0].outputs))]
    outs = [Layout(axes, tuple(states), tuple(order)) for states in claims]
    places = list(itertools.product(*map(range, ranks)))
    sized = [locate(m, chosen, ranks, at, order or range(len(ranks))) for at in places]
    held = [layout.shards(value, ranks, generator) for layout, value in zip(ins, operands(one))]
    results = []
    for rank, (local, offsets) in enumerate(sized):
        mine = iter([parts[rank] for parts in held])
        args = [_swap(value, mine) for value in one.args]
        kwargs = {name: _swap(value, mine) for name, value in _ordered(one)}
        results.append(_flat(m.localize(call, args, kwargs, local, offsets)))
    for at, (layout, expected) in enumerate(zip(outs, _flat(one.run()))):
        parts = [result[at] for result in results]
        if isinstance(expected, Tensor):
            compare(layout, parts, expected, ranks, one)


def compare(layout: Layout, parts: Sequence[Tensor], expected: Tensor, ranks: Sequence[int], one: Case) -> None:
    """The rejoined parts are the expected tensor, shape, dtype and all."""
    assert all(part.dtype == expected.dtype for part in parts), "another dtype"
    places = list(itertools.product(*map(range, ranks)))
    for part, at in zip(parts, places):
        assert tuple(part.shape) == layout.local_shape(expected.shape, ranks, at), "another local shape"
    if not one.values:
        return
    if not one.tolerance:
        assert torch.equal(layout.whole(list(parts), ranks), expected), "other values"
        return
    # With rounding, replicas agree closely and not bit by bit: each choice of replicas is joined on its own.
    replicated = [axis for axis, state in enumerate(layout.states) if state == B]
    alone = [1 if axis in replicated else size for axis, size in enumerate(ranks)]
    for chosen in dict.fromkeys(tuple(at[axis] for axis in replicated) for at in places):
        mine = [part for part, at in zip(parts, places) if tuple(at[axis] for axis in replicated) == chosen]
        joined = layout.whole(mine, alone)
        assert torch.allclose(joined, expected, rtol=one.tolerance, atol=one.tolerance, equal_nan=True), "other values"


def locate(
    m: Match, chosen: Sequence[Signature], ranks: Sequence[int], at: Sequence[int], order: Sequence[int]
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The local factor sizes, and offsets of the factors of `shifts`, of the rank at coordinates `at`."""
    local, start = dict(m.sizes), dict.fromkeys(m.sizes, 0)
    for axis in order:
        factor = chosen[axis].factor
        if factor is None:
            continue
        if factor in m.divides and local[factor] % ranks[axis]:
            raise Inapplicable(f"{factor} = {local[factor]} over {ranks[axis]} ranks")
        sizes = chunk_sizes(local[factor], ranks[axis])
        if factor in m.nonempty and 0 in sizes:
            raise Inapplicable(f"an empty shard of {factor}")
        start[factor] += sum(sizes[: at[axis]])
        local[factor] = sizes[at[axis]]
    split = [signature.factor for signature in chosen]
    return local, {f: torch.tensor(start[f]) for f in m.sizes if f in m.shifts and f in split}


def mutations(m: Match, signature: Signature, one: Case) -> Iterator[tuple[int, State]]:
    """Every (output, other state) that would be a lie: P of a bool is none, and where a value is zero P is B."""
    for at, (state, output) in enumerate(zip(signature.outputs, _flat(one.run()))):
        if not isinstance(output, Tensor) or output.numel() == 0:
            continue
        others: list[State] = [B, P, *(Split(dim) for dim in range(output.dim()))]
        if at in one.zero or output.dtype == torch.bool or not one.values:
            others = [other for other in others if other not in ((B, P) if state in (B, P) else ())]
        yield from ((at, other) for other in others if other != state)


def refused(one: Case, m: Match, signature: Signature, ranks: int, at: int, other: State) -> bool:
    """Whether the check fails once output `at` is claimed to be `other`."""
    claims = [(state,) for state in signature.outputs]
    claims[at] = (other,)
    try:
        check(one, m, (signature,), (ranks,), mutant=claims)
    except (AssertionError, LayoutError):
        return True
    return False


@dataclass
class Count:
    """What was proved: signatures, signatures at some number of ranks, rejected mutants, ordered pairs."""

    signatures: int = 0
    runs: int = 0
    mutants: int = 0
    pairs: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.signatures + other.signatures,
            self.runs + other.runs,
            self.mutants + other.mutants,
            self.pairs + other.pairs,
        )


def prove(
    one: Case,
    ranks: Sequence[int] = (2, 3, 4),
    pairs: Sequence[tuple[int, int]] = ((2, 2), (3, 2)),
    mutants: bool = True,
) -> Count:
    """Prove every signature of a case at these numbers of ranks, reject its mutants, and prove every ordered pair."""
    m, count = one.match(), Count()
    for signature in m.signatures:
        proved = 0
        for number in ranks:
            try:
                check(one, m, (signature,), (number,))
            except Inapplicable:
                continue
            except (AssertionError, LayoutError, RuntimeError, IndexError) as error:
                raise AssertionError(f"{one}\n  {m.rule}\n  {signature} on {number} ranks: {error}") from error
            proved += 1
            if mutants and proved == 1:
                for at, other in mutations(m, signature, one):
                    assert refused(one, m, signature, number, at, other), (
                        f"{one}\n  {m.rule}\n  {signature}: output {at} passes as {other}"
                    )
                    count.mutants += 1
        assert proved, f"{one}\n  {m.rule}\n  {signature} is never applicable"
        count.signatures += 1
        count.runs += proved
    for first, second in itertools.product(m.signatures, repeat=2) if pairs else ():
        count.pairs += prove_pair(one, m, first, second, pairs)
    return count


def prove_pair(one: Case, m: Match, first: Signature, second: Signature, meshes: Sequence[tuple[int, int]]) -> int:
    """Prove `first` on axis 0 with `second` on axis 1, where both split one factor in both orders; 1 if it applied."""
    orders = [(0, 1), (1, 0)] if first.factor is not None and first.factor == second.factor else [(0, 1)]
    proved = 0
    for ranks, order in itertools.product(meshes, orders):
        try:
            check(one, m, (first, second), ranks, order)
            proved = 1
        except Inapplicable:
            continue
        except (AssertionError, LayoutError, RuntimeError, IndexError) as error:
            raise AssertionError(
                f"{one}\n  {m.rule}\n  {first} and {second} on {ranks}, order {order}: {error}"
            ) from error
    return proved


def _swap(value: Any, parts: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(parts)
    return [_swap(item, parts) for item in value] if isinstance(value, (list, tuple)) else value


def _ordered(one: Case) -> list[tuple[str, Any]]:
    """Keyword arguments in schema order."""
    return [
        (argument.name, one.kwargs[argument.name])
        for argument in one.op._schema.arguments
        if argument.name in one.kwargs
    ]


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, (list, tuple)) else repr(value)
