"""Message passing for the layout problem: sequential tree-reweighted messages (TRW-S), a bound and labels from them.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006. The nodes are the variables
and, for every value with several consumers, an alias whose labels are layouts; those that lie between two others
or at an end need no messages and are left out (chains.py). An edge lies between two ports (a port maps labels to layouts)
and costs a boxing, so a message goes labels -> layouts (min) -> closure (min-plus) -> layouts. Where a value has more than
two consumers, its alias is a `Star`: labels are pairs of a source and an alias layout.

Messages come to rest where no single one betters the bound, which need not be the best bound. At a heat above 0 minima are
soft (least.py), and they come to rest at the best of a bound that is smooth (smooth.py). How far they are heard is a matter of
how a node divides what it says among its edges (paths.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from sbpc.solver.chains import contract, least_by
from sbpc.solver.compiled import BACKWARD, FILL, FORWARD, HEAR, Tables, machine
from sbpc.solver.least import least
from sbpc.solver.network import Edge, Port, Space, lay, node, order, port, slots
from sbpc.solver.paths import HALF, along, divide
from sbpc.solver.problem import Problem, Value
from sbpc.solver.share import Star, star_of

BALANCE = 3  # charges are balanced in every so many sweeps


class Messages:
    """TRW-S over the labels and layouts of `space`; `bound` holds for all plans in it.

    cap: what a boxing costs at most here, the impossible ones too. Where a value has more than two consumers, they are
    charged for their boxings as `Share` says.
    """

    def __init__(
        self,
        problem: Problem,
        space: Space,
        cap: float,
        real: type[np.floating] = np.float64,
        inner: Sequence[int] | None = None,
    ):
        """inner: the nodes that are left out, if that is known; see `contract`."""
        self.problem, self.space, self.cap, self.real = problem, space, cap, real
        self.matrices: dict[tuple[int, bytes, bytes], np.ndarray] = {}
        self.stars: dict[int, Star] = {}
        self.names = order(problem, space)
        self.place = {name: place for place, name in enumerate(self.names)}
        costs = [np.zeros(len(self.free((kind, at))), real) if kind else self.costs(at) for kind, at in self.names]
        self.edges, self.inner = contract(self.connect(), costs, self.stars, cap, inner)
        gone = {found.node for found in self.inner}
        by_node: list[tuple[list[Edge], list[Edge]]] = [([], []) for _ in self.names]
        for edge in self.edges:
            by_node[edge.last.node][0].append(edge)
            by_node[edge.first.node][1].append(edge)
        self.nodes = {
            at: node(falling, *sides, at in self.stars)
            for at, (falling, sides) in enumerate(zip(costs, by_node))
            if at not in gone
        }
        self.paths = along(self.edges)
        divide(self.nodes, self.paths, HALF)
        self.state, self.charged = lay(self.nodes, self.stars, real)
        self.bound, self.sweeps = -np.inf, 0
        self.soft: tuple[float, np.ndarray] | None = None  # where `smooth` goes on: its last heat, and a state
        sizes = [e.seconds.size for e in self.edges] + [2 * found.seconds.size for found in self.stars.values()]
        self.buffer = np.empty(max(sizes, default=0), real)

    @functools.cached_property
    def tables(self) -> Tables:
        """What machine code reads."""
        return Tables(self.nodes, self.stars, self.real)

    def split(self, rest: float | None) -> None:
        """Divide what nodes say as `divide` does, from now on; at first as with HALF."""
        divide(self.nodes, self.paths, rest)
        if "tables" in self.__dict__:
            self.tables.split(self.nodes)

    @functools.cached_property
    def columns(self) -> int:
        """How many columns the program of the space has (exact.py), about."""
        found = sum(map(len, self.space.labels))
        for alias, (out, *wanted) in zip(self.space.aliases, self.ports):
            through = [out.layouts] if alias is None else [alias]
            found += sum(len(through[0]) * len(port.layouts) for port in wanted)
            if alias is not None:
                found += len(out.layouts) * len(alias)
            if len(wanted) > 2:
                found += sum(len(np.intersect1d(out.layouts, port.layouts)) for port in wanted) * len(through[0])
        return found

    def free(self, name: tuple[int, int]) -> np.ndarray:
        """The labels of a variable (0, number), the layouts of the alias of a value (1, number)."""
        found = self.space.labels[name[1]] if name[0] == 0 else self.space.aliases[name[1]]
        assert found is not None
        return found

    def costs(self, at: int) -> np.ndarray:
        """What the labels of a variable cost: one array where it is that of equal variables."""
        labels, costs = self.space.labels[at], self.problem.variables[at].costs
        key = (id(costs), labels.tobytes(), b"")
        if key not in self.matrices:
            self.matrices[key] = costs[labels].astype(self.real)
        return self.matrices[key]

    def connect(self) -> list[Edge]:
        """One edge for a value with one consumer; else one from the producer to the alias, and one to each consumer."""
        found = []
        self.ports: list[list[Port]] = []  # by value: at its producer, at its consumers
        for number, value in enumerate(self.problem.values):
            out = port(self.place[0, value.producer], value.out[self.space.labels[value.producer]])
            wanted = [port(self.place[0, at], wants[self.space.labels[at]]) for at, wants in slots(value)]
            alias = self.space.aliases[number]
            self.ports.append([out, *wanted])
            if alias is None:
                found += [self.edge(value, out, wants) for wants in wanted]
                continue
            middle = self.place[1, number]
            if len(wanted) < 3:
                found.append(self.edge(value, out, port(middle, alias)))
                found += [self.edge(value, port(middle, alias), wants) for wants in wanted]
                continue
            layouts, late = [p.layouts for p in (out, *wanted)], [p.node > middle for p in wanted]
            star = self.stars[middle] = star_of(value.closure, alias, layouts, late, self.cap, self.real)
            for branch, end in enumerate((out, *wanted)):
                middle_port = Port(middle, alias, np.zeros(0, np.intp))
                ends = (end, middle_port) if end.node < middle else (middle_port, end)
                found.append(Edge(*ends, np.zeros((0, 0)), star, branch))
        return found

    def edge(self, value: Value, tail: Port, head: Port) -> Edge:
        """The edge over which `value` is boxed from the layouts of `tail` to those of `head`."""
        key = (id(value.closure), tail.layouts.tobytes(), head.layouts.tobytes())
        if key not in self.matrices:
            part = value.closure[np.ix_(tail.layouts, head.layouts)]
            self.matrices[key] = np.minimum(part, self.cap).astype(self.real, copy=False)
        seconds = self.matrices[key]
        return Edge(tail, head, seconds) if tail.node < head.node else Edge(head, tail, seconds.T)

    def forward(self, heat: float = 0.0) -> None:
        """Send messages from every node to the later ones, first node first."""
        if machine is not None:
            self.tables.pass_on(FORWARD, heat)
            return
        for number, at in self.nodes.items():
            if not at.later.edges:
                continue
            if number in self.stars:
                belief = self.stars[number].belief(self.buffer, heat).copy()
                for edge, part in zip(at.later.edges, at.later.parts):
                    message = self.stars[number].tell(edge.branch, part * belief, self.buffer, heat)
                    edge.last.inbox[:] = message - message.min()
                continue
            belief = at.belief(at.inbox)
            belief -= np.minimum.reduce(belief)  # what is added to all messages over an edge changes no bound
            sent = at.later.project(belief, heat)
            sent -= at.inbox[len(at.inbox) - len(sent) :]
            for edge, (start, stop) in zip(at.later.edges, at.later.cuts):
                if edge.star is not None:
                    edge.star.hear(edge.branch, sent[start:stop], heat)
                    continue
                sums = self.buffer[: edge.seconds.size].reshape(edge.seconds.shape)
                np.add(edge.seconds, sent[start:stop, None], out=sums)
                least(sums, 0, heat, edge.last.inbox)

    def backward(self, heat: float = 0.0) -> float:
        """Send messages to the earlier nodes, last node first; returns the bound at heat 0.

        Why it is a bound at heat 0: with D(x) the belief of a node less its minimum and w the parts of its earlier edges, the
        cost of a plan is the sum of all subtracted minima, plus over the nodes (1 - sum of w) D(x) with sum of w <= 1, plus
        over the edges (seconds - message to last + w D - message to first), of which the second message is the minimum.
        """
        bound = 0.0
        self.sweeps += 1
        if machine is not None:
            return self.tables.pass_on(BACKWARD, heat, self.turn)
        for number, at in reversed(self.nodes.items()):
            star = self.stars.get(number)
            if star is not None:
                if heat:
                    star.shift(at.weight, self.buffer, heat)
                else:
                    if self.turn:
                        star.share.balance(star.later, self.turn == 2)
                    bound += star.hear_later()
            belief = at.belief(at.inbox) if star is None else star.belief(self.buffer, heat).copy()
            floor = float(belief.min())
            bound += floor
            belief -= floor
            if not at.earlier.edges:
                continue
            if star is not None:
                for edge, part in zip(at.earlier.edges, at.earlier.parts):
                    message = star.tell(edge.branch, part * belief, self.buffer, heat)
                    floor = float(message.min())
                    edge.first.inbox[:] = message - floor
                    bound += floor
                continue
            sent = at.earlier.project(belief, heat)
            sent -= at.inbox[: len(sent)]
            for edge, (start, stop) in zip(at.earlier.edges, at.earlier.cuts):
                if edge.star is not None:
                    edge.star.sent[edge.branch - 1][:] = sent[start:stop]
                    continue
                sums = self.buffer[: edge.seconds.size].reshape(edge.seconds.shape)
                np.add(edge.seconds, sent[start:stop], out=sums)
                least(sums, 1, heat, edge.first.inbox)
                floor = float(np.minimum.reduce(edge.first.inbox))
                edge.first.inbox -= floor
                bound += floor
        return bound

    @property
    def turn(self) -> int:
        """How this sweep balances charges: 0 not, 1 from the first consumer on, 2 from the last."""
        if self.sweeps % BALANCE != BALANCE - 1:
            return 0
        return 2 if self.sweeps % (2 * BALANCE) < BALANCE else 1

    def hear(self, fill: bool = False) -> None:
        """Let stars hear what their later consumers sent; fill: charges to as much as there may be first."""
        if machine is not None:
            self.tables.pass_on(FILL if fill else HEAR)
            return
        for star in self.stars.values():
            if fill:
                star.share.fill(0.0)
            star.hear_later()

    def sweep(self) -> float:
        """One sweep forward and backward; returns the bound."""
        self.forward()
        self.bound = max(self.backward(), self.bound)
        return self.bound

    def bounds(self) -> list[np.ndarray]:
        """One more sweep; by node, a bound of all plans that have a label (or alias layout).

        When the backward sweep has come to a node, its belief is the sum of the min-marginals of the chains through it;
        all chains together cost at least the last bound, as no step of a sweep lowers it (Kolmogorov, theorem 2). Through an
        edge in the place of a node runs one chain, to which either neighbour belongs by the part that it gives.
        """
        if np.isinf(self.bound):
            self.sweep()
        before = self.bound
        self.sweep()
        return [before + belief for belief in self.beliefs()]

    def beliefs(self) -> list[np.ndarray]:
        """By node and label (or alias layout): by how much what the node says of it is above what it says of the best one.

        To a node that is left out its neighbours send what they would over the edge in its place: its parts of their beliefs,
        less what came from there. One that it falls on sends all, less what fell.
        """
        found: dict[int, np.ndarray] = {}
        pulls: dict[int, np.ndarray] = {}  # by port what its node sends
        for number, at in self.nodes.items():
            if number in self.stars:
                found[number] = self.stars[number].belief(self.buffer, 0.0).min(0)
                found[number] -= found[number].min()
                continue
            belief = found[number] = at.belief(at.inbox)
            belief -= belief.min()
            for edge, part in zip((*at.earlier.edges, *at.later.edges), (*at.earlier.parts, *at.later.parts)):
                end = edge.first if edge.first.node == number else edge.last
                pulls[id(end)] = least_by(part * belief, end) - end.inbox
        for inner in reversed(self.inner):
            if inner.joined is None:
                ((seconds, theirs, own),) = inner.sides
                sent = [least_by(found[theirs.node], theirs) - (seconds + least_by(inner.costs, own)).min(1)]
            else:
                sent = [pulls[id(theirs)] for _, theirs, _ in inner.sides]
            heard = inner.hear(sent)
            each = [message[own.at] for message, (_, _, own) in zip(heard, inner.sides)]
            belief = found[inner.node] = inner.costs + sum(each)
            belief -= belief.min()
            for (_, theirs, own), message, pull in zip(inner.sides, each, sent):
                pulls[id(theirs)], pulls[id(own)] = pull, least_by(belief - message, own)
        return [found[number] for number in range(len(self.names))]

    def extra(self) -> list[np.ndarray]:
        """By variable and label: by how much what its node says of the label is above what it says of its best one."""
        found, beliefs = [], self.beliefs()
        for at, (variable, labels) in enumerate(zip(self.problem.variables, self.space.labels)):
            found.append(np.full(len(variable.costs), np.inf))
            found[-1][labels] = beliefs[self.place[0, at]]
        return found

    def decode(self) -> list[int]:
        """Labels by variable, chosen node by node: own costs, boxings from the chosen earlier nodes, later messages."""
        chosen = [0] * len(self.names)
        for number, at in self.nodes.items():
            if number in self.stars:
                known = {edge.branch: int(edge.first.at[chosen[edge.first.node]]) for edge in at.earlier.edges}
                chosen[number] = self.stars[number].choose(known)
                continue
            inbox = at.inbox.copy()
            for edge, (start, stop) in zip(at.earlier.edges, at.earlier.cuts):
                label = chosen[edge.first.node]
                if edge.star is not None:
                    inbox[start:stop] = edge.star.due(edge.branch, label)
                else:
                    inbox[start:stop] = edge.seconds[edge.first.at[label]]
            chosen[number] = int(at.belief(inbox).argmin())
        for inner in reversed(self.inner):
            chosen[inner.node] = inner.choose(chosen)
        return [int(labels[chosen[self.place[0, at]]]) for at, labels in enumerate(self.space.labels)]

    def multipliers(self) -> list[list[np.ndarray]]:
        """By value and port, the producer's first and then those of `slots`: the messages to its labels, all of them.

        The space must hold all layouts of all ports.

        With them every variable alone and every value alone cost together at least what `backward` has just returned:
        a node keeps (1 - sum of w) D of its belief D, and leaves w D to each earlier edge, as explained there.
        """
        message: dict[int, np.ndarray] = {}
        for at in (at for number, at in self.nodes.items() if at.earlier.edges and number not in self.stars):
            belief = at.belief(at.inbox)
            left = at.earlier.project(belief - belief.min(), 0.0)
            for edge, (start, stop) in zip(at.earlier.edges, at.earlier.cuts):
                message[id(edge.last)] = edge.last.inbox - left[start:stop]
        for edge in self.edges:
            message[id(edge.first)] = edge.first.inbox
        for inner in reversed(self.inner):  # each edge is paid all that it may be but the last one, which is paid the rest
            (seconds, theirs, own), *other = inner.sides
            paid = inner.costs
            if other:
                message[id(own)] = inner.hear([-message[id(theirs)]])[0]
                paid, own = paid + message[id(own)][own.at], other[0][2]
            else:
                message[id(theirs)] = (seconds + least_by(paid, own)).min(1)
            message[id(own)] = -least_by(paid, own)
        found: list[list[np.ndarray]] = []
        for value, ports in zip(self.problem.values, self.ports):
            found.append([])
            for p, by_label in zip(ports, (value.out, *(wants for _, wants in slots(value)))):
                places = p.at if len(p.at) == len(by_label) else np.searchsorted(p.layouts, by_label)
                found[-1].append(message[id(p)][places].astype(np.float64) if id(p) in message else np.zeros(len(places)))
        return found

    def charges(self) -> dict[int, list[np.ndarray]]:
        """By value with more than two consumers, what each of `slots` is charged, [layouts of the alias, its layouts]."""
        values = {self.place[1, at]: at for at, alias in enumerate(self.space.aliases) if alias is not None}
        return {values[middle]: star.share.charges for middle, star in self.stars.items()}

    @functools.cached_property
    def single(self) -> Messages:
        """The same in single precision, where a sweep takes half the time; its state is to be set, see `put` in smooth.py."""
        if self.real is np.float32:
            return self
        return Messages(self.problem, self.space, self.cap, np.float32, [inner.node for inner in self.inner])

    def restrict(self, space: Space, problem: Problem | None = None) -> Messages:
        """The same messages and charges over a part of the space. No chain costs less there, so the bound stays.

        problem: the same with other costs, of which no bound is known yet.
        """
        left_out = [inner.node for inner in self.inner]
        found = Messages(problem or self.problem, space, self.cap, self.real, left_out)
        found.bound, found.sweeps = -np.inf if problem else self.bound, self.sweeps
        for old, new in zip(self.edges, found.edges, strict=True):
            for before, after in ((old.first, new.first), (old.last, new.last)):
                if len(after.inbox):
                    after.inbox[:] = before.inbox[np.searchsorted(before.layouts, after.layouts)]
        for middle, star in self.stars.items():
            found.stars[middle].inherit(star)
        return found


def ceiling(problem: Problem, seconds: float = math.inf) -> float:
    """What an impossible boxing, or one that costs more, costs in the messages; `seconds`: of a known plan.

    Even the part of it that one consumer pays is more than a plan costs. No more than needed, for the sake of rounding.
    """
    most = sum(float(np.abs(v.costs).max()) for v in problem.variables)
    for value in problem.values:
        finite = value.closure[np.isfinite(value.closure)]
        most += float(finite.max()) * (1 + len(value.consumers))
    return 2 * min(most, seconds) * max([1, *(len(v.consumers) for v in problem.values)]) + 1e-30
