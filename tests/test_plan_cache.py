"""The cache of plans: what comes from it is what would be planned, and nothing else comes from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh, Plan
from sbpc.api import plan_cache
from sbpc.errors import PlanError
from sbpc.plans import plan_file
from tests import models
from tests.compare import largest_error

SLOW = Mesh(data=2, tensor=2, cluster="ethernet")
CASES: dict[str, tuple[Callable[[], Any], Mesh, dict[str, Any]]] = {
    "free": (models.gpt2, SLOW, {}),
    "serial": (models.mlp, Mesh(p=4), {"objective": "serial"}),
    "under a limit": (models.gpt2, Mesh(x=4, cluster="h100"), {"memory": 3e6}),
    "a loop": (models.gpt2, SLOW, {"microbatches": 2}),
    "stages": (models.gpt2, Mesh(pipe=2, x=2, cluster="h100"), {"stages": "pipe", "microbatches": 2}),
    "computed again": (models.gpt2, SLOW, {"recompute": "full", "panels": 2}),
    "the forward alone": (models.mlp, Mesh(p=2), {"train": False}),
    "an expert's": (models.mlp, Mesh(p=2), {"baseline": "data"}),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of plans for one test."""
    monkeypatch.setenv("SBPC_CACHE", str(tmp_path / "plans"))
    return tmp_path / "plans"


def planned(case: str) -> Plan:
    """Returns the plan of a case."""
    make, mesh, options = CASES[case]
    model, args = make()
    options = dict(options)
    name = options.pop("baseline", None)
    return (
        sbpc.plan(model, args, mesh, **options) if name is None else sbpc.baseline(name, model, args, mesh, **options)
    )


@pytest.mark.parametrize("case", CASES)
def test_a_plan_that_was_made_before_is_the_same(case: str, folder: Path) -> None:
    fresh, again = planned(case), planned(case)
    assert fresh.cached is None and again.cached is not None and again.cached.parent == folder
    assert plan_file.encode(again) == plan_file.encode(fresh)
    assert again.cost.seconds == fresh.cost.seconds and again.cost.memory == fresh.cost.memory
    told = str(again).replace(f"made      before, and read from {again.cached} (SBPC_CACHE=0 plans anew)\n", "")
    assert told != str(again) and told == str(fresh)
    assert {"capture", "cache"} <= again.times.keys() and "assign" not in again.times


@pytest.mark.parametrize("case", ["free", "under a limit", "a loop"])
def test_what_is_asked_of_a_plan_that_was_made_before_is_answered_alike(case: str, folder: Path) -> None:
    fresh, again = planned(case), planned(case)
    name = next(iter(fresh.parameters))
    if case != "a loop":  # it would be made anew for each
        assert str(again.explain(name)) == str(fresh.explain(name))
    if case != "under a limit":
        assert again.check_bound() == fresh.check_bound()
    assert again.problem.proof.classes == fresh.problem.proof.classes


def test_a_plan_that_was_made_before_can_be_proved_further(folder: Path) -> None:
    fresh, again = planned("free"), planned("free")
    assert again.certify(seconds=1.0) == fresh.certify(seconds=1.0)


def test_a_plan_that_was_made_before_computes_the_same(folder: Path, float64: None) -> None:
    model, args = models.gpt2()
    for _ in range(2):
        plan = sbpc.plan(model, args, SLOW)
        assert largest_error(plan, model, args) < 1e-10
    assert plan.cached is not None


class Scaled(nn.Module):
    """A product, scaled by a number of the module's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 2.0

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scaled product."""
        return (self.linear(x) * self.scale).sum()


def test_guards_are_those_of_the_model_at_hand(folder: Path) -> None:
    model, args, mesh = Scaled(), (torch.randn(4, 8),), Mesh(p=2)
    sbpc.plan(model, args, mesh)
    plan = sbpc.plan(model, args, mesh)
    assert plan.cached is not None
    sbpc.simulate(plan, model, args)
    model.scale = 3.0
    with pytest.raises(PlanError, match="scale"):
        sbpc.simulate(plan, model, args)
    assert sbpc.plan(model, args, mesh).cached is None


class Loss:
    """A loss that is scaled by a number of its own."""

    scale = 2.0

    def __call__(self, y: Tensor) -> Tensor:
        """Returns the scaled sum."""
        return y.sum() * self.scale


def test_numbers_of_the_loss_at_hand_are_guarded(folder: Path) -> None:
    model, args, loss = nn.Linear(8, 8), (torch.randn(4, 8),), Loss()
    sbpc.plan(model, args, Mesh(p=2), loss=loss)
    plan = sbpc.plan(model, args, Mesh(p=2), loss=loss)
    assert plan.cached is not None
    sbpc.simulate(plan, model, args)
    loss.scale = 3.0
    with pytest.raises(PlanError, match="scale"):
        sbpc.simulate(plan, model, args)


