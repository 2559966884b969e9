"""Draws a graph: one row per value, its layout as coloured chips, what is boxed and what that sends."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from torch.fx import GraphModule

from sbpc.inspect.graph_rows import Fold, ValueRow, fold, graph_rows
from sbpc.inspect.tables import quantity
from sbpc.mesh.mesh import Mesh

CHAR, LINE, MARGIN = 7.25, 21.0, 22.0  # pixels: a character of 12 px monospace, a row, the edge of the picture
CHIP, ARROW = 38.0, 16.0  # pixels: a chip, and the gap for an arrow between two
FEW, NEAR = 60, 40  # of more rows, only arcs between rows so near each other are drawn
WIDEST = {"name": 33, "type": 26, "call": 46, "module": 30}  # characters
TITLES = {"stored": "parameters and inputs", "forward": "forward", "backward": "backward", "output": "results"}
HUES = 6  # classes .s0 to .s5 of the template
MEANING = {  # of states, by their texts or first letters
    "S": "split on dim {}",
    "B": "whole on every rank",
    "P": "partial {}",
    "R": "cut on dim {} where groups of rows end",
    "L": "sorted on dim {} by each rank for itself",
    "P(own)": "where groups of each rank's own rows end",
}


@dataclass(frozen=True)
class Chip:
    """A state on one axis, drawn at x (pixels) within its row."""

    x: float
    width: float
    text: str
    hue: str


@dataclass(frozen=True)
class DrawnRow:
    """A row as the template draws it, in pixels. cells: texts by column; full: the text that a pointer shows."""

    y: float
    kind: str
    cells: dict[str, str]
    full: str
    chips: tuple[Chip, ...] = ()
    arrows: tuple[float, ...] = ()
    bar: float = 0.0


@dataclass(frozen=True)
class Arc:
    """A line from a value to a reader of it."""

    path: str
    kind: str


def graph_svg(gm: GraphModule, mesh: Mesh, title: str = "", limit: int = 150) -> str:
    """Returns the graph (annotated, boxed or local) as one self-contained SVG that reads well on light and dark ground.

    Graphs of more than `limit` values are folded: repeated blocks are shown once, then views are left out; the picture
    says how many values that are.
    """
    rows = graph_rows(gm, mesh)
    shown, left_out = fold(rows, limit)
    return template("picture.svg.j2").render(
        drawing(rows, shown, mesh) | {"title": title, "subtitle": subtitle(rows, left_out)}
    )


@functools.cache
def template(name: str) -> jinja2.Template:
    """Returns a template of this package. Whatever is put into it is cleaned and escaped."""
    loader = jinja2.PackageLoader("sbpc.inspect")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"px": lambda number: f"{number:.1f}".removesuffix(".0"), "quantity": quantity}
    return environment.get_template(name)


def subtitle(rows: Sequence[ValueRow], left_out: dict[str, int]) -> str:
    """Returns what the picture holds in one line."""
    sent = sum(row.sent for row in rows)
    boxings = sum(row.kind == "boxing" for row in rows)
    bytes_sent = f", {sent:,.0f} bytes sent per rank" if sent or not boxings else ""  # a local graph does not know them
    parts = [f"{len(rows):,} values", f"{boxings:,} collective{'s' * (boxings != 1)}{bytes_sent}"]
    parts += [f"{count:,} {what} left out" for what, count in left_out.items() if count]
    return " · ".join(parts)


def drawing(rows: Sequence[ValueRow], shown: Sequence[ValueRow | Fold], mesh: Mesh) -> dict[str, Any]:
    """Returns the geometry of the picture."""
    seen = [row for row in shown if isinstance(row, ValueRow)]
    columns, width = place(seen, mesh)
    most = max((row.sent for row in seen), default=0.0)
    y, module = 118.0, ""
    lines: list[DrawnRow] = []
    sections: list[dict[str, Any]] = []
    middle: dict[int, float] = {}  # by number of a value: the y of its row
    for row in shown:
        if isinstance(row, Fold):
            lines.append(DrawnRow(y, "fold", {"text": row.text}, ""))
            module = ""
        else:
            if not sections or sections[-1]["kind"] != row.section:
                y += 16.0 if sections else 0.0
                sections.append({"y": y, "title": TITLES[row.section], "kind": row.section})
                y, module = y + LINE + 2, ""
            lines.append(drawn(row, y, columns, mesh, most, row.module if row.module != module else ""))
            middle[row.at], module = y + LINE / 2, row.module
        y += LINE
        sections[-1]["end"] = y + 4
    return {
        "width": width,
        "height": y + MARGIN,
        "line": LINE,
        "margin": MARGIN,
        "columns": columns,
        "lines": lines,
        "sections": sections,
        "axes": axis_titles(columns, mesh),
        "legend": legend(rows, columns["name"]),
        "arcs": arcs(rows, seen, middle, columns["name"] - 12),
    }


def place(seen: Sequence[ValueRow], mesh: Mesh) -> tuple[dict[str, float], float]:
    """Returns where each column begins, and how wide the picture is."""
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


def axis_titles(columns: dict[str, float], mesh: Mesh) -> list[dict[str, Any]]:
    """Returns the titles of the axes' columns, and where their middles are."""
    return [
        {"x": columns[f"axis{i}"] + column_width(name, size) / 2, "text": f"{name} × {size}"}
        for i, (name, size) in enumerate(zip(mesh.axes, mesh.sizes))
    ]


