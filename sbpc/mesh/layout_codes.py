"""Layouts as integers, so that arrays of them can be made, compared and counted without an object for each.

Five bits per mesh axis say its state: the dim of a split, one of L(0), L(1), R(0), R(1), or one of B, P, P(max),
P(min), P(own). Above them stands one bit per pair of axes, set where both cut the same dim and the later axis of the
mesh cuts first.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from sbpc.errors import LayoutError
from sbpc.mesh.layout import Layout, cut
from sbpc.mesh.routing import ANY, stretched
from sbpc.mesh.states import Axes, B, Broadcast, Local, Numbers, Partial, Ragged, Split, State

Array = np.ndarray
LOCAL, RAGGED, WHOLE, SUM = 10, 12, 14, 15  # those below LOCAL are splits; those below RAGGED cut a dim, too
EXTREMES = {"sum": SUM, "max": 16, "min": 17, "own": 18}
BITS, STATES = 5, 32
ROWS = {f"{name}({dim})": first + dim for name, first in (("L", LOCAL), ("R", RAGGED)) for dim in range(2)}
KEPT = EXTREMES | ROWS  # where no step leads
NAMES = {code: name for name, code in KEPT.items()}
ORDERS = 4 * BITS  # where the bits of the pairs begin


@functools.cache
def pairs(axes: int) -> tuple[tuple[int, int], ...]:
    """The pairs of axes, the earlier one first; the place of a pair is the number of its bit."""
    return tuple(itertools.combinations(range(axes), 2))


def state_code(state: State) -> int:
    """The bits of a state. Raises LayoutError for a split of a dim above 9."""
    if isinstance(state, Local):
        return LOCAL + state.dim
    if isinstance(state, Split):
        if state.dim >= LOCAL:
            raise LayoutError(f"a split of dim {state.dim}\n  Split one of the first {LOCAL} dims.")
        return state.dim
    if isinstance(state, Ragged):
        return RAGGED + state.dim
    return WHOLE if isinstance(state, Broadcast) else EXTREMES[state.op]


def joined(states: Array, order: Array) -> Array:
    """Codes of layouts: states [layouts, axes], order [layouts] bits of pairs, of which those that matter are kept."""
    codes = (states << np.arange(0, BITS * states.shape[1], BITS)).sum(1)
    for bit, (a, b) in enumerate(pairs(states.shape[1])):
        same = (states[:, a] == states[:, b]) & (states[:, a] < RAGGED)
        codes |= np.where(same, order & (1 << bit), 0) << ORDERS
    return codes


def states_of(codes: Array, axes: int) -> Array:
    """The state of every axis, [layouts, axes]."""
    return (codes[:, None] >> np.arange(0, BITS * axes, BITS)) & (STATES - 1)


def order_bits(order: Numbers, axes: int) -> int:
    """The bits of an order of all axes, first cut first."""
    place = {axis: at for at, axis in enumerate(order)}
    return sum(1 << bit for bit, (a, b) in enumerate(pairs(axes)) if place.get(b, axes) < place.get(a, axes))


def sorted_axes(group: Numbers, bits: int, axes: int) -> Axes:
    """Axes that cut the same thing, in the order of cutting that the bits say."""
    later = {pair: bool(bits >> bit & 1) for bit, pair in enumerate(pairs(axes))}

    def before(axis: int) -> int:
        others = [other for other in group if other != axis]
        return sum(not later[other, axis] if other < axis else later[axis, other] for other in others)

    return tuple(sorted(group, key=before))


def encode(layout: Layout) -> int:
    """The code of a layout."""
    states = np.array([[state_code(state) for state in layout.states]])
    return int(joined(states, np.array([order_bits(layout.order, len(layout.axes))]))[0])


@functools.lru_cache(maxsize=1 << 17)
def decode(code: int, axes: tuple[str, ...]) -> Layout:
    """The layout of a code, made once.

    >>> both = Layout(("x", "y"), (Split(0), Split(0)), (1, 0))
    >>> decode(encode(both), both.axes) == both
    True
    """
    count = len(axes)
    numbers = [code >> BITS * axis & (STATES - 1) for axis in range(count)]
    order: list[int] = []
    for dim in sorted({n for n in numbers if n < RAGGED}):
        order += sorted_axes([axis for axis in range(count) if numbers[axis] == dim], code >> ORDERS, count)
    return Layout(axes, tuple(map(state_of, numbers)), tuple(order))


def state_of(number: int) -> State:
    """The state of these bits."""
    if number < RAGGED:
        return Split(number) if number < LOCAL else Local(number - LOCAL)
    if number < WHOLE:
        return Ragged(number - RAGGED)
    return B if number == WHOLE else Partial(NAMES[number])


def elements(codes: Array, shape: Numbers, sizes: Numbers, times: float = ANY) -> Array:
    """The elements that the rank at coordinates 0 holds of a tensor of `shape` in each layout. times: the mean, where
    rows are shared out by their groups."""
    states, axes, known = states_of(codes, len(sizes)).T, range(len(sizes)), np.array(sizes)[:, None]
    states, found = np.where((states >= LOCAL) & (states < RAGGED), states - LOCAL, states), np.ones(len(codes))
    for dim, size in enumerate(shape):
        rows = np.where((states == RAGGED + dim) & (times != ANY) & (dim < WHOLE - RAGGED), known, 1)
        ranks = np.where(states == dim, known, 1) * rows
        shared = rows.prod(0)
        found *= cut(stretched(size, shared, times) if (shared > 1).any() else size, axes, ranks)
    return found
