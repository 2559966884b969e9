"""A lower bound recomputed from multipliers, by the definitions of the problem alone: nothing of the search is used.

A multiplier is a number per label for the port where a variable meets a value: the variable pays it, the value receives it.
Whatever the multipliers are, no plan costs less than the sum of what every variable and every value costs at its cheapest,
alone. Variables of one class have equal multipliers, so equal terms are computed once.

A value with several consumers costs at least its cheapest star under *cost shares*: consumer j pays P_j(a, t) for the boxing
from alias a to layout t, such that no m-1 of the m consumers pay more than its price. That is enough: if not all consumers
want t, at most m-1 pay for it. If all want t, then the alias t itself is as cheap, by the triangle inequality. A consumer that
wants the layout in which the value is made takes it as it is and pays nothing, so again at most m-1 pay.
k consumers of one class at one port count as one that receives k times as much: pick one of them at random, and the star for
the picked ones costs no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sbpc.solver.problem import Problem, Proof

HUGE = 1e100  # multipliers beyond it are ignored: their sums may overflow


Groups = Mapping[tuple[int, int, int], list[tuple[int, int]]]  # consumers by class, port and wanted layouts
Terms = tuple[list[tuple[int, Any, Groups]], list[tuple[int, int, tuple[int, ...], np.ndarray]]]  # see `terms_of`


def checked_bound(problem: Problem, proof: Proof) -> float:
    """Returns seconds that no plan costs less than, whatever the multipliers of the proof are."""
    values, variables = terms_of(problem, proof.classes)
    known = LayoutMemo()
    total = [count * value_bound(value, groups, proof, known) for count, value, groups in values]
    for count, number, places, costs in variables:
        for place in places:
            costs = costs + multiplier(proof, number, place, len(costs))
        total.append(count * float(costs.min()))
    if not all(map(math.isfinite, total)):
        return math.inf if min(total) > -math.inf and not any(map(math.isnan, total)) else 0.0
    return max(math.fsum(total) - 1e-12 * math.fsum(map(abs, total)), 0.0)


def terms_of(problem: Problem, classes: Sequence[int]) -> Terms:
    """Returns the terms of the bound, equal ones once, with their count.

    For values: count, one of them, its consumers. For variables: count, class, port numbers, costs.
    """
    ports: list[list[int]] = [[] for _ in problem.variables]  # by variable, where it meets values
    values: dict[tuple[Any, ...], list[Any]] = {}
    for value in problem.values:
        groups = consumers(value, classes)
        ports[value.producer].append(value.places[0])
        for group in groups.values():
            for at, place in group:
                ports[at].append(place)
        key = (share_key(value, classes, groups), id(value.closure), id(value.out), *(key[2] for key in groups))
        values.setdefault(key, [0, value, groups])[0] += 1
    variables: dict[tuple[Any, ...], list[int]] = {}
    for at, variable in enumerate(problem.variables):
        variables.setdefault((classes[at], tuple(sorted(ports[at])), id(variable.costs)), []).append(at)
    return [(count, value, groups) for count, value, groups in values.values()], [
        (len(members), number, places, problem.variables[members[0]].costs)
        for (number, places, _), members in variables.items()
    ]


def consumers(value: Any, classes: Sequence[int]) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """Returns the distinct consumers grouped by class, port and wanted layouts."""
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    seen: dict[int, list[np.ndarray]] = {}
    for (at, wants), place in zip(value.consumers, value.places[1:]):
        before = seen.setdefault(at, [])
        if not any(np.array_equal(wants, other) for other in before):
            before.append(wants)
            found.setdefault((classes[at], place, id(wants)), []).append((at, place))
    return found


def share_key(value: Any, classes: Sequence[int], groups: Mapping[tuple[int, int, int], list[Any]]) -> tuple[Any, ...]:
    """Returns the key of a value in `Proof.shares`: class and port of its producer, and those of its consumers, counted."""
    kinds = tuple((number, place, len(group)) for (number, place, _), group in groups.items())
    return (classes[value.producer], value.places[0], kinds)


def multiplier(proof: Proof, number: int, place: int, labels: int) -> np.ndarray:
    """Returns the multipliers of a port by label; zeros if there are none, or if some are not finite or absurdly large."""
    found = proof.multipliers.get((number, place))
    if found is None or found.shape != (labels,) or not np.abs(found).max(initial=0.0) < HUGE:
        return np.zeros(labels)
    return found


class LayoutMemo:
    """What is known of arrays of layouts: many ports share one array."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, ...], tuple[np.ndarray, ...]] = {}

    def distinct(self, layouts: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns the distinct layouts, and for every label the place of its layout among them."""
        key = (id(layouts),)
        if key not in self.found:
            self.found[key] = *np.unique(layouts, return_inverse=True), layouts  # which is kept, so that no other has its id
        return self.found[key][:2]

    def both(self, one: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns the places, in either array's distinct layouts, of the layouts that both have."""
        key = (id(one), id(other))
        if key not in self.found:
            first, second = self.distinct(one)[0], self.distinct(other)[0]
            self.found[key] = np.intersect1d(first, second, assume_unique=True, return_indices=True)[1:]
        return self.found[key]

    def paid(self, layouts: np.ndarray, multipliers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the distinct layouts of a port, and the largest multiplier of each."""
        found, at = self.distinct(layouts)
        most = np.full(len(found), -np.inf)
        np.maximum.at(most, at, multipliers)
        return found, most


def value_bound(value: Any, groups: Mapping[tuple[int, int, int], list[tuple[int, int]]], proof: Proof, known: LayoutMemo) -> float:
    """Returns the least that one value costs, less the multipliers that it receives."""
    wants = {(at, place): wanted for (at, wanted), place in zip(value.consumers, value.places[1:])}
    producer = proof.classes[value.producer]
    made = known.paid(value.out, multiplier(proof, producer, value.places[0], len(value.out)))
    taken, ports = [], []
    for (number, place, _), group in groups.items():
        wanted = wants[group[0]]
        taken.append(known.paid(wanted, len(group) * multiplier(proof, number, place, len(wanted))))
        ports.append(wanted)
    if not taken:
        return -float(made[1].max())
    reached = value.closure[made[0]] - made[1][:, None]  # from each source to each alias
    prices = [value.closure[:, layouts] for layouts, _ in taken]
    if len(taken) > 2:
        given = proof.shares.get(share_key(value, proof.classes, groups))
        prices = feasible_shares(value.closure, [layouts for layouts, _ in taken], given)
    for price, (_, pays), wanted in zip(prices, taken, ports):
        direct = np.full(len(made[0]), np.inf)
        at, to = known.both(value.out, wanted)
        direct[at] = -pays[to]
        reached += np.minimum((price - pays).min(1), direct[:, None])
    return float(reached.min())


def feasible_shares(closure: np.ndarray, wanted: Sequence[np.ndarray], given: Sequence[np.ndarray] | None) -> list[np.ndarray]:
    """Returns cost shares that obey the rule above: the given ones, scaled down where they break it, or equal ones."""
    many = len(wanted)
    holds = np.zeros((many, closure.shape[1]), dtype=bool)
    for at, layouts in enumerate(wanted):
        holds[at, layouts] = True
    shapes = [(len(closure), len(layouts)) for layouts in wanted]
    if given is None or [found.shape for found in given] != shapes or not all((found >= 0).all() for found in given):
        given = [closure[:, layouts] / many for layouts in wanted]
    total, least = np.zeros(closure.shape), np.full(closure.shape, np.inf)
    for layouts, found in zip(wanted, given):
        total[:, layouts] += found
        least[:, layouts] = np.minimum(least[:, layouts], found)
    excess = np.where(holds.all(0), total - np.where(np.isfinite(least), least, 0.0), total)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(excess > closure, closure / excess, 1.0)
    share = np.where(np.isnan(share), 0.0, share)
    return [found * share[:, layouts] for layouts, found in zip(wanted, given)]
