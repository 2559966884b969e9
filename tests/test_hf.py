"""Models of the `transformers` library as they are: plans and random plans equal eager torch on one device."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh, Plan
from sbpc.errors import CaptureError
from tests import hf_models
from tests.compare import compare, eager, largest_error
from tests.random_plans import random_plan

MESHES = {"2": {"x": 2}, "3": {"x": 3}, "4": {"x": 4}, "2x2": {"x": 2, "y": 2}, "2x2x2": {"x": 2, "y": 2, "z": 2}}
QUICK = [("gpt2", "sdpa", "2x2"), ("llama", "eager", "2"), ("t5", "sdpa", "2"), ("mixtral", "sdpa", "2")]
LONG = [(net, "sdpa", mesh) for net in hf_models.MODELS for mesh in [*MESHES][:-1]]
LONG += [(net, "eager", "2x2") for net in hf_models.MODELS]  # the same model but for one op and what it is made of
TOLERANCE = 1e-9
PRODUCT = torch.ops.aten._grouped_mm.default
# by the type of the experts: the largest error
EXPERTS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


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
    assert {gradient.dtype for gradient in run.gradients.values()} == {torch.float32}  # those of masters


@pytest.mark.parametrize(
    "net, dtype, mesh",
    [
        ("gpt_oss", torch.float64, "2"), ("mixtral", torch.float32, "2"),
        *(
            pytest.param(net, dtype, mesh, marks=pytest.mark.prove_library)
            for net in hf_models.MIXTURES for dtype in EXPERTS for mesh in ("2", "2x2", "3")
        ),
    ],
)  # fmt: skip
def test_experts_in_groups_equal_one_device(net: str, dtype: torch.dtype, mesh: str) -> None:
    """As the library computes them by default."""
    in_groups(net, dtype, mesh)


@pytest.mark.parametrize(
    "net, dtype, mesh",
    [
        ("gpt_oss", torch.float64, "2"),
        *(
            pytest.param(net, dtype, mesh, marks=pytest.mark.prove_library)
            for net in hf_models.MIXTURES for dtype in (torch.float64, torch.float32) for mesh in ("4", "2x2", "2x2x2")
        ),
    ],
)  # fmt: skip
def test_experts_that_own_their_rows_equal_one_device(net: str, dtype: torch.dtype, mesh: str) -> None:
    states = [", ".join([state] * len(MESHES[mesh])) for state in ("R(0)", "S(0)")]
    plan = in_groups(net, dtype, mesh, {"*experts*": f"[{states[1]}]", "_grouped_mm": f"[{states[0]}]"})
    products = [node.meta["sbp"] for node in plan.graph.graph.nodes if node.target is PRODUCT]
    assert {*map(str, products)} == {f"[{each}]" for each in states}


@pytest.mark.parametrize(
    ("net", "mesh", "pin"),
    [
        ("mixtral", "2x2", "[R(0), S(1)]"),
        *(
            pytest.param(net, mesh, pin, marks=pytest.mark.prove_library)
            for net in hf_models.MIXTURES
            for mesh, pin in (("2x2", "[R(0), S(1)]"), ("2x2", "[L(0), S(1)]"), ("2x2x2", "[L(0), R(0), S(1)]"))
        ),
    ],
)
def test_experts_that_are_split_beside_rows_that_ranks_share_out_equal_one_device(
    net: str, mesh: str, pin: str
) -> None:
    plan = in_groups(net, torch.float64, mesh, {"_grouped_mm": pin})
    assert any(str(node.meta["sbp"]) == pin for node in plan.graph.graph.nodes if node.target is PRODUCT)


def in_groups(net: str, dtype: torch.dtype, mesh: str, pin: dict[str, str] | None = None) -> Plan:
    """The plan of a model, which equals one device. Torch's kernel for groups of rows takes no float64; there each
    expert is a product. Beside experts in bfloat16 all is float64, so that every token goes to the same experts."""
    rest = torch.float32 if dtype == torch.float32 else torch.float64
    torch.set_default_dtype(rest)
    model, kwargs = hf_models.with_default_experts(net)
    model = model.to(rest)
    default = model.config._experts_implementation
    for name, part in model.named_modules():
        part.to(dtype if name.endswith("experts") else None)
    with hf_models.Doubled() if rest == torch.float64 else nullcontext():
        model.config._experts_implementation = "batched_mm" if dtype == torch.float64 else default
        outputs, gradients = eager(model, (), kwargs)
        model.config._experts_implementation = default
        plan = sbpc.plan(model, (), Mesh(**MESHES[mesh]), kwargs=kwargs, pin=pin)
    check(plan)
    assert any(node.target is PRODUCT for node in plan.graph.graph.nodes)
    for each in (plan, random_plan(plan, 0)) if pin is None else (plan,):
        assert compare(each, model, (), outputs, gradients, kwargs) <= EXPERTS[dtype]
    return plan


@pytest.mark.parametrize(
    ("net", "more"),
    [
        ("gpt_oss", {"microbatches": 2}),
        *(
            pytest.param(net, {"microbatches": 2, **more}, marks=pytest.mark.prove_library)
            for net in ("gpt_oss", "mixtral") for more in ({"stages": "y"}, {"pin": {"_grouped_mm": "[R(0), R(0)]"}})
        ),
    ],
)  # fmt: skip
def test_experts_in_micro_batches_equal_one_device(net: str, more: dict[str, Any]) -> None:
    """The model returns its loss alone, as only that has a gradient in micro-batches."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    whole, kwargs = hf_models.MIXTURES[net]("eager" if net == "gpt_oss" else "sdpa", 2 if "stages" in more else 1)
    model, config = Loss(whole.double()), whole.config
    with hf_models.Doubled():
        config._experts_implementation = "batched_mm"
        outputs, gradients = eager(model, (), kwargs)
        config._experts_implementation = "grouped_mm"
        mesh = Mesh(x=2) if len(more) == 1 else Mesh(x=2, y=2)
        plan = sbpc.plan(model, (), mesh, kwargs=kwargs, **more)
    assert any(node.target is PRODUCT for chunk in plan.chunks for node in chunk.graph.graph.nodes)
    assert compare(plan, model, (), outputs, gradients, kwargs) <= 1e-10


