"""Nodes at the end of one edge, or between two, need no messages: the least that they cost falls on what they touch.

A node of one edge adds to the costs of its neighbour by layout there; a node of two edges makes one edge of both: the reductions
RI and RII of partitioned boolean quadratic problems (Scholz and Eckstein, Register allocation for irregular architectures, 2002). The
cheapest plans and the best bounds are the same, of half as many nodes. What the nodes left out would have been told is
found from the messages around them, the node that was left out last first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sbpc.solver.network import Edge, Port, aliased, port, slots
from sbpc.solver.problem import Problem, Value

MOST = 1 << 16  # sums, at most, to make one edge of two: with more it takes longer than the messages that it saves


@dataclass(eq=False)
class Inner:
    """A node that is left out: its number, what its labels cost, with what falls on them, and by edge, that of the earlier
    neighbour first, the seconds [layouts there, its layouts], the port of the neighbour, and its own. joined: the edge in
    the place of two."""

    node: int
    costs: np.ndarray
    sides: list[tuple[np.ndarray, Port, Port]]
    joined: Edge | None = None

    @property
    def size(self) -> int:
        """How many sums the edge in the place of two takes, about."""
        return math.prod(len(theirs.layouts) for _, theirs, _ in self.sides) * len(self.sides[1][2].layouts)

    def hear(self, pulls: Sequence[np.ndarray]) -> list[np.ndarray]:
        """By edge the message to it, by layout; pulls: what each neighbour sends, by layout."""
        return [(seconds + pull[:, None]).min(0) for (seconds, _, _), pull in zip(self.sides, pulls)]

    def choose(self, chosen: Sequence[int]) -> int:
        """The best label where its neighbours have the labels `chosen`."""
        belief = self.costs.copy()
        for seconds, theirs, own in self.sides:
            belief += seconds[theirs.at[chosen[theirs.node]]][own.at]
        return int(belief.argmin())


def contract(
    edges: Sequence[Edge], costs: list[np.ndarray], fixed: Container[int], cap: float, known: Sequence[int] | None = None
) -> tuple[list[Edge], list[Inner]]:
    """The edges that are left, and the nodes that are not, in their order; what falls on a node is added to its `costs`.

    Nodes that touch a star stay, those of two edges to one neighbour, and those of which the edge in the place of two takes
    too long. fixed: the stars. cap: what an edge costs at most. known: the nodes to leave out, in an order in which that was
    done with the same edges. Equal blocks are made of the same arrays: what those come to is found once.
    """
    most = np.array(cap, costs[0].dtype if costs else float)
    sums: dict[tuple[Any, ...], tuple[np.ndarray, ...]] = {}

    def once(find: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
        key = (find, *map(memory, arrays))
        if key not in sums:
            sums[key] = find(*arrays), *arrays  # which are kept, so that no other array takes their place
        return sums[key][0]

    around: list[list[Edge]] = [[] for _ in costs]
    for edge in edges:
        around[edge.first.node].append(edge)
        around[edge.last.node].append(edge)
    found: list[Inner] = []
    todo = deque(range(len(costs)) if known is None else known)
    while todo:
        at = todo.popleft()
        if at in fixed or not 1 <= len(around[at]) <= 2 or any(edge.star is not None for edge in around[at]):
            continue
        sides = sorted((seen(edge, at) for edge in around[at]), key=lambda side: side[1].node)
        inner = Inner(at, costs[at], sides)
        neighbours = [theirs.node for _, theirs, _ in inner.sides]
        if len(neighbours) == 1:
            (seconds, theirs, own), (other,) = inner.sides[0], neighbours
            costs[other] = once(fallen, costs[other], theirs.at, seconds, inner.costs, own.at)
        else:
            if neighbours[0] == neighbours[1] or inner.size > MOST:
                continue
            (here, one, to_one), (there, last, to_last) = inner.sides
            seconds = once(joint, here, to_one.at, inner.costs, there, to_last.at, most)
            inner.joined = Edge(one, last, seconds)
        for other in neighbours:
            around[other] = [edge for edge in around[other] if edge not in around[at]]
            around[other] += [inner.joined] if inner.joined is not None else []
            if known is None:
                todo.append(other)
        around[at] = []
        found.append(inner)
    return [edge for at, met in enumerate(around) for edge in met if edge.first.node == at], found


def seen(edge: Edge, at: int) -> tuple[np.ndarray, Port, Port]:
    """Seconds [layouts of the neighbour, own layouts], the port of the neighbour and the own one, as node `at` sees an edge."""
    if edge.last.node == at:
        return edge.seconds, edge.first, edge.last
    return edge.seconds.T, edge.last, edge.first


def memory(array: np.ndarray) -> tuple[Any, ...]:
    """What arrays that are the same have in common, and no others as long as both are kept."""
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype


def fallen(theirs: np.ndarray, at: np.ndarray, seconds: np.ndarray, costs: np.ndarray, own: np.ndarray) -> np.ndarray:
    """What the labels of a neighbour cost, `theirs`, with what a node of one edge costs at least: `costs` by label. at, own: the
    layouts of their labels; seconds [layouts there, its layouts]."""
    return theirs + (seconds + least_of(costs, own, seconds.shape[1])).min(1)[at]


def joint(here: np.ndarray, to_one: np.ndarray, costs: np.ndarray, there: np.ndarray, to_other: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Seconds of the edge between two neighbours of a node, the least over its labels but `most` at most. to_one, to_other: their
    layouts; here, there: seconds [layouts of the neighbour, its layouts]."""
    by_label = here[:, to_one] + costs
    order = np.argsort(to_other, kind="stable")
    starts = np.searchsorted(to_other[order], np.arange(there.shape[1]))
    over = np.minimum.reduceat(by_label[:, order], starts, axis=1)
    return np.minimum((over[:, None, :] + there).min(2), most)


