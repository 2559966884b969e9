"""A graph as a picture: one row per value, its layout as coloured chips, what is boxed and what that sends."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from torch.fx import GraphModule

from sbpc.inspect.graph_rows import Fold, Row, fold, graph_rows
from sbpc.inspect.graph_rows import moved as moved_states
from sbpc.mesh.mesh import Mesh

__all__ = ["Fold", "Row", "graph_rows", "graph_svg"]

CHAR, LINE, MARGIN = 7.25, 21.0, 22.0  # pixels: a character of 12 px monospace, a row, the edge of the picture
CHIP, ARROW = 38.0, 16.0  # pixels: a chip, and the gap for an arrow between two
FEW, NEAR = 60, 40  # of more rows, only arcs between rows so near each other are drawn
WIDEST = {"name": 33, "type": 26, "call": 46, "module": 30}  # characters
TITLES = {"stored": "parameters and inputs", "forward": "forward", "backward": "backward", "output": "results"}
HUES = 6  # classes .s0 to .s5 of the template


@dataclass(frozen=True)
class Chip:
    """A state on one axis, drawn at x (pixels) within its row."""

    x: float
    width: float
    text: str
    hue: str


@dataclass(frozen=True)
class Line:
    """A row with everything that the template draws, in pixels."""

    y: float
    kind: str
    cells: dict[str, str]
    full: str
    chips: tuple[Chip, ...] = ()
    arrows: tuple[float, ...] = ()
    bar: float = 0.0


@dataclass(frozen=True)
class Arc:
    """A value and its reader, rows apart."""

    path: str
    kind: str


def graph_svg(gm: GraphModule, mesh: Mesh, title: str = "", limit: int = 150) -> str:
    """The graph (annotated, boxed or local) as one self-contained SVG that reads well on light and dark ground.

    Graphs of more than `limit` values are folded: repeated blocks are shown once, then views are left out; the picture
    says how many values that are.
    """
    rows = graph_rows(gm, mesh)
    shown, left_out = fold(rows, limit)
    return template("picture.svg.j2").render(
        drawing(rows, shown, mesh) | {"title": clean(title), "subtitle": subtitle(rows, left_out)}
    )


@functools.cache
def template(name: str) -> jinja2.Template:
    """A template of this package; whatever is put into it is escaped."""
    loader = jinja2.PackageLoader("sbpc.inspect", "")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["px"] = lambda number: f"{number:.1f}".removesuffix(".0")
    return environment.get_template(name)


def subtitle(rows: Sequence[Row], left_out: dict[str, int]) -> str:
    """What the picture holds in one line."""
    sent = sum(row.sent for row in rows)
    boxings = sum(row.kind == "boxing" for row in rows)
    bytes_sent = f", {sent:,.0f} bytes sent per rank" if sent or not boxings else ""  # a local graph does not know them
    parts = [f"{len(rows):,} values", f"{boxings:,} collective{'s' * (boxings != 1)}{bytes_sent}"]
    parts += [f"{count:,} {what} left out" for what, count in left_out.items() if count]
    return " · ".join(parts)


def drawing(rows: Sequence[Row], shown: Sequence[Row | Fold], mesh: Mesh) -> dict[str, Any]:
    """The geometry of the picture."""
    seen = [row for row in shown if isinstance(row, Row)]
    columns, width = place(seen, mesh)
    most = max((row.sent for row in seen), default=0.0)
    y = 118.0
    lines: list[Line] = []
    sections: list[dict[str, Any]] = []
    at: dict[int, float] = {}
    module = section = ""
    for row in shown:
        if isinstance(row, Fold):
            lines.append(Line(y, "fold", {"text": clean(row.text)}, ""))
            y, module = y + LINE, ""
            continue
        if row.section != section:
            if sections:
                sections[-1]["end"] = y + 4
                y += 16.0
            section, module = row.section, ""
            sections.append({"y": y, "title": TITLES[section], "kind": section, "end": y})
            y += LINE + 2
        lines.append(line(row, y, columns, mesh, most, row.module if row.module != module else ""))
        at[row.at], module, y = y + LINE / 2, row.module, y + LINE
    if sections:
        sections[-1]["end"] = y + 4
    axes = [
        {"x": columns[f"axis{i}"] + column_width(name, size) / 2, "text": f"{name} × {size}"}
        for i, (name, size) in enumerate(zip(mesh.axes, mesh.sizes))
    ]
    return {
        "width": width, "height": y + MARGIN, "line": LINE, "margin": MARGIN, "columns": columns, "lines": lines,
        "sections": sections, "axes": axes, "arcs": arcs(rows, seen, at, columns["name"] - 12),
        "legend": legend(rows, columns["name"]),
    }  # fmt: skip


def place(seen: Sequence[Row], mesh: Mesh) -> tuple[dict[str, float], float]:
    """Where each column begins, and how wide the picture is."""
    longest = {key: max((min(len(getattr(row, key)), most) for row in seen), default=0) for key, most in WIDEST.items()}
    x = MARGIN + 34.0 + 9.0 * math.log2(min(len(seen), NEAR if len(seen) > FEW else FEW) + 1)  # the room for arcs
    columns = {"name": x}
    columns["type"] = x = x + CHAR * (longest["name"] + 2)
    x += CHAR * (longest["type"] + 2)
    for number, (name, size) in enumerate(zip(mesh.axes, mesh.sizes)):
        columns[f"axis{number}"] = x
        x += column_width(name, size) + 14
    columns["order"] = x
    x += CHAR * (max((len(row.order) for row in seen), default=0) + 1)
    columns["call"] = x = x + 6
    columns["sent"] = x = x + CHAR * (longest["call"] + 2) + 84
    columns["module"] = x = x + 16
    return columns, max(x + CHAR * (longest["module"] + 1), 640.0) + MARGIN


def column_width(name: str, size: int) -> float:
    """The width of an axis's column: two chips and an arrow, or its title."""
    return max(2 * CHIP + ARROW, CHAR * len(f"{name} × {size}"))


