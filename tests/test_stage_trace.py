"""Real processes: a measured step of stages, or of a loop, has every predicted event, and its file and page have what was measured."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.errors import PlanError
from sbpc.inspect.trace import IDLE, WAITING, Comparison
from sbpc.mesh.cluster import Cluster
from sbpc.plans.staged.schedules import LATE
from sbpc.plans.staged.staged_timeline import BUBBLE, measured_actions, stage_events
from sbpc.plans.timeline import COMPUTE, Event, busy_seconds, makespan
from sbpc.plans.trace_file import read_trace
from tests import models
from tests.processes import run_ranks
from tests.test_page import tags

LAN = Cluster("lan", 5e9, 1e10, 5e-7, 1, 2e-6, 24e6, 2e-6, 24e6)
STAGED: dict[str, Any] = {"stages": "pipe", "microbatches": 4}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {  # with tied weights, and without
    "loop": ("mlp", {"data": 2}, {"microbatches": 2}),
    "breadth-first": ("mlp", {"data": 2}, {"microbatches": 2, "schedule": "breadth-first"}),
    "1f1b of two ranks": ("gpt2", {"pipe": 2, "data": 2}, STAGED),
    "interleaved": ("mlp", {"pipe": 2}, STAGED | {"schedule": "interleaved"}),
    "serial": ("mlp", {"pipe": 2, "data": 2}, STAGED | {"schedule": "zbv", "objective": "serial"}),
}


def made(net: str) -> models.Model:
    torch.manual_seed(0)
    return models.mlp(layers=4) if net == "mlp" else models.gpt2(batch=8, seq=16, width=32, heads=2, layers=2)


def measure_all(nets: list[str], plans: list[Any]) -> list[dict[str, Any]]:
    """What a rank measures of each plan."""
    return list(map(measure, nets, plans))


def measure(net: str, plan: Any) -> dict[str, Any]:
    """What a rank measures in three steps, and the losses with and without time stamps."""
    from sbpc.runtime.step_trace import recorded

    model, args = made(net)
    module: Any = sbpc.parallelize(model, plan)
    losses = [module.step(*args).item()]
    with recorded(module) as recorder:
        losses += [module.step(*args).item() for _ in range(3)]
    losses.append(module.step(*args).item())
    measured = recorder.events()
    actions = [event.name for event in measured_actions(plan, recorder.stage, measured)]
    order = [str(action) for which, action in plan.orders[recorder.stage] if plan.programs[action.chunk].of(which)]
    return {"losses": losses, "predicted": stage_events(plan, recorder.stage), "measured": measured, "actions": actions,
            "order": order, "stages": plan.stages,
            "length": sorted(map(recorder.length, recorder.steps))[1], "steps": len(recorder.steps)}  # fmt: skip


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What every rank finds in every case."""
    cases: dict[int, tuple[list[str], list[Any]]] = {2: ([], []), 4: ([], [])}
    for net, sizes, options in CASES.values():
        mesh = Mesh(cluster=LAN, **sizes)  # type: ignore[arg-type]
        nets, plans = cases[mesh.ranks]
        nets.append(net)
        plans.append(sbpc.plan(*made(net), mesh, **options))
    ranks = [rank for count, mine in cases.items() for rank in run_ranks(measure_all, count, *mine)]
    assert all(isinstance(rank, list) for rank in ranks), ranks
    return [case for rank in ranks for case in rank]


def about(event: Event) -> tuple[str, ...]:
    return event.name, event.stream, event.kind, event.module, event.phase, event.axis, event.bucket


