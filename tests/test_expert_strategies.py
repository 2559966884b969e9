"""The search of meshes and of whole strategies for models of experts: what is asked about their rows, blocks that are
not all equal, and ranks that share rows out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.api.candidates import EXPERT, Candidate, block_times, candidates, matrices_of_experts
from sbpc.api.experts import routed_on
from sbpc.api.short_model import short_model
from sbpc.api.strategies import Search
from sbpc.api.sweep import sweep
from sbpc.api.task import prepare
from sbpc.cli.main import main
from sbpc.errors import PlanError, SbpcError
from sbpc.mesh.cluster import Cluster
from sbpc.mesh.kernels import Product
from sbpc.passes import annotate
from sbpc.plans.options import Options
from tests import models
from tests.compare import compare, eager
from tests.routed import Layer, Layers, batch

# nodes of two, with links so slow that rows cost less to send than the matrices of experts
SLOW = Cluster("slow", 1e12, 1e11, 1e-7, 2, 1e-7, 1e9, 2e-7, 2e8)
OPTIONS: dict[str, Any] = {"cluster": SLOW, "stages": True, "microbatches": True, "seconds": 2}


class Dense(nn.Module):
    """A block without experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.up(x))


class DenseFirst(nn.Module):
    """Blocks without experts, then blocks of experts, in one list."""

    def __init__(self, dense: int = 3, routed: int = 4, experts: int = 8) -> None:
        super().__init__()
        blocks = [Dense() for _ in range(dense)], [Layer(width=8, hidden=64, experts=experts) for _ in range(routed)]
        self.layers = nn.ModuleList([*blocks[0], *blocks[1]])

    def forward(self, x: Tensor, favour: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, favour)[0] if isinstance(layer, Layer) else layer(x))
        return x.square().mean()


