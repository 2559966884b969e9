"""prices: the assignments of a graph where the bytes of values have prices, as they have under a limit of bytes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch.fx import GraphModule

from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish
from sbpc.passes.assign.space import ENDS, Prices, Space
from sbpc.plans.plan import Assignment
from sbpc.solver import (
    Division,
    Leaf,
    Limit,
    Near,
    Problem,
    Proof,
    Tree,
    bound_by_cases,
    certify,
    charged,
    checked_bound,
    sharp,
    split_by_costs,
    total,
    untied_distances,
    untied_proof,
)


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

    def near(self) -> Near:
        """Labels near good plans, at first none."""
        return Near(self.problem, self.classes(None))


@dataclass(eq=False)
class Relaxed:
    """The problem of a plan under limits, which have prices in seconds, each for all of a limit: a plan that keeps them pays at
    most their sum.

    So a lower bound of seconds and of what is paid, less that sum, is one of the seconds of such plans.
    """

    space: PricedSpace
    limits: Sequence[Limit] = ()
    prices: Sequence[float] = ()
    known: Proof | None = None  # None: made when asked for

    @cached_property
    def problem(self) -> Problem:
        """What is solved where bytes have their prices."""
        return charged(self.space.problem, self.limits, self.prices)

    @property
    def allowed(self) -> float:
        """What a plan under the limits pays at most."""
        return math.fsum(self.prices)

    @property
    def proof(self) -> Proof:
        """Multipliers of the problem."""
        if self.known is None:
            self.known = untied_proof(self.problem)
        return self.known

    def paid_by(self, assignment: Assignment) -> float:
        """Seconds of an assignment, and what it pays for bytes."""
        return total(self.problem, self.space.labels(assignment))

    def bound(self, proof: Proof) -> float:
        """Seconds below which no plan under the limits is, by these multipliers."""
        return checked_bound(self.problem, proof) - self.allowed

    def classes(self, apart: int) -> list[int]:
        """See `Space.classes`; those of one class pay the same."""
        return split_by_costs(self.problem, self.space.classes(None, apart))

    def sharpen(self, assignment: Assignment, aim: float) -> float:
        """A bound that is sharper than that of `solve`, of which the multipliers are kept; aim: with which it is enough."""
        paid = self.paid_by(assignment)
        found, self.known = sharp(self.problem, self.classes(0), self.classes(1), paid, aim + self.allowed)
        return found - self.allowed

    def certify(self, assignment: Assignment, limit: float) -> float:
        """A tighter bound at the same prices; see `Space.certify`."""
        partitions = [self.classes(apart) for apart in ENDS]
        found, proof = certify(self.problem, partitions, self.paid_by(assignment), limit)
        if found - self.allowed > self.bound(self.proof):
            self.known = proof
        return found - self.allowed

    def check(self, assignment: Assignment, proof: Proof) -> tuple[float, float]:
        """What an assignment costs, and the bound that the multipliers and the prices give."""
        return self.space.seconds(assignment), self.bound(proof)


class Divided:
    """The problem of a plan under limits, cut into cases, each at prices of its own.

    near: labels near good plans; labels: of one under the limits; scale: about what plans cost, in seconds.
    """

    def __init__(self, space: PricedSpace, limits: Sequence[Limit], near: Near, labels: Sequence[int], scale: float) -> None:
        self.space = space
        self.division = Division(space.problem, limits, labels, scale, near.distances)

    @property
    def proof(self) -> Tree:
        """Prices and multipliers of the cases."""
        return self.division.root.tree

    def sharpen(self, aim: float) -> float:
        """The bound of cases that are cut until it is `aim`, or the work is done."""
        self.division.run(aim)
        return self.division.bound

    def certify(self, assignment: Assignment, limit: float) -> float:
        """A tighter bound, of more cases; see `Space.certify`."""
        self.division.run(self.space.seconds(assignment), time.process_time() + limit)
        return self.division.bound

    def check(self, assignment: Assignment, proof: Proof | Tree) -> tuple[float, float]:
        """What an assignment costs, and the bound that the cases give; of multipliers alone that where bytes cost nothing."""
        tree = Leaf([0.0] * len(self.division.limits), proof) if isinstance(proof, Proof) else proof
        found = bound_by_cases(self.space.problem, self.division.limits, tree, self.division.outside)
        return self.space.seconds(assignment), found
