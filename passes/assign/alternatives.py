"""Solves a layout problem again with one value laid out otherwise: the best whole plan for each layout that it may
have.

Everything else is free again, but far from the value nothing changes: the program frees what is near, and goes further
where the answer changes at the edge. A small problem is freed whole, so its answers are exact. For any problem the
multipliers prove what every plan with a layout takes at least: the bound, and the reduced cost of the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sbpc.mesh.layout import Layout
from sbpc.mesh.layout_codes import decode
from sbpc.passes.assign.space import Space
from sbpc.solver import Problem, Proof, Value, Variable, total
from sbpc.solver.highs import cheapest
from sbpc.solver.problem import SLACK, Labels, star_seconds
from sbpc.solver.program import columns_of
from sbpc.solver.subsets import around, everything, least_reduced

SOLVED = 12  # layouts that are solved again, those of least reduced cost; of the others the bounds are told
SMALL = 5_000  # columns of a program in which everything is free
NEAR = 6  # labels a variable, on average, that are free around the value
REACH, FARTHEST = 2, 8  # values from variable to variable that are free; as many again until the edge stays as it is
MANY = 300  # free variables at most
# of the plan: what a label costs more that differs from the plan's, so that of equal answers the nearest is found
STAY = 1e-10


@dataclass(frozen=True)
class Otherwise:
    """What is known of the plans in which a value has another layout.

    labels: of the best one found, None where none was looked for. difference: seconds that it takes more than the
    plan. at_least: the same of all of them. exact: whether none is faster than the one found.
    """

    layout: Layout
    labels: list[int] | None
    difference: float
    at_least: float
    exact: bool


@dataclass(eq=False)
class Solved:
    """A solved problem. bound: of all plans, by the multipliers of `proof`. labels: the plan. allowed: seconds that
    a plan within the limits pays at most for its bytes, where the problem has prices for them."""

    space: Space
    problem: Problem
    proof: Proof
    bound: float
    labels: Labels
    allowed: float = 0.0

    @cached_property
    def seconds(self) -> float:
        """What the plan takes, bytes for nothing."""
        return total(self.space.problem, self.labels)

    @cached_property
    def touching(self) -> list[list[int]]:
        """By variable, the values that it makes or reads."""
        touching: list[list[int]] = [[] for _ in self.problem.variables]
        for number, value in enumerate(self.problem.values):
            for at in dict.fromkeys(at for at, _ in value.ends):
                touching[at].append(number)
        return touching

    def touched(self, labels: Labels) -> tuple[list[int], list[int]]:
        """Returns the variables that have other labels than in the plan, and the values that these make or read."""
        changed = [at for at, (mine, others) in enumerate(zip(labels, self.labels)) if mine != others]
        return changed, sorted({number for at in changed for number in self.touching[at]})

    def difference(self, problem: Problem, labels: Labels) -> float:
        """Returns what labels cost more than the plan. problem: the one here, or the same with other costs of
        labels."""
        changed, numbers = self.touched(labels)
        costs = [problem.variables[at].costs for at in changed]
        own = (float(each[labels[at]] - each[self.labels[at]]) for at, each in zip(changed, costs))
        values = [problem.values[number] for number in numbers]
        found = math.fsum([*own, *(star_seconds(value, labels) - star_seconds(value, self.labels) for value in values)])
        return found if abs(found) > SLACK * self.seconds else 0.0

    def reduced_costs(self, at: int) -> np.ndarray:
        """Returns, by label of a variable, how far above the bound all plans with it are, by the multipliers."""
        costs = self.problem.variables[at].costs
        for number in self.touching[at]:
            value = self.problem.values[number]
            for (reader, _), place in zip(value.ends, value.places):
                given = self.proof.multipliers.get((self.proof.classes[at], place)) if reader == at else None
                costs = costs if given is None else costs + given
        return costs - costs.min()

    def within(self, at: int, reach: int) -> dict[int, int]:
        """Returns the variables at most so many values away from one, each with its distance, nearest first."""
        distance, queue = {at: 0}, [at]
        for near in queue:
            for number in self.touching[near] if distance[near] < reach else ():
                value = self.problem.values[number]
                for other, _ in value.ends:
                    if other not in distance and len(distance) < MANY:
                        distance[other] = distance[near] + 1
                        queue.append(other)
        return distance

    def part(self, free: Sequence[int]) -> tuple[list[int], Problem]:
        """Returns the values that touch free variables as a problem, and which variables it has, the free ones
        first."""
        numbers = sorted({number for at in free for number in self.touching[at]})
        values = [self.problem.values[number] for number in numbers]
        members = list(dict.fromkeys([*free, *(at for value in values for at, _ in value.ends)]))
        place = {at: number for number, at in enumerate(members)}
        moved = [
            Value(place[v.producer], v.out, [(place[at], wants) for at, wants in v.consumers], v.closure, v.places)
            for v in values
        ]
        return members, Problem([self.problem.variables[at] for at in members], moved)

    def solve(self, at: int, pinned: np.ndarray) -> tuple[list[int] | None, bool]:
        """Returns the best labels found with a variable on one of the `pinned` labels, and whether none are better."""
        subset = everything(self.problem) if len(self.problem.variables) <= MANY else None
        if subset is not None and columns_of(self.problem, subset) <= SMALL:
            subset.labels[at] = pinned
            variables = [self.staying(each) for each in range(len(self.problem.variables))]
            answer = cheapest(Problem(variables, self.problem.values), subset, self.scale)
            return answer.labels, answer.proved
        labels: list[int] | None = None
        for reach in range(REACH, FARTHEST + 1, REACH):
            distance = self.within(at, reach)
            labels = self.solve_near(list(distance), pinned)
            edge = [
                each
                for each, steps in distance.items()
                if steps == reach and labels and labels[each] != self.labels[each]
            ]
            if labels is not None and not edge:
                break
        return labels, False

    def solve_near(self, free: Sequence[int], pinned: np.ndarray) -> list[int] | None:
        """Returns the best labels with some variables free, those near by the multipliers, and all others as they
        are."""
        members, part = self.part(free)
        near = least_reduced([self.reduced_costs(at) for at in free], NEAR)
        labels = [np.union1d(each, [self.labels[at]]).astype(np.intp) for at, each in zip(free, near)]
        labels += [np.array([self.labels[at]], dtype=np.intp) for at in members[len(free) :]]
        labels[0] = pinned
        part.variables[: len(free)] = [self.staying(at) for at in free]
        answer = cheapest(part, around(part, [], labels), self.scale)
        if answer.labels is None:
            return None
        whole = list(self.labels)
        for at, label in zip(members, answer.labels):
            whole[at] = label
        return whole

    def staying(self, at: int) -> Variable:
        """Returns a variable whose labels cost a little more where they differ from the plan's."""
        variable = self.problem.variables[at]
        costs = variable.costs + STAY * self.scale
        costs[self.labels[at]] -= STAY * self.scale
        return Variable(variable.name, costs, variable.digits)

    @cached_property
    def scale(self) -> float:
        """About what plans cost."""
        return total(self.problem, self.labels) or 1.0


def alternatives(solved: Solved, at: int, index: int, most: int = SOLVED) -> list[Otherwise]:
    """Returns what is known of every other layout of output `index` of a variable, the best first.

    most: layouts that are solved again.
    """
    space, codes, reduced = solved.space, solved.space.tables[at].outs[index], solved.reduced_costs(at)
    least = solved.bound - solved.allowed - solved.seconds
    groups = [np.flatnonzero(codes == code) for code in np.unique(codes) if code != codes[solved.labels[at]]]
    groups.sort(key=lambda labels: float(reduced[labels].min()))
    known = []
    for number, pinned in enumerate(groups):
        labels, exact = solved.solve(at, pinned) if number < most else (None, False)
        difference = math.inf if labels is None else solved.difference(space.problem, labels)
        exact, at_least = exact and not solved.allowed, min(least + float(reduced[pinned].min()), difference)
        layout = decode(int(codes[pinned[0]]), space.mesh.axes)
        known.append(Otherwise(layout, labels, difference, difference if exact else at_least, exact))
    return sorted(known, key=lambda each: (float(f"{each.difference:.6g}"), each.at_least))
