"""Who pays for a boxing that several consumers of a value share: a bound of its star that adapts to the messages.

Every consumer j of an alias is charged P_j(a, t) for a boxing a -> t, such that no m-1 of the m consumers together pay
more than its price c(a, t): for every (a, t), sum_j P_j - min_j P_j <= c. Then the cheapest star of charges costs no
more than the true one. For layouts t_j that are not all the same, a target t is wanted by at most m-1 consumers, whose
charges do not exceed c(a, t), which the star pays once. If all want the same t, the star costs c(source, t), as other
aliases are detours, and that is what alias = t costs here (c(t, t) = 0, so nobody is charged anything there).
A consumer that wants the layout in which the value is made takes it as it is and is charged nothing, at any alias: the
others are at most m-1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sbpc.solver.least import least, lesser

STEP = 10.0  # charges change by about so many times the heat at a time
RARE = 1e-3  # boxings that are less probable change theirs less
LEAST = 1e-30  # the part of its price of which less is no charge
FAINT = 1e-6  # the least that is charged, as a part of the price


@dataclass(eq=False)
class Share:
    """The charges of one value: price [aliases, layouts]; by consumer the columns of its layouts (a slice where they are
    all: arrays are copied), charges there, and the layouts."""

    price: np.ndarray
    columns: list[np.ndarray | slice]
    charges: list[np.ndarray]
    places: list[np.ndarray]

    def balance(self, sent: Sequence[np.ndarray | None], backwards: bool) -> None:
        """Charge those who would pay, such that no consumer sends less to an alias: the least of sent(t) + charge(a, t).

        sent: what each consumer pays elsewhere, by layout (None: its charges stay). A consumer that sends v(a) needs
        charges of only v(a) - sent(t); what is left of the price lets the others raise theirs.
        This is dual ascent for facility location (Erlenkotter 1978), each alias being one such problem.
        """
        needs, messages = [], []
        for columns, charges, pays in zip(self.columns, self.charges, sent):
            need = np.zeros(self.price.shape, self.price.dtype)
            messages.append(charges.min(1) if pays is None else (charges + pays).min(1))
            need[:, columns] = charges if pays is None else np.maximum(messages[-1][:, None] - pays, 0)
            needs.append(need)
        room = self.price - functools.reduce(np.add, needs)
        for at in range(len(sent))[:: -1 if backwards else 1]:
            pays, columns, need = sent[at], self.columns[at], needs[at]
            if pays is not None:
                room += need
                free = functools.reduce(np.minimum, needs[:at] + needs[at + 1 :]) + room
                messages[at] = np.maximum((np.maximum(free[:, columns], 0) + pays).min(1), messages[at])
                need[:, columns] = np.maximum(messages[at][:, None] - pays, 0)
                room -= need
        room += functools.reduce(np.minimum, needs)
        spare = np.maximum(room, 0, out=room)
        spare *= shares(self.columns, self.price.shape[1]).astype(room.dtype)
        for at, pays in enumerate(sent):
            if pays is not None:
                np.add(needs[at][:, self.columns[at]], spare[:, self.columns[at]], out=self.charges[at])

    def adapt(self, odds: Sequence[np.ndarray], heat: float) -> None:
        """Raise the charges of consumers that take a boxing with larger odds than others, lower the others'."""
        most = np.full(self.price.shape, np.finfo(self.price.dtype).tiny, self.price.dtype)
        for columns, found in zip(self.columns, odds):
            most[:, columns] = np.maximum(most[:, columns], found)
        rate = np.minimum(STEP * heat / np.maximum(self.price, heat), 1) * np.minimum(most / RARE, 1)
        for columns, charges, found in zip(self.columns, self.charges, odds):
            charges *= np.exp(rate[:, columns] * (found / most[:, columns] - 1))
        self.fill(FAINT)

    def fill(self, part: float) -> None:
        """Scale charges to as much as there may be; before that none is below this part of the price."""
        every = np.zeros((len(self.columns), *self.price.shape), self.price.dtype)
        for at, (columns, charges) in enumerate(zip(self.columns, self.charges)):
            every[at][:, columns] = np.maximum(charges, part * self.price[:, columns])
        first, second = np.full((2, *self.price.shape), np.inf, self.price.dtype)
        for charges in every:
            second = np.minimum(second, np.maximum(first, charges))
            first = np.minimum(first, charges)
        every = np.maximum(every, second)  # the least charge is free up to the second least
        total = every.sum(0) - second
        every *= np.divide(self.price, total, out=np.zeros_like(total), where=total > LEAST * self.price)
        for at, (columns, charges) in enumerate(zip(self.columns, self.charges)):
            charges[:] = every[at][:, columns]


