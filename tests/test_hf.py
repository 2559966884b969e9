"""Models of the `transformers` library as they are: plans and random plans equal eager torch on one device."""

from __future__ import annotations

import pytest
import torch

import sbpc
from sbpc import Mesh, Plan
from sbpc.errors import CaptureError
from tests import hf_models
from tests.compare import compare, eager
from tests.random_plans import random_plan

MESHES = {"2": {"x": 2}, "3": {"x": 3}, "4": {"x": 4}, "2x2": {"x": 2, "y": 2}}
QUICK = [
    ("gpt2", "eager", "2"), ("gpt2", "sdpa", "2x2"), ("llama", "eager", "2"), ("llama", "sdpa", "2x2"),
    ("qwen", "sdpa", "2"), ("bert", "sdpa", "2"), ("bert", "eager", "2x2"), ("t5", "sdpa", "2"),
    ("vit", "eager", "2"), ("vit", "sdpa", "2x2"), ("mixtral", "sdpa", "2"),
]  # fmt: skip
LONG = [(net, "sdpa", mesh) for net in hf_models.MODELS for mesh in MESHES]
LONG += [(net, "eager", "2x2") for net in hf_models.MODELS]  # the same model but for one op and what it is made of
TOLERANCE = 1e-9


def equal(net: str, attention: str, mesh: str, plans: int) -> None:
    """Plan a model of one layer in float64; its plan and some random ones give the numbers of eager torch."""
    torch.set_default_dtype(torch.float64)
    model, kwargs = hf_models.MODELS[net](attention, 1)
    model = model.double()
    with hf_models.Doubled():
        outputs, gradients = eager(model, (), kwargs)
        plan = sbpc.plan(model, (), Mesh(**MESHES[mesh]), kwargs=kwargs)
    check(plan)
    for each in [plan, *(random_plan(plan, seed) for seed in range(plans))]:
        assert compare(each, model, (), outputs, gradients, kwargs) <= TOLERANCE
        each.forget()


def check(plan: Plan) -> None:
    """No op is without a rule, and where sizes divide each rank has its share of the work."""
    assert not plan.notes
    assert plan.verify() > 100
    if plan.mesh.ranks != 3:
        assert plan.cost.flops <= 1.05 / plan.mesh.ranks * plan.cost.flops_one_device


@pytest.mark.parametrize("net, attention, mesh", QUICK)
def test_a_model_of_the_library_equals_one_device(net: str, attention: str, mesh: str) -> None:
    equal(net, attention, mesh, plans=1)


@pytest.mark.prove_library
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("net, attention, mesh", LONG)
def test_twenty_random_plans_of_a_model_equal_one_device(net: str, attention: str, mesh: str) -> None:
    equal(net, attention, mesh, plans=20)


def test_norms_and_losses_in_float32_stay_so() -> None:
    model, kwargs = hf_models.llama("eager", 1)
    model = model.bfloat16()
    plan = sbpc.plan(model, (), Mesh(x=2), kwargs=kwargs)
    wide = [node for node in plan.graph.graph.nodes if node.target is torch.ops.aten.rsqrt.default]
    assert wide and all(node.meta["val"].dtype == torch.float32 for node in wide)
    run = sbpc.simulate(plan, model, (), kwargs)
    with torch.no_grad():
        assert abs(float(run.outputs.loss) - float(model(**kwargs).loss)) <= 1e-2
    assert {gradient.dtype for gradient in run.gradients.values()} == {torch.bfloat16}


@pytest.mark.parametrize("mesh", ["2", pytest.param("2x2", marks=pytest.mark.prove_library)])
def test_experts_in_groups_equal_one_device(mesh: str) -> None:
    """The kernel for groups of rows takes bfloat16; all else is float64, so that every token goes to the same experts."""
    torch.set_default_dtype(torch.float64)
    model, kwargs = hf_models.mixtral("sdpa", 1, experts="grouped_mm")
    model = model.double()
    model.model.layers[0].mlp.experts.bfloat16()
    with hf_models.Doubled():
        outputs, gradients = eager(model, (), kwargs)
        plan = sbpc.plan(model, (), Mesh(**MESHES[mesh]), kwargs=kwargs)
        check(plan)
        assert any(node.target is torch.ops.aten._grouped_mm.default for node in plan.graph.graph.nodes)
        for each in (plan, *(random_plan(plan, seed) for seed in range(3))):
            assert compare(each, model, (), outputs, gradients, kwargs) <= 2e-2


def test_a_cache_among_the_results_is_refused() -> None:
    model, kwargs = hf_models.llama("sdpa", 1)
    kwargs |= {"use_cache": True}
    (name,) = (name for name, found in model(**kwargs).items() if type(found).__name__ == "DynamicCache")
    with pytest.raises(CaptureError) as error:
        sbpc.plan(model, (), Mesh(x=2), kwargs=kwargs)
    assert str(error.value) == (
        f"the result.{name} is a transformers.cache_utils.DynamicCache\n"
        "  A program returns no cache: call the model with use_cache=False."
    )
