"""FlexAttention is one op whose functions are told where a rank's part stands, and so are split along every dim."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import sbpc
from sbpc import Mesh
from sbpc.graph.flex import BACKWARD, FORWARD
from tests import flex_cases, flexible, hf_models
from tests.compare import compare, eager
from tests.duality import Dual, missing
from tests.random_plans import random_plan


def equal(mesh: dict[str, int], plans: int, *kinds: str, groups: int = 4) -> None:
    """A plan and some random ones give what torch gives."""
    torch.manual_seed(0)
    model, args = flexible.Net(*kinds, groups=groups), flexible.batch()
    outputs, gradients = flexible.eager_step(model, args)
    plan = sbpc.plan(model, args, Mesh(**mesh))
    assert not plan.notes and plan.verify()
    for each in (plan, *(random_plan(plan, seed) for seed in range(plans))):
        assert compare(each, model, args, outputs, gradients) <= 1e-10


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kinds", [("window", "alibi", "table"), ("plain", "documents", "capped")], ids=str)
def test_flex_attention_gives_what_torch_gives_on_one_device(kinds: tuple[str, ...]) -> None:
    equal({"data": 2, "x": 2}, 1, *kinds, groups=2)


@pytest.mark.prove
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", flexible.MODS)
def test_ten_random_plans_of_flex_attention_equal_one_device(kind: str) -> None:
    for groups, mesh in itertools.product((4, 2), ({"x": 2}, {"x": 4}, {"data": 2, "x": 2})):
        equal(mesh, 10, kind, groups=groups)


def test_each_call_is_one_node_ahead_and_one_back() -> None:
    plan = sbpc.plan(flexible.Net("causal", "table"), flexible.batch(), Mesh(x=2))
    found = [node.target for node in plan.graph.graph.nodes if "flex" in str(node.target)]
    assert found == [FORWARD, FORWARD, BACKWARD, BACKWARD]


def test_a_function_that_is_not_told_its_places_keeps_their_dim_whole() -> None:
    for one in flex_cases.cases():
        texts = [value for value in one.args if isinstance(value, str)]
        if flex_cases.DOCUMENTS not in texts:
            continue
        at = next(at for at, value in enumerate(one.args) if isinstance(value, Tensor) and value.shape == (4,))
        blind = replace(one, args=(*one.args[:at], None, *one.args[at + 1 :]))
        before, after = ({signature.factor for signature in each.match().signatures} for each in (one, blind))
        assert before - after == {"b"}


def test_a_backward_has_the_transpose_of_each_way_ahead() -> None:
    found = iter(flex_cases.cases())
    for ahead, back, _ in zip(found, found, found):
        places = ["*"] * (len(ahead.operands) - 3)
        dual = Dual(
            ahead, back, ("g0", "i0", "i1", "i2", "o0", "*", *places), (0, 1, 2, *[None] * (len(back.run()) - 3))
        )
        assert not missing(dual)


@pytest.mark.usefixtures("float64")
def test_what_is_read_of_the_logsumexp_has_its_gradient() -> None:
    class Sink(nn.Module):
        """Attention with a sink, as gpt-oss has it."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.sink = nn.Linear(12, 36), nn.Parameter(torch.randn(4, 1))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, 3)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            mask = flex.create_block_mask(flexible.causal, None, None, 6, 6, x.device)
            y, aux = flex.flex_attention(q, k, v, block_mask=mask, return_aux=flex.AuxRequest(lse=True))
            return (y * torch.sigmoid(aux.lse - self.sink).unsqueeze(-1)).square().mean()

    torch.manual_seed(0)
    model, args = Sink(), (torch.randn(4, 6, 12),)
    with pytest.MonkeyPatch.context() as patch:  # torch returns none on CPUs
        patch.setattr(flex, "_apply_kernel_options", lambda *_, **__: {"BACKEND": "AUTO"})
        outputs, gradients = flexible.eager_step(model, args)
        plan = sbpc.plan(model, args, Mesh(x=2))
    for each in (plan, *(random_plan(plan, seed) for seed in range(3))):
        assert compare(each, model, args, outputs, gradients) <= 1e-10


@pytest.mark.usefixtures("float64")
def test_a_model_of_transformers_with_flex_attention_equals_one_device() -> None:
    model, kwargs = hf_models.MODELS["llama"]("sdpa", 1)
    kwargs["attention_mask"] = torch.ones_like(kwargs["input_ids"])
    kwargs["attention_mask"][1, -3:] = 0
    model = model.double()
    with hf_models.Doubled():
        outputs, gradients = eager(model, (), kwargs)
        model.set_attn_implementation("flex_attention")
        plan = sbpc.plan(model, (), Mesh(x=2), kwargs=kwargs)
    assert not plan.notes and any(node.target is FORWARD for node in plan.graph.graph.nodes)
    for each in (plan, random_plan(plan, 0)):
        assert compare(each, model, (), outputs, gradients, kwargs) <= 1e-9
