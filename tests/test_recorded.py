"""Steps that are recorded once and replayed: with a stand-in for CUDA graphs that runs a program again, on the same inputs
and into the same results, numbers are those of generated code to the last bit."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError
from sbpc.plans.timeline import launches_bound
from sbpc.runtime import executors, recorded
from sbpc.runtime.start import process_groups
from tests import models
from tests.processes import run_ranks

CPU = torch.device("cpu")


class Again:
    """Records and replays on CPUs. As on a GPU, a recorded program has run only when it is replayed, and what others
    have in the shared pool is then lost."""

    def __init__(self) -> None:
        self.records = self.replays = 0
        self.pool: dict[int, Tensor] = {}

    def capturing(self) -> bool:
        return False

    def begin(self) -> None:
        pass

    def record(self, run: Callable[[], Sequence[Any]], keeps: bool) -> tuple[Callable[[], None], Sequence[Any]]:
        self.records += 1
        results = run()

        def replay() -> None:
            self.replays += 1
            values = run()
            for lost in self.pool.values():
                lost.fill_(float("nan") if lost.is_floating_point() else -1)
            for place, value in zip(results, values, strict=True):
                if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():  # no input, nor a view of one
                    place.copy_(value)
                    self.pool |= {} if keeps else {id(place): place}

        return replay, results


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "0")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield
        process_groups.stop()


@pytest.fixture
def graphs(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> Again:
    found = Again()
    monkeypatch.setattr(recorded, "BACKENDS", {"cpu": Again})
    monkeypatch.setattr(recorded, "graphs_of", lambda where: found)
    return found


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(self.up(x), 0.5)).square().mean()


MODELS: dict[str, Callable[[], models.Model]] = {
    "gpt": lambda: models.gpt2(batch=4, layers=2),
    "convolutions": lambda: models.batch_norm(),
    "dropout": lambda: (Dropped(), (torch.randn(8, 12),)),
}


def plan_of(name: str, **options: Any) -> tuple[nn.Module, tuple[Any, ...], sbpc.Plan]:
    torch.manual_seed(0)
    model, args = MODELS[name]()
    return model, args, sbpc.plan(model, args, Mesh(data=1), **options)


def batches(args: Sequence[Tensor], count: int) -> list[tuple[Tensor, ...]]:
    """Arguments of several steps, each somewhere else in memory."""
    found = []
    for _ in range(count):
        args = tuple(arg.roll(1, 0) * (1.25 if arg.is_floating_point() else 1) for arg in args)
        found.append(args)
    return found


def at_once(module: Any, args: Any) -> Tensor:
    return module.step(*args)


def apart(module: Any, args: Any) -> Tensor:
    loss = module(*args)
    loss.backward()
    return loss


def trained(module: Any, args: Any, step: Callable[[Any, Any], Tensor], steps: int = 6) -> dict[str, Tensor]:
    """The losses, parameters and buffers of some steps. What a step returns is kept, and read at the end."""
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=0.01), []
    for batch in batches(args, steps):
        optimizer.zero_grad()
        losses.append(step(module, batch))
        optimizer.step()
    state = {name: value.clone() for name, value in sbpc.full_state_dict(module).items()}
    return {f"loss {at}": loss.detach() for at, loss in enumerate(losses)} | state


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different


@pytest.mark.parametrize("step", [at_once, apart])
@pytest.mark.parametrize("name", list(MODELS))
def test_replayed_steps_give_the_numbers_of_generated_code(graphs: Again, name: str, step: Any) -> None:
    model, args, plan = plan_of(name)
    expected = trained(sbpc.parallelize(model, plan, executor="code"), args, step)
    assert graphs.records == 0
    found = trained(sbpc.parallelize(model, plan, executor="graph"), args, step)
    assert_same(found, expected)
    assert len({found[f"loss {at}"].item() for at in range(6)}) == 6
    # of six steps two are run; the backward begins to be recorded when the forward is replayed
    assert (graphs.records, graphs.replays) == ((1, 4) if step is at_once else (2, 4 + 2))


@pytest.mark.parametrize("name", ["gpt", "dropout"])
def test_a_loop_over_micro_batches_is_replayed_as_a_whole(graphs: Again, name: str) -> None:
    model, args, plan = plan_of(name, microbatches=2)
    expected = trained(sbpc.parallelize(model, plan, executor="code"), args, at_once)
    assert_same(trained(sbpc.parallelize(model, plan, executor="graph"), args, at_once), expected)
    assert (graphs.records, graphs.replays) == (1, 4)


@pytest.mark.parametrize("microbatches", [None, 2])
def test_gradients_add_up_over_replays(graphs: Again, microbatches: int | None) -> None:
    model, args, plan = plan_of("gpt", microbatches=microbatches)

    def sums(module: Any) -> dict[str, Tensor]:
        found = {}
        for round in range(4):
            module.zero_grad()
            for batch in batches(args, 3):  # `.grad` is alive while they are replayed
                module.step(*batch)
            found |= {f"{round} {name}": p.grad.full_tensor().clone() for name, p in module.named_parameters()}
            with module.no_sync():
                for batch in batches(args, 2):
                    module.step(*batch)
            module.step(*args)
            found |= {f"{round} sent {name}": p.grad.full_tensor().clone() for name, p in module.named_parameters()}
        return found

    expected = sums(sbpc.parallelize(model, plan, executor="code"))
    assert_same(sums(sbpc.parallelize(model, plan, executor="graph")), expected)
    assert graphs.replays > 6


def losses_of_pairs(module: Any, args: Any) -> dict[str, Tensor]:
    """Several forwards before their backwards, one that is run again, and one that has none."""
    found: dict[str, Tensor] = {}

    def note(name: str, *losses: Tensor) -> None:
        found.update({f"{name} {at}": loss.detach() for at, loss in enumerate(losses)})
        found.update({f"{name} {key}": p.grad.full_tensor().clone() for key, p in module.named_parameters()})
        module.zero_grad()

    for _ in range(2):
        for batch in batches(args, 5):
            apart(module, batch)
        note("warm")
        first, second = (module(*batch) for batch in batches(args, 2))
        second.backward()
        first.backward()  # on what the first one saved
        note("turned", first, second)
        first = module(*args)
        first.backward(retain_graph=True)
        second = module(*batches(args, 1)[0])
        second.backward()
        first.backward()
        note("again", first, second)
        module(*batches(args, 1)[0])  # and nobody can run its backward
        (module(*args) + module(*batches(args, 3)[2])).backward()
        note("sum")
        with module.no_sync():
            apart(module, args)
            apart(module, batches(args, 1)[0])
        first = apart(module, args)
        note("sent", first)
    return found


def test_a_forward_does_not_overwrite_what_another_has_saved(graphs: Again) -> None:
    model, args, plan = plan_of("gpt")
    expected = losses_of_pairs(sbpc.parallelize(model, plan, executor="code"), args)
    assert_same(losses_of_pairs(sbpc.parallelize(model, plan, executor="graph"), args), expected)
    assert graphs.records >= 3 and graphs.replays > 10


def test_with_other_ranks_a_lease_ends_by_calls_alone(caplog: pytest.LogCaptureFixture) -> None:
    for alone in (True, False):
        saved = recorded.Saved()
        saved.lend([torch.ones(2)], alone)
        assert saved.busy
        saved.latest = None  # no one rank can tell others when it forgets a loss
        assert saved.busy == (not alone)
    saved.held().over = True  # type: ignore[union-attr]
    assert not saved.busy
    saved.lend([torch.ones(2)], False)
    about = recorded.About([False], CPU, 2, saved=saved, copied=1)
    run = recorded.Recorded(lambda given: (given.pop() + 1,), about, True)
    for _ in range(2):
        assert not run.in_place([torch.ones(1)])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "torch.no_grad()" in caplog.text


def test_evaluation_is_replayed_too_and_results_are_kept(graphs: Again) -> None:
    torch.manual_seed(0)
    model, args = models.dict_output()
    plan = sbpc.plan(model, args, Mesh(data=1), train=False)
    found = []
    for executor in ("code", "graph"):
        module = sbpc.parallelize(model, plan, executor=executor)
        with torch.inference_mode():
            kept = [module(*batch) for batch in batches(args, 5)]
        named = {f"{at} {key}": value for at, each in enumerate(kept) for key, value in each.items()}
        found.append({key: value for key, value in named.items() if isinstance(value, Tensor)})
    assert_same(found[1], found[0])
    assert (graphs.records, graphs.replays) == (1, 3)


def test_weights_that_have_moved_are_recorded_anew(graphs: Again) -> None:
    model, args, plan = plan_of("gpt")
    found = []
    for executor in ("code", "graph"):
        module: Any = sbpc.parallelize(model, plan, executor=executor)
        twin, losses = copy.deepcopy(module), {}
        weight = module.get_parameter("blocks.0.up.weight")
        places = [weight.to_local().detach() * scale for scale in range(1, 8)]
        for round in range(7):
            for at, batch in enumerate(batches(args, 4)):
                losses[f"{round} {at}"] = module.step(*batch)
                losses[f"{round} twin {at}"] = twin.step(*batch)
            weight._local_tensor.data = places[round].data
        found.append(losses)
    assert_same(found[1], found[0])
    assert graphs.records == 8  # one for each place, and one for the twin
    recordings = type(module)._sbpc_runners[0].functions["joint"].known
    assert len(recordings) == recorded.MOST


def counting(calls: list[int], results: int = 1) -> Any:
    def run(given: list[Tensor]) -> tuple[Tensor, ...]:
        calls.append(len(given))
        x, weight = given
        given.clear()
        return tuple(x * weight for _ in range(results))

    return run


def test_other_shapes_are_recorded_anew_and_with_other_ranks_refused(graphs: Again) -> None:
    calls: list[int] = []
    weight = torch.full((1,), 3.0)
    run = recorded.Recorded(counting(calls), recorded.About([False, True], CPU, 1), True)
    for size in [2, 3] * 4:
        x = torch.randn(size)
        (found,) = run([x, weight])
        assert torch.equal(found, x * 3)
    assert (graphs.records, graphs.replays, len(run.known)) == (2, 4, 2)
    together = recorded.Recorded(counting(calls), recorded.About([False, True], CPU, 2), True)
    for _ in range(4):
        together([torch.ones(2), weight])
    with pytest.raises(PlanError, match="weights lie elsewhere") as caught:
        together([torch.ones(2), weight.clone()])
    assert "in place" in str(caught.value)


def test_what_fails_while_it_is_recorded_is_refused_or_run_as_before(
    graphs: Again, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(run: Any, keeps: bool) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "record", refuse)
    weight = torch.full((1,), 3.0)
    strict, loose = (
        recorded.Recorded(counting([]), recorded.About([False, True], CPU, 1), each) for each in (True, False)
    )
    for run in (strict, loose):
        for _ in range(2):
            run([torch.ones(2), weight])
    with pytest.raises(PlanError, match="cannot be recorded as a CUDA graph: operation not permitted"):
        strict([torch.ones(2), weight])
    for at in range(3):
        (found,) = loose([torch.full((2,), float(at)), weight])
        assert torch.equal(found, torch.full((2,), 3.0 * at))
    assert len(caplog.records) == 1 and loose.failed


aten = torch.ops.aten
torch.library.define("recorded_test::own", "(Tensor x) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,))
X = torch.ones(4, 4)
REFUSED: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "has the CPU wait for values": (aten.nonzero.default, ("x",), {}),
    "has the CPU wait for values, counts": (torch.ops.sbpc.row_counts.default, ("x", 4), {}),
    "has the CPU wait for values, masks": (aten.index.Tensor, ("x", ["mask"]), {}),
    "has the CPU wait for values, capacity": (torch.ops.sbpc.within_capacity.default, ("x", 4, 2), {}),
    "makes its result on cpu": (aten.full.default, ([2], 0.0), {"device": CPU}),
    "writes what the program is given": (aten.add_.Tensor, ("x", "x"), {}),
    "sends by gloo": (torch.ops._c10d_functional.all_reduce.default, ("x", "sum", "0"), {}),
}


def program(op: Any, args: Any, kwargs: Any) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    named = {"x": graph.placeholder("x"), "mask": graph.placeholder("mask")}
    named["x"].meta["val"], named["mask"].meta["val"] = X, X > 0
    given = [[named[each] for each in arg] if arg == ["mask"] else named.get(str(arg), arg) for arg in args]
    graph.output((graph.call_function(op, tuple(given), kwargs),))
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize("why", list(REFUSED))
def test_what_no_graph_can_hold_is_refused_with_its_reason(
    why: str, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "BACKENDS", {"cpu": Again, "cuda": Again})
    where = torch.device("cuda", 0) if "cpu" in why else CPU
    gm = program(*REFUSED[why])
    said = recorded.refusal(gm, where, True)
    assert said is not None and f"{why.partition(',')[0]}" in said and "executor='graph'" in said
    with pytest.raises(PlanError, match="no CUDA graph can hold it"):
        recorded.recordable(gm, where, True)
    assert not recorded.recordable(gm, where, False)
    monkeypatch.setattr(recorded, "BACKENDS", {"cuda": Again})
    assert "this rank computes on cpu" in str(recorded.refusal(gm, CPU, True))


def test_what_is_unknown_is_tried_only_if_asked_for(graphs: Again) -> None:
    fine = program(aten.index.Tensor, ("x", ["x"]), {})
    own = program(torch.ops.recorded_test.own.default, ("x",), {})
    assert recorded.recordable(fine, CPU, True) and recorded.recordable(fine, CPU, False)
    assert recorded.recordable(own, CPU, True) and not recorded.recordable(own, CPU, False)
    assert recorded.recordable(program(aten.add_.Tensor, ("x", "x"), {}), CPU, True, inside=True)


def test_a_step_on_a_cpu_is_refused(one_rank: None) -> None:
    for options in ({}, {"microbatches": 2}):
        model, args, plan = plan_of("gpt", **options)
        with pytest.raises(PlanError, match="executor='graph' replays CUDA graphs, and this rank computes on cpu"):
            sbpc.parallelize(model, plan, executor="graph").step(*args)  # type: ignore[operator]


@pytest.mark.parametrize("microbatches", [None, 2])
@pytest.mark.parametrize("cluster", ["ideal", "h100"])
def test_auto_replays_what_launches_bind(graphs: Again, cluster: str, microbatches: int | None) -> None:
    torch.manual_seed(0)
    model, args = models.gpt2(batch=4)
    plan = sbpc.plan(model, args, Mesh(data=1, cluster=cluster), microbatches=microbatches)
    expected = trained(sbpc.parallelize(model, plan, executor="code"), args, at_once)
    assert_same(trained(sbpc.parallelize(model, plan), args, at_once), expected)
    assert graphs.records == (cluster == "h100")  # nothing is known of what a launch takes on "ideal"


@pytest.mark.parametrize("batch, replays", [(1, True), (16, False)])
def test_a_step_is_bound_by_launches_where_its_kernels_are_short(batch: int, replays: bool) -> None:
    with torch.device("meta"):
        model, args = models.gpt2(batch, seq=1024, vocab=50_304, width=768, heads=12, layers=12)
    plan = sbpc.plan(model.to(torch.bfloat16), args, Mesh(data=1, cluster="h100"))
    assert launches_bound([plan.boxed], plan.mesh) == replays


def test_auto_takes_inductor_on_a_gpu_with_triton_and_records_on_one_rank_alone(
    monkeypatch: pytest.MonkeyPatch, one_rank: None
) -> None:
    there: dict[str, Any] = {"triton": object()}
    monkeypatch.setattr("importlib.util.find_spec", there.get)
    for kind in ("inductor", "code"):
        monkeypatch.setattr(executors, kind, lambda gm, kind=kind: lambda given: (kind,))
    gm, gpu = program(aten.mm.default, ("x", "x"), {}), SimpleNamespace(is_cuda=True)
    assert executors.auto(gm)([gpu, gpu]) == executors.graph(gm)([gpu, gpu]) == ("inductor",)  # type: ignore[list-item]
    assert executors.auto(gm)([X, X]) == ("code",)
    there.clear()
    assert executors.auto(gm)([gpu, gpu]) == ("code",)  # type: ignore[list-item]
    where = torch.device("cuda", 0)
    for bound in (True, False):
        gm.meta[recorded.RECORD] = recorded.About([False, False], where, 1, bound=lambda bound=bound: bound)
        assert isinstance(executors.auto(gm), recorded.Recorded) == bound
        assert isinstance(executors.graph(gm), recorded.Recorded)
    with torch.device("meta"):
        model, args = models.gpt2(batch=4)
    for sizes in ({"data": 1}, {"data": 2}):
        plan = sbpc.plan(model, args, Mesh(**sizes, cluster="h100"))
        runner = SimpleNamespace(plan=plan, where=where)
        assert recorded.bound(runner) == (plan.mesh.ranks == 1)
        assert not recorded.bound(SimpleNamespace(plan=plan, where=CPU))


def test_stages_are_refused() -> None:
    runner = SimpleNamespace(plan=SimpleNamespace(stages=2), where=CPU)
    with pytest.raises(PlanError, match="executor='graph' with stages"):
        recorded.recorded_step(runner, lambda given: (), True)


def steps_of_two_ranks() -> str:
    """On a rank: why a step with collectives is refused there."""
    recorded.BACKENDS["cpu"] = Again
    model, args = models.mlp()
    module: Any = sbpc.parallelize(model, sbpc.plan(model, args, Mesh(x=2)), executor="graph")
    try:
        module.step(*args)
    except PlanError as error:
        return str(error)
    finally:
        process_groups.stop()
    return ""


def test_collectives_by_gloo_are_refused() -> None:
    for said in run_ranks(steps_of_two_ranks, 2):
        assert "sends by gloo, which runs on CPUs, so that no CUDA graph can hold it" in said


def test_masters_are_cast_into_memory_of_the_recording(graphs: Again) -> None:
    """An evaluation in bfloat16 reads copies of float32 masters, which lie somewhere else at each call."""
    torch.manual_seed(0)
    model, args = models.mlp()
    model, args = model.bfloat16(), tuple(arg.bfloat16() for arg in args)
    plan = sbpc.plan(model, args, Mesh(data=1))
    test = sbpc.plan(copy.deepcopy(model).eval(), args, Mesh(data=1), train=False, pin=plan.parameters)
    found = []
    for executor in ("code", "graph"):
        module = sbpc.parallelize(model.train(), plan, evaluate=test, executor=executor)
        optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), {}
        for at, batch in enumerate(batches(args, 6)):
            module.train().step(*batch)  # type: ignore[operator]
            optimizer.step()
            with torch.no_grad():
                losses[str(at)] = module.eval()(*batch)
        found.append(losses)
    assert_same(found[1], found[0])
    assert (graphs.records, graphs.replays) == (2, 8)
