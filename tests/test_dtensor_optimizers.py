"""Optimizers that read rows and columns of a gradient, and numbers of DTensors, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError
from tests.processes import run_ranks


class OfShapes(torch.optim.Optimizer):
    """An optimizer that makes its state by the shape of a parameter."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(torch.zeros(parameter.shape).add_(0.1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda ps: torch.optim.Adafactor(ps, lr=0.01, weight_decay=0.1),
    "torch, lists": lambda ps: torch.optim.Adafactor(ps, lr=0.01, foreach=True),
    "transformers": lambda ps: Adafactor(ps, weight_decay=0.1),
    "transformers, averages": lambda ps: Adafactor(ps, lr=0.01, relative_step=False, scale_parameter=False, beta1=0.9),
}
PINS = {
    "x": {"0.weight": "S(0)", "2.weight": "S(1)", "2.bias": "S(0)"},
    "y": {"0.weight": "S(0)@y>x", "2.weight": "[S(1), S(0)]"},
}


def made() -> tuple[nn.Module, tuple[Tensor]]:
    """Rows that two ranks do not have alike, and the batch."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5)), (torch.randn(8, 6),)


def stepped(module: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        module(*made()[1]).square().mean().backward()
        optimizer.step()


def on_ranks(plan: sbpc.Plan, folder: str) -> dict[str, Any]:
    """On a rank: weights after three steps, the last one after a checkpoint; numbers of gradients; what is refused."""
    found: dict[str, Any] = {}
    for at, (name, make) in enumerate(OPTIMIZERS.items()):
        checkpoints = sbpc.Checkpoints(f"{folder}/{at}")
        for steps in (2, 1):
            module = sbpc.parallelize(made()[0], plan)
            optimizer = make(module.parameters())
            checkpoints.load(module, optimizer)
            stepped(module, optimizer, steps)
            checkpoints.save(steps, module, optimizer)
        found[name] = {name: p.full_tensor().detach() for name, p in module.named_parameters()}  # type: ignore[attr-defined]
    found["numbers"] = numbers(module)
    with pytest.raises(PlanError) as error:
        OfShapes(module.parameters(), {}).step()
    found["refused"] = str(error.value)
    return found


def numbers(module: nn.Module) -> list[float]:
    """What is logged of gradients."""
    gradients: list[Tensor] = [p.grad for p in module.parameters() if p.grad is not None]
    return [
        f(each).item()
        for each in gradients
        for f in (torch.norm, torch.mean, torch.amax, lambda x: x.sum(0).flatten()[0])
    ]


@pytest.mark.parametrize("axes", [{"x": 2}, pytest.param({"x": 2, "y": 2}, marks=pytest.mark.prove)])
def test_adafactor_and_numbers_of_gradients_are_those_of_one_process(axes: dict[str, int], tmp_path: Any) -> None:
    plan = sbpc.plan(*made(), Mesh(**axes), pin=PINS[list(axes)[-1]])
    for found in run_ranks(on_ranks, plan.mesh.ranks, plan, str(tmp_path)):
        for name, make in OPTIMIZERS.items():
            model = made()[0]
            stepped(model, make(model.parameters()), 3)
            torch.testing.assert_close(found[name], dict(model.named_parameters()), rtol=1e-12, atol=1e-14)
        assert found["numbers"] == pytest.approx(numbers(model), rel=1e-12)
        assert found["refused"].startswith(
            "OfShapes mixes parameters, of which this rank holds parts, with plain tensors: "
        )
