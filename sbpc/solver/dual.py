"""Lower bounds of a folded problem: multipliers that all members of a class share.

Messages on the folded problem itself would bound only plans in which a class has one label. So the multipliers are found in two
steps. In a chain of equal blocks, the first block meets another value than the rest. First the blocks are solved as if there were
no ends: every class meets the values that most of its members meet. Then the classes with one member, the ends, are solved with
the multipliers of the blocks as they are. `sbpc.solver.proof` computes the bound of the whole problem from all multipliers.
If nothing is tied, every class has one member and the first step is the whole problem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sbpc.solver.fold import Bundle, Folded, Slot
from sbpc.solver.messages.trws import BALANCE, Messages
from sbpc.solver.problem import Problem, Proof, Value, Variable
from sbpc.solver.subsets import distinct

ROUNDS = 16  # each of as many sweeps as there are from one balance of cost shares to the next
STALLED = 7.5e-4  # rounds end when one adds no more than this part to the bound


@dataclass(eq=False)
class SubProblem:
    """A problem made of a part of a folded one.

    By value: the number of its bundle, its slots (places among those of the bundle, -1 for a stand-in), and its unit: how many
    times a value of the bundle it stands for.
    """

    problem: Problem
    bundles: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    units: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Dual:
    """Multipliers by slot, and cost shares by number of a bundle, of a folded problem."""

    folded: Folded
    multipliers: dict[Slot, np.ndarray] = field(default_factory=dict)
    shares: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def proof(self) -> Proof:
        """Returns what `checked_bound` reads."""
        shares = {share_key(self.folded.bundles[at]): given for at, given in self.shares.items()}
        return Proof(self.folded.classes, dict(self.multipliers), shares)

    def take(self, part: SubProblem, messages: Messages, wanted: Callable[[Slot], bool]) -> None:
        """Takes the multipliers of the slots that are `wanted`, and all cost shares, from the messages of a part."""
        for number, by_port in enumerate(messages.multipliers()):
            bundle, unit = self.folded.bundles[part.bundles[number]], part.units[number]
            for place, multipliers in zip(part.slots[number], by_port):
                if place >= 0 and wanted(bundle.slots[place]):
                    self.multipliers[bundle.slots[place]] = multipliers / (unit * bundle.multiplicity[place])
        for number, shares in messages.shares().items():
            if len(shares) == len(self.folded.bundles[part.bundles[number]].slots) - 1:  # of all consumers
                self.shares[part.bundles[number]] = [share / part.units[number] for share in shares]


def share_key(bundle: Bundle) -> tuple[object, ...]:
    """Returns the key of a bundle's values in `Proof.shares`; see `sbpc.solver.proof.name`."""
    (producer, place), *consumers = bundle.slots
    return producer, place, tuple((*slot, many) for slot, many in zip(consumers, bundle.multiplicity[1:]))


def raise_bound(messages: Messages, rest: float = 0.0, rounds: int = ROUNDS) -> None:
    """Sweeps until rounds stall, first along paths, then with equal parts. rest: what the whole bound has besides."""
    for follow in (True, False):
        messages.follow_paths(follow)
        for _ in range(rounds):
            before = messages.bound
            for _ in range(BALANCE):
                messages.sweep()
            if messages.bound - before <= STALLED * max(abs(messages.bound), rest):
                break


