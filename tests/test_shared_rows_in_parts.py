"""Rows of experts that ranks share out where a step runs in parts: micro-batches, stages, recompute."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import LoopError, PlanError
from sbpc.graph.about import RECOMPUTES
from sbpc.mesh.states import Ragged
from sbpc.plans.measure import dispatch_of
from sbpc.plans.timeline import COMPUTE, works
from tests.compare import eager, largest_error
from tests.processes import run_ranks
from tests.routed import ROUTINGS, Layer, Layers, Routed, batch
from tests.test_plan import refused
from tests.test_shared_rows import PRODUCT, rows_sent, states

PIPE: dict[str, Any] = {"pipe": 2, "a": 2}
# what is sent takes about as long as what is computed, and neither has a start
EVEN = replace(
    Mesh(a=2, cluster="h100").cluster,
    **{"device": None, "collectives": (), "ways": (), "launch": 0.0, "intra_latency": 0.0, "inter_latency": 0.0},
    **{"peak": 1e10, "memory_bandwidth": 1e12, "intra_bandwidth": 1e9, "inter_bandwidth": 1e9},
    **{"kernels_beside": 1.0, "links_beside": 1.0},
)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "micro-batches": ({"a": 4}, {"microbatches": 2, "schedule": "breadth-first"}),
    "on two axes": ({"a": 2, "b": 2}, {"microbatches": 4}),
    "beside another axis": ({"a": 2, "b": 2, "c": 2}, {"microbatches": 2}),
    "stages": (PIPE, {"stages": "pipe", "microbatches": 2}),
    "stages on two axes": ({"pipe": 2, "a": 2, "b": 2}, {"stages": "pipe", "microbatches": 4, "schedule": "1f1b"}),
    "interleaved": (PIPE, {"stages": "pipe", "microbatches": 2, "schedule": "interleaved:2"}),
    "recomputed": ({"a": 2, "b": 2}, {"recompute": "full"}),
    "partly": ({"a": 2}, {"recompute": "selective", "microbatches": 2}),
    "stages, recomputed": (PIPE, {"stages": "pipe", "microbatches": 2, "recompute": "full"}),
    "halves": ({"a": 4, "cluster": EVEN}, {}),
}


def planned(case: str, model: nn.Module, rows: int = 6, **more: Any) -> sbpc.Plan:
    """The plan of a case, whose experts are split over its axes but that of stages, at most two of them."""
    sizes, options = CASES[case]
    axes = [axis for axis in sizes if axis not in ("pipe", "cluster")]
    pin = f"[{', '.join(['S(0)', 'S(0)', 'B'][: len(axes)])}]" if len(axes) > 1 else f"S(0)@{axes[0]}"
    return sbpc.plan(model, batch(rows=rows, experts=8), Mesh(**sizes), pin={"*experts*": pin}, **options, **more)


@pytest.mark.parametrize("case", CASES)
def test_steps_in_parts_equal_one_device_whatever_the_routing(case: str) -> None:
    torch.manual_seed(0)
    model = Layers(4 if case == "interleaved" else 2, experts=8).double()
    plan = planned(case, model)
    products = [node for chunk in plan.chunks for node in chunk.graph.graph.nodes if node.target is PRODUCT]
    assert products and all(Ragged(0) in states(n) or n.meta["val"].dim() == 3 for n in products)
    assert (plan.loop is not None) == ("microbatches" in CASES[case][1])
    assert plan.options.microbatches == CASES[case][1].get("microbatches", 2 if case == "halves" else 1)
    assert plan.verify() > 100
    for routing in ROUTINGS:
        assert largest_error(plan, model, batch(routing, experts=8)) <= 1e-10, routing


def test_a_micro_batch_sends_its_own_rows_that_go_elsewhere() -> None:
    torch.manual_seed(0)
    model = Layers(1).double()
    plan = sbpc.plan(model, batch(), Mesh(a=2), pin={"*experts*": "S(0)"}, microbatches=2, schedule="breadth-first")
    columns = 4 * 8 + 2  # there and back, in the forward and in the backward, and weights and their gradients
    sent = []
    for routing in ROUTINGS:
        x, favour = batch(routing)
        rows = sum(rows_sent(model.layers[0], part, favour, 2) for part in x.chunk(2))  # type: ignore[arg-type]
        run = sbpc.simulate(plan, model, (x, favour))
        sent.append(run.bytes_sent["a"] - rows * columns * 8 / 2)
        assert run.peak_memory <= plan.cost.memory["total"]
    assert sent == pytest.approx([sent[0]] * len(ROUTINGS), rel=1e-12)


def train(plan: sbpc.Plan) -> list[float]:
    """Losses of Adam's steps on this rank, and what the weights are then."""
    torch.manual_seed(0)
    return losses(sbpc.parallelize(Layers(experts=8).double(), plan))


