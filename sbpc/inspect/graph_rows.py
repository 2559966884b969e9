"""The rows of a graph's picture, and which of them may be left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from sbpc._compat import OpOverload
from sbpc.boxing.steps import WIRE, wire
from sbpc.inspect.graph_text import call_text, layout_text, note, port_names, type_text
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh


@dataclass(frozen=True)
class Row:
    """One value.

    at: its number in the graph. kind: "stored", "value", "view", "boxing" (a collective), "free" (a boxing that sends
    nothing) or "output". section: "stored", "forward", "backward" or "output". states: by mesh axis, none where the
    value has no layout. order: of the splits, where it is not mesh order. moved: of a boxing, (axis, state before)
    where that changes. sent: bytes that a rank sends. sources: the numbers of the values that it reads.
    """

    at: int
    kind: str
    section: str
    name: str
    type: str
    layout: str
    states: tuple[str, ...]
    order: str
    op: str
    rest: str
    note: str
    module: str
    moved: tuple[tuple[int, str], ...]
    sent: float
    sources: tuple[int, ...]

    @property
    def call(self) -> str:
        """How the value is made."""
        return self.op + self.rest

    def as_json(self) -> dict[str, Any]:
        """What `sbpc show --json` says of the value."""
        found = {
            key: getattr(self, key)
            for key in ("name", "kind", "section", "type", "states", "order", "call", "module", "sources")
        }
        if self.kind in ("boxing", "free"):
            found |= {"note": self.note, "bytes_sent": self.sent}
        return found


@dataclass(frozen=True)
class Fold:
    """A line in place of rows that are left out."""

    text: str
    rows: int


def moved(row: Row) -> Iterator[str]:
    """The states before a boxing."""
    return (state for _, state in row.moved)


def graph_rows(gm: GraphModule, mesh: Mesh) -> tuple[Row, ...]:
    """All values of a graph, in its order."""
    names = port_names(gm)
    ports = iter(gm.meta["ports"].inputs)
    number = {node: at for at, node in enumerate(gm.graph.nodes)}
    rows = []
    for node in gm.graph.nodes:
        layout = first_layout(node)
        op, rest = split_call(call_text(node, names).removeprefix("aten.").removeprefix("_c10d_functional."))
        if node.op == "placeholder":
            port = next(ports, None)
            op, rest = ("position" if port is None else port.kind), ""
        rows.append(
            Row(
                at=number[node],
                kind=kind(node),
                section="stored"
                if node.op == "placeholder"
                else "output"
                if node.op == "output"
                else node.meta.get("phase", "forward"),
                name=names.get(node, node.name),
                type=first_type(node),
                layout=layout_text(node),
                states=tuple(map(str, layout.states)) if layout else (),
                order=" ".join(str(layout).split()[len(layout.states) :]) if layout else "",
                op=op,
                rest=rest,
                note=note(node, mesh),
                module=node.meta.get("module", "") if node.op == "call_function" else "",
                moved=changes(node),
                sent=bytes_sent(node, mesh),
                sources=tuple(number[source] for source in node.all_input_nodes),
            )
        )
    return tuple(rows)


def first_layout(node: Node) -> Layout | None:
    """The layout of a value, of the first of several."""
    sbp = node.meta.get("sbp")
    found = sbp[0] if isinstance(sbp, tuple) and sbp else sbp
    return found if isinstance(found, Layout) else None


def first_type(node: Node) -> str:
    """Type and shape of a value; of several, the first and how many more."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)) and len(value) > 1:
        return type_text(node)[1:].split("],")[0].rstrip(")]") + f"] +{len(value) - 1}"
    return type_text(node)


def split_call(text: str) -> tuple[str, str]:
    """The name of the op and its arguments; an overload's name is left out."""
    op, bracket, rest = text.partition("(")
    if not bracket and text.endswith("]"):
        return "part", f"({text})"  # one output of several
    return op.split(".")[0] if bracket else text, bracket + rest


def kind(node: Node) -> str:
    """See `Row`."""
    if node.op in ("placeholder", "output"):
        return "stored" if node.op == "placeholder" else "output"
    if "step" in node.meta:
        return "boxing" if node.meta["step"].collective in WIRE else "free"
    if not isinstance(node.target, OpOverload):
        return "view"
    if node.target.namespace == "_c10d_functional":
        return "view" if "wait" in str(node.target) else "boxing"
    alias = node.target._schema.returns[0].alias_info if node.target._schema.returns else None
    return "view" if alias is not None and not alias.is_write else "value"


def changes(node: Node) -> tuple[tuple[int, str], ...]:
    """Of a boxing: the axes on which the state changes, with the state before."""
    step = node.meta.get("step")
    if step is None:
        return ()
    return tuple(
        (axis, str(before))
        for axis, (before, after) in enumerate(zip(step.before.states, step.after.states))
        if before != after
    )


def bytes_sent(node: Node, mesh: Mesh) -> float:
    """Of a boxing: the bytes that the busiest rank sends."""
    step = node.meta.get("step")
    if step is None:
        return 0.0
    value = node.meta["val"]
    return float(wire(step, tuple(value.shape), value.element_size(), mesh.sizes)[1])  # type: ignore[arg-type]


def fold(rows: Sequence[Row], limit: int) -> tuple[list[Row | Fold], dict[str, int]]:
    """The rows to show, at most about `limit`, and how many were left out by what they are."""
    shown: list[Row | Fold] = list(rows)
    if len(rows) > limit:
        shown = fold_blocks(rows)
    repeated = sum(row.rows for row in shown if isinstance(row, Fold))
    views = 0
    if len(shown) > limit:
        kept = [row for row in shown if isinstance(row, Fold) or row.kind != "view"]
        views, shown = len(shown) - len(kept), kept
    return shown, {"in repeated blocks": repeated, "views": views}


def fold_blocks(rows: Sequence[Row]) -> list[Row | Fold]:
    """The rows with a line in place of each block that only repeats an earlier one."""
    shown: list[Row | Fold] = []
    known: dict[Any, str] = {}
    for block, members in runs(rows):
        pattern = (
            members[0].section,
            re.sub(r"\d+", "*", block),
            tuple((row.op, row.kind, row.type, row.layout, row.moved) for row in members),
        )
        if not block or len(members) < 4 or pattern not in known:
            known.setdefault(pattern, block)
            shown += members
        else:
            shown.append(Fold(f"{block}: the same {len(members)} values as {known[pattern]}", len(members)))
    return shown


def runs(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Neighbours of one section and one numbered block (`blocks.0`), "" outside of blocks."""
    members: list[Row] = []
    last: Any = None
    for row in rows:
        match = re.match(r".*?\b\d+(?=\.|$)", row.name if row.kind == "stored" else row.module)
        key = row.section, match[0] if match else ""
        if key != last and members:
            yield last[1], members
            members = []
        members.append(row)
        last = key
    if members:
        yield last[1], members
