"""How long kernels take on a named GPU, by the shape of their work, and what steps make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.api.candidates import candidates, least_flops
from sbpc.api.task import prepare
from sbpc.mesh.cluster import named_cluster
from sbpc.mesh.kernels import Attention, Product
from sbpc.rules import match
from tests import models
from tests.bench.published import kernel_errors

aten = torch.ops.aten
H100 = named_cluster("h100")


def test_kernels_take_what_published_tables_say() -> None:
    for name, errors in kernel_errors():
        sizes = [abs(each) for each in errors]
        assert sum(sizes) / len(sizes) <= 0.05 and max(sizes) <= 0.22, name


def x(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


PRODUCTS: list[tuple[Any, tuple[Any, ...], Tensor, Product]] = [
    (aten.mm.default, (x(8, 4), x(4, 6)), x(8, 6), Product(1, 8, 6, 4, "float32")),
    (aten.addmm.default, (x(6), x(8, 4), x(4, 6)), x(8, 6), Product(1, 8, 6, 4, "float32")),
    (aten.bmm.default, (x(3, 8, 4), x(3, 4, 6)), x(3, 8, 6), Product(3, 8, 6, 4, "float32")),
    (aten.linear.default, (x(2, 4, 5), x(6, 5), x(6)), x(2, 4, 6), Product(1, 8, 6, 5, "float32")),
    (aten.einsum.default, ("bsk,nk->bsn", [x(2, 4, 5), x(6, 5)]), x(2, 4, 6), Product(1, 8, 6, 5, "float32")),
    (aten.einsum.default, ("bsk,bsn->nk", [x(2, 4, 5), x(2, 4, 6)]), x(6, 5), Product(1, 5, 6, 8, "float32")),
    (
        aten.einsum.default,
        ("bhsd,bhtd->bhst", [x(2, 3, 4, 5), x(2, 3, 7, 5)]),
        x(2, 3, 4, 7),
        Product(6, 4, 7, 5, "float32"),
    ),
]


@pytest.mark.parametrize(("op", "args", "out", "shape"), PRODUCTS, ids=str)
def test_a_product_is_known_by_its_rows_columns_and_depth(
    op: Any, args: tuple[Any, ...], out: Tensor, shape: Product
) -> None:
    found = match(op, args, {}, out)
    assert found is not None and found.shape(found.sizes, {}) == shape


def test_what_is_multiplied_takes_as_long_as_its_type_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(op: Any, args: tuple[Any, ...], out: Tensor) -> float:
        found = match(op, args, {}, out)
        assert found is not None
        return float(H100.kernel_seconds(str(op), found.flops(found.sizes), 0.0, found.shape(found.sizes, {})))

    def product(dtype: torch.dtype) -> float:
        a = x(4096, 4096).to(dtype)
        return seconds(aten.mm.default, (a, a), a)

    half, single = product(torch.bfloat16), product(torch.float32)
    a = torch.empty(4096, 4096, device="meta", dtype=torch.float8_e4m3fn)
    eight = seconds(aten._scaled_mm.default, (a, a, x(), x(), None, None, torch.bfloat16), a.bfloat16())
    assert 1.8 < half / eight < 2.0
    assert product(torch.float16) == half and 14 < single / half < 15 and 14 < product(torch.float64) / half < 15
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert 1.9 < product(torch.float32) / half < 2.0
    images, kernel = x(8, 64, 32, 32), x(64, 64, 3, 3)
    convolved = {}
    for dtype in (torch.bfloat16, torch.float32):
        args = images.to(dtype), kernel.to(dtype), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        convolved[dtype] = seconds(aten.convolution.default, args, images.to(dtype))
    assert 1 < convolved[torch.float32] / convolved[torch.bfloat16] < 2  # tf32, but for what begins
    assert H100.device is not None
    assert not H100.device.lacks("float8")
    some = replace(H100.device, float8=None, tf32=None, float32=None, float64=None)
    assert [some.times(kind) for kind in ("float8", "float32", "float64", "")] == [1.0, 2.0, 4.0, 1.0]
    assert some.lacks("float8") and not some.lacks("float64")
    nothing = replace(some, bfloat16=None)
    assert nothing.times("float32") == 1.0 and not nothing.lacks("float8")  # nothing is known of it


def test_what_is_no_product_of_two_operands_has_no_shape() -> None:
    for op, args, out in (
        (aten.einsum.default, ("ij->ji", [x(2, 3)]), x(3, 2)),
        (aten.einsum.default, ("i,j->ij", [x(2), x(3)]), x(2, 3)),
        (aten.add.Tensor, (x(2), x(2)), x(2)),
    ):
        found = match(op, args, {}, out)
        assert found is not None and found.shape(found.sizes, {}) is None


def test_a_causal_kernel_leaves_pairs_out_only_where_neither_queries_nor_keys_are_split() -> None:
    q, op = x(2, 4, 4096, 64), aten._scaled_dot_product_flash_attention_for_cpu.default
    seconds = {}
    for causal in (False, True):
        found = match(op, (q, q, q, 0.0, causal), {}, (q, x(2, 4, 4096)))
        assert found is not None
        for cut in ("b", "s", "t"):
            local = {**found.sizes, cut: found.sizes[cut] // 2}
            shape = found.shape(local, {cut: True})
            assert isinstance(shape, Attention) and shape.causal == (causal and cut == "b")
            seconds[causal, cut] = float(H100.kernel_seconds(str(op), found.flops(local), 0.0, shape))
    assert seconds[True, "s"] == seconds[False, "s"] == seconds[False, "b"] < seconds[False, "t"]
    assert 0.5 * seconds[False, "b"] < seconds[True, "b"] < 0.6 * seconds[False, "b"]


def test_no_kernel_is_faster_than_the_bound_of_a_search_says() -> None:
    model, args = models.gpt2(batch=8, seq=4096, width=1024, heads=8, layers=2)
    for name in ("a100", "h100", "b200"):
        plan = sbpc.plan(model, args, Mesh(a=1, cluster=name), objective="serial")
        matches = [node.meta["match"] for node in plan.graph.graph.nodes if node.meta.get("match") is not None]
        least = sum(least_flops(each) for each in matches if not each.view) / plan.mesh.cluster.fastest
        assert 0 < least <= plan.cost.compute_seconds
    found = candidates(prepare(model, args), {"blocks": 2}, 8, "a100", False, False, "adamw", None)
    assert all(each.floor <= each.guess for each in found)


def test_an_update_reads_and_writes_what_the_optimizer_has_on_a_rank() -> None:
    model, args = nn.Linear(4096, 4096, bias=False), (torch.empty(64, 4096, device="meta"),)
    model = model.to("meta")

    def update(pin: str, **options: Any) -> float:
        return sbpc.plan(model, args, Mesh(a=4, cluster="h100"), pin={"weight": pin}, **options).cost.optimizer_seconds

    assert H100.device is not None
    moved = 4 * 4096**2 / (H100.memory_bandwidth * H100.device.moving)
    assert update("B") == pytest.approx(7 * moved)
    assert update("S(0)") == pytest.approx(7 * moved / 4)
    assert update("B", optimizer="sgd") == pytest.approx(3 * moved)
    assert update("B", optimizer=None) == update("B", train=False) == 0


def test_usage_counts_tokens_and_no_flops_that_are_computed_again() -> None:
    model, args = models.gpt2(batch=8, seq=64, width=64, heads=4, layers=2)
    mesh = Mesh(a=2, cluster="a100")
    plans = [sbpc.plan(model, args, mesh, objective="serial", recompute=form) for form in ("none", "full")]
    costs = [plan.cost for plan in plans]
    assert costs[0].model_flops == costs[0].flops_one_device == pytest.approx(costs[1].model_flops)
    assert costs[1].flops_one_device > 1.2 * costs[0].flops_one_device
    for plan, cost in zip(plans, costs):
        assert plan.usage is not None and plan.usage.unit == "tokens" and str(plan.usage) in str(plan)
        took = 2 * (cost.seconds + cost.optimizer_seconds)
        assert plan.usage.rate == pytest.approx(8 * 64 / took)
        assert plan.usage.mfu == pytest.approx(cost.model_flops / took / 312e12)
    loop = sbpc.plan(model, args, mesh, microbatches=4)
    assert loop.usage is not None and loop.usage.rate == pytest.approx(8 * 64 / 2 / loop.cost.step_seconds)
    assert sbpc.plan(model, args, Mesh(a=2)).usage is None
