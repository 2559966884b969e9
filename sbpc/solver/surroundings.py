"""The problem around a plan: what each label of one variable costs with all others as they are, and plans with fewer
boxings."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np

from sbpc.solver.problem import SLACK, Array, Labels, Problem, Value, star_seconds, stars, total
from sbpc.solver.subsets import distinct

BOXING = 1e-9  # of the plan: what a boxing costs more when fewer are looked for
PortLayouts = tuple[Array, Array]  # the distinct layouts at a port, and by label the place of its layout among them


@dataclass(eq=False)
class Use:
    """A value that a variable produces or consumes, with the layouts at its ports there (several if it reads the
    value twice)."""

    value: Value
    produced: bool
    ports: list[PortLayouts]


class Surroundings:
    """The problem seen from each variable: the values that touch it, and the variables whose costs depend on its
    label."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.uses: list[list[Use]] = [[] for _ in problem.variables]
        self.neighbours: list[list[int]] = [[] for _ in problem.variables]
        for value in problem.values:
            self.uses[value.producer].append(Use(value, True, [distinct(value.out)]))
            consumers: dict[int, list[PortLayouts]] = {}
            for at, wants in value.distinct_ends[1:]:
                consumers.setdefault(at, []).append(distinct(wants))
            for at, ports in consumers.items():
                if at != value.producer:
                    self.uses[at].append(Use(value, False, ports))
            touched = list(dict.fromkeys([value.producer, *consumers]))
            for at in touched:
                self.neighbours[at] += [other for other in touched if other != at]

    def costs(self, at: int, labels: Labels) -> Array:
        """Returns, by label of variable `at`, its cost and those of the stars around it, all other labels as they
        are."""
        seconds = self.problem.variables[at].costs.copy()
        for use in self.uses[at]:
            seconds += producer_costs(use, labels) if use.produced else consumer_costs(use, at, labels)
        return seconds

    def tidy(self, labels: list[int], seconds: float) -> list[int]:
        """Returns labels that cost no more, with fewer boxings, or with as many and lower labels. seconds: what they
        cost."""
        if not np.isfinite(seconds):
            return labels
        tilted, tidied = self.tilted(BOXING * seconds), list(labels)
        dirty = [len(variable.costs) > 1 for variable in self.problem.variables]
        while any(dirty):
            for at in np.flatnonzero(dirty).tolist():
                dirty[at] = False
                label = self.with_fewer_boxings(at, tidied, tilted, seconds)
                if label != tidied[at]:
                    tidied[at] = label
                    for other in self.neighbours[at]:
                        dirty[other] = len(self.problem.variables[other].costs) > 1
        return tidied if total(self.problem, tidied) <= seconds * (1 + SLACK) else labels

    def tilted(self, boxing: float) -> Surroundings:
        """Returns the same problem where every boxing costs so many seconds more."""
        closures = {id(v.closure): v.closure for v in self.problem.values}
        counted = {key: closure + boxing * ~np.eye(len(closure), dtype=bool) for key, closure in closures.items()}
        values = {id(value): replace(value, closure=counted[id(value.closure)]) for value in self.problem.values}
        other = copy.copy(self)
        other.problem = Problem(self.problem.variables, list(values.values()))
        other.uses = [[replace(use, value=values[id(use.value)]) for use in uses] for uses in self.uses]
        return other

    def with_fewer_boxings(self, at: int, labels: Labels, tilted: Surroundings, seconds: float) -> int:
        """Returns the label of variable `at` that costs no more and has the fewest boxings, of several the lowest."""
        costs = self.costs(at, labels)
        dearer = costs > costs[labels[at]] + SLACK * seconds
        if dearer.sum() == len(dearer) - 1:
            return labels[at]
        boxings = np.where(dearer, np.inf, tilted.costs(at, labels))
        return int(np.argmax(boxings <= boxings.min() + BOXING / 2 * seconds))


def producer_costs(use: Use, labels: Labels) -> Array:
    """Returns the seconds of the star by label of its producer."""
    closure, ((layouts, place),), at = use.value.closure, use.ports, use.value.producer
    if any(consumer == at for consumer, _ in use.value.consumers):
        plans = [[*labels[:at], label, *labels[at + 1 :]] for label in range(len(place))]
        return np.array([star_seconds(use.value, plan) for plan in plans])
    wanted = dict.fromkeys(int(wants[labels[consumer]]) for consumer, wants in use.value.consumers)
    if len(wanted) == 1:  # directly: an alias elsewhere would be a detour
        return closure[layouts, next(iter(wanted))][place]
    sums = closure[layouts]
    sums += closure[:, list(wanted)].sum(1)
    seconds = sums.min(1)
    for number, source in enumerate(layouts.tolist()):
        if source in wanted:  # read as it is
            seconds[number] = stars(closure, source, [target for target in wanted if target != source]).min()
    return seconds[place]


def consumer_costs(use: Use, at: int, labels: Labels) -> Array:
    """Returns the seconds of the star by label of consumer `at`."""
    value, closure = use.value, use.value.closure
    source = int(value.out[labels[value.producer]])
    others = dict.fromkeys(int(wants[labels[other]]) for other, wants in value.consumers if other != at)
    base = stars(closure, source, [target for target in others if target != source])
    free = np.zeros(len(closure), dtype=bool)
    free[[source, *others]] = True
    if len(use.ports) == 1:
        ((layouts, place),) = use.ports
        best = int(base.argmin())
        useful = base < base[best] + closure[best]  # of others, it costs as little by way of the best one
        useful[best] = True
        aliases = np.flatnonzero(useful)
        sums = closure[np.ix_(aliases, layouts)]
        sums += base[aliases, None]
        return np.where(free[layouts], base[best], sums.min(0))[place]
    pairs, which = np.unique(np.stack([layouts[place] for layouts, place in use.ports]), axis=1, return_inverse=True)
    seconds = np.empty(pairs.shape[1])
    for number, wanted in enumerate(pairs.T):
        new = [target for target in dict.fromkeys(wanted.tolist()) if not free[target]]
        seconds[number] = (base + closure[:, new].sum(1)).min()
    return seconds[which.reshape(-1)]
