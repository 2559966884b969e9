"""Boxing: the cheapest way to take a tensor from one layout to another, in collectives and local steps.

Which steps there are (see `sbpc.boxing.steps`) depends on the number of dims and axes alone; what they cost, on the
shape and the mesh. The cheapest path goes through any layouts whatever, found on a graph whose nodes are all layouts
and whose edges are all steps. Some lead through sums with zeros, where that is cheaper: exact, but for the sign of a
zero.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from sbpc.boxing.shortest_paths import Edges
from sbpc.boxing.steps import Kind, Step, all_layouts, all_steps, kernel_seconds, row_dims
from sbpc.errors import LayoutError
from sbpc.mesh.collectives import PACKED, block_bytes, carried
from sbpc.mesh.layout import Layout, cut
from sbpc.mesh.layout_codes import LOCAL, NAMES, SUM, WHOLE, Array, decode, encode, joined, state_code, states_of
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Local, Numbers, Ragged, Shape

CLOSE = 1e-12  # two sums of the same costs in another order differ by less than this fraction


def path(
    before: Layout, after: Layout, shape: Shape, itemsize: int, mesh: Mesh, sums: str | None = None
) -> tuple[Step, ...]:
    """The cheapest steps from one layout to another; of equally cheap ones the fewest, of equally few the first.
    A pad and the slice of the same dim that follows it are then one step, a crop. sums: how the value is summed,
    see `STEPS`.

    >>> rows, columns = Layout.parse("[S(0)]", "x"), Layout.parse("[S(1)]", "x")
    >>> path(rows, columns, (4, 4), 4, Mesh(x=2))[0].collective
    'all_to_all'

    Raises LayoutError if a layout does not fit the tensor or the mesh, or if no path exists: nothing leads to P(max),
    P(min) and P(own), which come out of ops only.
    """
    return _path(before, after, before.busiest(shape, mesh.sizes, mesh.routing.expected)[0], itemsize, mesh, sums)


@functools.lru_cache(maxsize=4096)
def _path(before: Layout, after: Layout, shape: Shape, itemsize: int, mesh: Mesh, sums: str | None) -> tuple[Step, ...]:
    prices, start, goal = _ends(before, after, shape, itemsize, mesh, sums)
    graph, cost = prices.graph, prices.row(start)
    # The edges that lie on a cheapest path from the start, explored breadth first: fewest steps, lowest numbers first.
    tight = cost[graph.source] + prices.seconds <= cost[graph.target] + CLOSE * cost[goal]
    onward: dict[int, list[int]] = {}
    for edge in np.flatnonzero(tight & np.isfinite(cost[graph.source])).tolist():
        onward.setdefault(int(graph.source[edge]), []).append(edge)
    came, queue = {start: -1}, [start]
    for at in queue:
        for edge in onward.get(at, ()):  # edges are sorted by where they lead
            if int(graph.target[edge]) not in came:
                came[int(graph.target[edge])] = edge
                queue.append(int(graph.target[edge]))
    steps: list[Step] = []
    at = goal
    while at != start:
        step = graph.step(came[at])
        steps = [*step.then(steps[0]), *steps[1:]] if steps else [step]
        at = int(graph.source[came[at]])
    return tuple(steps)


def seconds(before: Layout, after: Layout, shape: Numbers, itemsize: int, mesh: Mesh) -> float:
    """What the cheapest path costs on the mesh's cluster. Raises LayoutError as `path` does."""
    shape, _ = before.busiest(shape, mesh.sizes, mesh.routing.expected)
    prices, start, goal = _ends(before, after, shape, itemsize, mesh)
    return float(prices.row(start)[goal])


