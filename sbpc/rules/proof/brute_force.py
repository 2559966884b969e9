"""Brute force: every tuple of input states of a call is tried on two ranks, and what comes out says which are valid.

It knows nothing of rules: it runs the op itself on shards, with each integer that stands for a size once as it is and
once cut. So it finds what a rule lacks (`lacking`), and what an op without a rule can do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbpc.errors import RuleError
from sbpc.graph.operands import with_arguments
from sbpc.mesh.layout import Layout, chunk
from sbpc.mesh.states import B, Names, Numbers, P, Partial, Split, State, chunk_sizes, shards
from sbpc.rules.binding import Signature, flat_outputs, has_sums
from sbpc.rules.proof.prove import AXES, BROKEN, Case, Refuted, call, compare, swapped
from sbpc.rules.proof.worker import Lost, attempt

RANKS = 2
MOST = 20_000
CRASHES = 3  # after which an op is taken to crash on shapes that do not fit


@dataclass(frozen=True)
class Size:
    """An integer argument that is the size of something: by name, and its place where it is one of several."""

    name: str
    at: int | None


class Pattern(NamedTuple):
    """Which dim of each operand is split, None for none, and which integer is cut with it."""

    dims: tuple[int | None, ...]
    size: Size | None


@dataclass(frozen=True)
class SearchResult:
    """The valid signatures of a call, each with the integer that is cut for it.

    tried, left: how many patterns were tried, and how many were left out. lost: why each worker that crashed or hung
    ended.
    """

    signatures: dict[Signature, Size | None]
    tried: int
    left: int
    lost: Names


def search(
    one: Case, sizes: Sequence[Size] = (), seconds: float = 20.0, reductions: Sequence[Partial] = (P,)
) -> SearchResult:
    """All signatures of a call that hold. An output gets the first state of B, P and S that holds for all values.

    reductions: the kinds of partial results that an output may be, tried in turn.

    An op that crashes or hangs on more than CRASHES patterns does not check shapes. Then, or where there are more than
    MOST patterns, only those are tried that split all dims of one size. Raises RuleError if the op crashes or hangs on
    those as well.
    """
    every = list(patterns(one, sizes))
    fitting = [pattern for pattern in every if alike(one, pattern)]
    lost: list[str] = []
    for chosen in (every, fitting) if len(every) <= MOST else (fitting,):
        found: dict[Signature, Size | None] = {}
        crashes = 0
        for pattern, result in attempt(lambda pattern: of_pattern(one, pattern, reductions), chosen, seconds):
            if isinstance(result, Lost):
                crashes += 1
                lost.append(result.why)
                if crashes > CRASHES:
                    break
            else:
                for signature in result:
                    found.setdefault(signature, pattern.size)
        else:
            return SearchResult(found, len(chosen), len(every) - len(chosen), tuple(lost))
    raise RuleError(f"{one.op} crashes or hangs on {CRASHES + 1} calls on shards\n  Give it smaller examples.")


def confirm(
    one: Case, found: Mapping[Signature, Size | None], ranks: Numbers, seconds: float = 20.0
) -> dict[Signature, dict[int, bool]]:
    """By signature and number of ranks: whether it holds there. A number that leaves a rank an empty shard is not
    tried."""

    def holds_on(item: tuple[Signature, int]) -> bool:
        signature, number = item
        return holds(one, signature.inputs, found[signature], signature.outputs, number)

    held: dict[Signature, dict[int, bool]] = {signature: {} for signature in found}
    cut = {s: [v.shape[i.dim] for i, v in zip(s.inputs, one.operands) if isinstance(i, Split)] for s in found}
    items = [(s, number) for s in found for number in ranks if not any(0 in chunk_sizes(n, number) for n in cut[s])]
    for (signature, number), result in attempt(holds_on, items, seconds):
        held[signature][number] = result is True
    return held


def alike(one: Case, pattern: Pattern) -> bool:
    """Whether what is split is one dim of every operand that has a dim of that size."""
    split = [value.shape[dim] for value, dim in zip(one.operands, pattern.dims) if dim is not None]
    holders = [value for value in one.operands if split and split[0] in value.shape]
    return len(set(split)) < 2 and len(split) == len(holders)


def patterns(one: Case, sizes: Sequence[Size]) -> Iterator[Pattern]:
    """Every way to split dims of the operands, each with every integer that may be cut with them."""
    each = [[None, *(dim for dim, size in enumerate(value.shape) if size > 1)] for value in one.operands]
    for dims in itertools.product(*each):
        for size in (None, *sizes):
            if size is None or any(dim is not None for dim in dims):
                yield Pattern(dims, size)


def of_pattern(one: Case, pattern: Pattern, reductions: Sequence[Partial]) -> list[Signature]:
    """The valid signatures with these splits: every other operand is whole, or partial where it holds numbers."""
    dims, size = pattern
    given: list[State] = [B if dim is None else Split(dim) for dim in dims]
    if outcome([replace(one, values=False)], given, size, reductions) is None:  # of their shapes alone
        return []
    calls = [one, *filter(runs, others(one))]
    exact = all(not value.is_floating_point() for value in one.operands)
    added = [has_sums(value.dtype) and (exact or value.is_floating_point()) for value in one.operands]
    numbers = [at for at, dim in enumerate(dims) if dim is None and added[at]]
    found = []
    for count in range(len(numbers) + 1):
        for chosen in itertools.combinations(numbers, count):
            ins = [P if at in chosen else state for at, state in enumerate(given)]
            outs = outcome(calls, ins, size, reductions)
            if outs is not None:
                found.append(Signature(tuple(ins), outs))
    return found


def others(one: Case) -> Iterator[Case]:
    """Calls of the same shapes on other values: single true and false elements, another order, few special numbers."""
    for lone in (True, False):
        changed = []
        for value in one.operands:
            if value.dtype == torch.bool:
                single = torch.arange(value.numel()).view(value.shape) == 0
                changed.append(single if lone else ~single)
            else:
                changed.append(value.flatten().roll(1 + lone).view(value.shape))
        args, kwargs = swapped(one, changed)
        yield replace(one, args=tuple(args), kwargs=kwargs)
    lone = sum(value.is_floating_point() for value in one.operands) == 1
    for special in ((0.0, 1.0, -1.0, 2.0, 3.0), *([(0.0, torch.inf, -torch.inf, torch.nan)] if lone else [])):
        args, kwargs = swapped(one, [draw(value, special, at) for at, value in enumerate(one.operands)])
        yield replace(one, args=tuple(args), kwargs=kwargs)


def draw(value: Tensor, special: Sequence[float], seed: int) -> Tensor:
    """A tensor like `value` of these numbers, if it holds real ones."""
    if not value.is_floating_point():
        return value
    chosen = torch.randint(0, len(special), value.shape, generator=torch.Generator().manual_seed(seed))
    return torch.tensor(special, dtype=value.dtype)[chosen]


def runs(one: Case) -> bool:
    """Whether the op takes these values."""
    try:
        one.run()
    except BROKEN:
        return False
    return True


def outcome(
    calls: Sequence[Case], ins: Sequence[State], size: Size | None, reductions: Sequence[Partial]
) -> tuple[State, ...] | None:
    """The states of the outputs if the inputs are in `ins`, the same in all calls; None if an output is in no state."""
    left: list[list[State]] = []
    for one in calls:
        made = outputs_of(one, ins, size, RANKS)
        if made is None:
            return None
        dims = [v.dim() if isinstance(v, Tensor) else None for _, v in made]
        left = left or [[B] if n is None else [B, *reductions, *map(Split, range(n))] for n in dims]
        left = [[s for s in states if in_state(parts, s, v, one)] for states, (parts, v) in zip(left, made)]
        if not all(left):
            return None
    return tuple(states[0] for states in left)


def holds(one: Case, ins: Sequence[State], size: Size | None, outs: Sequence[State], ranks: int) -> bool:
    """Whether the outputs are in the states `outs` if the inputs are in `ins`."""
    made = outputs_of(one, ins, size, ranks)
    return made is not None and all(in_state(parts, s, v, one) for (parts, v), s in zip(made, outs))


def outputs_of(
    one: Case, ins: Sequence[State], size: Size | None, ranks: int
) -> list[tuple[tuple[Any, ...], Any]] | None:
    """For each output what the ranks have and what one device has; None if the op fails on shards."""
    generator = torch.Generator().manual_seed(11)
    held = [parts_of(value, state, generator, ranks) for value, state in zip(one.operands, ins)]
    results = []
    for rank in range(ranks):
        args, kwargs = resized(one, *swapped(one, [parts[rank] for parts in held]), size, rank, ranks)
        try:
            results.append(flat_outputs(call(one.op, *args, **kwargs)))
        except BROKEN:
            return None
    wanted = flat_outputs(one.run())
    if any(len(result) != len(wanted) for result in results):
        return None
    return list(zip(zip(*results), wanted))


def parts_of(value: Tensor, state: State, generator: torch.Generator, ranks: int = RANKS) -> list[Tensor]:
    """What each rank holds; partial sums of real numbers, since rounding is linear in whole ones."""
    if state != P or not value.is_floating_point():
        return shards(value, state, ranks, generator)
    noise = [torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value) for _ in range(ranks - 1)]
    return [value - sum(noise), *noise]


def resized(
    one: Case, args: list[Any], kwargs: dict[str, Any], size: Size | None, rank: int, ranks: int = RANKS
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with one of the integers that are given cut."""
    given = dict(zip((argument.name for argument in one.op._schema.arguments), args)) | kwargs
    if size is None or size.name not in given:
        return args, kwargs

    def cut(item: int) -> int:
        return chunk(item, (0,), (ranks,), (rank,))[1]

    value = given[size.name]
    if size.at is not None:
        value = [cut(item) if at == size.at and item > 0 else item for at, item in enumerate(value)]
    return with_arguments(one.op, args, kwargs, {size.name: value if size.at is not None else cut(value)})