def losses(model: Any) -> list[float]:
    """Losses of three of Adam's steps with other routings, to which odd ranks come late, and the sum of all squares of weights behind them."""
    optimizer, found = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for routing in ("as it comes", "all to one", "the last ones idle"):
        optimizer.zero_grad()
        args = batch(routing, experts=8)
        if hasattr(model, "step"):
            time.sleep(0.3 * (torch.distributed.get_rank() % 2))
            loss = model.step(*args)
        else:
            loss = model(*args)
            loss.backward()
        optimizer.step()
        found.append(loss.item())
    whole = sbpc.full_state_dict(model) if hasattr(model, "step") else model.state_dict()
    return [*found, *(float(value.square().sum()) for value in (whole or {}).values())]


@pytest.mark.parametrize("case", ["stages", "halves", pytest.param("on two axes", marks=pytest.mark.prove)])
def test_adam_steps_in_parts_on_four_ranks_equal_one_process(case: str) -> None:
    torch.manual_seed(0)
    model = Layers(experts=8).double()
    plan = planned(case, model)
    expected = losses(model)
    for rank, found in enumerate(run_ranks(train, 4, plan)):
        assert isinstance(found, list), found
        assert found == pytest.approx(expected if rank == 0 else expected[: len(found)], rel=1e-10)


def test_rows_of_one_half_are_sent_beside_the_work_of_the_other() -> None:
    torch.manual_seed(0)
    model = Layers(experts=8).double()
    plan = planned("halves", model, rows=12)  # so that what ranks tell each other of their rows is little beside these
    work, calls = works(plan.boxed, plan.mesh), [n for n in plan.boxed.graph.nodes if n.op == "call_function"]
    sent = [node for node in calls if "choice" in node.meta and dispatch_of(node, plan.mesh) is not None]
    assert len(sent) == 2 * 12 and all(work[node].stream != COMPUTE for node in sent)
    beside = 0
    for node in sent:
        (end,) = node.users  # which waits for it
        assert "awaits" in end.meta
        between = calls[calls.index(node) + 1 : calls.index(end)]
        beside += any(work[each].stream == COMPUTE and work[each].seconds for each in between)
    assert beside > len(sent) / 2
    whole = planned("halves", model, rows=12, microbatches=1)
    assert plan.cost.exposed_seconds < 0.9 * whole.cost.exposed_seconds and plan.cost.seconds < whole.cost.seconds


@pytest.mark.parametrize("form", ["selective", "full"])
def test_what_a_router_decides_is_not_computed_again(form: str) -> None:
    """Nor what is made of that alone: how rows are sorted, and counted."""
    torch.manual_seed(0)
    model = Layers().double()
    plan = sbpc.plan(model, batch(), Mesh(a=2), recompute=form, pin={"*experts*": "S(0)"})
    again = Counter(str(n.target) for n in plan.graph.graph.nodes if RECOMPUTES in n.meta)
    decided = {f"aten.{op}.default" for op in ("topk", "histc", "cumsum", "index_put", "floor_divide")}
    assert again and not decided & again.keys() and "aten.sort.stable" not in again
    values = [node for node in plan.graph.graph.nodes if RECOMPUTES in node.meta and "val" in node.meta]
    assert all(value.meta["val"].is_floating_point() for value in values)


class InOrder(Layer):
    """Experts that scale rows by the places at which they are sorted, which the whole batch decides."""

    def sorted_rows(self, rows: Tensor) -> Tensor:
        return rows * torch.linspace(0.5, 1.5, len(rows), dtype=rows.dtype).unsqueeze(-1)


def test_rows_whose_order_something_reads_are_sorted_by_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = Layers(1).double()
    model.layers[0] = InOrder().double()
    plan = sbpc.plan(model, batch(), Mesh(a=2), microbatches=2)
    assert plan.loop is None and largest_error(plan, model, batch("one idle")) <= 1e-10
    with pytest.raises(LoopError, match="each micro-batch needs the whole batch's value"):
        sbpc.plan(model, batch(), Mesh(pipe=2, a=2), microbatches=2, stages="pipe")


