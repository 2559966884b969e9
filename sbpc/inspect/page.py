"""Writes a plan as one HTML page that loads nothing: its tables, the picture of its graph, the loss curves of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from rich.table import Table

from sbpc.inspect.picture import clean, graph_svg, template
from sbpc.inspect.report import collective_table, least, parameter_table, si
from sbpc.plans.plan import Plan

WIDTH, HEIGHT, LEFT, BOTTOM = 760.0, 300.0, 56.0, 34.0  # pixels, of the loss curves
PEN = ("solid", "dashed", "dotted")


def picture_html(plan: Plan, losses: Mapping[str, Sequence[float]] | None = None, limit: int = 300) -> str:
    """Returns one page about a plan. losses: by name of a run, the loss of every step. limit: see `graph_svg`."""
    model = str(plan.options.get("model", "model"))
    graph = graph_svg(plan.boxed, plan.mesh, f"{model} on {plan.mesh}: boxed graph", limit)
    page = {
        "model": clean(model),
        "mesh": str(plan.mesh),
        "figures": figures(plan),
        "notes": [clean(note) for note in plan.notes],
        "ideal": plan.mesh.cluster.name == "ideal",
        "tables": [table(parameter_table(plan)), table(collective_table(plan))],
        "graph": Markup(graph),  # made by our template, which has escaped what it was given
        "curves": curves(losses) if losses else None,
    }
    return template("page.html.j2").render(page)


def figures(plan: Plan) -> list[tuple[str, str, str]]:
    """Returns name, number and what it is compared with."""
    cost = plan.cost
    share = cost.flops / cost.flops_one_device if cost.flops_one_device else 0.0
    parts = f"{cost.compute_seconds:.3g} computing, {cost.comm_seconds:.3g} communicating"
    whole = f"{100 * share:.1f} % of one device's {si(cost.flops_one_device).strip()}"
    sent = ", ".join(f"{axis}: {size:,.0f}" for axis, size in cost.bytes_sent.items())
    kinds = ", ".join(f"{si(size)}B {kind}" for kind, size in cost.memory.items() if kind != "total")
    return [
        ("seconds a step", f"{cost.seconds:.3g}", parts),
        ("gap to the bound", f"{100 * cost.gap:.2f} %", f"no plan {least(cost)}"),
        ("flops a rank", si(cost.flops).strip(), whole),
        ("bytes sent a rank", f"{sum(cost.bytes_sent.values()):,.0f}", sent),
        ("peak memory a rank", f"{si(cost.memory['total'])}B", kinds),
    ]


def table(source: Table) -> dict[str, Any]:
    """Returns the title, heads and rows of a table of the report."""
    columns = [[clean(str(cell).replace("\\[", "[")) for cell in column.cells] for column in source.columns]
    return {
        "title": str(source.title),
        "heads": [str(column.header) for column in source.columns],
        "right": [column.justify == "right" for column in source.columns],
        "rows": list(zip(*columns)),
    }


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
        "width": WIDTH, "height": HEIGHT, "left": LEFT,
        "runs": [
            {"name": clean(name), "path": path(run), "pen": PEN[number % len(PEN)], "number": number}
            for number, (name, run) in enumerate(losses.items())
        ],
        "ticks": [(y(tick), f"{tick:.3g}") for tick in ticks], "marks": [(x(mark - 1), str(mark)) for mark in marks],
        "difference": f"{largest_difference(list(losses.values())):.2e}",
    }  # fmt: skip


def largest_difference(runs: Sequence[Sequence[float]]) -> float:
    """Returns the largest relative difference between the first run and any other, over all steps; NaN counts as infinite."""
    worst = 0.0
    for run in runs[1:]:
        if len(run) != len(runs[0]):
            return math.inf
        for first, other in zip(runs[0], run):
            apart = abs(first - other) / max(abs(first), 1e-300)
            worst = max(worst, apart if math.isfinite(apart) else math.inf)
    return worst
