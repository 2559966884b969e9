"""The proof of rules: every signature of a call is run on shards and compared with the op on whole tensors.

`shards` and `whole` of `sbpc.mesh.states` are the definition of S, B and P; a rule is right if running
`Match.localize` on the shards of the inputs gives the shards of the outputs. A check that cannot fail proves
nothing, so `mutations` flips each output state and asks that the check then fails.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from sbpc.errors import LayoutError, RuleError, shown
from sbpc.graph.operands import leaves, named_arguments
from sbpc.mesh.layout import Layout
from sbpc.mesh.states import Axes, B, Ints, Numbers, P, Split, State, chunk_sizes, counted
from sbpc.rules.binding import Signature, flat_outputs, has_sums
from sbpc.rules.match import Match, Phases
from sbpc.rules.registry import match
from sbpc.rules.strides import laid_out

AXES = ("x", "y")
RANKS = (2, 3, 4)
STAND_INS: dict[Any, Callable[..., Any]] = {}  # for ops that no CPU runs: their formulas
BROKEN = (Exception,)  # what an op raises on odd shards: ops of a user's own raise errors of their own


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
    zero: Ints = ()
    values: bool = True

    def run(self) -> Any:
        """The outputs of the op on whole tensors, computed once."""
        return self.whole

    @cached_property
    def whole(self) -> Any:
        return call(self.op, *self.args, **self.kwargs)

    @cached_property
    def operands(self) -> list[Tensor]:
        """The tensors of the call in schema order."""
        return leaves(named_arguments(self.op, self.args, self.kwargs), Tensor)

    def match(self) -> Match:
        """The rule bound to this call. Raises RuleError if there is none."""
        found = match(self.op, self.args, self.kwargs, self.run())
        if found is None:
            raise RuleError(f"{self} has no rule\n  Look at its when(...).")
        return found

    def __str__(self) -> str:
        named = [f"{name}={_text(value)}" for name, value in self.kwargs.items()]
        return f"{self.op}({', '.join([*map(_text, self.args), *named])})"


class Inapplicable(Exception):
    """The signature refuses these numbers of ranks: a group does not divide, or a shard is empty."""


class Refuted(Exception):
    """A signature does not hold. expected, found: both results, where the op ran at all."""

    def __init__(self, why: str, expected: Any = None, found: Any = None) -> None:
        super().__init__(why)
        self.expected, self.found = expected, found


def prove(
    one: Case, ranks: Numbers = RANKS, pairs: Sequence[tuple[int, int]] = ((2, 2), (3, 2)), mutants: bool = True
) -> Counter[str]:
    """Prove every signature of a case at these numbers of ranks, reject its mutants, and prove every ordered pair.

    Returns how many signatures were proved, runs of one at some number of ranks, mutants that were rejected, and pairs.

    Raises RuleError with the signature, the inputs and both results for one that does not hold.
    """
    m = one.match()
    count = sum((prove_signature(one, m, signature, ranks, mutants) for signature in m.signatures), Counter[str]())
    for first, second in itertools.product(m.signatures, repeat=2) if pairs else ():
        count["pairs"] += prove_pair(one, m, first, second, pairs)
    return count


def prove_signature(one: Case, m: Match, signature: Signature, ranks: Numbers, mutants: bool) -> Counter[str]:
    """Prove a signature at these numbers of ranks, and reject its mutants at the first that it applies to; see
    `prove`."""
    count = Counter(signatures=1)
    for number in ranks:
        try:
            results = run(one, m, (signature,), (number,))
            agree(one, results, [(state,) for state in signature.outputs], (number,))
        except Inapplicable:
            continue
        except Refuted as error:
            raise refusal(one, m, f"{short(signature)}, on {number} ranks", error) from error
        count["runs"] += 1
        if mutants and count["runs"] == 1:
            count["mutants"] = reject(one, m, signature, number, results)
    if not count["runs"]:
        todo = f"Give sizes that one of {', '.join(map(str, ranks))} divides."
        raise RuleError(f"{one}: {signature} is never applicable\n  {m.rule}\n  {todo}")
    return count


def check(one: Case, m: Match, chosen: Sequence[Signature], ranks: Numbers, order: Numbers = ()) -> None:
    """Run `one` under one signature per axis on a mesh of `ranks`; raises Refuted if that is wrong, or Inapplicable.

    order: the order in which the axes cut a dim that several of them cut.
    """
    claims = [tuple(s.outputs[at] for s in chosen) for at in range(len(chosen[0].outputs))]
    agree(one, run(one, m, chosen, ranks, order), claims, ranks, order)


def run(one: Case, m: Match, chosen: Sequence[Signature], ranks: Numbers, order: Numbers = ()) -> list[list[Any]]:
    """The flat outputs of every rank, in row-major order."""
    axes, order = AXES[: len(ranks)], tuple(order)
    generator = torch.Generator().manual_seed(7)
    ins = [Layout(axes, tuple(s.inputs[at] for s in chosen), order) for at in range(len(chosen[0].inputs))]
    held = [layout.shards(value, ranks, generator) for layout, value in zip(ins, one.operands)]
    if m.phases is not None and m.phases.apart(chosen):
        return run_apart(m, m.phases, chosen, ranks, order, held)
    given = [swapped(one, [parts[rank] for parts in held]) for rank in range(math.prod(ranks))]
    return run_call(m, chosen, ranks, order, given)


def run_call(m: Match, chosen: Sequence[Signature], ranks: Numbers, order: Numbers, given: Any) -> list[list[Any]]:
    """The flat outputs of one call on every rank. given: the arguments by rank."""
    places = itertools.product(*map(range, ranks))
    sized = [locate(m, chosen, ranks, at, order) for at in places]
    results = []
    for rank, ((local, offsets), (args, kwargs)) in enumerate(zip(sized, given)):
        try:
            results.append(flat_outputs(m.localize(call, args, kwargs, local, offsets)))
        except BROKEN as error:
            raise Refuted(f"rank {rank} cannot run it: {str(error).strip().splitlines()[0]}") from error
    return results


def run_apart(
    m: Match, phases: Phases, chosen: Sequence[Signature], ranks: Numbers, order: Axes, held: Any
) -> list[list[Any]]:
    """The same of a call that is taken apart; where a value is read in other states than it comes out, it is boxed."""
    locate(m, chosen, ranks, (0,) * len(ranks), order)
    ways, axes, values = phases.along(chosen), AXES[: len(ranks)], dict(enumerate(held))
    if ways is None:
        raise Inapplicable("one of them has no way through the small graph")
    for at, part in enumerate(phases.parts):
        inner = [way.signatures[at] for way in ways]
        given = [part.arguments({n: parts[rank] for n, parts in values.items()}) for rank in range(math.prod(ranks))]
        made = [result for (result,) in run_call(part.match, inner, ranks, order, given)]
        before = Layout(axes, tuple(s.outputs[0] for s in inner), order)
        after = Layout(axes, tuple(way.states[part.number] for way in ways), order)
        values[part.number] = made if before == after else after.shards(before.whole(made, ranks), ranks)
    return [[None if n is None else values[n][rank] for n in phases.outputs] for rank in range(math.prod(ranks))]


def agree(
    one: Case,
    results: Sequence[Sequence[Any]],
    claims: Sequence[tuple[State, ...]],
    ranks: Numbers,
    order: Numbers = (),
) -> None:
    """Raises Refuted unless the ranks' outputs are in the states claimed of them, one per axis, what they must be."""
    for at, (states, expected) in enumerate(zip(claims, flat_outputs(one.run()))):
        if isinstance(expected, Tensor):
            layout = Layout(AXES[: len(ranks)], tuple(states), tuple(order))
            compare(layout, [result[at] for result in results], expected, ranks, one, at)


