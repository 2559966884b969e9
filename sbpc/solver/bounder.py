"""Lower bounds that can be continued: messages go on when label costs change, and as long as they are told."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from sbpc.solver.dual import Dual, blocks, ends, raise_bound
from sbpc.solver.fold import Folded, fold, repriced
from sbpc.solver.messages.trws import Messages, big_m
from sbpc.solver.problem import SLACK, Problem, Proof
from sbpc.solver.proof import checked_bound
from sbpc.solver.subsets import Subset, everything

ROUNDING = 1e-4  # of the seconds, in bounds of single precision
CELLS = 1e8  # boxings between two layouts, over all values, of a network in which nothing is tied
WIDE = 3  # axes from which messages are of single precision: half the memory, two thirds of the time


class Bounder:
    """Multipliers and reduced costs of a folded problem.

    labels: a plan read off the messages, by class. reduced_costs: by class and label. bound, proof: for the whole problem.
    seconds: of a known plan.
    """

    def __init__(self, problem: Problem, folded: Folded, seconds: float = math.inf):
        self.folded, self.cap = folded, big_m(folded.problem, seconds)
        self.nothing_tied = max(folded.sizes) == 1
        part = blocks(folded)
        self.bundles = part.bundles
        self.messages = Messages(part.problem, self.cap, precision(part.problem))
        self.solve(problem)

    def solve(self, problem: Problem) -> None:
        """Finds multipliers of the problem, which may have other label costs than the one before."""
        self.folded = repriced(self.folded, problem)
        part, dual = blocks(self.folded), Dual(self.folded)
        self.messages.reprice(part.problem)
        raise_bound(self.messages)
        dual.take(part, self.messages, lambda slot: True)
        self.labels, self.reduced_costs = self.messages.decode(), self.messages.reduced_costs()
        if not self.nothing_tied:
            self.solve_ends(dual)
        self.proof = dual.proof()
        self.bound = checked_bound(problem, self.proof)

    def tied_reduced_costs(self) -> list[np.ndarray]:
        """Returns reduced costs by messages of the folded problem itself, which knows the ends of runs of blocks. They go on from
        those of the blocks. Their bound is one only of plans in which a class has one label."""
        messages = Messages(self.folded.problem, self.cap, precision(self.folded.problem))
        messages.start_from(self.messages, self.bundles)
        raise_bound(messages)
        return messages.reduced_costs()

    def below(self, seconds: float) -> Subset | None:
        """Returns the labels and aliases with which a plan may cost at most `seconds`; None if there is no such plan.

        Nothing may be tied. Single precision is allowed for.
        """
        assert self.nothing_tied
        problem = self.folded.problem
        most = seconds * (1 + ROUNDING) if is_wide(problem) else seconds
        subset = everything(problem)
        for (kind, at), bounds in zip(self.messages.names, self.messages.label_bounds()):
            kept = np.flatnonzero(bounds <= most)
            if not len(kept):
                return None
            if kind == 0:
                subset.labels[at] = kept
            else:
                subset.aliases[self.bundles[at]] = kept  # values that nothing reads have no messages
        return subset

    def solve_ends(self, dual: Dual) -> None:
        """Finds the multipliers of the classes of one member, those of the others as they are."""
        part = ends(dual)
        if not part.problem.variables:
            return
        messages = Messages(part.problem, self.cap, precision(part.problem))
        raise_bound(messages, self.messages.bound)
        dual.take(part, messages, lambda slot: self.folded.sizes[slot[0]] == 1)
        single = [at for at, size in enumerate(self.folded.sizes) if size == 1]
        for at, costs in zip(single, messages.reduced_costs()):
            self.reduced_costs[at] = costs


def is_wide(problem: Problem) -> bool:
    """Returns whether labels choose on so many axes that they are thousands."""
    return problem.variables[0].digits.shape[1] >= WIDE


def precision(problem: Problem) -> type[np.floating]:
    """Returns the precision of messages."""
    return np.float32 if is_wide(problem) else np.float64


def certify(problem: Problem, finer: Sequence[int], seconds: float, limit: float) -> tuple[float, Proof]:
    """Returns the best bound found in about `limit` CPU seconds, and its proof; the first bound is not cut short.

    Nothing is tied, unless that takes gigabytes: then `finer` are the classes. seconds: of a plan; a bound of as much ends it.
    """
    until = time.process_time() + limit
    cells = sum(len(value.closure) ** 2 for value in problem.values)
    folded = fold(problem, range(len(problem.variables)) if cells <= CELLS else finer)
    bounder = Bounder(problem, folded, seconds)
    best, before = (bounder.bound, bounder.proof), -math.inf
    while before < best[0] < seconds * (1 - SLACK) and time.process_time() < until:
        before = best[0]
        bounder.solve(problem)
        best = max(best, (bounder.bound, bounder.proof), key=lambda pair: pair[0])
    return min(best[0], seconds), best[1]