def closure(codes: Array, shape: Numbers, itemsize: int, mesh: Mesh, sums: str | None = None) -> Array:
    """Between each two layouts (by code), [n, n]: seconds of the cheapest path from row to column; inf where there
    is none. sums: see `STEPS`."""
    count = len(mesh.axes)
    states = states_of(codes, count)
    if ((states < LOCAL) & (states >= len(shape))).any():
        raise LayoutError(f"a layout that splits dim {len(shape)} or above of {tuple(shape)}\n  Split one of its dims.")
    kinds = np.where(is_kept(states), states, 0)

    def between(kind: Array, sources: Array, ends: Array) -> Array:
        first = decode(int(sources[0]), mesh.axes)
        of_kind, _ = first.busiest(alike(shape, mesh, kind), mesh.sizes, mesh.routing.expected)
        prices = _prices(tuple(NAMES.get(int(code)) for code in kind), of_kind, itemsize, mesh, sums)
        return prices.rows(prices.graph.at(sources).tolist(), prices.graph.at(ends))

    if (kinds == kinds[:1]).all():
        return between(kinds[0], codes, codes)
    matrix = np.full((len(codes), len(codes)), np.inf)
    for kind in np.unique(kinds, axis=0):
        sources = np.flatnonzero((kinds == kind).all(1))
        columns = np.flatnonzero(((kinds == kind) | ((kinds == 0) & (kind > SUM))).all(1))
        matrix[np.ix_(sources, columns)] = between(kind, codes[sources], codes[columns])
    return matrix


def alike(shape: Numbers, mesh: Mesh, kept: Array) -> Shape:
    """A shape for which all boxings cost what they cost for this one: where every cut is even, dims are
    interchangeable, but for those of rows in L and R. kept: see `is_kept`."""
    even = all(size % mesh.ranks == 0 for size in shape) and not ((kept > 0) & (kept < WHOLE)).any()
    return tuple(sorted(shape)) if even else tuple(shape)


def is_kept(codes: Array) -> Array:
    """Which states no step leads to, so that only an axis that has one may have it on the way: P(max), P(min) and
    P(own), and those that no step leaves, either: L and R."""
    return (codes > SUM) | ((codes >= LOCAL) & (codes < WHOLE))


def _kept(layout: Layout) -> tuple[str | None, ...]:
    """By axis the name of such a state, None for others."""
    codes = np.array([*map(state_code, layout.states)])
    return tuple(NAMES[code] if kept else None for code, kept in zip(codes.tolist(), is_kept(codes).tolist()))


def _check(layout: Layout, shape: Shape, mesh: Mesh) -> None:
    if layout.axes != mesh.axes:
        over = ", ".join(layout.axes)
        raise LayoutError(f"layout {layout} over {over} on {mesh}\n  Give a layout over the axes of the mesh.")
    if layout.cuts and max(layout.cuts) >= len(shape):
        raise LayoutError(f"layout {layout} of a tensor with {len(shape)} dims\n  Split one of its dims.")


def _ends(
    before: Layout, after: Layout, shape: Shape, itemsize: int, mesh: Mesh, sums: str | None = None
) -> tuple[_Prices, int, int]:
    """The prices of the steps that a path may take, and the numbers of the two layouts it joins. shape: of which the
    largest shard is that of the busiest rank."""
    _check(before, shape, mesh)
    _check(after, shape, mesh)
    prices = _prices(_kept(before), shape, itemsize, mesh, sums)
    start, goal = prices.graph.number(before), prices.graph.number(after)
    assert start is not None
    if goal is None or not np.isfinite(prices.row(start)[goal]):
        todo = "Box P(max) and P(min) to B or to a split."
        if any(isinstance(state, (Local, Ragged)) for state in (*before.states, *after.states)):
            todo = "Only ops that take rows to experts and back lead to L and R, or from there; other axes may change."
        raise LayoutError(f"no boxing leads from {before} to {after}\n  {todo}")
    return prices, start, goal


