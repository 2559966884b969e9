"""splice: of two assignments one that is the first in some of the blocks of a model, at one end, and the second in the rest.

Where one plan holds too much and another one is slow, such a plan holds about what there is room for. Layouts are boxed once
more, where the two meet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from torch.fx import GraphModule

BLOCK = re.compile(r"(?:(.*?)\.)?(\d+)(?:\.|$)")  # a run of blocks, and the first number in the name of a module: of a block


def blocks(gm: GraphModule, names: Sequence[str]) -> np.ndarray:
    """By name of a node how far along its run of blocks its block is, from 0 to 1 in their middles; nan outside of runs.

    The block is that of the module that the node belongs to, of a placeholder the first one that reads it.
    """
    found: dict[str, tuple[str | None, int]] = {}
    for node in gm.graph.nodes:
        modules = [each.meta.get("module") for each in ([*node.users] if node.op == "placeholder" else [node])]
        match = BLOCK.match(next(filter(None, modules), ""))
        if match:
            found[node.name] = match[1], int(match[2])
    runs: dict[str | None, set[int]] = {}
    for run, number in found.values():
        runs.setdefault(run, set()).add(number)
    along = {
        (run, number): (at + 0.5) / len(numbers) for run, numbers in runs.items() for at, number in enumerate(sorted(numbers))
    }
    return np.array([along[found[name]] if name in found else np.nan for name in names])


def spliced(one: Sequence[int], other: Sequence[int], along: np.ndarray, part: float, last: bool) -> list[int]:
    """Labels of `one` in that part of the blocks, the last or the first ones, those of `other` in the rest."""
    inside = along > 1 - part if last else along < part
    return np.where(inside, one, other).tolist()
