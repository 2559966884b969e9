"""Look for better labels: near the bound, among known plans, along some axes, by programs and relaxations of what is left."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sbpc.solver.dual import passed
from sbpc.solver.exact import Answer, cheapest
from sbpc.solver.moves import EQUALS, Neighbours, around, freed, nearest, union
from sbpc.solver.network import Space, aliased, slots
from sbpc.solver.problem import Problem, Solution, total
from sbpc.solver.relax import relaxed, supported
from sbpc.solver.trws import Messages, ceiling

steps = logging.getLogger("sbpc.progress")
TIE = 1e-9  # relative: what is not cheaper by more is not looked for
SMALL = 50_000  # columns of a program that is solved: it takes some two seconds
DENSE = 2 * SMALL  # columns of a program that has few labels, but so many layouts that fewer labels are searched
NODES = 300_000  # most nodes of its search tree, times its size
CROSSED = 20_000  # most columns of a program that crosses known plans, or is tried before any messages
ENOUGH = 1e-3  # the gap with which a larger problem is left, as a part of what a plan costs above its cheapest labels
NEAR = 500  # so many labels, those nearest to the bound, are searched first; twice as many as variables if more
PAIRED = 20  # times as many labels as variables, of which the relaxation says which to search, where two of the axes are free
WIDEST = 250_000  # most columns of that relaxation: it takes five seconds, and one of a hundred thousand columns one
CLOSE = 3e-4  # the gap with which that search ends
MOVED = 1e-3  # the gap with which a move on one of more than two axes ends, where 3e-2 is what is asked of plans: the rest takes
# as long as all before
STALLED = 0.05  # where rounds of messages close no more of the gap than that, no more are made
TIMES, EACH = 8, 6  # labels of which the relaxation says which to search: as many times variables, those nearest to the bound, of a
# variable at most so many
OWN = 2  # and by variable those nearest to the bound of the folded problem alone, and the cheapest ones around the best plan
TILT = 1e-3  # what costs are tilted by to tell equal axes apart, as a part of the same


class Search:
    """The best plan so far, and other good ones, while a problem is being solved."""

    def __init__(self, problem: Problem, starts: Sequence[Sequence[int]] = (), first: bool = True):
        """first: begin with the cheapest label of every variable, bettered."""
        self.problem = problem
        self.near = Neighbours(problem)
        self.floor = math.fsum(float(v.costs.min()) for v in problem.variables)
        self.labels = [int(v.costs.argmin()) for v in problem.variables]
        self.seconds = total(problem, self.labels)
        self.wide = problem.variables[0].digits.shape[1] > 2  # to better a plan takes long
        self.pool: list[tuple[float, list[int]]] = []
        self.settled: dict[int, list[int]] = {}  # by axis: the plan that a move on it left
        for labels in (self.labels, *starts) if first else starts:
            self.offer(labels)
        self.cap = ceiling(problem, self.seconds)

    def offer(self, labels: Sequence[int], better: bool = True) -> None:
        """Better a plan one variable at a time, and keep it."""
        found = self.near.descend(labels) if better else list(labels)
        seconds = total(self.problem, found)
        self.pool.append((seconds, found))
        if seconds < self.seconds:
            self.labels, self.seconds = found, seconds

    def tidied(self) -> list[int]:
        """The best plan, or one that costs the same with fewer boxings."""
        return self.near.tidied(self.labels, self.seconds)

    def run(self, quick: bool = False) -> Solution:
        """Message passing and pruning; steps to better plans until three in a row find none; what is left by a program.

        quick: the labels next to the first bound will do."""
        if self.seconds <= self.floor:
            return Solution(self.labels, self.seconds, self.seconds, True)
        space = whole(self.problem)
        for at, (variable, labels) in enumerate(zip(self.problem.variables, space.labels)):
            extra = variable.costs[labels] - variable.costs.min()
            space.labels[at] = labels[extra <= self.seconds - self.floor]
        messages = self.converge(Messages(self.problem, space, self.cap), rounds=2)
        if messages is not None and (quick or messages.columns > SMALL):
            self.approach(messages.extra(), NEAR)
            messages = self.converge(messages, rounds=6)
        if quick and messages is not None:
            return Solution(self.labels, self.seconds, min(messages.bound, self.seconds), False)
        idle = attempt = 0
        while messages is not None and messages.columns > SMALL and not self.close(messages):
            before, bound = self.seconds, messages.bound
            if idle < 3:
                self.step(messages, attempt)
            idle = 0 if self.seconds < before * (1 - TIE) else idle + 1
            attempt += 1
            messages = self.converge(messages, rounds=1 + attempt % 2)
            if idle > 3 and messages is not None and messages.bound - bound < STALLED * (self.seconds - bound):
                break
        if messages is None:
            return Solution(self.labels, self.seconds, self.seconds, True)
        bound, exact = messages.bound, False
        if messages.columns <= SMALL:
            bound, exact = self.finish(messages.space, NODES // max(1, messages.space.size))
        return Solution(self.labels, self.seconds, self.seconds if exact else min(bound, self.seconds), exact)

    def step(self, messages: Messages, attempt: int) -> None:
        """Look for a better plan: near the bound, among those known, along one axis at a time (slow from a bad plan)."""
        if attempt % 3 == 0:
            self.approach(messages.extra(), NEAR)
        elif attempt % 3 == 1:
            self.tilt(messages, attempt // 3)
            self.cross()
        else:
            self.move()

    def close(self, messages: Messages) -> bool:
        """Whether little can be gained on the best plan."""
        return self.seconds - messages.bound <= ENOUGH * (self.seconds - self.floor)

    def converge(self, messages: Messages, rounds: int, sweeps: int = 4) -> Messages | None:
        """Rounds of sweeps, a plan read off, labels pruned; None if nothing is cheaper than the best known plan."""
        for _ in range(rounds):
            before, size = messages.bound, messages.space.size
            for _ in range(sweeps):
                messages.sweep()
            self.offer(messages.decode(), not self.wide)
            steps.debug("assign: %.4g s found, %d labels left to look at", self.seconds, messages.space.size)
            pruned = self.prune(messages)
            if pruned is None:
                return None
            messages = pruned
            if messages.columns <= SMALL // 4:
                break
            if messages.space.size > 0.9 * size and messages.bound - before < 0.02 * (self.seconds - before):
                break
        return messages

    def prune(self, messages: Messages) -> Messages | None:
        """Drop labels and alias layouts with which no plan is cheaper than the best known; None: nothing is left."""
        most = min(self.seconds * (1 - TIE), self.cap / 2)
        labels, aliases = list(messages.space.labels), list(messages.space.aliases)
        for (kind, at), bounds in zip(messages.names, messages.bounds()):
            kept = np.flatnonzero(bounds <= most)
            if not len(kept):
                return None
            if kind == 0:
                labels[at] = labels[at][kept]
            else:
                aliases[at] = messages.free((kind, at))[kept]
        return messages.restrict(Space(labels, aliases))

    def finish(self, space: Space, nodes: int = 50, gap: float = 0.0) -> tuple[float, bool]:
        """Look for the cheapest plan on `space`, or one within `gap`, among the nearest labels where many are left; a
        bound, and whether it is known that nothing there is cheaper."""
        answer = relaxed(self.problem, space, self.scale, CROSSED, gap)
        if answer is not None:
            self.take(answer)
            return answer.bound, answer.proved
        messages = self.converge(Messages(self.problem, space, self.cap), rounds=2)
        if messages is None:
            return self.seconds, True
        if self.seconds * (1 - gap) <= messages.bound:
            return messages.bound, self.seconds <= messages.bound
        labels, least = sum(map(len, messages.space.labels)), 2 * len(self.labels)
        few = max(NEAR, least)
        if messages.columns > DENSE and labels <= (EQUALS + 0.5) * few:
            few = max(labels // 4, least)
        if messages.columns > SMALL and labels > (EQUALS + 0.5) * few:  # more than `approach` leaves
            self.approach(messages.extra(), few)
            return messages.bound, False
        return self.settle(messages, nodes, gap)

    def cross(self) -> None:
        """Look for the cheapest plan of labels that known plans have, of those of the best half where they are many."""
        plans = [labels for _, labels in sorted(self.pool, key=lambda pair: pair[0])]
        while messages := self.converge(Messages(self.problem, union(self.problem, plans), self.cap), rounds=2):
            if messages.columns <= CROSSED or len(plans) == 1:
                self.settle(messages, 50)
                return
            plans = plans[: len(plans) // 2]

    def settle(self, messages: Messages, nodes: int, gap: float = 0.0) -> tuple[float, bool]:
        """As `finish`, by a program."""
        answer = relaxed(self.problem, messages.space, self.scale, SMALL, gap)
        if answer is None:
            answer = cheapest(self.problem, messages.space, self.scale, nodes, gap)
        self.take(answer)
        return max(messages.bound, answer.bound), answer.proved

    @property
    def scale(self) -> float:
        """About what plans cost."""
        return self.seconds if math.isfinite(self.seconds) else self.cap

    def take(self, answer: Answer) -> None:
        """Keep the labels that a program has found."""
        if answer.labels is not None:
            self.offer(answer.labels, not self.wide)

    def approach(self, extra: Sequence[np.ndarray], size: int) -> None:
        """Look among the `size` labels nearest to the bound; extra: by variable and label, about how far each is from it."""
        self.finish(around(self.problem, self.labels, nearest(extra, max(size, 2 * len(self.labels)))), gap=CLOSE)

    def tilt(self, messages: Messages, seed: int) -> None:
        """Plans read off messages at slightly other costs, so that equal axes do not decode into mixtures."""
        rest = (self.seconds if math.isfinite(self.seconds) else messages.bound) - self.floor
        amount = TILT * rest / len(self.problem.variables)
        variables = [
            replace(v, costs=v.costs + amount * tilts(v.digits, seed, at)) for at, v in enumerate(self.problem.variables)
        ]
        tilted = messages.restrict(messages.space, Problem(variables, self.problem.values))
        for sweep in range(12):
            tilted.sweep()
            if sweep % 3 == 2:
                self.offer(tilted.decode())

    def widen(self, extra: Sequence[np.ndarray]) -> None:
        """Look among the labels that the relaxation takes of many, and those of the best plan; extra: see `approach`."""
        costs = [self.near.costs(at, self.labels) for at in range(len(self.labels))]
        kept = [[np.argsort(found, kind="stable")[:OWN] for found in found_by] for found_by in (self.own, costs)]
        self.support(around(self.problem, self.labels, nearest(extra, TIMES * len(self.labels), EACH), *kept))

    @functools.cached_property
    def own(self) -> list[np.ndarray]:
        """By variable and label, about how far plans with the label are from a bound, from messages of this problem alone."""
        return passed(self.problem, self.cap).extra()

    def pair(self, extra: Sequence[np.ndarray], axes: Sequence[int]) -> None:
        """The same among the labels that differ from the best plan on these axes only."""
        free = freed(self.problem, self.labels, axes).labels
        extra = [np.where(np.isin(np.arange(len(found)), kept), found, np.inf) for found, kept in zip(extra, free)]
        self.support(around(self.problem, self.labels, nearest(extra, PAIRED * len(self.labels))))

    def support(self, space: Space) -> None:
        """Look among the labels that the relaxation takes, and those of the best plan."""
        taken = supported(self.problem, space, self.scale, WIDEST)
        if taken is not None:
            self.finish(around(self.problem, self.labels, taken), gap=CLOSE)

    def move(self) -> None:
        """Free one axis at all variables, the others as they are, and finish that, on many axes nearly; over all axes until none helps."""
        axes = self.problem.variables[0].digits.shape[1]
        idle = axis = 0
        while idle < axes:
            before = self.labels
            if self.settled.get(axis) != before:
                self.finish(freed(self.problem, before, [axis]), gap=MOVED if self.wide else 0.0)
            idle = idle + 1 if self.labels == before else 0
            self.settled[axis] = self.labels
            axis = (axis + 1) % axes
        if self.wide:
            self.offer(self.labels)


def tilts(digits: np.ndarray, seed: int, at: int) -> np.ndarray:
    """Numbers by label that tell the axes apart: for seed 0 later axes cost more, else drawn by digit and axis."""
    axes = digits.shape[1]
    weights = np.outer(np.arange(axes), np.arange(digits.max() + 1) > 0).astype(float)
    if seed:
        weights = np.random.default_rng([seed, at]).random(weights.shape)
    return weights[np.arange(axes), digits].sum(1)


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
    return Space(labels, [np.arange(len(v.closure)) if aliased(v) else None for v in problem.values])
