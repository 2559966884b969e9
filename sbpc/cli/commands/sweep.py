"""Define `sbpc sweep`: plan a model on every mesh of a number of devices."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sbpc.api.sweep import SweepRow, sweep
from sbpc.cli.options import add_planning, cluster_of, positive, target_of
from sbpc.cli.output import print_json, quiet, table_of
from sbpc.cli.target import split_target
from sbpc.inspect.report import si

NAME = "sweep"
HELP = "rank every mesh of a number of devices by the plan found on it"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("target", metavar="TARGET", help="file.py:function")
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="how many ranks")
    parser.add_argument("--axes", type=int, default=4, metavar="N", help="axes of a mesh at most (default: 4)")
    parser.add_argument("--objective", choices=("seconds", "bytes"), default="seconds", help="(default: seconds)")
    parser.add_argument("--spread", action="store_true", help="store inputs, parameters and outputs exactly once")
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="how many meshes to print (default: 10)")
    add_planning(parser, mesh=False)


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc sweep`."""
    split_target(options.target)
    names = ("devices", "axes", "objective", "spread", "memory", "optimizer")
    asked: dict[str, Any] = {name: getattr(options, name) for name in names}
    asked |= {"cluster": cluster_of(options), "train": not options.no_train}
    with quiet(options), Progress(console=Console(stderr=True), transient=True) as bar:
        built = target_of(options, options.target)
        task = bar.add_task("capturing", total=None)
        rows = sweep(
            built.model, built.args, kwargs=built.kwargs, dtype=built.dtype, **asked,
            progress=lambda done, total, mesh: bar.update(task, completed=done, total=total, description=str(mesh)),
        )  # fmt: skip
    if options.json:
        print_json({"rows": [row_json(row) for row in rows]})
        return 0
    console = Console()
    console.print(table(rows[: options.top]))
    console.print(f"{len(rows)} meshes of {options.devices} ranks", highlight=False)
    return 0


def row_json(row: SweepRow) -> dict[str, Any]:
    """Returns a mesh and its cost as JSON values."""
    cost = row.plan.cost
    return {
        "mesh": dict(zip(row.mesh.axes, row.mesh.sizes)),
        "cost": row.cost,
        "seconds": cost.seconds,
        "gap": cost.gap,
        "bytes_sent": cost.bytes_sent,
        "memory": cost.memory,
    }


def table(rows: list[SweepRow]) -> Table:
    """Returns a table of the best meshes."""
    made = table_of(("mesh", "seconds", "communicating", "bytes sent", "memory", "gap"), left=("mesh",))
    for row in rows:
        cost = row.plan.cost
        sent = f"{si(sum(cost.bytes_sent.values()))}B"
        mesh = ",".join(f"{name}={size}" for name, size in zip(row.mesh.axes, row.mesh.sizes))
        seconds = f"{cost.seconds:.3g}", f"{cost.comm_seconds:.3g}"
        made.add_row(mesh, *seconds, sent, f"{si(cost.memory['total'])}B", f"{100 * cost.gap:.2f} %")
    return made
