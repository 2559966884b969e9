"""What a page tells of stages: the schedule with its bubbles, memory by stage, chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sbpc.inspect.picture import clean
from sbpc.inspect.report import span_of
from sbpc.inspect.tables import quantity
from sbpc.plans.plan import Plan
from sbpc.plans.staged.pipeline_cost import RUNS
from sbpc.plans.staged.schedules import BACKWARD, FORWARD, WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, BEFORE
from sbpc.plans.staged.staged_timeline import actions_of, measured_actions
from sbpc.plans.timeline import Event, makespan

WIDE, LANE, BAR = 1200.0, 34.0, 26.0  # units of the schedule's picture: its width, from stage to stage, and of a bar
ONCE = {BEFORE: "what is done before the loop", AFTER: "what is done after the loop"}
ROOM = 16.0  # units of a bar in which a number can be read


def schedule(plan: Plan, measured: Sequence[Event] = ()) -> dict[str, Any]:
    """Returns the schedule: a lane for each stage, bars with the number of the micro-batch; where there is none is a
    bubble.

    measured: the events of a step that rank 0 ran, whose lane is the last.
    """
    sides = {f"stage {stage}": list(actions_of(plan, stage)) for stage in range(plan.stages)}
    if measured:
        sides["rank 0"] = list(measured_actions(plan, 0, measured))
    whole = max(plan.cost.seconds, makespan(list(measured))) or 1.0
    lanes = [{"y": LANE * row + (LANE - BAR) / 2, "name": name} for row, name in enumerate(sides)]
    bars = [
        bar(plan, event, lane["y"], WIDE / whole) for lane, events in zip(lanes, sides.values()) for event in events
    ]
    ticks = [quantity(whole * part / 10, "s") for part in range(11)]
    return {
        "width": WIDE,
        "height": LANE * len(lanes),
        "bar": BAR,
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


def stage_memory(plan: Plan) -> list[dict[str, Any]]:
    """Returns by stage its bytes by kind, as percents of those of the busiest stage."""
    by_stage = [plan.memory_of(stage) for stage in range(plan.stages)]
    most = max(each["total"] for each in by_stage) or 1
    return [
        {
            "total": quantity(each["total"], "B"),
            "parts": [(kind, quantity(size, "B"), 100 * size / most) for kind, size in each.items() if kind != "total"],
        }
        for each in by_stage
    ]


def chunk_row(plan: Plan, at: int) -> dict[str, Any]:
    """Returns a chunk as the template draws it."""
    chunk, part = plan.chunks[at], plan.chunk_costs[at]
    return {
        "number": at,
        "stage": plan.owners[at],
        "modules": clean(span_of(chunk)),
        "bytes": quantity(sum(part.homes.values()), "B"),
        "forward": quantity(part.program(RUNS[FORWARD]).seconds, "s"),
        "backward": quantity(part.program(RUNS[BACKWARD]).seconds, "s"),
        "receives": clean(", ".join(chunk.receives.values())),
        "sends": clean(", ".join(chunk.sends.values())),
    }
