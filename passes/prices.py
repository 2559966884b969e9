"""prices: the assignments of a graph where the bytes of values have prices, as they have under a limit of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch.fx import GraphModule

from sbpc.mesh import Mesh
from sbpc.passes.assign import Prices, Space
from sbpc.pins import Wish
from sbpc.plan import Assignment
from sbpc.solver import Near, Problem, Proof, sharp, untied_distances


class PricedSpace(Space):
    """The solver's problem of an annotated graph with stored values; every layout may be worth its bytes."""

    def __init__(
        self, gm: GraphModule, mesh: Mesh, wishes: Mapping[str, Wish], outputs: Mapping[int, Wish]
    ) -> None:
        super().__init__(gm, mesh, wishes, outputs, priced=True)

    def weights(self, counted: Prices) -> dict[int, np.ndarray]:
        """By number of a variable its bytes that count, by label; equal sums are one array."""
        places: dict[int, list[tuple[int, float]]] = {}
        for (name, place), many in counted.items():
            places.setdefault(self.named[name], []).append((place, many))
        found = {}
        for at, held in places.items():
            key = (id(self.tables[at]), "weights", tuple(held))
            if key not in self.known:
                self.known[key] = np.sum([many * self.bytes_of(at, place) for place, many in held], axis=0)
            found[at] = self.known[key]
        return found

    def bytes_in(self, assignment: Assignment, counted: Prices) -> float:
        """The bytes of an assignment that count, each so many times."""
        labels = self.labels(assignment)
        return sum(float(held[labels[at]]) for at, held in self.weights(counted).items())

    def distances(self, prices: Prices | None = None) -> Sequence[np.ndarray]:
        """By node and label, about how far plans with the label are from the bound; prices: those of the last `solve`."""
        return untied_distances(self.priced(prices)) if self.extra is None else self.extra

    def sharp(self, seconds: float, prices: Prices | None = None) -> tuple[float, Proof]:
        """A bound for all plans, sharper than that of `solve`, and its proof; seconds: of a plan and what it pays."""
        return sharp(self.priced(prices), self.classes(prices), self.classes(prices, 1), seconds)

    def near(self) -> Near:
        """Labels near good plans, at first none."""
        return Near(Problem(self.variables, self.values), self.classes(None))
