"""The schemes of the papers come out of the solver, which is not told of them: layouts where each is the optimum."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import sbpc
from sbpc import Cluster, Mesh
from sbpc.boxing.steps import WIRE
from sbpc.mesh.cluster import CLUSTERS
from tests import models
from tests.test_experts import Block

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.einsum.default, aten.linear.default, aten.convolution.default)
HOSTS = Cluster("hosts", 5e10, 1e10, 1e-5, 1, 1e-4, 50e6, 1e-4, 50e6)  # one thread each, 400 Mbit/s between them

RACK = dataclasses.replace(CLUSTERS["h100"], name="rack", ranks_per_node=256)  # one network for all


class Chain(nn.Module):
    """Square linear layers with gelu."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x


def best(model: nn.Module, shape: tuple[int, ...], mesh: Mesh, **options: Any) -> sbpc.Plan:
    """The plan of a model on the meta device, proved to be the best."""
    plan = sbpc.plan(*on_meta(model, shape), mesh, **options, objective="serial")
    assert plan.cost.gap <= 1e-9 or "memory" in options
    return plan


def on_meta(model: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and its input, without data."""
    return model.to("meta"), (torch.empty(shape, requires_grad=True, device="meta"),)


def layouts(plan: sbpc.Plan, homes: bool = True, moves: bool = True) -> str:
    """Homes of weights, layouts of what matrix products leave in the forward, and collectives by phase.

    Homes and collectives are left out where others cost the same.
    """
    shapes = {port: node.meta["val"].dim() for port, node in zip(plan.ports.inputs, plan.graph.graph.nodes)}
    wide = [port.name for port, dims in shapes.items() if port.name in plan.parameters and dims > 1]
    lines = [f"{name:20}{plan.layout(name)}" for name in wide] if homes else []
    counts: Counter[tuple[str, ...]] = Counter()
    for node in plan.boxed.graph.nodes:
        if node.meta.get("phase") == "forward" and node.target in PRODUCTS:
            lines.append(f"{node.name:20}{node.meta['sbp']}")
        step = node.meta.get("step")
        if step is not None and step.collective in WIRE:
            over = "+".join(plan.mesh.axes[axis] for axis in step.axes)
            counts[node.meta["phase"], step.collective, over] += 1
    counts = counts if moves else Counter()
    lines += [f"{phase:9}{count:2} {kind} over {over}" for (phase, kind, over), count in counts.items()]
    return "\n".join(lines) + "\n"


def test_megatron_column_row_pairs_with_two_all_reduces_each_way() -> None:
    plan = best(Block(4096, 32), (1, 128, 4096), Mesh(tensor=8, cluster="h100"))
    assert_expected_inline(
        layouts(plan),
        """\
query.weight        [S(0)]
key.weight          [S(0)]
value.weight        [S(0)]
proj.weight         [S(1)]
up.weight           [S(0)]
down.weight         [S(1)]
mm                  [S(1)]
mm_1                [S(1)]
mm_2                [S(1)]
einsum              [P]
mm_4                [S(1)]
mm_5                [P]
forward   2 all_reduce over tensor
backward  2 all_reduce over tensor
""",
    )


def test_axonn_alternates_over_x_and_y_beside_data_parallelism() -> None:
    ends = ["[S(0), B, S(1)]"]
    mesh = Mesh(data=2, y=2, x=2, cluster="h100")
    plan = best(Chain(8192, 4), (8192, 8192), mesh, inputs=ends, outputs=ends)
    assert_expected_inline(
        layouts(plan),
        """\
layers.0.weight     [B, S(0), S(1)]
layers.1.weight     [B, S(1), S(0)]
layers.2.weight     [B, S(0), S(1)]
layers.3.weight     [B, S(1), S(0)]
mm                  [S(0), S(1), P]
mm_1                [S(0), P, S(1)]
mm_2                [S(0), S(1), P]
mm_3                [S(0), P, S(1)]
forward   2 reduce_scatter over x
forward   2 all_gather over x
forward   1 reduce_scatter over y
forward   1 all_gather over y
forward   1 all_reduce over y
backward  4 all_reduce over data
backward  2 reduce_scatter over x
backward  2 all_gather over x
backward  1 reduce_scatter over y
backward  1 all_gather over y
backward  1 all_reduce over y
""",
    )


def test_axonn_alternates_over_x_and_y_through_a_transformer_block() -> None:
    """On one fast network: query, key, value and up are summed over x, proj and down over y."""
    mesh, ends = Mesh(data=2, y=8, x=8, cluster=RACK), ["[S(0), B, S(2)]"]
    plan = best(Block(8192, 64), (4, 2048, 8192), mesh, inputs=ends, outputs=ends)
    assert_expected_inline(
        layouts(plan, homes=False, moves=False),
        """\
einsum              [S(0), S(2), P]
einsum_1            [S(0), S(2), P]
einsum_2            [S(0), S(2), P]
einsum_3            [S(0), P, S(2)]
einsum_4            [S(0), S(2), P]
einsum_5            [S(0), P, S(2)]
""",
    )


def test_summa_on_a_whole_block_is_bettered_by_rows_after_columns_in_the_same_2d_layout() -> None:
    """Of the seven activations that SUMMA gathers over j, 7 bsh, four are those of `down` and one is that of `proj`.
    With rows split over j these two products leave sums that are scattered, 2 bsh, and gather nothing."""
    mesh, ends = Mesh(i=4, j=4, cluster=RACK), ["[S(0), S(2)]"]
    about: dict[str, Any] = {"inputs": ends, "outputs": ends, "spread": True, "train": False}
    plan = best(Block(4096, 32), (64, 128, 4096), mesh, **about)
    assert_expected_inline(
        layouts(plan, homes=False),
        """\
einsum              [S(0), S(2)]
einsum_1            [S(0), S(2)]
einsum_2            [S(0), S(2)]
einsum_3            [S(0), P]
einsum_4            [S(0), S(2)]
einsum_5            [S(0), P]
forward   6 all_gather over j
forward  10 all_gather over i
forward   2 reduce_scatter over j
""",
    )
    expert = sbpc.baseline("summa", *on_meta(Block(4096, 32), (64, 128, 4096)), mesh, **about, objective="serial")
    bsh = 4 * 64 * 128 * 4096 * 3 / 16  # bytes of one activation that is gathered over j in each group of i
    assert expert.cost.bytes_sent["j"] == pytest.approx(7 * bsh, rel=1e-3)
    assert plan.cost.bytes_sent["j"] == pytest.approx(4 * bsh, rel=1e-3)
    assert plan.cost.bytes_sent["i"] == pytest.approx(expert.cost.bytes_sent["i"], rel=1e-3)
    assert plan.cost.seconds < expert.cost.seconds


def test_summa_gathers_weights_over_one_axis_and_activations_over_the_other() -> None:
    ends = ["[S(0), S(1)]"]
    mesh = Mesh(i=4, j=4, cluster="h100")
    plan = best(Chain(4096, 3), (8192, 4096), mesh, inputs=ends, outputs=ends, spread=True, train=False)
    assert_expected_inline(
        layouts(plan, homes=False),
        """\
mm                  [S(0), S(1)]
mm_1                [S(0), S(1)]
mm_2                [S(0), S(1)]
forward   3 all_gather over i
forward   3 all_gather over j
""",
    )


def test_fully_sharded_data_parallelism_when_memory_is_short_and_the_batch_large() -> None:
    ends = {"inputs": ["S(0)"], "outputs": ["S(0)"]}
    mesh, limit = Mesh(data=8, cluster="h100"), 59.83e6  # bytes: nothing can be stored whole
    plan = best(Block(512, 8), (64, 128, 512), mesh, memory=limit, **ends)
    assert all(layout.cuts for layout in plan.parameters.values())
    assert_expected_inline(
        layouts(plan, homes=False),
        """\
einsum              [S(0)]
einsum_1            [S(0)]
einsum_2            [S(0)]
einsum_3            [S(0)]
einsum_4            [S(0)]
einsum_5            [S(0)]
forward  10 all_gather over data
backward 10 reduce_scatter over data
""",
    )


def test_one_weird_trick_for_a_vgg_between_slow_hosts() -> None:
    model, args = models.vgg(128, 64, 32, 2048, 1000)
    plan = sbpc.plan(model.to("meta"), args, Mesh(x=4, cluster=HOSTS), inputs=["S(0)", "S(0)"], objective="serial")
    assert plan.cost.gap <= 1e-9
    expert = sbpc.baseline("data", model, args, Mesh(x=4, cluster=HOSTS), inputs=["S(0)", "S(0)"], objective="serial")
    assert sum(plan.cost.bytes_sent.values()) * 10 < sum(expert.cost.bytes_sent.values())
    assert_expected_inline(
        layouts(plan, moves=False),
        """\
features.0.weight   [B]
features.3.weight   [B]
classifier.0.weight [S(1)]
classifier.2.weight [S(1)]
convolution         [S(0)]
convolution_1       [S(0)]
addmm               [P]
addmm_1             [P]
""",
    )
