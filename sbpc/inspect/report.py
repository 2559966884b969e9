"""Reports a plan to people: layouts by parameter, collectives by axis, seconds, memory, how good it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from sbpc.boxing.steps import wire
from sbpc.inspect.tables import Report, Table, quantity
from sbpc.plans.cost import Cost
from sbpc.plans.plan import Plan

IDEAL = (
    "cluster   'ideal': a byte costs as much as a flop. It predicts no real machine; name one (h100, or a file),\n"
    "          or measure yours with `sbpc profile`"
)


def plan_text(plan: Plan, width: int = 110) -> str:
    """Returns the report of a plan as plain text."""
    out = StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    print_plan(plan, console)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def recompute_lines(cost: Cost) -> list[str]:
    """Returns a line about what is computed again, none if nothing is."""
    share = 100 * cost.recompute_seconds / cost.compute_seconds if cost.compute_seconds else 0.0
    again = f"recompute {cost.recompute_seconds:.3g} seconds of computing, {share:.1f} % of it, make values of the forward again"
    return [again] if cost.recompute_seconds else []


def print_plan(plan: Plan, console: Console) -> None:
    """Prints the report of a plan on a terminal."""
    cost, mesh = plan.cost, plan.mesh
    console.print(f"[bold]{escape(plan.options.model)}[/] on {escape(str(mesh))}: {mesh.ranks} ranks", highlight=False)
    console.print(parameter_table(plan))
    console.print(collective_table(plan))
    share = 100 * cost.flops / cost.flops_one_device if cost.flops_one_device else 0.0
    pinned = " with these pins" if plan.options.pin else ""
    whole = f"one device's {quantity(cost.flops_one_device, '')} (1/{mesh.ranks} is {100 / mesh.ranks:.1f} %)"
    lines = [
        f"seconds   {cost.seconds:.3g} a step: {cost.compute_seconds:.3g} computing, {cost.comm_seconds:.3g} communicating"
        + ("" if cost.makespan is None else f", {cost.exposed_seconds:.3g} of them exposed"),
        *recompute_lines(cost),
        f"proof     no plan{pinned} {least(cost)}: the gap is {100 * cost.gap:.2f} %"
        + ("" if cost.makespan is None else f", {100 * cost.serial_gap:.2f} % where nothing overlaps"),
        f"flops     {quantity(cost.flops, '')} a rank, {share:.1f} % of {whole}",
        "memory    " + ", ".join(f"{quantity(size, 'B')} {kind}" for kind, size in cost.memory.items()),
    ]
    if cost.memory["total"] > mesh.cluster.memory:
        device = f"a device of {mesh.cluster.name!r} has {quantity(mesh.cluster.memory, 'B')}"
        lines.append(f"          {device}: ask for a plan that fits with memory={mesh.cluster.memory:g}")
    if mesh.cluster.name == "ideal":
        lines.append(IDEAL)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for note in plan.notes:
        console.print(f"[bold red]LOUD[/]      {escape(note)}", highlight=False, soft_wrap=True)
    for remark in plan.remarks:
        console.print(f"note      {escape(remark)}", highlight=False, soft_wrap=True)


def plan_html(plan: Plan) -> str:
    """Returns the report of a plan for a notebook."""
    cost = plan.cost
    tables = [titled(parameter_table(plan)), titled(collective_table(plan))]
    parts = f"computing {quantity(cost.compute_seconds, 's')}, communicating {quantity(cost.comm_seconds, 's')}"
    held = ", ".join(f"{quantity(size, 'B')} {kind}" for kind, size in cost.memory.items())
    lines = [f"a step takes {quantity(cost.seconds, 's')}: {parts}; the gap to the bound is {100 * cost.gap:.2f} %", f"memory: {held}"]
    return Report(f"{plan.options.model} on {plan.mesh}", [*lines, *recompute_lines(cost), *plan.notes], tables).html()


def titled(source: RichTable) -> Table:
    """Returns a table of the report as rows of texts."""
    columns = [[str(cell).replace("\\[", "[") for cell in column.cells] for column in source.columns]
    left = tuple(str(column.header) for column in source.columns if column.justify == "left")
    return Table(str(source.title), tuple(str(column.header) for column in source.columns), list(zip(*columns)), left)


def least(cost: Cost) -> str:
    """Returns what no plan does, by the bound."""
    if cost.objective == "bytes":
        return f"sends less than {cost.lower_bound:,.0f} bytes a rank"
    return f"takes less than {cost.lower_bound:.3g} s"


def parameter_table(plan: Plan) -> RichTable:
    """Returns parameters with their shapes and homes. Those that differ only in numbers of layers are one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    alike: Counter[str] = Counter()
    shapes = {port.name: value for port, value in plan.shapes.items()}
    for name, layout in plan.parameters.items():
        pattern = numberless(name)
        shape = ", ".join(map(str, shapes[name].shape))
        rows.setdefault((pattern, f"[{shape}]", str(layout)), []).append(name)
        alike[pattern] += 1
    table = RichTable(title="parameters", title_justify="left", box=None, pad_edge=False)
    for title in ("name", "shape", "home layout", "count"):
        justify: Any = "right" if title == "count" else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=title != "name")
    for (pattern, shape, home), names in rows.items():
        name = pattern if len(names) == alike[pattern] > 1 else some(names)
        table.add_row(escape(name), escape(shape), escape(home), str(len(names)))
    return table


