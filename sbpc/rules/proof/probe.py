"""`sbpc.probe`: what an op without a rule can do, found by running it on shards, as a rule that a person is to review.

Everything runs in forked workers: an op that crashes, hangs, writes into its arguments or draws random numbers ends in
an error here. What is found on two ranks is tried on three and four, again on other sizes and values, and the rule that
is inferred passes the proofs of a rule that a user registers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from sbpc._compat import OpOverload, load_custom_ops
from sbpc.errors import RuleError
from sbpc.graph.operands import leaves, named_arguments, with_arguments
from sbpc.mesh.states import Names, Numbers, P, Partial, Shape
from sbpc.rules.binding import Signature, divides, flat_outputs
from sbpc.rules.proof import user_rules
from sbpc.rules.proof.brute_force import SearchResult, Size, confirm, search
from sbpc.rules.proof.infer import Evidence, Inferred, extent, infer, left_over, places_of
from sbpc.rules.proof.prove import Case, short, swapped
from sbpc.rules.proof.rule_files import UNREVIEWED, add_entries
from sbpc.rules.proof.small_calls import SmallCall
from sbpc.rules.proof.user_rules import (
    case_arguments,
    detached,
    require_function,
    require_pure,
    resolve,
    tolerance_of,
    wide,
)
from sbpc.rules.proof.worker import Lost, attempt
from sbpc.rules.registry import row

SECONDS = 5.0  # that one call may take
PROOF = 120.0  # that a proof may take
REDUCTIONS = P, Partial("max"), Partial("min")
CUT = (7, 10, 11, 8, 13, 14, 17, 19, 20, 22)  # other sizes of split factors, uneven on 3 ranks or 4
LED = 12  # another size of factors that lead a group
WAYS = ((True, True, True), (True, False, True), (False, True, True), (False, False, True), (True, False, False))
"""Settings that are tried in turn until a proof holds: `share` and `follow` of `infer`, and whether to try other
sizes too."""


@dataclass(frozen=True)
class Probe:
    """What a probe of an op has found. `print` shows it as the lines of a file of rules.

    rule: the rule string, None if nothing but whole operands is valid or no string holds. seen: the calls that it
    was run on. valid, tried: how many signatures hold, of how many patterns of splits. left_out: signatures that
    hold and do not follow from the rule, each with the reason. remarks: what was not covered.
    """

    op: OpOverload
    rule: str | None
    seen: Names
    valid: int
    tried: int
    left_out: tuple[tuple[Signature, str], ...]
    remarks: Names

    def __str__(self) -> str:
        seen = "; again on ".join(self.seen)
        lines = [f"# {name_of(self.op)}, run on {seen}"]
        lines.append(f"#   {self.valid} valid signatures in {self.tried} ways to split, on 2 ranks, tried on 3 and 4")
        lines += [f"#   {remark}" for remark in self.remarks]
        lines += [f"#   valid, and not offered: {short(signature)} ({why})" for signature, why in self.left_out]
        if self.rule is None:
            return "\n".join([*lines, f"#   no rule: {name_of(self.op)} stays whole on every rank"])
        return "\n".join([*lines, f"{UNREVIEWED} {name_of(self.op)}    {self.rule}"])

    def save(self, path: str | Path) -> bool:
        """Adds this to a file of rules, its rule with a '?' before it; returns whether it was not there before.

        The rule is in force when a person has reviewed it, that is removed the '?', and `sbpc.load_rules` has read
        the file. Raises RuleError if the file is no file of rules, and for an op that has a rule already.
        """
        known = row(self.op)
        if known is not None and not known.source.startswith("reviewed"):
            what = f"{self.op} has a rule already, and a file can add none"
            raise RuleError(f"{what}\n  Put another in its place with sbpc.rule.")
        return add_entries(path, [str(self)]) == 1


def probe(op: Any, /, *args: Any, **kwargs: Any) -> Probe:
    """Runs `op` ("mylib::myop", or the op itself) on shards of these arguments, and returns the rule that follows
    from what is right.

    All runs are in forked workers, so an op that crashes ends in an error. The rule has passed the proofs of
    `sbpc.rule` on the sizes that are printed above it; which valid signatures it leaves out, and what was not tried,
    stands there too. Arguments that are no sizes must have the values that were probed. Small distinct sizes do
    best. Integers keep their values; floating-point tensors are tried with whole numbers first, with their own
    values where the op does not take those.

    `probe(...).save("rules.txt")` writes it down, for a person to review; `sbpc probe train.py:model -o rules.txt`
    does so for every op of a model that has no rule.

    >>> import torch, sbpc
    >>> print(sbpc.probe("aten::mm", torch.randn(4, 6), torch.randn(6, 5)).rule)
    a b, b c -> a c ; +b ; lin(0) ; lin(1)

    Raises RuleError for an op that there is not, that fails, crashes or hangs on the arguments, that writes into
    them or gives other values when it is run again.
    """
    overload = resolve(op)
    given, named = case_arguments(overload, [*args, dict(kwargs)])
    return probe_call(overload, [SmallCall(tuple(given), named)])


def probe_call(op: OpOverload, calls: Sequence[SmallCall], seconds: float = SECONDS) -> Probe:
    """Probe the first of these calls that the op takes; see `probe`. seconds: the limit of one call of the op."""
    require_pure(op)
    load_custom_ops()
    call, cases = first_that_runs(op, calls, seconds)
    for one, outputs in cases:
        found = search(one, list(sizes_in(one)), seconds, REDUCTIONS)
        done = inferred(one, outputs, found, seconds)
        if not done.refused:  # else with values that tell more: whole numbers have no fractions
            break
    seen, remarks = tuple(map(called, done.cases)), (*call.remarks, *done.remarks, *not_tried(found))
    return Probe(op, done.rule, seen, len(found.signatures), found.tried, done.left_out, remarks)


def name_of(op: OpOverload) -> str:
    """An op as files name it.

    >>> name_of(torch.ops.aten.mm.default), name_of(torch.ops.aten.add.Tensor)
    ('aten::mm', 'aten::add.Tensor')
    """
    return str(op._schema.name) + (f".{op._overloadname}" if op._overloadname != "default" else "")


def not_tried(found: SearchResult) -> Iterator[str]:
    """What brute force has left out."""
    if found.lost:
        ways = dict.fromkeys(found.lost)
        yield f"not tried: splits of dims that do not go together, for the op does not check shapes ({', '.join(ways)})"
    elif found.left:
        yield f"not tried: {found.left:,} further ways to split, which are too many"


# --- the call that is run ---------------------------------------------------------------------------------------------
def first_that_runs(
    op: OpOverload, calls: Sequence[SmallCall], seconds: float
) -> tuple[SmallCall, list[tuple[Case, tuple[Any, ...]]]]:
    """The first call that the op takes, on values of several kinds, with the outputs on the meta device."""
    for call in calls:
        ways: tuple[Callable[[Any], Any], ...] = (whole_numbers(), wide, detached)
        cases = [Case(op, *map_aggregate((call.args, dict(call.kwargs)), way)) for way in ways]
        results = list(attempt(look, cases, seconds))
        for error in (seen for _, seen in results if isinstance(seen, RuleError)):
            raise error
        ran = [(one, seen) for one, seen in results if isinstance(seen, Look)]
        if ran:
            finite = [(one, seen) for one, seen in ran if seen.finite] or ran
            return call, [(replace(one, tolerance=seen.tolerance), on_meta(seen.outputs)) for one, seen in finite]
    *_, (one, why) = results
    lost = f"{one}: the op does not survive it: {why.why}" if isinstance(why, Lost) else why
    raise RuleError(f"{lost}\n  Give arguments that the op takes on one device.")


class Look(NamedTuple):
    """What a call gives: shape and dtype of each output, None for one that is no tensor; whether all are finite; how
    close they can be."""

    outputs: list[tuple[Shape, torch.dtype] | None]
    finite: bool
    tolerance: float


def on_meta(about: Sequence[tuple[Shape, torch.dtype] | None]) -> tuple[Any, ...]:
    """Outputs of these shapes and types, None for those that are no tensors."""
    return tuple(None if each is None else torch.empty(each[0], dtype=each[1], device="meta") for each in about)


def called(one: Case) -> str:
    """The arguments of a call."""
    return str(one).removeprefix(str(one.op))


def look(one: Case) -> Any:
    """In a worker: the Look of a call, what the op says where it fails, a RuleError if it is no function of its
    arguments."""
    try:
        outputs = flat_outputs(one.run())
    except Exception as error:  # whatever the op raises
        return f"{one} fails: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
    try:
        close = tolerance_of([*one.operands, *leaves(outputs, Tensor)])
        require_function(replace(one, tolerance=close))
    except RuleError as error:
        return error
    about = [(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None for value in outputs]
    finite = all(bool(torch.isfinite(value).all()) for value in leaves(outputs, Tensor))
    return Look(about, finite, close)


def whole_numbers() -> Callable[[Any], Any]:
    """What makes copies of arguments: floating-point tensors of whole numbers in float64, distinct (up to 99), none
    zero."""
    generator = torch.Generator().manual_seed(3)

    def drawn(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return detached(value)
        shuffled = torch.randperm(value.numel(), generator=generator).view(value.shape)
        numbers = shuffled % 99 - min(value.numel(), 99) // 3
        return (numbers + (numbers >= 0)).double().to(value.device)

    return drawn


def sizes_in(one: Case) -> Iterator[Size]:
    """The integers of a call that may be sizes."""
    for name, value in named_arguments(one.op, one.args, one.kwargs).items():
        if type(value) is int and value > 1:
            yield Size(name, None)
        elif isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
            yield from (Size(name, at) for at, item in enumerate(value) if item > 1)


# --- the rule ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """What became of inference. cases: the calls that the rule was proved on. refused: whether the proof accepted no
    rule."""

    rule: str | None
    cases: tuple[Case, ...]
    left_out: tuple[tuple[Signature, str], ...]
    remarks: Names
    refused: bool = False


def inferred(one: Case, outputs: tuple[Any, ...], found: SearchResult, seconds: float) -> Outcome:
    """The rule that derives most and that its proof accepts, first on other sizes too."""
    facts = Facts(one, outputs, found, seconds)
    failed, texts = Names(), dict[str, None]()
    for unread, (share, follow, again) in itertools.product((True, False), WAYS):
        made, second = facts.settle(share, follow, unread, again)
        if len(made.offered) == 1:
            return Outcome(None, (one,), facts.reasons(made), ())
        key = f"{made.text} {second is None}"
        if (again and second is None) or key in texts:
            continue
        texts[key] = None
        cases = (one,) if second is None else (one, second.one)
        ((_, why),) = attempt(refuted, [(made.text, cases)], PROOF)
        if why is None:
            kept = "" if second is None else " of " * bool(second.kept) + ", ".join(second.kept)
            alone = (f"not tried: other sizes{kept}, which the op refuses",) if second is None or kept else ()
            return Outcome(made.text, cases, facts.reasons(made), alone)
        reason = why.why if isinstance(why, Lost) else str(why).splitlines()[0]
        failed = failed or (f"refused by its proof: {made.text}", f"    {reason}")
    return Outcome(None, (one,), facts.reasons(made), failed, True)


def refuted(claim: tuple[str, Sequence[Case]]) -> str | None:
    """In a worker: why a rule is refused when it is registered with these calls as examples, None if it is not."""
    text, cases = claim
    try:
        user_rules.rule(cases[0].op, text, examples=[(*one.args, dict(one.kwargs)) for one in cases], replace=True)
    except RuleError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Second:
    """A call of other sizes. kept: the factors whose size is as it was, as the op takes no other."""

    one: Case
    outputs: tuple[Any, ...]
    kept: Names


class Facts:
    """What is known of the signatures of a call, more with every number of ranks and every size."""

    def __init__(self, one: Case, outputs: tuple[Any, ...], found: SearchResult, seconds: float) -> None:
        self.one, self.outputs, self.found, self.seconds = one, outputs, found, seconds
        self.broken: dict[Signature, bool] = {}
        self.where: dict[Signature, str] = {}
        self.learn(one, outputs, (3, 4))

    def learn(self, one: Case, outputs: tuple[Any, ...], ranks: Numbers) -> bool:
        """Try all signatures that seem valid on a call. Returns whether one fails that had not failed before."""
        before = dict(self.broken)
        for signature, told in confirm(one, self.found.signatures, ranks, self.seconds).items():
            cut = [extent(one, outputs, place) for place in places_of(signature, self.found.signatures[signature])]
            for number in (number for number, held in told.items() if not held):
                even = all(size % number == 0 for size in cut)
                self.broken[signature] = self.broken.get(signature, False) or even
                self.where.setdefault(signature, f"not on {number} ranks of {called(one)}")
        return before != self.broken

    def settle(self, share: bool, follow: bool, unread: bool, again: bool) -> tuple[Inferred, Second | None]:
        """The rule, and the call of other sizes on which all that it offers holds too, None if the op takes none."""
        while True:
            valid = {s: size for s, size in self.found.signatures.items() if not self.broken.get(s, False)}
            made = infer(Evidence(self.one, self.outputs, valid, self.broken), share, follow, unread)
            second = self.other(made) if again and len(made.offered) > 1 else None
            if second is None or not self.learn(second.one, second.outputs, (2, 3, 4)):
                return made, second

    def other(self, made: Inferred) -> Second | None:
        """A call of other sizes and values that the op takes and that the rule fits."""
        sizes = [new_sizes(made, fixed) for fixed in (True, False)]
        tries = [(new, resized(self.one, made, new, real)) for new in sizes for real in (True, False)]
        for (new, one), seen in attempt(lambda item: look(item[1]), tries, self.seconds):
            if not isinstance(seen, Look) or not seen.finite:
                continue
            shapes = [None if v.dims is None else tuple(dim.size(new) for dim in v.dims) for v in made.bound.outputs]
            if shapes == [about and about[0] for about in seen.outputs]:
                kept = [f for f, size in made.bound.sizes.items() if size == new[f] > 1 and f in made.bound.rule.fixed]
                return Second(replace(one, tolerance=seen.tolerance), on_meta(seen.outputs), tuple(kept))
        return None

    def reasons(self, made: Inferred) -> tuple[tuple[Signature, str], ...]:
        """What is left out, and why."""
        why = "no rule string says it beside the others"
        beyond = left_over((s for s in self.found.signatures if self.broken.get(s, False)), made.offered)
        return tuple((s, self.where.get(s, why)) for s in (*made.left_out, *beyond))


def new_sizes(made: Inferred, fixed: bool) -> dict[str, int]:
    """Other sizes of the factors. fixed: also of those that are not split, which keep their order."""
    sizes, leads = made.bound.sizes, divides(made.bound)
    split = [signature.factor for signature in made.offered]
    cut = itertools.cycle(size for size in CUT if size not in sizes.values())
    unsplit = sorted((f for f, size in sizes.items() if f not in split and size > 1), key=sizes.__getitem__)
    changed = {f: sizes[f] + 1 + at for at, f in enumerate(unsplit)} if fixed else {}
    fresh = {f: LED if f in leads else next(cut) for f in sizes if f in split}
    return sizes | changed | fresh


def resized(one: Case, made: Inferred, sizes: Mapping[str, int], real: bool) -> Case:
    """The call at other sizes of its factors. real: its floating-point tensors hold real numbers, small and large,
    else those it had."""
    generator = torch.Generator().manual_seed(5)
    parts = []
    for value, about in zip(one.operands, made.bound.inputs):
        shape = tuple(value.shape) if about.dims is None else tuple(dim.size(sizes) for dim in about.dims)
        if real and value.is_floating_point():
            number, power = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
            parts.append((number * 100**power).double().to(value))
        else:
            at = torch.randint(0, max(value.numel(), 1), shape, generator=generator).to(value.device)
            parts.append(value.flatten()[at] if value.numel() else value)
    args, kwargs = swapped(one, parts)
    args, kwargs = with_arguments(one.op, args, kwargs, made.bound.integers(args, kwargs, sizes))
    return replace(one, args=tuple(args), kwargs=kwargs)
