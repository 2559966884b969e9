"""`cuts=plan.cuts` cuts a model into stages where `plan` does, in other plans of it, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh, Plan
from sbpc.errors import PlanError, SbpcError
from sbpc.graph.ports import PARAMETER
from sbpc.passes.memory.limited_space import store
from sbpc.passes.memory.live_bytes import STORED
from sbpc.passes.stages.balance import between_blocks, cuts_of, places_of, stage_at
from tests import models
from tests.compare import compare, eager
from tests.test_plan import refused


class Chain(nn.Module):
    """Three layers, not read in the order in which they stand, and ops between them; `bare`: many of these."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.last, self.first, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        if kind == "tied":
            self.other.weight, self.other.bias = self.first.weight, self.first.bias
        self.other.requires_grad_(kind != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu().tanh()
        if self.kind == "bare":
            x = x.sin().cos().tanh().sin().cos()
        return self.last(self.other(x).relu()).square().mean()


def pieces(plan: Plan) -> list[list[str]]:
    """By chunk the names of what it computes."""
    return [[node.name for node in chunk.annotated.graph.nodes] for chunk in plan.chunks]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", ["plain", "tied", "frozen", "bare"])
@pytest.mark.parametrize(("stages", "schedule"), [(3, "gpipe"), (2, "interleaved:2"), (4, "1f1b")])
def test_cuts_of_a_plan_lead_back_to_it(kind: str, stages: int, schedule: str) -> None:
    torch.manual_seed(0)
    model, args = Chain(kind), (torch.randn(8, 8),)
    asked: dict[str, Any] = {"stages": "pipe", "microbatches": 4, "schedule": schedule}
    plan = sbpc.plan(model, args, Mesh(pipe=stages), **asked)
    assert len(plan.cuts) == len(plan.chunks) - 1
    again = sbpc.plan(model, args, Mesh(pipe=stages), cuts=plan.cuts, **asked)
    assert again.cuts == plan.cuts and pieces(again) == pieces(plan)
    forward = sbpc.plan(model, args, Mesh(pipe=stages), cuts=plan.cuts, pin=plan.parameters, train=False, **asked)
    assert [*map(stored, forward.chunks)] == [*map(stored, plan.chunks)]
    assert compare(again, model, args, *eager(model, args)) < 1e-12


def stored(chunk: Any) -> set[str]:
    """The parameters of a chunk."""
    return {port.name for port in chunk.given if port.kind == PARAMETER}


def test_what_stands_for_stored_values_moves_no_call_to_another_stage() -> None:
    """Under a limit of bytes a body has an alias of what its backward reads: it is cut as it is without."""
    model, args = models.gpt2(batch=8, layers=2)
    mesh = Mesh(pipe=2, tensor=2)
    plan = sbpc.plan(model, args, mesh, stages="pipe", microbatches=2, recompute="full")
    body = plan.body
    assert body is not None
    stored = store(body.annotated)
    before, after = places_of(body.annotated), places_of(stored)
    assert sum(STORED in node.meta for node in after) > 10
    assert between_blocks(after) == between_blocks(before)
    cuts = cuts_of(body.annotated, before, 2, body.mesh)
    assert cuts_of(stored, after, 2, body.mesh) == cuts
    stages = {node.name: stage_at(place, cuts) for node, place in after.items() if STORED not in node.meta}
    assert stages == {node.name: stage_at(place, cuts) for node, place in before.items()}


def test_cuts_keep_to_their_file(tmp_path: Any) -> None:
    asked: dict[str, Any] = {"stages": "pipe", "microbatches": 4}
    plan = sbpc.plan(Chain("bare"), (torch.ones(8, 8),), Mesh(pipe=4), **asked)
    plan.save(tmp_path / "plan.sbpc")
    assert sbpc.load(tmp_path / "plan.sbpc").cuts == plan.cuts
    for wrong in ("first.weight+99", "first.weight+-9", "frist.weight+3", "+3", "first.weight+²", "first.weight+--1"):
        cuts = [wrong, *plan.cuts[1:]]
        message = refused(
            PlanError, lambda cuts=cuts: sbpc.plan(Chain("bare"), (torch.ones(8, 8),), Mesh(pipe=4), cuts=cuts, **asked)
        )
        assert message.startswith(f"cuts= names '{wrong}', before which no stage ends")


def test_what_names_no_parameter_is_no_cut() -> None:
    for wrong in ([None], [0], ["first.weight", ["last"]]):
        message = refused(
            SbpcError,
            lambda cuts=wrong: sbpc.plan(Chain("bare"), (torch.ones(8, 8),), Mesh(pipe=2), stages="pipe", cuts=cuts),
        )
        assert message.endswith("Give a list of texts or None.")
