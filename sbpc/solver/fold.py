"""Folding: repeated blocks are solved once. The variables of the folded problem are classes of variables of the
whole one.

Labels of classes cost the same in the folded problem as in the whole problem, where every member of a class takes
the label of its class: a star depends on the label of its producer and on the distinct layouts that are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from sbpc.solver.problem import Problem, Value, Variable
from sbpc.solver.proof import by_term, share_key

Slot = tuple[int, int]  # a class, and the number of the port where its members meet a value


@dataclass(eq=False)
class Bundle:
    """Values of the whole problem that run between the same classes, so that the folded problem has one value for them.

    slots: where they meet classes, the producer first. multiplicity: by slot, how many members of the class each value
    meets. count: how many values they are. closure: of one of them. share_key: of their cost shares, see `Proof`.
    """

    slots: list[Slot]
    multiplicity: list[int]
    count: int
    closure: np.ndarray
    share_key: tuple[Any, ...]


@dataclass(eq=False)
class Folded:
    """A folded problem.

    problem: a variable per class, a value per bundle. classes: by variable of the whole problem its class; members:
    by class its variables.
    """

    problem: Problem
    classes: list[int]
    members: list[list[int]]
    bundles: list[Bundle]

    @cached_property
    def sizes(self) -> list[int]:
        """By class how many members it has."""
        return list(map(len, self.members))

    @cached_property
    def trivial(self) -> bool:
        """Whether every class has one member, so that this is the whole problem."""
        return max(self.sizes) == 1

    def unfold(self, labels: Sequence[Any]) -> list[Any]:
        """Returns labels of the whole problem from labels of classes; so for anything else that is known by class."""
        return [labels[at] for at in self.classes]

    def fold(self, labels: Sequence[int]) -> list[int]:
        """Returns labels of classes from labels of the whole problem: those of the first members."""
        return [labels[group[0]] for group in self.members]


def repriced(folded: Folded, problem: Problem) -> Folded:
    """Returns the same folding of a problem with other label costs, which may differ within a class."""
    return replace(folded, problem=Problem(class_variables(problem, folded.members), folded.problem.values))


def fold(problem: Problem, classes: Sequence[int]) -> Folded:
    """Returns the problem in which variables of one number in `classes` are one; they must have the same ports and
    labels."""
    numbers: dict[int, int] = {}
    classes = [numbers.setdefault(number, len(numbers)) for number in classes]
    members: list[list[int]] = [[] for _ in numbers]
    for at, number in enumerate(classes):
        members[number].append(at)
    scaled: dict[tuple[int, int], np.ndarray] = {}  # one array for equal closures, as the messages look for them
    pairs = []
    for (one, groups), *others in by_term(problem.values, classes):
        count = 1 + len(others)
        if (id(one.closure), count) not in scaled:
            scaled[id(one.closure), count] = count * one.closure if count > 1 else one.closure
        slots = [(classes[one.producer], one.places[0]), *((number, place) for number, place, _ in groups)]
        readers = [(number, group[0][1]) for (number, _, _), group in groups.items()]
        bundle = Bundle(slots, [1, *map(len, groups.values())], count, one.closure, share_key(one, classes, groups))
        pairs.append(
            (
                Value(
                    slots[0][0], one.out, readers, scaled[id(one.closure), count], tuple(place for _, place in slots)
                ),
                bundle,
            )
        )
    pairs.sort(key=lambda pair: pair[0].producer)
    folded = Problem(class_variables(problem, members), [value for value, _ in pairs])
    return Folded(folded, classes, members, [bundle for _, bundle in pairs])


def class_variables(problem: Problem, classes: Sequence[Sequence[int]]) -> list[Variable]:
    """Returns a variable per class of variables: its costs are those of all members."""
    variables = []
    for numbers in classes:
        first, *others = members = [problem.variables[at] for at in numbers]
        assert all(len(member.costs) == len(first.costs) for member in others), f"{first.name}: other labels"
        if others and all(member.costs is first.costs for member in others):
            first = replace(first, costs=len(members) * first.costs)
        elif others:
            first = replace(first, costs=np.sum([member.costs for member in members], axis=0))
        variables.append(first)
    return variables