def test_another_step_mesh_or_option_is_planned(folder: Path) -> None:
    model, args = models.mlp()
    sbpc.plan(model, args, Mesh(p=2))
    others = [
        sbpc.plan(model, args, Mesh(q=2)),
        sbpc.plan(model, args, Mesh(p=4)),
        sbpc.plan(model, args, Mesh(p=2, cluster="h100")),
        sbpc.plan(model, args, Mesh(p=2), objective="bytes"),
        sbpc.plan(model, args, Mesh(p=2), optimizer=None),
        sbpc.plan(model, args, Mesh(p=2), dtype=torch.bfloat16),
        sbpc.plan(model.eval(), args, Mesh(p=2), train=False),
    ]
    assert [each.cached for each in others] == [None] * len(others)
    assert len(list(folder.glob("*.sbpc"))) == 1 + len(others)


def test_another_precision_of_products_plans_anew(folder: Path) -> None:
    asked, before = (*models.mlp(), Mesh(p=2, cluster="h100")), torch.get_float32_matmul_precision()
    sbpc.plan(*asked)
    try:
        torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
        assert sbpc.plan(*asked).cached is None
    finally:
        torch.set_float32_matmul_precision(before)
    assert sbpc.plan(*asked).cached is not None


def test_other_code_of_the_planner_plans_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned("serial")
    monkeypatch.setattr(plan_cache, "code", lambda: "of another day")
    assert planned("serial").cached is None


def test_a_rule_of_the_users_plans_anew(folder: Path) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """Returns a sum by an op without a rule of sbpc's."""
            return torch.logspace(0.0, 1.0, 4).sum() + torch.ops.aten.digamma(x).sum()

    asked = Own(), (torch.rand(4, 4, requires_grad=True),), Mesh(p=2)
    sbpc.plan(*asked, train=False)
    assert sbpc.plan(*asked, train=False).cached is not None
    op, before = torch.ops.aten.digamma.default, plan_cache.TABLE.copy()
    try:
        sbpc.rule(op, "a b -> a b", replace=True)
        assert sbpc.plan(*asked, train=False).cached is None
    finally:
        plan_cache.TABLE.clear()
        plan_cache.TABLE.update(before)


@pytest.mark.parametrize("harm", ["cut", "empty", "a folder", "other text"])
def test_a_damaged_file_is_planned_and_written_again(harm: str, folder: Path) -> None:
    planned("serial")
    (file,) = folder.iterdir()
    text = file.read_bytes()
    if harm == "a folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes({"cut": text[:-100], "empty": b"", "other text": text.replace(b"S(0)", b"S(1)", 1)}[harm])
    assert planned("serial").cached is None
    assert (planned("serial").cached is None) == (harm == "a folder")  # which is the user's own


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SBPC_CACHE", str(tmp_path / "file"))
    assert planned("serial").cached is None and planned("serial").cached is None


def test_a_folder_that_cannot_be_looked_into_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBPC_CACHE", "/name" * 1_000)  # too long; that of another user is refused alike
    assert planned("serial").cached is None


def test_the_oldest_plans_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 0
    for ranks in (2, 4, 8):
        sbpc.plan(*models.mlp(), Mesh(p=ranks))
        size = max(size, *(file.stat().st_size for file in folder.iterdir()))
        monkeypatch.setattr(plan_cache, "MOST_BYTES", 2 * size + 100)
    found = [sbpc.plan(*models.mlp(), Mesh(p=ranks)).cached is not None for ranks in (8, 4, 2)]
    assert found == [True, True, False] and len(list(folder.iterdir())) == 2


def test_no_cache_is_used_where_it_is_turned_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("SBPC_CACHE", "0")
    with caplog.at_level(logging.INFO, "sbpc"):
        planned("serial")
    assert not list(tmp_path.iterdir()) and planned("serial").cached is None
    monkeypatch.delenv("SBPC_CACHE")
    planned("serial")
    assert planned("serial").cached is not None and list((tmp_path / ".cache" / "sbpc").glob("*.sbpc"))


def test_a_dump_shows_the_passes_of_a_plan_that_was_made_before(folder: Path, tmp_path: Path) -> None:
    model, args = models.mlp()
    sbpc.plan(model, args, Mesh(p=2))
    assert sbpc.plan(model, args, Mesh(p=2), dump=tmp_path / "dump").cached is None
    assert len(list((tmp_path / "dump").iterdir())) > 5
