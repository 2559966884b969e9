"""Losses that balance experts over the whole batch, in micro-batches and stages: backwards begin when all forwards are done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import LoopError, PlanError
from sbpc.plans.plan_bytes import read
from sbpc.plans.staged.schedules import BACKWARD, FORWARD, INPUTS, Action
from sbpc.runtime.staged.stage_run import Joined
from sbpc.runtime.state.weight_files import save_tensors
from tests import hf_models
from tests.compare import compare, eager, largest_error
from tests.forging import sealed
from tests.processes import run_ranks
from tests.routed import ROUTINGS, Evened, batch
from tests.test_hf import Loss
from tests.test_plan import refused

PIPE: dict[str, Any] = {"stages": "pipe", "microbatches": 2}
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {  # layers, mesh, options
    "two stages": (2, {"pipe": 2}, PIPE),
    "stages on two axes": (2, {"pipe": 2, "a": 2}, PIPE | {"microbatches": 4}),
    "four stages": (4, {"pipe": 4}, PIPE | {"microbatches": 4, "schedule": "gpipe"}),
    "chunks": (4, {"pipe": 2, "a": 2}, PIPE | {"schedule": "breadth-first"}),
    "a layer in two stages": (1, {"pipe": 2}, PIPE),
    "recomputed": (2, {"pipe": 2}, PIPE | {"recompute": "full"}),
    "partly": (2, {"pipe": 2, "a": 2}, PIPE | {"recompute": "selective"}),
    "one micro-batch": (2, {"pipe": 2}, PIPE | {"microbatches": 1, "schedule": "1f1b"}),
    "no stages": (2, {"a": 2}, {"microbatches": 2}),
    "no stages, in chunks": (2, {"a": 2}, {"microbatches": 4, "schedule": "breadth-first"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_of_each_layer_equals_one_device_whatever_the_routing(case: str) -> None:
    layers, sizes, options = CASES[case]
    torch.manual_seed(0)
    model = Evened(layers, experts=8).double()
    plan = sbpc.plan(model, batch(experts=8), Mesh(**sizes), optimizer=None, **options)
    assert plan.loop is not None and plan.verify() > 100
    one = options["microbatches"] == 1
    assert plan.schedule == options.get("schedule", "gpipe") and len(plan.loop.joined) == (0 if one else layers)
    for routing in ROUTINGS:
        assert largest_error(plan, model, batch(routing, experts=8)) <= 1e-10, routing
    run = sbpc.simulate(plan, model, batch(experts=8))
    assert run.bytes_sent.get("pipe") == plan.cost.bytes_sent.get("pipe")
    assert run.peak_memory <= plan.cost.memory["total"]


LIBRARY = [("pipe=2", 2, "gpipe"), ("pipe=2,a=2", 4, "breadth-first"), ("pipe=4", 4, None), ("a=2", 2, "breadth-first")]


@pytest.mark.parametrize(
    ("net", "mesh", "count", "schedule"),
    [
        ("mixtral", "pipe=2,a=2", 2, None),
        *(
            pytest.param(net, *case, marks=pytest.mark.prove_library)
            for net in ("mixtral", "qwen_moe", "olmoe") for case in LIBRARY
        ),
    ],
)  # fmt: skip
def test_router_losses_of_the_library_equal_one_device(net: str, mesh: str, count: int, schedule: str | None) -> None:
    """The counts of all layers are added up in the last stage, and earlier ones read them."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    sizes = {axis: int(size) for axis, size in (each.split("=") for each in mesh.split(","))}
    chunks = sizes.get("pipe", 1) * (2 if schedule == "breadth-first" else 1)
    whole, kwargs = hf_models.MIXTURES[net]("sdpa", max(chunks, 2))
    whole.config.output_router_logits, whole.router_aux_loss_coef = True, 0.7
    model = Loss(whole.double())
    stages = {"stages": "pipe"} if "pipe" in sizes else {}
    with hf_models.Doubled():
        whole.config._experts_implementation = "batched_mm"
        outputs, gradients = eager(model, (), kwargs)
        whole.config._experts_implementation = "grouped_mm"
        plan = sbpc.plan(model, (), Mesh(**sizes), kwargs=kwargs, microbatches=count, schedule=schedule, **stages)
    assert plan.loop is not None and len(plan.loop.joined) == 1 and plan.schedule == (schedule or "gpipe")
    crossing = [name for chunk in plan.chunks[:-1] for name in chunk.receives.values() if name.startswith("clone")]
    assert crossing or len(plan.chunks) == 1
    assert compare(plan, model, (), outputs, gradients, kwargs) <= 1e-10


