"""The network that messages are passed on: variables and aliases as nodes, boxings as edges between their ports."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from sbpc.solver.least import least_of_runs
from sbpc.solver.problem import Problem, Value
from sbpc.solver.share import Star


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
    """The distinct consumers of `value`."""
    return [value.consumers[number] for number in value.distinct]


def aliased(value: Value) -> bool:
    """Whether the star of a value has a node of its own: not where one other variable consumes it."""
    found = slots(value)
    return len(found) > 1 or any(at == value.producer for at, _ in found)


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
    star: Star | None = None  # at one of the ends, instead of `seconds`
    branch: int = 0  # of the star: 0 its producer, then its consumers


@dataclass(eq=False)
class Side:
    """The edges of a node to one side: beliefs over its labels become beliefs over the layouts of all those ports."""

    edges: list[Edge]
    sorted: np.ndarray  # labels by layout, port after port
    starts: np.ndarray  # where each layout begins in `sorted`
    run: np.ndarray  # the number of the layout of each of `sorted`
    cuts: list[tuple[int, int]]  # by edge: its part of the layouts

    def project(self, belief: np.ndarray, heat: float) -> np.ndarray:
        """The least belief of the labels of each layout, edge after edge."""
        return least_of_runs(belief[self.sorted], self.starts, self.run, heat)


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
        return self.costs + np.add.reduce(inbox[self.gather], axis=0) if len(self.gather) else self.costs.copy()

    def lay(self, inbox: np.ndarray) -> None:
        """Take this memory for the messages; the ports are told."""
        self.inbox, at = inbox, 0
        for found in self.ports if len(self.gather) else ():
            found.inbox = inbox[at : at + len(found.layouts)]
            at += len(found.layouts)

    @property
    def ports(self) -> list[Port]:
        """Where messages come in: over the earlier edges, then over the later ones."""
        return [edge.last for edge in self.earlier.edges] + [edge.first for edge in self.later.edges]


def order(problem: Problem, space: Space) -> list[tuple[int, int]]:
    """The nodes, (0, variable) or (1, value of an alias): variables as they stand, an alias after its producer."""
    names = [(at, 0, at) for at in range(len(problem.variables))]
    names += [(v.producer, 1, at) for at, v in enumerate(problem.values) if space.aliases[at] is not None]
    return [(kind, at) for _, kind, at in sorted(names)]


def port(node: int, layouts: np.ndarray) -> Port:
    """The port of a node whose labels have these layouts."""
    return Port(node, *distinct(layouts))


def distinct(layouts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The layouts that there are, and the place of each among them; as np.unique says it, in a third of the time."""
    seen = np.zeros(int(layouts.max(initial=-1)) + 1, dtype=bool)
    seen[layouts] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[layouts]


def node(costs: np.ndarray, earlier: list[Edge], later: list[Edge], star: bool = False) -> Node:
    """A node and its inbox; its ports are told where their messages lie. A star has messages of its own."""
    if star:
        none = np.zeros(0, np.intp)
        before, after = (Side(edges, none, none, none, [(0, 0)] * len(edges)) for edges in (earlier, later))
        return Node(costs, before, after, np.zeros(0, costs.dtype), none, 1 / max(len(earlier), len(later)))
    ports = [edge.last for edge in earlier] + [edge.first for edge in later]
    ends = np.cumsum([0, *(len(p.layouts) for p in ports)]).tolist()
    gather = np.array([p.at + start for p, start in zip(ports, ends)]).reshape(len(ports), len(costs))
    found = Node(
        costs,
        side(earlier, ports[: len(earlier)]),
        side(later, ports[len(earlier) :]),
        np.zeros(0, costs.dtype),
        gather.astype(np.intp),
        1 / max(len(earlier), len(later), 1),
    )
    found.lay(np.zeros(ends[-1], costs.dtype))
    return found


def side(edges: list[Edge], ports: list[Port]) -> Side:
    """The edges of one side of a node, which meet it in `ports`."""
    if not edges:
        none = np.zeros(0, np.intp)
        return Side([], none, none, none, [])
    labels = len(ports[0].at)
    runs = [np.argsort(p.at, kind="stable") for p in ports]
    starts = [np.searchsorted(p.at[run], np.arange(len(p.layouts))) for p, run in zip(ports, runs)]
    ends = np.cumsum([0, *(len(p.layouts) for p in ports)]).tolist()
    offset = [start + labels * number for number, start in enumerate(starts)]
    layouts = [start + p.at[run] for p, run, start in zip(ports, runs, ends)]
    return Side(edges, np.concatenate(runs), np.concatenate(offset), np.concatenate(layouts), list(itertools.pairwise(ends)))
