"""mend: plans that differ from one that takes too much in one node: one whose values stand in storages that no row counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch.fx import Node

from sbpc.passes.memory.peak_rows import beyond, values_in
from sbpc.passes.memory.priced_space import PricedSpace
from sbpc.plans.plan import Plan
from sbpc.solver import Neighbours, total


def mends(space: PricedSpace, plan: Plan, calls: Sequence[Node], copies: int, most: float) -> Iterator[list[int]]:
    """Labels that differ from those of the plan in one node and take less than `most` seconds, the fastest first. calls: those
    during which the plan takes too much. copies: see `at_optimizer`."""
    labels, near, standing = space.labels(plan.assignment), Neighbours(space.problem), values_in(plan.life)
    unseen = [names for call in calls for _, names in beyond(space, plan, labels, standing, call, copies)[1]]
    found, seconds = list[tuple[float, int, int]](), total(space.problem, labels)
    for at in touching(space, set().union(*unseen)):
        costs = near.costs(at, labels)
        slower = seconds + (costs - costs[labels[at]])
        found += [(float(slower[label]), at, label) for label in np.flatnonzero(slower < most).tolist() if label != labels[at]]
    for _, at, label in sorted(found):
        yield [*labels[:at], label, *labels[at + 1 :]]


def touching(space: PricedSpace, names: set[str]) -> list[int]:
    """The numbers of the variables that make or read the values of these nodes."""
    found = dict[int, None]()
    for (node, _), value in zip(space.keys, space.values):
        if node.name in names:
            found |= dict.fromkeys((value.producer, *(at for at, _ in value.consumers)))
    return list(found)
