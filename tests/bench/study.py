"""Whether overlapped plans are the best there are, where all can be tried: `python -m tests.bench.study [words of names]`.

Of each case all labels of all variables are gone through. A part of a plan is left where a bound says that whatever
it becomes takes as long as 1 / (1 + NEAR) of the plan that was found, and as long as the bound that this carries: what
it keeps streams busy at some weights, as the multipliers of layout problems tell, or its longest chain of calls. All
others are boxed, scheduled and timed as plans are. So where none is faster, ours is proved to be within NEAR of the
best. The plans that differ from ours in one label are timed in any case. No plan may be below a bound.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbpc import Mesh
from sbpc.api.task import prepare
from sbpc.graph.operands import tensors_of
from sbpc.passes.assign.build_tables import only_renames
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import Wishes, wishes
from sbpc.passes.box import box
from sbpc.passes.schedule.choice import bounding, streams_of, weighted
from sbpc.passes.schedule.schedule import schedule
from sbpc.plans.options import Options
from sbpc.plans.plan import Plan
from sbpc.plans.planned import ROOM
from sbpc.plans.timeline import COMPUTE, STREAMS, makespan, timeline
from sbpc.solver.bounder import Bounder
from sbpc.solver.fold import fold
from sbpc.solver.problem import Array, Value, star_seconds
from sbpc.solver.proof import consumers, multiplier, value_bound
from tests.bench.study_cases import CASES, CLUSTERS

NEAR, SAME = 2e-2, 1e-9
MOST, PARTS_MOST = 20_000, 20_000_000  # plans that are timed of a case, and parts of plans that are looked at
PARTS = 1 / 32, 1 / 4, 1 / 2, 3 / 4, 31 / 32, 1.0  # of computing in weights


class Paid:
    """A layout problem in which every variable and value pays on its own, as multipliers say: any labels cost the sum
    of that. The variables are taken in an order.

    costs: by variable and label. rest: by place in the order, what all from there on cost at least.
    """

    def __init__(self, space: Space, order: Sequence[int], done: Sequence[int]) -> None:
        problem = space.problem
        proof = Bounder(problem, fold(problem, range(len(problem.variables)))).proof
        self.values, self.costs = problem.values, [variable.costs.copy() for variable in problem.variables]
        self.paid: list[list[tuple[int, Array]]] = []
        least, known = [], dict[tuple[int, ...], Any]()
        for value in self.values:
            ends = [(0, value.producer), *((1 + number, value.consumers[number][0]) for number in value.distinct)]
            paid = [
                (at, multiplier(proof, proof.classes[at], value.places[end], len(self.costs[at]))) for end, at in ends
            ]
            for at, each in paid:
                self.costs[at] = self.costs[at] + each
            self.paid.append(paid)
            least.append(value_bound(value, consumers(value, proof.classes), proof, known))
        rest = [self.costs[at].min() for at in order]
        for number, place in enumerate(done):
            rest[place] += least[number]
        self.rest = [*itertools.accumulate(reversed(rest), initial=0.0)][::-1]
        self.known: list[dict[tuple[int, ...], float]] = [{} for _ in self.values]

    def value_cost(self, number: int, labels: Sequence[int]) -> float:
        """Returns what a value costs, less what is paid there."""
        value = self.values[number]
        key = tuple(labels[at] for at, _ in value.ends)
        if key not in self.known[number]:
            paid = sum(float(each[labels[at]]) for at, each in self.paid[number])
            self.known[number][key] = star_seconds(value, labels) - paid
        return self.known[number][key]


class AllPlans:
    """All labels of a space that may take less than `below` seconds.

    order: the variables, stored ones before their first reader. done: by value, the place in the order at which all
    that meet it are known.
    """

    def __init__(self, space: Space, wished: Wishes, below: float, most: int = PARTS_MOST) -> None:
        self.space, self.below, problem = space, below, space.problem
        self.order = self.in_order()
        places = {at: place for place, at in enumerate(self.order)}
        done = [max(places[at] for at, _ in value.ends) for value in problem.values]
        self.closing: list[list[int]] = [[] for _ in self.order]
        for number, place in enumerate(done):
            self.closing[place].append(number)
        self.problems = []
        ways = bounding(streams_of(space.mesh), space.mesh.cluster.taken)
        for weights in (dict.fromkeys(STREAMS, 0.0) | way for way in ways if way[COMPUTE] in PARTS):
            mesh = weighted(space.mesh, weights)
            other = Space(space.gm, mesh, wished.nodes, wished.outputs, space, weights[COMPUTE])
            assert all((a.digits == b.digits).all() for a, b in zip(other.tables, space.tables))
            self.problems.append(Paid(other, self.order, done))
        # the parts of a call in two phases may run beside each other
        self.seconds = [np.where(table.two_phase, 0.0, v.costs) for table, v in zip(space.tables, problem.variables)]
        self.read: list[list[Value]] = [[] for _ in self.order]  # by variable, what it reads
        for value in problem.values:
            for at in dict.fromkeys(at for at, _ in value.consumers):
                self.read[at].append(value)
        self.calls = [at < len(space.nodes) and space.nodes[at].op == "call_function" for at in range(len(self.order))]
        self.made: dict[int, list[Value]] = {}
        for value in problem.values:
            self.made.setdefault(value.producer, []).append(value)
        self.tails = self.longest_tails()
        self.renamed = {at: value for at, value in self.renamings()}
        self.seen, self.most = 0, most

    def in_order(self) -> list[int]:
        """Returns the variables, each stored one before the first call that reads it."""
        first: dict[int, int] = {}
        for value in self.space.problem.values:
            readers = [at for at, _ in value.consumers if at > value.producer] or [value.producer]
            first[value.producer] = min(readers)
        stored = [node.op == "placeholder" for node in self.space.nodes]
        keys = {
            at: (first.get(at, at), 0) if at < len(stored) and stored[at] else (at, 1)
            for at in range(len(self.space.variables))
        }
        return sorted(keys, key=lambda at: keys[at])

    def renamings(self) -> Iterator[tuple[int, Value]]:
        """Yields the calls that rename dims of a value that nothing else reads. It may as well be boxed after as
        before."""
        for value in self.space.problem.values:
            reader = value.consumers[0][0]
            table = self.space.tables[reader]
            if (
                len(value.consumers) == 1
                and self.calls[reader]
                and only_renames(table, tensors_of(self.space.nodes[reader]))
            ):
                yield reader, value

    def choices(self, at: int, labels: Sequence[int]) -> Sequence[int]:
        """Returns the labels that a variable may take."""
        if at in self.renamed:
            value = self.renamed[at]
            same = np.flatnonzero(value.consumers[0][1] == value.out[labels[value.producer]])
            if len(same):
                return same[:1].tolist()
        return range(len(self.seconds[at]))

    def longest_tails(self) -> list[Array]:
        """Returns by variable and label the seconds from where it begins to the end of the step, at least."""
        after = [np.zeros(len(costs)) for costs in self.seconds]
        tails = list[Array](self.seconds)
        for at in reversed(range(len(self.seconds))):
            for value in self.made.get(at, ()):
                for reader, wants in value.consumers:
                    tail = tails[reader] if self.is_later(reader, at) else np.zeros(len(wants))
                    after[at] = np.maximum(after[at], (value.closure[:, wants] + tail).min(1)[value.out])
            tails[at] = self.seconds[at] + after[at]
        return tails

    def start(self, at: int, labels: Sequence[int], ends: Sequence[float]) -> Array:
        """Returns by label of a call when it can begin. ends: by variable when it has run."""
        found = np.zeros(len(self.seconds[at]))
        for value in self.read[at]:
            for reader, wants in value.consumers:
                if reader == at:
                    found = np.maximum(
                        found, ends[value.producer] + value.closure[value.out[labels[value.producer]]][wants]
                    )
        return found

    def plans(self) -> Iterator[list[int]]:
        """Yields the labels of every plan that is not left out."""
        count = len(self.order)
        yield from self.further(0, [0] * count, [0.0] * count, [0.0] * len(self.problems))

    def further(self, place: int, labels: list[int], ends: list[float], sums: Sequence[float]) -> Iterator[list[int]]:
        """Yields what the labels up to a place of the order become."""
        if place == len(self.order):
            if self.least(labels, ends) < self.below:
                yield list(labels)
            return
        at = self.order[place]
        start = self.start(at, labels, ends) if self.calls[at] else np.zeros(len(self.seconds[at]))
        chains = start + self.tails[at] if self.calls[at] else start
        for label in self.choices(at, labels):
            self.seen += 1
            if chains[label] >= self.below or self.seen > self.most:
                continue
            labels[at], ends[at] = label, float(start[label] + (self.seconds[at][label] if self.calls[at] else 0.0))
            paid = self.paid(place, labels, sums)
            if paid is not None and all(self.home(number, labels, ends) < self.below for number in self.closing[place]):
                yield from self.further(place + 1, labels, ends, paid)

    def least(self, labels: Sequence[int], ends: Sequence[float]) -> float:
        """Returns what all labels take at least: the kernels behind which a chain goes on for so long, one after the
        other, and that chain."""
        after = [0.0] * len(labels)
        for at in reversed(range(len(labels))):
            for value in self.made.get(at, ()):
                row = value.closure[value.out[labels[at]]]
                for reader, wants in value.consumers:
                    further = after[reader] + self.seconds[reader][labels[reader]] if self.is_later(reader, at) else 0.0
                    after[at] = max(after[at], float(row[wants[labels[reader]]]) + further)
        calls = sorted((at for at, call in enumerate(self.calls) if call), key=lambda at: -after[at])
        busy = itertools.accumulate(self.seconds[at][labels[at]] for at in calls)
        return max((each + after[at] for at, each in zip(calls, busy)), default=0.0)

    def is_later(self, reader: int, at: int) -> bool:
        """Returns whether a call reads a value of another, rather than that it is stored, or left."""
        return self.calls[reader] and reader > at

    def home(self, number: int, labels: Sequence[int], ends: Sequence[float]) -> float:
        """Returns when a value is where all that stores it or takes it out want it."""
        value = self.space.problem.values[number]
        row = value.closure[value.out[labels[value.producer]]]
        stored = [float(row[wants[labels[at]]]) for at, wants in value.consumers if not self.calls[at]]
        return ends[value.producer] + max(stored, default=0.0)

    def paid(self, place: int, labels: Sequence[int], sums: Sequence[float]) -> list[float] | None:
        """Returns by weights what the labels up to a place pay; None if with the rest it is too much."""
        found, at = [], self.order[place]
        for paid, problem in zip(sums, self.problems):
            paid += float(problem.costs[at][labels[at]])
            paid += sum(problem.value_cost(number, labels) for number in self.closing[place])
            if paid + problem.rest[place + 1] >= self.below * (1 + SAME):
                return None
            found.append(paid)
        return found


@dataclass
class Row:
    """What was found of a case. best: of all plans that were timed. proved: whether all others take longer than
    allowed."""

    name: str
    tried: int
    seen: int
    labels: int
    ours: float
    best: float
    bound: float
    proved: bool
    cpu: float

    @property
    def ratio(self) -> float:
        """How many times as long as the best plan ours takes."""
        return self.ours / self.best

    @property
    def holds(self) -> bool:
        """Whether ours is within NEAR of the best of all, and no plan is below the bound."""
        return self.proved and self.ratio <= 1 + NEAR and self.bound <= self.best * (1 + SAME)

    def __str__(self) -> str:
        gap = (self.ours - self.bound) / self.ours
        return (
            f"{self.name:34} 1e{math.log10(max(self.labels, 1)):.0f} plans, {self.seen:8,} parts, {self.tried:6,} timed  "
            f"best {self.best:.5g} s  ours {self.ours:.5g} s  ratio {self.ratio:.4f}  gap {gap:.3f} "
            f"({1 - self.bound / self.best:.3f} of the best)  {self.cpu:.0f} s{'' if self.proved else '  NOT ALL'}"
            f"{'' if self.holds or not self.proved else '  FAILS'}"
        )


def timed(space: Space, labels: list[int]) -> float:
    """Returns the seconds of the step of a plan, scheduled as plans are."""
    boxed = box(space.gm, space.assignment(labels), space.mesh)
    boxed = schedule(boxed, space.mesh, room=ROOM * space.mesh.cluster.memory)  # beside which its state is small
    return makespan(timeline(boxed, space.mesh))


def neighbours(space: Space, labels: Sequence[int]) -> Iterator[list[int]]:
    """Yields the plans that differ in one label."""
    for at, variable in enumerate(space.variables):
        yield from (
            [*labels[:at], label, *labels[at + 1 :]] for label in range(len(variable.costs)) if label != labels[at]
        )


def planned(name: str) -> tuple[Plan, Space, Wishes]:
    """Returns the plan of a case, its space and its wishes. Halves and panels are other graphs, so there are none."""
    make, cluster, sizes = CASES[name]
    model, args = make()
    mesh = Mesh(cluster=CLUSTERS[cluster], **dict(zip("xyz", sizes)))
    task = prepare(model, args)
    plan = task.plan(mesh, Options(microbatches=1, panels=1, slices=1))
    wished = wishes(plan.annotated, mesh, plan.options)
    return plan, Space(plan.annotated, mesh, wished.nodes, wished.outputs), wished


def study(name: str, most: int = MOST, parts: int = PARTS_MOST) -> Row:
    """Returns what is found of a case."""
    plan, space, wished = planned(name)
    start = time.process_time()
    ours, bound, own = plan.cost.seconds, plan.lower_bound, space.labels(plan.assignment)
    known: dict[tuple[int, ...], float] = {tuple(own): ours}
    for labels in neighbours(space, own):
        if np.isfinite(sum(star_seconds(value, labels) for value in space.values)):
            known[tuple(labels)] = timed(space, labels)
    search, proved = AllPlans(space, wished, max(ours / (1 + NEAR), bound * (1 - SAME)), parts), True
    for labels in search.plans():
        if len(known) >= most:
            proved = False
            break
        if tuple(labels) not in known:
            known[tuple(labels)] = timed(space, labels)
    proved = proved and search.seen <= parts
    count = math.prod(len(variable.costs) for variable in space.variables)
    took = time.process_time() - start
    return Row(name, len(known), search.seen, count, ours, min(known.values()), bound, proved, took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="cases whose names have one of these; all without")
    parser.add_argument("--most", type=int, default=MOST, help="plans that are timed of a case")
    parser.add_argument("--parts", type=int, default=PARTS_MOST, help="parts of plans that are looked at of a case")
    options = parser.parse_args()
    rows = []
    for name in CASES:
        if not options.words or any(word in name for word in options.words):
            rows.append(study(name, options.most, options.parts))
            print(rows[-1], flush=True)
    within = sum(row.ratio <= 1 + NEAR and row.proved for row in rows)
    valid = sum(row.bound <= row.best * (1 + SAME) for row in rows)
    print(f"within {NEAR:.0%} of the best in {within} of {len(rows)} cases; bounds hold in {valid}")


if __name__ == "__main__":
    main()
