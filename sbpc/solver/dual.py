"""Multipliers for a folded problem that bound the whole one: `check` computes the bound from them.

All members of a class share their multipliers, whatever values they meet. In a chain of equal blocks the first one meets
another value than the rest; so first the blocks are solved as if there were no ends (every class with the values that most
of its members meet), then the ends, with the multipliers of the blocks as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sbpc.solver.check import Proof, checked_bound, terms_of
from sbpc.solver.fold import Folded, Kind, Slot
from sbpc.solver.network import Space, aliased, distinct
from sbpc.solver.paths import HALF, LITTLE
from sbpc.solver.problem import Problem, Value, Variable
from sbpc.solver.smooth import put, smooth
from sbpc.solver.trws import Messages

ROUNDS = 16  # at most so many times SWEEPS sweeps; before smooth ones mostly once
ALIKE = 6  # sweeps in which nodes say as much over all edges, after which multipliers lie in the middle of what they may be
SWEEPS = 3  # as many as there are from one balance of charges to the next
IDLE = (7.5e-5, 7.5e-4)  # what a round must add to the bound, as a part of it, on at most two axes and on more


@dataclass(frozen=True)
class Effort:
    """What is done to better a bound by smooth messages, see `smooth`; nothing where `aim` is 0."""

    aim: float
    until: float = math.inf


NONE = Effort(0.0)


@dataclass(eq=False)
class Part:
    """A problem made of a folded one: by value the number of its kind, its slots, and what one unit is of the whole."""

    problem: Problem
    kinds: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)  # places among the slots of the kind
    units: list[float] = field(default_factory=list)


def prove(problem: Problem, dual: Dual, folded: Folded, cap: float, effort: Effort = NONE) -> tuple[float, Proof]:
    """A bound of the whole problem, and its proof; folded: the problem of `dual`, or the same folded less. effort: its aim is a
    bound of the whole. Smooth messages of the same ends go on from where they ended, whatever the multipliers of the blocks were.
    """
    if max(dual.folded.sizes) == 1:
        return checked(problem, dual)
    found = dual.carried(folded)
    rest = ends(folded, found)
    if not rest.problem.variables:
        return checked(problem, found)
    before = dual.ends.get(tuple(folded.classes))
    if before is None:
        messages = passed(rest.problem, cap, dual.bound)
    else:
        messages = before.restrict(before.space, rest.problem)
        messages.soft = before.soft
        for _ in range(SWEEPS):
            messages.sweep()

    def said() -> tuple[float, Proof]:
        found.take(rest, messages, lambda slot: folded.sizes[slot[0]] == 1)
        return checked(problem, found)

    best = said()
    if best[0] < effort.aim:
        smooth(messages, messages.bound + effort.aim - best[0], effort.until)
        best = max(best, said(), key=lambda pair: pair[0])
    if kept(rest.problem, effort):
        dual.ends[tuple(folded.classes)] = messages
    free = [dual.folded.classes[at] for at, number in enumerate(folded.classes) if folded.sizes[number] == 1]
    for at, extra in zip(free, messages.extra()):
        if dual.folded.sizes[at] == 1:
            dual.extra[at] = extra
    return best


def checked(problem: Problem, dual: Dual) -> tuple[float, Proof]:
    """The bound that multipliers give, and the proof of it."""
    proof, folded = dual.proof(), dual.folded
    folded.terms = folded.terms or terms_of(problem, folded.classes)
    return checked_bound(problem, proof, folded.terms), proof


def between_ends(
    folded: Folded, cap: float, effort: Effort = NONE, known: Dual | None = None
) -> tuple[Dual, list[int]]:
    """Multipliers of the equal blocks, as if there were no ends, and labels that were read off on the way.

    effort: its aim is a bound of the blocks. known: what was found before; messages go on from there, and it is not to be
    used any more.
    """
    part = blocks(folded)
    if known is None or known.messages is None:
        messages, found = (far if max(folded.sizes) == 1 else passed)(part.problem, cap), Dual(folded)
    else:
        messages, found = known.messages, Dual(folded, ends=known.ends)
    if messages.bound < effort.aim:
        smooth(messages, effort.aim, effort.until)
    found.messages = messages if kept(part.problem, effort) else None
    found.take(part, messages, lambda slot: True)
    found.extra, found.bound = messages.extra(), messages.bound
    return found, messages.decode()


def kept(problem: Problem, effort: Effort) -> bool:
    """Whether messages go on from where they ended, if they are asked for more: without an effort not on more than two axes, where
    they take hundreds of megabytes."""
    return effort.aim > 0 or problem.variables[0].digits.shape[1] <= 2


@dataclass(eq=False)
class Dual:
    """Multipliers and charges in the making. extra: by class and label, about how much dearer than the bound a plan is
    that has the label. bound: of the equal blocks. messages: those of the blocks, if they are kept; ends: the same of ends, by the
    classes of the folded problem."""

    folded: Folded
    multipliers: dict[Slot, np.ndarray] = field(default_factory=dict)
    charges: dict[int, list[np.ndarray]] = field(default_factory=dict)  # by kind
    extra: list[np.ndarray] = field(default_factory=list)
    bound: float = 0.0
    messages: Messages | None = None
    ends: dict[tuple[int, ...], Messages] = field(default_factory=dict)

    def carried(self, finer: Folded) -> Dual:
        """What is known here of the classes that have several members in a problem that is folded less."""
        outer = {at: number for at, number in zip(finer.classes, self.folded.classes)}
        large = [at for at, size in enumerate(finer.sizes) if size > 1]
        found = Dual(finer)
        for kind in finer.kinds:
            for number, place in kind.slots:
                if finer.sizes[number] > 1 and (outer[number], place) in self.multipliers:
                    found.multipliers[number, place] = self.multipliers[outer[number], place]
        names = {name(self.folded.kinds[at]): charged for at, charged in self.charges.items()}
        for at, kind in enumerate(finer.kinds):
            moved = Kind([(outer[number], place) for number, place in kind.slots], kind.many, 0, kind.closure)
            if name(moved) in names and all(number in large for number, _ in kind.slots):
                found.charges[at] = names[name(moved)]
        return found

    def proof(self) -> Proof:
        """What `check` reads."""
        kinds = self.folded.kinds
        names = {at: name(kinds[at]) for at in self.charges}
        return Proof(self.folded.classes, dict(self.multipliers), {names[at]: found for at, found in self.charges.items()})

    def take(self, part: Part, messages: Messages, wanted: Callable[[Slot], bool]) -> None:
        """Take the multipliers of the slots that are `wanted`, and all charges, from the messages of a part."""
        for number, found in enumerate(messages.multipliers()):
            kind, unit = self.folded.kinds[part.kinds[number]], part.units[number]
            for place, message in zip(part.slots[number], found):
                if place >= 0 and wanted(kind.slots[place]):
                    self.multipliers[kind.slots[place]] = message / (unit * kind.many[place])
        for number, charged in messages.charges().items():
            kind = self.folded.kinds[part.kinds[number]]
            if len(charged) == len(kind.slots) - 1:  # of all consumers, none detached
                self.charges[part.kinds[number]] = [found / part.units[number] for found in charged]


def name(kind: Kind) -> tuple[object, ...]:
    """The name under which `check` looks for charges."""
    (producer, place), *taken = kind.slots
    return (producer, place, tuple((*slot, many) for slot, many in zip(taken, kind.many[1:])))


def blocks(folded: Folded) -> Part:
    """The folded problem without the ends: at every slot the kind of value that most members meet, as if all did."""
    main: dict[Slot, tuple[int, int]] = {}
    for at, kind in enumerate(folded.kinds):
        for slot, many in zip(kind.slots, kind.many):
            if slot not in main or kind.count * many > main[slot][0]:
                main[slot] = kind.count * many, at
    kept = [
        [place for place, slot in enumerate(kind.slots) if main[slot][1] == at] for at, kind in enumerate(folded.kinds)
    ]
    weights = weighed(folded, kept)
    variables = [
        Variable(v.name, v.costs if weight == size else weight / size * v.costs, v.digits)
        for v, weight, size in zip(folded.problem.variables, weights, folded.sizes)
    ]
    part, closures = Part(Problem(variables, [])), dict[tuple[int, float], np.ndarray]()
    for at, (kind, value, places) in enumerate(zip(folded.kinds, folded.problem.values, kept)):
        if 0 not in places or len(places) == 1:
            continue
        unit = max(weights[kind.slots[place][0]] / kind.many[place] for place in places)
        if (id(kind.closure), unit) not in closures:
            closures[id(kind.closure), unit] = unit * kind.closure if unit != 1 else kind.closure
        closure = closures[id(kind.closure), unit]
        found = Value(value.producer, value.out, [value.consumers[place - 1] for place in places[1:]], closure)
        part.problem.values.append(found)
        part.kinds.append(at)
        part.slots.append([0, *(places[1 + number] for number in found.distinct)])
        part.units.append(unit)
    return part


def weighed(folded: Folded, kept: list[list[int]]) -> list[int]:
    """How often each class counts in `blocks`: classes of one block alike, as often as its largest has members."""
    block = list(range(len(folded.sizes)))

    def find(at: int) -> int:
        while block[at] != at:
            at = block[at]
        return at

    for kind, places in zip(folded.kinds, kept):
        one = [kind.slots[place][0] for place in places if kind.many[place] == 1]
        if 0 in places:
            for at in one[1:]:
                block[find(at)] = find(one[0])
    most: dict[int, int] = {}
    for at, size in enumerate(folded.sizes):
        most[find(at)] = max(size, most.get(find(at), 0))
    return [most[find(at)] for at in range(len(folded.sizes))]


def ends(folded: Folded, dual: Dual) -> Part:
    """The classes of one member and the values that meet them; in the place of a larger class what it is paid."""
    free = [at for at, size in enumerate(folded.sizes) if size == 1]
    number = {at: place for place, at in enumerate(free)}
    part = Part(Problem([folded.problem.variables[at] for at in free], []))
    variables = part.problem.variables
    digits = folded.problem.variables[0].digits.shape[1]

    def stand_in(slot: Slot, layouts: np.ndarray, paid: float) -> tuple[int, np.ndarray]:
        """A variable with a label per layout that costs what the class is not paid there."""
        found, at = distinct(layouts)
        most = np.full(len(found), -np.inf)
        np.maximum.at(most, at, dual.multipliers.get(slot, np.zeros(len(layouts))))
        variables.append(Variable("", paid * (most.max() - most), np.zeros((len(found), digits), dtype=np.int64)))
        return len(variables) - 1, found

    for at, (kind, value) in enumerate(zip(folded.kinds, folded.problem.values)):
        if all(slot[0] not in number for slot in kind.slots) and (at in dual.charges or len(kind.slots) < 4):
            continue  # all is known of it
        ports: list[tuple[int, np.ndarray]] = []
        kept = []
        for place, (slot, layouts) in enumerate(zip(kind.slots, [value.out, *(w for _, w in value.consumers)])):
            if slot[0] in number:
                ports.append((number[slot[0]], layouts))
                kept.append(place)
            else:
                ports.append(stand_in(slot, layouts, kind.count * kind.many[place]))
                kept.append(-1)
        found = Value(*ports[0], ports[1:], value.closure)
        part.problem.values.append(found)
        part.kinds.append(at)
        part.slots.append([kept[0], *(kept[1 + number] for number in found.distinct)])
        part.units.append(kind.count)
    return part


def passed(problem: Problem, cap: float, rest: float = 0.0, parts: Sequence[float] = (HALF,)) -> Messages:
    """Messages over all layouts, until they raise the bound no more, at last divided alike; rest: what else there is of it.

    parts: how they are divided before, see `paths`, one after the other.
    """
    return settle(everywhere(problem, cap), parts, rest)


def everywhere(problem: Problem, cap: float) -> Messages:
    """Messages over all layouts that say nothing yet; on more than two axes in single precision."""
    aliases = [np.arange(len(v.closure)) if aliased(v) else None for v in problem.values]
    wide = problem.variables[0].digits.shape[1] > 2
    everything = Space([np.arange(len(v.costs)) for v in problem.variables], aliases)
    return Messages(problem, everything, cap, np.float32 if wide else np.float64)


def settle(messages: Messages, parts: Sequence[float], rest: float = 0.0, aim: float = math.inf) -> Messages:
    """See `passed`; aim: a bound with which it is enough."""
    wide = messages.problem.variables[0].digits.shape[1] > 2
    for part in parts:
        messages.split(part)
        rise(messages, IDLE[wide], rest, aim)
    messages.split(None)
    for _ in range(ALIKE):
        messages.sweep()
    return messages


def rise(messages: Messages, idle: float, rest: float, aim: float) -> None:
    """Sweeps, until they add less than a part `idle` to the bound, of which there is `rest` elsewhere."""
    for _ in range(ROUNDS):
        before = messages.bound
        for _ in range(SWEEPS):
            messages.sweep()
        if messages.bound >= aim or messages.bound - before < idle * max(abs(messages.bound), rest):
            break


def far(problem: Problem, cap: float) -> Messages:
    """Of a problem in which nothing is tied the better ones of messages that are first divided by halves, or nearly all along
    paths: in one model the first come to rest too low, in another one the second take long."""
    messages = everywhere(problem, cap)
    begin, found = messages.state.copy(), list[tuple[float, np.ndarray]]()
    for parts in ((HALF, LITTLE), (LITTLE, HALF)):
        put(messages, begin)
        messages.bound = -np.inf
        settle(messages, parts)
        found.append((messages.bound, messages.state.copy()))
    bound, state = max(found, key=lambda pair: pair[0])
    put(messages, state)
    messages.bound = bound
    messages.sweep()
    return messages
