"""The cheapest labels under limits, by branch and bound over relaxations that HiGHS solves.

Where memory is short the relaxation mixes a few plans of whole models, each of which is integral: one that is fast and takes
much, one that is slow and takes little. What tells them apart is the variable whose labels differ most in what they cost and
in what they pay for limits, so cases are cut there: those with labels that are dearer than the mixture, those with cheaper
ones. Of equal variables, such as those of repeated blocks, a case that is cut at one alone is as good as before with another
one in its place; these are cut by how many of them have such labels (cf. Vanderbeck, "Branching in branch-and-price: a generic
scheme", Math. Prog. 2011). HiGHS, which knows neither, mostly takes hundreds of cases for what ten of these do; where many
limits bear on few labels its cuts do more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np

from sbpc.solver.exact import TILT, Answer, build, chosen, highs, limited, unit_of
from sbpc.solver.network import Space
from sbpc.solver.problem import Limit, Problem, total

INTEGRAL = 1e-6  # what is nearer to a whole number than that is taken for it
ENDED = highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible
CLOSE = 1e-9  # of the scale: cases that are better than a plan by no more are left


class Unsolved(Exception):
    """HiGHS has come to no end with a relaxation."""


@dataclass(frozen=True, eq=False)
class Part:
    """A part of all plans. labels: by variable which of its labels are left; sums: by columns how many of them there are in a
    plan, at least and at most."""

    labels: Mapping[int, np.ndarray] = field(default_factory=dict)
    sums: Mapping[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Case:
    """The relaxation of a part."""

    seconds: float
    number: int
    part: Part = field(compare=False)
    point: np.ndarray = field(compare=False)  # of the labels of all variables, one after the other
    prices: np.ndarray = field(compare=False)  # of limits, seconds for all of each


@dataclass(frozen=True, eq=False)
class Cut:
    """Labels of which a relaxation has `many` at these variables, which is not whole."""

    variables: Sequence[int]
    dear: np.ndarray
    many: float


def cheapest(
    problem: Problem,
    space: Space,
    scale: float,
    limits: Sequence[Limit],
    gap: float = 0.0,
    classes: Sequence[int] | None = None,
    most: float = math.inf,
    known: Sequence[int] | None = None,
) -> Answer:
    """The cheapest labels on `space` that keep the limits, or some within the relative `gap`; `scale`: about what plans cost, in
    seconds.

    classes: a number per variable; those with the same number are much alike. most: cases that are cut, times the columns of the
    program. known: labels than which others are looked for only if they are cheaper. As limits know nothing of the copies that
    a boxing makes, of two plans that cost the same the one with fewer boxings for nothing is taken.
    """
    return Tree(problem, space, scale, limits, range(len(problem.variables)) if classes is None else classes).run(gap, most, known)


class Tree:
    """A program, and cases of it."""

    def __init__(
        self, problem: Problem, space: Space, scale: float, limits: Sequence[Limit], classes: Sequence[int]
    ) -> None:
        self.problem, self.space, self.scale = problem, space, scale
        self.program, self.columns = build(problem, space, TILT * scale)
        self.starts = np.array([columns[0] for columns in self.columns])
        self.costs = np.concatenate([v.costs[labels] for v, labels in zip(problem.variables, space.labels)])
        self.weights = np.zeros((len(limits), len(self.costs)))
        for row, limit in enumerate(limits):
            for at, weights in limit.weights.items():
                self.weights[row, self.columns[at]] = weights[space.labels[at]] / limit.most
        members: dict[tuple[int, bytes], list[int]] = {}
        self.alike = [members.setdefault((number, labels.tobytes()), []) for number, labels in zip(classes, space.labels)]
        for at, group in enumerate(self.alike):
            group.append(at)
        self.slack = self.program.tilt * sum(1 + len(value.consumers) for value in problem.values)
        self.possible = math.isfinite(self.program.constant)
        if self.possible:
            self.rows = limited(self.program, self.columns, space, limits)
            self.unit = unit_of(scale)
            self.model = highs(self.program, 0, self.unit)
            self.most = np.array(self.model.getLp().col_upper_)[: len(self.costs)]  # 0 of what is impossible
            self.known: dict[tuple[int, ...], int] = {}  # by the columns of a sum, its row
            self.part = Part()  # of which the model is
            self.count = itertools.count()

    def run(self, gap: float, most: float, known: Sequence[int] | None) -> Answer:
        """See `cheapest`: the better one of two new cases next, and where that is not good enough, the best one of all."""
        try:
            first = self.relaxed(Part()) if self.possible else None
        except Unsolved:
            return Answer(None, -math.inf, False)
        if first is None:
            return Answer(None, math.inf, True)
        cases, cuts = list[Case](), 0
        case: Case | None = first
        best, seconds, left = None, math.inf, math.inf  # left: the least of the cases that are not better than the best by enough
        if known is not None and self.keeps(known):
            best, seconds = list(known), total(self.problem, known)
        while (cases or case) and cuts * self.program.columns < most:
            case = case or heapq.heappop(cases)
            if case.seconds >= seconds * (1 - gap) - CLOSE * self.scale:
                left, case = min(left, case.seconds), None
            elif (cut := self.cut(case)) is None:
                best, seconds, case = chosen(case.point, self.columns, self.space), case.seconds, None
            else:
                cuts += 1
                try:
                    found = sorted(self.divided(case, cut))
                except Unsolved:  # nothing is known of it but that it costs what the case does
                    found, left = [], min(left, case.seconds)
                case = found[0] if found else None
                for other in found[1:]:
                    heapq.heappush(cases, other)
        cases += [case] if case else []
        bound = min([seconds, left, *(case.seconds for case in cases)]) - self.slack
        if best is None:
            return Answer(None, bound, math.isinf(bound))
        return Answer(best, bound, not cases and gap == 0 and left >= seconds - CLOSE * self.scale)

    def keeps(self, labels: Sequence[int]) -> bool:
        """Whether labels are in the space, and keep the limits."""
        places = [np.flatnonzero(those == label) for those, label in zip(self.space.labels, labels)]
        if not all(map(len, places)):
            return False
        columns = [columns[place[0]] for columns, place in zip(self.columns, places)]
        return bool((self.weights[:, columns].sum(1) <= 1 + INTEGRAL).all())

    def relaxed(self, part: Part, least: float = -math.inf) -> Case | None:
        """The case of a part, which costs `least` at least; None if there is no plan in it."""
        self.take(part)
        self.model.run()
        if self.model.getModelStatus() not in ENDED:
            self.model.clearSolver()  # from the last basis on it failed: once more from the beginning
            self.model.run()
        status = self.model.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        if status != highspy.HighsModelStatus.kOptimal:
            raise Unsolved(status)
        solution = self.model.getSolution()
        seconds = self.model.getInfo().objective_function_value * self.unit + self.program.constant
        point, prices = np.array(solution.col_value)[: len(self.costs)], -np.array(solution.row_dual)[self.rows] * self.unit
        return Case(max(seconds, least), next(self.count), part, point, prices)

    def take(self, part: Part) -> None:
        """Have the model be that of a part."""
        before, self.part = self.part, part
        for at in before.labels.keys() | part.labels.keys():
            if before.labels.get(at) is not (kept := part.labels.get(at)):
                columns = self.columns[at].astype(np.int32)
                most = self.most[columns] if kept is None else self.most[columns] * kept
                self.model.changeColsBounds(len(columns), columns, np.zeros(len(columns)), most)
        for name in before.sums.keys() | part.sums.keys():
            if name not in self.known:
                self.known[name] = self.model.getNumRow()
                self.model.addRow(0.0, math.inf, len(name), np.array(name, np.int32), np.ones(len(name)))
            self.model.changeRowBounds(self.known[name], *part.sums.get(name, (0.0, math.inf)))

    def divided(self, case: Case, cut: Cut) -> list[Case]:
        """The cases with fewer of the labels of a cut than a case has, and with more, as far as there are any."""
        labels, sums = case.part.labels, case.part.sums
        if len(cut.variables) == 1:
            (at,) = cut.variables
            kept = labels.get(at, np.ones(len(cut.dear), bool))
            parts = [Part({**labels, at: kept & side}, sums) for side in (cut.dear, ~cut.dear)]
        else:
            columns = tuple(column for at in cut.variables for column in self.columns[at][cut.dear].tolist())
            (least, most), whole = sums.get(columns, (0.0, math.inf)), float(math.floor(cut.many))
            parts = [Part(labels, {**sums, columns: ends}) for ends in ((least, whole), (whole + 1, most))]
        found = [self.relaxed(part, case.seconds) for part in parts]
        return [each for each in found if each is not None]

    def cut(self, case: Case) -> Cut | None:
        """Where a case is to be cut: of variables and classes of equal ones that which bears most of how much the mixture
        varies, of equal ones any for all of them; None if the labels are whole."""
        mixed = np.flatnonzero(np.maximum.reduceat(case.point, self.starts) < 1 - INTEGRAL)
        paid = np.maximum(case.prices, 0.0) @ self.weights
        groups = [[at] for at in mixed.tolist()]
        groups += [group for group in {id(self.alike[at]): self.alike[at] for at in mixed}.values() if len(group) > 1]
        found, most = None, (-1.0, 0.0)
        for group in groups:
            columns = np.stack([self.columns[at] for at in group])
            part = case.point[columns].sum(0)
            dear, apart = halves(part, paid[columns].mean(0), self.costs[columns].mean(0))
            many = float(part[dear].sum())
            rest = abs(many - round(many))
            alike = len(self.alike[group[0]]) if len(group) == 1 else 1
            worth = rest * (1 - rest) * apart**2 / alike
            if rest > INTEGRAL and (worth, rest) > most:
                found, most = Cut(group, dear, many), (worth, rest)
        return found


def halves(part: np.ndarray, paid: np.ndarray, costs: np.ndarray) -> tuple[np.ndarray, float]:
    """Which labels of a mixture are dearer than it is on average, by what they pay or by their costs, whichever varies more,
    and by how much they are dearer than the others; the label of which it has most, and 0, where none is."""
    part = part / part.sum()
    varied = [(float(part @ (each - part @ each) ** 2), each) for each in (paid, costs)]
    each = max(varied, key=lambda pair: pair[0])[1]
    dear = each > part @ each
    of_dear = float(part[dear].sum())
    if not INTEGRAL < of_dear < 1 - INTEGRAL:
        return np.arange(len(part)) == part.argmax(), 0.0
    return dear, float(part[dear] @ each[dear]) / of_dear - float(part[~dear] @ each[~dear]) / (1 - of_dear)
