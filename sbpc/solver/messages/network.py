"""The network on which messages are passed: variables and aliases are nodes, boxings are edges between their ports."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from sbpc.solver.messages.stars import Star
from sbpc.solver.problem import Problem
from sbpc.solver.subsets import distinct, has_alias

Name = tuple[int, int]  # of a node: (0, number of a variable), or (1, number of a value) for its alias


@dataclass(eq=False)
class NodePort:
    """Where an edge meets a node: the distinct layouts there, the place of each label's layout among them, and the messages
    to the node by layout. The port of a star has no labels."""

    node: int
    layouts: np.ndarray
    at: np.ndarray
    inbox: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass(eq=False)
class Edge:
    """A boxing between the port of an earlier node and that of a later one; seconds [first layouts, last layouts].

    If one end is a `star`, the star holds the seconds; branch: 0 for its producer, then its consumers.
    """

    first: NodePort
    last: NodePort
    seconds: np.ndarray
    star: Star | None = None
    branch: int = 0


@dataclass(eq=False)
class Side:
    """The edges of a node to earlier or to later nodes, and its ports there (none at a star).

    parts: by edge, how much of the node's belief it gets, at most 1 in all. cuts: by edge, which of the layouts of all ports
    are its own.
    """

    edges: list[Edge]
    ports: list[NodePort]
    parts: list[float]
    cuts: list[tuple[int, int]]

    def project(self, belief: np.ndarray) -> np.ndarray:
        """Returns the least part of the belief among the labels of each layout, port after port."""
        least = np.full(self.cuts[-1][1] if self.cuts else 0, np.inf, belief.dtype)
        for port, part, (start, stop) in zip(self.ports, self.parts, self.cuts):
            np.minimum.at(least[start:stop], port.at, belief.dtype.type(part) * belief)
        return least


@dataclass(eq=False)
class Node:
    """A variable or an alias.

    inbox: the messages over the earlier edges, then those over the later ones. gather [edges, labels]: places in the inbox.
    """

    costs: np.ndarray
    earlier: Side
    later: Side
    inbox: np.ndarray
    gather: np.ndarray

    def belief(self, inbox: np.ndarray) -> np.ndarray:
        """Returns costs and messages by label."""
        return self.costs + np.add.reduce(inbox[self.gather], axis=0) if len(self.gather) else self.costs.copy()


def order(problem: Problem) -> list[Name]:
    """Returns the nodes in the order of a sweep: variables as they stand, an alias after its producer."""
    names = [(at, 0, at) for at in range(len(problem.variables))]
    names += [(value.producer, 1, at) for at, value in enumerate(problem.values) if has_alias(value)]
    return [(kind, at) for _, kind, at in sorted(names)]


def port(node: int, layouts: np.ndarray) -> NodePort:
    """Returns the port of a node whose labels have these layouts."""
    return NodePort(node, *distinct(layouts))


def node(costs: np.ndarray, earlier: list[Edge], later: list[Edge], star: bool) -> Node:
    """Returns a node, and gives its ports their parts of its inbox. A star keeps its messages itself."""
    before = [] if star else [edge.last for edge in earlier]
    after = [] if star else [edge.first for edge in later]
    ports = before + after
    ends = list(itertools.accumulate((len(port.layouts) for port in ports), initial=0))
    inbox = np.zeros(ends[-1], costs.dtype)
    gather = np.zeros((len(ports), len(costs)), np.intp)
    for row, port, start, stop in zip(gather, ports, ends, ends[1:]):
        np.add(port.at, start, out=row)
        port.inbox = inbox[start:stop]
    sides = Side(earlier, before, [], cuts(before)), Side(later, after, [], cuts(after))
    return Node(costs, *sides, inbox, gather)


def cuts(ports: list[NodePort]) -> list[tuple[int, int]]:
    """Returns, by port, where its layouts begin and end if those of all ports stand side by side."""
    return list(itertools.pairwise(itertools.accumulate((len(port.layouts) for port in ports), initial=0)))


def paths(edges: list[Edge]) -> set[int]:
    """Returns the `id` of edges that form paths: at each node at most one earlier and one later one, shorter ones first."""
    starts, ends, found = set[int](), set[int](), set[int]()
    for edge in sorted(edges, key=lambda edge: (edge.last.node - edge.first.node, edge.first.node)):
        if edge.first.node not in starts and edge.last.node not in ends:
            starts.add(edge.first.node)
            ends.add(edge.last.node)
            found.add(id(edge))
    return found


def divide(nodes: list[Node], paths: set[int]) -> None:
    """Divides beliefs among edges. A node on a path gives half to the path and half to the rest; without paths, to each edge
    1 / (number of chains through the node), as TRW-S does."""
    for node in nodes:
        chains = max(len(node.earlier.edges), len(node.later.edges), 1)
        for side in (node.earlier, node.later):
            count = len(side.edges)
            if count > 1 and any(id(edge) in paths for edge in side.edges):
                side.parts = [0.5 if id(edge) in paths else 0.5 / (count - 1) for edge in side.edges]
            else:
                side.parts = [1 / max(count, 1) if paths else 1 / chains] * count
