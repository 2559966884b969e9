"""The layout problem: one label per variable; label costs plus, for every value, the cheapest star of boxings are paid.

A value is made in one layout by its producer and wanted in a layout by each consumer. Who wants the layout in which it
is made takes it as it is. For the others it is boxed once to an *alias* layout, and from there once to every distinct
layout that a consumer wants: equal boxings of a value are shared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sbpc.solver.check import Proof

SLACK = 1e-12  # relative: costs that differ by less are ties


@dataclass(eq=False)
class Variable:
    """What takes one of its labels: `costs` [labels] in seconds; `digits` [labels, axes], the choice per axis."""

    name: str
    costs: np.ndarray
    digits: np.ndarray


@dataclass(eq=False)
class Value:
    """What `producer` makes in layout `out[label]` and consumer `(variable, wants)` takes in `wants[label]`.

    closure [layouts, layouts]: seconds of the cheapest boxing from row to column; 0 on the diagonal, inf where there is
    none, never more than a detour over a third layout (the triangle inequality, on which the bounds rest).
    places: the number of the port at the producer, then those at the consumers; no variable has a number twice. Equal
    variables have equal ports under equal numbers, or they are not folded.
    """

    producer: int
    out: np.ndarray
    consumers: list[tuple[int, np.ndarray]]
    closure: np.ndarray
    places: tuple[int, ...] = ()

    @functools.cached_property
    def distinct(self) -> list[int]:
        """Which consumers do not want what an earlier one wants under every label."""
        found: dict[tuple[int, bytes], int] = {}
        for number, (at, wants) in enumerate(self.consumers):
            found.setdefault((at, wants.tobytes()), number)
        return list(found.values())


@dataclass(eq=False)
class Problem:
    """Variables, and the values that run between them; best in an order in which producers come before consumers."""

    variables: list[Variable]
    values: list[Value]


@dataclass(frozen=True, eq=False)
class Limit:
    """What labels may take together: `weights` [labels] by number of a variable sum to at most `most`."""

    weights: Mapping[int, np.ndarray]
    most: float


@dataclass(frozen=True)
class Solution:
    """Labels, what they cost, and a bound below which no labels cost.

    `seconds` is inf if no labels without an impossible boxing were found, and if `exact` then there are none.
    `exact`: nothing is cheaper, and `lower_bound` equals `seconds`. extra: by variable and label, about how far a plan with
    the label is from the bound; None where that was not needed.
    """

    labels: list[int]
    seconds: float
    lower_bound: float
    exact: bool
    proof: Proof | None = None
    extra: list[np.ndarray] | None = None

    @property
    def gap(self) -> float:
        """(seconds - bound) / seconds."""
        if self.exact or self.seconds == self.lower_bound:
            return 0.0
        return 1.0 if math.isinf(self.seconds) else (self.seconds - self.lower_bound) / self.seconds


def charged(problem: Problem, limits: Sequence[Limit], prices: Sequence[float]) -> Problem:
    """The problem in which labels also pay for what they take of limits, the price of a limit for all of it: a plan that keeps
    them pays no more than the sum of prices. Costs that are equal for the same reasons are one array."""
    sums: dict[tuple[object, ...], np.ndarray] = {}
    variables = []
    for at, variable in enumerate(problem.variables):
        taken = [(limit.weights[at], price / limit.most) for limit, price in zip(limits, prices) if price and at in limit.weights]
        key = (id(variable.costs), *((id(weights), price) for weights, price in taken))
        if key not in sums:
            costs = variable.costs
            for weights, price in taken:
                costs = costs + price * weights
            sums[key] = costs
        variables.append(replace(variable, costs=sums[key]))
    return Problem(variables, problem.values)


def split_by_costs(problem: Problem, classes: Sequence[int]) -> list[int]:
    """Classes of variables of which the members have the same array of costs: those given, and parts of them."""
    numbers: dict[tuple[int, int], int] = {}
    return [
        numbers.setdefault((number, id(v.costs)), len(numbers)) for number, v in zip(classes, problem.variables)
    ]


def star(value: Value, labels: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The alias layout of `value`, and the layouts to which it is boxed from there, in the order of the consumers.

    Among aliases that cost the same: the layout in which the value is made, then the lowest number.
    """
    source = int(value.out[labels[value.producer]])
    wanted = targets(value, labels)
    found = stars(value.closure, source, wanted)
    limit = float(found.min()) * (1 + SLACK)
    alias = source if found[source] <= limit else int(np.argmax(found <= limit))
    return alias, tuple(target for target in wanted if target != alias)


def targets(value: Value, labels: Sequence[int]) -> list[int]:
    """The distinct layouts other than that in which `value` is made that its consumers want, in their order."""
    source = int(value.out[labels[value.producer]])
    found = dict.fromkeys(int(wants[labels[at]]) for at, wants in value.consumers)
    found.pop(source, None)
    return list(found)


def stars(closure: np.ndarray, source: int, wanted: Sequence[int]) -> np.ndarray:
    """Seconds of the star from `source` to the `wanted` layouts, for every alias [layouts]."""
    found = closure[source].copy()
    for target in wanted:  # the diagonal is 0: an alias that is wanted costs nothing more
        found += closure[:, target]
    return found


def total(problem: Problem, labels: Sequence[int]) -> float:
    """Seconds of the plan: the costs of the labels and of the stars of all values. This is what `solve` minimises."""
    seconds = math.fsum(float(v.costs[label]) for v, label in zip(problem.variables, labels))
    return seconds + math.fsum(star_seconds(value, labels) for value in problem.values)


def star_seconds(value: Value, labels: Sequence[int]) -> float:
    """Seconds of the cheapest star of `value`."""
    source = int(value.out[labels[value.producer]])
    wanted = targets(value, labels)
    if len(wanted) < 2:  # directly: an alias elsewhere would be a detour
        return float(value.closure[source, wanted[0]]) if wanted else 0.0
    return float(stars(value.closure, source, wanted).min())


def check(problem: Problem) -> None:
    """Assert that the arrays have the sizes and ranges stated above (the triangle inequality is not tested)."""
    count = [len(v.costs) for v in problem.variables]
    checked: set[tuple[int, ...]] = set()  # arrays by number: equal variables and values share them

    def new(*of: object) -> bool:
        found = tuple(map(id, of))
        seen = found in checked
        checked.add(found)
        return not seen

    for variable in problem.variables:
        assert variable.costs.ndim == 1 and len(variable.costs) > 0, f"{variable.name} has no label"
        costs = variable.costs
        if new(costs):
            assert np.isfinite(costs).all() and (costs >= 0).all(), f"{variable.name} has a cost that is not finite or < 0"
        assert variable.digits.shape[:1] == variable.costs.shape and variable.digits.ndim == 2, variable.name
    for value in problem.values:
        at, closure = f"a value of {problem.variables[value.producer].name}", value.closure
        if new(closure):
            assert closure.ndim == 2 and closure.shape[0] == closure.shape[1], f"{at}: closure of shape {closure.shape}"
            assert (closure >= 0).all() and not closure.diagonal().any(), f"{at}: closure < 0, or not 0 on the diagonal"
        for variable_at, layouts in [(value.producer, value.out), *value.consumers]:
            assert layouts.shape == (count[variable_at],), f"{at}: one layout per label is needed"
            if new(layouts, closure):
                assert layouts.min() >= 0 and layouts.max() < len(closure), f"{at}: no such layout"
