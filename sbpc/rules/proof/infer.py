"""From the valid signatures of a call to a rule string that derives them, and none that is not valid.

Each signature with splits is a factor: the dims that it splits get one letter, what it does to the others is said by a
clause. Dims that nothing splits are fixed, and arguments that are no sizes must have the values that were seen.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor

from sbpc.errors import RuleError
from sbpc.graph.operands import named_arguments
from sbpc.mesh.states import B, Ints, Numbers, P, Partial, Split, State
from sbpc.rules.binding import Bound, Signature, is_list, signatures
from sbpc.rules.proof.brute_force import Size, follows
from sbpc.rules.proof.prove import Case
from sbpc.rules.registry import applied

CLAUSE = {"sum": "+", "max": "max ", "min": "min "}


class CutDim(NamedTuple):
    """What a signature cuts: a dim of an operand ("in") or of an output ("out"), by numbers, or an integer ("size").

    Of an integer `of` is the name of the argument, and `dim` its place in a list, None for one that stands alone.
    """

    kind: str
    of: Any
    dim: Any


@dataclass(frozen=True)
class Evidence:
    """What is known of a call. outputs: tensors of the shapes of its outputs. valid: signatures, each with the
    integer cut for it.

    broken: signatures that fail on some number of ranks, each with whether such a number divides all dims that it
    splits.
    """

    one: Case
    outputs: tuple[Any, ...]
    valid: Mapping[Signature, Size | None]
    broken: Mapping[Signature, bool]


@dataclass(frozen=True)
class Inferred:
    """A rule string, what it derives for the call, and the valid signatures that do not follow from that."""

    text: str
    bound: Bound
    offered: tuple[Signature, ...]
    left_out: tuple[Signature, ...]


def infer(known: Evidence, share: bool = True, follow: bool = True, unread: bool = True) -> Inferred:
    """The rule string that derives as many of the valid signatures as one string can.

    share: fixed dims of inputs and outputs that have one size are one factor. follow: integers that are the size of
    a fixed dim are that size, and not values that must stay. unread: operands may be partial where no output is, as
    if the op did not read them. Raises RuleError for an argument that no clause can name.
    """
    draft = Draft(known, (), (), share, follow)
    best = left_over(known.valid, [])
    for signature in sorted(filter(splits, best), key=lambda s: (splits(s), str(s))):
        weaker = [s for s in known.valid if s != signature and splits(s) and follows(s, signature)]
        for chosen in (signature, *sorted(weaker, key=lambda s: (-splits(s), str(s)))):
            more = draft.with_letter(chosen)
            if more is not None and more.sound:
                draft = more
                break
    linear = [s for s in best if not splits(s) and P in s.inputs]
    for signature in sorted(linear, key=lambda s: [state != P for state in s.inputs]):
        more = replace(draft, linear=(*draft.linear, signature))
        draft = more if more.sound and (unread or P in signature.outputs) else draft
    bound = draft.bound
    if bound is None:
        raise RuleError(f"no rule string fits {known.one}\n  {draft.text}\n  Write one by hand: sbpc.rule.")
    offered = signatures(bound)
    return Inferred(draft.text, bound, offered, tuple(left_over(known.valid, offered)))


def left_over(found: Iterable[Signature], offered: Sequence[Signature]) -> list[Signature]:
    """Those of `found` that do not follow from another one, be it offered or not, that splits as much of the work."""
    every = list(found)

    def given(signature: Signature, others: Iterable[Signature]) -> bool:
        there = (other for other in others if splits(other) >= splits(signature) and other is not signature)
        return any(follows(signature, other) for other in there)

    missing = [signature for signature in every if not given(signature, offered)]
    return [signature for signature in missing if not given(signature, missing)]


def splits(signature: Signature) -> int:
    """How many operands and outputs a signature splits."""
    return sum(isinstance(state, Split) for state in (*signature.inputs, *signature.outputs))


@dataclass(frozen=True)
class Draft:
    """A rule with these factors and these linear clauses."""

    known: Evidence
    letters: tuple[Signature, ...]
    linear: tuple[Signature, ...]
    share: bool
    follow: bool

    def with_letter(self, signature: Signature) -> Draft | None:
        """The draft with one more factor, None if no factor splits so."""
        mine = places_of(signature, self.known.valid[signature])
        if any(place in mine for letter in self.letters for place in places_of(letter, self.known.valid[letter])):
            return None
        sizes = [extent(self.known.one, self.known.outputs, place) for place in mine]
        grouped = len(set(sizes)) > 1
        broken = self.known.broken
        if any(size % min(sizes) for size in sizes) or (signature in broken and (broken[signature] or not grouped)):
            return None
        lacked = {state for state in signature.outputs if isinstance(state, Partial)}
        if len(lacked) > 1 or (P in signature.inputs and P not in lacked):
            return None
        return replace(self, letters=(*self.letters, signature))

    @property
    def sound(self) -> bool:
        """Whether everything that the rule derives is valid, and all that it is to derive is there."""
        if self.bound is None:
            return False
        made = {(s.inputs, s.outputs) for s in signatures(self.bound)}
        valid = {(s.inputs, s.outputs) for s in self.known.valid}
        return made <= valid and all((s.inputs, s.outputs) in made for s in (*self.letters, *self.linear))

    @cached_property
    def bound(self) -> Bound | None:
        """The rule at the sizes of the call, None if it does not fit."""
        one = self.known.one
        try:
            return applied(one.op, self.text, named_arguments(one.op, one.args, one.kwargs), self.known.outputs)
        except RuleError:
            return None

    @cached_property
    def text(self) -> str:
        """The rule string."""
        return Writing(self).text()


def places_of(signature: Signature, size: Size | None) -> list[CutDim]:
    """What a signature cuts."""
    sides = (("in", signature.inputs), ("out", signature.outputs))
    dims = [CutDim(k, at, s.dim) for k, states in sides for at, s in enumerate(states) if isinstance(s, Split)]
    return dims if size is None else [*dims, CutDim("size", size.name, size.at)]


def extent(one: Case, outputs: Sequence[Any], place: CutDim) -> int:
    """The size of a dim, or the value of an integer."""
    kind, at, dim = place
    if kind == "size":
        value = named_arguments(one.op, one.args, one.kwargs)[at]
        return int(value if dim is None else value[dim])
    return int((one.operands if kind == "in" else outputs)[at].shape[dim])


# --- writing ----------------------------------------------------------------------------------------------------------
class Writing:
    """Writes one draft; letters are given in the order in which they stand in the string."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.one, self.outputs = draft, draft.known.one, draft.known.outputs
        self.named = named_arguments(self.one.op, self.one.args, self.one.kwargs)
        self.owner: dict[CutDim, Signature] = {}
        for letter in draft.letters:
            self.owner.update(dict.fromkeys(places_of(letter, draft.known.valid[letter]), letter))
        self.units = {
            letter: min(extent(self.one, self.outputs, place) for place, of in self.owner.items() if of == letter)
            for letter in draft.letters
        }
        self.names: dict[Signature, str] = {}
        self.fixed: dict[str, int] = {}
        self.conditions: list[str] = []
        self.free = iter_names(self.named)
        self.slots: list[tuple[str, Any]] = []  # what the operands of the string stand for: argument, value
        for argument in self.one.op._schema.arguments:
            value = self.named[argument.name]
            several = is_list(argument) and isinstance(value, (list, tuple))
            self.slots += [(argument.name, item) for item in (value if several else [value])]
        self.numbers = [number for number, (_, item) in enumerate(self.slots) if isinstance(item, Tensor)]

    def text(self) -> str:
        """The whole string."""
        shown = itertools.count()
        inputs = [self.dims("in", next(shown), item) if isinstance(item, Tensor) else "" for _, item in self.slots]
        outputs = enumerate(self.outputs)
        results = [self.dims("out", at, value) if isinstance(value, Tensor) else "_" for at, value in outputs]
        inputs = [text or self.argument(*slot) for text, slot in zip(inputs, self.slots)]
        while len(inputs) > 1 and inputs[-1] == "_":
            inputs.pop()
        return " ; ".join([f"{', '.join(inputs)} -> {', '.join(results)}", *self.clauses()])

    def dims(self, kind: str, at: int, value: Tensor) -> str:
        """One tensor."""
        used: list[str] = []
        found = [self.dim(CutDim(kind, at, dim), int(size), used) for dim, size in enumerate(value.shape)]
        return " ".join(found) or "()"

    def dim(self, place: CutDim, size: int, used: list[str]) -> str:
        """One dim: its letter, a group that its letter leads, a fixed letter or 1."""
        letter = self.owner.get(place)
        if letter is None:
            return "1" if size == 1 else self.fixed_name(size, used, place.kind)
        if letter not in self.names:
            self.names[letter] = next(self.free)
        rest = size // self.units[letter]
        return self.names[letter] if rest == 1 else f"({self.names[letter]} {self.fixed_name(rest, used, place.kind)})"

    def fixed_name(self, size: int, used: list[str], kind: str) -> str:
        """A letter that is not split, of this size, and not one that the operand has already."""
        alike = (name for name, known in self.fixed.items() if known == size and name not in used)
        found = next(alike, None) if kind != "out" or self.draft.share else None
        if found is None:
            found = next(self.free)
            self.fixed[found] = size
        used.append(found)
        return found

    def argument(self, name: str, value: Any) -> str:
        """An argument that is no tensor: sizes, or '_' and a condition."""
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        numbers = [None] if not isinstance(value, (list, tuple)) else list(range(len(items)))
        cut = [CutDim("size", name, number) in self.owner for number in numbers]
        whole = all(type(item) is int and item > 0 for item in items) and bool(items)
        followed = self.draft.follow and whole and all(item > 1 and item in self.fixed.values() for item in items)
        if not any(cut) and not followed:
            self.conditions.append(condition(self.one, name, value))
            return "_"
        used: list[str] = []
        found = []
        for number, item in zip(numbers, items):
            before = len(self.fixed)
            found.append(self.dim(CutDim("size", name, number), item, used))
            if len(self.fixed) > before:  # a size that no tensor has
                self.conditions.append(f"{found[-1]} == {item}")
        return f"[{' '.join(found)}]"

    # --- the clauses --------------------------------------------------------------------------------------------------
    def clauses(self) -> Iterator[str]:
        """Everything after the arrow's operands, in the order of the grammar."""
        order = sorted(self.names.items(), key=lambda item: (len(item[1]), item[1]))
        tensors = [at for at, value in enumerate(self.outputs) if isinstance(value, Tensor)]
        reduced: dict[str, list[str]] = {}
        same: dict[Ints, list[str]] = {}
        added: dict[int, None] = {}
        for letter, name in order:
            kinds = [state.op for state in letter.outputs if isinstance(state, Partial)]
            if kinds:
                reduced.setdefault(kinds[0], []).append(name)
            whole = tuple(at for at in tensors if letter.outputs[at] == B)
            if whole:
                same.setdefault(whole, []).append(name)
            added.update(dict.fromkeys(self.numbered(letter.inputs)))
        yield from (f"{CLAUSE[kind]}{' '.join(names)}" for kind, names in reduced.items())
        if self.fixed:
            yield f"fix {' '.join(self.fixed)}"
        yield from (f"same({' '.join(names)} -> {listed(outs)})" for outs, names in same.items())
        if added:
            yield f"add({listed(sorted(added))})"
        for signature in self.draft.linear:
            outs = [at for at in tensors if signature.outputs[at] == P]
            arrow = "" if outs == tensors else f" -> {listed(outs)}"
            yield f"lin({listed(self.numbered(signature.inputs))}{arrow})"
        if self.conditions:
            yield f"when({' and '.join(dict.fromkeys(self.conditions))})"

    def numbered(self, states: Sequence[State]) -> list[int]:
        """The numbers in the string of the operands that are partial."""
        return [self.numbers[at] for at, state in enumerate(states) if state == P]


def iter_names(taken: Mapping[str, Any]) -> Iterator[str]:
    """Names for factors that no argument has: a, b, ..., a1, b1, ..."""
    every = (f"{letter}{number or ''}" for number in itertools.count() for letter in string.ascii_lowercase)
    return (name for name in every if name not in taken)


def listed(numbers: Numbers) -> str:
    """Numbers with commas."""
    return ",".join(map(str, numbers))


def condition(one: Case, name: str, value: Any) -> str:
    """That an argument has this value. Raises RuleError where no predicate can say so."""
    if value is None:
        return f"{name} is None"
    if isinstance(value, bool):
        return name if value else f"not {name}"
    value = list(value) if isinstance(value, tuple) else value
    if is_plain(value) or (isinstance(value, list) and all(map(is_plain, value))):
        return f"{name} == {value!r}"
    todo = "Leave it at its default, or write a rule as a function of the arguments: sbpc.rule."
    raise RuleError(f"{one}: no rule string can say that the argument {name!r} is {value!r}\n  {todo}")


def is_plain(value: Any) -> bool:
    """Whether a value is written in a predicate as it is."""
    return isinstance(value, (int, str)) or (isinstance(value, float) and math.isfinite(value))