class Loss(nn.Module):
    """The loss of a model alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **given: Tensor) -> Tensor:
        return self.net(**given).loss


class Experts(nn.Module):
    """The op that the library calls for its experts while it is being compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(3, 8, 8, dtype=torch.float64)) for _ in range(2))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        product = torch.ops.transformers.grouped_mm_fallback
        return product(product(rows, self.up.mT, ends).relu(), self.down, ends).sum()


def test_the_op_of_the_library_for_groups_is_planned_as_that_of_torch() -> None:
    model, args = Experts(), (torch.randn(12, 8, dtype=torch.float64), torch.tensor([5, 5, 12], dtype=torch.int32))
    plan = sbpc.plan(model, args, Mesh(x=3))
    assert not plan.notes
    for each in (plan, *(random_plan(plan, seed) for seed in range(5))):
        assert largest_error(each, model, args) <= 1e-12


@pytest.mark.parametrize("net", ["llama", "t5"])
def test_a_cache_among_the_results_is_left_out_with_a_note(net: str, tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    model, kwargs = hf_models.MODELS[net]("sdpa", 1)
    model = model.double()
    with hf_models.Doubled():
        outputs, gradients = eager(model, (), kwargs)
        kwargs |= {"use_cache": True}
        (kind,) = (type(found) for found in model(**kwargs).values() if type(found).__name__.endswith("Cache"))
        plan = sbpc.plan(model, (), Mesh(x=2), kwargs=kwargs)
    plan.save(tmp_path / "plan")
    for each in (plan, sbpc.load(tmp_path / "plan")):
        said = f"the {kind.__module__}.{kind.__name__} among the results is left out: None is returned"
        assert said in each.remarks and not each.notes
        assert compare(each, model, (), outputs, gradients, kwargs) <= TOLERANCE
    assert sbpc.simulate(plan, model, (), kwargs).outputs.past_key_values is None


def test_a_cache_among_the_arguments_is_refused() -> None:
    model, kwargs = hf_models.llama("sdpa", 1)
    kwargs["past_key_values"] = model(**kwargs, use_cache=True).past_key_values
    with pytest.raises(CaptureError) as error:
        sbpc.plan(model, (), Mesh(x=2), kwargs=kwargs)
    assert str(error.value) == (
        "kwargs['past_key_values'] is a transformers.cache_utils.DynamicCache\n"
        "  A program takes no cache: leave it out."
    )
