"""Local search on the true objective: one variable at a time, and one axis at all variables at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sbpc.solver.problem import SLACK, Problem, Value, star, targets, total
from sbpc.solver.trws import Messages, Port, Space, port, slots


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
                self.uses[at].append(Use(value, False, ports))
            around = [value.producer, *takers]
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
        found = list(labels)
        dirty = [True] * len(found)
        while any(dirty):
            for at in range(len(found)):
                if not dirty[at]:
                    continue
                dirty[at] = False
                if len(self.problem.variables[at].costs) == 1:
                    continue
                costs = self.costs(at, found)
                now, label = costs[found[at]], int(costs.argmin())
                if costs[label] < now - SLACK * abs(now) if np.isfinite(now) else costs[label] < now:
                    found[at] = label
                    for other in self.near[at]:
                        dirty[other] = True
        return found


def made(use: Use, labels: Sequence[int]) -> np.ndarray:
    """Seconds of the star by label of its producer."""
    closure, (out,) = use.value.closure, use.ports
    rest = np.zeros(len(closure))
    for target in targets(use.value, labels):
        rest += closure[:, target]
    return (closure[out.layouts] + rest).min(1)[out.at]


def taken(use: Use, at: int, labels: Sequence[int]) -> np.ndarray:
    """Seconds of the star by label of a consumer."""
    value, closure = use.value, use.value.closure
    base = closure[value.out[labels[value.producer]]].copy()
    others = dict.fromkeys(int(wants[labels[other]]) for other, wants in value.consumers if other != at)
    for target in others:
        base += closure[:, target]
    free = np.zeros(len(closure), dtype=bool)
    free[list(others)] = True
    if len(use.ports) == 1:
        (wants,) = use.ports
        sums = base[:, None] + np.where(free[wants.layouts], 0.0, closure[:, wants.layouts])
        return sums.min(0)[wants.at]
    pairs, which = np.unique(np.stack([p.layouts[p.at] for p in use.ports]), axis=1, return_inverse=True)
    seconds = np.empty(pairs.shape[1])
    for number, layouts in enumerate(pairs.T):
        new = [target for target in dict.fromkeys(layouts.tolist()) if not free[target]]
        seconds[number] = (base + closure[:, new].sum(1)).min()
    return seconds[which.reshape(-1)]


def one_axis(problem: Problem, labels: Sequence[int], axis: int) -> Space:
    """The labels that differ from `labels` on one axis only, and aliases among the layouts of those."""
    kept = []
    for variable, label in zip(problem.variables, labels):
        same = variable.digits == variable.digits[label]
        same[:, axis] = True
        kept.append(np.flatnonzero(same.all(1)))
    return Space(kept, [nearby(value, kept, labels) for value in problem.values])


def nearby(value: Value, kept: list[np.ndarray], labels: Sequence[int]) -> np.ndarray | None:
    """The layouts that the ports of `value` have under the `kept` labels, and its alias now; None if it has none."""
    ports = slots(value)
    if len(ports) < 2:
        return None
    layouts = [value.out[kept[value.producer]], *(wants[kept[at]] for at, wants in ports), [star(value, labels)[0]]]
    return np.unique(np.concatenate(layouts))


def axis_moves(problem: Problem, near: Neighbours, labels: list[int], cap: float, sweeps: int = 4) -> list[int]:
    """Free one axis at all variables, solve that, keep what is cheaper; over all axes until none helps."""
    axes = problem.variables[0].digits.shape[1]
    seconds, idle, axis = total(problem, labels), 0, 0
    while idle < axes:
        messages = Messages(problem, one_axis(problem, labels, axis), cap, share=False)
        for _ in range(sweeps):
            messages.sweep()
        found = near.descend(messages.decode())
        idle += 1
        if (cost := total(problem, found)) < seconds * (1 - SLACK):
            labels, seconds, idle = found, cost, 0 if axes > 1 else 1
        axis = (axis + 1) % axes
    return labels