def mixture(experts: int = 8) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Such a model with its batch, on the meta device."""
    x, favour = batch(experts=experts)
    return DenseFirst(experts=experts).double().to("meta"), (x.to("meta"), favour.to("meta"))


def test_a_short_model_has_two_blocks_of_every_run_of_equal_ones() -> None:
    model, args = DenseFirst().double(), batch(experts=8)
    short, lengths = short_model(model)
    assert lengths == {"layers": 3, "layers.3": 4}
    assert list(short.layers._modules) == ["0", "1", "3", "4"] and short(*args).shape == ()  # type: ignore[union-attr]
    assert [block_times(lengths, f"layers.{at}") for at in (0, 1, 3, 4)] == [1, 2, 1, 3]
    short, lengths = short_model(DenseFirst(dense=2))
    assert lengths == {"layers.2": 4} and list(short.layers._modules) == ["0", "1", "2", "3"]  # type: ignore[union-attr]
    assert [block_times(lengths, f"layers.{at}") for at in range(4)] == [1, 1, 1, 3]


def test_experts_may_have_an_axis_across_nodes() -> None:
    model, args = mixture()
    short, lengths = short_model(model)
    task = prepare(short, args)
    assert matrices_of_experts(task.gm) == [f"layers.{at}.experts.{name}" for at in (3, 4) for name in ("up", "down")]
    found = candidates(task, lengths, 8, SLOW, True, True, None, None)
    wide = {each.mesh.sizes for each in found if each.mesh.axes[-1] == EXPERT}
    assert wide == {(1, 2, 4)} and all(size[2] <= 2 for size in {each.mesh.sizes for each in found} - wide)
    assert {each.microbatches for each in found if each.mesh.sizes in wide} == {1}  # each rank has tokens of its own
    odd = candidates(task, lengths, 9, SLOW, False, True, None, None)  # nine do not divide a batch of eight
    assert {(each.mesh.sizes, each.microbatches) for each in odd} == {((1, 9, 1), 1), ((1, 3, 3), 1)}
    model, x = models.mlp(batch=8, layers=4)
    dense = candidates(prepare(model, x), {}, 8, SLOW, True, True, None, None)
    assert {each.mesh.axes[-1] for each in dense} == {"tensor"}


def searching(
    model: nn.Module, args: tuple[Any, ...], sizes: dict[str, int], **options: Any
) -> tuple[Search, Candidate]:
    """The search of a model, and the candidate of two micro-batches on a mesh."""
    few, lengths = short_model(model)
    task = prepare(few, args)
    asked = Options(**options)
    gm, on = routed_on(task.gm, asked, task.stages)
    task = replace(task, gm=task.stages.with_sums(gm, replace(asked, **task.about)))
    mesh = on(Mesh(cluster=SLOW, **sizes))[0]
    found = Candidate(mesh, "1f1b", 2, 0.0, 0.0, 1.0, (0.0,) * 4)
    return Search(lambda: prepare(model, args), task, lengths, "adamw", None, "none", 9.0, options), found


def test_strategies_share_out_rows_and_take_what_their_rows_say() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args, sizes = DenseFirst(routed=3), batch(experts=8), {"pipe": 2, "data": 2, "tensor": 2}
    search, each = searching(model, args, sizes, capacity=8.0)
    row = search.row(each)
    assert row.plan.cost.step_seconds == pytest.approx(row.cost, rel=0.25)
    assert row.plan.options.capacity == 8.0 and row.plan.mesh.routing.most == 8.0
    assert compare(row.plan, model, args, *eager(model, args)) <= 1e-10
    with mock.patch.object(annotate, "share_rows", lambda *_: None):
        search, each = searching(model, args, sizes)
        assert row.cost <= search.row(each).cost * (1 + 1e-9)


def test_memory_of_strategies_counts_the_capacity() -> None:
    model, args = mixture()
    total = {}
    for capacity in (None, 1.0):
        search, each = searching(model, args, {"pipe": 1, "data": 2, "tensor": 2}, capacity=capacity)
        shared, free = search.ways(each, "none", (0,))  # over all ranks, and as is fastest
        total[capacity] = shared.memory["activations"]
        assert search.least_kept(each, "none") <= total[capacity]
    assert total[1.0] < total[None]
    assert shared.memory["parameters"] < free.memory["parameters"]


def test_memory_of_strategies_counts_float32_masters() -> None:
    model, (x, favour) = mixture()
    args = x.bfloat16(), favour.bfloat16()
    search, each = searching(model.bfloat16(), args, {"pipe": 1, "data": 2, "tensor": 1})
    row = search.row(each)
    whole = 4 * sum(parameter.numel() for parameter in model.parameters())  # bfloat16 is half
    assert row.memory["parameters"] == pytest.approx(whole, rel=0.05)
    sizes, stored = row.plan.inner.sizes, row.plan.parameters  # in other layouts than the row's, maybe
    first = (0,) * len(sizes)
    shapes = (stored[name].local_shape(each.shape, sizes, first) for name, each in model.named_parameters())
    part = 4 * sum(map(math.prod, shapes))
    assert row.plan.cost.memory["optimizer"] == pytest.approx(2 * part, rel=0.05)
    assert row.memory["optimizer"] == 2 * row.memory["parameters"]


@pytest.mark.parametrize("stages", [False, True])
def test_what_is_asked_about_rows_of_experts_reaches_every_row(stages: bool) -> None:
    model, args = mixture()
    options = OPTIONS | {"seconds": 0} if stages else {"cluster": SLOW}
    rows = sweep(model, args, devices=2, capacity=1.5, routing=1.25, overflow="drop", **options)
    assert {(row.plan.options.capacity, row.plan.options.overflow) for row in rows} == {(1.5, "drop")}
    assert {row.plan.mesh.routing.expected for row in rows} == {1.25}
    with pytest.raises(SbpcError, match=r"overflow='drop' without capacity="):
        sweep(model, args, devices=2, overflow="drop", **options)
    with pytest.raises(PlanError, match=r"capacity=2 of a step in which no rows of experts were found"):
        sweep(*models.mlp(batch=8, layers=4), devices=2, capacity=2.0, **options)


def test_one_micro_batch_of_rows_of_experts_is_the_whole_batch() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = Layers(), batch()
    plan = sbpc.plan(model, args, Mesh(pipe=1, a=2), stages="pipe", microbatches=1)
    assert compare(plan, model, args, *eager(model, args)) <= 1e-10


def test_a_part_of_batched_products_has_part_of_the_batch_first() -> None:
    product = Product(8.0, 6.0, 4.0, 2.0)
    assert product.part(4) == Product(2.0, 6.0, 4.0, 2.0) and product.part(24) == Product(1.0, 2.0, 4.0, 2.0)


def test_the_command_line_searches_models_of_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "target_of_experts.py"
    file.write_text("from tests.test_expert_strategies import mixture as build\n")
    asked = ["sweep", f"{file}:build", "--devices", "4", "--cluster", "h100", "--stages", "--seconds", "1"]
    assert main([*asked, "--capacity", "1.5", "--overflow", "drop", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["cost"] > 0
    with pytest.raises(SystemExit):
        main([*asked, "--capacity", "0.5"])
