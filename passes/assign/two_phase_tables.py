"""Labels under which a node runs in two phases, as the small graph of its rule: which are legal, their seconds and
bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sbpc.boxing.paths import closure
from sbpc.mesh.layout_codes import elements, order_bits
from sbpc.passes.assign.label_tables import Table, Tensors, call_seconds, codes_of, cut_masks, legal_labels
from sbpc.rules import Signature
from sbpc.rules.choices import of_match
from sbpc.rules.match import SubOp
from sbpc.solver.problem import Array


@dataclass(frozen=True, eq=False)
class CallTable:
    """A call of the small graph, by label.

    tensors: its operands and its result. ins: the layout codes in which it reads the operands. made, read: the codes in
    which its result is left, and in which it is read. masks: by factor the axes that cut it.
    """

    part: SubOp
    tensors: Tensors
    ins: list[Array]
    made: Array
    read: Array
    masks: Mapping[str, Array]


def may_run(table: Table) -> Array:
    """Returns which labels run the node in one phase, or in two with all axes together and all conditions kept."""
    phases, two_phase, legal = table.candidates.phases, table.two_phase, np.ones(len(table), dtype=bool)
    if phases is None or not two_phase.any():
        return legal
    subset = table.subset(two_phase)
    ways = [phases.ways.get(signature) for signature in table.candidates.signatures]
    kept, orders = np.array([way is not None for way in ways])[subset.digits].all(1), orders_of(subset)
    for at, part in enumerate(phases.parts):
        if part.match.divides or part.match.nonempty:
            cut = [Signature((), ()) if way is None else way.signatures[at] for way in ways]
            kept &= legal_labels(of_match(part.match), cut_masks(cut, subset.digits), orders, table.mesh.sizes)
    legal[two_phase] = kept
    return legal


def orders_of(table: Table) -> Array:
    """Returns, by label, the bits of the order of all axes."""
    return np.array([order_bits(table.choice(label).order, len(table.mesh.axes)) for label in range(len(table))])


def sub_ops(table: Table, tensors: Tensors) -> Iterator[CallTable]:
    """Yields the calls of the small graph in order. tensors: the operands, at least, of the node."""
    phases = table.candidates.phases
    assert phases is not None
    used, at = np.unique(table.digits, return_inverse=True)
    digits, ways = at.reshape(table.digits.shape), [phases.ways[table.candidates.signatures[d]] for d in used]
    orders = orders_of(table)
    by_number = dict(enumerate(tensors[: len(table.ins)]))
    for place, part in enumerate(phases.parts):
        by_number[part.number] = part.val.element_size(), tuple(part.val.shape)
        signatures = [way.signatures[place] for way in ways]
        yield CallTable(
            part,
            tuple(by_number[number] for number in (*part.reads, part.number)),
            [codes_of(states, digits, orders) for states in zip(*(s.inputs for s in signatures))],
            codes_of([s.outputs[0] for s in signatures], digits, orders),
            codes_of([way.states[part.number] for way in ways], digits, orders),
            cut_masks(signatures, digits),
        )


def two_phase_seconds(table: Table, tensors: Tensors) -> Array:
    """Returns the seconds of all sub-ops and of the boxings among them, by label."""
    mesh, total = table.mesh, np.zeros(len(table))
    for each in sub_ops(table, tensors):
        total += call_seconds(each.part.match, each.masks, each.tensors, (*each.ins, each.made), 0.0, mesh)
        ends, at = np.unique(np.concatenate([each.made, each.read]), return_inverse=True)
        itemsize, shape = each.tensors[-1]
        total += closure(ends, shape, itemsize, mesh)[at[: len(table)], at[len(table) :]]
    return total


def two_phase_bytes(table: Table, tensors: Tensors, mask: int) -> Array:
    """Returns the most that sub-ops have alive at once, by label, without boxings among them.

    mask: bits of the operands that count, and above these of the results that something reads. Everything is alive
    till its last reader.
    """
    phases, count, sizes = table.candidates.phases, len(table.ins), table.mesh.sizes
    assert phases is not None
    calls = list(sub_ops(table, tensors))
    storage = storages([each.part for each in calls], count)
    read = [number for at, number in enumerate(phases.outputs) if number is not None and mask >> count + at & 1]
    last = last_uses([each.part for each in calls], read, storage)
    alive = {
        at: itemsize * elements(codes, shape, sizes)
        for at, (codes, (itemsize, shape)) in enumerate(zip(table.ins, tensors))
        if mask >> at & 1 and at in last
    }
    most = np.zeros(len(table))
    for at, each in enumerate(calls):
        number = each.part.number
        view = storage[number] != number
        itemsize, shape = each.tensors[-1]
        made, seen = (itemsize * elements(codes, shape, sizes) for codes in (each.made, each.read))
        made = 0 * made if view else made
        most = np.maximum(most, sum((size for other, size in alive.items() if last[other] >= at), made))
        if not view and number in last:
            alive[number] = np.minimum(made, seen)
    return most


def storages(parts: Sequence[SubOp], operands: int) -> dict[int, int]:
    """Returns, by value of the small graph, the value in whose storage it lies."""
    storage = {at: at for at in range(operands)}
    for part in parts:
        storage[part.number] = storage[part.reads[0]] if part.match.view and part.reads else part.number
    return storage


def last_uses(parts: Sequence[SubOp], results: Sequence[int], storage: Mapping[int, int]) -> dict[int, int]:
    """Returns, by value, the place of the last sub-op that reads it or a view of it; results are read after all of
    them."""
    last = dict.fromkeys(results, len(parts))
    for at, part in enumerate(parts):
        last |= {number: max(at, last.get(number, 0)) for number in part.reads}
    for number, at in list(last.items()):
        last[storage[number]] = max(at, last.get(storage[number], 0))
    return last
