"""The report of a plan: which parameters share a row, and how they are called there."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.inspect.report import plan_json, some
from sbpc.mesh.cluster import CLUSTERS
from tests import models


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.an_attention_layer_with_a_long_name = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.an_attention_layer_with_a_long_name:
            x = layer(x).relu()
        return x.sum()


def test_a_star_stands_for_all_numbers_and_a_list_for_some() -> None:
    pins = {f"*.{at}.weight": "S(0)" if at in (0, 1, 2, 4) else "S(1)" for at in range(5)}
    mixed = str(sbpc.plan(Stack(), (torch.ones(4, 8),), Mesh(x=2), pin=pins))
    assert "an_attention_layer_with_a_long_name.{0-2,4}.weight  [8, 8]  [S(0)]           4" in mixed
    assert "an_attention_layer_with_a_long_name.3.weight        [8, 8]  [S(1)]           1" in mixed
    alike = str(sbpc.plan(Stack(), (torch.ones(4, 8),), Mesh(x=2), pin={"*.weight": "S(0)"}))
    assert "an_attention_layer_with_a_long_name.*.weight  [8, 8]  [S(0)]           5" in alike


def test_it_is_told_where_a_plan_takes_more_than_a_device_has() -> None:
    told = "          a device of 'tiny' has 1 kB: ask for a plan that fits with memory=1000\n"
    for memory, tells in ((1000.0, True), (1e6, False)):
        tiny = dataclasses.replace(CLUSTERS["h100"], name="tiny", memory=memory)
        plan = sbpc.plan(Stack(), (torch.ones(4, 8),), Mesh(x=2, cluster=tiny))
        assert plan.cost.memory["total"] > 1000 and (told in str(plan)) == tells


class Scored(nn.Module):
    """Returns scores beside its loss, as a model of `transformers` with labels does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2048, 32768)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.head(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


def test_a_result_that_is_dear_to_bring_and_not_the_loss_is_told_of() -> None:
    mesh = Mesh(x=16, cluster="h100")
    with torch.device("meta"):
        model, args = Scored(), (torch.ones(8192, 2048), torch.zeros(8192, dtype=torch.int64))
    plan = sbpc.plan(model, args, mesh, panels=1)
    (remark,) = plan.remarks
    assert remark.startswith("the step waits ") and remark in str(plan)
    layouts = eval(remark.partition("outputs=")[2])
    left = sbpc.plan(model, args, mesh, outputs=layouts, panels=1)
    assert not left.remarks and left.cost.seconds < 0.8 * plan.cost.seconds
    alone = sbpc.plan(model, args, mesh, loss=lambda results: results["loss"], panels=1)
    assert not alone.remarks and alone.cost.seconds <= left.cost.seconds * (1 + 1e-2)


def test_names_that_differ_only_in_numbers_are_one() -> None:
    assert some([f"h.{at}.up.{even}" for at in (7, 0, 1, 2) for even in (0, 4)]) == "h.{0-2,7}.up.{0,4}"
    assert some(["h.0.up.0", "h.1.up.0", "h.1.up.1"]) == "h.0.up.0, ..., h.1.up.1"
    assert some(["head.weight"]) == "head.weight"


def test_collectives_of_a_pipeline_are_those_of_one_rank() -> None:
    """The stages are equal, so the busiest one sends what every rank does, however many stages there are."""
    model, args = models.gpt2(batch=8, seq=8, width=16, heads=2, layers=4)
    plan = sbpc.baseline("megatron", model, args, Mesh(pipe=2, d=2, cluster="h100"), stages="pipe", microbatches=4)
    rows = plan_json(plan)["collectives"]
    assert rows and sum(row["bytes_sent"] for row in rows) == pytest.approx(plan.cost.bytes_sent["d"])
    assert f"{rows[0]['bytes_sent']:,.0f}\n" in str(plan)
