"""Steps to better labels, one variable at a time; spaces in which to look: some axes everywhere, what plans have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sbpc.solver.network import Port, Space, aliased, port, slots
from sbpc.solver.problem import SLACK, Problem, Value, star, star_seconds, stars, total

EQUALS = 1.5  # times as many labels as are asked for, at most, where some are equally near
FEWER = 1e-9  # relative: what a boxing costs more where fewer are better


@dataclass(eq=False)
class Use:
    """A value that a variable makes (`made`) or takes; its ports there, one per distinct way of taking it."""

    value: Value
    made: bool
    ports: list[Port]


class Neighbours:
    """For every variable the values that touch it, and the variables whose costs change with its label."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.uses: list[list[Use]] = [[] for _ in problem.variables]
        self.near: list[list[int]] = [[] for _ in problem.variables]
        for value in problem.values:
            self.uses[value.producer].append(Use(value, True, [port(0, value.out)]))
            takers: dict[int, list[Port]] = {}
            for at, wants in slots(value):
                takers.setdefault(at, []).append(port(0, wants))
            for at, ports in takers.items():
                if at != value.producer:
                    self.uses[at].append(Use(value, False, ports))
            around = list(dict.fromkeys([value.producer, *takers]))
            for at in around:
                self.near[at] += [other for other in around if other != at]

    def costs(self, at: int, labels: Sequence[int]) -> np.ndarray:
        """By label of variable `at`: its own cost and those of the stars around it, all other labels as they are."""
        found = self.problem.variables[at].costs.copy()
        for use in self.uses[at]:
            found += made(use, labels) if use.made else taken(use, at, labels)
        return found

    def descend(self, labels: Sequence[int]) -> list[int]:
        """Change one label at a time for the better, until none is."""
        return self.change(labels, self.better)

    def tidy(self, labels: Sequence[int], seconds: float) -> list[int]:
        """Labels that cost no more, with fewer boxings, or with the same in earlier labels: change one at a time. seconds:
        about what they cost."""
        closures = {id(v.closure): v.closure for v in self.problem.values}
        counts = {key: found + FEWER * seconds * ~np.eye(len(found), dtype=bool) for key, found in closures.items()}
        values = [replace(value, closure=counts[id(value.closure)]) for value in self.problem.values]
        tilted = Neighbours(Problem(self.problem.variables, values))

        def fewer(at: int, labels: Sequence[int]) -> int | None:
            costs = self.costs(at, labels)
            dearer = costs > costs[labels[at]] + SLACK * seconds
            if dearer.sum() == len(dearer) - 1:
                return None
            counted = np.where(dearer, np.inf, tilted.costs(at, labels))
            label = int(np.argmax(counted <= counted.min() + FEWER / 2 * seconds))
            return None if label == labels[at] else label

        return self.change(labels, fewer)

    def tidied(self, labels: list[int], seconds: float) -> list[int]:
        """What `tidy` finds, if it costs no more, else the labels."""
        if not np.isfinite(seconds):
            return labels
        found = self.tidy(labels, seconds)
        return found if total(self.problem, found) <= seconds * (1 + SLACK) else labels

    def better(self, at: int, labels: Sequence[int]) -> int | None:
        """The cheapest label of variable `at`, if it is cheaper than the one it has."""
        costs = self.costs(at, labels)
        now, label = costs[labels[at]], int(costs.argmin())
        return label if costs[label] < (now - SLACK * abs(now) if np.isfinite(now) else now) else None

    def change(self, labels: Sequence[int], found_by: Callable[[int, Sequence[int]], int | None]) -> list[int]:
        """Labels of which none is changed any more; found_by: the label to give to a variable, None if it is to keep its own."""
        found = list(labels)
        dirty = [True] * len(found)
        while any(dirty):
            for at in range(len(found)):
                if not dirty[at]:
                    continue
                dirty[at] = False
                label = None if len(self.problem.variables[at].costs) == 1 else found_by(at, found)
                if label is not None:
                    found[at] = label
                    for other in self.near[at]:
                        dirty[other] = True
        return found