@dataclass(eq=False)
class Star:
    """A value with more than two consumers as a node of message passing: its labels are pairs (source, alias).

    seconds [sources, aliases]. straight: by consumer, which sources it can take as they are, and their places among its
    layouts. Messages: `made` [sources] from the producer; from a consumer the lesser of `over` [aliases], what it pays
    for a boxing from the alias, and `direct` [sources], what it pays without one. sent: what each consumer sent last, by
    layout. late: whether a consumer comes after the star. All of these are changed in place.
    """

    seconds: np.ndarray
    share: Share
    straight: list[tuple[np.ndarray, np.ndarray]]
    sources: np.ndarray
    aliases: np.ndarray
    made: np.ndarray
    over: list[np.ndarray]
    direct: list[np.ndarray]
    sent: list[np.ndarray]
    late: list[bool]

    @property
    def later(self) -> list[np.ndarray | None]:
        """What later consumers sent, None for the others."""
        return [sent if late else None for sent, late in zip(self.sent, self.late)]

    def belief(self, buffer: np.ndarray, heat: float) -> np.ndarray:
        """Seconds and messages [sources, aliases], in the first half of the buffer."""
        found, rest = self.halves(buffer)
        np.add(self.seconds, self.made[:, None], out=found)
        for over, direct in zip(self.over, self.direct):
            found += lesser(over, direct[:, None], heat, rest)
        return found

    def halves(self, buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Two parts of the buffer, each of the size of `seconds`."""
        size, shape = self.seconds.size, self.seconds.shape
        return buffer[:size].reshape(shape), buffer[size : 2 * size].reshape(shape)

    def tell(self, branch: int, belief: np.ndarray, buffer: np.ndarray, heat: float) -> np.ndarray:
        """The message to the producer (0) or a consumer: by layout the least belief without what came from there."""
        if branch == 0:
            return least(belief, 1, heat) - self.made
        _, rest = self.halves(buffer)
        lesser(self.over[branch - 1], self.direct[branch - 1][:, None], heat, rest)
        np.subtract(belief, rest, out=rest)
        message = least(self.share.charges[branch - 1] + least(rest, 0, heat)[:, None], 0, heat)
        at, to = self.straight[branch - 1]
        message[to] = lesser(message[to], least(rest, 1, heat)[at], heat)
        return message

    def hear(self, branch: int, sent: np.ndarray, heat: float) -> float:
        """Take what the producer or a consumer sends by layout; what is taken off."""
        if branch == 0:
            floor = float(sent.min())
            self.made[:] = sent - floor
            return floor
        self.sent[branch - 1][:] = sent
        over = least(self.share.charges[branch - 1] + sent, 1, heat)
        at, to = self.straight[branch - 1]
        floor = min(float(over.min()), float(sent[to].min(initial=np.inf)))
        self.over[branch - 1][:] = over - floor
        self.direct[branch - 1][at] = sent[to] - floor
        return floor

    def hear_later(self, heat: float = 0.0) -> float:
        """Take what later consumers sent last; what is taken off."""
        return sum(self.hear(1 + at, sent, heat) for at, sent in enumerate(self.later) if sent is not None)

    def shift(self, weight: float, buffer: np.ndarray, heat: float) -> None:
        """Hear the later consumers; charge those more who take a boxing with a larger probability than others, at a heat.

        The probability is the slope of the smooth bound along the charge.
        """
        self.hear_later(heat)
        belief = self.belief(buffer, heat)
        belief -= belief.min()
        belief *= -weight / heat
        np.exp(belief, out=belief)
        belief /= belief.sum()
        odds = []
        for at, (charges, over, direct) in enumerate(zip(self.share.charges, self.over, self.direct)):
            with np.errstate(over="ignore"):
                boxed = (belief / (1 + np.exp((over - direct[:, None]) / heat))).sum(0)
            taken = charges + self.sent[at]
            taken = np.exp((taken.min(1, keepdims=True) - taken) / heat)
            odds.append(boxed[:, None] * taken / taken.sum(1, keepdims=True))
        self.share.adapt(odds, heat)
        for at, sent in enumerate(self.sent):
            self.hear(1 + at, sent, heat)

    def choose(self, known: Mapping[int, int]) -> int:
        """The best pair where these branches have these layouts, the producer among them; see `due`."""
        source = known[0]
        belief = self.seconds[source].copy()
        for at, (over, direct) in enumerate(zip(self.over, self.direct)):
            if 1 + at not in known:
                belief += np.minimum(over, direct[source])
            elif (source, known[1 + at]) not in zip(*self.straight[at]):
                belief += self.share.charges[at][:, known[1 + at]]
        return source * len(self.aliases) + int(belief.argmin())

    def due(self, branch: int, pair: int) -> np.ndarray:
        """What a consumer is charged by layout at a pair that was chosen."""
        source, alias = divmod(pair, len(self.aliases))
        found = self.share.charges[branch - 1][alias].copy()
        at, to = self.straight[branch - 1]
        found[to[at == source]] = 0
        return found

    def inherit(self, other: Star) -> None:
        """Take the messages and charges of a star with more layouts."""
        sources = np.searchsorted(other.sources, self.sources)
        aliases = np.searchsorted(other.aliases, self.aliases)
        self.made[:] = other.made[sources]
        for at, columns in enumerate(self.share.places):
            self.over[at][:] = other.over[at][aliases]
            kept = self.straight[at][0]  # a source without its layout at the consumer is straight no more
            self.direct[at][kept] = other.direct[at][sources[kept]]
            found = np.searchsorted(other.share.places[at], columns)
            self.share.charges[at][:] = other.share.charges[at][np.ix_(aliases, found)]
            self.sent[at][:] = other.sent[at][found]


def star_of(
    closure: np.ndarray,
    aliases: np.ndarray,
    ports: Sequence[np.ndarray],
    late: list[bool],
    cap: float,
    real: type[np.floating],
) -> Star:
    """The star of a value with these layouts at its producer's and its consumers' ports; charges begin as equal parts."""
    sources, *wanted = ports
    layouts = np.unique(np.concatenate(wanted))
    columns = [slice(None) if len(found) == len(layouts) else np.searchsorted(layouts, found) for found in wanted]
    price = np.minimum(closure[np.ix_(aliases, layouts)], cap).astype(real, copy=False)
    parts = shares(columns, len(layouts)).astype(real)
    share = Share(price, columns, [np.ascontiguousarray(price[:, found] * parts[found]) for found in columns], wanted)
    both = [np.intersect1d(sources, found, assume_unique=True, return_indices=True)[1:] for found in wanted]
    return Star(
        np.minimum(closure[np.ix_(sources, aliases)], cap).astype(real, copy=False),
        share,
        both,
        sources,
        aliases,
        np.zeros(len(sources), real),
        [np.zeros(len(aliases), real) for _ in wanted],
        [straight(len(sources), at, real) for at, _ in both],
        [np.zeros(len(found), real) for found in wanted],
        late,
    )


def straight(count: int, at: np.ndarray, real: type[np.floating]) -> np.ndarray:
    """No message by source: 0 from where a consumer can take it as it is, else inf."""
    found = np.full(count, np.inf, real)
    found[at] = 0
    return found


def shares(columns: Sequence[np.ndarray | slice], layouts: int) -> np.ndarray:
    """By layout: what part of the price all may be charged alike: 1/(m-1), or 1/k if only k < m can want it."""
    count = np.zeros(layouts)
    for found in columns:
        count[found] += 1
    return 1 / np.maximum(np.where(count == len(columns), count - 1, count), 1)