def test_a_backward_needs_the_forwards_of_all_micro_batches() -> None:
    plan = sbpc.plan(Evened().double(), batch(), Mesh(pipe=2), stages="pipe", microbatches=4)
    for chunk in (0, 1):
        needs = plan.needs(Action(BACKWARD, chunk, 2))
        assert {Action(FORWARD, chunk, at) for at in range(4)} <= {*needs}
        assert Action(FORWARD, chunk, 3) not in plan.needs(Action(FORWARD, chunk, 2))
    assert {str(each) for each in plan.needs(Action(INPUTS, 1, 0))} == {"1F0", "1F1", "1F2", "1F3"}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_a_schedule_with_backwards_before_the_last_forward_is_refused(schedule: str) -> None:
    message = refused(
        PlanError,
        lambda: sbpc.plan(Evened(4).double(), batch(), Mesh(pipe=2), stages="pipe", microbatches=4, schedule=schedule),
    )
    assert message.startswith(f"schedule='{schedule}' begins backwards before all forwards are done")
    assert "histc" in message and 'Give schedule="gpipe" or "breadth-first"' in message


class Block(nn.Module):
    """A layer, and a loss made of shares of the batch. form: how."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.form, self.scale, self.layer = form, nn.Parameter(torch.tensor(0.3)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.layer(x))
        share = torch.softmax(x, -1)
        return x, self.form(share, F.one_hot(share.argmax(-1), 8).to(x.dtype).mean(0), self.scale)


class Shares(nn.Module):
    """Two of these."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(form) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        uneven = x.new_zeros(())
        for block in self.blocks:
            x, more = block(x)
            uneven = uneven + more
        return x.square().mean() + uneven


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a square, of which the backward reads the mean": lambda share, part, scale: share.mean(0).square().sum(),
    "each row beside the mean": lambda share, part, scale: (share * part).sum(-1).mean(),
    "by a scale that is trained": lambda share, part, scale: scale.exp() * (share.mean(0) * part).sum(),
    "the largest": lambda share, part, scale: (share.mean(0) * part).amax(),
    "what no gradient reads": lambda share, part, scale: (share.mean(0) * part).detach().sum(),
}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_such_a_loss_equal_one_device(form: str, recompute: str) -> None:
    torch.manual_seed(0)
    model, args = Shares(FORMS[form]).double(), (torch.randn(8, 8, dtype=torch.float64),)
    plan = sbpc.plan(model, args, Mesh(pipe=2), recompute=recompute, **PIPE)
    assert plan.loop is not None and plan.verify() > 20
    assert plan.schedule == ("1f1b" if form == "what no gradient reads" else "gpipe")
    assert largest_error(plan, model, args) <= 1e-10


TWO_PHASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a length": lambda share, part, scale: share.norm(),
    "where any is large": lambda share, part, scale: ((share.detach() > 0.2).any(0) * share.mean(0)).sum(),
}


@pytest.mark.parametrize("sizes", [{"pipe": 2}, {"pipe": 2, "a": 2}])
@pytest.mark.parametrize("form", TWO_PHASES)
def test_halves_of_ops_that_run_in_two_phases_are_joined(form: str, sizes: dict[str, int]) -> None:
    """They are no values of the capture: nothing but their shapes and types is known."""
    torch.manual_seed(0)
    model, args = Shares(TWO_PHASES[form]).double(), (torch.randn(8, 8, dtype=torch.float64),)
    plan = sbpc.plan(model, args, Mesh(**sizes), **PIPE)
    assert plan.loop is not None and plan.loop.joined and plan.verify() > 20
    assert largest_error(plan, model, args) <= 1e-10


