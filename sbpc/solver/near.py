"""Labels near good plans, and on them the cheapest plans under limits, and what a limit is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from sbpc.solver import branch
from sbpc.solver.dual import between_ends, passed
from sbpc.solver.exact import Answer, cheapest, columns_of
from sbpc.solver.fold import Folded, fold
from sbpc.solver.moves import around, nearby, nearest
from sbpc.solver.network import Space, aliased
from sbpc.solver.problem import Limit, Problem, charged, split_by_costs, total
from sbpc.solver.relax import INTEGRAL, priced
from sbpc.solver.trws import ceiling

LEAST, MANY = 1_000, 20_000  # labels of the nearest, at least; columns of a program of them, at most
SMALL, WIDTH = 6_000, 40  # the same of few variables, of which plans are bettered by windows too: columns that may be in any
# case, and so many for each variable
UNTIED = 1_200  # variables, at most, of a problem in which the nearest labels are looked at untied, too
DEAR = 100.0  # of the scale: what as much again as a limit costs in the relaxation
FEW, BOUNDED = 12_000, 40_000  # columns, at most, of a program of all labels; of all with which a plan can be faster
LOOKS, TIMES, EACH = 2, 8, 8  # relaxations that say what limits are worth: how many, of how many times as many labels as there
# are classes, at most so many of each
TILT = 1e-6  # of the scale: what all of the first limit costs; more than boxings for nothing
CASES = {False: 2e6, True: 4e7}  # by `long`: of a program, at most, times its columns
FEWER = 5e5  # the same of few variables of which the labels that matter are not known: what is left is for HiGHS alone
NODES = 1_000  # of its search tree, at most
LONGER = {False: 3.0, True: 60.0}  # by `long`: times the work that a program without limits may take
ROUGH = 0.02  # where labels are dearer than the bound by more than so much, as a part, it may take more


class Near:
    """A problem, and how far its labels are from good plans.

    alike: a number per variable; those with the same number have the same labels here, and one label where a limit is
    priced. In a plan they need not have one: where memory is short some of a run of equal blocks are laid out to save it.
    """

    def __init__(self, problem: Problem, alike: Sequence[int]):
        self.problem, self.coarse = problem, fold(problem, alike)
        self.far = [np.full(len(v.costs), np.inf) for v in self.coarse.problem.variables]
        self.plans: list[Sequence[int]] = []
        self.mixed = [np.zeros(0, dtype=np.intp) for _ in self.far]  # by class the labels that its variables may have apart
        self.every = all_of(problem)

    @property
    def complete(self) -> bool:
        """Whether plans are looked for among all that matter."""
        return self.every is not None

    @property
    def size(self) -> int:
        """How many labels there are that matter; 0 if that is not known."""
        return sum(map(len, self.every.labels)) if self.every else 0

    @property
    def distances(self) -> list[np.ndarray]:
        """By variable and label, how far the label is from good plans."""
        return [self.far[at] for at in self.coarse.classes]

    @property
    def most(self) -> int:
        """The columns of a program of the nearest labels, at most."""
        return min(max(SMALL, WIDTH * len(self.problem.variables)), MANY) if self.few else MANY

    @property
    def few(self) -> bool:
        """Whether variables are few enough for programs in which nothing is tied."""
        return len(self.problem.variables) <= UNTIED

    def add(self, labels: Sequence[int], distances: Sequence[np.ndarray] = ()) -> None:
        """Note a plan, and by variable and label the distances from it, or from the bound of the problem that it solves."""
        self.plans.append(labels)
        for at, found in dict(zip(self.coarse.classes, distances)).items():  # those of one class differ little
            np.minimum(self.far[at], found, out=self.far[at])
        for at, label in zip(self.coarse.classes, labels):
            self.far[at][label] = -1.0

    def mix(self, labels: Sequence[int]) -> None:
        """Note a plan; its labels may be had by any variable of the same class, one here and another there."""
        self.plans.append(labels)
        for at, label in dict.fromkeys(zip(self.coarse.classes, labels)):
            self.mixed[at] = np.union1d(self.mixed[at], [label])

    def nearest(self, folded: Folded) -> Space:
        """As many labels of `coarse` as a program can have, the nearest ones, those of all plans and those that are mixed."""
        every, size = np.concatenate(self.far), max(2 * len(self.far), LEAST)
        while True:
            most = min(np.partition(every, size)[size] if size < len(every) else np.inf, np.finfo(float).max)
            kept = [np.flatnonzero(found <= max(most, 0.0)) for found in self.far]
            space = self.space(folded, list(map(np.union1d, kept, self.mixed)))
            if size <= len(self.far) // 4 or columns_of(folded.problem, space) <= self.most:
                return space
            size //= 2

    def space(self, folded: Folded, kept: Sequence[np.ndarray]) -> Space:
        """These labels of `coarse` in a problem that is folded less or alike."""
        outer = dict(zip(folded.classes, self.coarse.classes))
        of_each = [kept[outer[at]] for at in range(len(folded.sizes))]
        plans = [folded.fold(labels) for labels in self.plans]
        return Space(of_each, [nearby(value, of_each, *plans) for value in folded.problem.values])

    def untied(self, known: Sequence[int] | None) -> tuple[Folded, Space]:
        """The mixed labels in a problem in which as few variables are tied as the size of a program allows, none to which a
        `known` plan gives different labels; with the nearest ones where variables are few."""
        if self.few:
            return self.whole, self.nearest(self.whole)
        parts = max(self.coarse.sizes)
        while True:
            folded = fold(self.problem, pieces(self.coarse, parts, known))
            space = self.space(folded, self.mixed)
            if parts == 1 or columns_of(folded.problem, space) <= MANY:
                return folded, space
            parts = (parts + 1) // 2

    def close(self, costly: Problem, most: float) -> bool:
        """Look from now on only among plans that cost at most `most` in a problem with other costs, if variables and such
        labels are few: whether they are. No other plan costs so little."""
        if not self.few or costly.variables[0].digits.shape[1] > 2:
            return False  # beyond two axes bounds are of single precision
        space = bounded_by(costly, most)
        if space is None or columns_of(costly, space) > BOUNDED:
            return False
        self.every = space
        return True

    def worth(self, limits: Sequence[Limit], scale: float, dearest: float) -> tuple[float, list[float]]:
        """About what a plan costs under the limits, and what more of each would save: see `relax.priced`."""
        return priced(self.coarse.problem, self.nearest(self.coarse), scale, by_class(self.coarse, limits), dearest)[:2]

    def dear(self, limits: Sequence[Limit], scale: float, labels: Sequence[int]) -> list[float]:
        """What more of each limit would save, seconds for all of it, among the labels that are near where that is paid; labels: of
        a plan under the limits."""
        alike = split_by_costs(charged(self.problem, limits, [1.0] * len(limits)), self.coarse.classes)
        folded, prices = fold(self.problem, alike), [0.0] * len(limits)
        outer, plan, inner = dict(zip(alike, self.coarse.classes)), folded.fold(labels), by_class(folded, limits)
        far = [self.far[outer[number]] for number in range(len(folded.sizes))]
        for _ in range(LOOKS):
            space = around(folded.problem, plan, nearest(far, TIMES * len(far), EACH))
            prices = priced(folded.problem, space, scale, inner, DEAR * scale)[1]
            costly = fold(charged(self.problem, limits, prices), alike)
            extra = between_ends(costly, ceiling(costly.problem, total(costly.problem, plan)))[0].extra
            far = list(map(np.minimum, far, extra))
        return prices

    def cheapest(
        self, limits: Sequence[Limit], scale: float, gap: float, long: bool = False, known: Sequence[int] | None = None
    ) -> Answer:
        """The cheapest labels under the limits, or some within the relative `gap`, by variable of the whole problem; those of a
        `known` plan if there are none that are cheaper by more than that.

        Of equally cheap ones those that take less of the first limit. long: it may take long to tell that they are. The bound
        holds for all plans where `complete`, else for those on the labels that are looked at.
        Where the labels that matter are not known, equal variables are untied, and have labels that the relaxation takes in
        part: of a class that it has to three tenths in one layout, about as many variables have that layout in a good plan.
        """
        if self.every is None:
            near = self.nearest(self.coarse)
            parts = priced(self.coarse.problem, near, scale, by_class(self.coarse, limits), DEAR * scale)[2]
            used = [labels[part > INTEGRAL] for labels, part in zip(near.labels, parts)]
            self.mixed = list(map(np.union1d, self.mixed, used))
        folded, space = self.untied(known) if self.every is None else (self.whole, self.every)
        limits, tilt = by_class(folded, limits), TILT * scale
        variables = list(folded.problem.variables)
        for at, weights in limits[0].weights.items():
            variables[at] = replace(variables[at], costs=variables[at].costs + tilt / limits[0].most * weights)
        tilted = Problem(variables, folded.problem.values)
        outer = dict(zip(folded.classes, self.coarse.classes))
        classes = [outer[at] for at in range(len(folded.sizes))]
        most = FEWER if self.few and gap else CASES[long]
        answer = branch.cheapest(tilted, space, scale, limits, gap, classes, most, known and folded.fold(known))
        close = answer.proved or answer.bound >= (1 - gap) * seconds_of(tilted, answer) - TILT * scale
        if not close and (self.few or answer.labels is None):
            other = cheapest(tilted, space, scale, NODES, gap, limits, LONGER[long], ROUGH if gap else np.inf)
            better = min((answer, other), key=lambda each: seconds_of(tilted, each))
            answer = Answer(better.labels, max(answer.bound, other.bound), other.proved)
        labels = None if answer.labels is None else folded.unfold(answer.labels)
        return Answer(labels, answer.bound - tilt, answer.proved)

    @cached_property
    def whole(self) -> Folded:
        """The problem, nothing tied."""
        return fold(self.problem, range(len(self.problem.variables)))


def seconds_of(problem: Problem, answer: Answer) -> float:
    """What labels that were found cost; infinite if there are none."""
    return np.inf if answer.labels is None else total(problem, answer.labels)


def pieces(folded: Folded, parts: int, labels: Sequence[int] | None = None) -> list[int]:
    """By variable a number: each class is cut into so many pieces, in the order of its members, or into single members; those
    with different labels are apart."""
    seen, numbers = [0] * len(folded.sizes), dict[tuple[int, int, int], int]()
    found = []
    for at, label in zip(folded.classes, labels or folded.classes):
        key = at, seen[at] * min(parts, folded.sizes[at]) // folded.sizes[at], label
        found.append(numbers.setdefault(key, len(numbers)))
        seen[at] += 1
    return found


def bounded_by(problem: Problem, most: float) -> Space | None:
    """The labels and aliases with which a plan may cost at most `most`, as far as messages tell; None if some have none."""
    messages = passed(problem, ceiling(problem, most))
    labels: list[np.ndarray] = [np.zeros(0, dtype=np.intp)] * len(problem.variables)
    aliases: list[np.ndarray | None] = [None] * len(problem.values)
    for (kind, at), bounds in zip(messages.names, messages.bounds()):
        found = np.flatnonzero(bounds <= most)
        if not len(found):
            return None
        if kind == 0:
            labels[at] = found
        else:
            aliases[at] = messages.free((kind, at))[found]
    return Space(labels, aliases)


def all_of(problem: Problem) -> Space | None:
    """All labels and aliases, None if they are many."""
    if sum(len(v.costs) for v in problem.variables) > FEW:
        return None
    aliases = [np.arange(len(v.closure)) if aliased(v) else None for v in problem.values]
    space = Space([np.arange(len(v.costs)) for v in problem.variables], aliases)
    return space if columns_of(problem, space) <= FEW else None


def by_class(folded: Folded, limits: Sequence[Limit]) -> list[Limit]:
    """The limits in a folded problem."""
    found = []
    for limit in limits:
        weights: dict[int, np.ndarray] = {}
        for at, each in limit.weights.items():
            number = folded.classes[at]
            weights[number] = weights[number] + each if number in weights else each
        found.append(Limit(weights, limit.most))
    return found
