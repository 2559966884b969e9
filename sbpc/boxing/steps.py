"""Steps: what one collective, or one local operation, does to the layout of a tensor, and what it sends; all there are.

A step changes one mesh axis, or a run of neighbouring axes that all hold the same state.

S, B, P and the table of collectives are OneFlow's (Yuan et al. 2021); bytes are those of ring algorithms.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbpc.graph.about import EXCHANGE, FLOAT32
from sbpc.mesh.collectives import CARRIERS, EIGHT_BITS, PACKED, WIRE, WORKS, block_bytes, carried, packing, seconds_on
from sbpc.mesh.layout import Layout, cut
from sbpc.mesh.layout_codes import (
    EXTREMES,
    KEPT,
    LOCAL,
    ORDERS,
    RAGGED,
    ROWS,
    SUM,
    WHOLE,
    Array,
    decode,
    encode,
    joined,
    order_bits,
    pairs,
    states_of,
)
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Axes, Broadcast, Numbers, Ragged

KIND = "S" * WHOLE + "B" + "P" * len(EXTREMES)  # by code of a state
COLLECTIVE = {
    "SB": "all_gather",
    "PS": "reduce_scatter",
    "PB": "all_reduce",
    "SS": "all_to_all",
    "BS": "slice",
    "BP": "keep",  # on coordinate 0 of the axis, zeros elsewhere
    "SP": "pad",  # with zeros
}
ANY: dict[str, tuple[str, ...]] = {kind: (name,) for kind, name in COLLECTIVE.items()}
# By how a value is summed, the steps that it may take. None: as any other value. FLOAT32: none that sums, as it is cast
# before, or has no sums. EXCHANGE: or it is sent as it is and summed in float32 by who gets it, which takes it from P
# to S. "int8" and "float8": or its numbers are sent in 8 bits, from P to S in this way, and from S to B.
STEPS: dict[str | None, dict[str, tuple[str, ...]]] = {
    None: ANY,
    FLOAT32: {kind: names for kind, names in ANY.items() if kind not in ("PS", "PB")},
    EXCHANGE: {kind: names for kind, names in ANY.items() if kind != "PB"} | {"PS": (EXCHANGE,)},
} | {
    kind: ANY | {"PS": (*ANY["PS"], f"{EXCHANGE}_{kind}"), "SB": (*ANY["SB"], f"gather_{kind}")} for kind in EIGHT_BITS
}
Kind = tuple[str, Axes]  # a collective, and the axes over which it goes


@dataclass(frozen=True)
class Step:
    """One collective over the mesh axes `axes` (numbers, neighbours, ascending), or one local step, between layouts.

    A local step may also be a "crop", which is two others at once: a pad over one axis and a slice of the same dim over
    another one, without a whole tensor in between. Its axes need not be neighbours, as it has no group.
    """

    collective: str
    axes: Axes
    before: Layout
    after: Layout

    def __str__(self) -> str:
        over = "+".join(self.before.axes[at] for at in self.axes)
        return f"{self.before} -> {self.after}: {self.collective} over {over}"

    @property
    def carrier(self) -> str:
        """The collective of a library that sends it."""
        return CARRIERS.get(self.collective, self.collective)

    @property
    def parts(self) -> tuple[Step, ...]:
        """The two steps that a crop is; of another step itself."""
        if self.collective != "crop":
            return (self,)
        old, new = sorted(self.axes, key=lambda axis: isinstance(self.before.states[axis], Broadcast))
        between = self.before.replace({old: self.after.states[old]})
        return Step("pad", (old,), self.before, between), Step("slice", (new,), between, self.after)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those on whose local shapes its program depends: its ends, and what is between the parts of a crop."""
        return (self.before, *(part.after for part in self.parts))

    def then(self, other: Step) -> tuple[Step, ...]:
        """This step and the next one, as one where they are a crop."""
        assert self.after == other.before, f"{other} does not follow {self}"
        left, cut = self.before.states[self.axes[0]], other.after.states[other.axes[0]]
        if (self.collective, other.collective) == ("pad", "slice") and left == cut:
            return (Step("crop", tuple(sorted((*self.axes, *other.axes))), self.before, other.after),)
        return self, other


def steps(layout: Layout, rank: int, sums: str | None = None) -> Iterator[Step]:
    """Every step out of `layout`, for a tensor with `rank` dims. sums: see STEPS."""
    code, count = np.array([encode(layout)]), len(layout.axes)
    for (collective, axes), _, codes in all_steps(rank, states_of(code, count), code >> ORDERS, sums):
        for after in codes.tolist():
            yield Step(collective, axes, layout, decode(after, layout.axes))


