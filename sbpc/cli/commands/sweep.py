"""Define `sbpc sweep`: plan a model on every mesh of a number of devices."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import Progress

from sbpc.api.candidates import EXPERT, Refused
from sbpc.api.strategies import StrategyRow
from sbpc.api.sweep import SweepRow, sweep
from sbpc.cli.options import ON_A_MESH, add_planning, cluster_of, positive, target_of
from sbpc.cli.output import print_json, quiet
from sbpc.cli.target import split_target
from sbpc.inspect.tables import Table, quantity
from sbpc.plans.options import NONE, RECOMPUTE
from sbpc.plans.usage import Usage

NAME = "sweep"
OF_EXPERTS = "capacity", "overflow", "routing"
HELP = "rank every mesh of a number of devices by the plan found on it"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("target", metavar="TARGET", help="file.py:function")
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="how many ranks")
    parser.add_argument("--axes", type=int, default=4, metavar="N", help="axes of a mesh at most (default: 4)")
    parser.add_argument("--objective", choices=("seconds", "bytes"), default="seconds", help="(default: seconds)")
    parser.add_argument("--spread", action="store_true", help="store inputs, parameters and outputs exactly once")
    stages = "search stages of a pipeline, too: rows are then whole strategies on the axes pipe, data and tensor"
    parser.add_argument("--stages", action="store_true", help=stages)
    parser.add_argument("--microbatches", action="store_true", help="search numbers of micro-batches, too")
    parser.add_argument(
        "--recompute", choices=RECOMPUTE, default=NONE, help="what the backward computes again (default: none)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="CPU seconds of a search of strategies (default: 45), or of good plans",
    )
    for name in OF_EXPERTS:
        parser.add_argument(f"--{name}", **ON_A_MESH[name])
    parser.add_argument("--top", type=positive, default=10, metavar="N", help="how many meshes to print (default: 10)")
    add_planning(parser, mesh=False)


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc sweep`."""
    split_target(options.target)
    names = (
        "devices",
        "axes",
        "objective",
        "spread",
        "memory",
        "optimizer",
        "stages",
        "microbatches",
        "recompute",
        "seconds",
    )
    asked: dict[str, Any] = {name: getattr(options, name) for name in names}
    asked |= {name: given for name in OF_EXPERTS if (given := getattr(options, name)) is not None}
    asked |= {"cluster": cluster_of(options), "train": not options.no_train}
    with quiet(options), Progress(console=Console(stderr=True), transient=True) as bar:
        built = target_of(options, options.target)
        task = bar.add_task("capturing", total=None)
        rows = sweep(
            built.model,
            built.args,
            kwargs=built.kwargs,
            dtype=built.dtype,
            **asked,
            progress=lambda done, total, mesh: bar.update(task, completed=done, total=total, description=str(mesh)),
        )
    if options.json:
        refused = [refused_json(each) for each in rows[0].refused] if isinstance(rows[0], StrategyRow) else None
        print_json({"rows": [row_json(row) for row in rows]} | ({} if refused is None else {"refused": refused}))
        return 0
    if isinstance(rows[0], StrategyRow):
        print(*strategies_table(rows[: options.top]).lines(), sep="\n")
        bound = f"none takes less than {rows[0].lower_bound:.3g} s"
        axes = "stages x data x tensor"
        if any(EXPERT in row.mesh.axes for row in rows[: options.top]):
            axes += f", or {EXPERT}s beyond a node"
        print(f"{len(rows)} strategies looked at; {bound}. A mesh is {axes}.")
        print(*refused_lines(rows[0].refused), sep="\n", end="\n" if rows[0].refused else "")
        return 0
    print(*table(rows[: options.top]).lines(), sep="\n")
    quick = sum(row.quick for row in rows)
    more = f", {quick} of which have a quick plan" if quick else ""
    print(f"{len(rows)} meshes of {options.devices} ranks{more}")
    return 0


