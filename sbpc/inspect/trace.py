"""Compares what a step was predicted to do with what it was measured to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sbpc.inspect.report import IDEAL, numberless
from sbpc.inspect.tables import Report, Table, quantity
from sbpc.mesh.mesh import Mesh
from sbpc.plans.staged.staged_timeline import BUBBLE
from sbpc.plans.timeline import COMPUTE, Event, makespan

WORST = 8  # rows of ops that are shown
WAITING = "wait"  # the kind of an event on the computing stream in which a collective is waited for
IDLE = WAITING, BUBBLE  # those of events there in which nothing is computed


@dataclass(frozen=True)
class Row:
    """Seconds of something, predicted and measured."""

    name: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        """measured / predicted, infinite for what is not predicted."""
        return self.measured / self.predicted if self.predicted else math.inf


@dataclass(frozen=True)
class Comparison:
    """A step as predicted and as measured.

    rows: the step, what it computes, what goes over each axis, where there are stages the bubble, and what else of
    the time nothing is computed in. ops: by module (with * for its numbers) and op or collective, those that differ
    most in all seconds, the largest difference first.
    """

    rows: list[Row]
    ops: list[Row]

    @classmethod
    def of(cls, predicted: Sequence[Event], measured: Sequence[Event]) -> Comparison:
        """Compares two timelines."""
        sides = figures(predicted), figures(measured)
        ops = [op_seconds(predicted), op_seconds(measured)]
        return cls(joined(*sides), sorted(joined(*ops), key=lambda row: -abs(row.measured - row.predicted)))

    def report(self, mesh: Mesh, about: Sequence[str] = ()) -> Report:
        """Returns what is told of it. about: lines for the end."""
        tables = [table("a step", self.rows), table("ops that differ most", self.ops[:WORST])]
        ideal = [IDEAL] if mesh.cluster.name == "ideal" else []
        return Report("predicted and measured", tables=tables, below=[*about, *ideal])

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {"step": [*map(asdict, self.rows)], "ops": [*map(asdict, self.ops[:WORST])]}


def figures(events: Sequence[Event]) -> dict[str, float]:
    """Returns the seconds of a step, of its computing, of what goes over each axis, and those in which nothing is
    computed: where it waits for other stages, and the others."""
    whole = makespan(list(events))
    compute = math.fsum(
        event.end - event.start for event in events if event.stream == COMPUTE and event.kind not in IDLE
    )
    waits = [event.end - event.start for event in events if event.kind == BUBBLE]
    bubble = {"bubble: waiting for other stages": math.fsum(waits)} if waits else {}
    by_axis: dict[str, float] = {}
    for event in events:
        if event.stream != COMPUTE:
            name = f"moving data over {event.axis}"
            by_axis[name] = by_axis.get(name, 0.0) + event.end - event.start
    exposed = whole - compute - math.fsum(waits)
    return {
        "a step": whole,
        "computing": compute,
        **dict(sorted(by_axis.items())),
        **bubble,
        "exposed: not computing": exposed,
    }


def op_seconds(events: Sequence[Event]) -> dict[str, float]:
    """Returns seconds by module and op or collective."""
    found: dict[str, float] = {}
    for event in events:
        if event.kind not in IDLE:
            name = f"{numberless(event.module) or 'the model'}: {event.kind}" + (
                f" over {event.axis}" if event.axis else ""
            )
            found[name] = found.get(name, 0.0) + event.end - event.start
    return found


def joined(predicted: dict[str, float], measured: dict[str, float]) -> list[Row]:
    """Returns rows of the names of both, those of the prediction first."""
    names = dict.fromkeys((*predicted, *measured))
    return [Row(name, predicted.get(name, 0.0), measured.get(name, 0.0)) for name in names]


def table(title: str, rows: Sequence[Row]) -> Table:
    """Returns rows as a table."""
    texts = [
        (
            row.name,
            quantity(row.predicted, "s"),
            quantity(row.measured, "s"),
            f"{row.ratio:.3g}" if row.predicted else "",
        )
        for row in rows
    ]
    return Table(title, ("", "predicted", "measured", "ratio"), texts, left=("",))
