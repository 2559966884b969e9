"""The curve of memory: its maximum is what a plan takes, and what is held there is grouped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sbpc
from sbpc import Mesh
from tests.models import gpt2, mlp

PLANS = {
    "mlp": lambda **o: sbpc.plan(*mlp(), Mesh(data=2, tensor=2), **o),
    "parameters in parts": lambda **o: sbpc.baseline("fsdp", *mlp(), Mesh(p=4), **o),
    "gpt2": lambda **o: sbpc.plan(*gpt2(layers=1), Mesh(data=4, cluster="h100"), **o),
    "forward alone": lambda **o: sbpc.plan(*gpt2(layers=1), Mesh(data=4, cluster="h100"), train=False, **o),
    "loop": lambda **o: sbpc.plan(*gpt2(layers=1), Mesh(data=2, tensor=2, cluster="h100"), microbatches=4, **o),
    "stages": lambda **o: sbpc.plan(
        *gpt2(layers=2), Mesh(pipe=2, data=2, cluster="h100"), stages="pipe", schedule="zbv", **o
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_maximum_is_what_the_plan_takes(name: str) -> None:
    for optimizer in ("adamw", "sgd"):
        plan = PLANS[name](optimizer=optimizer)
        curve = plan.memory_curve()
        assert max(curve.bytes) == curve.bytes[curve.peak] == plan.cost.memory["total"]
        assert len(curve.calls) == len(curve.phases) == len(curve.bytes)
        at_peak = {group: rows[curve.peak] for group, rows in curve.groups.items()}
        held = dict.fromkeys(at_peak, 0)
        for each in curve.held:
            held[each.group] += each.bytes
        last = curve.peak == len(curve.calls) - 1
        assert held == at_peak | {"inputs": at_peak["inputs"] - (0 if last else 8 * len(plan.inner.axes))}
        assert [each.bytes for each in curve.held] == sorted((each.bytes for each in curve.held), reverse=True)


def test_the_groups_of_two_layers_by_hand() -> None:
    """32 rows of 64 floats are 8,192 bytes; a weight of 64 x 64 is 16,384, and so is its gradient."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    plan = sbpc.baseline("data", model, (torch.ones(32, 64),), Mesh(p=2), loss=lambda y: y.sum(), optimizer="momentum")
    curve = plan.memory_curve()
    assert set(curve.groups["parameters"]) == {32768}
    assert set(curve.groups["optimizer"]) == {32768} and curve.groups["gradients"][-1] == 32768
    assert max(curve.groups["gathered copies"]) == 0 and curve.groups["activations"][-1] == 0
    assert max(curve.bytes) == plan.cost.memory["total"]


def test_gathered_copies_are_told_apart_by_module() -> None:
    plan = sbpc.baseline("fsdp", *gpt2(layers=2), Mesh(data=4, cluster="h100"))
    curve = plan.memory_curve()
    assert max(curve.groups["gathered copies"]) > 0
    modules = curve.by_module("activations")
    assert sum(modules.values()) == curve.groups["activations"][curve.peak] and any(
        "blocks.0" in name for name in modules
    )
