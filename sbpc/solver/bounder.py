"""Lower bounds of a folded problem: multipliers that all members of a class share, found by messages that go on when
costs change.

Messages on the folded problem itself would bound only plans in which a class has one label. So the multipliers are
found in two steps. In a chain of equal blocks, the first block meets another value than the rest. First the blocks are
solved as if there were no ends: every class meets the values that most of its members meet. Then the classes with one
member, the ends, are solved with the multipliers of the blocks as they are. `sbpc.solver.proof` computes the bound of
the whole problem from all multipliers. If every class has one member, the first step is the whole problem.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from networkx.utils import UnionFind

from sbpc.solver.fold import Folded, Slot, fold, repriced
from sbpc.solver.messages.trws import BALANCE, Messages, big_m
from sbpc.solver.problem import SLACK, Array, Problem, Proof, Value, Variable, total
from sbpc.solver.proof import checked_bound, largest
from sbpc.solver.subsets import Subset, everything

ROUNDS = 16  # each of as many sweeps as there are from one balance of cost shares to the next
STALLED = 7.5e-4  # rounds end when one adds no more than this part to the bound
PLANNED = 1e-6  # part of the bound by which the best plan exceeds it, for single precision
ROUNDING = 1e-4  # of the seconds, in bounds of single precision
CELLS = 1e8  # boxings between two layouts, over all values, of a network that is not folded
WIDE = 3  # axes from which messages are of single precision: half the memory, two thirds of the time


class Bounder:
    """Multipliers and reduced costs of a folded problem.

    labels: a plan read off the messages, by class. reduced_costs: by class and label. bound, proof: for the whole
    problem. seconds: of a known plan.
    """

    def __init__(self, problem: Problem, folded: Folded, seconds: float = math.inf):
        self.folded, self.big_m = folded, big_m(folded.problem, seconds)
        part = blocks(folded)
        self.bundles = part.bundles
        self.messages = messages_of(part.problem, self.big_m)
        self.solve(problem)

    def solve(self, problem: Problem) -> None:
        """Finds multipliers of the problem, which may have other label costs than the one before."""
        self.folded = repriced(self.folded, problem)
        part = blocks(self.folded)
        self.multipliers: dict[Slot, Array] = {}
        self.shares: dict[int, list[Array]] = {}  # of costs, by number of a bundle
        self.messages.reprice(part.problem)
        raised(self.messages)
        self.take(part, self.messages)
        self.labels, self.reduced_costs = self.messages.decode(), self.messages.reduced_costs()
        if not self.folded.trivial:
            self.solve_ends()
        shares = {self.folded.bundles[at].share_key: parts for at, parts in self.shares.items()}
        self.proof = Proof(self.folded.classes, self.multipliers, shares)
        self.bound = checked_bound(problem, self.proof)

    def take(self, part: SubProblem, messages: Messages) -> None:
        """Takes the multipliers of the slots of a part, and all cost shares, from its messages."""
        shares = messages.shares()
        for number, by_port in enumerate(messages.multipliers()):
            at, unit = part.bundles[number], part.units[number]
            bundle = self.folded.bundles[at]
            for place, multipliers in zip(part.slots[number], by_port):
                if place >= 0:
                    self.multipliers[bundle.slots[place]] = multipliers / (unit * bundle.multiplicity[place])
            if len(shares.get(number, ())) == len(bundle.slots) - 1 > 0:  # of all consumers
                self.shares[at] = [share / unit for share in shares[number]]

    def below(self, seconds: float) -> Subset | None:
        """Returns the labels and aliases with which a plan may cost at most `seconds`; None if there is no such plan.

        Every class must have one member. Single precision is allowed for.
        """
        assert self.folded.trivial
        problem = self.folded.problem
        most = seconds * (1 + ROUNDING) if is_wide(problem) else seconds
        subset = everything(problem)
        for (kind, at), bounds in zip(self.messages.names, self.messages.label_bounds()):
            kept = np.flatnonzero(bounds <= most)
            if not len(kept):
                return None
            if kind == 0:
                subset.labels[at] = kept
            else:
                subset.aliases[self.bundles[at]] = kept  # values that nothing reads have no messages
        return subset

    def solve_ends(self) -> None:
        """Finds the multipliers of the classes of one member, those of the others as they are."""
        part, single = self.ends()
        if not part.problem.variables:
            return
        messages = raised(messages_of(part.problem, self.big_m), self.messages.bound)
        self.take(part, messages)
        for at, costs in zip(single, messages.reduced_costs()):
            self.reduced_costs[at] = costs

    def ends(self) -> tuple[SubProblem, list[int]]:
        """Returns the classes of one member, with the values that meet them. A larger class at such a value becomes
        a stand-in: a variable with a label per layout that costs what the class's multipliers fall short of the best
        one."""
        folded = self.folded
        single = [at for at, size in enumerate(folded.sizes) if size == 1]
        number = {at: place for place, at in enumerate(single)}
        part = SubProblem(Problem([folded.problem.variables[at] for at in single], []))
        for at, (bundle, value) in enumerate(zip(folded.bundles, folded.problem.values)):
            if all(slot[0] not in number for slot in bundle.slots) and (at in self.shares or len(bundle.slots) < 4):
                continue  # its multipliers and shares are known
            ports: list[tuple[int, Array]] = []
            places = []
            for place, (slot, layouts) in enumerate(zip(bundle.slots, [layouts for _, layouts in value.ends])):
                if slot[0] in number:
                    ports.append((number[slot[0]], layouts))
                    places.append(place)
                else:
                    multipliers = self.multipliers.get(slot, np.zeros(len(layouts)))
                    ports.append(
                        stand_in(part.problem, layouts, bundle.count * bundle.multiplicity[place] * multipliers)
                    )
                    places.append(-1)
            add_value(part, Value(*ports[0], ports[1:], value.closure), at, places, bundle.count)
        return part, single


def is_wide(problem: Problem) -> bool:
    """Returns whether labels choose on so many axes that they are thousands."""
    return problem.variables[0].digits.shape[1] >= WIDE


def messages_of(problem: Problem, most: float, like: Messages | None = None) -> Messages:
    """Returns messages in the precision of a problem. most: seconds at which boxings are cut off. like: see
    `Messages`."""
    return Messages(problem, most, np.float32 if is_wide(problem) else np.float64, like)


def folded_messages(folded: Folded, of_blocks: Messages, bundles: Sequence[int], stalled: float = STALLED) -> Messages:
    """Returns messages of the folded problem itself, which knows the ends of runs of blocks. They go on from those of
    the blocks. Their bound is one only of plans in which a class has one label."""
    messages = messages_of(folded.problem, of_blocks.big_m, of_blocks)
    messages.start_from(of_blocks, bundles)
    return raised(messages, stalled=stalled, planned=True)


def certify(problem: Problem, finer: Sequence[int], seconds: float, limit: float) -> tuple[float, Proof]:
    """Returns the best bound found in about `limit` CPU seconds, and its proof; the first bound is not cut short.

    The problem is not folded, unless that takes gigabytes: then `finer` are the classes. seconds: of a plan; a bound
    of as much ends it.
    """
    until = time.process_time() + limit
    cells = sum(len(value.closure) ** 2 for value in problem.values)
    folded = fold(problem, range(len(problem.variables)) if cells <= CELLS else finer)
    bounder = Bounder(problem, folded, seconds)
    best, before = (bounder.bound, bounder.proof), -math.inf
    while before < best[0] < seconds * (1 - SLACK) and time.process_time() < until:
        before = best[0]
        bounder.solve(problem)
        best = max(best, (bounder.bound, bounder.proof), key=lambda pair: pair[0])
    return min(best[0], seconds), best[1]


# --- the problems that messages solve, and multipliers from them ------------------------------------------------------
@dataclass(eq=False)
class SubProblem:
    """A problem made of a part of a folded one.

    By value: the number of its bundle, its slots (places among those of the bundle, -1 for a stand-in), and its
    unit: how many times a value of the bundle it stands for.
    """

    problem: Problem
    bundles: list[int] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    units: list[float] = field(default_factory=list)


def raised(messages: Messages, rest: float = 0.0, stalled: float = STALLED, planned: bool = False) -> Messages:
    """Returns the messages after sweeps until rounds stall, first along paths, then with equal parts. rest: what the
    whole bound has besides. stalled: see STALLED. planned: whether a plan is asked for, so that they end once it is
    read off them."""
    for follow in (True, False):
        messages.follow_paths(follow)
        for _ in range(ROUNDS):
            before = messages.bound
            for _ in range(BALANCE):
                messages.sweep()
            if planned and total(messages.problem, messages.decode()) <= messages.bound * (1 + PLANNED):
                return messages
            if messages.bound - before <= stalled * max(abs(messages.bound), rest):
                break
    return messages


def blocks(folded: Folded) -> SubProblem:
    """Returns the folded problem without the ends: at every slot the value that most members meet, as if all did."""
    main: dict[Slot, tuple[int, int]] = {}
    for at, bundle in enumerate(folded.bundles):
        for slot, many in zip(bundle.slots, bundle.multiplicity):
            if slot not in main or bundle.count * many > main[slot][0]:
                main[slot] = bundle.count * many, at
    kept = [
        [p for p, slot in enumerate(bundle.slots) if main[slot][1] == at] for at, bundle in enumerate(folded.bundles)
    ]
    weights = class_weights(folded, kept)
    variables = [
        Variable(v.name, v.costs if weight == size else weight / size * v.costs, v.digits)
        for v, weight, size in zip(folded.problem.variables, weights, folded.sizes)
    ]
    part, closures = SubProblem(Problem(variables, [])), dict[tuple[int, float], Array]()
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
    """Returns how often each class counts in `blocks`: classes of one block alike, as often as the largest has
    members."""
    union = UnionFind(range(len(folded.sizes)))
    for bundle, places in zip(folded.bundles, kept):
        if 0 in places:
            union.union(*(bundle.slots[place][0] for place in places if bundle.multiplicity[place] == 1))
    most: dict[int, int] = {}
    for at, size in enumerate(folded.sizes):
        most[union[at]] = max(size, most.get(union[at], 0))
    return [most[union[at]] for at in range(len(folded.sizes))]


def stand_in(problem: Problem, layouts: Array, multipliers: Array) -> tuple[int, Array]:
    """Adds a variable for a port with these multipliers; returns its number and the layouts of its labels."""
    labels, most = largest(layouts, multipliers, {})
    axes = problem.variables[0].digits.shape[1] if problem.variables else 1
    problem.variables.append(Variable("", most.max() - most, np.zeros((len(labels), axes), dtype=np.int64)))
    return len(problem.variables) - 1, labels
