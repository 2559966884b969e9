"""One GPU: the whole path on a mesh of one rank. Skipped where there is no GPU."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx import Graph, GraphModule

import sbpc
from sbpc import Mesh
from sbpc.plans.staged.staged_timeline import stage_events
from sbpc.plans.timeline import INSIDE, Event
from sbpc.runtime.recorded import About, Recorded
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


@pytest.mark.parametrize("executor", ["auto", "code", "inductor", "graph"])
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


@pytest.mark.parametrize("how", ["step", "apart", "loop"])
def test_a_replayed_step_gives_what_its_program_gives(one_rank: Any, how: str) -> None:
    """Over eight steps with dropout, each on another batch, of which some add up gradients; what it returns is kept."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.gpt2(batch=4)
    model = nn.Sequential(model.tokens, model.blocks[0], nn.Dropout(0.5), model.head).cuda()
    tokens = args[0].cuda()
    plan = sbpc.plan(WithLoss(model), (tokens,), Mesh(data=1), microbatches=2 if how == "loop" else None)
    found = []
    for executor in ("inductor", "graph"):
        module: Any = sbpc.parallelize(WithLoss(model), plan, executor=executor)
        optimizer, losses = torch.optim.SGD(module.parameters(), lr=1e-3), []
        for at in range(8):
            if at % 2 == 0:
                optimizer.zero_grad()
            batch = tokens.roll(at, 1).clone()
            losses.append(module(batch) if how == "apart" else module.step(batch))
            if how == "apart":
                losses[-1].backward()
            optimizer.step()
        found.append(torch.stack([loss.detach() for loss in losses]))
        if executor == "graph":
            runner = type(module)._sbpc_runners[0]
            functions = [runner.replayed] if how == "loop" else [*runner.functions.values()]
            assert all(any(each.replay for each in function.known.values()) for function in functions)
    assert len({loss.item() for loss in found[0]}) == 8
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=0)


class WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens).square().mean()


def test_a_step_that_reads_values_on_the_cpu_is_refused_while_it_is_recorded(one_rank: Any) -> None:
    run = Recorded(
        lambda given: (given.pop() * given[0].sum().item(),), About([False, True], torch.device("cuda", 0), 1), True
    )
    for _ in range(2):
        run([torch.ones(2, device="cuda"), torch.ones(2, device="cuda")])
    weight = torch.ones(2, device="cuda")
    with pytest.raises(sbpc.errors.PlanError, match="cannot be recorded as a CUDA graph"):
        for _ in range(3):
            run([torch.ones(2, device="cuda"), weight])


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
