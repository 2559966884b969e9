"""What differs between two plans of one model: layouts, collectives by module and axis, seconds, bytes and memory
side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbpc.boxing.steps import wire
from sbpc.errors import PlanError
from sbpc.graph.operands import value_of
from sbpc.graph.ports import INPUT, PARAMETER, placeholders
from sbpc.inspect.report import collective_of, numberless, some, transfers
from sbpc.inspect.tables import Report, Table, quantity
from sbpc.mesh.layout import Layout
from sbpc.mesh.states import B
from sbpc.plans.options import BYTES
from sbpc.plans.plan import Plan

SHOWN = 20  # rows of values and of collectives in the text; all others are counted in a last row
CLOSE = 1e-9  # figures that differ by a smaller fraction are equal
ASKED = (  # options that are compared
    "objective",
    "memory",
    "optimizer",
    "dtype",
    "train",
    "spread",
    "baseline",
    "stages",
    "schedule",
    "microbatches",
    "panels",
    "slices",
    "recompute",
    "reduce",
    "masters",
    "gather",
    "capacity",
    "overflow",
    "routing",
    "pin",
)


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind for one module (with * for its numbers), how many there are and what they send in
    either plan."""

    module: str
    phase: str
    collective: str
    axis: str
    counts: tuple[int, int]
    bytes_sent: tuple[float, float]


@dataclass(frozen=True)
class Diff:
    """What differs between two plans of one model; `print` tells it, and it is true where anything differs.

    asked: mesh, cluster and options. figures: name, unit and numbers of either plan. parameters, values: by name,
    the layouts of either plan where these differ, None where one lacks it. modules: of values. collectives: those
    that are not the same.
    """

    asked: dict[str, tuple[str, str]]
    figures: tuple[tuple[str, str, float, float], ...]
    parameters: dict[str, tuple[str | None, str | None]]
    values: dict[str, tuple[str | None, str | None]]
    modules: dict[str, str] = field(repr=False)
    collectives: tuple[Traffic, ...]

    def __bool__(self) -> bool:
        changed = any(not math.isclose(one, other, rel_tol=CLOSE) for *_, one, other in self.figures)
        return bool(changed or self.asked or self.parameters or self.values or self.collectives)

    @property
    def report(self) -> Report:
        """The differences as tables."""
        if not self:
            return Report("the plans are the same: layouts, collectives, seconds, bytes and memory")
        asked = [[name, *both] for name, both in self.asked.items()]
        figures = [
            [name, quantity(one, unit), quantity(other, unit), change(one, other, unit)]
            for name, unit, one, other in self.figures
        ]
        tables = [
            Table("asked", ("", "A", "B"), asked, ("", "A", "B")),
            Table("figures", ("", "A", "B", "B - A"), figures, ("",)),
            layout_table(
                "parameters laid out otherwise", ((name, name, both) for name, both in self.parameters.items())
            ),
            layout_table(
                "values laid out otherwise", ((self.modules[name], name, both) for name, both in self.values.items())
            ),
            traffic_table(self.collectives),
        ]
        return Report("two plans, A and B", (), [table for table in tables if table.rows])

    def as_json(self) -> dict[str, Any]:
        """Returns what `sbpc diff --json` prints."""
        return {
            "same": not self,
            "asked": self.asked,
            "parameters": self.parameters,
            "values": self.values,
            "figures": {name: [one, other] for name, _, one, other in self.figures},
            "collectives": [vars(each) for each in self.collectives],
        }

    def __str__(self) -> str:
        return self.report.text()

    def _repr_html_(self) -> str:
        return self.report.html()


def diff(one: Plan, other: Plan) -> Diff:
    """Returns what differs between two plans. Raises PlanError if they are of different models.

    Of plans of which one alone has stages, values are not compared: the other has them for the whole batch, not for
    a micro-batch.
    """
    if not isinstance(other, Plan):
        raise PlanError(f"a plan is compared with a {type(other).__name__}\n  Give another plan of the same model.")
    if not one.parameters.keys() & other.parameters.keys() and one.parameters.keys() | other.parameters.keys():
        raise PlanError(
            "the plans are of different models: no parameter has the same name\n  Compare plans of one model."
        )
    plans = one, other
    alike = one.inner.axes == other.inner.axes
    both = (one.loop is None) == (other.loop is None)
    values, modules = zip(*(value_layouts(plan, alike) if both else ({}, {}) for plan in plans))
    homes = [{name: text(home, alike) for name, home in plan.parameters.items()} for plan in plans]
    asked = {
        name: (mine, asked_of(other)[name]) for name, mine in asked_of(one).items() if mine != asked_of(other)[name]
    }
    return Diff(
        asked,
        tuple(figures(one, other)),
        differing(homes),
        differing(values),
        {**modules[1], **modules[0]},
        tuple(traffic(one, other)),
    )


def asked_of(plan: Plan) -> dict[str, str]:
    """Returns what was asked for, by name, as texts."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in zip(plan.mesh.axes, plan.mesh.sizes))
    asked = {name: getattr(plan.options, name) for name in ASKED}
    options = {name: "" if value in (None, {}, False) else str(value) for name, value in asked.items()}
    if asked["memory"]:
        options["memory"] = quantity(asked["memory"], "B")
    return {"model": plan.options.model, "mesh": mesh, "cluster": plan.mesh.cluster.name, **options}


def text(layout: Layout, alike: bool) -> str:
    """Returns a layout as a text; on meshes that are not `alike` in their axes, what is whole on every rank is the
    same."""
    return str(layout) if alike or any(state != B for state in layout.states) else "whole"


def value_layouts(plan: Plan, alike: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Returns layouts (see `text`) and modules of all values but parameters, by name."""
    layouts: dict[str, str] = {}
    modules: dict[str, str] = {}
    for each in plan.chunks:
        stored = {node for port, node in placeholders(each.graph).items() if port.kind == PARAMETER}
        for node in each.graph.graph.nodes:
            # made by one chunk, read by others
            if node not in stored and node.name in each.layouts and node.name not in layouts:
                layouts[node.name] = text(each.layouts[node.name], alike)
                modules[node.name] = str(
                    value_of(node)[0].meta.get("module", INPUT if node.op == "placeholder" else "")
                )
    return layouts, modules


