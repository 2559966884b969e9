"""The seconds of one call under many choices at once: what the solver adds up, and `measure` finds again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sbpc.boxing import seconds as boxing_seconds
from sbpc.choices import Candidates, Choice, local_sizes
from sbpc.cost import kernel_seconds
from sbpc.layout import Layout
from sbpc.mesh import Mesh
from sbpc.rules import Match

Sized = tuple[int, tuple[int, ...]]  # bytes per element, global shape


def call_seconds(
    match: Match | None, choices: Sequence[Choice], tensors: Sequence[Sized], columns: Sequence[Sequence[Layout]],
    elements: float, mesh: Mesh,
) -> np.ndarray:  # fmt: skip
    """Seconds of the local kernel under each choice. columns: per tensor, read or written, its layout by choice.

    elements: the flops of a call without a rule.
    """
    if match is not None and match.view:
        return np.zeros(len(choices))
    first = (0,) * len(mesh.sizes)
    sizes = tuple(match.sizes.items()) if match is not None else ()
    rows = [local_sizes(sizes, choice, mesh.sizes, first) for choice in choices]
    local = {factor: np.array([row[factor] for row in rows], dtype=float) for factor, _ in sizes}
    flops = elements if match is None else match.flops(local)
    moved = np.zeros(len(choices))
    for (itemsize, shape), column in zip(tensors, columns):
        held = {layout: float(np.prod(layout.local_shape(shape, mesh.sizes, first))) for layout in dict.fromkeys(column)}
        moved += itemsize * np.array([held[layout] for layout in column])
    cluster = mesh.cluster
    seconds = kernel_seconds(flops, moved, cluster.peak, cluster.memory_bandwidth, cluster.launch)
    return np.broadcast_to(seconds, (len(choices),)).astype(float)


def apart_seconds(
    candidates: Candidates, choices: Sequence[Choice], operands: Sequence[Sized], mesh: Mesh
) -> np.ndarray:
    """Seconds of a node that is taken apart, under each choice: of all its parts, and of the boxings among them."""
    phases = candidates.phases
    assert phases is not None
    sized: dict[int, Sized] = dict(enumerate(operands))
    total = np.zeros(len(choices))
    for at, part in enumerate(phases.parts):
        sized[part.number] = part.val.element_size(), tuple(part.val.shape)
        distinct: dict[Choice, int] = {}
        which = [distinct.setdefault(candidates.part(at, choice), len(distinct)) for choice in choices]
        inner = list(distinct)
        columns = [[choice.input(slot, mesh.axes) for choice in inner] for slot in range(len(part.reads))]
        columns.append([choice.output(0, mesh.axes) for choice in inner])
        tensors = [sized[number] for number in (*part.reads, part.number)]
        total += call_seconds(part.match, inner, tensors, columns, 0.0, mesh)[which]
        total += [
            _moving(columns[-1][made], candidates.read(part.number, choice, mesh.axes), sized[part.number], mesh)
            for made, choice in zip(which, choices)
        ]
    return total


def _moving(before: Layout, after: Layout, tensor: Sized, mesh: Mesh) -> float:
    return 0.0 if before == after else boxing_seconds(before, after, tensor[1], tensor[0], mesh)
