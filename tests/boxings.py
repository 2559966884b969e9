"""Random meshes, shapes and layouts, and the programs that box one into another, run on all ranks in lockstep."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.nn import Module

from sbpc.boxing.lower import lower
from sbpc.boxing.steps import COLLECTIVE, Step, steps
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import B, Broadcast, P, Partial, Split, State
from sbpc.runtime.one_process.lockstep import LockstepResult, lockstep

NAMES = ("a", "b", "c", "d")
LOCAL = ("slice", "keep", "pad", "crop")  # steps that send nothing


@functools.cache
def layouts(rank: int, axes: tuple[str, ...], orders: bool = True, partial: bool = True) -> tuple[Layout, ...]:
    """Every layout of a tensor with `rank` dims, in a fixed order; with `orders` also in other orders of splits.

    >>> layouts(1, ("x", "y"), partial=False)
    ([S(0), S(0)], [S(0), S(0)] S(0)@y>x, [S(0), B], [B, S(0)], [B, B])
    """
    states = (*map(Split, range(rank)), B, *((P,) if partial else ()))
    return tuple(_enumerate(axes, [states] * len(axes), orders))


def _enumerate(axes: tuple[str, ...], choices: Sequence[Sequence[State]], orders: bool) -> Iterator[Layout]:
    for states in itertools.product(*choices):
        plain = Layout(axes, states)
        if not orders:
            yield plain
            continue
        for cut in itertools.product(*(itertools.permutations(cuts) for cuts in plain.cuts.values())):
            yield Layout(axes, states, tuple(itertools.chain(*cut)) or ())


@st.composite
def meshes(draw: st.DrawFn, most: int = 3, ranks: int = 16) -> Mesh:
    """A mesh of up to `most` axes and `ranks` ranks, axes of size 1 among them."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, most))):
        sizes.append(draw(st.sampled_from([size for size in (2, 3, 1, 4) if size * math.prod(sizes) <= ranks])))
    return Mesh(**dict(zip(NAMES, sizes)))


def shapes(least: int = 0, most: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """A shape of `least` to `most` dims, each of which may be empty, single, or divide by nothing."""
    return st.lists(st.sampled_from([4, 6, 5, 12, 2, 3, 1, 7, 8, 0]), min_size=least, max_size=most).map(tuple)


@st.composite
def boxed_layouts(draw: st.DrawFn, shape: Sequence[int], mesh: Mesh, extremes: bool = False) -> Layout:
    """Any layout of a tensor of `shape`; with `extremes` also with P(max) and P(min)."""
    layout = draw(st.sampled_from(layouts(len(shape), mesh.axes)))
    if not extremes or not layout.partial or draw(st.booleans()):
        return layout
    states = [
        Partial(draw(st.sampled_from(["max", "min", "sum"]))) if isinstance(s, Partial) else s for s in layout.states
    ]
    return Layout(mesh.axes, tuple(states), layout.order)


def textbook_steps(layout: Layout, rank: int) -> Iterator[Step]:
    """Every step out of `layout`, for a tensor with `rank` dims, as one would say it of states and orders."""
    for axes in _runs(layout):
        before = layout.states[axes[0]]
        for after in _targets(before, rank, merged=len(axes) > 1):
            states = tuple(after if at in axes else state for at, state in enumerate(layout.states))
            kept = tuple(at for at in layout.order if at not in axes)
            kind = COLLECTIVE[str(before)[0] + str(after)[0]]
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


def crops(layout: Layout, rank: int) -> list[Step]:
    """Every crop out of a layout of a tensor with `rank` dims."""
    pads = [step for step in steps(layout, rank) if step.collective == "pad"]
    pairs = [pad.then(cut) for pad in pads for cut in steps(pad.after, rank) if cut.collective == "slice"]
    return [pair[0] for pair in pairs if len(pair) == 1]


def numbers(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small integers, exact in every dtype."""
    return torch.randint(-9, 10, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def program(
    steps: Sequence[Step], shape: Sequence[int], mesh: Mesh, rank: int, dtype: torch.dtype = torch.float32
) -> GraphModule:
    """What `rank` runs to take some steps: x, then its position on every axis -> the boxed x."""
    graph = Graph()
    x: Any = graph.placeholder("x")
    position = [graph.placeholder(f"position_{name}") for name in mesh.axes]
    for step in steps:
        x = lower(
            step,
            x,
            lambda op, *args, **kwargs: graph.call_function(op, args, kwargs),
            shape,
            mesh.sizes,
            mesh.coordinates(rank),
            position,
            mesh.key,
            dtype,
        )
    graph.output(x)
    graph.lint()
    return GraphModule(Module(), graph)


def positions(mesh: Mesh, rank: int) -> list[Tensor]:
    """The position tensors of a rank."""
    return [torch.tensor([at]) for at in mesh.coordinates(rank)]


def run_boxing(steps: Sequence[Step], shape: Sequence[int], mesh: Mesh, parts: Sequence[Tensor]) -> LockstepResult:
    """Take some steps on all ranks, which hold `parts`."""
    programs = [program(steps, shape, mesh, rank, parts[0].dtype) for rank in range(mesh.ranks)]
    inputs = [[part, *positions(mesh, rank)] for rank, part in enumerate(parts)]
    return lockstep(programs, inputs, {mesh.key(axes): mesh.groups(axes) for axes in mesh.runs()})