def line(row: Row, y: float, columns: dict[str, float], mesh: Mesh, most: float, module: str) -> Line:
    """One row."""
    chips: list[Chip] = []
    arrows: list[float] = []
    changes = dict(row.moved)
    for number, (name, size) in enumerate(zip(mesh.axes, mesh.sizes)):
        left, wide = columns[f"axis{number}"], column_width(name, size)
        if number in changes:
            start = left + (wide - 2 * CHIP - ARROW) / 2
            chips += [chip(start, changes[number]), chip(start + CHIP + ARROW, row.states[number])]
            arrows.append(start + CHIP)
        elif row.states:
            chips.append(chip(left + (wide - CHIP) / 2, row.states[number]))
    cells = {key: shorten(getattr(row, key), most) for key, most in WIDEST.items() if key not in ("call", "module")}
    cells |= {
        "op": shorten(row.op, WIDEST["call"]),
        "module": shorten(module, WIDEST["module"]),
        "order": clean(row.order),
    }
    cells["rest"] = shorten(row.rest, WIDEST["call"] - len(cells["op"]))
    cells["sent"] = f"{row.sent:,.0f} B" if row.sent else ""
    full = (
        f"{row.name}  {row.type}  {row.layout}  {row.call}"
        + (f"  # {row.note}" if row.note else "")
        + (f"  {row.module}" if row.module else "")
    )
    return Line(
        y, row.kind, cells, clean(full), tuple(chips), tuple(arrows), 78.0 * row.sent / most if row.sent else 0.0
    )


def chip(x: float, state: str) -> Chip:
    """The chip of a state: a hue per dim, grey for B, red for P."""
    dim = state[2:-1]
    hue = f"s{int(dim) % HUES}" if state.startswith("S") and dim.isdigit() else "p" if state.startswith("P") else "b"
    return Chip(x, CHIP, state.replace("P(", "").removesuffix(")") if state.startswith("P(") else state, hue)


def legend(rows: Sequence[Row], x: float) -> list[dict[str, Any]]:
    """The states that occur, with what they mean."""
    states = {state for row in rows for state in (*row.states, *moved_states(row))}
    found: list[dict[str, Any]] = []
    for state in sorted(states, key=lambda state: (state[0] != "S", state)):
        text = (
            f"split on dim {state[2:-1]}"
            if state[0] == "S"
            else "whole on every rank"
            if state == "B"
            else f"partial {state[2:-1] or 'sum'}"
        )
        found.append({"chip": chip(x, state), "text": text, "x": x + CHIP + 7})
        x += CHIP + 7 + 6.4 * len(text) + 20
    return found


def arcs(rows: Sequence[Row], seen: Sequence[Row], at: dict[int, float], x: float) -> list[Arc]:
    """An arc from each value to each of its readers; among many rows, only between those near each other."""
    found: list[Arc] = []
    number = {row.at: index for index, row in enumerate(seen)}
    for row in seen:
        for source in sorted(sources(rows, row.at, at)):
            producer = rows[source]
            apart = number[row.at] - number[source]
            if len(seen) > FEW and (apart > NEAR or producer.section == "stored" or row.section == "output"):
                continue
            kind = "saved" if (producer.section, row.section) == ("forward", "backward") else producer.section
            found.append(Arc(curve(x, at[source], at[row.at], 9.0 * math.log2(apart + 1)), kind))
    return found


def sources(rows: Sequence[Row], reader: int, at: dict[int, float]) -> set[int]:
    """The values that are shown and that a row reads, through the views that are left out."""
    found: set[int] = set()
    for source in rows[reader].sources:
        if source in at:
            found.add(source)
        elif rows[source].kind == "view":
            found |= sources(rows, source, at)
    return found


def curve(x: float, top: float, bottom: float, bulge: float) -> str:
    """A bracket that bulges to the left."""
    round_ = min(8.0, (bottom - top) / 2, bulge)
    left = x - bulge
    return (
        f"M{x:.1f} {top:.1f}H{left + round_:.1f}Q{left:.1f} {top:.1f} {left:.1f} {top + round_:.1f}"
        f"V{bottom - round_:.1f}Q{left:.1f} {bottom:.1f} {left + round_:.1f} {bottom:.1f}H{x:.1f}"
    )


def shorten(text: str, most: int) -> str:
    """At most so many characters, the rest an ellipsis."""
    text = clean(text)
    return text if len(text) <= most else text[: max(0, most - 1)] + "…"


def clean(text: str) -> str:
    """The text without characters that no XML may hold."""
    return "".join(c if c.isprintable() or c == " " else "�" for c in text)
