"""Micro-batches: a step in parts has the whole batch's numbers, on one device and on meshes, and two halves overlap."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.api.task import prepare
from sbpc.errors import LoopError, PlanError, SbpcError
from sbpc.graph.ports import INPUT, Port
from sbpc.mesh.cluster import Cluster
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.micro_batches import micro_batches
from sbpc.plans.plan import Plan
from tests import models
from tests.compare import compare, eager, largest_error, relative_error

aten = torch.ops.aten
NETS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "gpt2": {"batch": 4, "layers": 1},
    "resnet": {"batch": 8, "layers": 1},
    "batch_norm": {"bias": False},
}
LAN = Cluster("lan", 1e10, 1e10, 5e-7, 1, 2e-6, 24e6, 2e-6, 24e6)


class Ignoring(nn.Module):
    """A mean over targets of which the first half of the batch has few that count: means of the halves' means are wrong."""

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.register_buffer("weight", torch.rand(5) if weighted else None)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), target, ignore_index=-1, weight=self.weight)


QUICK = {"mlp": ((1, 4),), "gpt2": ((2, 2),), "resnet": ((2, 4),), "batch_norm": ((2, 2),)}  # ranks, parts


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.prove)])
@pytest.mark.parametrize("net", NETS)
def test_micro_batches_have_the_numbers_of_the_whole_batch(net: str, quick: bool) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = getattr(models, net)(**NETS[net])
    outputs, gradients = eager(model, args)
    for ranks, count in QUICK[net] if quick else itertools.product((1, 2), (2, 4)):
        plan = sbpc.plan(model, args, Mesh(x=ranks), microbatches=count)
        plan.verify()
        assert compare(plan, model, args, outputs, gradients) <= 1e-10
        assert plan.options.microbatches == count and plan.layouts.keys() >= dict(model.named_parameters()).keys()


def test_a_batch_norm_of_the_inputs_alone_is_no_loop_but_works_in_parts() -> None:
    """Its statistics could be there before the loop, were they a value of the step and not of the first of its two phases."""
    torch.set_default_dtype(torch.float64)
    model, args = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)), (torch.randn(6, 4),)
    plan = sbpc.plan(model, args, Mesh(x=2), loss=torch.sum, microbatches=3)
    assert type(plan) is Plan
    outputs, gradients = eager(model, args)
    assert compare(plan, model, args, [outputs[0].sum()], gradients) <= 1e-10


class Mixing(nn.Module):
    """Rows of the input, which others mix, and a weight."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.mix = nn.Parameter(torch.randn(4)), mix

    def forward(self, x: Tensor) -> Tensor:
        return (self.mix(x) * self.weight).square().sum()


def test_a_micro_batch_has_its_part_of_inputs_of_which_rows_are_mixed() -> None:
    """They are mixed before the loop, of which each micro-batch takes its own part, on whichever dim that lies."""
    torch.set_default_dtype(torch.float64)
    for mix in (lambda x: x.reshape(4, 6).cumsum(0).view(6, 4), lambda x: x + x.roll(1, 0).softmax(0)):
        model, args = Mixing(mix), (torch.randn(6, 4),)
        plan = sbpc.plan(model, args, Mesh(x=2), microbatches=2)
        assert plan.loop is not None and compare(plan, model, args, *eager(model, args)) <= 1e-10
    with pytest.raises(LoopError, match=r"in forward\n.*self.mix") as found:
        sbpc.plan(Mixing(lambda x: x.cumsum(0)), args, Mesh(x=2), stages="x", microbatches=2)
    assert "for the whole batch" in str(found.value)


def test_gradients_are_sent_once_for_any_number_of_micro_batches() -> None:
    """What an expert splits is split in every micro-batch, and gradients add up before they are sent."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.gpt2(batch=16, layers=1)
    mesh = Mesh(data=2, cluster="ethernet")
    plans = [sbpc.baseline("data", model, args, mesh, microbatches=m, objective="serial") for m in (1, 4, 8)]
    sent = [plan.cost.bytes_sent["data"] for plan in plans]
    assert sent[0] > 0 and sent[1:] == pytest.approx(2 * sent[:1], rel=0.01)
    assert compare(plans[-1], model, args, *eager(model, args)) <= 1e-10


def test_means_are_over_all_targets_that_count() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x = Ignoring(), torch.randn(8, 6)
    target = torch.tensor([-1, -1, -1, 2, 0, 1, 2, 3])
    plan = sbpc.plan(model, (x, target), Mesh(x=2), microbatches=2)
    assert largest_error(plan, model, (x, target)) <= 1e-12
    means = [model(x[half], target[half]) for half in (slice(0, 4), slice(4, 8))]
    assert abs(sum(means) / 2 - model(x, target)) > 1e-3  # type: ignore[arg-type]