def compare(
    layout: Layout, parts: Sequence[Tensor], expected: Tensor, ranks: Numbers, one: Case, number: int = 0
) -> None:
    """Raises Refuted unless the rejoined parts are the expected tensor, shape, dtype and all."""
    places = list(itertools.product(*map(range, ranks)))
    for part, at in zip(parts, places):
        shape = layout.local_shape(expected.shape, ranks, at)
        if tuple(part.shape) != shape or part.dtype != expected.dtype:
            what = f"output {number} of rank {at[0] if len(at) == 1 else at} is {_text(part)}"
            wanted = f"{str(expected.dtype).removeprefix('torch.')}{list(shape)}"
            raise Refuted(f"{what}, not {wanted}", expected, part)
    if not one.values:
        return
    # With rounding, replicas agree closely and not bit by bit: each choice of replicas is joined on its own.
    replicated = [axis for axis, state in enumerate(layout.states) if state == B] if one.tolerance else []
    alone = [1 if axis in replicated else size for axis, size in enumerate(ranks)]
    for chosen in dict.fromkeys(tuple(at[axis] for axis in replicated) for at in places):
        mine = [part for part, at in zip(parts, places) if tuple(at[axis] for axis in replicated) == chosen]
        try:
            joined = layout.whole(mine, alone)
        except LayoutError as error:
            raise Refuted(f"output {number} differs between ranks that should hold the same", expected, mine) from error
        if not equal(joined, expected, one.tolerance):
            raise Refuted(f"output {number} has other values", expected, joined)


