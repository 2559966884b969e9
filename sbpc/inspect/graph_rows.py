"""Makes the rows of a graph's picture, and leaves out some of them where there are too many."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from sbpc._compat import OpOverload
from sbpc.graph.ports import placeholders
from sbpc.inspect.graph_text import bytes_sent, call_text, layout_text, note, port_names, type_text
from sbpc.mesh.collectives import WIRE
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh


@dataclass(frozen=True)
class ValueRow:
    """The texts and figures about one value of a graph.

    at: its number in the graph. kind: "stored", "value", "view", "boxing" (a collective), "free" (a boxing that sends
    nothing) or "output". section: "stored", "forward", "backward" or "output". states: one per mesh axis, none where
    the value has no layout. order: that of the splits, where it is not mesh order. moved: for a boxing, (axis, state
    before) of every axis that changes. sent: bytes that a rank sends. sources: the numbers of the values that it reads.
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
        """Returns what `sbpc show --json` prints about the value."""
        keys = ("name", "kind", "section", "type", "states", "order", "call", "module", "sources")
        values = {key: getattr(self, key) for key in keys}
        if self.kind in ("boxing", "free"):
            values |= {"note": self.note, "bytes_sent": self.sent}
        return values


@dataclass(frozen=True)
class Fold:
    """A line in place of rows that are left out."""

    text: str
    rows: int


def graph_rows(gm: GraphModule, mesh: Mesh, first: int = 0) -> tuple[ValueRow, ...]:
    """Returns a row for every value of a graph, in its order. first: the number of the first one."""
    names = port_names(gm)
    numbers = {node: at for at, node in enumerate(gm.graph.nodes, first)}
    kinds = {node: port.kind for port, node in placeholders(gm).items()}
    rows = []
    for node in gm.graph.nodes:
        layout = first_layout(node)
        op, rest = split_call(call_text(node, names).removeprefix("aten.").removeprefix("_c10d_functional."))
        section = {"placeholder": "stored", "output": "output"}.get(node.op, node.meta.get("phase", "forward"))
        row = ValueRow(
            at=numbers[node],
            kind=kind_of(node),
            section=section,
            name=names.get(node, node.name),
            type=first_type(node),
            layout=layout_text(node),
            states=tuple(map(str, layout.states)) if layout else (),
            order=" ".join(str(layout).split()[len(layout.states) :]) if layout else "",
            op=op if node.op != "placeholder" else kinds.get(node, "position"),
            rest=rest if node.op != "placeholder" else "",
            note=note(node, mesh),
            module=node.meta.get("module", "") if node.op == "call_function" else "",
            moved=changes(node),
            sent=bytes_sent(node, mesh),
            sources=tuple(numbers[source] for source in node.all_input_nodes),
        )
        rows.append(row)
    return tuple(rows)


def first_layout(node: Node) -> Layout | None:
    """Returns the layout of a value, of the first of several."""
    sbp = node.meta.get("sbp")
    layout = sbp[0] if isinstance(sbp, tuple) and sbp else sbp
    return layout if isinstance(layout, Layout) else None


def first_type(node: Node) -> str:
    """Returns type and shape of a value; of several, the first and how many more."""
    value = node.meta.get("val")
    if isinstance(value, (tuple, list)) and len(value) > 1:
        return type_text(node)[1:].split("],")[0].rstrip(")]") + f"] +{len(value) - 1}"
    return type_text(node)


def split_call(text: str) -> tuple[str, str]:
    """Returns the name of the op, without its overload, and its arguments."""
    op, bracket, rest = text.partition("(")
    if not bracket and text.endswith("]"):
        return "part", f"({text})"  # one output of several
    return op.split(".")[0] if bracket else text, bracket + rest


def kind_of(node: Node) -> str:
    """Returns the kind of a row, see `ValueRow`."""
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
    """Returns the axes on which a boxing changes the state, with the state before."""
    step = node.meta.get("step")
    if step is None:
        return ()
    states = enumerate(zip(step.before.states, step.after.states))
    return tuple((axis, str(before)) for axis, (before, after) in states if before != after)


def fold(rows: Sequence[ValueRow], limit: int) -> tuple[list[ValueRow | Fold], dict[str, int]]:
    """Returns the rows to show, at most about `limit`, and how many rows of which kind are left out."""
    folded: list[ValueRow | Fold] = fold_blocks(rows) if len(rows) > limit else list(rows)
    repeated = sum(row.rows for row in folded if isinstance(row, Fold))
    shown = folded
    if len(folded) > limit:
        shown = [row for row in folded if isinstance(row, Fold) or row.kind != "view"]
    return shown, {"in repeated blocks": repeated, "views": len(folded) - len(shown)}


def fold_blocks(rows: Sequence[ValueRow]) -> list[ValueRow | Fold]:
    """Returns the rows with a line in place of each block that only repeats an earlier one."""
    shown: list[ValueRow | Fold] = []
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


def runs(rows: Sequence[ValueRow]) -> Iterator[tuple[str, list[ValueRow]]]:
    """Yields neighbours of one section and one numbered block (`blocks.0`), "" outside of blocks."""

    def key(row: ValueRow) -> tuple[str, str]:
        match = re.match(r".*?\b\d+(?=\.|$)", row.name if row.kind == "stored" else row.module)
        return row.section, match[0] if match else ""

    for (_, block), members in itertools.groupby(rows, key):
        yield block, list(members)
