"""Ops without a rule: taken apart where all their parts have rules, replicated loudly where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from tests.compare import eager, largest_error, relative_error


class Head(nn.Module):
    """A linear layer, and a function with an op that sbpc has no rule of its own for."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 12)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).square().sum()


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "addr": lambda y: torch.addr(y, y[:, 0], y[0]),
    "aminmax": lambda y: torch.aminmax(y, dim=1)[0],
    "linalg_cross": lambda y: torch.linalg.cross(y.view(-1, 4, 3), (y * 2 + 1).view(-1, 4, 3).flip(-1)),
    "log_sigmoid_forward": F.logsigmoid,
    "reflection_pad2d": lambda y: F.pad(y.view(1, -1, 3, 4), (1, 1, 1, 1), mode="reflect"),
    "soft_margin_loss": lambda y: F.soft_margin_loss(y, torch.ones_like(y)),
}


@pytest.mark.usefixtures("float64")
def test_an_op_without_a_rule_is_planned_as_what_it_is_made_of() -> None:
    for op, function in OPS.items():
        model, args = Head(function), (torch.randn(24, 8) / 3,)
        plan = sbpc.plan(model, args, Mesh(x=2, y=2), objective="serial")
        assert not plan.notes
        assert f"no rule for aten.{op}.default, which is planned as what it is made of: aten." in plan.remarks[0]
        assert largest_error(plan, model, args) <= 1e-10
        assert plan.verify() > 10
        assert plan.cost.flops <= 0.4 * plan.cost.flops_one_device


class Norm(nn.Module):
    """Batch norm by one of the ops that it is on a device."""

    def __init__(self, op: Callable[..., Any], training: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.op = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8).train(training), op

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        found = self.op(
            self.conv(x), norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.training, 0.1, 1e-5
        )
        return found[0].relu().square().sum()


@pytest.mark.usefixtures("float64")
def test_batch_norm_of_cudnn_is_planned_as_that_of_any_device() -> None:
    for training in [True, False]:
        torch.manual_seed(0)
        x, model, twin = (
            torch.randn(8, 3, 4, 4),
            Norm(torch.cudnn_batch_norm, training),
            Norm(torch.native_batch_norm, training),
        )
        twin.load_state_dict(model.state_dict())
        plan = sbpc.plan(model, (x,), Mesh(x=2, y=2))
        assert not plan.notes and plan.cost.flops <= 0.3 * plan.cost.flops_one_device
        run = sbpc.simulate(plan, model, (x,))
        (expected,), gradients = eager(twin, (x,))
        assert relative_error(run.outputs, expected) <= 1e-10
        assert all(
            relative_error(run.gradients[name], gradients[name]) <= 1e-9
            for name in ("conv.weight", "norm.weight", "norm.bias")
        )
        assert set(run.buffers) == ({"norm.running_mean", "norm.running_var"} if training else set())
        assert all(relative_error(found, twin.get_buffer(name)) <= 1e-10 for name, found in run.buffers.items())


def test_parts_have_the_module_and_the_line_of_the_op() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Head(F.logsigmoid)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    plan = sbpc.plan(Deep(), (torch.randn(24, 8),), Mesh(x=2))
    parts = [node for node in plan.graph.graph.nodes if "decomposed" in node.meta]
    assert {node.meta["module"] for node in parts} == {"inner"}
    assert all("self.function(self.linear(x))" in node.meta["stack_trace"] for node in parts)


def test_a_saved_plan_still_says_what_was_taken_apart(tmp_path) -> None:
    plan = sbpc.plan(Head(F.logsigmoid), (torch.randn(24, 8),), Mesh(x=2))
    plan.save(tmp_path / "plan.sbpc")
    assert sbpc.load(tmp_path / "plan.sbpc").remarks == plan.remarks


def test_an_op_with_a_part_that_has_no_rule_stays_whole_and_the_plan_is_loud() -> None:
    plan = sbpc.plan(Head(lambda y: torch.linalg.matrix_exp(y[:12])), (torch.randn(24, 8) / 10,), Mesh(x=2))
    assert (
        len(plan.notes) == 1
        and "no rule for aten.linalg_matrix_exp.default, so every rank computes all" in plan.notes[0]
    )


class Margins(nn.Module):
    """A loss of several labels a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.multilabel_margin_loss(self.layer(x), labels)


def test_labels_behind_the_end_of_a_list_do_not_count() -> None:
    model, x = Margins().double(), torch.randn(4, 8, dtype=torch.float64)
    labels = torch.tensor([[1, 2, -1, 0], [0, -1, 1, 1], [3, 2, 1, 0], [2, -1, -1, -1]])
    assert largest_error(sbpc.plan(model, (x, labels), Mesh(x=2)), model, (x, labels)) < 1e-12
