"""Meshes of a number of devices, and matrix products that move no more than they must."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import sbpc
from sbpc import Mesh
from sbpc.api.sweep import SweepRow, meshes
from sbpc.cli.main import main
from sbpc.errors import MeshError, PlanError
from tests import models
from tests.matmul_bound import matmul_words


def product(m: int, n: int, k: int, devices: int, **options: Any) -> list[SweepRow]:
    """The meshes for one linear layer [m, k] -> [m, n], every matrix stored once."""
    with torch.device("meta"):
        model, x = nn.Linear(k, n, bias=False), torch.empty(m, k)
    return sbpc.sweep(model, (x,), devices=devices, train=False, objective="bytes", spread=True, **options)


PRODUCTS = [  # m, n, k, ranks, axes to look at, the grid
    (65536, 1024, 1024, 16, 4, (16,)),
    pytest.param(16384, 16384, 1024, 16, 4, (4, 4), marks=pytest.mark.prove),
    (1024, 16384, 16384, 16, 4, (4, 4)),
    (8192, 8192, 8192, 8, 4, (2, 2, 2)),
    pytest.param(8192, 8192, 8192, 64, 3, (4, 4, 4), marks=pytest.mark.prove),
    (8192, 8192, 8192, 512, 3, (8, 8, 8)),
    (16384, 4096, 8192, 64, 3, (2, 4, 8)),
]


@pytest.mark.parametrize(("m", "n", "k", "devices", "axes", "grid"), PRODUCTS, ids=str)
def test_best_mesh_of_a_product_moves_what_the_tight_bound_says(
    m: int, n: int, k: int, devices: int, axes: int, grid: tuple[int, ...]
) -> None:
    best, *others = product(m, n, k, devices, axes=axes)
    least = 4 * matmul_words(m, n, k, devices)
    assert sorted(best.mesh.sizes) == sorted(grid)
    assert best.cost == pytest.approx(least, rel=1e-9)
    assert all(row.cost >= least * (1 - 1e-9) for row in others)
    stored = [best.plan.layout("weight"), best.plan.layout("input_1"), best.plan.assignment.outputs[0]]
    assert all(isinstance(state, sbpc.S) for layout in stored for state in layout.states)  # type: ignore[union-attr]
    assert best.plan.verify() > 0


@pytest.mark.prove
@pytest.mark.parametrize("devices", [64, 512])
def test_no_mesh_of_four_axes_beats_the_tight_bound(devices: int) -> None:
    rows = product(8192, 8192, 8192, devices)
    least = 4 * matmul_words(8192, 8192, 8192, devices)
    assert rows[0].cost == pytest.approx(least, rel=1e-9) and all(row.cost >= least * (1 - 1e-9) for row in rows)


def test_rows_are_sorted_and_equal_plans_made_one_by_one() -> None:
    model, args = models.mlp()
    rows = sbpc.sweep(model, args, devices=8, cluster="h100")
    assert [row.cost for row in rows] == sorted(row.cost for row in rows)
    for row in rows:
        alone = sbpc.plan(model, args, row.mesh)
        assert row.cost == alone.cost.step_seconds > alone.cost.seconds and row.plan.layouts == alone.layouts
        mirrored = Mesh(cluster="h100", **dict(zip("abcd", row.mesh.sizes[::-1])))
        assert sbpc.plan(model, args, mirrored).cost.step_seconds == pytest.approx(row.cost, rel=1e-9)
        assert {node.name: node.meta["sbp"] for node in row.plan.graph.graph.nodes if "sbp" in node.meta}.items() <= (
            row.plan.layouts.items()
        )


def test_meshes_whose_links_differ_are_all_tried() -> None:
    inside = [mesh.sizes for mesh in meshes(8, "h100", 4)]  # 8 ranks a node
    assert inside == [(8,), (2, 4), (2, 2, 2)]
    across = [mesh.sizes for mesh in meshes(16, "h100", 2)]
    assert across == [(16,), (2, 8), (4, 4), (8, 2)]
    assert [mesh.sizes for mesh in meshes(1, None, 4)] == [(1,)]
    assert len(meshes(512, "h100", 4)) == 93 and len(meshes(7, None, 4)) == 1


def test_meshes_that_do_not_fit_have_no_row() -> None:
    model, args = models.mlp(batch=12)
    every = sbpc.sweep(model, args, devices=4)
    limit = min(row.plan.cost.memory["total"] for row in every) * 1.2
    rows = sbpc.sweep(model, args, devices=4, memory=limit)
    assert rows and all(row.plan.cost.memory["total"] <= limit for row in rows)
    with pytest.raises(sbpc.SbpcError, match=r"on none of 2 meshes; on Mesh.* no plan was found that takes less than"):
        sbpc.sweep(model, args, devices=4, memory=10)


def test_what_sweep_cannot_do_is_refused() -> None:
    model, args = models.mlp()
    with pytest.raises(sbpc.SbpcError, match="devices is 0\n  It is a number from 1"):
        sbpc.sweep(model, args, devices=0)
    with pytest.raises(sbpc.SbpcError, match="axes is 5\n  A mesh has 1 to 4 axes"):
        sbpc.sweep(model, args, devices=8, axes=5)
    with pytest.raises(sbpc.SbpcError, match="objective is 'joy'"):
        sbpc.sweep(model, args, devices=8, objective="joy")
    with pytest.raises(sbpc.SbpcError, match=r"axes is 2\.5\n  Give an integer"):
        sbpc.sweep(model, args, devices=8, axes=2.5)  # type: ignore[arg-type]


def test_progress_that_cannot_be_called_as_it_is_called_is_refused_before_anything_is_planned() -> None:
    model, args = models.mlp()
    for wrong in (lambda: None, lambda number, count: None, lambda a, b, c, d: None):
        with pytest.raises(MeshError, match=r"not take three arguments\n  Give a function .*number, count, m"):
            sbpc.sweep(model, args, devices=2, progress=wrong)  # type: ignore[arg-type]
    seen: list[Any] = []
    rows = sbpc.sweep(model, args, devices=4, progress=lambda *told: seen.append(told))
    assert [told[:2] for told in seen[:2]] == [(0, 2), (1, 2)] and seen[0][2] in [row.mesh for row in rows]


def test_of_more_axes_that_gain_nothing_plans_are_quick_and_legal_and_the_best_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, args = models.gpt2(layers=1, batch=16, seq=8, vocab=32, width=16, heads=4)
    every = sbpc.sweep(model, args, devices=8, cluster="h100")
    assert not any(row.quick for row in every)
    monkeypatch.setattr("sbpc.api.sweep.few_calls", lambda gm: False)
    rows = sbpc.sweep(model, args, devices=8, cluster="h100")
    assert {row.mesh for row in rows} == {row.mesh for row in every} and not rows[0].quick
    assert rows[0].cost == pytest.approx(every[0].cost, rel=5e-3)  # what PAYS says
    whole = {row.mesh: row.cost for row in every}
    for row in rows:
        assert row.cost == row.plan.cost.step_seconds and row.plan.cost.lower_bound <= row.plan.cost.seconds
        assert row.plan.verify() > 0
        assert row.quick or row.cost <= whole[row.mesh]
    assert [row.mesh.sizes for row in rows if row.quick] == [(2, 2, 2)]


def test_when_the_seconds_are_over_every_mesh_has_a_quick_plan() -> None:
    model, args = models.mlp()
    rows = sbpc.sweep(model, args, devices=8, cluster="h100", seconds=0)
    assert len(rows) == 3 and all(row.quick for row in rows)
    assert [row.cost for row in rows] == sorted(row.plan.cost.step_seconds for row in rows)
    again = sbpc.sweep(model, args, devices=8, cluster="h100", seconds=1e6)
    assert not any(row.quick for row in again) and again[0].cost <= rows[0].cost * (1 + 1e-2)


def test_what_is_wrong_on_every_mesh_is_said_of_none() -> None:
    model, args = models.mlp()
    with pytest.raises(PlanError, match=r"^routing=1\.5 of a step in which no rows of experts were found"):
        sbpc.sweep(model, args, devices=4, routing=1.5)


def test_sweep_on_the_command_line_prints_rows_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    target = ["sweep", "examples/01_two_layers.py:two_layers", "--devices", "4", "--objective", "bytes"]
    assert main([*target, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["mesh"] for row in rows] in ([{"a": 4}, {"a": 2, "b": 2}], [{"a": 2, "b": 2}, {"a": 4}])
    assert rows[0]["cost"] == sum(rows[0]["bytes_sent"].values())
    assert main([*target, "--top", "1"]) == 0
    table = capsys.readouterr().out
    assert "a=" in table and table.endswith("2 meshes of 4 ranks\n")
