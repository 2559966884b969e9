"""Whole models on whole meshes: the simulated plan, and random legal plans, equal eager torch on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sbpc
from sbpc import Mesh, Plan
from tests import models
from tests.compare import compare, eager
from tests.random_plans import never_drawn, random_plan, share_split

NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {}),
    "gpt2": ("gpt2", {"tied": False}),
    "gpt2 tied": ("gpt2", {"tied": True, "layers": 1}),
    "vgg": ("vgg", {}),
    "resnet": ("resnet", {}),
    "batch_norm": ("batch_norm", {"bias": False}),  # a bias before the norm would do nothing
}
MESHES = {
    "2": {"x": 2},
    "4": {"x": 4},
    "2x2": {"x": 2, "y": 2},
    "3": {"x": 3},
    "2x3": {"x": 2, "y": 3},
    "2x2x2": {"x": 2, "y": 2, "z": 2},
}
TOLERANCE = 1e-10


def planned(net: str, mesh: str) -> tuple[Plan, torch.nn.Module, Any]:
    """The plan of a test model."""
    function, options = NETS[net]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = getattr(models, function)(**options)
    return sbpc.plan(model, args, Mesh(**MESHES[mesh])), model, args


def check_bytes(plan: Plan, model: torch.nn.Module, args: Any) -> None:
    """What the cost model says is sent is what the simulator counts."""
    sent = sbpc.simulate(plan, model, args).bytes_sent
    for axis, expected in plan.cost.bytes_sent.items():
        assert sent.get(axis, 0.0) == pytest.approx(expected, abs=1e-6), (axis, sent, plan.cost.bytes_sent)
    assert sum(sent.values()) == pytest.approx(sum(plan.cost.bytes_sent.values()))


# every model and every mesh; the long proofs have all pairs
QUICK = {"mlp": "2x2x2", "gpt2": "3", "gpt2 tied": "2x2", "vgg": "2x3", "resnet": "2", "batch_norm": "4"}
EVERY = [
    pytest.param(net, mesh, marks=() if mesh == QUICK[net] else pytest.mark.prove) for net in NETS for mesh in MESHES
]


@pytest.mark.parametrize(("net", "mesh"), EVERY)
def test_plan_equals_one_device(net: str, mesh: str) -> None:
    plan, model, args = planned(net, mesh)
    outputs, gradients = eager(model, args)
    assert plan.verify() > 100
    assert compare(plan, model, args, outputs, gradients) <= TOLERANCE
    assert plan.cost.flops <= 1.05 / plan.mesh.ranks * plan.cost.flops_one_device
    assert plan.cost.subs() == pytest.approx(plan.cost.compute_seconds + plan.cost.comm_seconds, rel=1e-9)
    assert 0 <= plan.cost.lower_bound <= plan.cost.seconds
    assert not plan.notes
    check_bytes(plan, model, args)
    for seed in range(2):
        drawn = random_plan(plan, seed)
        assert drawn.verify() > 100
        assert compare(drawn, model, args, outputs, gradients) <= TOLERANCE, f"random plan {seed}"
        check_bytes(drawn, model, args)


@pytest.mark.prove
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("net", NETS)
def test_fifty_random_plans_equal_one_device(
    net: str, mesh: str, record_property: Callable[[str, object], None]
) -> None:
    plan, model, args = planned(net, mesh)
    outputs, gradients = eager(model, args)
    plans, worst = [], 0.0
    for seed in range(50):
        drawn = random_plan(plan, seed)
        worst = max(worst, compare(drawn, model, args, outputs, gradients))
        drawn.forget()
        plans.append(drawn)
    split, never = share_split(plans), dict(never_drawn(plans))
    record_property("error", worst)
    record_property(
        "figure", f"{net:10} {mesh:6} error {worst:.1e}, {split:.0%} of values not B, never drawn: {never or 'none'}"
    )
    assert worst <= TOLERANCE
