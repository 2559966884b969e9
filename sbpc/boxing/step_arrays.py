"""All layouts of a tensor and all boxing steps between them, as arrays: what `steps.steps` says, without its objects."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from sbpc.mesh.layout_codes import EXTREMES, SUM, WHOLE, joined, order_bits, pairs

Kind = tuple[int, int, tuple[int, ...]]
"""The state that some axes leave and the one that they take, 0 for a split on any dim; and these axes."""


def all_layouts(rank: int, extremes: Sequence[str | None]) -> tuple[np.ndarray, np.ndarray]:
    """Of every layout of a tensor with `rank` dims the states [layouts, axes] and the bits of the order of its cuts.

    extremes: by axis "max" or "min" where it may hold such partial results too.
    """
    choices = [(*range(rank), WHOLE, SUM, *((EXTREMES[op],) if op else ())) for op in extremes]
    rows = np.array(list(itertools.product(*choices)))
    cut = np.where(rows < WHOLE, rows, -1).tolist()
    bits = [orders(tuple(row)) for row in cut]
    return np.repeat(rows, [len(found) for found in bits], axis=0), np.array(list(itertools.chain(*bits)))


@functools.lru_cache(maxsize=1 << 14)
def orders(cut: tuple[int, ...]) -> tuple[int, ...]:
    """The bits of all orders in which axes may cut these dims, -1 for none; mesh order first."""
    groups = [[axis for axis, dim in enumerate(cut) if dim == wanted] for wanted in sorted({d for d in cut if d >= 0})]
    every = itertools.product(*(itertools.permutations(group) for group in groups))
    return tuple(order_bits(tuple(itertools.chain(*order)), len(cut)) for order in every)


def all_steps(rank: int, states: np.ndarray, bits: np.ndarray) -> Iterator[tuple[Kind, np.ndarray, np.ndarray]]:
    """The steps between these layouts, kind by kind: where each begins (numbers of layouts) and the code to which it leads."""
    count = states.shape[1]
    for length, first in ((n, at) for n in range(1, count + 1) for at in range(count - n + 1)):
        axes, before = tuple(range(first, first + length)), states[:, first]
        free = may_leave(states, bits, axes)
        for target in (*range(rank), WHOLE, SUM):
            possible = free & (before != target)
            if target == SUM:
                possible &= (before < SUM) & (length == 1)
            if length > 1:
                possible &= before != WHOLE
            sources = np.flatnonzero(possible)
            changed = states[sources].copy()
            changed[:, axes] = target
            leaving = np.where(before[sources] < WHOLE, 0, before[sources])
            for order in itertools.permutations(axes) if target < WHOLE else (axes,):
                codes = joined(changed, cut_last(bits[sources], order, count))
                for state in np.unique(leaving).tolist():
                    of_kind = leaving == state
                    yield (state, target if target >= WHOLE else 0, axes), sources[of_kind], codes[of_kind]


def may_leave(states: np.ndarray, bits: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Which layouts hold one state on all of these neighbouring axes, and may leave it there.

    Only the last cuts of a dim can be undone: the blocks of an earlier one interleave. A sum of maxima is not a maximum
    of sums: the innermost axis is reduced first.
    """
    place = {pair: bit for bit, pair in enumerate(pairs(states.shape[1]))}
    before = states[:, axes[0]]
    possible = (states[:, axes] == before[:, None]).all(1)
    for axis, other in itertools.product(axes, range(states.shape[1])):
        if other not in axes:
            swapped = (bits >> place[min(axis, other), max(axis, other)] & 1).astype(bool)
            cuts_first = swapped if other > axis else ~swapped
            possible &= cuts_first | (states[:, other] != before) | (before >= WHOLE)
    for later in range(axes[-1] + 1, states.shape[1]):
        possible &= (before < SUM) | (states[:, later] < SUM) | (states[:, later] == before)
    return possible


def cut_last(bits: np.ndarray, order: Sequence[int], count: int) -> np.ndarray:
    """The bits once these axes cut last, in this order."""
    changed = bits.copy()
    for bit, (a, b) in enumerate(pairs(count)):
        if a in order or b in order:
            swapped = order.index(b) < order.index(a) if a in order and b in order else a in order
            changed = changed & ~(1 << bit) | swapped << bit
    return changed
