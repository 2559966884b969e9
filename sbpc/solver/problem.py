"""The layout problem: choose one label per variable so that label costs and boxings cost least.

A value is made in one layout by its producer, and each consumer wants it in a layout. A consumer that wants the
layout in which the value is made takes it as it is. For the others the value is boxed once to an *alias* layout, and
from there once to every distinct layout that is wanted. These boxings are the value's *star*: equal boxings of a
value are paid once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

Array = np.ndarray
Labels = Sequence[int]  # one of each variable: a plan
SLACK = 1e-12  # relative: costs that differ by less are ties


@dataclass(eq=False)
class Variable:
    """A choice of one label: `costs` [labels] in seconds; `digits` [labels, axes], the signature on each mesh axis."""

    name: str
    costs: Array
    digits: Array


@dataclass(eq=False)
class Value:
    """A tensor that variable `producer` makes in layout `out[label]` and each consumer `(variable, wants)` reads in
    `wants[label]`.

    closure [layouts, layouts]: seconds of the cheapest boxing from row to column; 0 on the diagonal, inf where there is
    none. It obeys the triangle inequality, on which the bounds rest.
    places: the number of the port at the producer, then those at the consumers. No variable has a number twice.
    Variables of one class have equal ports under equal numbers.
    """

    producer: int
    out: Array
    consumers: list[tuple[int, Array]]
    closure: Array
    places: tuple[int, ...] = ()

    @functools.cached_property
    def distinct(self) -> list[int]:
        """The numbers of the consumers that differ: one that is the same variable with the same `wants` counts once."""
        numbers: dict[tuple[int, bytes], int] = {}
        for number, (at, wants) in enumerate(self.consumers):
            numbers.setdefault((at, wants.tobytes()), number)
        return list(numbers.values())

    @property
    def ends(self) -> list[tuple[int, Array]]:
        """The variables that meet the value, the producer first, with their layouts."""
        return [(self.producer, self.out), *self.consumers]

    @property
    def distinct_ends(self) -> list[tuple[int, Array]]:
        """The same, equal consumers once."""
        return [(self.producer, self.out), *(self.consumers[number] for number in self.distinct)]

    @property
    def has_alias(self) -> bool:
        """Whether the star may need an alias: not if one other variable consumes the value."""
        return len(self.distinct) > 1 or any(at == self.producer for at, _ in self.consumers)


@dataclass(eq=False)
class Problem:
    """Variables and the values between them. Producers should come before consumers: messages then travel far."""

    variables: list[Variable]
    values: list[Value]


def with_ports(problem: Problem) -> Problem:
    """Returns the problem with a number for every port, in the order of the values, if values have none."""
    if all(value.places for value in problem.values):
        return problem
    count = [0] * len(problem.variables)

    def number(at: int) -> int:
        count[at] += 1
        return count[at] - 1

    places = [(number(value.producer), *(number(at) for at, _ in value.consumers)) for value in problem.values]
    return Problem(problem.variables, [replace(value, places=each) for value, each in zip(problem.values, places)])


@dataclass(frozen=True, eq=False)
class Limit:
    """A linear constraint: `weights` [labels] by number of a variable, summed over a plan, are at most `most`."""

    weights: Mapping[int, Array]
    most: float

    def used(self, labels: Labels) -> float:
        """Returns the left-hand side for a plan."""
        return math.fsum(float(weights[labels[at]]) for at, weights in self.weights.items())


@dataclass(frozen=True, eq=False)
class Proof:
    """Multipliers from which `sbpc.solver.proof.checked_bound` computes a lower bound.

    classes: the class of every variable. multipliers: by class and port, one number per label. shares: by
    `proof.share_key` of a value with more than two distinct consumers, the cost share of each consumer [layouts,
    distinct layouts wanted, ascending].
    """

    classes: Sequence[int]
    multipliers: Mapping[tuple[int, int], Array] = field(default_factory=dict)
    shares: Mapping[tuple[Any, ...], Sequence[Array]] = field(default_factory=dict)


@dataclass(frozen=True)
class Solution:
    """A plan and a lower bound of all plans.

    seconds: inf if every plan needs an impossible boxing. exact: no plan is cheaper. proof: what gave the bound;
    None if there was nothing to choose.
    """

    labels: list[int]
    seconds: float
    lower_bound: float
    exact: bool
    proof: Proof | None = None

    @property
    def gap(self) -> float:
        """(seconds - bound) / seconds."""
        return 0.0 if self.exact else gap_of(self.seconds, self.lower_bound)


def gap_of(seconds: float, bound: float) -> float:
    """Returns (seconds - bound) / seconds; 1 if there is no plan."""
    if seconds == bound:
        return 0.0
    return 1.0 if math.isinf(seconds) else (seconds - bound) / seconds


def priced(problem: Problem, limits: Sequence[Limit], prices: Sequence[float]) -> Problem:
    """Returns the problem in which a label also pays for its weights in the limits (their Lagrangian).

    prices: seconds for all of a limit, so that a plan within the limits pays at most their sum. Costs that are equal
    for the same reasons are one array, as `fold` and the proof need it.
    """
    sums: dict[tuple[object, ...], Array] = {}
    variables = []
    for at, variable in enumerate(problem.variables):
        terms = [
            (limit.weights[at], price / limit.most)
            for limit, price in zip(limits, prices)
            if price and at in limit.weights
        ]
        key = (id(variable.costs), *((id(weights), price) for weights, price in terms))
        if key not in sums:
            sums[key] = sum((price * weights for weights, price in terms), variable.costs)
        variables.append(replace(variable, costs=sums[key]))
    return Problem(variables, problem.values)


def star(value: Value, labels: Labels) -> tuple[int, tuple[int, ...]]:
    """Returns the alias layout of `value`, and the layouts to which it is boxed from there, in the order of the
    consumers.

    Ties go to the layout in which the value is made, then to the lowest number.
    """
    source = int(value.out[labels[value.producer]])
    wanted = targets(value, labels)
    found = stars(value.closure, source, wanted)
    limit = float(found.min()) * (1 + SLACK)
    alias = source if found[source] <= limit else int(np.argmax(found <= limit))
    return alias, tuple(target for target in wanted if target != alias)


def targets(value: Value, labels: Labels) -> list[int]:
    """Returns the distinct layouts that consumers want and that differ from the one in which `value` is made."""
    source = int(value.out[labels[value.producer]])
    found = dict.fromkeys(int(wants[labels[at]]) for at, wants in value.consumers)
    found.pop(source, None)
    return list(found)


def stars(closure: Array, source: int, wanted: Sequence[int]) -> Array:
    """Returns the seconds of the star from `source` to the `wanted` layouts, for every alias [layouts]."""
    found = closure[source].copy()
    for target in wanted:  # the diagonal is 0: an alias that is wanted costs nothing more
        found += closure[:, target]
    return found


def total(problem: Problem, labels: Labels) -> float:
    """Returns the seconds of a plan: its labels and the stars of all values. This is the objective."""
    seconds = math.fsum(float(v.costs[label]) for v, label in zip(problem.variables, labels))
    return seconds + math.fsum(star_seconds(value, labels) for value in problem.values)


def star_seconds(value: Value, labels: Labels) -> float:
    """Returns the seconds of the cheapest star of `value`."""
    source = int(value.out[labels[value.producer]])
    wanted = targets(value, labels)
    if len(wanted) < 2:  # directly: an alias elsewhere would be a detour
        return float(value.closure[source, wanted[0]]) if wanted else 0.0
    return float(stars(value.closure, source, wanted).min())


def validate(problem: Problem) -> None:
    """Asserts that the arrays have the sizes and ranges stated above (the triangle inequality is not tested)."""
    for variable in {id(v.costs): v for v in problem.variables}.values():
        costs = variable.costs
        assert len(costs) and np.isfinite(costs).all() and costs.min() >= 0, (
            f"{variable.name}: no label, or a cost not finite or < 0"
        )
    for value in {id(v.closure): v for v in problem.values}.values():
        assert (value.closure >= 0).all() and not value.closure.diagonal().any(), (
            "a closure < 0, or not 0 on the diagonal"
        )
    for value in problem.values:
        same = all(len(layouts) == len(problem.variables[at].costs) for at, layouts in value.ends)
        assert same, f"a value of {problem.variables[value.producer].name}: one layout per label is needed"
