"""The network on which messages are passed: variables and aliases are nodes, boxings are edges between their ports."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from sbpc.solver.messages.stars import Star
from sbpc.solver.problem import Array, Problem

Name = tuple[int, int]  # of a node: (0, number of a variable), or (1, number of a value) for its alias


@dataclass(eq=False)
class NodePort:
    """Where an edge meets a node: the distinct layouts there, the place of each label's layout among them, and the
    messages to the node by layout. The port of a star has no labels."""

    node: int
    layouts: Array
    at: Array
    inbox: Array = field(default_factory=lambda: np.zeros(0))


@dataclass(eq=False)
class Boxings:
    """Seconds of boxings cut off at `big_m`, in the precision `real`; those between the same layouts are one array."""

    big_m: float
    real: type[np.floating]
    # by closure, with the closure, which is kept so that no other has its id; by closure and layouts
    closures: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    matrices: dict[tuple[int, bytes, bytes], Array] = field(default_factory=dict)

    def whole(self, closure: Array) -> Array:
        """Returns those between all layouts."""
        if id(closure) not in self.closures:
            seconds = np.empty(closure.shape, self.real)
            np.minimum(closure, self.big_m, out=seconds, casting="same_kind")
            self.closures[id(closure)] = closure, seconds
        return self.closures[id(closure)][1]

    def between(self, closure: Array, tail: Array, head: Array) -> Array:
        """Returns those from some layouts to others, ascending both."""
        seconds = self.whole(closure)
        if len(tail) == len(head) == len(seconds):
            return seconds
        key = (id(closure), tail.tobytes(), head.tobytes())
        if key not in self.matrices:
            self.matrices[key] = seconds.take(tail, 0).take(head, 1)
        return self.matrices[key]


@dataclass(eq=False)
class Edge:
    """A boxing between the port of an earlier node and that of a later one; seconds [first layouts, last layouts].

    If one end is a `star`, the star holds the seconds; branch: 0 for its producer, then its consumers.
    """

    first: NodePort
    last: NodePort
    seconds: Array
    star: Star | None = None
    branch: int = 0


@dataclass(eq=False)
class Node:
    """A variable or an alias, its edges to earlier and to later nodes. An alias that is a `star` keeps its messages
    there.

    inbox: the messages over the earlier edges, then those over the later ones. gather [edges, labels]: places in the
    inbox. parts: by edge, how much of the node's belief it gets, at most 1 in all of those on one side.
    """

    costs: Array
    earlier: list[Edge]
    later: list[Edge]
    star: Star | None
    inbox: Array
    gather: Array
    parts: list[float] = field(default_factory=list)

    def side(self, back: bool) -> Iterator[tuple[Edge, float]]:
        """Returns the edges to earlier or to later nodes with their parts."""
        return zip(self.earlier, self.parts) if back else zip(self.later, self.parts[len(self.earlier) :])

    def belief(self) -> Array:
        """Returns costs and messages by label; of a star [sources, aliases]."""
        return self.costs + np.add.reduce(self.inbox[self.gather], axis=0) if self.star is None else self.star.belief()

    def message(self, port: NodePort, part: float, belief: Array) -> Array:
        """Returns what is sent from a port: the least part of the belief among the labels of each layout, less what
        came from there."""
        least = np.full(len(port.layouts), np.inf, belief.dtype)
        np.minimum.at(least, port.at, belief.dtype.type(part) * belief)
        return least - port.inbox


def order(problem: Problem) -> list[Name]:
    """Returns the nodes in the order of a sweep: variables as they stand, an alias after its producer."""
    names = [(at, 0, at) for at in range(len(problem.variables))]
    names += [(value.producer, 1, at) for at, value in enumerate(problem.values) if value.has_alias]
    return [(kind, at) for _, kind, at in sorted(names)]


def node(costs: Array, earlier: list[Edge], later: list[Edge], star: Star | None) -> Node:
    """Returns a node, and gives its ports their parts of its inbox."""
    ports = [] if star else [edge.last for edge in earlier] + [edge.first for edge in later]
    starts = list(itertools.accumulate((len(port.layouts) for port in ports), initial=0))
    inbox = np.zeros(starts[-1], costs.dtype)
    gather = np.zeros((len(ports), len(costs)), np.intp)
    for row, port, start in zip(gather, ports, starts):
        np.add(port.at, start, out=row)
        port.inbox = inbox[start : start + len(port.layouts)]
    return Node(costs, earlier, later, star, inbox, gather)


def paths(edges: list[Edge]) -> set[int]:
    """Returns the `id` of edges that form paths: at each node at most one earlier and one later one, shorter ones
    first."""
    starts, ends, found = set[int](), set[int](), set[int]()
    for edge in sorted(edges, key=lambda edge: (edge.last.node - edge.first.node, edge.first.node)):
        if edge.first.node not in starts and edge.last.node not in ends:
            starts.add(edge.first.node)
            ends.add(edge.last.node)
            found.add(id(edge))
    return found


def divide(nodes: list[Node], paths: set[int]) -> None:
    """Divides beliefs among edges. A node on a path gives half to the path and half to the rest; without paths, to
    each edge 1 / (number of chains through the node), as TRW-S does."""
    for node in nodes:
        chains, node.parts = max(len(node.earlier), len(node.later)), []
        for edges in (node.earlier, node.later):
            count, on_path = len(edges), [id(edge) in paths for edge in edges]
            if count > 1 and any(on_path):
                node.parts += [0.5 if on else 0.5 / (count - 1) for on in on_path]
            else:
                node.parts += [1 / (count if paths else chains)] * count if count else []
