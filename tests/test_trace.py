"""Real processes: a measured step, in one program, a loop or stages, has every predicted event; its file, table and page have what
was measured."""

from __future__ import annotations

import itertools
import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.errors import PlanError, SbpcError
from sbpc.inspect.trace import IDLE, WAITING, Comparison
from sbpc.mesh.cluster import Cluster
from sbpc.plans.staged.schedules import LATE
from sbpc.plans.staged.staged_timeline import BUBBLE, measured_actions, stage_events
from sbpc.plans.timeline import COMPUTE, STREAMS, Event, busy_seconds, makespan
from sbpc.plans.trace_file import read_trace, rows, save_trace
from tests import models
from tests.processes import command, run_ranks
from tests.test_page import tags

LAN = Cluster("lan", 5e9, 1e10, 5e-7, 1, 2e-6, 24e6, 2e-6, 24e6)
GPT = f"{Path(__file__).with_name('models.py')}:gpt2"
CUT = {"*.weight": "S(0)"}  # so that weights are gathered
STAGED: dict[str, Any] = {"stages": "pipe", "microbatches": 4}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "a step": ("gpt2", {"d": 2}, {"microbatches": 1}),
    "a step of four ranks": ("gpt2", {"d": 2, "t": 2}, {}),
    "serial": ("gpt2", {"d": 2, "t": 2}, {"objective": "serial"}),
    "loop": ("mlp", {"d": 2}, {"microbatches": 2}),
    "breadth-first": ("mlp", {"d": 2}, {"microbatches": 2, "schedule": "breadth-first", "pin": CUT}),
    "1f1b of two ranks": ("tied", {"pipe": 2, "d": 2}, STAGED),
    "interleaved": ("mlp", {"pipe": 2}, STAGED | {"schedule": "interleaved"}),
    "serial stages": ("mlp", {"pipe": 2, "d": 2}, STAGED | {"schedule": "zbv", "objective": "serial"}),
}


def made(net: str) -> models.Model:
    torch.manual_seed(0)
    if net == "mlp":
        return models.mlp(layers=4)
    sizes = {"batch": 16, "seq": 32, "width": 64, "heads": 4, "layers": 1}
    return models.gpt2(**sizes if net == "gpt2" else {"batch": 8, "seq": 16, "width": 32, "heads": 2, "layers": 2})


def measure_all(nets: list[str], plans: list[Any]) -> list[dict[str, Any]]:
    """What a rank measures of each plan."""
    return list(map(measure, nets, plans))


def measure(net: str, plan: Any) -> dict[str, Any]:
    """What a rank measures in three steps, the losses with and without time stamps, and the collectives of a program that it started."""
    from sbpc.runtime.step_trace import recorded
    from sbpc.runtime.trace import START

    model, args = made(net)
    module: Any = sbpc.parallelize(model, plan)
    losses = [module.step(*args).item()]
    with recorded(module) as recorder:
        losses += [module.step(*args).item() for _ in range(3)]
    losses.append(module.step(*args).item())
    found = {"losses": losses, "measured": recorder.events(), "stages": plan.stages, "steps": len(recorder.steps)}
    found["length"] = sorted(map(recorder.length, recorder.steps))[1]
    if plan.loop is None:
        ((stamped, _),) = recorder.steps[0].runs
        return found | {
            "predicted": plan.timeline(),
            "started": [part.name for part in stamped.parts if part.role == START],
        }
    order = [str(action) for which, action in plan.orders[recorder.stage] if plan.programs[action.chunk].of(which)]
    actions = [event.name for event in measured_actions(plan, recorder.stage, found["measured"])]
    return found | {"predicted": stage_events(plan, recorder.stage), "order": order, "actions": actions}


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
    return event.name, event.stream, event.kind, event.module, event.phase, event.axis


