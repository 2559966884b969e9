"""A plan as text for people: layouts by parameter, collectives by axis, seconds, memory, how good it is."""

from __future__ import annotations

from collections import Counter
from io import StringIO
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from sbpc.boxing import wire

if TYPE_CHECKING:
    from sbpc.plan import Plan


IDEAL = (
    "cluster   'ideal': a byte costs as much as a flop. It predicts no real machine; name one (h100, or a file),\n"
    "          or measure yours with `sbpc profile` once that is there"
)


def plan_text(plan: Plan, width: int = 110) -> str:
    """The report of a plan as plain text."""
    out = StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, legacy_windows=False)
    print_plan(plan, console)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def print_plan(plan: Plan, console: Console) -> None:
    """The report of a plan on a terminal."""
    cost, mesh = plan.cost, plan.mesh
    console.print(f"[bold]{plan.options.get('model', 'model')}[/] on {mesh}: {mesh.ranks} ranks", highlight=False)
    console.print(parameter_table(plan))
    console.print(collective_table(plan))
    share = 100 * cost.flops / cost.flops_one_device if cost.flops_one_device else 0.0
    pinned = " with these pins" if plan.options.get("pin") else ""
    whole = f"one device's {si(cost.flops_one_device)} (1/{mesh.ranks} is {100 / mesh.ranks:.1f} %)"
    lines = [
        f"seconds   {cost.seconds:.3g} a step: {cost.compute_seconds:.3g} computing, {cost.comm_seconds:.3g} communicating",
        f"proof     no plan{pinned} takes less than {cost.lower_bound:.3g} s: the gap is {100 * cost.gap:.2f} %",
        f"flops     {si(cost.flops)} a rank, {share:.1f} % of {whole}",
        "memory    " + ", ".join(f"{si(size)}B {kind}" for kind, size in cost.memory.items()),
    ]
    if mesh.cluster.name == "ideal":
        lines.append(IDEAL)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for note in plan.notes:
        console.print(f"[bold red]LOUD[/]      {note}", highlight=False, soft_wrap=True)


def parameter_table(plan: Plan) -> Table:
    """Parameters with their shapes and homes; those that differ only in numbers of layers are one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    shapes = {port.name: node.meta["val"] for port, node in zip(plan.ports.inputs, plan.graph.graph.nodes)}
    for name, layout in plan.parameters.items():
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        shape = ", ".join(map(str, shapes[name].shape))
        rows.setdefault((pattern, f"[{shape}]", str(layout)), []).append(name)
    table = Table(title="parameters", title_justify="left", box=None, pad_edge=False)
    for title in ("name", "shape", "home layout", "count"):
        table.add_column(title, justify="right" if title == "count" else "left")
    for (pattern, shape, home), names in rows.items():
        table.add_row(names[0] if len(names) == 1 else pattern, escape(shape), escape(home), str(len(names)))
    return table


def escape(text: str) -> str:
    """Text whose brackets rich takes as they are."""
    return text.replace("[", "\\[")


def collective_table(plan: Plan) -> Table:
    """Collectives by axis with how many there are and the bytes that a rank sends."""
    count: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for transfer, times in plan.cost.transfers:
        step = transfer.step
        key = plan.mesh.key(step.axes), step.collective
        count[key] += times
        sent[key] += times * float(wire(step, transfer.shape, transfer.itemsize, plan.mesh.sizes)[1])  # type: ignore[assignment]
    table = Table(title="collectives", title_justify="left", box=None, pad_edge=False)
    for title in ("axis", "collective", "count", "bytes sent per rank"):
        table.add_column(title, justify="right" if title in ("count", "bytes sent per rank") else "left")
    for key in sorted(count):
        table.add_row(*key, str(count[key]), f"{sent[key]:,.0f}")
    if not count:
        table.add_row("none", "", "", "0")
    return table


def si(number: float) -> str:
    """A number with a decimal prefix: 12.3 M."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g} {prefix}"
    return f"{number:.3g} "


def plan_json(plan: Plan) -> dict[str, Any]:
    """The report as JSON values."""
    cost = plan.cost
    return {
        "mesh": dict(zip(plan.mesh.axes, plan.mesh.sizes)),
        "cluster": plan.mesh.cluster.name,
        "parameters": {name: str(layout) for name, layout in plan.parameters.items()},
        "seconds": cost.seconds,
        "compute_seconds": cost.compute_seconds,
        "comm_seconds": cost.comm_seconds,
        "lower_bound": cost.lower_bound,
        "gap": cost.gap,
        "flops": cost.flops,
        "flops_one_device": cost.flops_one_device,
        "bytes_sent": cost.bytes_sent,
        "memory": cost.memory,
        "formula": str(cost.expr),
        "times": plan.times,
        "notes": list(plan.notes),
    }
