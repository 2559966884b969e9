"""Subsets of the labels: what a program or the messages may still choose from."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sbpc.solver.problem import Array, Labels, Problem, Value, star


@dataclass(eq=False)
class Subset:
    """The labels that each variable may take, and the alias layouts that each value with an alias may take
    (ascending)."""

    labels: list[Array]
    aliases: list[Array | None]

    @property
    def size(self) -> int:
        """The number of labels and alias layouts."""
        return sum(map(len, self.labels)) + sum(len(a) for a in self.aliases if a is not None)


def distinct(layouts: Array) -> tuple[Array, Array]:
    """Returns the distinct layouts, ascending, and the place of each layout among them, which no one may change: blocks
    that repeat share them."""
    return distinct_in(layouts.tobytes(), layouts.dtype)


@functools.lru_cache(maxsize=1 << 12)
def distinct_in(data: bytes, dtype: np.dtype) -> tuple[Array, Array]:
    """Returns what `distinct` does of these bytes: np.unique in a third of its time."""
    layouts = np.frombuffer(data, dtype)
    seen = np.zeros(int(layouts.max(initial=-1)) + 1, dtype=bool)
    seen[layouts] = True
    found = np.flatnonzero(seen), (np.cumsum(seen) - 1)[layouts]
    for each in found:
        each.flags.writeable = False
    return found


def everything(problem: Problem) -> Subset:
    """Returns all labels and all alias layouts."""
    aliases = [np.arange(len(value.closure)) if value.has_alias else None for value in problem.values]
    return Subset([np.arange(len(variable.costs)) for variable in problem.variables], aliases)


def around(problem: Problem, plans: Sequence[Labels], *labels: Sequence[Array]) -> Subset:
    """Returns the labels of all `plans` and those in `labels` (each a list by variable), with the aliases that they
    need."""
    union = [np.unique(np.concatenate([*map(np.atleast_1d, each)])) for each in zip(*plans, *labels)]
    return Subset(union, [aliases_for(value, union, plans) for value in problem.values])


def aliases_for(value: Value, labels: Sequence[Array], plans: Sequence[Labels]) -> Array | None:
    """Returns the layouts at the ports of `value` under `labels`, and its aliases in `plans`; None if it has no
    alias."""
    if not value.has_alias:
        return None
    layouts = [layouts[labels[at]] for at, layouts in value.distinct_ends]
    return np.unique(np.concatenate([*layouts, [star(value, plan)[0] for plan in plans]]).astype(np.intp))


def least_reduced(reduced_costs: Sequence[Array], each: int) -> list[Array]:
    """Returns, by variable, the labels with the least reduced costs: about `each` a variable on average, at most so
    many of one."""
    every, size = np.concatenate(reduced_costs), each * len(reduced_costs)
    limit = min(np.partition(every, size)[size] if size < len(every) else np.inf, np.finfo(float).max)
    first = [np.argsort(costs, kind="stable")[:each] for costs in reduced_costs]
    return [labels[costs[labels] <= limit] for labels, costs in zip(first, reduced_costs)]