def column_width(name: str, size: int) -> float:
    """Returns the width of an axis's column: that of two chips and an arrow, or of its title."""
    return max(2 * CHIP + ARROW, CHAR * len(f"{name} × {size}"))


def drawn(row: ValueRow, y: float, columns: dict[str, float], mesh: Mesh, most: float, module: str) -> DrawnRow:
    """Returns one row as it is drawn at `y`. most: the bytes of the longest bar."""
    chips: list[Chip] = []
    arrows: list[float] = []
    before = dict(row.moved)
    for number, (name, size) in enumerate(zip(mesh.axes, mesh.sizes)):
        left, wide = columns[f"axis{number}"], column_width(name, size)
        if number in before:
            start = left + (wide - 2 * CHIP - ARROW) / 2
            chips += [chip(start, before[number]), chip(start + CHIP + ARROW, row.states[number])]
            arrows.append(start + CHIP)
        elif row.states:
            chips.append(chip(left + (wide - CHIP) / 2, row.states[number]))
    op = shorten(row.op, WIDEST["call"])
    cells = {
        "name": shorten(row.name, WIDEST["name"]),
        "type": shorten(row.type, WIDEST["type"]),
        "op": op,
        "rest": shorten(row.rest, WIDEST["call"] - len(op)),
        "module": shorten(module, WIDEST["module"]),
        "order": row.order,
        "sent": f"{row.sent:,.0f} B" if row.sent else "",
    }
    about = (f"  # {row.note}" if row.note else "") + (f"  {row.module}" if row.module else "")
    full = f"{row.name}  {row.type}  {row.layout}  {row.call}{about}"
    bar = 78.0 * row.sent / most if row.sent else 0.0
    return DrawnRow(y, row.kind, cells, full, tuple(chips), tuple(arrows), bar)


def chip(x: float, state: str) -> Chip:
    """Returns the chip of a state: a hue per dim, grey for B, red for P."""
    return Chip(x, CHIP, state.replace("P(", "").removesuffix(")") if state.startswith("P(") else state, hue_of(state))


def hue_of(state: str) -> str:
    """Returns the class of a state: a hue by dim that is cut, or that of B or P."""
    dim = state[2:-1]
    return f"s{int(dim) % HUES}" if dim.isdigit() else "p" if state.startswith("P") else "b"


def meaning(state: str) -> str:
    """Returns what a state is, in words."""
    return MEANING.get(state, MEANING[state[0]]).format(state[2:-1] or "sum")


def states_in(rows: Sequence[ValueRow]) -> list[str]:
    """Returns the states that occur, splits first."""
    states = {state for row in rows for state in (*row.states, *(before for _, before in row.moved))}
    return sorted(states, key=lambda state: (state[0] != "S", state))


def legend(rows: Sequence[ValueRow], x: float) -> list[dict[str, Any]]:
    """Returns the states that occur, with what they mean."""
    items: list[dict[str, Any]] = []
    for state in states_in(rows):
        text = meaning(state)
        items.append({"chip": chip(x, state), "text": text, "x": x + CHIP + 7})
        x += CHIP + 7 + 6.4 * len(text) + 20
    return items


def arcs(rows: Sequence[ValueRow], seen: Sequence[ValueRow], middle: dict[int, float], x: float) -> list[Arc]:
    """Returns an arc from each value to each of its readers; among many rows, only between those near each other."""
    lines: list[Arc] = []
    number = {row.at: index for index, row in enumerate(seen)}
    for row in seen:
        for source in sorted(sources(rows, row.at, middle)):
            producer = rows[source]
            apart = number[row.at] - number[source]
            if len(seen) > FEW and (apart > NEAR or producer.section == "stored" or row.section == "output"):
                continue
            kind = "saved" if (producer.section, row.section) == ("forward", "backward") else producer.section
            lines.append(Arc(curve(x, middle[source], middle[row.at], 9.0 * math.log2(apart + 1)), kind))
    return lines


def sources(rows: Sequence[ValueRow], reader: int, shown: Container[int]) -> set[int]:
    """Returns the values among `shown` that a row reads, through the views that are left out."""
    read: set[int] = set()
    for source in rows[reader].sources:
        if source in shown:
            read.add(source)
        elif rows[source].kind == "view":
            read |= sources(rows, source, shown)
    return read


def curve(x: float, top: float, bottom: float, bulge: float) -> str:
    """Returns the path of a bracket that bulges to the left."""
    round_ = min(8.0, (bottom - top) / 2, bulge)
    left = x - bulge
    return (
        f"M{x:.1f} {top:.1f}H{left + round_:.1f}Q{left:.1f} {top:.1f} {left:.1f} {top + round_:.1f}"
        f"V{bottom - round_:.1f}Q{left:.1f} {bottom:.1f} {left + round_:.1f} {bottom:.1f}H{x:.1f}"
    )


def shorten(text: str, most: int) -> str:
    """Returns at most so many characters, the last an ellipsis where more are left out."""
    return text if len(text) <= most else text[: max(0, most - 1)] + "…"


def clean(text: str) -> str:
    """Returns the text without characters that no XML may hold."""
    return "".join(c if c.isprintable() or c == " " else "�" for c in text)
