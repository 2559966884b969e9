"""Stars: values with more than two consumers, as nodes of message passing whose labels are pairs (source, alias).

Every consumer j of an alias pays a cost share P_j(a, t) of a boxing a -> t, such that no m-1 of the m consumers pay
more than its price c(a, t): for every (a, t), sum_j P_j - min_j P_j <= c. Then the star under cost shares costs no
more than the true one, see `sbpc.solver.proof`. A consumer that wants the layout in which the value is made takes it
straight and pays nothing.

How a price is shared decides how good the bound is. `balance` raises it by dual ascent for facility location
(Erlenkotter 1978), every alias being one such problem.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sbpc.solver.problem import Array


@dataclass(eq=False)
class Star:
    """One star. Arrays are changed in place, as the machine code knows their addresses.

    seconds [sources, aliases]. price [aliases, layouts]: of a boxing to any layout that a consumer wants; equal
    [layouts]: the part of it that each may pay if all pay alike. By consumer: columns, the places of its layouts
    among these; shares [aliases, its layouts]; straight, pairs of (source, place among its layouts) that are one
    layout; late, whether it comes after the star.

    Messages: made [sources] from the producer. From a consumer the lesser of over [aliases], what it pays for a boxing,
    and direct [sources], what it pays if it takes the value straight. sent: what each consumer sent last, by layout.
    """

    seconds: Array
    price: Array
    equal: Array
    columns: list[Array]
    shares: list[Array]
    straight: list[tuple[Array, Array]]
    late: list[bool]
    made: Array
    over: list[Array]
    direct: list[Array]
    sent: list[Array]

    @property
    def numbers(self) -> list[Array]:
        """All that sweeps change: the messages and cost shares."""
        return [self.made, *self.shares, *self.over, *self.direct, *self.sent]

    def belief(self) -> Array:
        """Returns seconds and messages [sources, aliases]."""
        belief = self.seconds + self.made[:, None]
        for over, direct in zip(self.over, self.direct):
            belief += np.minimum(over, direct[:, None])
        return belief

    def message_to(self, branch: int, belief: Array) -> Array:
        """Returns the message to the producer (0) or a consumer: by layout the least belief without what came from
        there."""
        if branch == 0:
            return belief.min(1) - self.made
        rest = belief - np.minimum(self.over[branch - 1], self.direct[branch - 1][:, None])
        message = (self.shares[branch - 1] + rest.min(0)[:, None]).min(0)
        source, place = self.straight[branch - 1]
        message[place] = np.minimum(message[place], rest.min(1)[source])
        return message

    def receive(self, branch: int, sent: Array) -> float:
        """Takes what the producer or a consumer sends by layout; returns what is subtracted from it."""
        if branch == 0:
            floor = sent.min()
            self.made[:] = sent - floor
            return float(floor)
        self.sent[branch - 1][:] = sent
        over = (self.shares[branch - 1] + sent).min(1)
        source, place = self.straight[branch - 1]
        floor = min(over.min(), sent[place].min(initial=np.inf))
        self.over[branch - 1][:] = over - floor
        self.direct[branch - 1][source] = sent[place] - floor
        return float(floor)

    def receive_later(self) -> float:
        """Takes what later consumers sent last; returns what is subtracted."""
        return sum(self.receive(1 + at, sent) for at, sent in enumerate(self.sent) if self.late[at])

    def balance(self, backwards: bool) -> None:
        """Gives cost shares to later consumers that use them, so that none sends less to an alias than before.

        A consumer sends an alias v(a) = min over t of sent(t) + share(a, t), for which shares of v(a) - sent(t)
        suffice. What is left of the price lets one consumer after the other raise its v(a). The rest is given to all
        alike.
        """
        later = [at for at, late in enumerate(self.late) if late]
        needs = [np.zeros(self.price.shape, self.price.dtype) for _ in self.shares]
        values: dict[int, Array] = {}
        for at, (need, columns, shares) in enumerate(zip(needs, self.columns, self.shares)):
            if at in later:
                values[at] = (shares + self.sent[at]).min(1)
                shares = np.maximum(values[at][:, None] - self.sent[at], 0)
            need[:, columns] = shares
        room = self.price - functools.reduce(np.add, needs)
        for at in later[::-1] if backwards else later:
            columns, need, sent = self.columns[at], needs[at], self.sent[at]
            room += need
            free = functools.reduce(np.minimum, needs[:at] + needs[at + 1 :]) + room
            values[at] = np.maximum((np.maximum(free[:, columns], 0) + sent).min(1), values[at])
            need[:, columns] = np.maximum(values[at][:, None] - sent, 0)
            room -= need
        room += functools.reduce(np.minimum, needs)  # the least share is free
        spare = np.maximum(room, 0) * self.equal
        for at in later:
            np.add(needs[at][:, self.columns[at]], spare[:, self.columns[at]], out=self.shares[at])

    def choose(self, known: Mapping[int, int]) -> int:
        """Returns the best pair if these branches have these layouts (the producer among them), the others as they
        say."""
        source = known[0]
        belief = self.seconds[source].copy()
        for at, (over, direct) in enumerate(zip(self.over, self.direct)):
            if 1 + at not in known:
                belief += np.minimum(over, direct[source])
            elif (source, known[1 + at]) not in zip(*self.straight[at]):
                belief += self.shares[at][:, known[1 + at]]
        return source * self.seconds.shape[1] + int(belief.argmin())

    def due(self, branch: int, pair: int) -> Array:
        """Returns what a consumer pays by layout at a chosen pair."""
        source, alias = divmod(pair, self.seconds.shape[1])
        due = self.shares[branch - 1][alias].copy()
        at, place = self.straight[branch - 1]
        due[place[at == source]] = 0
        return due


def star_of(closure: Array, ports: Sequence[Array], late: list[bool]) -> Star:
    """Returns the star of a value with these layouts at its producer's and its consumers' ports, and equal cost
    shares. closure: finite, in the precision of the messages."""
    real = closure.dtype.type
    sources, *wanted = ports
    layouts = np.unique(np.concatenate(wanted))
    columns = [np.searchsorted(layouts, each) for each in wanted]
    price = closure.take(layouts, 1)
    equal = equal_parts(columns, len(layouts)).astype(real)
    straight = [np.intersect1d(sources, each, assume_unique=True, return_indices=True)[1:] for each in wanted]
    direct = [np.full(len(sources), np.inf, real) for _ in wanted]
    for free, (source, _) in zip(direct, straight):
        free[source] = 0
    return Star(
        closure.take(sources, 0),
        price,
        equal,
        columns,
        [price.take(each, 1) * equal[each] for each in columns],
        straight,
        late,
        np.zeros(len(sources), real),
        [np.zeros(len(closure), real) for _ in wanted],
        direct,
        [np.zeros(len(each), real) for each in wanted],
    )


def equal_parts(columns: Sequence[Array], layouts: int) -> Array:
    """Returns by layout the part of a price that all m may pay alike: 1/(m-1), or 1/k if only k < m can want the
    layout."""
    count = np.bincount(np.concatenate(columns), minlength=layouts)
    return 1 / np.maximum(np.where(count == len(columns), count - 1, count), 1)