class Gated(nn.Module):
    """Layers of which one reads what the batch made of the other."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.backward, self.layers = backward, nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        if self.backward:
            return self.layers[1](x).square().mean().log()
        return self.layers[1](x * x.detach().mean(0)).square().mean()


def test_what_forwards_or_backwards_exchange_among_themselves_is_refused() -> None:
    args = (torch.randn(8, 8),)
    message = refused(LoopError, lambda: sbpc.plan(Gated(backward=False), args, Mesh(pipe=2), **PIPE))
    assert message.startswith("each micro-batch needs the whole batch's value") and "x.detach().mean(0)" in message
    plan = sbpc.plan(Gated(backward=True), args, Mesh(pipe=2), **PIPE)  # 1 / mean is known before the backwards
    assert plan.schedule == "gpipe" and largest_error(plan, Gated(backward=True), args) <= 1e-4


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A plan, and its file."""
    path = tmp_path_factory.mktemp("plan") / "plan.sbpc"
    torch.manual_seed(0)
    plan = sbpc.plan(Evened(experts=8).double(), batch(experts=8), Mesh(pipe=2, a=2), **PIPE)
    plan.save(path)
    return plan, path


def test_a_saved_plan_is_read_back_whole_and_shown(written: tuple[Any, Path], tmp_path: Path) -> None:
    plan, path = written
    torch.manual_seed(0)
    model, found = Evened(experts=8).double(), sbpc.load(path)
    assert str(found) == str(plan) and found.cost == plan.cost and found.verify() == plan.verify()
    assert found.loop is not None and found.loop.joined == plan.loop.joined and not plan.diff(found)
    assert largest_error(found, model, batch("all to one", experts=8)) <= 1e-10
    found.save_page(tmp_path / "page.html")
    assert plan.explain("layers.0.router.weight").alternatives
    assert sbpc.plan(model, batch(experts=8), Mesh(pipe=2), schedule="breadth-first", **PIPE).diff(plan)


def first_joined(body: dict[str, Any]) -> str:
    """The name of the first input of the body that is joined behind the forwards."""
    return next(name for name, source in body["loop"]["inputs"].items() if source[0] == "joined")


def argument(body: dict[str, Any]) -> list[Any]:
    """What the first chunk that reads that says of its port."""
    name = first_joined(body)
    return next(row for chunk in body["chunks"] for row in chunk["arguments"] if row[2] == name)


HOSTILE: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("no such output", lambda body: body["loop"]["inputs"][first_joined(body)].__setitem__(1, 99)),
    ("an output before the first", lambda body: body["loop"]["inputs"][first_joined(body)].__setitem__(1, -1)),
    ("no number", lambda body: body["loop"]["inputs"][first_joined(body)].__setitem__(1, True)),
    ("another output", lambda body: body["loop"]["inputs"][first_joined(body)].__setitem__(1, 0)),
    ("made before the loop", lambda body: body["loop"]["inputs"][first_joined(body)].__setitem__(0, "before")),
    ("the number of the micro-batch", lambda body: body["loop"]["inputs"][first_joined(body)].__setitem__(0, "index")),
    ("an argument in its place", lambda body: argument(body).__setitem__(2, "0")),
    ("read in the forward", lambda body: argument(body).__setitem__(0, "input")),
    ("a schedule that cannot", lambda body: body["options"].update(schedule="1f1b")),
    ("joined otherwise", lambda body: body["loop"]["joins"].__setitem__(body["loop"]["inputs"][first_joined(body)][1], 0)),
]  # fmt: skip


@pytest.mark.parametrize("what", [what for what, _ in HOSTILE])
def test_a_file_whose_joined_values_make_no_sense_is_refused(
    what: str, written: tuple[Any, Path], tmp_path: Path
) -> None:
    content = copy.deepcopy(read(written[1]))
    dict(HOSTILE)[what](content)
    (tmp_path / "bad").write_bytes(sealed(content))
    message = refused(PlanError, lambda: sbpc.load(tmp_path / "bad"))
    assert "bad: " in message and message.count("\n") == 1, message


