"""A layout: the states of one tensor over all axes of a mesh, and the order in which the axes cut each dim."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import sympy
import torch
from torch import Tensor

from sbpc.errors import LayoutError, check_kinds, shown
from sbpc.mesh.routing import ANY, stretched
from sbpc.mesh.states import Axes, B, Names, Numbers, Partial, Ragged, Shape, Split, State, parse_state, shards, whole

STATES = {*get_args(State)}


@dataclass(frozen=True)
class Layout:
    """One state (`S(dim)`, `B` or `P`, of rows of experts also `R(dim)` or `L(dim)`) for each mesh axis, outermost axis
    first.

    `[S(0), B]` on axes data, tensor is split over data and whole over tensor. `[S(0), S(0)]` cuts dim 0 over data,
    and each piece again over tensor. Where axes cut one dim in another order the text adds it: `S(0)@tensor>data`
    cuts over tensor first.

    `order` lists the splitting axes (by number) grouped by the dim they cut, dims ascending, and within a dim in the
    order of cutting; left out, it is mesh order. Only the order within a dim distinguishes two layouts.

    >>> Layout(("data", "tensor"), (Split(0), Split(0)))
    [S(0), S(0)]
    >>> Layout(("data", "tensor"), (Split(0), Split(0)), (1, 0))
    [S(0), S(0)] S(0)@tensor>data
    >>> [part.tolist() for part in Layout(("data", "tensor"), (Split(0), B)).shards(torch.arange(4), (2, 2))]
    [[0, 1], [0, 1], [2, 3], [2, 3]]
    """

    axes: Names
    states: tuple[State, ...]
    order: Axes = ()

    def __post_init__(self) -> None:
        if (
            not isinstance(self.axes, tuple)
            or not isinstance(self.states, tuple)
            or not {*map(type, self.states)} <= STATES
        ):
            what = f"a layout of the axes {shown(self.axes)} and the states {shown(self.states)}"
            raise LayoutError(
                f"{what}\n  Give mesh.axes and a state for each: sbpc.Layout(mesh.axes, (sbpc.S(0), sbpc.B))."
            )
        if len(self.axes) != len(self.states):
            what = f"{len(self.states)} states for the axes {', '.join(self.axes)}"
            raise LayoutError(f"{what}\n  Give one state per axis.")
        given = self.order or range(len(self.axes))
        split = sorted((s.dim, at) for at, s in enumerate(self.states) if isinstance(s, Split))
        rank_of = {axis: at for at, axis in enumerate(given)}
        if not all(axis in rank_of for _, axis in split):
            raise LayoutError(f"order {self.order} leaves out a splitting axis of {self.states}\n  Name them all.")
        ordered = tuple(axis for _, axis in sorted(split, key=lambda item: (item[0], rank_of[item[1]])))
        object.__setattr__(self, "order", ordered)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.states, self.order, self.axes))

    def __reduce__(self) -> tuple[object, ...]:
        return Layout, (self.axes, self.states, self.order)  # hashes of texts differ from process to process

    @functools.cached_property
    def cuts(self) -> dict[int, Axes]:
        """By dim: the numbers of the axes that cut it, first cut first."""
        found: dict[int, Axes] = {}
        for axis in self.order:
            state = self.states[axis]
            assert isinstance(state, Split)
            found[state.dim] = (*found.get(state.dim, ()), axis)
        return found

    def busiest(self, shape: Sequence[Any], sizes: Numbers, times: float) -> tuple[tuple[Any, ...], tuple[Axes, ...]]:
        """Returns a shape, and by dim the axes that cut it, so that its largest shard is what the busiest rank has of
        a tensor of `shape`: where rows are shared out by their groups `times` the mean."""
        found, cuts = list(shape), [self.cuts.get(dim, ()) for dim in range(len(shape))]
        for dim in range(len(shape)) if times != ANY else ():
            if axes := tuple(
                at for at, state in enumerate(self.states) if isinstance(state, Ragged) and state.dim == dim
            ):
                found[dim] = stretched(shape[dim], math.prod(sizes[axis] for axis in axes), times)
                cuts[dim] += axes
        return tuple(found), tuple(cuts)

    def replace(self, changes: dict[int, State]) -> Layout:
        """Returns this layout with other states on some axes; an axis that splits anew cuts last."""
        states = tuple(changes.get(at, state) for at, state in enumerate(self.states))
        kept = tuple(at for at in self.order if at not in changes)
        return Layout(self.axes, states, (*kept, *(at for at in range(len(self.axes)) if at not in kept)))

    def local_shape(self, shape: Numbers, sizes: Numbers, coordinates: Numbers) -> Shape:
        """Returns the shape that the rank at `coordinates` holds of a tensor of `shape` on a mesh of `sizes`."""
        return tuple(chunk(size, self.cuts.get(dim, ()), sizes, coordinates)[1] for dim, size in enumerate(shape))

    def shards(self, tensor: Tensor, sizes: Numbers, generator: torch.Generator | None = None) -> list[Tensor]:
        """Returns what every rank, in row-major order, holds of `tensor` on a mesh of `sizes`."""
        parts: dict[Axes, Tensor] = {(): tensor}
        sequence = self._sequence
        for axis in sequence:
            parts = {
                (*key, rank): piece
                for key, part in parts.items()
                for rank, piece in enumerate(shards(part, self.states[axis], sizes[axis], generator))
            }
        return [parts[tuple(at[axis] for axis in sequence)] for at in itertools.product(*map(range, sizes))]

    def shard(self, tensor: Tensor, sizes: Numbers, coordinates: Numbers) -> Tensor:
        """Returns what the rank at `coordinates` holds of `tensor`: a view, for a layout without partial states."""
        assert not self.partial, f"{self} has no one shard"
        for dim, axes in self.cuts.items():
            tensor = tensor.narrow(dim, *chunk(tensor.shape[dim], axes, sizes, coordinates))
        return tensor

    def whole(self, parts: Sequence[Tensor], sizes: Numbers) -> Tensor:
        """Returns the tensor of which the ranks, in row-major order, hold `parts`: the inverse of `shards`."""
        by_place = dict(zip(itertools.product(*map(range, sizes)), parts))
        live = list(range(len(self.axes)))
        for axis in reversed(self._sequence):
            at = live.index(axis)
            groups: dict[Axes, list[Tensor]] = {}
            for place in sorted(by_place):
                groups.setdefault((*place[:at], *place[at + 1 :]), []).append(by_place[place])
            by_place = {place: whole(group, self.states[axis]) for place, group in groups.items()}
            live.remove(axis)
        return by_place[()]

    @property
    def _sequence(self) -> Axes:
        """All axes, those that split in the order of their cuts last."""
        return (*(at for at in range(len(self.axes)) if at not in self.order), *self.order)

    @property
    def partial(self) -> bool:
        """Whether any axis holds partial results."""
        return any(isinstance(state, Partial) for state in self.states)

    def __str__(self) -> str:
        text = "[" + ", ".join(map(str, self.states)) + "]"
        for dim, axes in self.cuts.items():
            if axes != tuple(sorted(axes)):
                text += f" S({dim})@" + ">".join(self.axes[at] for at in axes)
        return text

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str, axes: Sequence[str]) -> Layout:
        """Returns the layout that `str` writes as `text`.

        >>> Layout.parse("[S(0), S(0)] S(0)@tensor>data", ("data", "tensor")).cuts
        {0: (1, 0)}

        Raises LayoutError for a text that is none.
        """
        check_kinds(LayoutError, layout=(text, "a text"))
        return parsed(text, tuple(axes))


@functools.lru_cache(maxsize=1 << 12)
def parsed(text: str, axes: Names) -> Layout:
    """The layout that a text stands for; a file names a few very often."""
    match = re.fullmatch(r"\s*\[([^\]]*)\]((?:\s+S\(\d+\)@\S+)*)\s*", text)
    if match is None:
        todo = "A layout reads [B, S(0)], with S(0)@inner>outer for another order."
        raise LayoutError(f"{text!r} is not a layout\n  {todo}")
    states = tuple(parse_state(part) for part in match[1].split(",") if part.strip())
    order: list[int] = []
    for state, names in re.findall(r"S\((\d+)\)@(\S+)", match[2]):
        for name in names.split(">"):
            if name not in axes or states[axes.index(name)] != Split(int(state)):
                raise LayoutError(f"{text!r}: axis {name!r} does not cut dim {state}\n  Name the axes of that dim.")
            order.append(axes.index(name))
    return Layout(axes, states, (*order, *(at for at in range(len(axes)) if at not in order)))


def broadcast(axes: Sequence[str]) -> Layout:
    """The layout in which every rank holds everything."""
    return Layout(tuple(axes), (B,) * len(axes))


def chunk(size: int, axes: Numbers, sizes: Numbers, coordinates: Numbers) -> tuple[int, int]:
    """Where the chunk begins that the rank at `coordinates` has of a dim that `axes` cut one after the other, and
    its length.

    >>> chunk(10, (0, 1), (2, 3), (1, 2))
    (9, 1)
    """
    first = 0
    for axis in axes:
        step = -(-size // sizes[axis])
        skipped = min(size, step * coordinates[axis])
        first, size = first + skipped, min(step, size - skipped)
    return first, size


def cut(size: Any, axes: Iterable[int], sizes: Any, symbols: Sequence[Any] | None = None, dim: Any = None) -> Any:
    """The largest chunk of a dim of `size` that `axes` cut one after the other.

    size, and by axis `sizes`: numbers, or arrays of them. With `symbols` for the sizes of the axes it is a formula:
    n / p where that is even at these sizes, else ceiling(n / p); `dim` stands for n.

    >>> cut(10, (0, 1), (2, 3)), cut(10, (0, 1), (2, 3), sympy.symbols("x y"))
    (2, ceiling(10/(x*y)))
    """
    if symbols is None:
        return -(-size // math.prod(sizes[axis] for axis in axes))  # ceil(ceil(n/a)/b) is ceil(n/(a b))
    formula = sympy.Integer(size) if dim is None else dim
    for axis in axes:
        formula /= symbols[axis]
        formula = formula if size % sizes[axis] == 0 else sympy.ceiling(formula)
        size = -(-size // sizes[axis])
    return formula


def numel(
    shape: Numbers,
    cuts: Sequence[Numbers],
    sizes: Any,
    symbols: Sequence[Any] | None = None,
    dims: Sequence[Any] = (),
) -> Any:
    """The elements of the largest shard of a tensor. cuts: by dim the axes that cut it; see `cut`. dims: what stands
    for `shape`."""
    formulas = dims or (None,) * len(shape)
    return math.prod(cut(size, axes, sizes, symbols, dim) for size, axes, dim in zip(shape, cuts, formulas))
