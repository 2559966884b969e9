"""Experts as baselines: what they pin, that they run, and that no plan is slower than the best of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.api.task import prepare
from sbpc.errors import PlanError
from sbpc.mesh.cluster import CLUSTERS
from sbpc.passes.assign.expert_schemes import EXPERTS
from sbpc.plans.options import Options
from tests import models
from tests.compare import largest_error


class Block(nn.Module):
    """A transformer block with attention by heads, on [batch, sequence, width]; no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(out.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def block(batch: int = 8, seq: int = 8, width: int = 16, heads: int = 4) -> models.Model:
    """One block whose input asks for a gradient."""
    return Block(width, heads), (torch.randn(batch, seq, width, requires_grad=True),)


def homes(plan: sbpc.Plan) -> str:
    """The homes of parameters, one per line."""
    return "".join(f"{name:20}{layout}\n" for name, layout in plan.parameters.items())


def refused(call: Any) -> str:
    with pytest.raises(PlanError) as error:
        call()
    return str(error.value)


def test_megatron_splits_columns_then_rows_and_leaves_norms_whole() -> None:
    plan = sbpc.baseline("megatron", *block(), Mesh(data=2, tensor=2, cluster="a100"), objective="serial")
    assert_expected_inline(
        homes(plan),
        """\
norm1.weight        [B, B]
norm1.bias          [B, B]
norm2.weight        [B, B]
norm2.bias          [B, B]
query.weight        [B, S(0)]
key.weight          [B, S(0)]
value.weight        [B, S(0)]
proj.weight         [B, S(1)]
up.weight           [B, S(0)]
down.weight         [B, S(1)]
""",
    )


def test_summa_stores_every_weight_once_over_both_axes() -> None:
    plan = sbpc.baseline("summa", *block(), Mesh(i=2, j=2), pin={"norm*": "[B, B]"}, objective="serial")
    assert_expected_inline(
        homes(plan),
        """\
norm1.weight        [B, B]
norm1.bias          [B, B]
norm2.weight        [B, B]
norm2.bias          [B, B]
query.weight        [S(1), S(0)]
key.weight          [S(1), S(0)]
value.weight        [S(1), S(0)]
proj.weight         [S(1), S(0)]
up.weight           [S(1), S(0)]
down.weight         [S(1), S(0)]
""",
    )


def test_agarwal_swaps_the_roles_of_x_and_y_from_layer_to_layer() -> None:
    plan = sbpc.baseline("agarwal", *block(), Mesh(z=2, y=2, x=2), pin={"norm*": "[B, B, B]"}, objective="serial")
    assert_expected_inline(
        homes(plan),
        """\
norm1.weight        [B, B, B]
norm1.bias          [B, B, B]
norm2.weight        [B, B, B]
norm2.bias          [B, B, B]
query.weight        [S(1), S(0), S(1)] S(1)@x>z
key.weight          [S(1), S(0), S(1)] S(1)@x>z
value.weight        [S(1), S(0), S(1)] S(1)@x>z
proj.weight         [S(1), S(1), S(0)] S(1)@y>z
up.weight           [S(1), S(0), S(1)] S(1)@x>z
down.weight         [S(1), S(1), S(0)] S(1)@y>z
""",
    )


def test_one_weird_trick_splits_the_batch_of_convolutions_and_the_weights_of_linear_layers() -> None:
    plan = sbpc.baseline("one weird trick", *models.vgg(), Mesh(x=4), objective="serial")
    assert_expected_inline(
        homes(plan),
        """\
features.0.weight   [B]
features.0.bias     [B]
features.3.weight   [B]
features.3.bias     [B]
classifier.0.weight [S(0)]
classifier.0.bias   [S(0)]
classifier.2.weight [S(1)]
classifier.2.bias   [B]
""",
    )
    convolutions = [node.name for node in plan.graph.graph.nodes if "convolution" in str(node.target)]
    assert [str(plan.layout(name)) for name in convolutions[:2]] == ["[S(0)]", "[S(0)]"]


def test_data_and_fsdp_differ_in_homes_only() -> None:
    args = block()
    whole, spread = (sbpc.baseline(name, *args, Mesh(x=2, y=2), objective="serial") for name in ("data", "fsdp"))
    assert {str(layout) for layout in whole.parameters.values()} == {"[B, B]"}
    assert {str(layout) for layout in spread.parameters.values()} == {"[S(0), S(0)]"}
    nodes = whole.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.einsum.default)
    activations = [node.name for node in nodes if node.meta["phase"] == "forward"]
    assert {str(whole.layout(name)) for name in activations} == {"[S(0), S(0)]"}
    assert [whole.layouts.get(name) for name in activations] == [spread.layouts.get(name) for name in activations]


MESHES = [Mesh(x=4), Mesh(x=2, y=2), Mesh(x=2, y=2, z=2)]