def test_uneven_counts_have_the_numbers_of_the_whole_batch() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    target = torch.tensor([-1, -1, -1, -1, -1, 1, 2, 3])  # of the first parts none counts
    model, args = Ignoring(weighted=True), (torch.randn(8, 6), target)
    assert largest_error(sbpc.plan(model, args, Mesh(x=2), microbatches=4), model, args) <= 1e-10


@pytest.mark.parametrize(("net", "options"), [("gpt2", {"batch": 8}), ("vgg", {"batch": 12})])
def test_fewer_activations_live_in_a_loop_and_where_parts_are_written_out(net: str, options: dict[str, Any]) -> None:
    """The backward of a part goes before the forward of the next: a mean over targets is divided by their count, which needs no forward."""
    model, args = getattr(models, net)(**options)
    whole, parts = (sbpc.plan(model, args, Mesh(x=1), microbatches=m) for m in (1, 4))
    written = micro_batches(prepare(model, args).gm, 4, Mesh(x=1).cluster)
    losses = [at for at, node in enumerate(written.graph.nodes) if node.target is aten.nll_loss_forward.default]
    backwards = [at for at, node in enumerate(written.graph.nodes) if node.target is aten.nll_loss_backward.default]
    assert all(backward < loss for backward, loss in zip(backwards, losses[1:])) and len(backwards) == 4
    assert parts.cost.memory["activations"] < 0.35 * whole.cost.memory["activations"]
    lives = [sbpc.simulate(plan, model, args).peak_memory for plan in (parts, whole)]
    assert lives[0] < (0.8 if net == "gpt2" else 0.9) * lives[1]


def test_dropout_draws_the_same_numbers_for_every_number_of_micro_batches() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), torch.randn(8, 4)
    runs = [sbpc.simulate(sbpc.plan(model, (x,), Mesh(x=2), microbatches=m), model, (x,), seed=3) for m in (1, 2, 4)]
    for run in runs[1:]:
        assert torch.allclose(run.outputs, runs[0].outputs, atol=1e-6)
        for name, gradient in run.gradients.items():
            assert torch.allclose(gradient, runs[0].gradients[name], atol=1e-5)  # type: ignore[arg-type]


def test_two_halves_are_taken_where_the_simulated_step_is_shorter() -> None:
    model, args = models.gpt2(batch=4, seq=16, width=128, heads=4, layers=2)
    mesh = Mesh(t=2, cluster=LAN)
    whole, chosen = (sbpc.plan(model, args, mesh, microbatches=m) for m in (1, None))
    assert chosen.options.microbatches == 2 and chosen.cost.seconds < 0.98 * whole.cost.seconds
    assert whole.cost.lower_bound == chosen.cost.lower_bound <= chosen.cost.seconds
    checked = chosen.check_bound()
    assert checked.bound <= chosen.cost.seconds and checked.paid >= checked.bound * (1 - 1e-9)
    chosen.verify()
    assert largest_error(chosen, model, args) <= 1e-4
    assert "blocks.0.up.weight" in str(chosen.explain("blocks.0.up.weight"))
    assert sbpc.plan(model, args, Mesh(t=2), microbatches=None).options.microbatches == 1  # the ideal cluster


def test_a_step_that_is_no_loop_is_written_out() -> None:
    """Batch norm reads the whole batch, a step without a loss gets gradients from outside, and a loop has no symbolic dims."""
    layer, x = nn.Linear(4, 3), torch.randn(8, 4)
    summed = sbpc.plan(layer, (x,), Mesh(x=2), loss=Tensor.mean, microbatches=4)
    assert summed.loop is not None and summed.axis is None and summed.graph is summed.chunks[0].graph
    assert summed.certify(seconds=1) == summed.cost.gap and summed.check_bound().bound <= summed.cost.seconds * (
        1 + 1e-9
    )
    with pytest.raises(LoopError, match="needs the whole batch's value of this op"):
        loop_of(prepare(*models.batch_norm(bias=False)).gm, 2)
    for options in ({}, {"loss": Tensor.mean, "inputs": ["S(0)"]}):
        plan: Any = sbpc.plan(layer, (x,), Mesh(x=2), microbatches=4, **options)
        assert plan.loop is None and sum(node.target is aten.addmm.default for node in plan.graph.graph.nodes) == 4


