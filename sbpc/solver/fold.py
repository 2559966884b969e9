"""Equal variables solved as one: a problem whose variables are classes, and in which every cost is paid as often as it is.

Labels of the folded problem, given to all members of their classes, cost the same there as in the whole problem: a star
depends on the label of its producer and on the distinct layouts that are wanted, and tied consumers want one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbpc.solver.check import Terms
from sbpc.solver.problem import Problem, Value, Variable

Slot = tuple[int, int]  # a class, and the number of the port where its members meet a value


@dataclass(eq=False)
class Kind:
    """Values that run between the same classes: the number of its value in the folded problem, and how many they are.

    slots: where the value of the folded problem meets its variables, the producer first; by slot `many` members of the
    class per value.
    """

    slots: list[Slot]
    many: list[int]
    count: int
    closure: np.ndarray  # of one value


@dataclass(eq=False)
class Folded:
    """The folded problem, the class of every variable of the whole, and the sizes of the classes. terms: what the check of a
    bound has found of the whole."""

    problem: Problem
    classes: list[int]
    sizes: list[int]
    kinds: list[Kind]
    terms: Terms | None = None

    def unfold(self, labels: Sequence[Any]) -> list[Any]:
        """The labels of the whole problem, or what else is known by class."""
        return [labels[at] for at in self.classes]

    def fold(self, labels: Sequence[int]) -> list[int]:
        """Labels of classes: those of their first members."""
        found: dict[int, int] = {}
        for at, label in zip(self.classes, labels):
            found.setdefault(at, label)
        return [found[at] for at in range(len(self.sizes))]


def fold(problem: Problem, alike: Sequence[int]) -> Folded:
    """The problem with variables of one number in `alike` tied; such variables must have the same ports and labels."""
    numbers: dict[int, int] = {}
    classes = [numbers.setdefault(number, len(numbers)) for number in alike]
    members: list[list[int]] = [[] for _ in numbers]
    for at, number in enumerate(classes):
        members[number].append(at)
    variables = []
    for group in members:
        first = problem.variables[group[0]]
        assert all(len(problem.variables[at].costs) == len(first.costs) for at in group), f"{first.name}: other labels"
        same = all(problem.variables[at].costs is first.costs for at in group)
        costs = len(group) * first.costs if same else np.sum([problem.variables[at].costs for at in group], axis=0)
        variables.append(Variable(first.name, costs if len(group) > 1 else first.costs, first.digits))
    groups: dict[tuple[object, ...], list[Value]] = {}
    merged: dict[tuple[object, ...], tuple[list[Slot], list[int], list[np.ndarray]]] = {}
    for value in problem.values:
        key, about = signature(value, classes)
        merged.setdefault(key, about)
        groups.setdefault(key, []).append(value)

    @functools.cache
    def scaled(closure: int, count: int) -> np.ndarray:
        return count * closures[closure] if count > 1 else closures[closure]

    closures = {id(value.closure): value.closure for value in problem.values}
    values, kinds = [], []
    for key, alike_values in groups.items():
        slots, many, wants = merged[key]
        consumers = [(slot[0], wanted) for slot, wanted in zip(slots[1:], wants)]
        places = tuple(place for _, place in slots)
        one, count = alike_values[0], len(alike_values)
        values.append(Value(slots[0][0], one.out, consumers, scaled(id(one.closure), count), places))
        kinds.append(Kind(slots, many, count, one.closure))
    order = sorted(range(len(values)), key=lambda at: values[at].producer)
    return Folded(
        Problem(variables, [values[at] for at in order]),
        classes,
        [len(group) for group in members],
        [kinds[at] for at in order],
    )


def signature(
    value: Value, classes: Sequence[int]
) -> tuple[tuple[object, ...], tuple[list[Slot], list[int], list[np.ndarray]]]:
    """What values have in common that fold into one; its slots, how many members each has, and what these want."""
    found: dict[tuple[int, int, int], np.ndarray] = {}
    takers: dict[tuple[int, int, int], int] = {}
    seen: dict[int, list[np.ndarray]] = {}
    for (at, wants), place in zip(value.consumers, value.places[1:]):
        before = seen.setdefault(at, [])
        if not any(np.array_equal(wants, other) for other in before):
            before.append(wants)
            name = classes[at], place, id(wants)
            found.setdefault(name, wants)
            takers[name] = takers.get(name, 0) + 1
    slots = [(classes[value.producer], value.places[0]), *((number, place) for number, place, _ in found)]
    counts = [1, *takers.values()]
    key = (id(value.closure), id(value.out), slots[0], *((*name, many) for name, many in zip(found, counts[1:])))
    return key, (slots, counts, list(found.values()))
