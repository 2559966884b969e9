"""Memory: the prediction against the simulator's count of live bytes, and plans under falling limits."""

from __future__ import annotations

import itertools

import pytest
import torch

import sbpc
from sbpc import Mesh, Plan
from sbpc.errors import MemoryLimitError
from sbpc.memory import Life
from tests import models
from tests.models import Model
from tests.random_plans import random_plan

MESHES = Mesh(x=2), Mesh(x=3), Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=2, z=2)
QUICK = [("mlp", MESHES[2]), ("mlp", MESHES[3]), ("vgg", MESHES[1]), ("lora", MESHES[3]), ("two_outputs", MESHES[0])]


def error(plan: Plan, model: Model) -> float:
    """How far the predicted peak is from what the simulator counts; optimizer state never enters a program."""
    memory = plan.cost.memory
    return (memory["total"] - memory["optimizer"]) / sbpc.simulate(plan, *model).peak_memory - 1


def limited(model: Model, mesh: Mesh, shares: tuple[float, ...]) -> list[Plan]:
    """Plans for limits that are shares of what the unlimited plan takes, down to the first that cannot be met."""
    found = [sbpc.plan(*model, mesh)]
    for share in shares:
        try:
            found.append(sbpc.plan(*model, mesh, memory=share * found[0].cost.memory["total"]))
        except MemoryLimitError:
            break
        assert found[-1].cost.memory["total"] <= share * found[0].cost.memory["total"]
    return found


@pytest.mark.parametrize(("name", "mesh"), QUICK, ids=str)
def test_predicted_memory_is_what_the_simulator_counts(name: str, mesh: Mesh) -> None:
    model = models.MODELS[name]()
    plans = limited(model, mesh, (0.8, 0.6))
    plans += [random_plan(plans[0], seed) for seed in range(2)]
    assert max(abs(error(plan, model)) for plan in plans) <= 0.05


@pytest.mark.prove
@pytest.mark.parametrize(("name", "mesh"), list(itertools.product(models.MODELS, MESHES)), ids=str)
def test_predicted_memory_of_all_models_is_what_the_simulator_counts(name: str, mesh: Mesh) -> None:
    model = models.MODELS[name]()
    plans = limited(model, mesh, (0.9, 0.8, 0.7, 0.6, 0.5))
    plans += [random_plan(plans[0], seed) for seed in range(5)]
    assert max(abs(error(plan, model)) for plan in plans) <= 0.05


def test_live_bytes_count_a_storage_once_and_the_copies_of_a_boxing() -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(30).view(6, 5).sum(1)

    plan = sbpc.plan(Sum(), (torch.randn(6, 5),), Mesh(a=2), train=False, inputs=["S(1)@a"], outputs=["B"])
    life = Life.of(plan.boxed, plan.mesh)
    kinds = [str(node.name) for node, _ in life.at_peak()]
    assert life.peak == sbpc.simulate(plan, Sum(), (torch.randn(6, 5),)).peak_memory
    assert kinds[0] == "x" and life.live[0] == 8 + 6 * 3 * 4


def test_a_limit_that_cannot_be_met_names_what_holds_most() -> None:
    model, args = models.mlp(batch=12)
    with pytest.raises(MemoryLimitError) as raised:
        sbpc.plan(model, args, Mesh(x=4), memory=1000)
    message = str(raised.value)
    assert "more than the limit of 1,000" in message and message.count("%") == 3
