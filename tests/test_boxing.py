"""Boxing: the steps there are, the cheapest paths through them, and what they cost, against a textbook search."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from sbpc.boxing.paths import _graph, closure, path, seconds
from sbpc.boxing.steps import Step, steps, wire
from sbpc.errors import LayoutError
from sbpc.mesh.cluster import Cluster, Rate
from sbpc.mesh.layout import Layout, broadcast
from sbpc.mesh.layout_codes import decode, encode
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import B, Partial, S
from tests.boxings import LOCAL, boxed_layouts, crops, layouts, meshes, shapes, textbook_steps

GRID = Mesh(a=2, b=4)
SLOW = Cluster(
    "slow",
    1e12,
    1e12,
    0.0,
    4,
    1e-6,
    1e11,
    5e-6,
    3e10,
    collectives=(
        Rate("all_to_all", efficiency=0.5),
        Rate("reduce_scatter", 2, latency=9e-6, efficiency=0.8, least=1.2e-5),
    ),
)


def layout(text: str, mesh: Mesh = GRID) -> Layout:
    return Layout.parse(text, mesh.axes)


def show(taken: tuple[Step, ...]) -> str:
    return "\n".join(map(str, taken))


def whole_tensors(before: str, after: str, shape: tuple[int, ...] = (64, 64)) -> float:
    """The bytes of the cheapest path on (2, 4), over all ranks, in units of the whole tensor."""
    taken = path(layout(before), layout(after), shape, 4, GRID)
    return sum(wire(step, shape, 4, GRID.sizes)[1] for step in taken) * GRID.ranks / (4 * math.prod(shape))


def test_the_arrays_hold_the_layouts_and_the_steps_that_the_objects_give() -> None:
    for extremes in [(None,), ("max", None), ("max", "min"), (None, None, None), ("max", None, "max")]:
        axes, dims = ("a", "b", "c")[: len(extremes)], 2
        graph = _graph(dims, axes, extremes)
        every = [decode(int(code), axes) for code in graph.numbered]
        if not any(extremes):
            assert tuple(every) == layouts(dims, axes)
        wanted = [step for at in every for step in textbook_steps(at, dims)]
        assert [step for at in every for step in steps(at, dims)] == wanted
        made = [graph.step(edge) for edge in range(len(graph.source))]
        assert len(made) == len(wanted) == len(set(made)) and set(made) == set(wanted)


def test_layouts_are_all_states_in_all_orders() -> None:
    for count in range(1, 4):
        for dims in range(5):
            axes = ("a", "b", "c")[:count]
            found = layouts(dims, axes)
            # k axes split: each in turn goes to a dim, before or after any of those that are there already
            ways = [math.comb(count, k) * 2 ** (count - k) * math.prod(range(dims, dims + k)) for k in range(count + 1)]
            assert len(found) == len(dict.fromkeys(found)) == sum(ways)
            assert len(layouts(dims, axes, orders=False)) == (dims + 2) ** count
            assert not any(each.partial for each in layouts(dims, axes, partial=False))


def test_steps_out_of_a_layout() -> None:
    assert show(tuple(steps(layout("[S(0), S(0)]"), 2))) == (
        "[S(0), S(0)] -> [S(0), S(1)]: all_to_all over b\n"
        "[S(0), S(0)] -> [S(0), B]: all_gather over b\n"
        "[S(0), S(0)] -> [S(0), P]: pad over b\n"
        "[S(0), S(0)] -> [S(1), S(1)]: all_to_all over a+b\n"
        "[S(0), S(0)] -> [S(1), S(1)] S(1)@b>a: all_to_all over a+b\n"
        "[S(0), S(0)] -> [B, B]: all_gather over a+b"
    )
    assert show(tuple(steps(layout("[P, B]"), 1))) == (
        "[P, B] -> [S(0), B]: reduce_scatter over a\n"
        "[P, B] -> [B, B]: all_reduce over a\n"
        "[P, B] -> [P, S(0)]: slice over b\n"
        "[P, B] -> [P, P]: keep over b"
    )


def test_every_step_changes_its_axes_and_nothing_else() -> None:
    for start in layouts(2, ("a", "b", "c")):
        taken = list(steps(start, 2))
        assert len(dict.fromkeys(taken)) == len(taken)
        for step in taken:
            assert step.before == start and step.after != start
            changed = tuple(at for at in range(3) if step.before.states[at] != step.after.states[at])
            assert changed == step.axes == tuple(range(step.axes[0], step.axes[-1] + 1))
            for dim in range(2):
                old, new = step.before.cuts.get(dim, ()), step.after.cuts.get(dim, ())
                shorter, longer = sorted((old, new), key=len)
                assert longer[: len(shorter)] == shorter and set(longer[len(shorter) :]) <= set(step.axes)


def test_known_boxings_move_so_many_whole_tensors() -> None:
    for before, after, tensors in [
        ("[S(0), S(0)]", "[B, B]", 7),
        ("[P, S(0)]", "[S(0), B]", 5.375),  # the known 5.5 undercut by an all_to_all of both axes in b>a
        ("[B, S(0)]", "[S(0), S(0)]", 1.625),
        ("[S(0), S(0)]", "[B, S(0)]", 2.625),
        ("[S(0), S(0)] S(0)@b>a", "[B, S(0)]", 1),
        ("[P, P]", "[B, B]", 14),
        ("[P, P]", "[S(0), S(1)]", 7),
        ("[B, B]", "[P, S(1)]", 0),
        ("[S(0), S(1)]", "[P, P]", 0),
    ]:
        assert whole_tensors(before, after) == tensors


def test_the_block_that_interleaves_goes_round_by_the_other_dim() -> None:
    assert show(path(layout("[S(0), S(0)]"), layout("[B, S(0)]"), (64, 64), 4, GRID)) == (
        "[S(0), S(0)] -> [S(1), S(1)]: all_to_all over a+b\n"
        "[S(1), S(1)] -> [S(1), S(0)]: all_to_all over b\n"
        "[S(1), S(0)] -> [B, S(0)]: all_gather over a"
    )


def test_with_one_dim_a_sum_with_zeros_is_cheaper_than_to_gather_all() -> None:
    assert show(path(layout("[S(0), S(0)]"), layout("[B, S(0)]"), (64,), 4, GRID)) == (
        "[S(0), S(0)] -> [S(0), B]: all_gather over b\n"
        "[S(0), B] -> [P, S(0)]: crop over a+b\n"
        "[P, S(0)] -> [B, S(0)]: all_reduce over a"
    )
    assert whole_tensors("[S(0), S(0)]", "[B, S(0)]", (64,)) == 3 + 2


def test_an_unchanged_layout_takes_no_step() -> None:
    for each in layouts(2, GRID.axes):
        assert path(each, each, (3, 5), 4, GRID) == ()


def test_partial_results_of_any_kind_are_reduced_on_the_wire() -> None:
    for each in ["P(max)", "P(min)", "P"]:
        assert [step.collective for step in path(layout(f"[{each}, {each}]"), broadcast("ab"), (8, 8), 4, GRID)] == [
            "all_reduce"
        ]
        scattered = path(layout(f"[{each}, B]"), layout("[S(1), S(0)]"), (8, 8), 4, GRID)
        assert sorted(step.collective for step in scattered) == ["reduce_scatter", "slice"]


def test_mixed_partial_results_are_reduced_from_the_innermost_axis() -> None:
    taken = path(layout("[P, P(max)]"), layout("[B, B]"), (8, 8), 4, GRID)
    reducing = [step.axes for step in taken if step.collective in ("all_reduce", "reduce_scatter")]
    assert reducing == [(1,), (0,)]
    with pytest.raises(LayoutError, match="no boxing leads from"):
        path(layout("[P, P(max)]"), layout("[B, P(max)]"), (8, 8), 4, GRID)


def relaxed(start: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> dict[Layout, tuple[Fraction, int]]:
    """Dijkstra in exact fractions: by layout the least seconds, and of the cheapest paths the fewest steps."""
    best: dict[Layout, tuple[Fraction, int]] = {start: (Fraction(0), 0)}
    queue = [(Fraction(0), 0, str(start), start)]
    while queue:
        cost, hops, _, at = heapq.heappop(queue)
        if best[at] < (cost, hops):
            continue
        for step in steps(at, len(shape)):
            reached = (cost + price(step, shape, itemsize, mesh), hops + 1)
            if step.after not in best or reached < best[step.after]:
                best[step.after] = reached
                heapq.heappush(queue, (*reached, str(step.after), step.after))
    return best


def price(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> Fraction:
    local = step.before.local_shape(shape, mesh.sizes, (0,) * len(mesh.axes))
    other = step.after.local_shape(shape, mesh.sizes, (0,) * len(mesh.axes))
    ranks = math.prod(mesh.sizes[at] for at in step.axes)
    first = step.before.states[step.axes[0]]
    # maxima and minima of 16 bits are sent in 32
    widened = itemsize == 2 and first in (Partial("max"), Partial("min")) and "reduce" in step.collective
    block = (4 if widened else itemsize) * math.prod(map(min, local, other))
    if step.collective in LOCAL:
        return Fraction(0)
    latency, bandwidth, least = map(Fraction, mesh.link(step.axes, step.collective))
    if step.collective == "all_reduce":
        return max(2 * (ranks - 1) * (latency + Fraction(block, ranks) / bandwidth), least)
    return max((ranks - 1) * (latency + block / bandwidth), least)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(mesh=meshes(most=2), shape=shapes(), itemsize=st.sampled_from([1, 2, 8]), slow=st.booleans(), data=st.data())
def test_paths_are_the_cheapest_and_of_those_the_shortest(
    mesh: Mesh, shape: tuple[int, ...], itemsize: int, slow: bool, data: st.DataObject
) -> None:
    mesh = Mesh(cluster=SLOW if slow else None, **dict(zip(mesh.axes, mesh.sizes)))
    start = data.draw(boxed_layouts(shape, mesh, extremes=True))
    best = relaxed(start, shape, itemsize, mesh)
    for goal, (cost, hops) in best.items():
        taken = path(start, goal, shape, itemsize, mesh)
        assert float(sum(price(step, shape, itemsize, mesh) for step in taken)) == pytest.approx(float(cost), rel=1e-11)
        assert seconds(start, goal, shape, itemsize, mesh) == pytest.approx(float(cost), rel=1e-11)
        assert sum(2 if step.collective == "crop" else 1 for step in taken) == hops
        assert [start, *(step.after for step in taken)] == [*(step.before for step in taken), goal]


def codes(found: Sequence[Layout]) -> np.ndarray:
    return np.array([encode(one) for one in found])


def test_the_closure_is_what_paths_cost_and_a_metric() -> None:
    for sizes, shape in [
        ((2, 4), (6, 10)),
        ((2, 4), (8, 16, 8)),
        ((3,), (7, 4, 4)),
        ((2, 2, 2), (4, 8)),
        ((2, 2, 2), (8, 16)),
        ((1, 3), ()),
    ]:
        mesh = Mesh(cluster=SLOW, **dict(zip("abc", sizes)))
        found = layouts(len(shape), mesh.axes)
        costs = closure(codes(found), shape, 4, mesh)
        assert np.isfinite(costs).all() and (np.diag(costs) == 0).all()
        for through in range(len(found)):
            assert (costs <= (costs[:, through, None] + costs[through]) * (1 + 1e-12)).all()
        pairs = list(itertools.product(range(len(found)), repeat=2))
        for row, column in pairs[:: 1 + len(pairs) // 500]:
            taken = path(found[row], found[column], shape, 4, mesh)
            spent = float(sum(price(step, shape, 4, mesh) for step in taken))
            assert costs[row, column] == pytest.approx(spent, rel=1e-11)


def test_a_closure_of_some_layouts_is_part_of_the_closure_of_all() -> None:
    found = layouts(2, GRID.axes)
    costs = closure(codes(found), (6, 10), 4, GRID)
    some = [7, 3, 11, 3]
    assert (closure(codes(found)[some], (6, 10), 4, GRID) == costs[np.ix_(some, some)]).all()


def test_nothing_leads_to_extremes() -> None:
    found = [layout(text) for text in ("[P(max), B]", "[B, B]", "[P(min), S(0)]", "[P(max), S(0)]")]
    costs = closure(codes(found), (8, 8), 4, GRID)
    assert np.isfinite(costs).tolist() == [
        [True, True, False, True],
        [False, True, False, False],
        [False, True, True, False],
        [True, True, False, True],
    ]


def test_seconds_are_rounds_of_latency_and_bytes_on_the_slowest_link() -> None:
    mesh = Mesh(cluster=SLOW, a=2, b=4)  # b within a node; a across, four groups sharing the link of a node
    both, rows = layout("[S(0), S(0)]", mesh), layout("[S(0), B]", mesh)
    assert seconds(both, rows, (8, 10), 4, mesh) == pytest.approx(3 * 1e-6 + 3 * 40 / 1e11)
    assert seconds(layout("[P, B]", mesh), layout("[B, B]", mesh), (1,), 4, mesh) == pytest.approx(
        2 * 5e-6 + 4 / (3e10 / 4)
    )
    assert seconds(layout("[B, S(0)]", mesh), layout("[B, S(1)]", mesh), (8, 8), 4, mesh) == pytest.approx(
        3 * 1e-6 + 3 * 16 / 1e11 / 0.5
    )
    scattered = layout("[P, B]", mesh), layout("[S(0), B]", mesh)
    assert seconds(*scattered, (8,), 4, mesh) == pytest.approx(2 * 5e-6 + 32 / (3e10 / 4))  # all-reduced, then cut
    assert seconds(*scattered, (6144,), 4, mesh) == pytest.approx(1.2e-5)  # what a scatter takes at least


@settings(deadline=None, derandomize=True, max_examples=60)
@given(mesh=meshes(), shape=shapes(), data=st.data())
def test_the_formula_of_the_wire_gives_its_number(mesh: Mesh, shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(boxed_layouts(shape, mesh, extremes=True))
    symbols = sympy.symbols("a b c", positive=True)[: len(mesh.axes)]
    for step in steps(start, len(shape)):
        formulas = wire(step, shape, 4, mesh.sizes, symbols)
        found = [sympy.sympify(formula).subs(dict(zip(symbols, mesh.sizes))) for formula in formulas]
        rounds, sent = wire(step, shape, 4, mesh.sizes)
        assert found[0] == rounds and float(found[1]) == pytest.approx(sent, rel=1e-12)


def test_formulas_keep_a_ceiling_where_a_cut_is_uneven() -> None:
    a, b = sympy.symbols("a b", positive=True)
    gather = Step("all_gather", (1,), layout("[S(0), S(0)]"), layout("[S(0), B]"))
    reduce = Step("all_reduce", (0,), layout("[P, B]"), layout("[B, B]"))
    assert str(wire(gather, (16, 10), 4, (2, 4), (a, b))) == "(b - 1, 640*(b - 1)/(a*b))"
    assert str(wire(gather, (6, 10), 4, (2, 4), (a, b))) == "(b - 1, 40*(b - 1)*ceiling(6/(a*b)))"
    assert str(wire(reduce, (5,), 4, (2, 4), (a, b))) == "(2*a - 2, (40*a - 40)/a)"
    assert wire(reduce, (5,), 4, (2, 4)) == (2, 20.0)


def test_a_local_step_costs_nothing() -> None:
    for each in layouts(2, GRID.axes):
        for step in [*steps(each, 2), *crops(each, 2)]:
            if step.collective in LOCAL:
                assert wire(step, (5, 7), 4, GRID.sizes) == (0, 0)


def test_impossible_boxings_are_refused() -> None:
    for before, after, message in [
        (
            "[B, B]",
            "[B, P(max)]",
            "no boxing leads from [B, B] to [B, P(max)]\n  Box P(max) and P(min) to B or to a split.",
        ),
        ("[B, S(2)]", "[B, B]", "layout [B, S(2)] of a tensor with 2 dims\n  Split one of its dims."),
        ("[B, B]", "[S(7), B]", "layout [S(7), B] of a tensor with 2 dims\n  Split one of its dims."),
    ]:
        for call in (path, seconds):
            with pytest.raises(LayoutError) as error:
                call(layout(before), layout(after), (8, 8), 4, GRID)
            assert str(error.value) == message


def test_a_layout_over_other_axes_is_refused() -> None:
    with pytest.raises(LayoutError) as error:
        seconds(Layout(("x", "y"), (B, S(0))), layout("[B, B]"), (8, 8), 4, GRID)
    assert (
        str(error.value) == "layout [B, S(0)] over x, y on Mesh(a=2, b=4)\n  Give a layout over the axes of the mesh."
    )
