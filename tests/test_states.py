"""States and layouts: `shards` and `whole` undo each other, whatever the shape, the mesh and the order of splits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sbpc.errors import LayoutError
from sbpc.mesh.layout import Layout, broadcast
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import B, P, Partial, S, State, chunk_sizes, parse_state, shards, whole
from tests.boxings import boxed_layouts, layouts, meshes, numbers, shapes

AXES = ("data", "tensor")


def test_a_state_is_read_back_from_its_text() -> None:
    for state in (S(0), S(12), B, P, Partial("max"), Partial("min")):
        assert parse_state(str(state)) == state
    assert parse_state("P(sum)") == P and str(Partial("sum")) == "P"


def test_other_texts_are_no_states() -> None:
    for text in ["", "S", "S()", "S(-1)", "S(x)", "P(avg)", "b", "S(0) S(1)"]:
        with pytest.raises(LayoutError, match="is not a state\n  A state is"):
            parse_state(text)


@given(size=st.integers(0, 40), ranks=st.integers(1, 9))
def test_chunks_are_cut_as_torch_cuts_them(size: int, ranks: int) -> None:
    found = chunk_sizes(size, ranks)
    assert len(found) == ranks and sum(found) == size
    assert found == sorted(found, reverse=True)
    expected = [part.shape[0] for part in torch.empty(size).chunk(ranks)] if size else []
    assert [part for part in found if part] == [part for part in expected if part]


@given(size=st.integers(0, 200), first=st.integers(1, 7), second=st.integers(1, 7))
def test_the_largest_of_nested_chunks_does_not_depend_on_the_order_of_the_cuts(
    size: int, first: int, second: int
) -> None:
    inner = chunk_sizes(chunk_sizes(size, first)[0], second)[0]
    assert inner == chunk_sizes(chunk_sizes(size, second)[0], first)[0] == -(-size // (first * second))


@settings(deadline=None, derandomize=True)
@given(shape=shapes(least=1), ranks=st.integers(1, 5), data=st.data())
def test_whole_undoes_shards(shape: tuple[int, ...], ranks: int, data: st.DataObject) -> None:
    states: list[State] = [*map(S, range(len(shape))), B, P, Partial("max"), Partial("min")]
    state = data.draw(st.sampled_from(states))
    x = numbers(shape, torch.int64)
    parts = shards(x, state, ranks, torch.Generator().manual_seed(1))
    assert len(parts) == ranks
    assert torch.equal(whole(parts, state), x)


def test_partial_shards_are_independent_of_the_tensor() -> None:
    parts = shards(torch.zeros(1000), P, 3, torch.Generator().manual_seed(0))
    assert all(part.unique().numel() > 5 for part in parts)


def test_the_maximum_stands_on_any_rank() -> None:
    parts = shards(torch.zeros(1000), Partial("max"), 3, torch.Generator().manual_seed(0))
    assert all(0 < int((part == 0).sum()) < 1000 and part.max() == 0 for part in parts)


def test_a_split_of_a_missing_dim_is_refused() -> None:
    with pytest.raises(LayoutError) as error:
        shards(torch.zeros(2, 2), S(2), 2)
    assert str(error.value) == "S(2) of a tensor with 2 dims\n  Name one of its dims."


def test_a_broadcast_tensor_that_differs_is_refused() -> None:
    with pytest.raises(LayoutError, match="differs between rank 0 and rank 1"):
        whole([torch.zeros(2), torch.ones(2)], B)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(mesh=meshes(), shape=shapes(), data=st.data())
def test_whole_undoes_shards_in_every_layout(mesh: Mesh, shape: tuple[int, ...], data: st.DataObject) -> None:
    layout = data.draw(boxed_layouts(shape, mesh, extremes=True))
    x = numbers(shape, torch.int64)
    parts = layout.shards(x, mesh.sizes, torch.Generator().manual_seed(1))
    held = [tuple(part.shape) for part in parts]
    assert held == [layout.local_shape(shape, mesh.sizes, mesh.coordinates(rank)) for rank in range(mesh.ranks)]
    assert torch.equal(layout.whole(parts, mesh.sizes), x)


def local(layout: Layout, x: Tensor, sizes: tuple[int, ...]) -> list[list[int]]:
    return [part.tolist() for part in layout.shards(x, sizes)]


def test_the_order_of_splits_says_which_axis_cuts_first() -> None:
    x = torch.arange(6)
    assert local(Layout(AXES, (S(0), S(0))), x, (2, 3)) == [[0], [1], [2], [3], [4], [5]]
    assert local(Layout(AXES, (S(0), S(0)), (1, 0)), x, (2, 3)) == [[0], [2], [4], [1], [3], [5]]


def test_nested_uneven_cuts_cut_what_the_first_left() -> None:
    assert local(Layout(AXES, (S(0), S(0))), torch.arange(7), (3, 2)) == [[0, 1], [2], [3, 4], [5], [6], []]


def test_the_innermost_axis_is_reduced_first() -> None:
    parts = [torch.tensor(value) for value in (1, 5, 2, 4)]
    assert Layout(AXES, (P, Partial("max"))).whole(parts, (2, 2)).item() == 5 + 4
    assert Layout(AXES, (Partial("max"), P)).whole(parts, (2, 2)).item() == 6


@given(data=st.data())
def test_a_layout_is_read_back_from_its_text(data: st.DataObject) -> None:
    mesh = Mesh(data=2, tensor=2, pipe=2)
    layout = data.draw(boxed_layouts((2, 2, 2), mesh, extremes=True))
    assert Layout.parse(str(layout), mesh.axes) == layout


def test_a_layout_is_written_with_the_orders_that_are_not_mesh_order() -> None:
    texts = [str(layout) for layout in layouts(1, AXES)]
    assert texts == [
        "[S(0), S(0)]",
        "[S(0), S(0)] S(0)@tensor>data",
        "[S(0), B]",
        "[S(0), P]",
        "[B, S(0)]",
        "[B, B]",
        "[B, P]",
        "[P, S(0)]",
        "[P, B]",
        "[P, P]",
    ]


def test_only_the_order_within_a_dim_distinguishes_layouts() -> None:
    axes = ("a", "b", "c")
    assert Layout(axes, (S(0), S(1), S(0)), (1, 0, 2)) == Layout(axes, (S(0), S(1), S(0)))
    assert Layout(axes, (S(0), S(1), S(0)), (2, 0, 1)) != Layout(axes, (S(0), S(1), S(0)))
    assert Layout(axes, (B, B, B), (2, 1, 0)) == broadcast(axes)


def test_an_axis_that_splits_anew_cuts_last() -> None:
    layout = Layout(AXES, (B, S(0))).replace({0: S(0)})
    assert str(layout) == "[S(0), S(0)] S(0)@tensor>data" and layout.cuts == {0: (1, 0)}
    assert layout.replace({1: P}).cuts == {0: (0,)} and layout.replace({1: P}).partial


def test_other_texts_are_no_layouts() -> None:
    for text in [
        "",
        "S(0), B",
        "[S(0)]",
        "[S(0), B, B]",
        "[S(0), X]",
        "[S(0), S(0)] S(0)@pipe>data",
        "[S(0), B] S(1)@data",
        "[B, B] junk",
    ]:
        with pytest.raises(LayoutError):
            Layout.parse(text, AXES)


def test_an_order_must_name_every_splitting_axis() -> None:
    with pytest.raises(LayoutError, match="leaves out a splitting axis"):
        Layout(AXES, (S(0), S(0)), (1,))


@pytest.mark.parametrize(
    ("axes", "states"), [(Mesh(a=2), (B,)), (("a",), S(0)), (("a",), ("B",)), (("a",), (None,)), (["a"], [B])]
)
def test_what_is_no_layout_is_refused(axes: Any, states: Any) -> None:
    with pytest.raises(LayoutError, match=r"Give mesh\.axes and a state for each"):
        Layout(axes, states)
