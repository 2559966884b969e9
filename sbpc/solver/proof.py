"""A lower bound recomputed from multipliers, by the definitions of the problem alone: nothing of the search is used.

A multiplier is a number per label for the port where a variable meets a value: the variable pays it, the value
receives it. Whatever the multipliers are, no plan costs less than the sum of what every variable and every value
costs at its cheapest, alone. Variables of one class have equal multipliers, so equal terms are computed once.

A value with several consumers costs at least its cheapest star under *cost shares*: consumer j pays P_j(a, t) for
the boxing from alias a to layout t, such that no m-1 of the m consumers pay more than its price. That is enough: if
not all consumers want t, at most m-1 pay for it. If all want t, then the alias t itself is as cheap, by the triangle
inequality. A consumer that wants the layout in which the value is made takes it as it is and pays nothing, so again
at most m-1 pay. k consumers of one class at one port count as one that receives k times as much: pick one of them at
random, and the star for the picked ones costs no more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sbpc.solver.problem import Array, Problem, Proof, Value

HUGE = 1e100  # multipliers beyond it are ignored: their sums may overflow
Key = tuple[Any, ...]
# consumers and wanted layouts, by class, port and `id` of these
Groups = dict[tuple[int, int, int], list[tuple[int, Array]]]


def checked_bound(problem: Problem, proof: Proof) -> float:
    """Returns seconds that no plan costs less than, whatever the multipliers of the proof are."""
    ports: list[list[int]] = [[] for _ in problem.variables]  # by variable, where it meets values
    values = by_term(problem.values, proof.classes)
    for value, groups in (pair for same in values for pair in same):
        ports[value.producer].append(value.places[0])
        for (_, place, _), group in groups.items():
            for at, _ in group:
                ports[at].append(place)
    variables: dict[Key, list[Array]] = {}
    for number, places, variable in zip(proof.classes, ports, problem.variables):
        variables.setdefault((number, tuple(sorted(places)), id(variable.costs)), []).append(variable.costs)
    known: dict[tuple[int, ...], Any] = {}
    total = [len(same) * value_bound(*same[0], proof, known) for same in values]
    for (number, places, _), (costs, *others) in variables.items():
        for place in places:
            costs = costs + multiplier(proof, number, place, len(costs))
        total.append((1 + len(others)) * float(costs.min()))
    if not all(map(math.isfinite, total)):
        return math.inf if min(total) > -math.inf and not any(map(math.isnan, total)) else 0.0
    return max(math.fsum(total) - 1e-12 * math.fsum(map(abs, total)), 0.0)


def by_term(values: Sequence[Value], classes: Sequence[int]) -> list[list[tuple[Value, Groups]]]:
    """Returns the values with their consumers, those together whose terms of the bound are equal."""
    terms: dict[Key, list[tuple[Value, Groups]]] = {}
    for value in values:
        groups = consumers(value, classes)
        key = share_key(value, classes, groups), id(value.closure), id(value.out), *(key[2] for key in groups)
        terms.setdefault(key, []).append((value, groups))
    return list(terms.values())


def consumers(value: Value, classes: Sequence[int]) -> Groups:
    """Returns the distinct consumers grouped by class, port and wanted layouts."""
    groups: Groups = {}
    seen: dict[int, list[Array]] = {}
    for (at, wants), place in zip(value.consumers, value.places[1:]):
        before = seen.setdefault(at, [])
        if not any(np.array_equal(wants, other) for other in before):
            before.append(wants)
            groups.setdefault((classes[at], place, id(wants)), []).append((at, wants))
    return groups


def share_key(value: Value, classes: Sequence[int], groups: Groups) -> Key:
    """Returns the key of a value in `Proof.shares`: class and port of its producer, and those of its consumers,
    counted."""
    kinds = tuple((number, place, len(group)) for (number, place, _), group in groups.items())
    return (classes[value.producer], value.places[0], kinds)


def multiplier(proof: Proof, number: int, place: int, labels: int) -> Array:
    """Returns the multipliers of a port by label; zeros if there are none, or if some are not finite or absurdly
    large."""
    found = proof.multipliers.get((number, place))
    if found is None or found.shape != (labels,) or not np.abs(found).max(initial=0.0) < HUGE:
        return np.zeros(labels)
    return found


def largest(layouts: Array, multipliers: Array, known: dict[tuple[int, ...], Any]) -> tuple[Array, Array]:
    """Returns the distinct layouts of a port, and the largest multiplier of each. known: what many ports share."""
    if (id(layouts),) not in known:
        # which is kept, so that no other has its id
        known[id(layouts),] = *np.unique(layouts, return_inverse=True), layouts
    distinct, at, _ = known[id(layouts),]
    most = np.full(len(distinct), -np.inf)
    np.maximum.at(most, at, multipliers)
    return distinct, most


def value_bound(value: Value, groups: Groups, proof: Proof, known: dict[tuple[int, ...], Any]) -> float:
    """Returns the least that one value costs, less the multipliers that it receives."""
    ends = [(proof.classes[value.producer], value.places[0], 1, value.out)]
    ends += [(number, place, len(group), group[0][1]) for (number, place, _), group in groups.items()]
    (made, received), *taken = [
        largest(wants, many * multiplier(proof, number, place, len(wants)), known)
        for number, place, many, wants in ends
    ]
    if not taken:
        return -float(received.max())
    reached = value.closure[made] - received[:, None]  # from each source to each alias
    prices = [value.closure[:, layouts] for layouts, _ in taken]
    if len(taken) > 2:
        shares = proof.shares.get(share_key(value, proof.classes, groups))
        prices = feasible_shares(value.closure, [layouts for layouts, _ in taken], shares)
    for price, (layouts, pays), (_, _, _, wants) in zip(prices, taken, ends[1:]):
        key = id(value.out), id(wants)
        if key not in known:
            known[key] = np.intersect1d(made, layouts, assume_unique=True, return_indices=True)[1:]
        direct = np.full(len(made), np.inf)
        at, to = known[key]
        direct[at] = -pays[to]
        reached += np.minimum((price - pays).min(1), direct[:, None])
    return float(reached.min())


def feasible_shares(closure: Array, wanted: Sequence[Array], given: Sequence[Array] | None) -> list[Array]:
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
