"""A bound of all plans under limits by cases: of which each has its own prices of limits, and its own multipliers.

Where limits are short, the relaxation mixes a fast plan that takes much with slow ones that take little, and at no prices is a
bound above that mixture. Of the plans in which one variable has one of some labels, and of those in which it has none of them,
each part has less to mix; so the part with the least bound is cut next, at the variable that tells the mixed plans apart, as in
`branch`, until all bounds are good enough. There the cases are of a few labels, here of all: prices are those of a relaxation on
labels that are near, the bound at these prices is one of messages over all of them, which then tell what is near in the parts.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sbpc.solver.branch import INTEGRAL, halves
from sbpc.solver.check import Proof, checked_bound
from sbpc.solver.dual import Effort, between_ends, checked
from sbpc.solver.exact import columns_of
from sbpc.solver.fold import fold
from sbpc.solver.moves import around, nearest
from sbpc.solver.network import Space
from sbpc.solver.problem import Limit, Problem, charged, total
from sbpc.solver.relax import priced
from sbpc.solver.resume import untied
from sbpc.solver.trws import ceiling

EACH = 8  # labels of a variable in a relaxation, at most
DEAR, OUTSIDE = 30.0, 100.0  # of the scale: what as much again as a limit costs in the relaxation; a label that is not in a case
CLOSE = 5e-3  # relative: where a relaxation is not further below the aim, messages are made smooth
WORK = 6e5  # cuts, at most, times the columns of a relaxation

Left = Mapping[int, np.ndarray]  # by variable which of its labels are left, of those that were cut


@dataclass(frozen=True, eq=False)
class Leaf:
    """A part that was not cut: the prices of limits in it, seconds for all of each, and multipliers."""

    prices: Sequence[float]
    proof: Proof


@dataclass(frozen=True, eq=False)
class Cut:
    """A part that was: a variable, labels of it [bool], and proofs of the plans that have one of them, and of all others."""

    variable: int
    labels: np.ndarray
    parts: tuple[Tree, Tree]


Tree = Leaf | Cut


def bound_by_cases(problem: Problem, limits: Sequence[Limit], tree: Tree, outside: float, left: Left | None = None) -> float:
    """Seconds below which no plan under the limits is, whatever the tree is; outside: what labels cost, seconds, in a case that no
    plan has there. Nothing of the solver is used but `checked_bound`. left: see `Left`, of all plans nothing."""
    if isinstance(tree, Leaf):
        prices = [max(price, 0.0) for price in tree.prices]
        return checked_bound(within(charged(problem, limits, prices), left or {}, outside), tree.proof) - math.fsum(prices)
    sides = [both(left or {}, tree.variable, labels) for labels in (tree.labels, ~tree.labels)]
    return min(bound_by_cases(problem, limits, part, outside, side) for part, side in zip(tree.parts, sides))


def both(left: Left, at: int, labels: np.ndarray) -> dict[int, np.ndarray]:
    """Of what is left only these labels of a variable."""
    return {**left, at: left[at] & labels if at in left else labels}


def within(problem: Problem, left: Left, outside: float) -> Problem:
    """The problem in which labels that are not left cost more."""
    variables = list(problem.variables)
    for at, labels in left.items():
        variables[at] = replace(variables[at], costs=variables[at].costs + np.where(labels, 0.0, outside))
    return Problem(variables, problem.values)


@dataclass(eq=False)
class Case:
    """A part of all plans. far: by variable and label, about how far plans with the label are from its bound. point: by variable
    what the relaxation takes of the labels of its space. cut: the variable, its labels, and the parts, once it is cut."""

    left: Left
    far: list[np.ndarray]
    bound: float = -math.inf
    leaf: Leaf = field(default_factory=lambda: Leaf([], Proof([])))
    space: Space | None = None
    point: list[np.ndarray] = field(default_factory=list)
    cut: tuple[int, np.ndarray, Case, Case] | None = None

    @property
    def tree(self) -> Tree:
        """The proof."""
        if self.cut is None:
            return self.leaf
        at, labels, *parts = self.cut
        return Cut(at, labels, (parts[0].tree, parts[1].tree))


class Division:
    """All plans under limits, cut into cases. labels: of a plan; scale: about what plans cost, in seconds. far: see `Case`."""

    def __init__(
        self, problem: Problem, limits: Sequence[Limit], labels: Sequence[int], scale: float, far: Sequence[np.ndarray]
    ) -> None:
        self.problem, self.limits, self.labels, self.scale = problem, limits, labels, scale
        self.outside = OUTSIDE * scale
        self.root = Case({}, list(far))
        self.count = itertools.count()
        self.open: list[tuple[float, int, Case]] = []

    @property
    def bound(self) -> float:
        """Of all plans."""
        return self.open[0][0] if self.open else -math.inf

    def run(self, aim: float, until: float = math.inf) -> None:
        """Cut cases until all have a bound of `aim` seconds, or one cannot be cut, or the work is done. until: CPU time of this
        process at which no more are cut; where there is one, work is not counted."""
        if not self.open:
            self.look(self.root, aim)
        assert self.root.space is not None
        cuts = WORK // columns_of(self.problem, self.root.space) if until == math.inf else math.inf
        while self.bound < aim and cuts > 0 and time.process_time() < until:
            case = self.open[0][2]
            found = self.apart(case)
            if found is None:
                return
            heapq.heappop(self.open)
            at, labels = found
            parts = [self.part(case, both(case.left, at, side)) for side in (labels, ~labels)]
            case.cut = at, labels, parts[0], parts[1]
            case.far, case.point, cuts = [], [], cuts - 1
            for part in parts:
                self.look(part, aim)

    def part(self, case: Case, left: Left) -> Case:
        """A part of a case, with the bound that the proof of the whole gives there."""
        return Case(left, case.far, bound_by_cases(self.problem, self.limits, case.leaf, self.outside, left), case.leaf)

    def look(self, case: Case, aim: float) -> None:
        """Find prices that give a better bound of a case."""
        case.space = self.near(case)
        seconds, prices, case.point = priced(self.problem, case.space, self.scale, self.limits, DEAR * self.scale)
        paid, allowed = within(charged(self.problem, self.limits, prices), case.left, self.outside), math.fsum(prices)
        folded = fold(paid, range(len(paid.variables)))
        cap = ceiling(paid, total(paid, self.labels))
        dual, _ = between_ends(folded, cap, Effort(aim + allowed))
        found = checked(paid, dual)
        if found[0] - allowed < aim and seconds >= (1 - CLOSE) * aim:
            found = max(found, untied(paid, found[1], cap, aim + allowed, math.inf), key=lambda pair: pair[0])
        if found[0] - allowed > case.bound:
            case.bound, case.leaf = found[0] - allowed, Leaf(prices, found[1])
        case.far = list(map(np.minimum, case.far, dual.extra))
        heapq.heappush(self.open, (case.bound, next(self.count), case))

    def near(self, case: Case) -> Space:
        """The labels of a case that are near, some of each variable."""
        far = list(case.far)
        for at, labels in case.left.items():
            far[at] = np.where(labels, far[at], np.inf)
        space = around(self.problem, self.labels, nearest(far, EACH * len(far), EACH))
        kept = list(space.labels)
        for at, labels in case.left.items():
            inside = kept[at][labels[kept[at]]]
            kept[at] = inside if len(inside) else np.flatnonzero(labels)
        return Space(kept, space.aliases)

    def apart(self, case: Case) -> tuple[int, np.ndarray] | None:
        """A variable, and labels of it that tell the plans apart that the relaxation mixes; None if it mixes none."""
        found, most = None, (-1.0, 0.0)
        for at, part in enumerate(case.point):
            if part.max() > 1 - INTEGRAL:
                continue
            assert case.space is not None
            labels, costs = case.space.labels[at], self.problem.variables[at].costs
            paid = np.zeros(len(costs))
            for price, limit in zip(case.leaf.prices, self.limits):
                if at in limit.weights:
                    paid += price / limit.most * limit.weights[at]
            dear, apart = halves(part, paid[labels], costs[labels])
            share = float(part[dear].sum())
            if (share * (1 - share) * apart**2, share) > most and INTEGRAL < share < 1 - INTEGRAL:
                most, found = (share * (1 - share) * apart**2, share), (at, sides(labels, dear, paid, costs))
        return found


def sides(labels: np.ndarray, dear: np.ndarray, *costs: np.ndarray) -> np.ndarray:
    """Which of all labels are like those of `labels` that are dear, rather than like the others: by that of the `costs` by label
    of which the means differ more."""
    by = max(costs, key=lambda each: abs(each[labels[dear]].mean() - each[labels[~dear]].mean()))
    found = by > (by[labels[dear]].min() + by[labels[~dear]].max()) / 2
    found[labels] = dear
    return found
