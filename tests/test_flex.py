"""FlexAttention is one op whose functions are told where a rank's part stands, and so are split along every dim."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.utils import GmWrapper
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph, GraphModule
from torch.fx.node import map_aggregate
from torch.nn.attention import flex_attention as flex

import sbpc
from sbpc import Mesh
from sbpc.errors import CaptureError, PlanError
from sbpc.graph.flex import BACKWARD, FORWARD, lines
from sbpc.rules.proof.prove import Case
from sbpc.runtime import executors
from sbpc.runtime.flex_kernels import OPERATORS
from tests import flex_cases, flexible, hf_models
from tests.compare import compare, eager
from tests.duality import Dual, missing
from tests.processes import run_ranks
from tests.random_plans import random_plan
from tests.test_plan import refused


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
@pytest.mark.parametrize(
    "kinds", [("window", "alibi", "table"), ("plain", "documents", "capped"), ("chunked",)], ids=str
)
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
    assert compare(plan, model, (), outputs, gradients, kwargs) <= 1e-9


class Kept(nn.Module):
    """Attention with a mask that was made before."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(16, 48), flex.create_block_mask(flexible.causal, None, None, 8, 8, "cpu")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return flex.flex_attention(q, k, v, block_mask=self.mask).square().mean()


@pytest.mark.usefixtures("float64")
def test_a_mask_on_a_module_is_what_it_was_when_planned() -> None:
    model, args = Kept(), (torch.randn(2, 8, 16),)
    plan = sbpc.plan(model, args, Mesh(x=2))
    outputs, gradients = flexible.eager_step(model, args)
    assert compare(plan, model, args, outputs, gradients) <= 1e-10
    for hidden in (1, 2):

        def later(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, most: int = hidden) -> Tensor:
            return q - kv >= most

        model.mask = flex.create_block_mask(later, None, None, 8, 8, "cpu")
        message = refused(PlanError, functools.partial(sbpc.simulate, plan, model, args))
        assert message.startswith("mask is BlockMask(later ") and "Plan anew" in message
        plan = sbpc.plan(model, args, Mesh(x=2))


def losses_of(module: Any, args: Any) -> list[float]:
    """Those of three steps."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.5), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(*args)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def on_ranks(plan: sbpc.Plan, model: nn.Module, args: Any, exported: Path) -> list[float]:
    """The losses of three steps on this rank, by a plan from a file, and of the first by an exported program."""
    found = losses_of(sbpc.parallelize(copy.deepcopy(model), plan, executor="code"), args)
    programs = sbpc.load_programs(exported)
    return [*found, sbpc.parallelize(copy.deepcopy(model), programs)(*args).item()]


@pytest.mark.usefixtures("float64")
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = flexible.Net("documents", "table", groups=2), flexible.batch()
    plan = sbpc.plan(model, args, Mesh(x=2))
    plan.export(tmp_path / "exported")
    found = run_ranks(on_ranks, 2, plan, model, args, tmp_path / "exported")
    torch.compiler.reset()
    with flexible.trained_on_cpus():
        expected = losses_of(model, args)
    assert expected[0] != pytest.approx(expected[2], rel=1e-3)
    for each in found:
        assert each == pytest.approx([*expected, expected[0]], rel=1e-10)


def refusal(make: Callable[[Tensor, nn.Module], Tensor]) -> str:
    """What is said of a model that attends so, of four heads."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return make(x, self).sum()

    x = torch.randn(2, 4, 8, 4, requires_grad=True)
    return refused(CaptureError, lambda: sbpc.plan(Model(), (x,), Mesh(x=2), dtype=None))


def test_what_no_text_can_say_is_refused_with_what_to_do() -> None:
    def call(**given: Any) -> Callable[[Tensor, nn.Module], Tensor]:
        return lambda x, _: flex.flex_attention(x, x, x, **given)

    slopes = torch.ones(4)
    message = refusal(call(score_mod=lambda score, *_: score.cumsum(0)))
    assert message.startswith("a score_mod or mask_mod of flex_attention calls aten.cumsum.default, which depends on")
    assert "test_flex.py" in message and message.endswith("do the rest before, and index what it gives.")
    message = refusal(call(score_mod=lambda score, b, h, q, kv: h + 1.0))
    assert message.startswith("a score_mod of flex_attention does not read the score")
    message = refusal(call(score_mod=lambda score, b, h, q, kv: score + slopes[h]))
    assert "register_buffer" in message
    message = refusal(call(score_mod=lambda score, b, h, q, kv: score + torch.ones(2)))
    assert "gives torch.Size([2]), not one number" in message


FOREIGN = [
    "t0 = empty(score)", "t0 = relu_(score)", "t0 = __import__('os').system('true')", "score", "t0 = bernoulli(score)",
    "t0 = as_strided(x0, [9], [1])", "t0 = add.Tensor(q, kv", "t0 = tanh(score); del t0",
]  # fmt: skip


@pytest.mark.parametrize("text", FOREIGN)
def test_a_text_calls_nothing_but_pointwise_ops_and_indices(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no function of FlexAttention|may not call"):
        lines(text)


def one_call(one: Case) -> tuple[GraphModule, list[Tensor]]:
    """The program of a case, and what it is given."""
    graph, given = Graph(), list[Tensor]()

    def taken(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        given.append(value)
        return graph.placeholder(f"x{len(given)}")

    made = graph.call_function(one.op, map_aggregate(one.args, taken))
    graph.output(tuple(graph.call_function(operator.getitem, (made, at)) for at in range(len(one.run()))))
    return GraphModule(nn.Module(), graph), given


def test_inductor_is_given_the_operators_of_torch_and_else_the_ops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def compile_graph(gm: Any, examples: list[Any]) -> Any:
        """Traces as Inductor does; its kernels for the operators are for GPUs alone."""

        def inner(gm: GraphModule, *_: Any, **__: Any) -> Any:
            seen.extend(str(node.target) for node in gm.graph.nodes if "flex_attention" in str(node.target))
            if not seen[-1].startswith("sbpc."):
                raise RuntimeError("no valid configuration")
            return make_boxed_func(gm.forward)

        with torch.no_grad():
            return compile_fx(GmWrapper(gm, lambda values: values), examples, inner_compile=inner)

    monkeypatch.setattr(executors, "inductor_compile", compile_graph)
    for one in flex_cases.cases():
        gm, given = one_call(one)
        with torch.no_grad():
            found = executors.compiled_now(gm, list(given), True)(list(given))
        kind = str(one.op).removesuffix(".default")
        assert seen == [kind.removeprefix("sbpc."), f"{kind}.default"]
        assert "all held in memory: " in caplog.text and "no valid configuration" in caplog.text
        for x, y in zip(found, one.run(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        seen.clear()


def test_the_operators_of_torch_give_what_the_ops_give() -> None:
    for one in flex_cases.cases():
        with torch.no_grad():
            found = OPERATORS[one.op](*one.args)
        for x, y in zip(found, one.run(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
