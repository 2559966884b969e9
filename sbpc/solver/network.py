"""The network that messages are passed on: variables and aliases as nodes, boxings as edges between their ports."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sbpc.solver.least import least_of_runs
from sbpc.solver.problem import Problem, Value
from sbpc.solver.share import Star

SHORT = 256  # labels of a port, at most, of which the layouts are found once


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
    """The edges of a node to one side, and the ports where they meet it: none at a star."""

    edges: list[Edge]
    ports: list[Port]
    parts: list[float]  # of what the node says, by edge; see paths.py

    def project(self, belief: np.ndarray, heat: float) -> np.ndarray:
        """The least part of the belief of the labels of each layout, edge after edge."""
        parts = np.repeat(np.array(self.parts, belief.dtype), len(belief))
        return least_of_runs(belief[self.sorted[0]] * parts, *self.sorted[1:], heat)

    @functools.cached_property
    def sorted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Labels by layout, port after port; where each layout begins among them; the number of the layout of each of them."""
        labels = len(self.ports[0].at)
        runs = [np.argsort(p.at, kind="stable") for p in self.ports]
        starts = [np.searchsorted(p.at[run], np.arange(len(p.layouts))) for p, run in zip(self.ports, runs)]
        offset = [start + labels * number for number, start in enumerate(starts)]
        layouts = [first + p.at[run] for p, run, (first, _) in zip(self.ports, runs, self.cuts)]
        return np.concatenate(runs), np.concatenate(offset), np.concatenate(layouts)

    @functools.cached_property
    def cuts(self) -> list[tuple[int, int]]:
        """By edge: its part of the layouts."""
        ends = itertools.accumulate((len(p.layouts) for p in self.ports), initial=0)
        return list(itertools.pairwise(ends))


@dataclass(eq=False)
class Node:
    """A variable or an alias. The inbox holds the messages over the earlier edges, then those over the later ones."""

    costs: np.ndarray
    earlier: Side
    later: Side
    inbox: np.ndarray
    gather: np.ndarray  # [edges, labels] -> inbox
    weight: float  # the part of each edge where all get equal ones: 1 / how many chains run through

    def belief(self, inbox: np.ndarray) -> np.ndarray:
        """Costs and messages, by label."""
        return self.costs + np.add.reduce(inbox[self.gather], axis=0) if len(self.gather) else self.costs.copy()

    def lay(self, inbox: np.ndarray) -> None:
        """Take this memory for the messages; the ports are told."""
        self.inbox, at = inbox, 0
        for found in self.earlier.ports + self.later.ports:
            found.inbox = inbox[at : at + len(found.layouts)]
            at += len(found.layouts)


def order(problem: Problem, space: Space) -> list[tuple[int, int]]:
    """The nodes, (0, variable) or (1, value of an alias): variables as they stand, an alias after its producer."""
    names = [(at, 0, at) for at in range(len(problem.variables))]
    names += [(v.producer, 1, at) for at, v in enumerate(problem.values) if space.aliases[at] is not None]
    return [(kind, at) for _, kind, at in sorted(names)]


def port(node: int, layouts: np.ndarray) -> Port:
    """The port of a node whose labels have these layouts."""
    return Port(node, *distinct(layouts))


def distinct(layouts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The layouts that there are, and the place of each among them, not to be changed; as np.unique says it, in a third of the
    time, and found once for the many ports that are alike."""
    return distinct_in(layouts.tobytes(), layouts.dtype) if len(layouts) <= SHORT else found_in(layouts)


@functools.lru_cache(maxsize=1 << 12)
def distinct_in(layouts: bytes, kind: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The same of their bytes."""
    return found_in(np.frombuffer(layouts, kind))


def found_in(layouts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same anew."""
    seen = np.zeros(int(layouts.max(initial=-1)) + 1, dtype=bool)
    seen[layouts] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[layouts]


def node(costs: np.ndarray, earlier: list[Edge], later: list[Edge], star: bool = False) -> Node:
    """A node and its inbox; its ports are told where their messages lie. A star has messages of its own."""
    weight = 1 / max(len(earlier), len(later), 1)
    before = Side(earlier, [] if star else [edge.last for edge in earlier], [weight] * len(earlier))
    after = Side(later, [] if star else [edge.first for edge in later], [weight] * len(later))
    ports = before.ports + after.ports
    ends = list(itertools.accumulate((len(p.layouts) for p in ports), initial=0))
    gather = np.zeros((len(ports), len(costs)), np.intp)
    for row, p, start in zip(gather, ports, ends):
        np.add(p.at, start, out=row)
    found = Node(costs, before, after, np.zeros(0, costs.dtype), gather, weight)
    found.lay(np.zeros(ends[-1], costs.dtype))
    return found


def lay(nodes: Mapping[int, Node], stars: Mapping[int, Star], real: type[np.floating]) -> tuple[np.ndarray, int]:
    """Put messages, then charges into one array; it, and where charges begin. A sweep goes on from it: from the messages to earlier
    nodes, those of later consumers and the charges; it finds the others anew, which are in it as a node's lie side by side."""
    inboxes = [found.inbox for found in nodes.values()]
    charges = [found for star in stars.values() for found in star.share.charges]
    parts = inboxes + [found for star in stars.values() for found in star.sent] + charges
    ends = np.cumsum([0, *(part.size for part in parts)]).tolist()
    state = np.zeros(ends[-1], real)
    places = [state[start:stop].reshape(part.shape) for part, start, stop in zip(parts, ends, ends[1:])]
    for place, part in zip(places, parts):
        place[...] = part
    for found, inbox in zip(nodes.values(), places):
        found.lay(inbox)
    sent, charged = iter(places[len(inboxes) :]), iter(places[len(places) - len(charges) :])
    for star in stars.values():
        star.sent[:] = [next(sent) for _ in star.sent]
        star.share.charges[:] = [next(charged) for _ in star.share.charges]
    return state, ends[len(ends) - 1 - len(charges)]
