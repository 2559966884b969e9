"""Draws a graph: one row per value, its layout as coloured chips, what is boxed and what that sends."""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Sequence
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
    environment.filters |= {
        "px": lambda number: f"{number:.1f}".removesuffix(".0"),
        "quantity": quantity,
        "shorten": shorten,
        "hue": hue_of,
        "reduction": lambda state: state.replace("P(", "").removesuffix(")") if state.startswith("P(") else state,
    }
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
    columns, axes, width = place(seen, mesh)
    y, module = 118.0, ""
    lines: list[tuple[float, ValueRow | Fold, str]] = []  # with the module, where it is another than above
    sections: list[dict[str, Any]] = []
    middle: dict[int, float] = {}  # by number of a value: the y of its row
    for row in shown:
        if isinstance(row, Fold):
            lines.append((y, row, ""))
            module = ""
        else:
            if not sections or sections[-1]["kind"] != row.section:
                y += 16.0 if sections else 0.0
                sections.append({"y": y, "title": TITLES[row.section], "kind": row.section})
                y, module = y + LINE + 2, ""
            lines.append((y, row, row.module if row.module != module else ""))
            middle[row.at], module = y + LINE / 2, row.module
        y += LINE
        sections[-1]["end"] = y + 4
    return {
        "width": width,
        "height": y + MARGIN,
        "line": LINE,
        "margin": MARGIN,
        "chip": CHIP,
        "arrow": ARROW,
        "widest": WIDEST,
        "most": max((row.sent for row in seen), default=0.0),
        "columns": columns,
        "lines": lines,
        "sections": sections,
        "axes": axes,
        "legend": legend(rows, columns["name"]),
        "arcs": arcs(rows, seen, middle, columns["name"] - 12),
    }


def place(seen: Sequence[ValueRow], mesh: Mesh) -> tuple[dict[str, float], list[tuple[float, float, str]], float]:
    """Returns where each column begins, of each axis where its column begins, how wide it is and its title, and how
    wide the picture is."""
    longest = {key: max((min(len(getattr(row, key)), most) for row in seen), default=0) for key, most in WIDEST.items()}
    x = MARGIN + 34.0 + 9.0 * math.log2(min(len(seen), NEAR if len(seen) > FEW else FEW) + 1)  # the room for arcs
    columns = {"name": x}
    columns["type"] = x = x + CHAR * (longest["name"] + 2)
    x += CHAR * (longest["type"] + 2)
    axes = []
    for title in (f"{name} × {size}" for name, size in zip(mesh.axes, mesh.sizes)):
        axes.append((x, max(2 * CHIP + ARROW, CHAR * len(title)), title))
        x += axes[-1][1] + 14
    columns["order"] = x
    x += CHAR * (max((len(row.order) for row in seen), default=0) + 1)
    columns["call"] = x = x + 6
    columns["sent"] = x = x + CHAR * (longest["call"] + 2) + 84
    columns["module"] = x = x + 16
    return columns, axes, max(x + CHAR * (longest["module"] + 1), 640.0) + MARGIN


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


def legend(rows: Sequence[ValueRow], x: float) -> list[tuple[float, str, str]]:
    """Returns where each state that occurs is drawn, the state, and what it means."""
    items = []
    for state in states_in(rows):
        items.append((x, state, meaning(state)))
        x += CHIP + 7 + 6.4 * len(meaning(state)) + 20
    return items


def arcs(
    rows: Sequence[ValueRow], seen: Sequence[ValueRow], middle: dict[int, float], x: float
) -> list[tuple[str, str]]:
    """Returns kind and path of an arc from each value to each of its readers; among many rows, only between those near
    each other."""
    lines = []
    number = {row.at: index for index, row in enumerate(seen)}
    for row in seen:
        for source in sorted(sources(rows, row.at, middle)):
            producer = rows[source]
            apart = number[row.at] - number[source]
            if len(seen) > FEW and (apart > NEAR or producer.section == "stored" or row.section == "output"):
                continue
            kind = "saved" if (producer.section, row.section) == ("forward", "backward") else producer.section
            lines.append((kind, curve(x, middle[source], middle[row.at], 9.0 * math.log2(apart + 1))))
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
    return text if text.isprintable() else "".join(c if c.isprintable() else "�" for c in text)
