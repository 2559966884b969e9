"""The map of a model: its modules as a tree with the homes of their parameters, equal blocks folded to one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sbpc.graph.ports import PARAMETER, placeholders
from sbpc.inspect.graph_text import tensor_text
from sbpc.inspect.report import spans
from sbpc.mesh.layout import Layout
from sbpc.plans.plan import Plan
from sbpc.plans.staged.part_memory import bytes_at


@dataclass
class Part:
    """A module or a parameter. children: by name. home, type, bytes: of a parameter, the bytes on a rank."""

    children: dict[str, Part] = field(default_factory=dict)
    home: Layout | None = None
    type: str = ""
    bytes: int = 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """What equal blocks have in common: names below it, types, homes."""
        return self.type, str(self.home), tuple((name, child.kind) for name, child in self.children.items())


@dataclass(frozen=True)
class MapRow:
    """A row of the map.

    depth: how deep in the tree. label: the last part of the name, several numbers as one. name: of the first that it
    stands for, in full. times: for how many blocks it stands, those around it included. bytes: of all of them on a
    rank.
    """

    depth: int
    label: str
    name: str
    times: int
    type: str
    home: Layout | None
    bytes: int


def model_map(plan: Plan) -> list[MapRow]:
    """Returns the rows of a model's map, modules before what they hold."""
    root = Part()
    for chunk in plan.chunks:
        for port, node in placeholders(chunk.annotated, PARAMETER).items():
            part = root
            for name in port.name.split("."):
                part = part.children.setdefault(name, Part())
            part.home, part.type = chunk.given[port], tensor_text(node.meta["val"])
            part.bytes = bytes_at(node.meta["val"], part.home, chunk.mesh)
    return rows_of(root, "", 0, 1)


def rows_of(part: Part, path: str, depth: int, times: int) -> list[MapRow]:
    """Returns the rows below a module; a module that holds one thing alone shares its row. times: blocks it stands
    for."""
    rows = []
    for names in folded(part):
        child, many, name = part.children[names[0]], times * len(names), f"{path}{names[0]}"
        label = names[0] if len(names) == 1 else "{" + spans(map(int, names)) + "}"
        alone = folded(child)
        if len(alone) == 1:
            inner = rows_of(child, f"{name}.", depth, many)
            rows += [replace(inner[0], label=f"{label}.{inner[0].label}"), *inner[1:]]
            continue
        below = rows_of(child, f"{name}.", depth + 1, many)
        held = child.bytes * many + sum(row.bytes for row in below if row.depth == depth + 1)
        rows += [MapRow(depth, label, name, many, child.type, child.home, held), *below]
    return rows


def folded(part: Part) -> list[list[str]]:
    """Returns the names of a module's children; numbered ones that are equal are together, at the place of the
    first."""
    groups: dict[Any, list[str]] = {}
    for name, child in part.children.items():
        groups.setdefault(child.kind if name.isdigit() else name, []).append(name)
    return list(groups.values())
