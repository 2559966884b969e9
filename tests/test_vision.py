"""Nets of vision in plain torch: plans and random plans equal eager torch, buffers included."""

from __future__ import annotations

import copy

import pytest
import torch

import sbpc
from sbpc import Mesh
from tests import vision_models
from tests.compare import compare, eager, relative_error
from tests.random_plans import random_plan

MESHES = {"2": {"x": 2}, "3": {"x": 3}, "4": {"x": 4}, "2x2": {"x": 2, "y": 2}}
NETS = ("resnet", "convnext", "unet")
QUICK = [("resnet", "2"), ("convnext", "2x2")]
TOLERANCE = 1e-9


def equal(net: str, mesh: str, plans: int) -> None:
    torch.set_default_dtype(torch.float64)
    model, args = getattr(vision_models, net)()
    after = copy.deepcopy(model)
    after(*args)
    outputs, gradients = eager(copy.deepcopy(model), args)
    plan = sbpc.plan(model, args, Mesh(**MESHES[mesh]))
    assert not plan.notes and plan.verify() > 100
    assert plan.cost.flops <= 1.05 / plan.mesh.ranks * plan.cost.flops_one_device
    for each in (plan, *(random_plan(plan, seed) for seed in range(plans))):
        assert compare(each, model, args, outputs, gradients) <= TOLERANCE
        each.forget()
    found = sbpc.simulate(plan, model, args).buffers
    assert found.keys() == dict(model.named_buffers()).keys()
    for name, value in after.named_buffers():
        assert relative_error(found[name], value) <= TOLERANCE, name


@pytest.mark.parametrize("net, mesh", QUICK)
def test_a_net_of_vision_equals_one_device(net: str, mesh: str) -> None:
    equal(net, mesh, plans=1)


@pytest.mark.prove
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("net", NETS)
def test_twenty_random_plans_of_a_net_of_vision_equal_one_device(net: str, mesh: str) -> None:
    equal(net, mesh, plans=20)
