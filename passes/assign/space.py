"""Solves the layout problem of a graph, and proves how far from the best plan a plan may be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from networkx.utils import UnionFind
from torch.fx import Node

from sbpc.errors import PinError
from sbpc.graph.operands import operands, outputs_of, value_of
from sbpc.graph.repeats import REPEATS, runs
from sbpc.passes.assign.layout_problem import LayoutProblem
from sbpc.plans.chunk import Assignment
from sbpc.plans.plan import Plan
from sbpc.solver import Bounder, Problem, Proof, certify, checked_bound, solve, total
from sbpc.solver.fold import fold
from sbpc.solver.problem import gap_of
from sbpc.solver.surroundings import Surroundings

PARTS = torch.ops.aten.select.int, torch.ops.aten.slice.Tensor


class Space(LayoutProblem):
    """All plans of an annotated graph, and the proof of a bound of their seconds.

    Before: candidates on every node. After `solve`: a choice for every node, an alias layout for every value, a layout
    for every output. gap, multipliers: of what was solved last; no multipliers if it needed none.
    """

    gap = 1.0
    multipliers: Proof | None = None

    def solve(
        self, starts: Sequence[Assignment] = (), exact: bool = True, bounded: bool = True
    ) -> tuple[Assignment, float]:
        """Returns the cheapest assignment that was found, and a bound in seconds.

        starts: assignments than which it is not to be slower. exact: whether small problems are searched to the
        end. bounded: whether a bound is looked for; else it is 0. Raises PinError if no assignment has finite cost.
        """
        known = [self.labels(start) for start in starts]
        solution = solve(self.problem, known, self.classes(), self.classes(1), exact, bounded)
        labels = min([solution.labels, *known], key=lambda each: total(self.problem, each))
        seconds = total(self.problem, labels)
        if not np.isfinite(seconds):
            raise PinError("no boxing leads from one of these layouts to another\n  Remove pins one by one.")
        self.multipliers = solution.proof
        self.gap = gap_of(seconds, solution.lower_bound)
        return self.assignment(labels), solution.lower_bound

    def where_it_counts(self, parts: Mapping[str, float], other: float) -> Assignment:
        """Returns the cheapest assignment that was found where a boxing costs a part of its seconds: `parts`, by name
        of the call that makes its value, else `other`. Equal blocks but those at the ends are laid out alike."""
        counted = self.counted(parts, other)
        return self.assignment(solve(counted, (), self.classes(1), bounded=False).labels)

    def counted(self, parts: Mapping[str, float], other: float) -> Problem:
        """Returns the problem of `where_it_counts`."""
        classes, alike = self.classes(1), dict[tuple[int, int], list[float]]()
        places = [(classes[value.producer], index) for value, (_, index) in zip(self.values, self.keys)]
        for place, (node, _) in zip(places, self.keys):
            alike.setdefault(place, []).append(parts.get(node.name, other))
        values = [
            replace(value, closure=value.closure * float(np.mean(alike[place])))
            for value, place in zip(self.values, places)
        ]
        return Problem(self.variables, values)

    def moves(
        self, assignment: Assignment, waited: Container[str], parts: Mapping[str, float], other: float
    ) -> Iterator[Assignment]:
        """Yields the assignments in which one call that makes or reads what is boxed behind the calls `waited`, or
        that call of all equal blocks, is laid out otherwise; those first that cost least by `where_it_counts`."""
        labels, around = self.labels(assignment), Surroundings(self.counted(parts, other))
        near = {at for value, (node, _) in zip(self.values, self.keys) if node.name in waited for at, _ in value.ends}
        groups = dict[tuple[int, ...], None]()
        for classes in (self.classes(), self.classes(1)):
            members = defaultdict[int, list[int]](list)
            for at, number in enumerate(classes):
                members[number].append(at)
            groups |= {tuple(members[classes[at]]): None for at in sorted(near)}
        costs = {at: around.costs(at, labels) for at in sorted({at for group in groups for at in group})}
        found = dict[tuple[float, tuple[int, ...]], int]()
        for group in groups:
            before = sum(float(costs[at][labels[at]]) for at in group)
            for label, seconds in enumerate(np.sum([costs[at] for at in group], axis=0)):
                if np.isfinite(seconds) and any(labels[at] != label for at in group):
                    found.setdefault((float(seconds) - before, group), label)  # of equal ones the first
        for (_, group), label in sorted(found.items()):
            changed = [label if at in group else own for at, own in enumerate(labels)]
            if np.isfinite(total(self.problem, changed)):
                yield self.assignment(changed)

    def bound(self) -> float:
        """Returns a bound of all assignments, and keeps its multipliers."""
        bounder = Bounder(self.problem, fold(self.problem, self.classes()))
        self.multipliers = bounder.proof
        return bounder.bound

    def bound_apart(self) -> float:
        """Returns the bound without multipliers, the best one where boxing costs nothing: every label at its least."""
        self.multipliers = Proof(self.classes())
        return checked_bound(Problem(self.variables, []), self.multipliers)

    def seconds(self, assignment: Assignment) -> float:
        """Returns what an assignment takes, bytes for nothing."""
        return total(self.problem, self.labels(assignment))

    @property
    def proof(self) -> Proof:
        """The multipliers that bound all plans."""
        if self.multipliers is None:
            self.bound()
        assert self.multipliers is not None
        return self.multipliers

    @property
    def least(self) -> dict[str, float]:
        """By name of a call the seconds of its kernel at the fastest label."""
        calls = ((node, table) for node, table in zip(self.nodes, self.tables) if node.op == "call_function")
        return {node.name: float(self.seconds_of(node, table).min()) for node, table in calls}

    def check(self, assignment: Assignment, proof: Proof) -> tuple[float, float]:
        """Returns the seconds of an assignment of this space, and the bound that the multipliers give."""
        return self.seconds(assignment), checked_bound(self.problem, proof)

    def priced(self) -> tuple[Space, Problem, float]:
        """Returns this space and its problem, in which bytes cost nothing."""
        return self, self.problem, 0.0

    def certify(self, plan: Plan, limit: float) -> tuple[Plan | None, float]:
        """Returns no other plan, and a bound found in about `limit` CPU seconds; its multipliers are kept if they
        give a better one."""
        bound, proof = certify(self.problem, self.classes(1), self.seconds(plan.assignment), limit)
        if bound > checked_bound(self.problem, self.proof):
            self.multipliers = proof
        return None, bound

    def classes(self, apart: int = 0) -> list[int]:
        """Returns, by variable, the number of its class: calls at one place of repeated blocks, and what only they
        read.

        apart: so many blocks at either end of a run of blocks stay on their own.
        """
        known = (self.same_layouts or self).class_numbers
        if apart not in known:
            known[apart] = self.found_classes(apart)
        return known[apart]

    def found_classes(self, apart: int) -> list[int]:
        """Returns `classes`, found in the graph."""
        numbers: dict[Any, int] = {}
        keys = ((at, (*place, id(self.tables[at]))) for at, place in self.block_places(apart))
        classes = {at: numbers.setdefault(key, len(numbers)) for at, key in keys}
        stored: dict[int, list[tuple[int, int]]] = {
            at: [] for at, node in enumerate(self.nodes) if node.op != "call_function"
        }
        for key in self.keys:
            if (producer := self.number[key[0]]) in stored:
                stored[producer] += [(classes.get(at, -1 - at), place) for at, place in self.readers[key]]
        for at, taken in stored.items():
            if taken and all(number >= 0 for number, _ in taken):
                classes[at] = numbers.setdefault((*sorted(taken), id(self.tables[at])), len(numbers))
        return self.with_copies_tied([classes.get(at, len(numbers) + at) for at in range(len(self.variables))])

    def with_copies_tied(self, classes: list[int]) -> list[int]:
        """Returns the classes, those that hold copies of one call, one in each micro-batch, made one."""
        union = UnionFind(classes)
        for at, (node, number) in enumerate(zip(self.nodes, classes)):
            if "origin" in node.meta:
                union.union(number, (node.meta["origin"], id(self.tables[at])))
        numbers: dict[Any, int] = {}
        return [numbers.setdefault(union[number], len(numbers)) for number in classes]

    def block_places(self, apart: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yields the variables of calls in repeated blocks, with their run and place in a block."""
        calls = [at for at, node in enumerate(self.nodes) if node.op == "call_function"]
        for run in runs([self.token(at) for at in calls]):
            for place in range(run.start + apart * run.period, run.stop - apart * run.period):
                yield calls[place], (run.start, (place - run.start) % run.period)

    def token(self, at: int) -> tuple[Any, ...]:
        """Returns what a call is and what its operands are, as far as that is the same in equal blocks: each may take
        another part of a tensor, as time steps do, or another of many results."""
        node = self.nodes[at]
        producers = map(value_of, operands(node))
        return self.kind(node), *(
            (self.kind(node), index if outputs_of(node) < REPEATS else 0) for node, index in producers
        )

    def kind(self, node: Node) -> Any:
        """Returns what a node is, in whichever place it takes a part."""
        if node.target in PARTS:
            return node.target, node.args[1:2], tuple(node.meta["val"].shape)
        return id(self.tables[self.number[node]])