def differing(both: Sequence[dict[str, str]]) -> dict[str, tuple[str | None, str | None]]:
    """Returns, by name, what two dicts hold where that differs."""
    one, other = both
    return {name: (one.get(name), other.get(name)) for name in {**one, **other} if one.get(name) != other.get(name)}


def figures(one: Plan, other: Plan) -> Iterator[tuple[str, str, float, float]]:
    """Yields name, unit, and the numbers of either plan."""
    mine, others = one.cost, other.cost
    for name, key in (("a step", ""), ("computing", "compute_"), ("communicating", "comm_"), ("exposed", "exposed_")):
        yield name, "s", getattr(mine, f"{key}seconds"), getattr(others, f"{key}seconds")
    if mine.bubble_seconds or others.bubble_seconds:
        yield "bubble", "s", mine.bubble_seconds, others.bubble_seconds
    yield "lower bound", "B" if mine.objective == BYTES else "s", mine.lower_bound, others.lower_bound
    yield "flops", "", mine.flops, others.flops
    for axis in {**mine.bytes_sent, **others.bytes_sent}:
        yield f"sent over {axis}", "B", mine.bytes_sent.get(axis, 0.0), others.bytes_sent.get(axis, 0.0)
    for kind in mine.memory:
        yield "peak memory" if kind == "total" else kind, "B", mine.memory[kind], others.memory[kind]


def traffic(one: Plan, other: Plan) -> Iterator[Traffic]:
    """Yields the collectives that are not the same in both plans, the largest difference of bytes first."""
    counted = [traffic_of(plan) for plan in (one, other)]
    rows = [
        Traffic(*key, *zip(*(each.get(key, (0, 0.0)) for each in counted)))  # type: ignore[arg-type]
        for key in {**counted[0], **counted[1]}
        if counted[0].get(key) != counted[1].get(key)
    ]
    yield from sorted(rows, key=lambda row: -abs(row.bytes_sent[0] - row.bytes_sent[1]))


def traffic_of(plan: Plan) -> dict[tuple[str, str, str, str], tuple[int, float]]:
    """Returns, by module (with * for numbers), phase, collective and axis, how many collectives there are and what a
    rank sends.

    Of a plan with stages these are the collectives within its stages.
    """
    mesh = plan.inner
    found: dict[tuple[str, str, str, str], tuple[int, float]] = {}
    for node, moved, times in transfers(plan):
        module, phase = numberless(str(node.meta.get("module", ""))), str(node.meta.get("phase", "forward"))
        key = module, phase, collective_of(node, moved), mesh.key(moved.step.axes)
        count, sent = found.get(key, (0, 0.0))
        each = wire(moved.step, moved.shape, moved.itemsize, mesh.sizes)[1]
        found[key] = count + times, sent + times * float(each)
    return found


def layout_table(title: str, rows: Iterable[tuple[str, str, tuple[str | None, str | None]]]) -> Table:
    """Returns the table of layouts that differ: rows of a place, a name and both layouts. Equal blocks are one line."""
    groups: dict[tuple[str, str | None, str | None], list[str]] = {}
    for place, _, both in rows:
        groups.setdefault((numberless(place), *both), []).append(place)
    lines = [
        [folded(pattern, places), str(len(places)), one or "-", other or "-"]
        for (pattern, one, other), places in groups.items()
    ]
    if len(lines) > SHOWN:
        rest = sum(int(line[1]) for line in lines[SHOWN:])
        lines = [*lines[:SHOWN], [f"{len(lines) - SHOWN} more rows", str(rest), "", ""]]
    return Table(f"{title}: {sum(map(len, groups.values()))}", ("where", "count", "A", "B"), lines, ("where", "A", "B"))


def folded(pattern: str, places: Sequence[str]) -> str:
    """Returns the name of places that differ only in their numbers."""
    apart = list(dict.fromkeys(places))
    return (apart[0] if len(apart) == 1 else some(apart) if "..." not in some(apart) else pattern) or "the model"


def traffic_table(rows: Sequence[Traffic]) -> Table:
    """Returns the table of collectives that are not the same."""
    lines = [
        [
            each.module or "the model",
            each.phase,
            f"{each.collective} over {each.axis}",
            *(
                f"{count} x, {quantity(sent, 'B')}" if count else "-"
                for count, sent in zip(each.counts, each.bytes_sent)
            ),
            quantity(each.bytes_sent[1] - each.bytes_sent[0], "B", sign=True),
        ]
        for each in rows[:SHOWN]
    ]
    if len(rows) > SHOWN:
        rest = sum(each.bytes_sent[1] - each.bytes_sent[0] for each in rows[SHOWN:])
        lines.append([f"{len(rows) - SHOWN} more rows", "", "", "", "", quantity(rest, "B", sign=True)])
    heads = ("module", "phase", "collective", "A", "B", "B - A")
    return Table("collectives that differ", heads, lines, ("module", "phase", "collective"))


def change(one: float, other: float, unit: str) -> str:
    """Returns a difference, with its part of the first number."""
    if math.isclose(one, other, rel_tol=CLOSE):
        return "="
    share = f" ({100 * (other - one) / one:+.3g} %)" if one else ""
    return quantity(other - one, unit, sign=True) + share