def row_json(row: SweepRow | StrategyRow) -> dict[str, Any]:
    """Returns a mesh and its cost, or a strategy and what it is made of, as JSON values."""
    if isinstance(row, StrategyRow):
        seconds = (
            "compute_seconds",
            "exposed_seconds",
            "bubble_seconds",
            "recompute_seconds",
            "optimizer_seconds",
            "lower_bound",
        )
        asked = ("stages", "schedule", "microbatches", "recompute", "cost", *seconds, "memory")
        told = {name: getattr(row, name) for name in asked}
        return {"mesh": dict(zip(row.mesh.axes, row.mesh.sizes)), **told, **usage_json(row.usage)}
    cost = row.plan.cost
    return {
        "mesh": dict(zip(row.mesh.axes, row.mesh.sizes)),
        "cost": row.cost,
        "quick": row.quick,
        "seconds": cost.seconds,
        "optimizer_seconds": cost.optimizer_seconds,
        **usage_json(row.plan.usage),
        "gap": cost.gap,
        "bytes_sent": cost.bytes_sent,
        "memory": cost.memory,
    }


def usage_json(usage: Usage | None) -> dict[str, Any]:
    """Returns the share of the peak, and tokens or samples a second a device, as JSON."""
    return {"usage": None if usage is None else asdict(usage)}


def refused_json(each: Refused) -> dict[str, Any]:
    """Returns a strategy without a row and the reason, as JSON values."""
    asked = ("schedule", "microbatches", "reason", "needed")
    return {"mesh": dict(zip(each.mesh.axes, each.mesh.sizes)), **{name: getattr(each, name) for name in asked}}


def refused_lines(refused: Sequence[Refused]) -> list[str]:
    """Returns a line for each reason for which strategies have no row: how many, and the first of them."""
    groups: dict[str, list[Refused]] = {}
    for each in refused:
        groups.setdefault(each.reason, []).append(each)
    lines = []
    for reason, group in groups.items():
        first = min(group, key=lambda each: each.needed or 0)
        which = f"{'x'.join(map(str, first.mesh.sizes))} {first.schedule}, {first.microbatches} parts"
        which += f", takes {quantity(first.needed, 'B')} a rank" if first.needed else ""
        lines.append(f"{len(group)} without a row, as {reason}: {which}{', and others' if len(group) > 1 else ''}")
    return lines


RATES = ("MFU", "a second, a device")


def rates(usage: Usage | None) -> tuple[str, str]:
    """Returns the cells of RATES."""
    return ("", "") if usage is None else (f"{100 * usage.mfu:.1f} %", f"{quantity(usage.rate, '')} {usage.unit}")


def table(rows: list[SweepRow]) -> Table:
    """Returns a table of the best meshes."""
    texts = []
    for row in rows:
        cost = row.plan.cost
        sent = quantity(sum(cost.bytes_sent.values()), "B")
        mesh = ",".join(f"{name}={size}" for name, size in zip(row.mesh.axes, row.mesh.sizes))
        seconds = f"{cost.step_seconds:.3g}", f"{cost.comm_seconds:.3g}"
        held, gap = quantity(cost.memory["total"], "B"), f"{100 * cost.gap:.2f} %"
        texts.append((mesh, *seconds, sent, held, gap, *rates(row.plan.usage)))
    heads = ("mesh", "seconds", "communicating", "bytes sent", "memory", "gap", *RATES)
    return Table("", heads, texts, left=("mesh",))


def strategies_table(rows: list[StrategyRow]) -> Table:
    """Returns a table of the best strategies."""
    again = any(row.recompute != NONE for row in rows)
    names = (
        "mesh",
        "schedule",
        "parts",
        *(["recompute"] if again else []),
        "seconds",
        "compute",
        "exposed",
        "bubble",
        "memory",
        *RATES,
    )
    texts = []
    for row in rows:
        figures = [f"{each:.2g}" for each in (row.compute_seconds, row.exposed_seconds, row.bubble_seconds)]
        asked = (
            "x".join(map(str, row.mesh.sizes)),
            row.schedule,
            str(row.microbatches),
            *([row.recompute] if again else []),
        )
        held = quantity(row.memory["total"], "B")
        texts.append((*asked, f"{row.cost:.3g}", *figures, held, *rates(row.usage)))
    return Table("", names, texts, left=("mesh", "schedule", "recompute"))
