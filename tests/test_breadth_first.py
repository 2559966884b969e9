"""Loops that go breadth-first: gradients of a chunk go home beside the backward of those before it, and what a chunk
gathers comes beside the forward of those before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

import sbpc
from sbpc import Mesh
from sbpc.graph.ports import GRADIENT
from sbpc.mesh.cluster import Cluster
from sbpc.plans.memory_curve import memory_curve
from sbpc.plans.staged.schedules import EARLY, LATE, piece_of
from sbpc.plans.timeline import COMPUTE
from sbpc.runtime.executors import own_in_flight
from tests import models
from tests.compare import compare, eager
from tests.processes import run_ranks

LAN = Cluster("lan", 5e9, 1e10, 5e-7, 2, 2e-6, 240e6, 2e-6, 24e6)  # two ranks a node
NETS: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 8, "layers": 4, "seq": 16, "width": 32, "heads": 4},
    "mlp": {"layers": 4, "batch": 8},
}
MESHES: dict[str, dict[str, int]] = {
    "2": {"data": 2},
    "2x2": {"data": 2, "tensor": 2},
    "2x2x2": {"pod": 2, "data": 2, "tensor": 2},
}
CASES = [
    ("gpt2", "2x2", "megatron+sp", {}),
    ("gpt2", "2x2x2", "megatron", {"microbatches": 2, "recompute": "selective"}),
    ("gpt2", "2", "data", {"recompute": "full"}),
    ("gpt2", "2", "fsdp", {}),
]
INDUCTOR = {"executor": "inductor", "schedule": "breadth-first:2", "microbatches": 2}


def made(net: str) -> models.Model:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return getattr(models, net)(**NETS[net])  # type: ignore[no-any-return]


def planned(net: str, mesh: str, scheme: str = "megatron", **options: Any) -> sbpc.Plan:
    options = {"microbatches": 4, "schedule": "breadth-first:4", **options}
    return sbpc.baseline(scheme, *made(net), Mesh(cluster=LAN, **MESHES[mesh]), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("net", "mesh", "scheme", "options"), CASES, ids=str)
def test_numbers_bytes_and_memory_are_those_of_the_whole_batch(
    net: str, mesh: str, scheme: str, options: dict[str, Any]
) -> None:
    plan, (model, args) = planned(net, mesh, scheme, **options), made(net)
    plan.verify()
    assert any(LATE in which for which, _ in plan.order(0))
    assert any(EARLY in which for which, _ in plan.order(0)) == (scheme != "data")
    assert compare(plan, model, args, *eager(model, args)) <= 1e-10
    run = sbpc.simulate(plan, model, args)
    assert {axis: size for axis, size in run.bytes_sent.items() if size} == {
        axis: size for axis, size in plan.cost.bytes_sent.items() if size
    }
    memory = plan.cost.memory
    assert memory["total"] - memory["optimizer"] == run.peak_memory
    assert max(memory_curve(plan, 0).bytes) == memory["total"]
    numbers = {plan.cost.symbols[name]: value for name, value in plan.cost.numbers.items()}
    assert plan.cost.memory_expr.xreplace(numbers) == memory["total"]


def test_it_is_chosen_where_gradients_would_be_waited_for_and_hides_them() -> None:
    model, args = models.gpt2(batch=32, layers=8, seq=64, width=64, heads=4)
    mesh = Mesh(data=4, cluster=LAN)
    plan = sbpc.plan(model, args, mesh, microbatches=4)
    assert plan.schedule.startswith("breadth-first") and plan.way.startswith("breadth-first")
    turns = sbpc.plan(model, args, mesh, microbatches=4, schedule="1f1b")
    assert turns.schedule == "1f1b" and len(turns.chunks) == 1  # as asked for
    assert plan.cost.seconds < 0.98 * turns.cost.seconds
    limited = sbpc.plan(model, args, mesh, microbatches=4, memory=turns.memory["total"])
    assert limited.memory["total"] <= turns.memory["total"]


def test_the_timeline_fills_the_step_and_no_link_carries_two_at_a_time() -> None:
    plan = planned("gpt2", "2x2")
    events = [event for event in plan.timeline() if "sends" not in event.stream]
    assert max(event.end for event in events) == pytest.approx(plan.cost.seconds)
    assert plan.cost.bubble_seconds == 0
    lanes: dict[str, float] = {}
    for event in sorted(events, key=lambda event: (event.stream, event.start)):
        assert event.start >= lanes.get(event.stream, 0.0) - 1e-12, event
        lanes[event.stream] = event.end


def test_what_later_chunks_gather_comes_beside_the_forward_of_earlier_ones() -> None:
    plan = planned("gpt2", "2", "fsdp")
    (played,), _ = plan.played
    starts = {str(each.action): each.start for each in played}
    assert all(starts[f"{at}early0"] == 0.0 for at in range(4))  # to start a collective takes no time here
    gathers = [e for e in plan.timeline() if e.kind == "all_gather" and e.name.startswith("1early0")]
    assert gathers and all(event.start < starts["1F0"] for event in gathers)
    alone = sum(sum(plan.work_of(each.action)) for each in played if not piece_of(each.parts)[1])
    assert plan.cost.seconds < 0.9 * alone


@pytest.mark.parametrize("sharing", [1.0, 2.0])
@pytest.mark.parametrize("schedule", ["interleaved", "breadth-first:2", "zbv"])
def test_stages_have_the_numbers_bytes_and_memory_that_are_predicted(schedule: str, sharing: float) -> None:
    mesh = Mesh(cluster=replace(LAN, sharing=sharing), pipe=2, data=2)
    options: Any = {"stages": "pipe", "microbatches": 4, "schedule": schedule}
    plan, (model, args) = sbpc.baseline("fsdp", *made("gpt2"), mesh, **options), made("gpt2")
    assert any(EARLY in which for which, _ in plan.orders[0]) == (sharing == 1.0)
    assert compare(plan, model, args, *eager(model, args)) <= 1e-10
    run = sbpc.simulate(plan, model, args)
    assert run.bytes_sent == plan.cost.bytes_sent
    assert plan.memory["total"] - plan.memory["optimizer"] == run.peak_memory
    events = [event for event in plan.timeline() if "sends" not in event.stream]
    assert max(event.end for event in events) == pytest.approx(plan.cost.seconds)


def steps(net: str, plan: sbpc.Plan, executor: str) -> list[list[Tensor]]:
    """By rank: the loss and the whole gradients of a step, and those of two batches added up."""
    model, args = made(net)
    module: Any = sbpc.parallelize(model, plan, executor=executor)
    found = []
    for turn in range(2):
        if turn:
            with module.no_sync():
                module.step(*args)
        loss = module.step(*args)
        found.append([loss, *(parameter.grad.full_tensor() for parameter in module.parameters())])
        module.zero_grad()
    return found


@pytest.mark.parametrize(
    ("net", "mesh", "scheme", "options"),
    [*CASES[::3], pytest.param("mlp", "2", "fsdp", INDUCTOR, marks=pytest.mark.prove)],
)
def test_real_ranks_have_the_numbers_of_one_process(net: str, mesh: str, scheme: str, options: dict[str, Any]) -> None:
    asked = {key: value for key, value in options.items() if key != "executor"}
    plan, (model, args) = planned(net, mesh, scheme, **asked), made(net)
    loss = model(*args)
    loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    ports = [port for port in plan.ports.outputs if port.kind == GRADIENT]
    assert len(ports) == len(expected)
    for rank in run_ranks(steps, plan.mesh.ranks, net, plan, options.get("executor", "code")):
        for times, (value, *gradients) in enumerate(rank, 1):
            assert value.item() == pytest.approx(loss.item(), rel=1e-12)
            for one, other in zip(gradients, expected):
                assert torch.allclose(one, times * other, rtol=1e-9, atol=1e-12)


def test_what_inductor_sends_and_does_not_await_is_its_own_and_stays() -> None:
    graph, c10d = Graph(), torch.ops._c10d_functional
    total, more, weight = map(graph.placeholder, ("total", "more", "weight"))
    added = graph.call_function(torch.ops.aten.add_.Tensor, (total, more))
    sent = graph.call_function(c10d.all_reduce.default, (added, "sum", "group"))
    gathered = graph.call_function(c10d.all_gather_into_tensor.default, (weight, 2, "group"))
    graph.output((added, sent, gathered))
    own_in_flight(graph)
    kept, *_ = graph.output_node().args[0]  # type: ignore[misc]
    assert kept.target is torch.ops.aten.clone.default and sent.args[0] is kept and kept.args == (added,)
    assert gathered.args[0] is weight


def test_a_plan_is_read_from_its_file_as_it_was(tmp_path: Any) -> None:
    plan = planned("gpt2", "2x2")
    plan.save(tmp_path / "plan")
    again = sbpc.load(tmp_path / "plan")
    assert again.orders[0] == plan.orders[0] and again.cost.seconds == plan.cost.seconds
    assert again.cost.memory == plan.cost.memory
    assert sum(event.end - event.start for event in again.timeline() if event.stream == COMPUTE) >= 0
