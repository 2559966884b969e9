"""Steps: what one collective, or one local operation, does to the layout of a tensor, and what it sends.

A step changes one mesh axis, or a run of neighbouring axes that all hold the same state.

S, B, P and the table of collectives are OneFlow's (Yuan et al. 2021); bytes are those of ring algorithms.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from sbpc.mesh.layout import Layout
from sbpc.mesh.states import B, Broadcast, P, Partial, Split, State

COLLECTIVE = {
    (Split, Broadcast): "all_gather",
    (Partial, Split): "reduce_scatter",
    (Partial, Broadcast): "all_reduce",
    (Split, Split): "all_to_all",
    (Broadcast, Split): "slice",
    (Broadcast, Partial): "keep",  # on coordinate 0 of the axis, zeros elsewhere
    (Split, Partial): "pad",  # with zeros
}
# p ranks in a group, each sending to its neighbour on the ring; n bytes of one block, the largest that the group has.
# The block of an all_reduce is what one rank holds; of the others, a chunk of it. Steps that are not here are local.
WIRE = {
    "all_gather": lambda p, n: (p - 1, (p - 1) * n),
    "reduce_scatter": lambda p, n: (p - 1, (p - 1) * n),
    "all_to_all": lambda p, n: (p - 1, (p - 1) * n),
    "all_reduce": lambda p, n: (2 * (p - 1), 2 * (p - 1) * n / p),
}


@dataclass(frozen=True)
class Step:
    """One collective over the mesh axes `axes` (numbers, neighbours, ascending), or one local step, between layouts.

    A local step may also be a "crop", which is two others at once: a pad over one axis and a slice of the same dim over
    another one, without a whole tensor in between. Its axes need not be neighbours, as it has no group.
    """

    collective: str
    axes: tuple[int, ...]
    before: Layout
    after: Layout

    def __str__(self) -> str:
        over = "+".join(self.before.axes[at] for at in self.axes)
        return f"{self.before} -> {self.after}: {self.collective} over {over}"

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


def steps(layout: Layout, rank: int) -> Iterator[Step]:
    """Every step out of `layout`, for a tensor with `rank` dims."""
    for axes in _runs(layout):
        before = layout.states[axes[0]]
        for after in _targets(before, rank, merged=len(axes) > 1):
            states = tuple(after if at in axes else state for at, state in enumerate(layout.states))
            kept = tuple(at for at in layout.order if at not in axes)
            kind = COLLECTIVE[type(before), type(after)]
            for fresh in itertools.permutations(axes) if isinstance(after, Split) else [()]:
                yield Step(kind, axes, layout, Layout(layout.axes, states, (*kept, *fresh)))


def _runs(layout: Layout) -> Iterator[tuple[int, ...]]:
    """The single axes, then the runs of neighbouring axes in one state, that may leave that state (together)."""
    count = len(layout.axes)
    for length in range(1, count + 1):
        for first in range(count - length + 1):
            axes = tuple(range(first, first + length))
            state = layout.states[first]
            if any(layout.states[at] != state for at in axes):
                continue
            if isinstance(state, Split) and set(layout.cuts[state.dim][-length:]) != set(axes):
                continue  # only the last cuts of a dim can be undone: the blocks of an earlier one interleave
            later = layout.states[first + length :]
            if isinstance(state, Partial) and any(isinstance(s, Partial) and s != state for s in later):
                continue  # a sum of maxima is not a maximum of sums: the innermost axis is reduced first
            yield axes


def _targets(state: State, rank: int, merged: bool) -> list[State]:
    splits: list[State] = [Split(dim) for dim in range(rank) if state != Split(dim)]
    if isinstance(state, Broadcast):
        return [] if merged else [*splits, P]
    if isinstance(state, Split) and not merged:
        return [*splits, B, P]
    return [*splits, B]


def wire(
    step: Step, shape: Sequence[int], itemsize: int, sizes: Sequence[int], symbols: Sequence[Any] | None = None,
    dims: Sequence[Any] = (),
) -> tuple[Any, Any]:  # fmt: skip
    """Rounds, and bytes that the busiest rank (coordinates 0) sends, for a tensor of `shape` on a mesh of `sizes`.

    With `symbols` for the sizes of the axes the same as formulas: a cut is n/p where `sizes` divide, else ceiling(n/p).
    dims: what stands for the sizes in `shape` then.

    >>> both = Layout(("x", "y"), (Split(0), Split(0)))
    >>> step = Step("all_gather", (1,), both, Layout(("x", "y"), (Split(0), B)))
    >>> wire(step, (6, 10), 4, (2, 3)), wire(step, (6, 10), 4, (2, 3), sympy.symbols("x y"))
    ((2, 80), (y - 1, 240*(y - 1)/(x*y)))
    """
    if step.collective not in WIRE:
        return 0, 0
    block: Any = itemsize
    for dim, size in enumerate(shape):
        cuts = max(step.before.cuts.get(dim, ()), step.after.cuts.get(dim, ()), key=len)
        if symbols is None:  # ceil(ceil(n/a)/b) is ceil(n/(a b))
            block *= -(-size // math.prod(sizes[axis] for axis in cuts))
        else:
            block *= _chunk_formula(size, dims[dim] if dims else size, [(sizes[axis], symbols[axis]) for axis in cuts])
    ranks = sizes if symbols is None else symbols
    return WIRE[step.collective](math.prod(ranks[at] for at in step.axes), block)


def _chunk_formula(size: int, formula: Any, cuts: Sequence[tuple[int, Any]]) -> Any:
    """The first chunk of a dim of `size`, which `formula` stands for. cuts: numbers of ranks, each with its symbol."""
    for ranks, symbol in cuts:
        formula = formula / symbol if size % ranks == 0 else sympy.ceiling(formula / symbol)
        size = -(-size // ranks)
    return formula