@pytest.mark.parametrize("name", list(EXPERTS))
def test_baselines_compute_what_one_device_computes(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    ran = 0
    for model, args in (block(), models.vgg()):
        for mesh in MESHES[-1:] if name == "agarwal" else MESHES[1:2]:
            try:
                plan = sbpc.baseline(name, model, args, mesh, objective="serial")
            except PlanError:
                continue
            assert plan.verify() > 0 and largest_error(plan, model, args) <= 1e-10
            ran += 1
    assert ran >= 1


def test_no_baseline_is_faster_where_collectives_run_beside_kernels() -> None:
    """Of this net the best plan where nothing overlaps sends nothing, and is proved: schemes are played all the same."""
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=1000, use_cache=False,
    )  # fmt: skip

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = transformers.LlamaForCausalLM(config)

        def forward(self, ids: Tensor) -> Tensor:
            loss: Tensor = self.net(input_ids=ids, labels=ids).loss
            return loss

    with torch.device("meta"):
        model, args = Loss(), (torch.zeros(8, 64, dtype=torch.int64),)
    mesh = Mesh(data=2, tensor=4, cluster="h100")
    plan = sbpc.plan(model, args, mesh)
    for name in ("data", "fsdp", "megatron"):
        assert plan.cost.seconds <= sbpc.baseline(name, model, args, mesh).cost.seconds * (1 + 1e-2)


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    args = block()
    assert_expected_inline(
        refused(lambda: sbpc.baseline("megatorn", *args, Mesh(x=2), objective="serial")),
        """\
no baseline is called 'megatorn'
  There are 'data', 'fsdp', 'megatron', 'megatron+sp', 'summa', 'agarwal', 'one weird trick'.""",
    )
    assert_expected_inline(
        refused(lambda: sbpc.baseline("agarwal", *args, Mesh(x=2), objective="serial")),
        """\
the baseline 'agarwal' does not fit Mesh(x=2): it needs 3 axes, for z, y and x
  Give a mesh of 3 axes or more.""",
    )
    assert_expected_inline(
        refused(lambda: sbpc.baseline("data", *args, Mesh(x=16), objective="serial")),
        """\
the baseline 'data' does not fit Mesh(x=16): a batch of 8 for 16 ranks
  Give a larger batch, or fewer ranks on these axes.""",
    )
    assert_expected_inline(
        refused(lambda: sbpc.baseline("one weird trick", *args, Mesh(x=2), objective="serial")),
        """\
the baseline 'one weird trick' does not fit Mesh(x=2): the model has no convolutions
  Take 'megatron' for linear layers alone.""",
    )
    assert_expected_inline(
        refused(lambda: sbpc.baseline("megatron", *models.resnet(), Mesh(x=2), objective="serial")),
        """\
the baseline 'megatron' does not fit Mesh(x=2): no linear layer's features reach another one that sums them
  The model has no column-row pair.""",
    )
    assert_expected_inline(
        refused(lambda: sbpc.baseline("megatron+sp", *models.mlp(), Mesh(x=2), objective="serial")),
        """\
the baseline 'megatron+sp' does not fit Mesh(x=2): no linear layer has a sequence
  Take 'megatron'.""",
    )


NETS: dict[str, Any] = {
    "block": lambda n, m: block(4 * n, 4 * m, 8 * m, 4),
    "mlp": lambda n, m: models.mlp(12 * n, 8 * m, 16 * m, layers=2),
    "vgg": lambda n, m: models.vgg(4 * n, 4 * m, 8, 16 * m, 12),
    "gpt2": lambda n, m: models.gpt2(4 * n, 8 * m, 32, 16 * m, 4, layers=1),
}
SIZES = [(4,), (2, 2), (2, 4), (4, 2), (2, 2, 2)]


def fitting(net: str, n: int, m: int, sizes: tuple[int, ...], cluster: str) -> int:
    """How many experts fit a case; asserts that no plan is slower than any of them."""
    task = prepare(*NETS[net](n, m))
    mesh = Mesh(cluster=cluster, **dict(zip("xyz", sizes)))
    plan, found = task.plan(mesh, Options(objective="serial")), 0
    for name in EXPERTS:
        try:
            expert = task.again().plan(mesh, Options(baseline=name, objective="serial"))
        except PlanError:
            continue
        assert plan.cost.seconds <= expert.cost.seconds * (1 + 1e-9), name
        found += 1
    return found


def cases(nets: list[str], sizes: list[tuple[int, ...]]) -> Any:
    counts = st.integers(1, 4)
    return st.tuples(st.sampled_from(nets), counts, counts, st.sampled_from(sizes), st.sampled_from(list(CLUSTERS)))


def test_no_plan_is_slower_than_the_best_expert() -> None:
    found = []

    @settings(max_examples=8)
    @given(cases(["block", "mlp", "vgg"], SIZES[:4]))
    def run(case: Any) -> None:
        found.append(fitting(*case))

    run()
    assert sum(found) >= 16, "hardly any expert fits"


@pytest.mark.prove
def test_no_plan_is_slower_than_the_best_expert_in_hundreds_of_cases() -> None:
    @settings(max_examples=200)
    @given(cases(list(NETS), SIZES))
    def run(case: Any) -> None:
        fitting(*case)

    run()


def test_a_parameter_of_which_views_are_several_results_has_no_layer_but_a_plan() -> None:
    class Unbound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(2, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.weights.unbind(0)
            return (torch.nn.functional.layer_norm(x @ first, (8,)) @ second).logsumexp(1)

    model, args = Unbound(), (torch.randn(4, 8),)
    plan = sbpc.baseline("data", model, args, Mesh(x=2), objective="serial")
    assert largest_error(plan, model, args) <= 1e-5


@pytest.mark.parametrize("name", ["megatron", "megatron+sp"])
def test_experts_see_layers_under_autocast(name: str) -> None:
    model, args = models.gpt2(layers=1)
    plain, cast = (
        sbpc.baseline(name, model, args, Mesh(data=2, tensor=2), dtype=dtype) for dtype in (None, torch.bfloat16)
    )
    for layer in ("up", "down"):
        found = cast.layout(f"blocks.0.{layer}.weight")
        assert found == plain.layout(f"blocks.0.{layer}.weight") and "S" in str(found)
