"""The geometry of a page's charts: the timeline of a step, the schedule of stages, the curve of memory, the losses of
a run."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sbpc.inspect.report import numberless
from sbpc.inspect.tables import quantity
from sbpc.inspect.trace import WAITING
from sbpc.plans.memory import turn_of
from sbpc.plans.memory_curve import MemoryCurve
from sbpc.plans.plan import Plan
from sbpc.plans.staged.schedules import WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, BEFORE
from sbpc.plans.staged.staged_timeline import actions_of, measured_actions
from sbpc.plans.timeline import COMPUTE, STREAMS, Event, makespan

WIDE, TALL = 1000.0, 220.0  # units of a chart that can be zoomed; it is stretched to the width of the page
LANE, BAR = 34.0, 22.0  # units from stream to stream, and of a bar
SPAN, THICK = 1200.0, 26.0  # units of the schedule's picture: its width, and a bar
ONCE = {BEFORE: "what is done before the loop", AFTER: "what is done after the loop"}
ROOM = 16.0  # units of a bar in which a number can be read
FINE = 0.2  # units: bars of one kind that are nearer to each other are one
COLUMNS = 1200  # moments of the curve of memory that are drawn: the largest of each
WIDTH, HEIGHT, LEFT, BOTTOM = 760.0, 300.0, 56.0, 34.0  # pixels, of the loss curves
PEN = ("solid", "dashed", "dotted")
Span = tuple[float, float]


def timeline(events: Sequence[Event], rows: Mapping[str, int], measured: Sequence[Event] = ()) -> dict[str, Any]:
    """Returns the lanes of a timeline with their bars, the spans in which only links are busy, and these by module
    and phase.

    rows: by name of an event, the number of its row in the graph. measured: the events of a step that ran, drawn below.
    """
    sides = {"": events} | ({"measured: ": [each for each in measured if each.kind != WAITING]} if measured else {})
    whole = max((event.end for side in sides.values() for event in side), default=0.0) or 1.0
    scale, row = WIDE / whole, 0
    lanes: list[str] = []
    drawn: list[dict[str, Any]] = []
    red: list[tuple[float, float, float]] = []
    told: list[tuple[str, str]] = []
    for title, side in sides.items():
        for stream in (stream for stream in STREAMS if any(event.stream == stream for event in side)):
            lanes.append(title + stream)
            drawn += bars(side, stream, LANE * row + 6, scale, rows)
            row += 1
        exposed = exposed_spans(side)
        red += [(start * scale, (end - start) * scale, LANE * row + 6) for start, end in exposed]
        told.append((quantity(makespan(list(side)), "s"), quantity(length(exposed), "s")))
        row += 1
    return {
        "width": WIDE,
        "height": LANE * row,
        "bar": BAR,
        "lane": LANE,
        "whole": told[0][0],
        "lanes": lanes,
        "bars": drawn,
        "seconds": whole,
        "exposed": red,
        "exposed_seconds": told[0][1],
        "measured": told[1:],
        "ticks": [(WIDE * part / 10, quantity(whole * part / 10, "s")) for part in range(11)],
        "rows": exposed_rows(events),
    }


def exposed_spans(events: Sequence[Event]) -> list[Span]:
    """Returns the spans in which links are busy and nothing is computed."""
    moving = union([(event.start, event.end) for event in events if event.stream != COMPUTE])
    return without(moving, union([(event.start, event.end) for event in events if event.stream == COMPUTE]))


def bars(events: Sequence[Event], lane: str, y: float, scale: float, rows: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns the bars of a stream; neighbours of one phase that hardly can be told apart are one."""
    drawn: list[dict[str, Any]] = []
    for event in sorted((event for event in events if event.stream == lane), key=lambda event: event.start):
        x, end = event.start * scale, event.end * scale
        last = drawn[-1] if drawn else None
        if (
            last
            and last["phase"] == event.phase
            and x - last["end"] < FINE
            and (last["many"] > 1 or end - last["x"] < 10 * FINE)
        ):
            last["end"], last["many"] = max(end, last["end"]), last["many"] + 1
        else:
            about = f"{event.name}  {event.module}  {event.kind}, {quantity(event.end - event.start, 's')}"
            drawn.append(
                {
                    "x": x,
                    "end": end,
                    "y": y,
                    "phase": event.phase,
                    "title": about,
                    "many": 1,
                    "row": rows.get(event.name),
                }
            )
    return drawn


