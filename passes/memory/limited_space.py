"""The layout problem under limits of bytes: weights of labels at a moment, and bounds of plans that keep the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sbpc.passes.assign.local_bytes import Place
from sbpc.passes.assign.space import Space
from sbpc.passes.memory.live_bytes import Moment
from sbpc.solver import Limit, Proof
from sbpc.solver.fold import Folded


class LimitedSpace(Space):
    """The layout problem of a graph with stored values, in which the bytes of every label are known."""

    weighs_bytes = True

    def weights(self, moment: Moment) -> dict[int, np.ndarray]:
        """Returns, by number of a variable, the bytes that a moment counts, by label. Equal sums are one array."""
        places: dict[int, list[tuple[Place, float]]] = {}
        for (name, place), many in moment.items():
            places.setdefault(self.named[name], []).append((place, many))
        return {at: self.weighed(at, tuple(counted)) for at, counted in places.items()}

    def weighed(self, at: int, counted: tuple[tuple[Place, float], ...]) -> np.ndarray:
        """Returns the bytes at these places of a variable, each so many times, by label."""
        key = (id(self.tables[at]), "weights", counted)
        return self.once(key, lambda: np.sum([many * self.bytes_of(at, place) for place, many in counted], axis=0))


def by_class(folded: Folded, limits: Sequence[Limit]) -> list[Limit]:
    """Returns the limits of the folded problem: the members of a class are weighed together."""
    folded_limits = []
    for limit in limits:
        weights: dict[int, np.ndarray] = {}
        for at, each in limit.weights.items():
            weights[folded.classes[at]] = weights.get(folded.classes[at], 0.0) + each
        folded_limits.append(Limit(weights, limit.most))
    return folded_limits


@dataclass(eq=False)
class PricedBound:
    """A lower bound of plans that keep limits: a plan that does pays at most the sum of the prices, so a bound of seconds and
    payments, less that sum, bounds its seconds. prices: seconds for all of a limit.

    bound: seconds; infinite if it is known that no plan keeps the limits.
    """

    bound: float
    limits: Sequence[Limit] = ()
    prices: Sequence[float] = ()
    proof: Proof = field(default_factory=lambda: Proof([]))
