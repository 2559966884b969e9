"""Rows of experts that ranks share out by their groups: the state R, what makes it and leaves it, plans, what is sent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

import sbpc
from sbpc import Mesh
from sbpc.boxing.paths import closure, path, seconds
from sbpc.boxing.steps import step_cost, wire
from sbpc.errors import LayoutError, PinError
from sbpc.graph.expert_rows import COUNTING, GATHER, SCATTER
from sbpc.graph.rewrite import called
from sbpc.inspect.diff import traffic_of
from sbpc.inspect.graph_rows import graph_rows
from sbpc.inspect.page import traffic
from sbpc.inspect.report import collectives
from sbpc.mesh.layout import Layout, chunk
from sbpc.mesh.layout_codes import decode as decoded
from sbpc.mesh.layout_codes import encode
from sbpc.mesh.routing import Routing
from sbpc.mesh.states import B, Ragged, S, State, is_ordered, shards, whole
from sbpc.plans import rank_programs
from sbpc.plans.plan_file import decode
from sbpc.plans.staged.stage_parts import PARTS
from sbpc.rules import Signature, match
from sbpc.rules.choices import Choice, local_sizes
from sbpc.rules.match import Sharing
from sbpc.rules.shared_rows import MOVES, PRODUCTS
from sbpc.runtime.executors import kernels, of_any_size
from sbpc.runtime.one_process.lockstep import lockstep
from sbpc.runtime.pieces import cut
from tests.compare import largest_error
from tests.processes import run_ranks
from tests.random_plans import random_plan
from tests.routed import ROUTINGS, Gated, Routed, batch

R = Ragged
PRODUCT = torch.ops.aten._grouped_mm.default
ENDS = {
    "even": [2, 4, 7, 9, 12],
    "all in one": [0, 12, 12, 12, 12],
    "the last idle": [5, 12, 12, 12, 12],
    "the first idle": [0, 0, 0, 5, 12],
    "rows behind": [1, 1, 4, 8, 10],
}


def test_ranks_hold_the_rows_of_their_groups() -> None:
    rows, ends = torch.arange(12), torch.tensor(ENDS["rows behind"])
    parts = shards(rows, R(0), 3, ends=ends)
    assert [part.tolist() for part in parts] == [[0], [1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(whole(parts, R(0)), rows)
    with pytest.raises(LayoutError, match="Give ends=, where they end"):
        shards(rows, R(0), 3)


def program(
    op: Any, args: Sequence[Any], expected: Tensor, signature: Signature, sizes: tuple[int, ...], at: tuple[int, ...]
) -> tuple[GraphModule, int]:
    """What one rank runs: its operands come first, then its place; and which group begins its part."""
    graph, ranks = Graph(), len(sizes)
    matched = match(op, args, {}, expected)
    assert matched is not None
    choice = Choice((signature,) * ranks, tuple(range(ranks)))
    local = local_sizes(matched.sizes.items(), choice, sizes, at)
    names = (f"x{at}" for at in itertools.count())
    given = map_aggregate(tuple(args), lambda x: graph.placeholder(next(names)) if isinstance(x, Tensor) else x)
    rank, first = graph.placeholder("rank"), graph.placeholder("first")
    offsets = {factor: first for factor in choice.cuts() if factor in matched.shifts}
    sharing = Sharing(sizes, rank, "g", signature.ragged)
    made = matched.localize(lambda op, *a, **k: called(graph, op, a, k), given, {}, local, offsets, sharing)
    graph.output((made,))
    return GraphModule(torch.nn.Module(), graph), chunk(matched.sizes["g"], range(ranks), sizes, at)[0]


def proved(op: Any, args: Sequence[Any], pair: Any, sizes: tuple[int, ...], ends: Tensor, as_run: Any = None) -> None:
    """Every rank makes, of its shards of the operands, just its shard of the result."""
    ins, out, factor, rows = pair
    signature = Signature(ins, (out,), factor, rows)
    places = list(itertools.product(*map(range, sizes)))
    ranks = len(places)

    tensors = [x for x in args if isinstance(x, Tensor)]
    held = [shards(x, state, ranks, ends=ends) for x, state in zip(tensors, ins)]
    expected = (as_run or op)(*args)
    programs, firsts = zip(*(program(op, args, expected, signature, sizes, at) for at in places))
    inputs = [
        [*(each[rank] for each in held), torch.tensor([rank]), torch.tensor(firsts[rank])] for rank in range(ranks)
    ]
    run = lockstep(programs, inputs, {"g": [list(range(ranks))]})
    found = [outputs[0] for outputs in run.outputs]
    for mine, wanted in zip(found, shards(expected, out, ranks, ends=ends)):
        assert mine.shape == wanted.shape and torch.equal(mine, wanted)


def numbers(*shape: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(sum(shape))).double()


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (5,), (7,)], ids=str)
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_rows_go_to_the_ranks_of_their_groups_and_back(ends: str, sizes: tuple[int, ...]) -> None:
    end = torch.tensor(ENDS[ends])
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    for by_place, x, index in (
        (True, numbers(7, 3), order % 7),  # some rows twice, and more rows than ranks divide
        (True, numbers(12), order),
        (False, numbers(12, 3), order),
        (False, numbers(12, 3), torch.tensor([3, 0, -1, 3, 3, 11, 5])),
    ):
        proved(GATHER, (x, index, end, by_place), MOVES[GATHER, by_place], sizes, end)
        values = numbers(len(index), 2, 2)
        size = len(x)
        proved(SCATTER, (values, index, end, size, by_place), MOVES[SCATTER, by_place], sizes, end)


def one_by_one(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Products of groups, one after the other."""
    spans = list(itertools.pairwise([0, *ends.tolist()]))
    if y.dim() == 2:
        return torch.stack([x[:, a:b] @ y[a:b] for a, b in spans])
    made = [x[a:b] @ y[at] for at, (a, b) in enumerate(spans)]
    return torch.cat([*made, x.new_zeros(len(x) - spans[-1][1], y.shape[2])])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_products_of_groups_read_the_rows_of_their_groups(ends: str, dtype: torch.dtype) -> None:
    end = torch.tensor(ENDS[ends], dtype=torch.int32)
    weights, rows, other = numbers(5, 8, 4).to(dtype), numbers(12, 8).to(dtype), numbers(12, 4).to(dtype)
    reads, sums = (pair for _, pair in sorted(PRODUCTS.items(), key=lambda item: item[1][1] == S(0)))
    for ranks in (1, 2, 3, 4, 5, 7):  # of four and of seven some have no group
        if ends != "rows behind":  # which hold nothing
            proved(PRODUCT, (rows, weights, end), reads, (ranks,), end, one_by_one)
        proved(PRODUCT, (rows.T, other, end), sums, (ranks,), end, one_by_one)