def equal(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether two tensors are equal, or close where that is all that can be asked."""
    if not tolerance:
        return torch.equal(counted(found), counted(expected))
    return torch.allclose(counted(found), counted(expected), rtol=tolerance, atol=tolerance, equal_nan=True)


def locate(
    m: Match, chosen: Sequence[Signature], ranks: Numbers, at: Numbers, order: Numbers
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The local factor sizes, and offsets of the factors of `shifts`, of the rank at coordinates `at`."""
    local, start = dict(m.sizes), dict.fromkeys(m.sizes, 0)
    for axis in order or range(len(ranks)):
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


def mutations(signature: Signature, one: Case) -> Iterator[tuple[int, State]]:
    """Every (output, other state) that would be a lie: P of what has no sums is none, and where a value is zero P is
    B."""
    for at, (state, output) in enumerate(zip(signature.outputs, flat_outputs(one.run()))):
        if not isinstance(output, Tensor) or output.numel() == 0:
            continue
        others: list[State] = [B, P, *(Split(dim) for dim in range(output.dim()))]
        if at in one.zero or not has_sums(output.dtype) or not one.values:
            others = [other for other in others if other not in ((B, P) if state in (B, P) else ())]
        yield from ((at, other) for other in others if other != state)


def reject(one: Case, m: Match, signature: Signature, ranks: int, results: Sequence[Sequence[Any]]) -> int:
    """How many mutants of a signature there are; raises RuleError if one of them passes for right."""
    count = 0
    for at, other in mutations(signature, one):
        claims = [(state,) for state in signature.outputs]
        claims[at] = (other,)
        try:
            agree(one, results, claims, (ranks,))
        except Refuted:
            count += 1
            continue
        what = f"{one}: with {short(signature)}, on {ranks} ranks output {at} passes as {other}\n  {m.rule}"
        raise RuleError(f"{what}\n  Give inputs that tell right from wrong: values that differ, none of them zero.")
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
        except Refuted as error:
            both = f"{short(first)} and {short(second)} in the order {order}, on {ranks} ranks"
            raise refusal(one, m, both, error) from error
    return proved


def short(signature: Signature) -> str:
    """A signature without alignment."""
    return str(signature).replace("    split", ", split")


def refusal(one: Case, m: Match, what: str, why: Refuted) -> RuleError:
    """The error for a rule that does not hold: the signature, the inputs and both results."""
    lines = [f"{one.op}: the rule is refuted: {what}: {why}", f"  {m.rule}", f"  {one}"]
    lines += [f"  operand {at}: {values(operand)}" for at, operand in enumerate(one.operands)]
    if why.expected is not None:
        lines += [f"  one device: {values(why.expected)}", f"  the ranks:  {values(why.found)}"]
    lines.append("  Fix the rule: leave the factor fixed (fix f) where no split of it is right.")
    return RuleError("\n".join(lines))


def values(value: Any) -> str:
    """Tensors as text, cut short."""
    text = str([part.tolist() for part in value] if isinstance(value, list) else value.tolist())
    return text if len(text) <= 120 else text[:117] + "..."


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op at once, its operands laid out as its kernel reads them."""
    return (STAND_INS.get(op) or laid_out(op))(*args, **kwargs)


def swapped(one: Case, parts: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a case with these tensors, in schema order, in the place of its own."""
    mine = iter(parts)
    names = [argument.name for argument in one.op._schema.arguments if argument.name in one.kwargs]
    given = one.args, {name: one.kwargs[name] for name in names}
    args, kwargs = map_aggregate(given, lambda item: next(mine) if isinstance(item, Tensor) else item)
    return list(args), dict(kwargs)


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, (list, tuple)) else shown(value)
