"""Solve a layout problem: messages for a bound and first labels, moves to better them, a program to finish exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sbpc.solver.exact import cheapest
from sbpc.solver.moves import Neighbours, axis_moves
from sbpc.solver.problem import Problem, Solution, check, total
from sbpc.solver.trws import Messages, Space, slots

SMALL = 3_000  # labels and alias layouts: as many go to the program at once


def solve(problem: Problem, starts: Sequence[Sequence[int]] = ()) -> Solution:
    """The cheapest labels that were found, and a bound; `starts` are labels to begin from. Deterministic."""
    check(problem)
    if not problem.variables:
        return Solution([], 0.0, 0.0, True)
    return Search(problem, starts).run()


class Search:
    """The best labels, the bound and the space still free, while a problem is being solved."""

    def __init__(self, problem: Problem, starts: Sequence[Sequence[int]]):
        self.problem = problem
        self.near = Neighbours(problem)
        self.space = whole(problem)
        self.cap = ceiling(problem)
        self.labels = [int(v.costs.argmin()) for v in problem.variables]
        self.seconds = total(problem, self.labels)
        self.bound = -math.inf
        for labels in starts:
            self.offer(labels)

    def offer(self, labels: Sequence[int]) -> None:
        """Better `labels` one variable at a time, and keep them if they are the best so far."""
        found = self.near.descend(labels)
        if (seconds := total(self.problem, found)) < self.seconds:
            self.labels, self.seconds = found, seconds

    def done(self) -> bool:
        """Whether the bound leaves nothing to gain."""
        return self.bound >= self.seconds * (1 - 1e-9)

    def run(self) -> Solution:
        """Message passing, moves, pruning, program."""
        messages = Messages(self.problem, self.space, self.cap)
        for _ in range(3):
            for _ in range(5):
                messages.sweep()
            self.offer(messages.decode())
            self.bound = max(self.bound, messages.bound)
            messages = self.prune(messages)
            if self.done() or self.space.size < 300:
                break
        if not self.done() and math.isfinite(self.seconds):
            self.offer(axis_moves(self.problem, self.near, self.labels, self.cap))
            messages = self.prune(messages)
        exact = self.done()
        if not exact and self.space.size <= SMALL:
            answer = cheapest(self.problem, self.space, self.seconds if math.isfinite(self.seconds) else self.cap)
            if answer.labels is not None:
                self.offer(answer.labels)
            self.bound = max(self.bound, min(answer.bound, self.seconds))
            exact = answer.proved
        if exact:
            return Solution(self.labels, self.seconds, self.seconds, True)
        return Solution(self.labels, self.seconds, min(self.bound, self.seconds), False)

    def prune(self, messages: Messages) -> Messages:
        """Drop the labels and alias layouts with which no plan is cheaper than the best known one."""
        most = min(self.seconds, self.cap / 2) * (1 + 1e-9)
        kept = [np.flatnonzero(bound <= most) for bound in messages.bounds()]
        self.bound = max(self.bound, messages.bound)
        labels, aliases = list(self.space.labels), list(self.space.aliases)
        for (kind, at), found in zip(messages.names, kept):
            if not len(found):  # nothing is cheaper than the best known plan
                self.bound = max(self.bound, self.seconds)
                return messages
            if kind == 0:
                labels[at] = labels[at][found]
            else:
                aliases[at] = aliases[at][found]  # type: ignore[index]
        self.space = Space(labels, aliases)
        return messages.restrict(self.space)


def whole(problem: Problem) -> Space:
    """All labels but those that another one with the same layouts at all ports undercuts; all alias layouts."""
    ports: list[list[np.ndarray]] = [[] for _ in problem.variables]
    for value in problem.values:
        ports[value.producer].append(value.out)
        for at, wants in slots(value):
            ports[at].append(wants)
    labels = []
    for variable, found in zip(problem.variables, ports):
        by_cost = np.argsort(variable.costs, kind="stable")
        rows = np.stack(found, 1)[by_cost] if found else np.zeros((len(by_cost), 1))
        labels.append(np.sort(by_cost[np.unique(rows, axis=0, return_index=True)[1]]))
    return Space(labels, [np.arange(len(v.closure)) if len(slots(v)) > 1 else None for v in problem.values])


def ceiling(problem: Problem) -> float:
    """What an impossible boxing costs in the messages: more than any plan without one."""
    most = sum(float(np.abs(v.costs).max()) for v in problem.variables)
    for value in problem.values:
        finite = value.closure[np.isfinite(value.closure)]
        most += float(finite.max()) * (1 + len(value.consumers))
    return 4 * most + 1e-30