@pytest.mark.parametrize("sizes", [{"a": 3}, {"a": 2, "b": 2}], ids=str)
def test_plans_that_share_out_rows_equal_one_device_whatever_the_routing(sizes: dict[str, int]) -> None:
    """Nothing but the experts is pinned. What is sent is the rows that go elsewhere."""
    torch.manual_seed(0)
    model, mesh = Routed().double(), Mesh(**sizes)
    plan = sbpc.plan(model, batch(), mesh, pin={"experts*": f"[{', '.join(['S(0)'] * len(sizes))}]"})
    made = {str(node.meta["sbp"]) for node in plan.graph.graph.nodes if node.target is PRODUCT}
    assert made == {f"[{', '.join([state] * len(sizes))}]" for state in ("R(0)", "S(0)")}
    assert plan.verify() > 1000
    for routing in ROUTINGS:
        assert largest_error(plan, model, batch(routing)) <= 1e-10, routing
    drawn = [random_plan(plan, seed) for seed in range(6)]
    assert sum(any(R(0) in states(node) for node in each.graph.graph.nodes) for each in drawn) > 1
    for each in drawn:
        assert largest_error(each, model, batch("one idle")) <= 1e-10


@pytest.mark.parametrize("sizes", [{"a": 3}, {"a": 2, "b": 3}], ids=str)
def test_ranks_without_experts_have_no_rows(sizes: dict[str, int]) -> None:
    """Where they may not store weights that leave ranks without any, they are sent them split otherwise."""
    torch.manual_seed(0)
    model, mesh = Routed(experts=4).double(), Mesh(**sizes)
    plan = sbpc.plan(model, of_four("as it comes"), mesh, pin={"_grouped_mm": f"[{', '.join(['R(0)'] * len(sizes))}]"})
    for routing in ROUTINGS:
        assert largest_error(plan, model, of_four(routing)) <= 1e-10, routing