def least_by(costs: np.ndarray, port: Port) -> np.ndarray:
    """The least of what the labels of a node cost, by layout at a port."""
    return least_of(costs, port.at, len(port.layouts))


def least_of(costs: np.ndarray, layouts: np.ndarray, many: int) -> np.ndarray:
    """The same; layouts: of the labels, so many in all."""
    found = np.full(many, np.inf, costs.dtype)
    np.minimum.at(found, layouts, costs)
    return found


@dataclass(eq=False)
class Shrunk:
    """A problem without the variables that lie between others or at an end: what they cost at least falls on those that are left.

    kept: the variables that are left, by their numbers in the whole problem; inner: the others.
    """

    whole: Problem
    problem: Problem
    kept: list[int]
    inner: list[Inner]

    def part(self, found: Sequence[Any]) -> list[Any]:
        """Labels of the whole problem, or what else is known by variable, of those that are left."""
        return [found[at] for at in self.kept]

    def expand(self, labels: Sequence[int]) -> list[int]:
        """The labels of the whole problem."""
        found = [0] * len(self.whole.variables)
        for at, label in zip(self.kept, labels):
            found[at] = label
        for inner in reversed(self.inner):
            found[inner.node] = inner.choose(found)
        return found


def shrink(problem: Problem, cap: float) -> Shrunk:
    """The problem without variables that only values with one consumer meet, at most two of them. cap: what falls
    on a label, or a boxing made of several costs at most, where it is impossible: more than any plan."""
    direct: dict[int, tuple[Edge, Value]] = {}
    left, fixed = [], set[int]()
    for value in problem.values:
        taken = slots(value)
        if not taken:
            continue
        tail, head = port(value.producer, value.out), port(*taken[0])
        if aliased(value) or len(tail.layouts) * len(head.layouts) > MOST:
            left.append(value)
            fixed |= {value.producer, *(at for at, _ in taken)}
            continue
        seconds = np.minimum(value.closure[np.ix_(tail.layouts, head.layouts)], cap)
        edge = Edge(tail, head, seconds) if tail.node < head.node else Edge(head, tail, seconds.T)
        direct[id(edge)] = edge, value
    costs = [variable.costs for variable in problem.variables]
    edges, inner = contract([edge for edge, _ in direct.values()], costs, fixed, cap)
    gone = {found.node for found in inner}
    kept = [at for at in range(len(costs)) if at not in gone]
    number = {at: place for place, at in enumerate(kept)}

    def moved(value: Value) -> Value:
        return replace(value, producer=number[value.producer], consumers=[(number[at], wants) for at, wants in value.consumers])

    left += [direct[id(edge)][1] if id(edge) in direct else joined(edge) for edge in edges]
    variables = [replace(problem.variables[at], costs=costs[at]) for at in kept]
    return Shrunk(problem, Problem(variables, [moved(value) for value in left]), kept, inner)


def joined(edge: Edge) -> Value:
    """The value that costs what an edge does: it is made in layouts of its first port, and wanted in others, of the last."""
    one, other = edge.seconds.shape
    closure = np.full((one + other, one + other), np.inf)
    closure[:one, one:] = edge.seconds
    np.fill_diagonal(closure, 0.0)
    return Value(edge.first.node, edge.first.at, [(edge.last.node, one + edge.last.at)], closure)