def exposed_rows(events: Sequence[Event]) -> list[tuple[str, str, str, float]]:
    """Returns module, phase, seconds in which nothing is computed while its collectives run, and their part of the
    most."""
    computing = union([(event.start, event.end) for event in events if event.stream == COMPUTE])
    found: dict[tuple[str, str], list[Span]] = {}
    for event in (event for event in events if event.stream != COMPUTE):
        found.setdefault((numberless(event.module) or "the model", event.phase), []).append((event.start, event.end))
    exposed = [(key, length(without(spans, computing))) for key, spans in found.items()]
    rows = sorted(exposed, key=lambda item: -item[1])[:12]
    most = rows[0][1] if rows else 0.0
    return [(*key, quantity(seconds, "s"), 100 * seconds / most) for key, seconds in rows if seconds]


def union(spans: Sequence[Span]) -> list[Span]:
    """Returns spans that do not overlap and hold what any of the given ones holds."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif end > start:
            joined.append((start, end))
    return joined


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Returns what of spans lies in none of the others, which do not overlap and are in order."""
    left: list[Span] = []
    stops = [stop for _, stop in others]
    for start, end in spans:
        for begin, stop in others[bisect.bisect_right(stops, start) :]:
            if begin >= end:
                break
            if begin > start:
                left.append((start, begin))
            start = max(start, stop)
        if start < end:
            left.append((start, end))
    return left


def length(spans: Sequence[Span]) -> float:
    """Returns how long spans are together."""
    return math.fsum(end - start for start, end in spans)


def schedule(plan: Plan, measured: Sequence[Event] = ()) -> dict[str, Any]:
    """Returns the schedule: a lane for each stage, bars with the number of the micro-batch; where there is none is a
    bubble.

    measured: the events of a step that rank 0 ran, whose lane is the last.
    """
    sides = {f"stage {stage}": list(actions_of(plan, stage)) for stage in range(plan.stages)}
    if measured:
        sides["rank 0"] = list(measured_actions(plan, 0, measured))
    whole = max(plan.cost.seconds, makespan(list(measured))) or 1.0
    lanes = [{"y": LANE * row + (LANE - THICK) / 2, "name": name} for row, name in enumerate(sides)]
    bars = [
        bar(plan, event, lane["y"], SPAN / whole) for lane, events in zip(lanes, sides.values()) for event in events
    ]
    ticks = [quantity(whole * part / 10, "s") for part in range(11)]
    return {
        "width": SPAN,
        "height": LANE * len(lanes),
        "bar": THICK,
        "bars": bars,
        "lanes": lanes,
        "ticks": ticks,
        "measured": quantity(makespan(list(measured)), "s") if measured else "",
    }


def bar(plan: Plan, event: Event, y: Any, scale: float) -> dict[str, Any]:
    """Returns the bar of what a chunk does. scale: units a second."""
    width, chunk, batch = (
        scale * (event.end - event.start),
        int(event.module.split()[1]),
        event.name.partition(event.kind)[2],
    )
    what = ONCE.get(event.kind, f"{event.phase} of micro-batch {batch}")
    return {
        "x": scale * event.start,
        "y": y,
        "width": width,
        "phase": event.phase,
        "title": f"{what} in chunk {chunk}, {quantity(event.end - event.start, 's')}",
        "label": batch if width >= ROOM and event.kind not in ONCE else "",
        "second": chunk >= plan.stages,
        "weights": event.kind == WEIGHTS,
    }


