"""The graph on a page: its rows in groups, blocks that repeat an earlier one folded into it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from sbpc.inspect.graph_rows import ValueRow, runs
from sbpc.inspect.report import numberless, some

TITLES = {"stored": "Parameters and inputs", "forward": "Forward", "backward": "Backward", "output": "Results"}


@dataclass
class Group:
    """Neighbouring rows of one section and one block. blocks: that they stand for, the shown one first; "" outside
    of blocks."""

    section: str
    rows: Sequence[ValueRow]
    blocks: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The blocks as one name."""
        apart = list(dict.fromkeys(self.blocks))
        return apart[0] if len(apart) == 1 else some(sorted(apart, key=natural))


@dataclass(frozen=True)
class Folded:
    """A graph as it is shown. groups: in its order. shown: by number of a value, the number of the row that stands
    for it."""

    groups: tuple[Group, ...]
    shown: dict[int, int]

    def sources(self, row: ValueRow) -> list[int]:
        """Returns the rows that stand for what a row reads."""
        return list(dict.fromkeys(self.shown[source] for source in row.sources))


def fold(rows: Sequence[ValueRow]) -> Folded:
    """Returns rows in groups; a numbered block that is as an earlier one is counted there."""
    groups: list[Group] = []
    known: dict[Any, Group] = {}
    shown: dict[int, int] = {}
    for block, members in runs(rows):
        section = members[0].section
        pattern = section, numberless(block), tuple(map(alike, members)) if block else len(groups)
        group = known.get(pattern)
        if group is None:
            group = known[pattern] = Group(section, members)
            groups.append(group)
        group.blocks.append(block)
        shown |= {row.at: first.at for row, first in zip(members, group.rows)}
    return Folded(tuple(groups), shown)


def alike(row: ValueRow) -> tuple[Any, ...]:
    """Returns what rows of equal blocks have in common."""
    return row.op, row.kind, row.type, row.layout, row.moved, numberless(row.module)


def natural(name: str) -> list[Any]:
    """Returns the key by which names are sorted with their numbers as numbers."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def origins(gm: GraphModule) -> list[tuple[str, str]]:
    """Returns, by number of a value, the user's line that it comes from, and the text of its rule."""
    found = []
    for node in gm.graph.nodes:
        frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*(.*)', node.meta.get("stack_trace") or "")
        line = ""
        if frames:
            file, number, _, code = frames[-1]
            line = f"{'/'.join(file.split('/')[-2:])}:{number}  {code.strip()}"
        match = node.meta.get("match")
        found.append((line, match.rule.text if match is not None and "step" not in node.meta else ""))
    return found
