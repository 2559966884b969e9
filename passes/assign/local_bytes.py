"""Bytes that a node takes on the busiest rank, by label: what a limit of memory weighs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from sbpc.mesh.layout_codes import RAGGED, elements, states_of
from sbpc.passes.assign.label_tables import Table, Tensors
from sbpc.passes.assign.two_phase_tables import two_phase_bytes


class PlaceKind(Enum):
    """What of a node is counted."""

    OUTPUT = auto()  # an output in the layout in which it is left
    OPERAND = auto()  # an operand in the layout in which it is read
    LEAST = auto()  # an equal share of an output's elements, rounded up: no layout has less
    FULLY_SPLIT = auto()  # an output, but only in layouts in which every axis cuts it
    NOT_FULLY_SPLIT = auto()  # an output, but only in layouts in which some axis does not cut it
    OPERAND_NOT_FULLY_SPLIT = auto()  # the same of an operand
    WORKING_SET = auto()  # what the call has alive at once, at the least: its results, and the operands in the mask


@dataclass(frozen=True)
class Place:
    """A tensor, or several, of a node.

    index: the number of the output or operand. mask: of a working set, a bit for every operand that is counted, and
    above these a bit for every output that is read.
    """

    kind: PlaceKind
    index: int = 0
    mask: int = 0


def local_bytes(table: Table, place: Place, tensors: Tensors) -> np.ndarray:
    """Returns the bytes at a place, by label."""
    kind, sizes, most = place.kind, table.mesh.sizes, table.mesh.routing.most
    if kind is PlaceKind.WORKING_SET:
        return working_set_bytes(table, place.mask, tensors)
    of_operand = kind in (PlaceKind.OPERAND, PlaceKind.OPERAND_NOT_FULLY_SPLIT)
    at = place.index if of_operand else len(table.ins) + place.index
    codes, (itemsize, shape) = table.ports[at], tensors[at]
    if kind is PlaceKind.LEAST:
        return np.full(len(table), float(itemsize * -(-math.prod(shape) // math.prod(sizes))))
    size = itemsize * elements(codes, shape, sizes, most)
    if kind in (PlaceKind.OUTPUT, PlaceKind.OPERAND):
        return size
    cut = (states_of(codes, len(sizes)) < RAGGED) | (np.array(sizes) == 1)
    return np.where(cut.all(1) == (kind is PlaceKind.FULLY_SPLIT), size, 0.0)


def working_set_bytes(table: Table, mask: int, tensors: Tensors) -> np.ndarray:
    """Returns what the call has alive at once, at the least, by label. mask: see `Place`."""
    size = np.zeros(len(table))
    for at, ((itemsize, shape), codes) in enumerate(zip(tensors, table.ports)):
        if at >= len(table.ins) or mask >> at & 1:
            size += itemsize * elements(codes, shape, table.mesh.sizes, table.mesh.routing.most)
    two_phase = table.two_phase
    if two_phase.any():
        size[two_phase] = two_phase_bytes(table.subset(two_phase), tensors, mask)
    return size