def numberless(name: str) -> str:
    """Returns a qualified name with * in place of its numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def some(names: Sequence[str]) -> str:
    """Returns names that differ only in their numbers as one.

    >>> some(["blocks.0.up.weight", "blocks.1.up.weight", "blocks.2.up.weight", "blocks.5.up.weight"])
    'blocks.{0-2,5}.up.weight'
    """
    columns = [list(dict.fromkeys(column)) for column in zip(*(name.split(".") for name in names))]
    if math.prod(map(len, columns)) != len(names):
        return f"{names[0]}, ..., {names[-1]}"
    return ".".join(column[0] if len(column) == 1 else "{" + spans(map(int, column)) + "}" for column in columns)


def spans(numbers: Iterable[int]) -> str:
    """Returns numbers as text with their runs: `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def collectives(plan: Plan) -> dict[tuple[str, str], tuple[int, float]]:
    """Returns by axis and collective how many there are, and the bytes that a rank sends."""
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for transfer, times in plan.cost.transfers:
        step = transfer.step
        key = plan.mesh.key(step.axes), step.collective
        _, each = wire(step, transfer.shape, transfer.itemsize, plan.mesh.sizes)
        count, sent = totals.get(key, (0, 0.0))
        totals[key] = count + times, sent + times * float(each)  # type: ignore[arg-type]
    return dict(sorted(totals.items()))


def collective_table(plan: Plan) -> RichTable:
    """Returns the table of collectives by axis, with how many there are and the bytes that a rank sends."""
    table = RichTable(title="collectives", title_justify="left", box=None, pad_edge=False)
    for title in ("axis", "collective", "count", "bytes sent per rank"):
        table.add_column(title, justify="right" if title in ("count", "bytes sent per rank") else "left")
    for key, (count, sent) in collectives(plan).items():
        table.add_row(*key, str(count), f"{sent:,.0f}")
    if not table.rows:
        table.add_row("none", "", "", "0")
    return table


def plan_json(plan: Plan) -> dict[str, Any]:
    """Returns the report as JSON values."""
    cost = plan.cost
    figures = (
        "seconds", "compute_seconds", "comm_seconds", "exposed_seconds", "lower_bound", "gap", "serial_gap", "flops",
        "flops_one_device", "bytes_sent", "recompute_seconds",
    )  # fmt: skip
    return {
        "mesh": dict(zip(plan.mesh.axes, plan.mesh.sizes)),
        "cluster": plan.mesh.cluster.name,
        "parameters": {name: str(layout) for name, layout in plan.parameters.items()},
        **{name: getattr(cost, name) for name in figures},
        "collectives": [
            {"axis": axis, "collective": name, "count": count, "bytes_sent": sent}
            for (axis, name), (count, sent) in collectives(plan).items()
        ],
        "memory": cost.memory,
        "formula": str(cost.expr),
        "times": plan.times,
        "notes": list(plan.notes),
        "remarks": list(plan.remarks),
    }