def made(use: Use, labels: Sequence[int]) -> np.ndarray:
    """Seconds of the star by label of its producer."""
    closure, (out,), at = use.value.closure, use.ports, use.value.producer
    if any(consumer == at for consumer, _ in use.value.consumers):
        moved = [[*labels[:at], label, *labels[at + 1 :]] for label in range(len(out.at))]
        return np.array([star_seconds(use.value, found) for found in moved])
    wanted = dict.fromkeys(int(wants[labels[consumer]]) for consumer, wants in use.value.consumers)
    sums = closure[out.layouts]
    sums += closure[:, list(wanted)].sum(1)
    seconds = sums.min(1)
    for number, source in enumerate(out.layouts.tolist()):
        if source in wanted:  # taken as it is
            seconds[number] = stars(closure, source, [target for target in wanted if target != source]).min()
    return seconds[out.at]


def taken(use: Use, at: int, labels: Sequence[int]) -> np.ndarray:
    """Seconds of the star by label of a consumer."""
    value, closure = use.value, use.value.closure
    source = int(value.out[labels[value.producer]])
    others = dict.fromkeys(int(wants[labels[other]]) for other, wants in value.consumers if other != at)
    base = stars(closure, source, [target for target in others if target != source])
    free = np.zeros(len(closure), dtype=bool)
    free[[source, *others]] = True
    if len(use.ports) == 1:
        (wants,) = use.ports
        sums = closure[:, wants.layouts]
        sums += base[:, None]
        return np.where(free[wants.layouts], base.min(), sums.min(0))[wants.at]
    pairs, which = np.unique(np.stack([p.layouts[p.at] for p in use.ports]), axis=1, return_inverse=True)
    seconds = np.empty(pairs.shape[1])
    for number, layouts in enumerate(pairs.T):
        new = [target for target in dict.fromkeys(layouts.tolist()) if not free[target]]
        seconds[number] = (base + closure[:, new].sum(1)).min()
    return seconds[which.reshape(-1)]


def freed(problem: Problem, labels: Sequence[int], axes: Sequence[int]) -> Space:
    """The labels that differ from `labels` on these axes only, and aliases among the layouts of those."""
    kept = []
    for variable, label in zip(problem.variables, labels):
        same = variable.digits == variable.digits[label]
        same[:, list(axes)] = True
        kept.append(np.flatnonzero(same.all(1)))
    return Space(kept, [nearby(value, kept, labels) for value in problem.values])


def nearest(extra: Sequence[np.ndarray], size: int, each: int | None = None) -> list[np.ndarray]:
    """By variable those of about `size` labels with the least `extra`, by variable and label; of each variable at most so many.
    Of many that are equally near there are as many of one variable as of another."""
    every = np.concatenate(extra)
    most = min(np.partition(every, size)[size] if size < len(every) else np.inf, np.finfo(float).max)
    if each is None and np.count_nonzero(every <= most) > EQUALS * size:
        ranks = [np.argsort(np.argsort(found, kind="stable")) for found in extra]
        taken = np.zeros(len(every), dtype=bool)
        taken[np.lexsort((np.concatenate(ranks), every))[:size]] = True
        return [np.flatnonzero(found) for found in np.split(taken, np.cumsum([len(found) for found in extra])[:-1])]
    if each is None:
        return [np.flatnonzero(found <= most) for found in extra]
    first = [np.argsort(found, kind="stable")[:each] for found in extra]
    return [found[distances[found] <= most] for found, distances in zip(first, extra)]


def around(problem: Problem, labels: Sequence[int], *kept: Sequence[np.ndarray]) -> Space:
    """The labels that are kept, by variable, those of a plan, and aliases among the layouts of those and of the plan."""
    every = [np.unique(np.concatenate([*parts, [label]])) for *parts, label in zip(*kept, labels)]
    return Space(every, [nearby(value, every, labels) for value in problem.values])


def nearby(value: Value, kept: list[np.ndarray], *plans: Sequence[int]) -> np.ndarray | None:
    """The layouts at the ports of `value` under `kept` labels, and its aliases in `plans`; None if it has no alias."""
    if not aliased(value):
        return None
    layouts = [value.out[kept[value.producer]], *(wants[kept[at]] for at, wants in slots(value))]
    return np.unique(np.concatenate([*layouts, [star(value, labels)[0] for labels in plans]]))


def union(problem: Problem, plans: Sequence[Sequence[int]]) -> Space:
    """The labels that some plan has, and aliases among the layouts of those and the aliases of the plans."""
    kept = [np.unique(labels) for labels in zip(*plans)]
    return Space(kept, [nearby(value, kept, *plans) for value in problem.values])
