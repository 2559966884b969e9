"""Real processes: a measured step has every predicted event, and its file, table and page have what was measured."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import sbpc
from sbpc import Mesh, Plan
from sbpc.cli.main import main
from sbpc.errors import PlanError, SbpcError
from sbpc.inspect.trace import WAITING, Comparison
from sbpc.mesh.cluster import Cluster
from sbpc.plans.timeline import COMPUTE, STREAMS, Event, busy_seconds, makespan
from sbpc.plans.trace_file import read_trace, rows, save_trace
from tests import models
from tests.processes import command, run_ranks
from tests.test_page import tags

LAN = Cluster("lan", 5e9, 1e10, 5e-7, 1, 2e-6, 24e6, 2e-6, 24e6)
MESHES = {"2": {"d": 2}, "2x2": {"d": 2, "t": 2}}
GPT = f"{Path(__file__).with_name('models.py')}:gpt2"


def gpt2() -> models.Model:
    torch.manual_seed(0)
    return models.gpt2(batch=16, seq=32, width=64, heads=4, layers=1)


def planned(sizes: dict[str, int], **options: Any) -> Plan:
    return sbpc.plan(*gpt2(), Mesh(cluster=LAN, **sizes), **options)


def measure_all(plans: list[Plan]) -> list[dict[str, Any]]:
    """What a rank measures of each plan."""
    return list(map(measure, plans))


def measure(plan: Plan) -> dict[str, Any]:
    """What a rank measures in three steps, the losses with and without time stamps, and the collectives that it started."""
    from sbpc.runtime.step_trace import recorded
    from sbpc.runtime.trace import START

    model, args = gpt2()
    module: Any = sbpc.parallelize(model, plan)
    before = module.step(*args).item()
    with recorded(module) as recorder:
        losses = [before, *(module.step(*args).item() for _ in range(3))]
    losses.append(module.step(*args).item())
    ((stamped, _),) = recorder.steps[0].runs
    started = [part.name for part in stamped.parts if part.role == START]
    return {"losses": losses, "predicted": plan.timeline(), "measured": recorder.events(), "started": started,
            "runs": len(recorder.steps), "length": sorted(map(recorder.length, recorder.steps))[1]}  # fmt: skip


CASES = {"2": ("2", {"microbatches": 1}), "2x2": ("2x2", {}), "serial": ("2x2", {"objective": "serial"})}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What every rank finds in every case."""
    ranks: list[Any] = []
    for cases in (("2",), ("2x2", "serial")):
        plans = [planned(MESHES[mesh], **options) for mesh, options in map(CASES.__getitem__, cases)]
        ranks += run_ranks(measure_all, plans[0].mesh.ranks, plans)
    assert all(isinstance(rank, list) for rank in ranks), ranks
    return [case for rank in ranks for case in rank]


def test_every_predicted_event_is_measured_once_and_nothing_changes(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(set(rank["losses"])) == 1 and rank["runs"] == 3
        about = [(e.name, e.stream, e.kind, e.module, e.phase, e.axis) for e in rank["measured"]]
        for event in rank["predicted"]:
            assert about.count((event.name, event.stream, event.kind, event.module, event.phase, event.axis)) == 1, (
                event
            )
        others = [e for e in rank["measured"] if e.stream != COMPUTE]
        assert sorted({e.bucket or e.name for e in others}) == sorted(rank["started"])
        assert len(others) >= len(rank["started"])  # more where some go in one message, as on four ranks
        assert {e.name for e in others} == {e.name for e in rank["predicted"] if e.stream != COMPUTE}


def test_measured_events_are_in_order_and_fill_the_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        measured = rank["measured"]
        assert all(one.start <= other.start for one, other in itertools.pairwise(measured))
        compute = [event for event in measured if event.stream == COMPUTE]
        assert compute[0].start == 0 and makespan(measured) == pytest.approx(rank["length"])
        assert all(one.end == other.start for one, other in itertools.pairwise(compute))  # one part after the other
        starts, waits = ({e.name: e for e in compute if e.kind == kind} for kind in ("start", WAITING))
        assert starts.keys() == waits.keys() == set(rank["started"])
        for event in (event for event in measured if event.stream != COMPUTE):
            name = event.bucket or event.name
            assert starts[name].start <= event.start <= event.end <= waits[name].end + 1e-9
            assert starts[name].end <= waits[name].start <= waits[name].end


def test_a_table_sums_up_the_events_of_the_file(found: list[dict[str, Any]], tmp_path: Path) -> None:
    for predicted, measured in ((rank["predicted"], rank["measured"]) for rank in found):
        save_trace({"predicted": predicted, "measured": measured}, tmp_path / "trace.json")
        read = read_trace(tmp_path / "trace.json")
        assert list(read) == ["predicted", "measured"]
        for events, back in zip((predicted, measured), read.values()):
            assert len(back) == len(events)
            for one, other in zip(sorted(events, key=str), sorted(back, key=str)):
                assert (one.name, one.kind, one.stream) == (other.name, other.kind, other.stream)
        rows = {row.name: row for row in Comparison.of(read["predicted"], read["measured"]).rows}
        for side, events in (("predicted", predicted), ("measured", measured)):
            waited = sum(event.end - event.start for event in events if event.kind == WAITING)
            compute = busy_seconds(events)[COMPUTE] - waited
            assert getattr(rows["a step"], side) == pytest.approx(makespan(events))
            assert getattr(rows["computing"], side) == pytest.approx(compute)
            assert getattr(rows["exposed: not computing"], side) == pytest.approx(
                makespan(events) - compute, rel=1e-6, abs=1e-9
            )
            if side == "measured":
                assert getattr(rows["exposed: not computing"], side) == pytest.approx(waited, rel=1e-6, abs=1e-9)
            for axis in {event.axis for event in events if event.axis}:
                moved = sum(event.end - event.start for event in events if event.axis == axis)
                assert getattr(rows[f"moving data over {axis}"], side) == pytest.approx(moved)
        ops = Comparison.of(predicted, measured).ops
        apart = [abs(row.measured - row.predicted) for row in ops]
        assert apart == sorted(apart, reverse=True)
        assert sum(row.predicted for row in ops) == pytest.approx(sum(event.end - event.start for event in predicted))


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
    plan, (model, _) = planned({"d": 2}, microbatches=1), gpt2()
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