def memory(curve: MemoryCurve, device: float) -> dict[str, Any]:
    """Returns the areas of the curve of memory, one upon the other. device: the bytes of a device, drawn if near the
    peak."""
    total, stored = curve.bytes, next((at for at, phase in enumerate(curve.phases) if phase != "stored"), 0)
    size = -(-(len(total) - stored) // COLUMNS)
    at = [
        max(range(start, min(start + size, len(total))), key=total.__getitem__)
        for start in range(stored, len(total), size)
    ]
    most = max(total[curve.peak], device if device <= 1.6 * total[curve.peak] else 0.0, 1)
    x = [WIDE * number / max(1, len(at) - 1) for number in range(len(at))]
    below, areas = [0] * len(at), []
    for hue, (group, rows) in enumerate(curve.groups.items()):
        above = [low + rows[moment] for low, moment in zip(below, at)]
        if above != below:
            areas.append(
                {
                    "group": group,
                    "hue": hue,
                    "path": area(x, below, above, most),
                    "bytes": quantity(rows[curve.peak], "B"),
                }
            )
        below = above
    phases = [curve.phases[moment] for moment in at]
    starts = {"forward": 0, "backward": turn_of(phases)}
    return {
        "width": WIDE,
        "height": TALL,
        "areas": areas,
        "held": {group: rows[curve.peak] for group, rows in curve.groups.items()},
        "peak": (x[at.index(curve.peak)], height(total[curve.peak], most)),
        "peak_text": quantity(total[curve.peak], "B"),
        "call": curve.calls[curve.peak] or "the optimizer's step",
        "device": height(device, most) if device <= most else None,
        "device_text": quantity(device, "B"),
        "phases": [(x[number], phase) for phase, number in starts.items() if number is not None],
        "moments": [[round(x[number], 2), total[moment], curve.calls[moment]] for number, moment in enumerate(at)],
        "ticks": [(height(most * part / 4, most), quantity(most * part / 4, "B")) for part in range(1, 5)],
    }


def height(size: float, most: float) -> float:
    """Returns where a number of bytes is in the chart, from the top."""
    return TALL - (TALL - 12) * size / most


def area(x: Sequence[float], below: Sequence[float], above: Sequence[float], most: float) -> str:
    """Returns the path around an area between two curves."""
    top = [f"{at:.1f} {height(size, most):.1f}" for at, size in zip(x, above)]
    bottom = [f"{at:.1f} {height(size, most):.1f}" for at, size in zip(x, below)]
    return f"M{'L'.join(straightened(top))}L{'L'.join(straightened(bottom)[::-1])}Z"


def straightened(points: Sequence[str]) -> list[str]:
    """Returns points without those in the middle of a level stretch."""
    heights = [point.split()[1] for point in points]
    ends = range(len(points))
    return [
        points[at] for at in ends if at in (0, len(points) - 1) or not heights[at - 1] == heights[at] == heights[at + 1]
    ]


def curves(losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns the geometry of the loss curves. A step without a finite loss leaves a gap."""
    values = [loss for run in losses.values() for loss in run if math.isfinite(loss)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = (high - low) or 1.0
    steps = max(map(len, losses.values()))

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - 16) * step / max(1, steps - 1)

    def y(loss: float) -> float:
        return 14 + (HEIGHT - 14 - BOTTOM) * (high - loss) / span

    def path(run: Sequence[float]) -> str:
        text, pen = "", "M"
        for step, loss in enumerate(run):
            text, pen = (f"{text}{pen}{x(step):.1f} {y(loss):.1f}", "L") if math.isfinite(loss) else (text, "M")
        return text

    ticks = [low + span * part / 4 for part in range(5)]
    marks = sorted({1, *(round(steps * part / 5) for part in range(1, 6))} - {0})
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
        "runs": [
            {"name": name, "path": path(run), "pen": PEN[number % len(PEN)], "number": number}
            for number, (name, run) in enumerate(losses.items())
        ],
        "ticks": [(y(tick), f"{tick:.3g}") for tick in ticks],
        "marks": [(x(mark - 1), str(mark)) for mark in marks],
        "difference": f"{largest_difference(list(losses.values())):.2e}",
    }


def largest_difference(runs: Sequence[Sequence[float]]) -> float:
    """Returns the largest relative difference between the first run and any other, over all steps; NaN counts as
    infinite."""
    worst = 0.0
    for run in runs[1:]:
        if len(run) != len(runs[0]):
            return math.inf
        for first, other in zip(runs[0], run):
            apart = abs(first - other) / max(abs(first), 1e-300)
            worst = max(worst, apart if math.isfinite(apart) else math.inf)
    return worst