def test_every_predicted_event_is_measured_once_and_nothing_changes(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(set(rank["losses"])) == 1 and rank["steps"] == 3
        measured = [about(event) for event in rank["measured"]]
        for event in (event for event in rank["predicted"] if event.kind != BUBBLE):
            assert measured.count(about(event)) == 1, event
        others = [[about(e) for e in rank[side] if e.stream != COMPUTE] for side in ("predicted", "measured")]
        assert sorted(others[0]) == sorted(others[1])
        assert (BUBBLE in {event.kind for event in rank["measured"]}) == (rank["stages"] > 1)


def test_programs_run_in_the_order_of_the_schedule_and_their_events_fill_the_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        parted = (event.name.partition(" ") for event in rank["measured"])
        assert list(dict.fromkeys(action for action, _, node in parted if node)) == rank["order"] == rank["actions"]
        compute = [event for event in rank["measured"] if event.stream == COMPUTE]
        assert compute[0].start == 0 and makespan(rank["measured"]) == pytest.approx(rank["length"])
        for one, other in itertools.pairwise(compute):
            assert one.end == pytest.approx(other.start, abs=1e-9)
        starts, waits = ({e.name: e for e in compute if e.kind == kind} for kind in ("start", WAITING))
        for event in (event for event in rank["measured"] if event.stream != COMPUTE):
            action, _, node = (event.bucket or event.name).partition(" ")
            late = [
                wait for name, wait in waits.items() if name.startswith(action[0] + LATE) and name.endswith(f" {node}")
            ]
            (wait,) = [waits[f"{action} {node}"]] if f"{action} {node}" in waits else late
            assert starts[f"{action} {node}"].start - 1e-9 <= event.start <= event.end <= wait.end + 1e-9


def test_a_table_tells_the_bubble_from_what_is_exposed(found: list[dict[str, Any]]) -> None:
    for rank in found:
        rows = {row.name: row for row in Comparison.of(rank["predicted"], rank["measured"]).rows}
        for side in ("predicted", "measured"):
            seconds = {name: getattr(row, side) for name, row in rows.items()}
            bubble = seconds.get("bubble: waiting for other stages", 0.0)
            idle = sum(event.end - event.start for event in rank[side] if event.kind in IDLE)
            assert seconds["computing"] == pytest.approx(busy_seconds(rank[side])[COMPUTE] - idle)
            assert seconds["a step"] == pytest.approx(seconds["computing"] + bubble + seconds["exposed: not computing"])
            assert (bubble > 0) == any(event.kind == BUBBLE for event in rank[side])


TARGET = """
import os, signal, sys
from tests import models
from sbpc.runtime.start.mail import Mail

def model():
    return models.gpt2(batch=8, seq=16, width=32, heads=2, layers=2)

def dies():
    send, sent = Mail.send, []
    def counted(self, *args):
        sent.append(1)
        if len(sent) == 14:  # in the third step, which is measured
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, *args)
    if os.environ.get("RANK") == "1":
        Mail.send = counted
    return model()
"""
ASKED = ("--mesh", "pipe=2", "--stages", "pipe", "--microbatches", "4")


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    path = tmp_path / f"target_of_{tmp_path.name}.py"
    path.write_text(TARGET)
    return str(path)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_the_command_measures_stages_and_the_page_shows_them(
    target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, trace, page = tmp_path / "step.sbpc", tmp_path / "trace.json", tmp_path / "page.html"
    assert run("export", f"{target}:model", *ASKED, "-o", file) == 0
    plan = sbpc.load(file)
    capfd.readouterr()
    assert run("run", file, "--steps", 3, "--json", "--trace", trace) == 0
    figures = json.loads(capfd.readouterr().out)
    assert len(figures["losses"]) == 3 and figures["trace"]["file"] == str(trace)
    sides = read_trace(trace)
    names = {side: {event.name for event in events if event.kind != BUBBLE} for side, events in sides.items()}
    assert list(sides) == ["predicted", "measured"] and names["predicted"] <= names["measured"]
    rows = {row["name"]: row for row in figures["trace"]["step"]}
    assert rows["a step"]["predicted"] == pytest.approx(plan.cost.seconds)
    assert rows["a step"]["measured"] == pytest.approx(makespan(sides["measured"]))
    assert (
        rows["bubble: waiting for other stages"]["predicted"] > 0 < rows["bubble: waiting for other stages"]["measured"]
    )
    assert run("show", file, "--html", page, "--trace", trace) == 0
    text = page.read_text()
    assert "in the step that was measured" in text and not tags(text).wrong and not tags(text).open
    assert text.count('class="t-forward') == 3 * plan.count and text.count('class="t-backward') >= 3 * plan.count
    other = sbpc.plan(*models.mlp(layers=2), Mesh(pipe=2), **STAGED)
    with pytest.raises(PlanError, match="was measured with another plan"):
        other.save_page(page, trace=trace)


def test_a_rank_that_is_killed_in_a_measured_step_ends_the_job_with_one_error(
    target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        run("run", f"{target}:dies", *ASKED, "--steps", 4, "--trace", tmp_path / "trace.json") == 128 + signal.SIGKILL
    )
    out, err = capfd.readouterr()
    assert err.count("sbpc: ") == 1 and "rank 1 was ended by SIGKILL" in err, err
    assert "step    2" in out and "step    4" not in out and not (tmp_path / "trace.json").exists()