@pytest.mark.parametrize("schedule", ["", "1f1b", pytest.param("gpipe", marks=pytest.mark.prove)])
def test_formulas_have_the_number_of_micro_batches_and_the_batch(schedule: str) -> None:
    """One formula has the busy seconds and the bytes of the same layouts for every number of micro-batches, and for another batch."""
    stages: Any = {"stages": "pipe", "schedule": schedule} if schedule else {}
    axes = {"pipe": 2, "x": 2} if schedule else {"x": 2}

    def planned(batch: int, count: int, **options: Any) -> Any:
        model, args = models.gpt2(batch=batch, layers=2, heads=4)  # as many as micro-batches
        mesh = Mesh(**axes, cluster="h100")
        return sbpc.baseline("data", model, args, mesh, microbatches=count, objective="serial", **stages, **options)

    plans = [planned(*sizes) for sizes in ((16, 4), (16, 8), (32, 8))]
    named = planned(16, 4, dynamic={"tokens": ("b", "s"), "targets": ("b", "s")})
    for plan in plans:
        cost, batch = plan.cost, plan.shapes[Port(INPUT, "0")].shape[0]
        busy = pytest.approx(cost.compute_seconds + cost.comm_seconds, rel=1e-9)
        assert plans[0].cost.subs(m=plan.count, batch=batch) == busy == named.cost.subs(m=plan.count, b=batch)
        numbers = {cost.symbols[name]: number for name, number in cost.numbers.items()}
        assert cost.memory["total"] == plans[0].cost.memory_expr.xreplace(numbers) == cost.memory_expr.xreplace(numbers)
        sent = float(cost.bytes_expr["x"].xreplace(numbers))
        assert sent == pytest.approx(cost.bytes_sent["x"], rel=1e-9) if not stages else 0 < sent <= cost.bytes_sent["x"]
    assert {"b", "s", "m", "x"} <= set(map(str, named.cost.expr.free_symbols))
    bodies: list[Any] = [plan.body for plan in plans]
    # formulas of their own
    assert not any({"m", "batch"} & set(map(str, body.cost.memory_expr.free_symbols)) for body in bodies)


def test_gradients_of_arguments_are_joined() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(8, 4, requires_grad=True)
    plan = sbpc.plan(layer, (x,), Mesh(x=2), loss=Tensor.mean, microbatches=4)
    run = sbpc.simulate(plan, layer, (x,))
    layer(x).mean().backward()
    assert plan.loop is not None and relative_error(run.input_gradients[0], x.grad, 1e-6) <= 1e-12
    # rather than gradients of another number
    with pytest.raises(PlanError, match="1 tangents for 0 differentiable outputs"):
        sbpc.simulate(plan, layer, (x,), tangents=torch.tensor(2.0))


def test_what_cannot_be_cut_is_refused() -> None:
    model, args = models.mlp(batch=6)
    with pytest.raises(PlanError, match="a batch of 6 in 4 micro-batches"):
        sbpc.plan(model, args, Mesh(x=2), microbatches=4)
    with pytest.raises(PlanError, match="dynamic= with microbatches="):
        sbpc.plan(model, args, Mesh(x=2), microbatches=2, dynamic={"b": 6}, objective="bytes")
    with pytest.raises(SbpcError, match="'m' is the number of micro-batches"):
        sbpc.plan(model, args, Mesh(x=2), microbatches=2, dynamic={"m": 6})
    with pytest.raises(PlanError, match="of a value with microbatches="):
        sbpc.plan(model, args, Mesh(x=2), microbatches=2, pin={"relu": "S(0)"}, objective="bytes")
    for bad in (0, -1, 1.5, "2"):
        with pytest.raises(SbpcError, match="microbatches is"):
            sbpc.plan(model, args, Mesh(x=2), microbatches=bad)  # type: ignore[arg-type]


def test_halves_under_a_memory_limit_fit_and_are_right_and_their_bound_is_tightened() -> None:
    model, args = models.gpt2(batch=8, seq=16, width=128, heads=4, layers=2)
    mesh = Mesh(t=2, cluster=LAN)
    limit = 0.75 * sbpc.plan(model, args, mesh).cost.memory["total"]
    plan = sbpc.plan(model, args, mesh, memory=limit)
    assert plan.options.microbatches == 2 and plan.cost.memory["total"] <= limit
    plan.verify()
    assert largest_error(plan, model, args) <= 1e-4
    before = plan.lower_bound
    assert plan.certify(seconds=1) == plan.cost.gap and before <= plan.lower_bound <= plan.cost.seconds


class Summed(nn.Module):
    """A cross-entropy summed over the targets that count, over a constant, as losses over all tokens of a step are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.down(F.relu(self.up(x))), target, ignore_index=2, reduction="sum") / 12


@pytest.mark.parametrize(
    ("mesh", "options"), [({"data": 2}, {}), ({"pipe": 2}, {"stages": "pipe"}), ({"data": 2}, {"capture": "aot"})]
)
def test_a_sum_of_losses_is_a_loop(mesh: dict[str, int], options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = Summed(), (torch.randn(12, 24), torch.randint(0, 8, (12,)))
    plan = sbpc.plan(model, args, Mesh(**mesh), microbatches=3, **options)
    assert plan.loop is not None
    assert compare(plan, model, args, *eager(model, args)) <= 1e-10
