"""Large neighbourhood search: a plan under limits is bettered in a window of variables at a time, all others as they are.

A program of a window takes a tenth of a second on one axis, some tenths on two; under limits a plan that programs of the
whole found, stopped early and on few labels, may be far from the best. Shaw, "Using constraint programming and local search
methods to solve vehicle routing problems", CP 1998.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sbpc.solver.exact import cheapest
from sbpc.solver.moves import Neighbours, around
from sbpc.solver.problem import SLACK, Limit, Problem, total

WIDE, EACH = 30, 8  # variables of a window; labels that each of them may have, its own if that is not one of them apart
NODES, LONGER, GAP = 200, 0.3, 1e-4  # of the program of a window: see `exact.cheapest`


@dataclass(eq=False)
class Windows:
    """The windows of a problem: each has the variables next to one of them. distances: by variable and label, how far the label is
    from good plans."""

    problem: Problem
    distances: Sequence[np.ndarray]

    @cached_property
    def centers(self) -> list[int]:
        """Every so many variables, and those that are in no window of these: every variable is in a window."""
        found = list(range(0, len(self.problem.variables), WIDE // 3))
        seen = {at for center in found for at in self.window(center)}
        for at in range(len(self.problem.variables)):
            if at not in seen:
                found.append(at)
                seen |= set(self.window(at))
        return sorted(found)

    def window(self, center: int) -> list[int]:
        """The variables of a window, the nearest first."""
        found = [center]
        for at in found:
            new = [other for other in dict.fromkeys(self.neighbours.near[at]) if other not in found]
            found += new[: WIDE - len(found)]
        return found

    def cheaper(self, center: int, labels: Sequence[int], limits: Sequence[Limit]) -> list[int] | None:
        """Labels under the limits that cost less than those given and differ in a window only; None if none were found."""
        kept = [np.array([label]) for label in labels]
        for at in self.window(center):
            kept[at] = np.argsort(self.distances[at], kind="stable")[:EACH]
        seconds, space = total(self.problem, labels), around(self.problem, labels, kept)
        found = cheapest(self.problem, space, seconds, NODES, GAP, limits, LONGER).labels
        return found if found and total(self.problem, found) < seconds * (1 - SLACK) else None

    @cached_property
    def neighbours(self) -> Neighbours:
        """The variables next to each."""
        return Neighbours(self.problem)