def in_state(parts: Sequence[Any], state: State, expected: Any, one: Case) -> bool:
    """Whether these parts of an output are in a state; what is no tensor is in any."""
    if not isinstance(expected, Tensor):
        return True
    no_number = not has_sums(expected.dtype) or (expected.is_complex() and state != P)  # complex ones have no order
    if (isinstance(state, Partial) and no_number) or not all(isinstance(part, Tensor) for part in parts):
        return False
    try:
        compare(Layout(AXES[:1], (state,)), parts, expected, (len(parts),), replace(one, tolerance=close(one)))
    except Refuted:
        return False
    return True


def close(one: Case) -> float:
    """How far apart equal values may be: partial sums of real numbers are rounded."""
    narrow = any(value.dtype in (torch.bfloat16, torch.float16) for value in one.operands)
    return max(one.tolerance, 5e-2 if narrow else 1e-9)


# --- what follows from what -------------------------------------------------------------------------------------------
def follows(signature: Signature, other: Signature) -> bool:
    """Whether `other` does what `signature` does, its inputs and outputs boxed without sending anything."""
    ins = all(given == wanted or is_free(given, wanted) for given, wanted in zip(signature.inputs, other.inputs))
    return ins and all(made == asked or is_free(made, asked) for made, asked in zip(other.outputs, signature.outputs))


def is_free(before: State, after: State) -> bool:
    """Whether boxing sends nothing: a slice, a keep or a pad."""
    return (
        isinstance(after, (Split, Partial)) if before == B else isinstance(before, Split) and isinstance(after, Partial)
    )
