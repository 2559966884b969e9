"""Sequential tree-reweighted message passing (TRW-S) for the layout problem.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006. An edge lies between two
ports; a port maps labels to layouts. So a message goes from labels to layouts (min), through the closure of boxing
costs (min-plus) and to the layouts of the other port. The alias of a value with more than two consumers is a `Star`:
its labels are pairs of a source and an alias layout, and consumers pay cost shares.

The Python code below is the definition; `compiled.py` runs the same sweeps as machine code if that was built.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from sbpc.solver.messages.compiled import Tables, machine
from sbpc.solver.messages.network import Boxings, Edge, NodePort, divide, node, order, paths
from sbpc.solver.messages.stars import Star, star_of
from sbpc.solver.problem import Array, Problem, Value
from sbpc.solver.subsets import distinct

BALANCE = 3  # cost shares are balanced in every so many sweeps


class Messages:
    """Messages over all labels and layouts of a problem.

    big_m: seconds at which boxings are cut off, the impossible ones too; see the function. real: the precision of
    the messages. like: others of the same two, whose boxings are used again. bound: seconds that no plan costs less
    than. ports: by value, at its producer and at its distinct consumers.
    """

    def __init__(
        self, problem: Problem, big_m: float, real: type[np.floating] = np.float64, like: Messages | None = None
    ):
        self.problem, self.big_m, self.real = problem, big_m, real
        self.boxings: Boxings = Boxings(big_m, real) if like is None else like.boxings
        self.stars: dict[int, Star] = {}
        self.names = order(problem)
        self.place = {name: place for place, name in enumerate(self.names)}
        self.ports: list[list[NodePort]] = []
        self.edges_of = [self.connect(number, value) for number, value in enumerate(problem.values)]
        self.edges = [edge for edges in self.edges_of for edge in edges]
        sides: list[tuple[list[Edge], list[Edge]]] = [([], []) for _ in self.names]
        for edge in self.edges:
            sides[edge.last.node][0].append(edge)
            sides[edge.first.node][1].append(edge)
        costs = [
            np.zeros(len(problem.values[at].closure), real) if kind else problem.variables[at].costs.astype(real)
            for kind, at in self.names
        ]
        self.nodes = [node(c, *edges, self.stars.get(at)) for at, (c, edges) in enumerate(zip(costs, sides))]
        divide(self.nodes, set())
        self.bound, self.sweeps = -np.inf, 0

    def follow_paths(self, follow: bool) -> None:
        """Lets nodes give half of their belief along paths, which carries messages far, or equal parts, which come
        to rest higher.

        No sweep lowers the bound whatever the parts are (Kolmogorov, "A new look at reweighted message passing",
        PAMI 2015).
        """
        divide(self.nodes, self.paths if follow else set())
        if machine is not None:
            self.tables.set_parts(self.nodes)

    @functools.cached_property
    def paths(self) -> set[int]:
        """The edges of paths through the network, by `id`."""
        return paths(self.edges)

    def reprice(self, problem: Problem) -> None:
        """Goes on with other label costs from the messages as they are; no bound is known yet."""
        for (kind, at), here in zip(self.names, self.nodes):
            if not kind:
                here.costs[:] = problem.variables[at].costs
        self.problem, self.bound = problem, -np.inf

    def start_from(self, other: Messages, values: Sequence[int]) -> None:
        """Takes the messages of a problem with the same variables. values: by value of the other problem, its number
        in this one."""
        for number, edges in zip(values, other.edges_of):
            if len(self.edges_of[number]) == len(edges):  # else it has other consumers
                for mine, theirs in zip(self.edges_of[number], edges):
                    mine.first.inbox[:], mine.last.inbox[:] = theirs.first.inbox, theirs.last.inbox
                    if mine.star is not None and theirs.star is not None:
                        for here, there in zip(mine.star.numbers, theirs.star.numbers):
                            here[:] = there

    @functools.cached_property
    def tables(self) -> Tables:
        """What the machine code reads."""
        return Tables(self.nodes, self.real)

    def connect(self, number: int, value: Value) -> list[Edge]:
        """Returns the edges of a value: one if it has one consumer, else one from the producer to the alias and one
        to each consumer. Notes the value's ports and its star."""
        out, *wanted = ports = [NodePort(self.place[0, at], *distinct(layouts)) for at, layouts in value.distinct_ends]
        self.ports.append(ports)
        if not value.has_alias:
            return [self.edge(value, out, wants) for wants in wanted]
        middle, alias = self.place[1, number], np.arange(len(value.closure))
        if len(wanted) < 3:
            ends = [self.edge(value, out, NodePort(middle, alias, alias))]
            return ends + [self.edge(value, NodePort(middle, alias, alias), wants) for wants in wanted]
        layouts, late = [p.layouts for p in ports], [p.node > middle for p in wanted]
        star = self.stars[middle] = star_of(self.boxings.whole(value.closure), layouts, late)
        edges = []
        for branch, end in enumerate(ports):
            center = NodePort(middle, alias[:0], alias[:0])
            edges.append(Edge(*((end, center) if end.node < middle else (center, end)), np.zeros((0, 0)), star, branch))
        return edges

    def edge(self, value: Value, tail: NodePort, head: NodePort) -> Edge:
        """Returns the edge over which `value` is boxed from the layouts of `tail` to those of `head`."""
        seconds = self.boxings.between(value.closure, tail.layouts, head.layouts)
        return Edge(tail, head, seconds) if tail.node < head.node else Edge(head, tail, seconds.T)

    def sweep(self) -> float:
        """Sends messages to later nodes, then to earlier nodes; returns the best bound so far."""
        self.sweeps += 1
        send = self.send if machine is None else self.tables.run
        send(False)
        self.bound = max(send(True, self.balance_from), self.bound)
        return self.bound

    def send(self, back: bool, balance: int = 0) -> float:
        """Sends messages from every node to the later ones, first node first, or `back`; returns the bound of all
        that goes back.

        Why it is a bound: let D be the belief of a node less its minimum, and w the part of an earlier edge. The
        cost of a plan is the sum of all subtracted minima, plus over the nodes (1 - sum of w) D >= 0, plus over
        their earlier edges (seconds - message to last + w D - message to first) >= 0, as the message to first is the
        minimum of the rest. On the way there what is added to all messages over an edge changes no bound.
        """
        bound = 0.0
        for at in reversed(self.nodes) if back else self.nodes:
            if not back and not at.later:
                continue
            if at.star is not None and back:
                if balance:
                    at.star.balance(balance == 2)
                bound += at.star.receive_later()
            belief = at.belief()
            bound += float(belief.min())
            belief -= belief.min()
            for edge, part in at.side(back):
                here, there = (edge.last, edge.first) if back else (edge.first, edge.last)
                if at.star is not None:
                    message = at.star.message_to(edge.branch, self.real(part) * belief)
                else:
                    message = at.message(here, part, belief)
                    if edge.star is not None and back:  # received when the star's turn comes
                        edge.star.sent[edge.branch - 1][:] = message
                    elif edge.star is not None:
                        edge.star.receive(edge.branch, message)
                    if edge.star is not None:
                        continue
                    message = (edge.seconds + message).min(1) if back else (edge.seconds + message[:, None]).min(0)
                floor = message.min() if back or at.star is not None else self.real(0)
                there.inbox[:] = message - floor
                bound += float(floor)
        return bound

    @property
    def balance_from(self) -> int:
        """Which end this sweep balances cost shares from: 0 not at all, 1 the first consumer, 2 the last."""
        if self.sweeps % BALANCE != BALANCE - 1:
            return 0
        return 2 if self.sweeps % (2 * BALANCE) < BALANCE else 1

    def beliefs(self) -> list[Array]:
        """Returns, by node and label (or alias layout), how far its belief is above that of the best one."""
        beliefs = (at.belief() if at.star is None else at.belief().min(0) for at in self.nodes)
        return [belief - belief.min() for belief in beliefs]

    def reduced_costs(self) -> list[Array]:
        """Returns, by variable and label, about how far above the bound the best plan with that label is."""
        beliefs = self.beliefs()
        return [beliefs[self.place[0, at]] for at in range(len(self.problem.variables))]

    def label_bounds(self) -> list[Array]:
        """Returns, after one more sweep, by node a bound of all plans that have a label (or alias layout).

        After a backward sweep the belief of a node is the sum of the min-marginals of the chains through it, and no
        step of a sweep lowers the bound of all chains (Kolmogorov, theorem 2).
        """
        before = self.bound if np.isfinite(self.bound) else self.sweep()
        self.sweep()
        return [before + belief for belief in self.beliefs()]

    def decode(self) -> list[int]:
        """Returns a plan, chosen node by node: own costs, boxings from the nodes chosen before, messages from later
        ones."""
        chosen: list[int] = []
        for at in self.nodes:
            if at.star is not None:
                known = {edge.branch: int(edge.first.at[chosen[edge.first.node]]) for edge in at.earlier}
                chosen.append(at.star.choose(known))
                continue
            rows = []
            for edge in at.earlier:
                label = chosen[edge.first.node]
                due = edge.star.due(edge.branch, label) if edge.star else edge.seconds[edge.first.at[label]]
                rows.append(due[edge.last.at])
            rows += [edge.first.inbox[edge.first.at] for edge in at.later]
            chosen.append(int((at.costs + sum(rows)).argmin()))
        return [chosen[self.place[0, at]] for at in range(len(self.problem.variables))]

    def multipliers(self) -> list[list[Array]]:
        """Returns, by value and port (the producer's, then those of the distinct consumers), the multipliers by label.

        With them every variable alone and every value alone cost together at least what a sweep `back` has just
        returned: a node keeps (1 - sum of w) D of its belief D, and leaves w D to each earlier edge, as explained
        there.
        """
        by_layout = {id(edge.first): edge.first.inbox for edge in self.edges}
        for at in self.nodes:
            if at.star is None and at.earlier:
                belief = at.belief()
                belief -= belief.min()
                by_layout |= {id(edge.last): -at.message(edge.last, part, belief) for edge, part in at.side(True)}
        return [
            [by_layout.get(id(p), np.zeros(len(p.layouts)))[p.at].astype(float) for p in ports] for ports in self.ports
        ]

    def shares(self) -> dict[int, list[Array]]:
        """Returns, by number of a value with a star, the cost shares of its distinct consumers [layouts, their
        layouts]."""
        return {self.names[middle][1]: star.shares for middle, star in self.stars.items()}


def big_m(problem: Problem, seconds: float = math.inf) -> float:
    """Returns what an impossible boxing costs in the messages; seconds: of a known plan.

    Even the part of it that one consumer pays is more than a plan costs. No more than needed, for the sake of rounding.
    """
    most = sum(float(np.abs(v.costs).max()) for v in problem.variables)
    closures = {id(value.closure): value.closure for value in problem.values}
    dearest = {at: float(closure.max(where=np.isfinite(closure), initial=0.0)) for at, closure in closures.items()}
    for value in problem.values:
        most += dearest[id(value.closure)] * (1 + len(value.consumers))
    return 2 * min(most, seconds) * max([1, *(len(v.consumers) for v in problem.values)]) + 1e-30