def test_every_predicted_event_is_measured_once_and_nothing_changes(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(set(rank["losses"])) == 1 and rank["steps"] == 3
        measured = list(map(about, rank["measured"]))
        for event in (event for event in rank["predicted"] if event.kind != BUBBLE):
            assert measured.count(about(event)) == 1, event
        assert (BUBBLE in {event.kind for event in rank["measured"]}) == (rank["stages"] > 1)
        others = {side: [e for e in rank[side] if e.stream != COMPUTE] for side in ("predicted", "measured")}
        if "started" in rank:  # of a program also those that go in one message, as on four ranks
            assert {e.name for e in others["measured"]} == {e.name for e in others["predicted"]}
            assert sorted({e.bucket or e.name for e in others["measured"]}) == sorted(rank["started"])
            assert len(others["measured"]) >= len(rank["started"])
        else:
            texts = [sorted((about(e), e.bucket) for e in side) for side in others.values()]
            assert texts[0] == texts[1]


def test_measured_events_are_in_order_and_fill_the_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        measured = rank["measured"]
        compute = [event for event in measured if event.stream == COMPUTE]
        assert compute[0].start == 0 and makespan(measured) == pytest.approx(rank["length"])
        for one, other in itertools.pairwise(compute):  # one part after the other
            assert one.end == pytest.approx(other.start, abs=1e-9)
        starts, waits = ({e.name: e for e in compute if e.kind == kind} for kind in ("start", WAITING))
        for event in (event for event in measured if event.stream != COMPUTE):
            name = event.bucket or event.name
            action, _, node = name.partition(" ")
            late = [each for each in waits if re.match(f"{action[0]}({LATE}|F)", each) and each.endswith(f" {node}")]
            (wait,) = [waits[name]] if name in waits else [waits[each] for each in late]
            assert starts[name].start - 1e-9 <= event.start <= event.end <= wait.end + 1e-9
        if "started" in rank:
            assert all(one.start <= other.start for one, other in itertools.pairwise(measured))
            assert starts.keys() == waits.keys() == set(rank["started"])
            assert all(starts[name].end <= waits[name].start <= waits[name].end for name in starts)
        else:
            parted = (event.name.partition(" ") for event in measured)
            assert list(dict.fromkeys(action for action, _, node in parted if node)) == rank["order"] == rank["actions"]


def test_a_table_sums_up_the_events_of_the_file(found: list[dict[str, Any]], tmp_path: Path) -> None:
    for rank in found:
        sides = {side: rank[side] for side in ("predicted", "measured")}
        save_trace(sides, tmp_path / "trace.json")
        read = read_trace(tmp_path / "trace.json")
        assert list(read) == list(sides)
        for events, back in zip(sides.values(), read.values()):
            assert len(back) == len(events)
            for one, other in zip(sorted(events, key=str), sorted(back, key=str)):
                assert (one.name, one.kind, one.stream) == (other.name, other.kind, other.stream)
        rows = {row.name: row for row in Comparison.of(read["predicted"], read["measured"]).rows}
        for side, events in sides.items():
            seconds = {name: getattr(row, side) for name, row in rows.items()}
            idle, waited = (
                sum(event.end - event.start for event in events if event.kind in kinds) for kinds in (IDLE, (WAITING,))
            )
            bubble = seconds.get("bubble: waiting for other stages", 0.0)
            exposed = seconds["exposed: not computing"]
            assert (bubble > 0) == any(event.kind == BUBBLE for event in events)
            assert seconds["computing"] == pytest.approx(busy_seconds(events)[COMPUTE] - idle)
            assert seconds["a step"] == pytest.approx(seconds["computing"] + bubble + exposed)
            assert seconds["a step"] == pytest.approx(makespan(events))
            if side == "measured" and rank["stages"] == 1:
                assert exposed == pytest.approx(waited, rel=1e-6, abs=1e-9)
            for axis in {event.axis for event in events if event.axis}:
                moved = sum(event.end - event.start for event in events if event.axis == axis)
                assert seconds[f"moving data over {axis}"] == pytest.approx(moved)
        ops = Comparison.of(*sides.values()).ops
        apart = [abs(row.measured - row.predicted) for row in ops]
        assert apart == sorted(apart, reverse=True)
        if "started" in rank:
            whole = sum(event.end - event.start for event in sides["predicted"])
            assert sum(row.predicted for row in ops) == pytest.approx(whole)


def test_a_trace_has_two_processes_whose_threads_do_one_thing_at_a_time(
    found: list[dict[str, Any]], tmp_path: Path
) -> None:
    for rank in found:
        save_trace({"predicted": rank["predicted"], "measured": rank["measured"]}, tmp_path / "trace.json")
        records = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        named = {(each["name"], each["pid"], each.get("tid")): each["args"] for each in records if each["ph"] == "M"}
        assert [named["process_name", pid, None]["name"] for pid in (0, 1)] == ["predicted", "measured"]
        spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for each in (each for each in records if each["ph"] == "X"):
            assert each["dur"] >= 0 and named["thread_name", each["pid"], each["tid"]]["name"] == each["args"]["stream"]
            spans.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
        for thread in spans.values():
            assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(sorted(thread)))