class Balanced(Routed):
    """Experts with losses of a router besides, that tells how many tokens go to each."""

    def forward(self, x: Tensor, favour: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        scores = self.router((x + F.gelu(self.first(x))).flatten(0, 1)) + favour
        count = F.one_hot(torch.softmax(scores, -1).topk(self.chosen)[1], len(favour)).sum((0, 1))
        return super().forward(x, favour) + 0.01 * torch.logsumexp(scores, -1).square().mean(), count


@pytest.mark.parametrize("sizes", [{"a": 4}, {"a": 2, "b": 2}], ids=str)
def test_losses_of_routers_and_biases_that_follow_counts_are_those_of_the_whole_batch(sizes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Balanced(experts=8).double()
    pin = {"experts*": f"[{', '.join(['S(0)'] * len(sizes))}]"}
    x, favour = batch(experts=8)
    plan = sbpc.plan(model, (x, favour), Mesh(**sizes), pin=pin, loss="0")
    assert any(Ragged(0) in state for state in map(states, plan.graph.graph.nodes))
    seen = []
    for _ in range(3):  # as DeepSeek-V3 does: experts to which few tokens go are favoured next
        assert largest_error(plan, model, (x, favour)) <= 1e-10
        seen.append(model(x, favour)[1])
        found = sbpc.simulate(plan, model, (x, favour)).outputs[1]
        assert torch.equal(found, seen[-1])
        favour = favour - torch.sign(found - found.double().mean())
    assert not torch.equal(seen[0], seen[1])


def test_micro_batches_balance_experts_over_the_whole_batch() -> None:
    """A loss of how evenly rows go is no sum over micro-batches: backwards begin when all forwards are done."""
    torch.manual_seed(0)
    model = Routed().double()
    for schedule in (None, "breadth-first"):
        plan = sbpc.plan(model, batch(), Mesh(a=2), pin={"experts*": "S(0)"}, microbatches=2, schedule=schedule)
        assert plan.loop is not None and plan.schedule == (schedule or "gpipe")
        graphs = [chunk.graph.graph for chunk in plan.chunks]
        assert any(Ragged(0) in states(node) for graph in graphs for node in graph.nodes)
        for routing in ROUTINGS:
            assert largest_error(plan, model, batch(routing)) <= 1e-10, routing
    with pytest.raises(PlanError, match="they read the whole batch's value of this op"):
        sbpc.plan(model, batch(), Mesh(a=2), microbatches=2, schedule="1f1b")


@pytest.mark.parametrize("state", ["R(0)", "L(0)"])
def test_no_chunk_ends_amid_rows_that_stand_sorted_by_expert(state: str) -> None:
    """A model with fewer blocks than chunks is cut within blocks, but before experts are chosen, or behind them."""
    torch.manual_seed(0)
    model, pin = Layers(1).double(), {"_grouped_mm": f"[{state}]", "_grouped_mm_1": f"[{state}]"}
    plan = sbpc.plan(model, batch(), Mesh(a=2), pin=pin, microbatches=2, schedule="breadth-first:6")
    assert len(plan.chunks) == 6 and plan.verify() > 100
    having = [sum(state in str(node.meta.get("sbp")) for node in each.graph.graph.nodes) > 5 for each in plan.chunks]
    assert having.count(True) == 1
    assert largest_error(plan, model, batch("one idle")) <= 1e-10
    with pytest.raises(PlanError, match="before which rows stand sorted by expert"):
        cuts = ("layers.0.experts.down",)
        sbpc.plan(model, batch(), Mesh(pipe=2, a=2), pin=pin, microbatches=2, stages="pipe", cuts=cuts)


class Evenly(Layer):
    """Experts whose rows are scaled by how evenly all rows go."""

    def forward(self, x: Tensor, favour: Tensor) -> Tensor:  # type: ignore[override]
        made, balance = super().forward(x, favour)
        return F.linear(made * balance.detach(), self.first.weight).square().sum()


def test_stages_refuse_what_a_forward_makes_of_how_evenly_rows_go_over_the_whole_batch() -> None:
    message = refused(
        LoopError, lambda: sbpc.plan(Evenly().double(), batch(), Mesh(pipe=2), stages="pipe", microbatches=2)
    )
    assert message.startswith("each micro-batch needs the whole batch's value of this op, which depends on parameter")
    assert "histc" in message and "batch statistics" in message and "module.no_sync()" in message


def balanced(plan: sbpc.Plan) -> dict[str, Tensor]:
    """The gradients of a step of which this rank gives its rows."""
    torch.manual_seed(0)
    module = sbpc.parallelize(Routed().double(), plan)
    x, favour = batch()
    module.step(x.split([5, 3])[torch.distributed.get_rank()], favour)
    return {name: each.grad.full_tensor() for name, each in module.named_parameters()}


def test_ranks_with_rows_of_their_own_balance_experts_over_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = Routed().double()
    plan = sbpc.plan(model, batch(), Mesh(data=2), inputs="data", microbatches=2)
    _, expected = eager(model, batch())
    for found in run_ranks(balanced, 2, plan):
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-10)
