"""found: the plans that were made of a graph, by their labels; which stay under a limit of bytes, and which is the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from sbpc.passes.memory.live_bytes import peak_calls
from sbpc.passes.memory.priced_space import PricedSpace
from sbpc.plans.plan import Assignment, Plan
from sbpc.solver import total

TIE = 1e-9  # relative: plans that differ by less are equally fast


@dataclass
class Found:
    """A plan, its labels and seconds in the space, and what it takes during the calls where that is more than the limit,
    most first."""

    plan: Plan
    labels: list[int]
    seconds: float
    peaks: Mapping[str, int]

    @property
    def peak(self) -> str | None:
        """The call during which it takes most, if that is more than the limit."""
        return next(iter(self.peaks), None)

    @property
    def bytes(self) -> int:
        """The bytes that the plan takes."""
        return self.plan.memory["total"]


class Plans:
    """Plans of the graph `gm` of a space; limit: bytes per rank; made: the plan of an assignment."""

    def __init__(self, limit: float, space: PricedSpace, gm: GraphModule, made: Callable[[Assignment], Plan]) -> None:
        self.limit, self.space, self.gm, self.made = limit, space, gm, made
        self.found: dict[tuple[int, ...], Found] = {}  # by labels

    @property
    def plans(self) -> list[Found]:
        """All plans that were made, the last one last."""
        return list(self.found.values())

    @property
    def best(self) -> Found | None:
        """The fastest plan under the limit, of equally fast ones that with the fewest bytes; None if there is none."""
        found = list(filter(self.fits, self.plans))
        least = min((each.seconds for each in found), default=0.0) * (1 + TIE)
        return min((each for each in found if each.seconds <= least), key=lambda each: each.bytes, default=None)

    def fits(self, found: Found) -> bool:
        """Whether a plan stays under the limit."""
        return found.bytes <= self.limit

    def seconds(self, labels: Sequence[int]) -> float:
        """What labels take, bytes for nothing."""
        return total(self.space.problem, labels)

    def keep(self, labels: list[int]) -> Found:
        """Make the plan of these labels, once, and keep it; of those before it no graphs."""
        key = tuple(labels)
        if key not in self.found:
            for other in self.found.values():
                other.plan.forget()
            self.found[key] = self.make(labels)
        return self.found[key]

    def make(self, labels: list[int]) -> Found:
        """The plan of these labels."""
        plan = self.made(self.space.assignment(labels))
        return Found(plan, labels, self.seconds(labels), peak_calls(plan, self.gm, self.limit))