def blocks(folded: Folded) -> SubProblem:
    """Returns the folded problem without the ends: at every slot the value that most members meet, as if all did."""
    main: dict[Slot, tuple[int, int]] = {}
    for at, bundle in enumerate(folded.bundles):
        for slot, many in zip(bundle.slots, bundle.multiplicity):
            if slot not in main or bundle.count * many > main[slot][0]:
                main[slot] = bundle.count * many, at
    kept = [[p for p, slot in enumerate(bundle.slots) if main[slot][1] == at] for at, bundle in enumerate(folded.bundles)]
    weights = class_weights(folded, kept)
    variables = [
        Variable(v.name, v.costs if weight == size else weight / size * v.costs, v.digits)
        for v, weight, size in zip(folded.problem.variables, weights, folded.sizes)
    ]
    part, closures = SubProblem(Problem(variables, [])), dict[tuple[int, float], np.ndarray]()
    for at, (bundle, value, places) in enumerate(zip(folded.bundles, folded.problem.values, kept)):
        if 0 not in places or len(places) == 1:
            continue
        unit = max(weights[bundle.slots[place][0]] / bundle.multiplicity[place] for place in places)
        key = id(bundle.closure), unit
        if key not in closures:  # one array for equal closures, as the messages look for them
            closures[key] = value.closure if unit == bundle.count else unit * bundle.closure
        consumers = [value.consumers[place - 1] for place in places[1:]]
        add_value(part, Value(value.producer, value.out, consumers, closures[key]), at, places, unit)
    return part


def add_value(part: SubProblem, value: Value, bundle: int, places: list[int], unit: float) -> None:
    """Adds a value to a part. places: by port of the value, its place among the slots of the bundle."""
    part.problem.values.append(value)
    part.bundles.append(bundle)
    part.slots.append([places[0], *(places[1 + number] for number in value.distinct)])
    part.units.append(unit)


def class_weights(folded: Folded, kept: list[list[int]]) -> list[int]:
    """Returns how often each class counts in `blocks`: classes of one block alike, as often as the largest has members."""
    block = list(range(len(folded.sizes)))

    def root(at: int) -> int:
        while block[at] != at:
            at = block[at]
        return at

    for bundle, places in zip(folded.bundles, kept):
        one = [bundle.slots[place][0] for place in places if bundle.multiplicity[place] == 1]
        if 0 in places:
            for at in one[1:]:
                block[root(at)] = root(one[0])
    most: dict[int, int] = {}
    for at, size in enumerate(folded.sizes):
        most[root(at)] = max(size, most.get(root(at), 0))
    return [most[root(at)] for at in range(len(folded.sizes))]


def ends(dual: Dual) -> SubProblem:
    """Returns the classes of one member and the values that meet them. A larger class at such a value becomes a stand-in: a
    variable with a label per layout that costs what the class's multipliers fall short of the best one."""
    folded = dual.folded
    single = [at for at, size in enumerate(folded.sizes) if size == 1]
    number = {at: place for place, at in enumerate(single)}
    part = SubProblem(Problem([folded.problem.variables[at] for at in single], []))
    for at, (bundle, value) in enumerate(zip(folded.bundles, folded.problem.values)):
        if all(slot[0] not in number for slot in bundle.slots) and (at in dual.shares or len(bundle.slots) < 4):
            continue  # its multipliers and shares are known
        ports: list[tuple[int, np.ndarray]] = []
        places = []
        for place, (slot, layouts) in enumerate(zip(bundle.slots, [value.out, *(w for _, w in value.consumers)])):
            if slot[0] in number:
                ports.append((number[slot[0]], layouts))
                places.append(place)
            else:
                multipliers = dual.multipliers.get(slot, np.zeros(len(layouts)))
                ports.append(stand_in(part.problem, layouts, bundle.count * bundle.multiplicity[place] * multipliers))
                places.append(-1)
        add_value(part, Value(*ports[0], ports[1:], value.closure), at, places, bundle.count)
    return part


def stand_in(problem: Problem, layouts: np.ndarray, multipliers: np.ndarray) -> tuple[int, np.ndarray]:
    """Adds a variable for a port with these multipliers; returns its number and the layouts of its labels."""
    labels, at = distinct(layouts)
    most = np.full(len(labels), -np.inf)
    np.maximum.at(most, at, multipliers)
    axes = problem.variables[0].digits.shape[1] if problem.variables else 1
    problem.variables.append(Variable("", most.max() - most, np.zeros((len(labels), axes), dtype=np.int64)))
    return len(problem.variables) - 1, labels
