"""One GPU: the whole path on a mesh of one rank. Skipped where there is no GPU."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

import sbpc
from sbpc import Mesh
from sbpc.plans.staged.staged_timeline import stage_events
from sbpc.plans.timeline import INSIDE, Event
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.same_calls import checksum
from sbpc.runtime.step_trace import recorded
from sbpc.runtime.trace import Recorder, clock_of, median
from tests import models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield
        process_groups.stop()


@pytest.mark.parametrize("executor", ["auto", "code", "inductor"])
def test_training_on_one_gpu_equals_eager(one_rank: Any, executor: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.gpt2(batch=4)
    model, args = model.cuda(), tuple(arg.cuda() for arg in args)
    parallel = sbpc.parallelize(model, sbpc.plan(model, args, Mesh(data=1)), executor=executor)
    for module in (model, parallel):
        module.losses = []  # type: ignore[assignment]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = module(*args)
            loss.backward()
            optimizer.step()
            module.losses.append(loss.item())  # type: ignore[operator, union-attr]
    assert parallel.losses == pytest.approx(model.losses, rel=1e-10)
    for name, parameter in parallel.named_parameters():
        assert parameter.device.type == "cuda", name
        torch.testing.assert_close(parameter.full_tensor(), model.get_parameter(name), rtol=1e-9, atol=1e-12)  # type: ignore[attr-defined]


def test_a_checksum_of_arguments_is_the_same_on_a_gpu() -> None:
    for values in (
        torch.randn(3, 5000),
        torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        torch.rand(7) < 0.5,
        torch.tensor(3),
    ):
        assert int(checksum(values.cuda())) == int(checksum(values))
        assert int(checksum(values.cuda().bfloat16())) == int(checksum(values.bfloat16()))


def test_half_precision_is_near_eager(one_rank: Any) -> None:
    torch.manual_seed(0)
    model, args = models.gpt2(batch=4)
    model, args = model.cuda(), tuple(arg.cuda() for arg in args)
    parallel = sbpc.parallelize(model, sbpc.plan(model, args, Mesh(data=1), dtype=torch.bfloat16))
    with torch.autocast("cuda", torch.bfloat16):
        assert parallel(*args).item() == pytest.approx(model(*args).item(), rel=2e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_plan_made_without_a_gpu_runs_on_one(one_rank: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, args = models.gpt2(batch=4)
    model = model.to(dtype)
    plan = sbpc.plan(model, args, Mesh(data=1))
    assert any("for_cpu" in str(node.target) for node in plan.local.graph.nodes)
    eager, args = copy.deepcopy(model).cuda(), tuple(arg.cuda() for arg in args)
    parallel = sbpc.parallelize(model, plan)
    found = []
    for module in (eager, parallel):
        loss = module(*args)
        loss.backward()
        found.append((loss.item(), [whole(p.grad) for p in module.parameters()]))
    rtol = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    assert found[0][0] == pytest.approx(found[1][0], rel=rtol)
    for one, other in zip(found[0][1], found[1][1]):
        assert (one - other).norm() <= rtol * one.norm()


def test_a_step_on_a_gpu_is_timed_by_its_streams(one_rank: Any) -> None:
    check_recorder(torch.device("cuda", 0))


def test_a_loop_on_a_gpu_is_timed_by_its_streams(one_rank: Any) -> None:
    check_loop("cuda")


def check_loop(device: str) -> None:
    """A measured loop over micro-batches gives the losses that it gives else, and every predicted event a span within the step."""
    torch.manual_seed(0)
    model, args = models.gpt2(batch=4)
    plan = sbpc.plan(model, args, Mesh(data=1), microbatches=2)
    module: Any = sbpc.parallelize(model, plan, device=device)
    losses = [module.step(*args).item()]
    with recorded(module) as recorder:
        losses += [module.step(*args).item() for _ in range(3)]
    events, length = recorder.events(), sorted(map(recorder.length, recorder.steps))[1]
    assert len(set(losses)) == 1
    assert {event.name for event in stage_events(plan, 0)} <= {event.name for event in events}
    assert all(0 <= event.start <= event.end <= length + 1e-5 for event in events)


def check_recorder(where: torch.device) -> None:
    """A program with a collective beside a kernel gives what it gave, and every part of it a span."""
    process_groups.bind_groups("sbpc::timed", [[0]])
    graph = Graph()
    x = graph.placeholder("x")
    start = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "sbpc::timed"))
    product = graph.call_function(torch.ops.aten.mm.default, (x, x))
    end = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (start,))
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (end, product)),))
    start.meta["boxed"] = end.meta["boxed"] = start.name
    recorder = Recorder(GraphModule({}, graph), clock_of(where))
    given = torch.randn(256, 256, device=where)
    for _ in range(3):
        (found,) = recorder([given])
        torch.testing.assert_close(found, given + given @ given)
    predicted = [Event(INSIDE, 0.0, 1.0, start.name, "all_reduce", "", "forward", "data")]
    run = median(recorder.runs, recorder.length)
    events = recorder.events_of(run, predicted)
    recorder.clock.close()
    assert sorted(event.kind for event in events) == sorted(
        ["start", "all_reduce", "aten.mm", "wait", "aten.add.Tensor"]
    )
    spans = {event.kind: event for event in events}
    assert 0 == spans["start"].start <= spans["all_reduce"].start <= spans["all_reduce"].end <= spans["wait"].end + 1e-6
    assert spans["wait"].end <= spans["aten.add.Tensor"].end == pytest.approx(recorder.length(run), rel=1e-3)
    assert all(event.end >= event.start for event in events)


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).double()
