"""Message passing for the layout problem: sequential tree-reweighted messages (TRW-S), a bound and labels from them.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006. The nodes are the variables
and, for every value with several consumers, an alias whose labels are layouts. An edge lies between two ports (a port
maps labels to layouts) and costs a boxing, so a message goes labels -> layouts (min) -> closure (min-plus) -> layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sbpc.solver.problem import Problem, Value


@dataclass(eq=False)
class Space:
    """What is still free: the labels of every variable and the alias layouts of every value that has an alias."""

    labels: list[np.ndarray]
    aliases: list[np.ndarray | None]

    @property
    def size(self) -> int:
        """The number of labels and alias layouts."""
        return sum(map(len, self.labels)) + sum(len(a) for a in self.aliases if a is not None)


def slots(value: Value) -> list[tuple[int, np.ndarray]]:
    """The consumers of `value` without those that want what an earlier one wants under every label."""
    found = {(at, wants.tobytes()): (at, wants) for at, wants in value.consumers}
    return list(found.values())


def shares(wanted: Sequence[np.ndarray], layouts: int) -> np.ndarray:
    """By layout: the part of the boxing from an alias that every consumer pays, such that the sum is a lower bound.

    `wanted`: for every consumer, the layouts that it may want. With m consumers that pay 1/(m-1) each, a boxing a -> t
    that k < m of them want costs k/(m-1) <= 1 times its price. If all m want t, the star costs closure[source, t] (any
    other alias is a detour), which is what alias = t costs here. So the cheapest star of shares never costs more than
    the true one. A layout that only k < m consumers can want at all needs no such argument: 1/k each.
    """
    count = np.zeros(layouts)
    for found in wanted:
        count[np.unique(found)] += 1
    return 1 / np.maximum(np.where(count == len(wanted), count - 1, count), 1)


@dataclass(eq=False)
class Port:
    """Where an edge meets a node: the layouts there, which of them each label has, the message to the node."""

    node: int
    layouts: np.ndarray
    at: np.ndarray
    inbox: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass(eq=False)
class Edge:
    """A boxing between the port of an earlier node and that of a later one, and its seconds [layouts, layouts]."""

    first: Port
    last: Port
    seconds: np.ndarray


@dataclass(eq=False)
class Side:
    """The edges of a node to one side: beliefs over its labels become beliefs over the layouts of all those ports."""

    edges: list[Edge]
    sorted: np.ndarray  # labels by layout, port after port
    starts: np.ndarray  # where each layout begins in `sorted`
    cuts: list[tuple[int, int]]  # by edge: its part of the layouts

    def project(self, belief: np.ndarray) -> np.ndarray:
        """The least belief of the labels of each layout, edge after edge."""
        return np.minimum.reduceat(belief[self.sorted], self.starts)


@dataclass(eq=False)
class Node:
    """A variable or an alias. The inbox holds the messages over the earlier edges, then those over the later ones."""

    costs: np.ndarray
    earlier: Side
    later: Side
    inbox: np.ndarray
    gather: np.ndarray  # [edges, labels] -> inbox
    weight: float  # 1 / how many chains run through

    def belief(self, inbox: np.ndarray) -> np.ndarray:
        """Costs and messages, by label."""
        return self.costs + inbox[self.gather].sum(0) if len(self.gather) else self.costs.copy()


class Messages:
    """TRW-S over the labels and layouts of `space`.

    share: whether a boxing that several consumers may want is divided among them (then `bound` is a lower bound of the
    problem on this space) or paid by each (then the model's cost of a plan is at least its true cost).
    """

    def __init__(self, problem: Problem, space: Space, cap: float, share: bool = True):
        self.problem, self.space, self.share, self.cap = problem, space, share, cap
        self.matrices: dict[tuple[int, bytes, bytes, bytes], np.ndarray] = {}
        self.names = order(problem, space)
        self.place = {name: place for place, name in enumerate(self.names)}
        self.edges = self.connect()
        by_node: list[tuple[list[Edge], list[Edge]]] = [([], []) for _ in self.names]
        for edge in self.edges:
            by_node[edge.last.node][0].append(edge)
            by_node[edge.first.node][1].append(edge)
        self.nodes = [node(len(self.free(name)), *sides) for name, sides in zip(self.names, by_node)]
        self.price([v.costs for v in problem.variables])
        self.buffer = np.empty(max((e.seconds.size for e in self.edges), default=0))

    def free(self, name: tuple[int, int]) -> np.ndarray:
        """The labels of a variable (0, number), the layouts of the alias of a value (1, number)."""
        found = self.space.labels[name[1]] if name[0] == 0 else self.space.aliases[name[1]]
        assert found is not None
        return found

    def price(self, costs: Sequence[np.ndarray]) -> None:
        """Let the labels cost this from now on; messages are kept, the bound begins anew."""
        for (kind, at), found in zip(self.names, self.nodes):
            if kind == 0:
                found.costs = costs[at][self.space.labels[at]]
        self.bound = -np.inf

    def connect(self) -> list[Edge]:
        """One edge for a value with one consumer; else one from the producer to the alias, and one to each consumer."""
        found = []
        for number, value in enumerate(self.problem.values):
            out = port(self.place[0, value.producer], value.out[self.space.labels[value.producer]])
            wanted = [port(self.place[0, at], wants[self.space.labels[at]]) for at, wants in slots(value)]
            alias = self.space.aliases[number]
            if alias is None:
                found += [self.edge(value, out, wants, None) for wants in wanted]
                continue
            weights = shares([wants.layouts for wants in wanted], len(value.closure)) if self.share else None
            middle = self.place[1, number]
            found.append(self.edge(value, out, port(middle, alias), None))
            found += [self.edge(value, port(middle, alias), wants, weights) for wants in wanted]
        return found

    def edge(self, value: Value, tail: Port, head: Port, weights: np.ndarray | None) -> Edge:
        """The edge over which `value` is boxed from the layouts of `tail` to those of `head`."""
        part = None if weights is None else weights[head.layouts]
        ends = tail.layouts.tobytes(), head.layouts.tobytes(), b"" if part is None else part.tobytes()
        key = (id(value.closure), *ends)
        if key not in self.matrices:
            seconds = np.minimum(value.closure[np.ix_(tail.layouts, head.layouts)], self.cap)
            self.matrices[key] = seconds if part is None else seconds * part
        seconds = self.matrices[key]
        return Edge(tail, head, seconds) if tail.node < head.node else Edge(head, tail, seconds.T)

    def forward(self) -> None:
        """Send messages from every node to the later ones, first node first."""
        for at in self.nodes:
            if not at.later.edges:
                continue
            sent = at.later.project(at.belief(at.inbox)) * at.weight
            sent -= at.inbox[len(at.inbox) - len(sent) :]
            for edge, (start, stop) in zip(at.later.edges, at.later.cuts):
                sums = self.buffer[: edge.seconds.size].reshape(edge.seconds.shape)
                np.add(edge.seconds, sent[start:stop, None], out=sums)
                np.minimum.reduce(sums, axis=0, out=edge.last.inbox)
                edge.last.inbox -= edge.last.inbox.min()

    def backward(self, beliefs: list[np.ndarray] | None = None) -> float:
        """Send messages to the earlier nodes, last node first; returns the bound, and appends to `beliefs` if given.

        Why it is a bound: with D(x) the belief of a node less its minimum, w its weight and e its earlier edges, the
        cost of a plan is the sum of all subtracted minima, plus over the nodes (1 - |e| w) D(x) with |e| w <= 1, plus
        over the edges (seconds - message to last + w D - message to first), of which the second message is the minimum.
        """
        bound = 0.0
        for at in reversed(self.nodes):
            belief = at.belief(at.inbox)
            least = float(belief.min())
            bound += least
            belief -= least
            if beliefs is not None:
                beliefs.append(belief)
            if not at.earlier.edges:
                continue
            sent = at.earlier.project(belief) * at.weight
            sent -= at.inbox[: len(sent)]
            for edge, (start, stop) in zip(at.earlier.edges, at.earlier.cuts):
                sums = self.buffer[: edge.seconds.size].reshape(edge.seconds.shape)
                np.add(edge.seconds, sent[start:stop], out=sums)
                np.minimum.reduce(sums, axis=1, out=edge.first.inbox)
                least = float(edge.first.inbox.min())
                edge.first.inbox -= least
                bound += least
        return bound

    def sweep(self) -> float:
        """One sweep forward and backward; returns the bound."""
        self.forward()
        self.bound = max(self.backward(), self.bound)
        return self.bound

    def bounds(self) -> list[np.ndarray]:
        """One more sweep; by node, a bound of all plans that have a label (or alias layout).

        When the backward sweep comes to a node, its belief is the sum of the min-marginals of the chains through it;
        all chains together cost at least the last bound, as no step of a sweep lowers it (Kolmogorov, theorem 2).
        """
        if np.isinf(self.bound):
            self.sweep()
        before, found = self.bound, list[np.ndarray]()
        self.forward()
        self.bound = max(self.backward(found), before)
        return [before + belief for belief in reversed(found)]

    def decode(self) -> list[int]:
        """Labels by variable, chosen node by node: own costs, boxings from the chosen earlier nodes, later messages."""
        chosen: list[int] = []
        for at in self.nodes:
            inbox = at.inbox.copy()
            for edge, (start, stop) in zip(at.earlier.edges, at.earlier.cuts):
                inbox[start:stop] = edge.seconds[edge.first.at[chosen[edge.first.node]]]
            chosen.append(int(at.belief(inbox).argmin()))
        return [int(labels[chosen[self.place[0, at]]]) for at, labels in enumerate(self.space.labels)]

    def restrict(self, space: Space) -> Messages:
        """The same messages over a part of the space."""
        found = Messages(self.problem, space, self.cap, self.share)
        for old, new in zip(self.edges, found.edges):
            new.first.inbox[:] = old.first.inbox[np.searchsorted(old.first.layouts, new.first.layouts)]
            new.last.inbox[:] = old.last.inbox[np.searchsorted(old.last.layouts, new.last.layouts)]
        return found


def order(problem: Problem, space: Space) -> list[tuple[int, int]]:
    """The nodes, (0, variable) or (1, value of an alias): variables as they stand, an alias after its producer."""
    names = [(at, 0, at) for at in range(len(problem.variables))]
    names += [(v.producer, 1, at) for at, v in enumerate(problem.values) if space.aliases[at] is not None]
    return [(kind, at) for _, kind, at in sorted(names)]


def port(node: int, layouts: np.ndarray) -> Port:
    """The port of a node whose labels have these layouts."""
    found, at = np.unique(layouts, return_inverse=True)
    return Port(node, found, at)


def node(labels: int, earlier: list[Edge], later: list[Edge]) -> Node:
    """A node and its inbox; its ports are told where their messages lie."""
    ports = [edge.last for edge in earlier] + [edge.first for edge in later]
    ends = np.cumsum([0, *(len(p.layouts) for p in ports)]).tolist()
    inbox = np.zeros(ends[-1])
    for found, start, stop in zip(ports, ends, ends[1:]):
        found.inbox = inbox[start:stop]
    gather = np.array([p.at + start for p, start in zip(ports, ends)]).reshape(len(ports), labels)
    return Node(
        np.zeros(labels),
        side(earlier, ports[: len(earlier)]),
        side(later, ports[len(earlier) :]),
        inbox,
        gather.astype(np.intp),
        1 / max(len(earlier), len(later), 1),
    )


def side(edges: list[Edge], ports: list[Port]) -> Side:
    """The edges of one side of a node, which meet it in `ports`."""
    if not edges:
        return Side([], np.zeros(0, np.intp), np.zeros(0, np.intp), [])
    labels = len(ports[0].at)
    runs = [np.argsort(p.at, kind="stable") for p in ports]
    starts = [np.searchsorted(p.at[run], np.arange(len(p.layouts))) for p, run in zip(ports, runs)]
    ends = np.cumsum([0, *(len(p.layouts) for p in ports)]).tolist()
    offset = [start + labels * number for number, start in enumerate(starts)]
    return Side(edges, np.concatenate(runs), np.concatenate(offset), list(zip(ends, ends[1:])))