def wire(
    step: Step,
    shape: Numbers,
    itemsize: int,
    sizes: Numbers,
    symbols: Sequence[Any] | None = None,
    dims: Sequence[Any] = (),
) -> tuple[Any, Any]:
    """Rounds, and bytes that the busiest rank (coordinates 0) sends, for a tensor of `shape` on a mesh of `sizes`.

    With `symbols` for the sizes of the axes the same as formulas: a cut is n/p where `sizes` divide, else ceiling(n/p).
    dims: what stands for the sizes in `shape` then.

    >>> import sympy
    >>> both = Layout.parse("[S(0), S(0)]", "xy")
    >>> step = Step("all_gather", (1,), both, Layout.parse("[S(0), B]", "xy"))
    >>> wire(step, (6, 10), 4, (2, 3)), wire(step, (6, 10), 4, (2, 3), sympy.symbols("x y"))
    ((2, 80), (y - 1, 240*(y - 1)/(x*y)))
    """
    if step.collective not in WIRE:
        return 0, 0
    return WIRE[step.collective](*group(step, shape, itemsize, sizes, symbols, dims))


def group(
    step: Step,
    shape: Numbers,
    itemsize: int,
    sizes: Numbers,
    symbols: Sequence[Any] | None = None,
    dims: Sequence[Any] = (),
) -> tuple[Any, Any]:
    """Ranks of a group of a collective, and the bytes of its block (see WIRE). Arguments as those of `wire`."""
    ranks, block = group_of(step, shape, sizes, symbols, dims)
    reduction = getattr(step.before.states[step.axes[0]], "op", None)
    return ranks, block_bytes(step.collective, block, carried(step.collective, reduction, itemsize))


def group_of(
    step: Step, shape: Numbers, sizes: Numbers, symbols: Sequence[Any] | None = None, dims: Sequence[Any] = ()
) -> tuple[Any, list[Any]]:
    """Ranks of a group of a collective, and the sizes of its block. Arguments as those of `wire`."""
    cuts = [max(step.before.cuts.get(dim, ()), step.after.cuts.get(dim, ()), key=len) for dim in range(len(shape))]
    for axis, (state, after) in enumerate(zip(step.before.states, step.after.states)):
        if isinstance(state, Ragged) and state == after:
            cuts[state.dim] += (axis,)
    ranks = sizes if symbols is None else symbols
    sized = zip(shape, cuts, dims or (None,) * len(shape))
    return math.prod(ranks[at] for at in step.axes), [cut(size, axes, sizes, symbols, dim) for size, axes, dim in sized]


def step_cost(step: Step, shape: Numbers, itemsize: int, mesh: Mesh) -> tuple[float, float]:
    """Seconds of a step on the busiest rank, and the bytes that it sends by the textbook; zeros for a local one."""
    if step.collective not in WIRE:
        return 0.0, 0.0
    ranks, block = group(step, shape, itemsize, mesh.sizes)
    seconds = link_seconds(step, block, mesh) + sum(kernels_of(step, shape, mesh))
    return seconds, float(WIRE[step.collective](ranks, block)[1])


def link_seconds(step: Step, block: float, mesh: Mesh) -> float:
    """Seconds of the collective of a step with a block of so many bytes."""
    lines, least = mesh.lines(step.axes, step.collective)
    return max(seconds_on(lines, block), least)


def kernels_of(step: Step, shape: Numbers, mesh: Mesh) -> tuple[float, float]:
    """Seconds in which a rank packs what it sends in a step, and in which it unpacks and adds up what it gets; zeros
    where a library does all of that."""
    if step.collective not in WORKS:
        return 0.0, 0.0
    ranks, block = group_of(step, shape, mesh.sizes)
    before, after = kernel_seconds(step.collective, ranks, math.prod(block), mesh)
    return float(before), float(after)


def kernel_seconds(collective: str, ranks: Any, count: Any, mesh: Mesh, rates: Sequence[Any] = ()) -> tuple[Any, Any]:
    """The same of a collective by the ranks of its group and the numbers of its block. rates: see `Cluster`."""
    kernel = mesh.cluster.kernel_seconds
    some = 0 if isinstance(ranks, int) and ranks == 1 else 1  # on one rank nothing is sent
    before, after = packing(collective, ranks, count)
    return tuple(some * sum(kernel("", 0.0, each, rates=rates) for each in part) for part in (before, after))