def of_four(routing: str) -> tuple[Tensor, Tensor]:
    """A batch for four experts."""
    x, favour = batch(routing)
    return x, favour[:4]


def train(path: str, executor: str, kind: type[Routed] = Routed) -> list[float]:
    """Losses of steps with other routings, of a plan on this rank; the last ones those of the weights."""
    torch.manual_seed(0)
    model = sbpc.parallelize(kind().double(), sbpc.load(path), executor=executor)
    return losses(model)


def losses(model: torch.nn.Module) -> list[float]:
    """Losses of Adam's steps, and sums of the weights behind them."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for routing in ROUTINGS:
        optimizer.zero_grad()
        loss = model(*batch(routing))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    weights = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [*found, *(float(p.detach().square().sum()) for p in weights)]


@pytest.mark.parametrize("executor", ["code", pytest.param("inductor", marks=pytest.mark.prove)])
def test_adam_steps_on_four_ranks_equal_one_process(tmp_path: Path, executor: str) -> None:
    torch.manual_seed(0)
    model = Routed().double()
    plan = sbpc.plan(model, batch(), Mesh(a=2, b=2), pin={"experts*": "[S(0), S(0)]"})
    assert any(state == R(0) for node in plan.graph.graph.nodes for state in states(node))
    path = str(tmp_path / "routed.sbpc")
    plan.save(path)
    expected = losses(model)
    for found in run_ranks(train, 4, path, executor):
        assert isinstance(found, list), found
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("pin", "executor"),
    [
        ("[R(0), S(1)]", "code"),
        *(
            pytest.param(pin, executor, marks=pytest.mark.prove)
            for pin, executor in (("[L(0), S(1)]", "code"), ("[S(1), R(0)]", "code"), ("[R(0), S(1)]", "inductor"))
        ),
    ],
)
def test_experts_whose_gates_are_split_on_another_axis_equal_one_process(
    tmp_path: Path, pin: str, executor: str
) -> None:
    """What one weight gives is split across its two halves, and boxed where they are taken apart."""
    torch.manual_seed(0)
    model = Gated().double()
    plan = sbpc.plan(model, batch(), Mesh(a=2, b=2), pin={"_grouped_mm": pin})
    boxed = [node.meta["step"] for node in plan.boxed.graph.nodes if "step" in node.meta]
    assert plan.verify() > 1000 and any(is_ordered(s) for step in boxed for s in step.before.states)
    for routing in ROUTINGS:
        assert largest_error(plan, model, batch(routing)) <= 1e-10, routing
    path = str(tmp_path / "gated.sbpc")
    plan.save(path)
    expected = losses(model)
    for found in run_ranks(train, 4, path, executor, Gated):
        assert isinstance(found, list), found
        assert found == pytest.approx(expected, rel=1e-10)


def states(node: Node) -> tuple[State, ...]:
    """The states of a value."""
    layout = node.meta.get("sbp")
    return layout.states if isinstance(layout, Layout) else ()


def rows_sent(model: Routed, x: Tensor, favour: Tensor, ranks: int) -> int:
    """How many rows go to a rank that has not their token."""
    rows = (x + torch.nn.functional.gelu(model.first(x))).flatten(0, 1)
    ids = (torch.softmax(model.router(rows) + favour, -1)).topk(model.chosen)[1]
    tokens = torch.arange(len(rows)).unsqueeze(1).expand_as(ids)
    return int((tokens // -(-len(rows) // ranks) != ids // -(-len(favour) // ranks)).sum())


def test_what_is_sent_is_the_rows_that_go_elsewhere_and_memory_is_enough_for_any_routing() -> None:
    torch.manual_seed(0)
    model = Routed().double()
    plan = sbpc.plan(model, batch(), Mesh(a=3), pin={"experts*": "S(0)"})
    columns = 4 * 8 + 2  # there and back, in the forward and in the backward, and weights and their gradients
    sent = []
    for routing in ROUTINGS:
        run = sbpc.simulate(plan, model, batch(routing))
        sent.append(run.bytes_sent["a"] - rows_sent(model, *batch(routing), 3) * columns * 8 / 3)
        assert run.peak_memory <= plan.cost.memory["total"]
    assert sent == pytest.approx([sent[0]] * len(ROUTINGS), rel=1e-12)
    assert len({rows_sent(model, *batch(routing), 3) for routing in ROUTINGS}) > 2


def test_files_formulas_and_pages_hold_plans_that_share_out_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = Routed().double(), batch("one idle")
    plan = sbpc.plan(model, batch(), Mesh(a=3, cluster="h100"), pin={"experts*": "S(0)", "_grouped_mm": "R(0)"})
    assert plan.cost.subs() == pytest.approx(plan.cost.compute_seconds + plan.cost.comm_seconds)
    numbers = {plan.cost.symbols[name]: number for name, number in plan.cost.numbers.items()}
    assert float(plan.cost.bytes_expr["a"].xreplace(numbers)) == pytest.approx(plan.cost.bytes_sent["a"])
    plan.save_page(tmp_path / "plan.html")
    assert "where groups of rows end" in (tmp_path / "plan.html").read_text()
    assert "[R(0)]" in str(plan.explain("_grouped_mm"))
    told = collectives(plan)
    assert told["a", "dispatch"][1] > 0
    for found in (
        sum(sent for _, sent in told.values()),
        sum(sent for _, sent in traffic_of(plan).values()),
        sum(sent for _, (_, sent, _) in traffic(plan)),
        sum(row.sent for row in graph_rows(plan.boxed, plan.mesh)),
    ):
        assert found == pytest.approx(plan.cost.bytes_sent["a"])
    assert {event.axis for event in plan.timeline() if event.stream != "compute"} == {"a"}
    plan.export(tmp_path / "programs.sbpc")
    exported = rank_programs.decode(decode(tmp_path / "programs.sbpc"))
    found, expected = (sbpc.simulate(each, model, args).gradients for each in (exported, plan))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_no_boxing_leads_to_rows_that_are_shared_out_or_from_there() -> None:
    layouts = [Layout.parse(text, "ab") for text in ("[R(0), B]", "[R(0), P]", "[P(max), B]", "[B, B]")]
    mesh, codes = Mesh(a=2, b=2), np.array([encode(layout) for layout in layouts])
    assert [decoded(int(code), mesh.axes) for code in codes] == layouts
    found = closure(codes, (4, 4), 4, mesh)
    assert np.isinf(found[:2, 2:]).all() and np.isinf(found[2:, :2]).all()
    assert np.isfinite(found[:2, :2]).all() and np.isfinite(found[2:, 3]).all()  # beside them other axes change
    assert np.isfinite(closure(codes[:1], (4, 4), 4, mesh)).all()
    with pytest.raises(LayoutError, match="Only ops that take rows to experts and back lead to L and R"):
        path(layouts[0], layouts[3], (4, 4), 4, mesh)


def test_steps_beside_rows_that_are_shared_out_cost_what_those_of_the_busiest_rank_do() -> None:
    mesh, ways = Mesh(a=4, b=4, cluster="h100"), ("[R(0), P]", "[R(0), B]")
    rows, other, cut = (
        tuple(Layout.parse(text.replace("R(0)", state), "ab") for text in ways) for state in ("R(0)", "B", "S(0)")
    )
    for times in (1.0, 1.5, 4.0):
        routed = mesh.routed(Routing(times))
        (step,) = path(*rows, (4096, 512), 2, routed)
        sized, _ = rows[0].busiest((4096, 512), mesh.sizes, times)
        assert seconds(*rows, (4096, 512), 2, routed) == step_cost(step, sized, 2, mesh)[0]
        assert (
            closure(np.array([*map(encode, rows)]), (4096, 512), 2, routed)[0, 1] == step_cost(step, sized, 2, mesh)[0]
        )
        assert wire(step, sized, 2, mesh.sizes)[1] == times * wire(step, (4096, 512), 2, mesh.sizes)[1]
    assert seconds(*rows, (4096, 512), 2, mesh) == seconds(*cut, (4096, 512), 2, mesh)
    assert seconds(*rows, (4096, 512), 2, mesh.routed(Routing(4.0))) == seconds(*other, (4096, 512), 2, mesh)


def test_a_limit_of_memory_counts_all_rows_on_every_rank() -> None:
    torch.manual_seed(0)
    model = Routed().double()
    free = sbpc.plan(model, batch(), Mesh(a=3))
    plan = sbpc.plan(model, batch(), Mesh(a=3), memory=60_000)
    assert plan.cost.memory["total"] <= 60_000 < free.cost.memory["total"]
    assert largest_error(plan, model, batch("all to one")) <= 1e-10


def test_inductor_gets_the_calls_whose_sizes_a_plan_knows() -> None:
    """Between two of its pieces are those on rows that are shared out, and what they are told."""
    torch.manual_seed(0)
    plan = sbpc.plan(Routed().double(), batch(), Mesh(a=2), pin={"experts*": "S(0)"})
    graph = kernels(plan.programs[0].local_at(PARTS, True, 0))
    apart = of_any_size(graph)
    pieces = cut(graph, apart)
    assert {piece.calls[0] in apart for piece in pieces} == {True, False}
    assert all(len({call in apart for call in piece.calls}) == 1 for piece in pieces)
    compiled = [call for piece in pieces for call in piece.calls if call not in apart]
    assert sum(call.target is torch.ops.aten.addmm.default for call in compiled) > 0
    for call in compiled:  # its operands, and what it makes, have the sizes of the plan
        for used in (call, *call.all_input_nodes):
            assert used.target not in COUNTING and R(0) not in states(used)


@pytest.mark.parametrize(
    ("sizes", "pin"), [((1, 2), "[R(0), B]"), ((2, 1), "[L(0), R(0)]"), ((1,), "R(0)"), ((1, 2), "R(0)@a, R(0)@b")]
)
def test_on_an_axis_of_one_rank_rows_are_whole_whatever_is_asked(sizes: tuple[int, ...], pin: str) -> None:
    torch.manual_seed(0)
    model, mesh = Routed().double(), Mesh(**dict(zip("ab", sizes)))
    plan = sbpc.plan(model, batch(), mesh, pin={"_grouped_mm": pin})
    (made, *_) = [node.meta["sbp"] for node in plan.graph.graph.nodes if node.target is PRODUCT]
    assert all(state == B for state, size in zip(made.states, sizes) if size == 1)
    assert largest_error(plan, model, batch("one idle")) <= 1e-10


def test_pins_between_which_no_boxing_leads_are_named() -> None:
    pin = {"_grouped_mm": "[L(0), R(0)]", "_grouped_mm_1": "[R(0), R(0)]", "first.weight": "[B, B]"}
    with pytest.raises(PinError) as error:
        sbpc.plan(Routed().double(), batch(), Mesh(a=2, b=2), pin=pin)
    assert_expected_inline(
        str(error.value),
        """\
these pins cannot be met together
  pin '_grouped_mm': '[L(0), R(0)]'
  pin '_grouped_mm_1': '[R(0), R(0)]'
no boxing leads from one of these layouts to another
  Remove pins one by one.""",
    )