def test_what_runs_at_a_time_on_one_stream_is_drawn_in_rows() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (3.5, 5.0)]
    events = [
        Event(STREAMS[1], start, end, str(at), "all_reduce", "", "forward", "d")
        for at, (start, end) in enumerate(spans)
    ]
    assert [[event.name for event in row] for row in rows(events)] == [["0", "2"], ["1", "3"]] and rows([]) == [[]]


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_the_command_measures_and_the_page_shows_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, trace, page = tmp_path / "plan.sbpc", tmp_path / "trace.json", tmp_path / "page.html"
    assert (
        run("plan", GPT, "--mesh", "data=2", "--cluster", "h100", "--pin", "blocks.*.up.weight=S(0)", "-o", plan) == 0
    )
    capfd.readouterr()
    assert run("run", GPT, "--plan", plan, "--steps", 4, "--trace", trace, "--json") == 0
    figures = json.loads(capfd.readouterr().out)
    assert figures["losses"][3] < figures["losses"][0] and figures["trace"]["file"] == str(trace)
    assert figures["trace"]["seconds_with_stamps"] > 0 < figures["trace"]["seconds_without"]
    step, *_ = figures["trace"]["step"]
    assert step["name"] == "a step" and step["predicted"] == pytest.approx(sbpc.load(plan).cost.seconds)
    measured = read_trace(trace)["measured"]
    assert step["measured"] == pytest.approx(makespan(measured)) and 0 < len(figures["trace"]["ops"]) <= 8
    assert run("show", plan, "--html", page, "--trace", trace) == 0
    text = page.read_text()
    assert "Below that the same step as measured" in text and "measured: compute" in text
    assert not tags(text).wrong and not tags(text).open
    lanes = {float(y) for y in re.findall(r'<rect class="t-\w+" x="[\d.]+" y="([\d.]+)"', text)}
    streams = sum(len({event.stream for event in events}) for events in (sbpc.load(plan).timeline(), measured))
    assert len(lanes) == streams


def test_an_exported_file_is_measured_too(tmp_path: Path) -> None:
    file, trace = tmp_path / "step.sbpc", tmp_path / "trace.json"
    assert run("export", GPT, "--mesh", "data=2", "-o", file) == 0
    out, _ = run_ranks(command, 2, "run", str(file), "--steps", "3", "--trace", str(trace))
    assert "predicted and measured" in out and re.search(r"computing +\S+ \S+ +\S+ \S+ +\S+\n", out)
    assert "module.step took" in out and "predicts no real machine" in out
    names = {event.name for event in read_trace(trace)["measured"]}
    assert {event.name for event in sbpc.load(file).timeline()} <= names


def test_what_cannot_be_measured_or_drawn_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, mesh = tmp_path / "trace.json", ("--mesh", "data=2")
    assert run("run", GPT, *mesh, "--trace", trace, "--check-nans") == 2
    assert "--trace with --check-nans" in capsys.readouterr().err
    assert run("run", GPT, *mesh, "--trace", trace, "--steps", 2) == 2
    assert "--trace with 2 steps to go" in capsys.readouterr().err
    assert run("show", GPT, *mesh, "--trace", trace) == 2
    assert "--trace is of no use without --html" in capsys.readouterr().err
    model, args = made("gpt2")
    plan = sbpc.plan(model, args, Mesh(d=2, cluster=LAN), microbatches=1)
    with pytest.raises(PlanError, match="is no trace: FileNotFoundError"):
        plan.save_page(tmp_path / "page.html", trace=trace)
    for text in ("{", "[]", '{"traceEvents": [3]}', '{"traceEvents": [{"ph": "X", "name": "a"}]}'):
        trace.write_text(text)
        with pytest.raises(PlanError, match="is no trace"):
            read_trace(trace)
    plan.save_trace(trace)
    with pytest.raises(PlanError, match="holds no measured step"):
        plan.save_page(tmp_path / "page.html", trace=trace)
    save_trace({"measured": [replace(event, name="other") for event in plan.timeline()]}, trace)
    with pytest.raises(PlanError, match="was measured with another plan"):
        plan.save_page(tmp_path / "page.html", trace=trace)
    from sbpc.cli.traced_run import TracedSteps
    from sbpc.runtime.step_trace import recorded

    with pytest.raises(SbpcError, match="--trace with 2 steps to go"):
        TracedSteps(model, plan, 2)
    with pytest.raises(PlanError, match="a GPT2 is not parallel"), recorded(model):
        pass


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
