"""Writes what a step is predicted and measured to do as a Chrome trace, which Perfetto opens, and reads it again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbpc.errors import PlanError, is_name, read_json
from sbpc.plans.timeline import STREAMS, Event

PREDICTED, MEASURED = "predicted", "measured"  # titles of the lanes


def save_trace(lanes: Mapping[str, Sequence[Event]], path: Path) -> None:
    """Writes events as a Chrome trace: a process for every lane, a thread for every stream. Raises PlanError if that
    fails.

    lanes: by title, such as "predicted", the events. Of a stream on which several things run at a time, one thread
    does not hold all: there are as many as run at a time.
    """
    records: list[dict[str, Any]] = []
    for process, (title, events) in enumerate(lanes.items()):
        records.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}})
        records.append({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}})
        known = dict.fromkeys(event.stream for event in events)
        streams = STREAMS if known.keys() <= set(STREAMS) else tuple(known)  # those of a pipeline are its stages
        threads = [(stream, row) for stream in streams for row in rows([e for e in events if e.stream == stream])]
        for thread, (stream, row) in enumerate(threads):
            records.append({"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": stream}})
            records += [record(event, process, thread) for event in row]
    try:
        path.write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}))
    except OSError as error:
        raise PlanError(f"the trace cannot be written: {error}\n  Name a file in a folder that exists.") from error


def rows(events: Sequence[Event]) -> list[list[Event]]:
    """Returns the events of a stream in rows, in each of which none begins before the last one ends; one row at
    least."""
    found: list[list[Event]] = [[]]
    for event in sorted(events, key=lambda event: event.start):
        free = (row for row in found if not row or row[-1].end <= event.start)
        row = next(free, None)
        if row is None:
            found.append([event])
        else:
            row.append(event)
    return found


def record(event: Event, process: int, thread: int) -> dict[str, Any]:
    """Returns the record of an event."""
    about = {"node": event.name, "module": event.module, "axis": event.axis, "stream": event.stream}
    about |= {"bucket": event.bucket} if event.bucket else {}
    times = {"ts": event.start * 1e6, "dur": (event.end - event.start) * 1e6}
    return {"ph": "X", "name": event.kind, "cat": event.phase, **times, "pid": process, "tid": thread, "args": about}


def read_trace(path: str | Path) -> dict[str, list[Event]]:
    """Returns the events in a file that `save_trace` wrote, by title, in the order of their starts. Raises PlanError
    if it is none."""
    try:
        records = read_json(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        titles = {each["pid"]: str(each["args"]["name"]) for each in records if each["name"] == "process_name"}
        lanes: dict[str, list[Event]] = {title: [] for title in titles.values()}
        for each in records:
            if each["ph"] == "X":
                lanes[titles[each["pid"]]].append(event_in(each))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{path} is no trace: {type(error).__name__}: {error}"
        raise PlanError(f"{what}\n  Write one with `sbpc run ... --trace FILE` or plan.save_trace.") from error
    return {title: sorted(events, key=lambda event: event.start) for title, events in lanes.items()}


def measured_step(path: str | Path, predicted: Sequence[Event]) -> list[Event]:
    """Returns the measured events in a file. Raises PlanError if it has none, or not all of these predicted ones: a
    run measures each."""
    measured = read_trace(path).get(MEASURED)
    if measured is None:
        raise PlanError(f"{path} holds no measured step\n  `sbpc run ... --trace FILE` measures one.")
    lost = {event.name for event in predicted} - {event.name for event in measured}
    if lost:
        raise PlanError(
            f"{path} was measured with another plan: it has no {min(lost)!r}\n  Give the plan that was run."
        )
    return measured


def event_in(given: dict[str, Any]) -> Event:
    """Returns the event of a record."""
    about, start, taken = given["args"], float(given["ts"]) * 1e-6, float(given["dur"]) * 1e-6
    named = about["node"], given["name"], about["module"], given["cat"], about["axis"], about.get("bucket", "")
    texts = list(map(str, named))
    if about["stream"] not in STREAMS:
        raise ValueError(f"no stream is called {about['stream']!r}")
    if not (math.isfinite(start) and 0 <= taken < math.inf and all(map(is_name, texts))):
        raise ValueError("an event has no times, or a name that is none")
    return Event(about["stream"], start, start + taken, *texts)
