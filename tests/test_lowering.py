"""Lowering: every boxing, run on all ranks, gives the same tensor bit for bit and sends the bytes it states."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sbpc.boxing.paths import path
from sbpc.boxing.steps import Step, steps, wire
from sbpc.errors import LayoutError
from sbpc.graph.about import EXCHANGE, FLOAT32
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Local, Ragged, counted, shards
from sbpc.plans.storages import emitted
from tests.boxings import boxed_layouts, crops, layouts, meshes, numbers, positions, program, run_boxing, shapes

DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.float64, torch.int32)


def strided(parts: Sequence[Tensor]) -> list[Tensor]:
    """The same parts, none of them contiguous if it has two dims or more."""
    return [part.transpose(0, -1).contiguous().transpose(0, -1) if part.dim() > 1 else part for part in parts]


def check(taken: Sequence[Step], x: Tensor, mesh: Mesh, transpose: bool = False) -> None:
    """Run the steps on all ranks; compare what they hold with the definition, and what they send with `wire`."""
    before, after = taken[0].before, taken[-1].after
    parts = before.shards(x, mesh.sizes, torch.Generator().manual_seed(7))
    run = run_boxing(taken, x.shape, mesh, strided(parts) if transpose else parts)
    held = [outputs[0] for outputs in run.outputs]
    for rank, part in enumerate(held):
        assert tuple(part.shape) == after.local_shape(x.shape, mesh.sizes, mesh.coordinates(rank))
        assert part.dtype == x.dtype
    assert torch.equal(counted(after.whole(held, mesh.sizes)), counted(x))
    stated: Counter[str] = Counter()
    for step in taken:
        stated[mesh.key(step.axes)] += wire(step, x.shape, x.element_size(), mesh.sizes)[1]
    assert {key: sent for key, sent in run.bytes_sent.items() if sent} == pytest.approx(
        {k: v for k, v in stated.items() if v}
    )


@settings(deadline=None, derandomize=True, max_examples=300)
@given(mesh=meshes(), shape=shapes(), dtype=st.sampled_from(DTYPES), transpose=st.booleans(), data=st.data())
def test_every_path_gives_the_same_tensor_and_sends_the_bytes_stated(
    mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, transpose: bool, data: st.DataObject
) -> None:
    before = data.draw(boxed_layouts(shape, mesh, extremes=True))
    after = data.draw(st.sampled_from(layouts(len(shape), mesh.axes)))
    taken = path(before, after, shape, dtype.itemsize, mesh)
    if taken:
        check(taken, numbers(shape, dtype), mesh, transpose)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(mesh=meshes(), shape=shapes(), transpose=st.booleans(), data=st.data())
def test_float8_is_moved_between_all_layouts_without_sums(
    mesh: Mesh, shape: tuple[int, ...], transpose: bool, data: st.DataObject
) -> None:
    ends = layouts(len(shape), mesh.axes, partial=False)
    taken = path(*(data.draw(st.sampled_from(ends)) for _ in range(2)), shape, 1, mesh, FLOAT32)
    assert not any(step.after.partial for step in taken)
    if taken:
        check(taken, numbers(shape, torch.float8_e4m3fn), mesh, transpose)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(mesh=meshes(), shape=shapes(least=1), dtype=st.sampled_from(DTYPES), transpose=st.booleans(), data=st.data())
def test_every_exchange_gives_the_same_tensor_and_sends_the_bytes_stated(
    mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, transpose: bool, data: st.DataObject
) -> None:
    before = data.draw(boxed_layouts(shape, mesh))
    every = [step for step in steps(before, len(shape), EXCHANGE) if step.collective == EXCHANGE]
    if every:
        check([data.draw(st.sampled_from(every))], numbers(shape, dtype), mesh, transpose)
    after = data.draw(st.sampled_from(layouts(len(shape), mesh.axes)))
    taken = path(before, after, shape, dtype.itemsize, mesh, EXCHANGE) if not after.partial else ()
    assert not {"all_reduce", "reduce_scatter"} & {step.collective for step in taken}
    if taken:
        check(taken, numbers(shape, dtype), mesh, transpose)


def test_an_exchange_rounds_once_and_a_value_to_be_cast_is_not_summed_at_all() -> None:
    mesh, start, end = Mesh(x=384), Layout.parse("[P]", "x"), Layout.parse("[S(0)]", "x")
    ones = [torch.ones(384, dtype=torch.bfloat16) for _ in range(384)]
    (step,) = path(start, end, (384,), 2, mesh, EXCHANGE)
    run = run_boxing([step], (384,), mesh, ones)
    assert {float(part) for (part,) in run.outputs} == {384.0} and float(sum(ones)[0]) == 256.0  # in bfloat16
    with pytest.raises(LayoutError, match="no boxing leads from"):
        path(start, end, (256,), 2, mesh, FLOAT32)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(mesh=meshes(), shape=shapes(), transpose=st.booleans(), data=st.data())
def test_every_step_gives_the_same_tensor_and_sends_the_bytes_stated(
    mesh: Mesh, shape: tuple[int, ...], transpose: bool, data: st.DataObject
) -> None:
    start = data.draw(boxed_layouts(shape, mesh, extremes=True))
    every = [*steps(start, len(shape)), *crops(start, len(shape))]
    check([data.draw(st.sampled_from(every))], numbers(shape, torch.int64), mesh, transpose)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(mesh=meshes(), shape=shapes(least=1), dtype=st.sampled_from(DTYPES), transpose=st.booleans(), data=st.data())
def test_every_crop_gives_what_its_parts_give(
    mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, transpose: bool, data: st.DataObject
) -> None:
    start = data.draw(boxed_layouts(shape, mesh, extremes=True))
    found = crops(start, len(shape))
    if found:
        crop = data.draw(st.sampled_from(found))
        assert crop.parts[0].then(crop.parts[1]) == (crop,)
        check([crop], numbers(shape, dtype), mesh, transpose)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("sizes", "shape"), [((2, 3), (5, 7)), ((3, 2), (4, 3)), ((2, 2, 3), (10, 7)), ((2, 1, 3), (1, 4, 2))]
)
def test_all_steps_of_a_mesh(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = Mesh(**dict(zip("abc", sizes)))
    for start in layouts(len(shape), mesh.axes):
        for step in [*steps(start, len(shape)), *crops(start, len(shape))]:
            check([step], numbers(shape, torch.int64), mesh)


def test_every_layout_reaches_every_layout() -> None:
    for shape in [(4, 4), (5, 3), (1, 2)]:
        mesh = Mesh(a=2, b=3)
        pairs = list(itertools.permutations(layouts(2, mesh.axes), 2))
        for before, after in random.Random(0).sample(pairs, 100):
            check(path(before, after, shape, 4, mesh), numbers(shape, torch.float32), mesh)


def test_booleans_are_boxed_too() -> None:
    mesh = Mesh(a=2, b=2)
    pairs = itertools.permutations(layouts(2, mesh.axes, partial=False), 2)
    for before, after in pairs:
        check(path(before, after, (5, 3), 1, mesh), numbers((5, 3), torch.int64) > 0, mesh)


def test_a_boxed_value_is_contiguous() -> None:
    mesh, shape = Mesh(a=2, b=2), (6, 4, 5)
    for start in layouts(3, mesh.axes)[::3]:
        for step in [*steps(start, 3), *crops(start, 3)]:
            parts = start.shards(numbers(shape, torch.float32), mesh.sizes)
            if step.collective != "keep":
                assert all(out[0].is_contiguous() for out in run_boxing([step], shape, mesh, parts).outputs), step


@settings(deadline=None, derandomize=True, max_examples=100)
@given(mesh=meshes(), shape=shapes(least=1), data=st.data())
def test_ranks_with_equal_shapes_share_one_program(mesh: Mesh, shape: tuple[int, ...], data: st.DataObject) -> None:
    before = data.draw(boxed_layouts(shape, mesh, extremes=True))
    after = data.draw(st.sampled_from(layouts(len(shape), mesh.axes)))
    taken = path(before, after, shape, 4, mesh)
    texts: dict[tuple[tuple[int, ...], ...], str] = {}
    for rank in range(mesh.ranks):
        held = [before, *(layout for step in taken for layout in step.layouts)]
        local = tuple(layout.local_shape(shape, mesh.sizes, mesh.coordinates(rank)) for layout in held)
        code = program(taken, shape, mesh, rank).code
        assert texts.setdefault(local, code) == code


@settings(deadline=None, derandomize=True, max_examples=60)
@given(mesh=meshes(), shape=shapes(), data=st.data())
def test_programs_run_on_tensors_without_data(mesh: Mesh, shape: tuple[int, ...], data: st.DataObject) -> None:
    before = data.draw(boxed_layouts(shape, mesh, extremes=True))
    after = data.draw(st.sampled_from(layouts(len(shape), mesh.axes)))
    taken = path(before, after, shape, 4, mesh)
    for rank in range(mesh.ranks):
        at = mesh.coordinates(rank)
        x = torch.empty(before.local_shape(shape, mesh.sizes, at), device="meta")
        found = program(taken, shape, mesh, rank)(x, *(position.to("meta") for position in positions(mesh, rank)))
        assert tuple(found.shape) == after.local_shape(shape, mesh.sizes, at)


def lines(before: str, after: str, shape: tuple[int, ...], mesh: Mesh, rank: int) -> str:
    """The program of a rank as the graph prints it, without its placeholders."""
    taken = path(Layout.parse(before, mesh.axes), Layout.parse(after, mesh.axes), shape, 4, mesh)
    calls = [node for node in program(taken, shape, mesh, rank).graph.nodes if node.op == "call_function"]
    return (
        "\n".join(f"{node} = {node.target}{node.args}" for node in calls)
        .replace("_default", "")
        .replace(".default", "")
    )


def test_an_even_gather_of_dim_0_copies_nothing() -> None:
    assert lines("[S(0), S(0)]", "[B, B]", (8, 3), Mesh(a=2, b=2), 3) == (
        "contiguous = aten.contiguous(x,)\n"
        "all_gather_into_tensor = _c10d_functional.all_gather_into_tensor(contiguous, 4, 'a+b')\n"
        "wait_tensor = _c10d_functional.wait_tensor(all_gather_into_tensor,)"
    )


def test_an_uneven_chunk_travels_padded() -> None:
    assert lines("[P]", "[S(1)]", (2, 7), Mesh(a=3), 2) == (
        "constant_pad_nd = aten.constant_pad_nd(x, [0, 2])\n"
        "view = aten.view(constant_pad_nd, [2, 3, 3])\n"
        "permute = aten.permute(view, [1, 0, 2])\n"
        "contiguous = aten.contiguous(permute,)\n"
        "view_1 = aten.view(contiguous, [6, 3])\n"
        "reduce_scatter_tensor = _c10d_functional.reduce_scatter_tensor(view_1, 'sum', 3, 'a')\n"
        "wait_tensor = _c10d_functional.wait_tensor(reduce_scatter_tensor,)\n"
        "slice_tensor = aten.slice.Tensor(wait_tensor, 1, 0, 1)\n"
        "contiguous_1 = aten.contiguous(slice_tensor,)"
    )


def test_a_full_chunk_is_picked_by_position_and_a_short_one_is_the_last() -> None:
    mesh = Mesh(a=3)
    assert lines("[B]", "[S(0)]", (7, 2), mesh, 0) == lines("[B]", "[S(0)]", (7, 2), mesh, 1)
    assert lines("[B]", "[S(0)]", (7, 2), mesh, 1) == (
        "slice_tensor = aten.slice.Tensor(x, 0, 0, 6)\n"
        "view = aten.view(slice_tensor, [2, 3, 2])\n"
        "index_select = aten.index_select(view, 0, position_a)\n"
        "view_1 = aten.view(index_select, [3, 2])"
    )
    assert lines("[B]", "[S(0)]", (7, 2), mesh, 2) == ("slice_copy_tensor = aten.slice_copy.Tensor(x, 0, 6, 7)")


def test_a_pad_and_a_slice_of_the_same_dim_are_one_step_that_makes_no_whole_tensor() -> None:
    mesh = Mesh(a=4, b=2)
    (first, _) = path(Layout.parse("[B, S(0)]", mesh.axes), Layout.parse("[S(0), S(0)]", mesh.axes), (64, 9), 4, mesh)
    assert str(first) == "[B, S(0)] -> [S(0), P]: crop over a+b"
    made = [size for call in emitted(first, (64, 9), torch.float32, mesh) for size in call.makes]
    assert max(made) == 16 * 9 * 4  # the whole takes 64 * 9 * 4 bytes
    row = path(Layout.parse("[B, S(0)]", mesh.axes), Layout.parse("[S(0), P]", mesh.axes), (4096,), 4, mesh)[0]
    assert sum(size for call in emitted(row, (4096,), torch.float32, mesh) for size in call.makes) < 2.1 * 1024 * 4
    assert lines("[B, S(0)]", "[S(0), P]", (8, 9), mesh, 0).splitlines() == [
        "mul_scalar = aten.mul.Scalar(position_b, 2)",
        "mul_scalar_1 = aten.mul.Scalar(position_a, 1)",
        "sub_tensor = aten.sub.Tensor(mul_scalar_1, mul_scalar)",
        "new_ones = aten.new_ones(sub_tensor, [1])",
        "cumsum = aten.cumsum(new_ones, 0)",
        "add_tensor = aten.add.Tensor(cumsum, sub_tensor)",
        "clamp = aten.clamp(add_tensor, 1, 2)",
        "ne_tensor = aten.ne.Tensor(clamp, add_tensor)",
        "view = aten.view(ne_tensor, [1, 1, 1])",
        "view_1 = aten.view(x, [2, 2, 9])",
        "sub_scalar = aten.sub.Scalar(clamp, 1)",
        "index_select = aten.index_select(view_1, 0, sub_scalar)",
        "masked_fill_scalar = aten.masked_fill.Scalar(index_select, view, 0)",
        "view_2 = aten.view(masked_fill_scalar, [2, 9])",
    ]


def test_a_pad_writes_one_copy() -> None:
    mesh = Mesh(a=4)
    (pad,) = path(Layout.parse("[S(0)]", mesh.axes), Layout.parse("[P]", mesh.axes), (64, 9), 4, mesh)
    whole = 64 * 9 * 4
    assert sum(size for call in emitted(pad, (64, 9), torch.float32, mesh) for size in call.makes) < 1.1 * whole


def test_a_group_without_elements_runs_no_collective() -> None:
    mesh = Mesh(a=3, b=2)
    assert "c10d" in lines("[S(0), S(0)]", "[S(0), B]", (4, 2), mesh, 0)
    assert lines("[S(0), S(0)]", "[S(0), B]", (4, 2), mesh, 4) == ""


def test_an_empty_part_keeps_nothing_alive() -> None:
    mesh, shape, seen = Mesh(a=3), (4, 6), 0
    for start in layouts(2, mesh.axes):
        for step in steps(start, 2):
            parts = [part.clone() for part in start.shards(numbers(shape, torch.float32), mesh.sizes)]
            held = run_boxing([step], shape, mesh, parts).outputs[2][0]
            seen += held.numel() == 0
            assert held.numel() or held.untyped_storage().nbytes() == 0, step
    assert seen >= 3


def test_axes_of_one_rank_need_no_program() -> None:
    mesh = Mesh(a=1, b=1)
    for before, after in itertools.permutations(layouts(1, mesh.axes), 2):
        assert lines(str(before), str(after), (4,), mesh, 0) == ""


def beside(layout: Layout, mesh: Mesh, axis: int, state: Local | Ragged) -> Layout:
    """A layout of the other axes of a mesh, and this state on one."""
    order = [at + (at >= axis) for at in layout.order]
    return Layout(mesh.axes, (*layout.states[:axis], state, *layout.states[axis:]), (axis, *order))


@settings(deadline=None, derandomize=True, max_examples=400)
@given(rest=meshes(most=2, ranks=6), shape=shapes(least=2), shared=st.booleans(), data=st.data())
def test_boxings_on_other_axes_act_on_the_rows_that_a_rank_holds(
    rest: Mesh, shape: tuple[int, ...], shared: bool, data: st.DataObject
) -> None:
    """Rows in R, however many there are, or in L: what stands beside them is boxed as if they were all."""
    axis, dim, ranks = (data.draw(st.integers(least, most)) for least, most in ((0, len(rest.axes)), (0, 1), (1, 3)))
    sizes = [*rest.sizes[:axis], ranks, *rest.sizes[axis:]]
    mesh = Mesh(**dict(zip("wxyz", sizes)))
    shape = shape if shared else (*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :])
    state, x = (Ragged(dim) if shared else Local(dim)), numbers(shape, torch.int64)
    ends = torch.tensor(sorted(data.draw(st.integers(0, shape[dim])) for _ in range(2 * ranks)))
    source = torch.randperm(shape[dim], generator=torch.Generator().manual_seed(0))
    rows = shards(x, state, ranks, ends=ends, source=source)
    start = data.draw(boxed_layouts(shape, rest, extremes=True).filter(lambda each: dim not in each.cuts))
    end = data.draw(boxed_layouts(shape, rest).filter(lambda each: dim not in each.cuts))
    taken = path(beside(start, mesh, axis, state), beside(end, mesh, axis, state), shape, 8, mesh)
    held = [start.shards(each, rest.sizes, torch.Generator().manual_seed(7)) for each in rows]
    places = [mesh.coordinates(rank) for rank in range(mesh.ranks)]
    numbered = [(at[axis], rest.rank((*at[:axis], *at[axis + 1 :]))) for at in places]
    parts = strided([held[at][number] for at, number in numbered])
    made = dict(zip(numbered, run_boxing(taken, shape, mesh, parts).outputs))
    for at, each in enumerate(rows):
        assert torch.equal(end.whole([made[at, number][0] for number in range(rest.ranks)], rest.sizes), each)
    for step in taken:
        assert emitted(step, shape, x.dtype, mesh)
