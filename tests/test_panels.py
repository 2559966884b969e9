"""Panels: the same step, what is gathered in parts. Live bytes fall by the number of panels; steps become shorter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import MemoryLimitError, SbpcError
from sbpc.mesh.cluster import Cluster
from sbpc.plans.storages import POSITION
from tests import models
from tests.compare import largest_error

m, k, n, p, q, r = (sympy.Symbol(name, positive=True) for name in ("m", "k", "n", "n_panels", "q", "r"))
SQUARE = Mesh(q=4, r=4)
LAN = Cluster("lan", 5e9, 1e10, 5e-7, 1, 2e-6, 24e6, 2e-6, 24e6)


class Product(nn.Module):
    """One product, x w, of blocks on a square of ranks."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(k, n, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def summa(
    panels: int | None, mesh: Mesh, size: tuple[int, int, int] = (64, 128, 96), **options: Any
) -> tuple[sbpc.Plan, nn.Module, Tensor]:
    """SUMMA in panels: x, w and their product each in as many blocks as there are ranks."""
    rows, inner, columns = size
    model, x = Product(inner, columns), torch.randn(rows, inner, dtype=torch.float64)
    blocks = "[S(0), S(1)]"
    ends = {"inputs": [blocks], "outputs": [blocks], "pin": {"w": blocks, "mm": blocks}}
    return sbpc.plan(model, (x,), mesh, train=False, panels=panels, **ends, **options), model, x


def gathered(plan: sbpc.Plan) -> int:
    """The most bytes of gathered operands that are alive at once: in the layouts in which products read them."""
    life = plan.life
    made = {storage for node, storages in life.values.items() if "step" in node.meta for storage in storages}
    return max(
        sum(life.size[storage] for storage in life.alive(at) if storage in made) for at in range(len(life.moments))
    )


def test_the_gathered_bytes_of_summa_fall_by_the_number_of_panels() -> None:
    """Of x a rank holds m/q rows of k/n_panels columns at a time, of w as many rows of n/r columns."""
    formula, whole = 8 * (m * k / q + k * n / r) / p, summa(1, SQUARE, objective="serial")[0]
    for panels in (1, 2, 4, 8):
        plan, model, x = summa(panels, SQUARE, objective="serial")
        assert gathered(plan) == formula.subs({m: 64, k: 128, n: 96, q: 4, r: 4, p: panels})
        assert plan.cost.bytes_sent == whole.cost.bytes_sent and plan.options.panels == panels
        assert plan.life.peak == sbpc.simulate(plan, model, (x,)).peak_memory
    assert plan.remarks == ("in panels: %mm (8)",)


def test_the_number_of_panels_is_a_symbol_of_the_bytes_at_the_peak() -> None:
    """A panel of x is gathered by rows, then laid along columns; beside both panels live the sum so far and the next one."""
    named = {"x": ("m", "k"), "w": ("k", "n"), "n_panels": 4}
    found = summa(4, SQUARE, objective="serial", dynamic=named)[0].cost.memory_expr
    blocks, result = (m * k + k * n) / (q * r), m * n / (q * r)
    laying, adding = 2 * m * k / (q * p) + result, (m * k / q + k * n / r) / p + 2 * result
    peaks = {sympy.expand(8 * (blocks + held) + 2 * POSITION) for held in (laying, adding)}
    assert {sympy.expand(each) for each in found.args} == peaks
    for panels in (2, 4, 8):
        peak = summa(panels, SQUARE, objective="serial")[0].life.peak
        assert found.xreplace({m: 64, k: 128, n: 96, q: 4, r: 4, p: panels}).doit() == peak


def test_panels_are_chosen_where_they_make_a_step_shorter(tmp_path: Path) -> None:
    """All that is computed but the last panel goes beside the gathers of the next ones."""
    mesh, size = Mesh(q=2, r=2, cluster=LAN), (384, 384, 384)
    whole = summa(1, mesh, size)[0]
    plan, model, x = summa(None, mesh, size)
    assert plan.options.panels == 8 and plan.cost.seconds < 0.85 * whole.cost.seconds
    assert plan.cost.seconds == pytest.approx(plan.cost.comm_seconds + whole.cost.compute_seconds / 8)
    assert plan.cost.bytes_sent == whole.cost.bytes_sent and plan.verify() > whole.verify()
    assert plan.cost.lower_bound == whole.cost.lower_bound and plan.check_bound().bound <= plan.cost.seconds
    assert plan.diff(whole).asked["panels"] and plan.layout("mm") == whole.layout("mm") and str(plan.explain("w"))
    assert "note      in panels: %mm (8)" in str(plan)
    plan.save(tmp_path / "plan.sbpc")
    loaded = sbpc.load(tmp_path / "plan.sbpc")
    assert loaded.cost.seconds == plan.cost.seconds and loaded.remarks == plan.remarks
    assert (sbpc.simulate(loaded, model, (x,)).outputs - x @ model.w).abs().max() <= 1e-10
    plan.export(tmp_path / "programs.sbpc")
    assert sbpc.load_programs(tmp_path / "programs.sbpc")


def test_a_limit_that_only_panels_meet_is_met() -> None:
    size = (64, 128, 96)
    whole, eighths = (summa(panels, SQUARE, size, objective="serial")[0].cost.memory["total"] for panels in (1, 8))
    limit = (whole + eighths) // 2
    for objective in ("seconds", "serial"):
        plan, model, x = summa(None, SQUARE, size, memory=limit, objective=objective)
        assert plan.options.panels > 1 and plan.cost.memory["total"] <= limit < whole
        run = sbpc.simulate(plan, model, (x,))
        assert run.peak_memory <= limit and (run.outputs - x @ model.w).abs().max() <= 1e-10
        assert plan.check_bound().bound <= plan.cost.seconds and plan.options.objective == objective
    for panels, most in ((1, limit), (None, eighths // 2)):
        with pytest.raises(MemoryLimitError, match="no plan was found that takes less than"):
            summa(panels, SQUARE, size, memory=most)


def test_a_training_step_in_panels_computes_the_same() -> None:
    model, args = models.mlp()
    whole, plan = (
        sbpc.baseline("fsdp", model, args, Mesh(d=2, t=2, cluster=LAN), microbatches=1, panels=count)
        for count in (1, 2)
    )
    assert plan.options.panels == 2 and plan.cost.bytes_sent == pytest.approx(whole.cost.bytes_sent)
    assert largest_error(plan, model, args) <= 1e-5 and plan.verify()


def test_what_no_number_of_panels_is_is_refused() -> None:
    model, args = models.mlp()
    with pytest.raises(SbpcError, match=r"panels is 0\n  It is an integer from 1 on, or None\."):
        sbpc.plan(model, args, Mesh(t=2), panels=0)
    with pytest.raises(SbpcError, match="panels= with stages="):
        sbpc.plan(model, args, Mesh(pipe=2, t=2), stages="pipe", panels=2)