class _Graph:
    """All layouts that a tensor may pass through and all steps between them, by number, sorted by where they lead."""

    def __init__(self, rank: int, axes: tuple[str, ...], kept: tuple[str | None, ...], sums: str | None = None) -> None:
        self.axes, self.rank = axes, rank
        self.states, self.bits = all_layouts(rank, kept)
        self.numbered = joined(self.states, self.bits)
        self.sorted = np.argsort(self.numbered)
        self.codes = self.numbered[self.sorted]
        kinds: dict[Kind, int] = {}
        edges = [np.empty((3, 0), dtype=np.int64)]
        for kind, sources, codes in all_steps(rank, self.states, self.bits, sums):
            number = np.full(len(sources), kinds.setdefault(kind, len(kinds)))
            edges.append(np.stack([self.at(codes), sources, number]))
        found = np.concatenate(edges, axis=1)
        self.target, self.source, self.kind = found[:, np.lexsort(found[::-1])]
        self.kinds = tuple(kinds)
        self.edges = Edges(self.target, self.source, len(self.states))
        dims = np.where(is_kept(self.states), row_dims(self.states), self.states)
        self.cut = dims.T[:, :, None] == np.arange(rank)  # [axes, layouts, dims]

    def number(self, layout: Layout) -> int | None:
        """The number of a layout, None if it is not one of these."""
        code = encode(layout)
        at = int(np.searchsorted(self.codes, code))
        return int(self.sorted[at]) if at < len(self.codes) and self.codes[at] == code else None

    def at(self, codes: Array) -> Array:
        """The numbers of layouts, by code."""
        return self.sorted[np.searchsorted(self.codes, codes)]

    def step(self, edge: int) -> Step:
        collective, axes = self.kinds[self.kind[edge]]
        ends = (decode(int(self.numbered[at]), self.axes) for at in (self.source[edge], self.target[edge]))
        return Step(collective, axes, *ends)


class _Prices:
    """Seconds of every step for one shape on one mesh, and the cheapest totals from the layouts asked for so far."""

    def __init__(self, kept: tuple[str | None, ...], shape: Shape, itemsize: int, mesh: Mesh, sums: str | None) -> None:
        self.graph = graph = _graph(len(shape), mesh.axes, kept, sums)
        self._rows: dict[int, Array] = {}
        self.seconds = np.zeros(len(graph.kind))
        if not graph.kinds:  # rows in L and R on every axis
            return
        ranks = np.where(graph.cut, np.array(mesh.sizes)[:, None, None], 1)
        local = cut(np.array(shape, dtype=np.int64), range(len(mesh.axes)), ranks)  # [layouts, dims]
        blocks = np.minimum(local[graph.source], local[graph.target]).astype(float)
        block = blocks.prod(axis=1)
        lines, least = zip(*(mesh.lines(axes, collective) for collective, axes in graph.kinds))
        taken, size, kernels = np.full(len(block), np.inf), itemsize * block, np.zeros(len(block))
        for kind, (collective, axes) in enumerate(graph.kinds):
            if (wide := carried(collective, kept[axes[0]], itemsize)) != itemsize:
                size[graph.kind == kind] *= wide / itemsize
            if collective in PACKED:
                of_kind, group = graph.kind == kind, math.prod(mesh.sizes[axis] for axis in axes)
                size[of_kind] = block_bytes(collective, tuple(blocks[of_kind].T), itemsize)
                kernels[of_kind] = sum(kernel_seconds(collective, group, block[of_kind], mesh))
        for way in range(max(map(len, lines))):
            start, each = np.array([line[min(way, len(line) - 1)] for line in lines])[graph.kind].T
            taken = np.minimum(taken, start + each * size)
        self.seconds = np.maximum(taken, np.array(least)[graph.kind]) + kernels

    def row(self, source: int) -> Array:
        """The cheapest totals from a source to every layout."""
        if source not in self._rows:
            self.rows([source], np.empty(0, dtype=np.int64))
        return self._rows[source]

    def rows(self, sources: Numbers, ends: Array) -> Array:
        """The cheapest totals from each source to each end."""
        fresh = [at for at in dict.fromkeys(sources) if at not in self._rows]
        self._rows.update(zip(fresh, self.graph.edges.totals(self.seconds, np.array(fresh, dtype=np.int64))))
        found = np.empty((len(sources), len(ends)))
        for row, at in zip(found, sources):
            self._rows[at].take(ends, out=row, mode="clip")  # else `take` makes a copy first
        return found


_graph = functools.lru_cache(maxsize=64)(_Graph)
_prices = functools.lru_cache(maxsize=64)(_Prices)