def test_a_search_of_strategies_takes_schedules_with_all_forwards_first() -> None:
    torch.manual_seed(0)
    model = Evened(4).double()
    options: dict[str, Any] = {"cluster": "h100", "stages": True, "microbatches": True, "seconds": 20.0}
    rows = sbpc.sweep(model, batch(), devices=2, **options)
    several = [row for row in rows if row.microbatches > 1]
    assert {row.stages for row in several} == {1, 2}
    assert {row.schedule.partition(":")[0] for row in several} == {"gpipe", "breadth-first"}
    row = next(row for row in several if row.stages == 2)
    assert row.plan.schedule == row.schedule and row.plan.cost.step_seconds == pytest.approx(row.cost, rel=0.05)
    assert row.plan.memory["total"] == pytest.approx(row.memory["total"], rel=0.1)


def trained(plan: sbpc.Plan, layers: int, file: str) -> tuple[list[float], list[float]]:
    """On this rank: losses of steps with other routings, and the sums of squares of the weights behind them; and a loss of an
    exported file."""
    torch.manual_seed(0)
    module = sbpc.parallelize(Evened(layers, experts=8).double(), plan)
    exported = sbpc.load_module(file)
    return [float(exported.step(*batch(experts=8)))], steps(module)  # type: ignore[operator]


def steps(module: Any) -> list[float]:
    """Losses of Adam's steps, of which each adds up two batches, and then of all weights the sum of squares."""
    optimizer, found = torch.optim.Adam(module.parameters(), lr=1e-2), []
    for routing in ("as it comes", "all to one", "one idle"):
        optimizer.zero_grad()
        for last, args in ((False, batch(routing, experts=8)), (True, batch(experts=8))):
            if hasattr(module, "step"):
                with nullcontext() if last else module.no_sync():
                    loss = module.step(*args)
            else:
                loss = module(*args)
                loss.backward()
            found.append(loss.item())
        optimizer.step()
    whole = sbpc.full_state_dict(module) if hasattr(module, "step") else module.state_dict()
    return [*found, *(float(value.square().sum()) for value in (whole or {}).values())]


@pytest.mark.parametrize("schedule", ["gpipe", pytest.param("breadth-first", marks=pytest.mark.prove)])
def test_steps_on_four_ranks_equal_one_process(schedule: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = 4 if schedule == "breadth-first" else 2
    model = Evened(layers, experts=8).double()
    plan = sbpc.plan(model, batch(experts=8), Mesh(pipe=2, a=2), schedule=schedule, optimizer="adam", **PIPE)
    plan.export(tmp_path / "model.sbpc")
    save_tensors(model.state_dict(), tmp_path / "model.safetensors")
    first, expected = model(*batch(experts=8)).item(), steps(model)
    for rank, found in enumerate(run_ranks(trained, 4, plan, layers, str(tmp_path / "model.sbpc"))):
        assert isinstance(found, tuple), found
        assert found[0] == pytest.approx([first], rel=1e-10)
        assert found[1] == pytest.approx(expected if rank == 0 else expected[: len(found[1])], rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("how", ["sum", "max", "min", "same", 0])
def test_what_waits_for_other_micro_batches_is_held_once(
    how: Any, dtype: torch.dtype, written: tuple[Any, Path]
) -> None:
    loop = replace(written[0].loop, count=4, joins=(how,))
    joined, values = Joined(loop), [(torch.randn(3, 2) * 9).to(dtype) for _ in range(4)]
    for at in (2, 0, 3, 1):
        joined.take(0, at, values[0 if how == "same" else at])
    stacked = torch.stack(values)
    summed = stacked.double().sum(0).to(dtype)
    whole = {"sum": summed, "max": stacked.amax(0), "min": stacked.amin(0), "same": values[0], 0: torch.cat(values)}[
        how
    ]
    parts = how == 0 or (how == "sum" and dtype == torch.bfloat16)  # whose sums would be rounded
    assert len(joined.values[0]) == (4 if parts else 1)
    torch.testing.assert_close(joined.whole(0), whole)
    assert joined.whole(0) is joined.whole(0) and not joined.values[0]


def test_what_a_micro_batch_has_not_left_is_not_joined(written: tuple[Any, Path]) -> None:
    joined = Joined(replace(written[0].loop, count=4, joins=("sum",)))
    for at in (0, 1, 3):
        joined.take(0, at, torch.ones(2))
    with pytest.raises(AssertionError, match="all micro-batches leave it"):
        joined.whole(0)
