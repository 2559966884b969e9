"""Repeated blocks, found by a structural hash, so that equal layers are planned, and compiled, once.

The calls stand in the order of execution; in it equal blocks, one after the other, are a tandem repeat: token number i
equals token number i + period over a long run. A token says what an op is, and what its operands are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

REPEATS = 4  # blocks in a run, at least
PERIODS = 24  # candidates for a period that are tried


@dataclass(frozen=True)
class Run:
    """Blocks of `period` tokens from `start` on; the last one may be cut short at `stop`."""

    start: int
    stop: int
    period: int


def runs(tokens: Sequence[Hashable], start: int = 0) -> Iterator[Run]:
    """Yields the tandem repeats of a sequence, which do not overlap: the longest one, then those before and after it.

    >>> list(runs("xabababab?cccc"))
    [Run(start=1, stop=9, period=2), Run(start=10, stop=14, period=1)]
    """
    numbers: dict[Hashable, int] = {}
    array = np.array([numbers.setdefault(token, len(numbers)) for token in tokens], dtype=np.int64)
    best = Run(0, 0, 1)
    for period in periods(array):
        equal = np.concatenate([[False], array[:-period] == array[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        lengths = edges[1::2] - edges[::2]
        at = int(lengths.argmax())
        saved = int(lengths[at])
        if saved >= (REPEATS - 1) * period and saved > best.stop - best.start - best.period:
            best = Run(int(edges[2 * at]), int(edges[2 * at]) + saved + period, period)
    if best.stop == best.start:
        return
    yield from runs(tokens[: best.start], start)
    yield Run(start + best.start, start + best.stop, best.period)
    yield from runs(tokens[best.stop :], start + best.stop)


def periods(tokens: np.ndarray) -> list[int]:
    """Returns the most common distances between a token and the next one like it, most common first."""
    by_token = np.argsort(tokens, kind="stable")
    same = tokens[by_token][1:] == tokens[by_token][:-1]
    counts = np.bincount((by_token[1:] - by_token[:-1])[same])
    common = np.argsort(-counts, kind="stable")[:PERIODS]
    return [int(period) for period in common if counts[period] >= REPEATS - 1]