# --- all layouts and steps as arrays: see `sbpc.mesh.layout_codes` ----------------------------------------------------
def all_layouts(rank: int, kept: Sequence[str | None]) -> tuple[Array, Array]:
    """Of every layout of a tensor with `rank` dims the states [layouts, axes] and the bits of the order of its cuts.

    kept: by axis the name of a state to which no step leads, None for none. An axis may have "max", "min" and "own"
    besides others; L and R it has in all layouts, and none of the others cuts their dim.
    """
    others = (*range(min(rank, LOCAL)), WHOLE, SUM)
    choices = [(KEPT[name],) if name in ROWS else (*others, *((KEPT[name],) if name else ())) for name in kept]
    rows = np.array(list(itertools.product(*choices)))
    rows = rows[~(row_dims(rows)[:, :, None] == rows[:, None]).any((1, 2))]
    cut = np.where(rows < RAGGED, rows, -1).tolist()
    bits = [orders(tuple(row)) for row in cut]
    return np.repeat(rows, [len(found) for found in bits], axis=0), np.array(list(itertools.chain(*bits)))


def row_dims(states: Array) -> Array:
    """By layout and axis the dim of L or R, -1 for other states."""
    dims = np.where(states < RAGGED, states - LOCAL, states - RAGGED)
    return np.where((states >= LOCAL) & (states < WHOLE), dims, -1)


@functools.lru_cache(maxsize=1 << 14)
def orders(cut: Axes) -> Axes:
    """The bits of all orders in which axes may cut these dims, -1 for none; mesh order first."""
    groups = [[axis for axis, dim in enumerate(cut) if dim == wanted] for wanted in sorted({d for d in cut if d >= 0})]
    every = itertools.product(*(itertools.permutations(group) for group in groups))
    return tuple(order_bits(tuple(itertools.chain(*order)), len(cut)) for order in every)


def all_steps(rank: int, states: Array, bits: Array, sums: str | None = None) -> Iterator[tuple[Kind, Array, Array]]:
    """The steps between these layouts, kind by kind: where each begins (numbers of layouts) and the code to which it
    leads. sums: see STEPS. Beside rows in L and R, whose states and dims no step changes, none packs numbers."""
    count, rows = states.shape[1], row_dims(states)
    beside: Array = rows.max(1) >= 0
    for length, first in ((n, at) for n in range(1, count + 1) for at in range(count - n + 1)):
        axes, before = tuple(range(first, first + length)), states[:, first]
        free = may_leave(states, bits, axes)
        for target in (*range(min(rank, LOCAL)), WHOLE, SUM):
            possible = free & (before != target) & ~np.any(rows == target, axis=1)
            if target == SUM:
                possible &= (before < SUM) & (length == 1)
            if length > 1:
                possible &= before != WHOLE
            sources = np.flatnonzero(possible)
            changed = states[sources].copy()
            changed[:, axes] = target
            leaving = np.array(list(KIND))[before[sources]]
            names = [
                (kind, name)
                for kind in np.unique(leaving).tolist()
                for name in STEPS[sums].get(kind + KIND[target], ())
            ]
            for order in itertools.permutations(axes) if target < WHOLE else (axes,):
                codes = joined(changed, cut_last(bits[sources], order, count))
                for kind, name in names:
                    of_kind = (leaving == kind) & (before[sources] == SUM if EXCHANGE in name else True)
                    of_kind &= ~beside[sources] if name in PACKED else True
                    yield (name, axes), sources[of_kind], codes[of_kind]


def may_leave(states: Array, bits: Array, axes: Axes) -> Array:
    """Which layouts hold one state on all of these neighbouring axes, and may leave it there.

    Only the last cuts of a dim can be undone: the blocks of an earlier one interleave. A sum of maxima is not a maximum
    of sums: the innermost axis is reduced first.
    """
    place = {pair: bit for bit, pair in enumerate(pairs(states.shape[1]))}
    before = states[:, axes[0]]
    possible = (states[:, axes] == before[:, None]).all(1) & ((before < LOCAL) | (before >= WHOLE))
    for axis, other in itertools.product(axes, range(states.shape[1])):
        if other not in axes:
            swapped = (bits >> place[min(axis, other), max(axis, other)] & 1).astype(bool)
            cuts_first = swapped if other > axis else ~swapped
            possible &= cuts_first | (states[:, other] != before) | (before >= WHOLE)
    for later in range(axes[-1] + 1, states.shape[1]):
        possible &= (before < SUM) | (states[:, later] < SUM) | (states[:, later] == before)
    return possible


def cut_last(bits: Array, order: Numbers, count: int) -> Array:
    """The bits once these axes cut last, in this order."""
    changed = bits.copy()
    for bit, (a, b) in enumerate(pairs(count)):
        if a in order or b in order:
            swapped = order.index(b) < order.index(a) if a in order and b in order else a in order
            changed = changed & ~(1 << bit) | swapped << bit
    return changed
