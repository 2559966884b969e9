"""Tables: all that a kind of node may do on a mesh, as arrays by label; a Choice is made only for the label chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sbpc.boxing.paths import closure
from sbpc.mesh.cluster import kernel_seconds
from sbpc.mesh.layout import Layout
from sbpc.mesh.layout_codes import (
    ORDERS,
    WHOLE,
    decode,
    elements,
    joined,
    order_bits,
    pairs,
    sorted_axes,
    state_code,
    states_of,
)
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish
from sbpc.mesh.states import State
from sbpc.rules import Match
from sbpc.rules.choices import Candidates, Choice, may_cut, of_match
from sbpc.rules.match import Part

Tensors = tuple[tuple[int, tuple[int, ...]], ...]
"""Bytes per element and global shape of every operand and output."""


@dataclass(frozen=True, eq=False)
class Table:
    """The labels of a node.

    digits [labels, axes]: the candidate that each axis takes. bits [labels]: the order of axes that cut one factor, see
    `codes`. seconds [labels]: of the local op. ins, outs: by operand and output the layout codes [labels].
    """

    candidates: Candidates
    mesh: Mesh
    digits: np.ndarray
    bits: np.ndarray
    seconds: np.ndarray
    ins: tuple[np.ndarray, ...]
    outs: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.seconds)

    def choice(self, label: int) -> Choice:
        """What the label stands for."""
        signatures = tuple(self.candidates.signatures[digit] for digit in self.digits[label])
        groups: dict[str, list[int]] = {}
        for axis, signature in enumerate(signatures):
            if signature.factor is not None:
                groups.setdefault(signature.factor, []).append(axis)
        count, bits = len(signatures), int(self.bits[label])
        cut = [sorted_axes(group, bits, count) for group in groups.values() if len(group) > 1]
        if all(axes == tuple(sorted(axes)) for axes in cut):
            return Choice(signatures, tuple(range(count)))
        ordered = tuple(itertools.chain(*cut))
        return Choice(signatures, (*(axis for axis in range(count) if axis not in ordered), *ordered))

    def label(self, choice: Choice) -> int | None:
        """The label that stands for a choice, or for what is the same in all layouts; None if there is none."""
        place = {signature: at for at, signature in enumerate(self.candidates.signatures)}
        same = np.flatnonzero((self.digits == [place[s] for s in choice.signatures]).all(1)).tolist()
        return next((label for label in same if self.choice(label).cuts() == choice.cuts()), None)

    def output(self, index: int, label: int) -> Layout:
        """The layout in which the label leaves an output."""
        return decode(int(self.outs[index][label]), self.mesh.axes)

    def admitted(self, wish: Wish) -> Table:
        """The labels whose first output is as wished."""
        found, at = np.unique(self.outs[0], return_inverse=True)
        good = np.array([wish.admits(decode(int(code), self.mesh.axes)) for code in found], dtype=bool)
        return self.kept(np.flatnonzero(good[at]))

    @property
    def apart(self) -> np.ndarray:
        """Which labels take the node apart."""
        phases = self.candidates.phases
        if phases is None:
            return np.zeros(len(self), dtype=bool)
        return np.array([phases.apart([s]) for s in self.candidates.signatures])[self.digits].any(1)

    def kept(self, labels: np.ndarray) -> Table:
        """Some of the labels."""
        return replace(
            self,
            digits=self.digits[labels],
            bits=self.bits[labels],
            seconds=self.seconds[labels],
            ins=tuple(found[labels] for found in self.ins),
            outs=tuple(found[labels] for found in self.outs),
        )


def tabulate(
    candidates: Candidates, match: Match | None, tensors: Tensors, mesh: Mesh, free: bool, every: bool
) -> Table:
    """The table of a kind of node; `free`: it takes no time. every: in all orders of cutting, else in mesh order only.

    Of labels with the same layouts at all tensors the cheapest is kept.
    """
    signatures = candidates.signatures
    per_axis = [len(signatures) if size > 1 else 1 for size in mesh.sizes]
    digits = np.indices(per_axis).reshape(len(per_axis), -1).T
    names = [signature.factor for signature in signatures]
    numbers = {name: -1 if name is None else at for at, name in enumerate(dict.fromkeys(names))}
    rows, bits = ordered(np.array([numbers[name] for name in names])[digits], every)
    digits = digits[rows]
    legal = may_be(candidates, cutters(names, digits), bits, mesh.sizes)
    found = laid_out(candidates, mesh, digits[legal], bits[legal])
    phases = candidates.phases
    apart = np.array([phases is not None and phases.apart([s]) for s in signatures])[found.digits].any(1)
    if apart.any():
        possible = ~apart
        possible[apart] = may_be_apart(found.kept(np.flatnonzero(apart)))
        found, apart = found.kept(np.flatnonzero(possible)), apart[possible]
    if not free:
        masks, ports = cutters(names, found.digits), (*found.ins, *found.outs)
        seconds = call_seconds(match, masks, tensors, ports, float(np.prod(tensors[len(found.ins)][1])), mesh)
        if apart.any():
            seconds[apart] = apart_seconds(found.kept(np.flatnonzero(apart)), tensors)
        found = replace(found, seconds=seconds)
    return found.kept(cheapest_of_equals(found.seconds, (*found.ins, *found.outs)))


def laid_out(candidates: Candidates, mesh: Mesh, digits: np.ndarray, bits: np.ndarray) -> Table:
    """The table of these digits and orders, which take no time yet."""
    ins, outs = (
        tuple(codes(states, digits, bits) for states in zip(*columns))
        for columns in ([s.inputs for s in candidates.signatures], [s.outputs for s in candidates.signatures])
    )
    return Table(candidates, mesh, digits, bits, np.zeros(len(digits)), ins, outs)


def codes(states: Sequence[State], digits: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """The layout codes of a tensor, by label; states: by digit."""
    return joined(np.array([state_code(state) for state in states])[digits], bits)


def cutters(names: Sequence[str | None], digits: np.ndarray) -> dict[str, np.ndarray]:
    """By factor and label the axes that cut it, as bits; names: by digit the factor that it cuts."""
    place = np.arange(digits.shape[1])
    cut = {name: np.array([other == name for other in names]) for name in names if name is not None}
    return {name: (which[digits].astype(np.int64) << place).sum(1) for name, which in cut.items()}


def ordered(cutter: np.ndarray, every: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers and bits for each order in which the axes of a row can cut; cutter [rows, axes]: the factor, or -1."""
    count = cutter.shape[1]
    mask = np.zeros(len(cutter), dtype=np.int64)
    for bit, (a, b) in enumerate(pairs(count)):
        mask |= ((cutter[:, a] == cutter[:, b]) & (cutter[:, a] >= 0)).astype(np.int64) << bit
    if not every:
        return np.arange(len(cutter)), np.zeros(len(cutter), dtype=np.int64)
    rows, bits = [], []
    for value in np.unique(mask).tolist():
        at = np.flatnonzero(mask == value)
        found = patterns(cutter[at[0]].tolist(), value)
        rows.append(np.repeat(at, len(found)))
        bits.append(np.tile(found, len(at)))
    row, bit_of = np.concatenate(rows), np.concatenate(bits)
    back = np.argsort(row, kind="stable")
    return row[back], bit_of[back]


def patterns(cutter: Sequence[int], mask: int) -> np.ndarray:
    """The bits of all orders of the axes that cut the same factors; mesh order first."""
    groups: dict[int, list[int]] = {}
    for axis, factor in enumerate(cutter):
        if factor >= 0:
            groups.setdefault(factor, []).append(axis)
    found = [
        order_bits(tuple(itertools.chain(*orders)), len(cutter)) & mask
        for orders in itertools.product(*(itertools.permutations(group) for group in groups.values()))
    ]
    return np.array(found, dtype=np.int64)


def may_be(
    candidates: Candidates, masks: Mapping[str, np.ndarray], bits: np.ndarray, sizes: Sequence[int]
) -> np.ndarray:
    """Which labels keep the conditions of every factor that they cut; masks: by factor the axes that cut it, as bits."""
    legal = np.ones(len(bits), dtype=bool)
    known = dict(candidates.sizes)
    for factor, mask in masks.items():
        cuts, at = np.unique(mask << 6 | bits, return_inverse=True)
        good = []
        for cut in cuts.tolist():
            axes = sorted_axes([axis for axis in range(len(sizes)) if cut >> 6 + axis & 1], cut & 63, len(sizes))
            even = factor in candidates.divides or (candidates.mesh_order and axes != tuple(sorted(axes)))
            ranks = tuple(sizes[axis] for axis in axes)
            good.append(may_cut(known[factor], ranks, even, factor in candidates.nonempty))
        legal &= np.array(good, dtype=bool)[at]
    return legal


def call_seconds(
    match: Match | None,
    masks: Mapping[str, np.ndarray],
    tensors: Tensors,
    codes: Sequence[np.ndarray],
    points: float,
    mesh: Mesh,
) -> np.ndarray:
    """Seconds of the local kernel under every label; masks: by factor the axes that cut it; codes: by tensor the layouts.

    points: the flops of a call without a rule.
    """
    labels = len(codes[0])
    if match is not None and match.view:
        return np.zeros(labels)
    flops: Any = points
    if match is not None:
        whole = np.zeros(labels, dtype=np.int64)
        flops = match.flops({f: held(n, masks.get(f, whole), mesh.sizes) for f, n in match.sizes.items()})
    moved = np.zeros(labels)
    for (itemsize, shape), found in zip(tensors, codes):
        moved += itemsize * elements(found, shape, mesh.sizes)
    cluster = mesh.cluster
    seconds = kernel_seconds(flops, moved, cluster.peak, cluster.memory_bandwidth, cluster.launch)
    return np.broadcast_to(seconds, (labels,)).astype(float)


def held(size: int, masks: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """What the rank at coordinates 0 holds of a factor of `size` that these axes cut."""
    cut = (masks[:, None] >> np.arange(len(sizes))) & 1
    return (-(-size // np.where(cut == 1, np.array(sizes), 1).prod(1))).astype(float)


# --- nodes that are taken apart ---------------------------------------------------------------------------------------
def may_be_apart(table: Table) -> np.ndarray:
    """Which labels have all axes go together in the small graph, and keep the conditions of all its parts."""
    phases, count = table.candidates.phases, len(table.mesh.axes)
    assert phases is not None
    ways = [phases.ways.get(signature) for signature in table.candidates.signatures]
    legal = np.array([way is not None for way in ways])[table.digits].all(1)
    order = np.array([order_bits(table.choice(label).order, count) for label in range(len(table))])
    for at, part in enumerate(phases.parts):
        if part.match.divides or part.match.nonempty:
            names = [None if way is None else way.signatures[at].factor for way in ways]
            legal &= may_be(of_match(part.match), cutters(names, table.digits), order, table.mesh.sizes)
    return legal


@dataclass(frozen=True, eq=False)
class Parted:
    """A part of a node that is taken apart, by label: tensors: its operands and its result; reads, made: the codes in
    which it reads and leaves them; read: those in which its result is read; masks: by factor the axes that cut it."""

    part: Part
    tensors: Tensors
    reads: list[np.ndarray]
    made: np.ndarray
    read: np.ndarray
    masks: Mapping[str, np.ndarray]


def parted(table: Table, operands: Tensors) -> Iterator[Parted]:
    """The parts of a node that is taken apart under all labels of the table, in order."""
    phases = table.candidates.phases
    assert phases is not None
    used, at = np.unique(table.digits, return_inverse=True)
    digits, ways = at.reshape(table.digits.shape), [phases.ways[table.candidates.signatures[d]] for d in used]
    order = np.array([order_bits(table.choice(label).order, len(table.mesh.axes)) for label in range(len(table))])
    sized = dict(enumerate(operands[: len(table.ins)]))
    for number, part in enumerate(phases.parts):
        sized[part.number] = part.val.element_size(), tuple(part.val.shape)
        chosen = [way.signatures[number] for way in ways]
        reads = [codes(states, digits, order) for states in zip(*(s.inputs for s in chosen))]
        made = codes([s.outputs[0] for s in chosen], digits, order)
        read = codes([way.states[part.number] for way in ways], digits, order)
        tensors = tuple(sized[n] for n in (*part.reads, part.number))
        yield Parted(part, tensors, reads, made, read, cutters([s.factor for s in chosen], digits))


def apart_seconds(table: Table, operands: Tensors) -> np.ndarray:
    """Seconds of a node that is taken apart, by label: of all its parts, and of the boxings among them."""
    mesh, total = table.mesh, np.zeros(len(table))
    for each in parted(table, operands):
        total += call_seconds(each.part.match, each.masks, each.tensors, (*each.reads, each.made), 0.0, mesh)
        ends, at = np.unique(np.concatenate([each.made, each.read]), return_inverse=True)
        itemsize, shape = each.tensors[-1]
        total += closure(ends, shape, itemsize, mesh)[at[: len(each.made)], at[len(each.made) :]]
    return total


def apart_bytes(table: Table, operands: Tensors, counted: int) -> np.ndarray:
    """The most that is alive at once of the parts of a node that is taken apart, by label, and of the operands with a
    bit in `counted`, each till its last reader, as are results without a bit above. Boxings among the parts are left out."""
    phases, sizes = table.candidates.phases, table.mesh.sizes
    assert phases is not None
    count, parts = len(table.ins), list(parted(table, operands))
    lies_in = {at: at for at in range(count)}  # the value in whose storage a value lies
    results = [number for at, number in enumerate(phases.outputs) if counted >> count + at & 1]
    last = {number: len(parts) for number in results if number is not None}
    for at, each in enumerate(parts):
        view = each.part.match.view and each.part.reads
        lies_in[each.part.number] = lies_in[each.part.reads[0]] if view else each.part.number
        last |= {number: max(at, last.get(number, 0)) for number in each.part.reads}
    for number, at in list(last.items()):
        last[lies_in[number]] = max(at, last.get(lies_in[number], 0))
    held = {
        at: operands[at][0] * elements(table.ins[at], operands[at][1], sizes)
        for at in range(count) if counted >> at & 1 and at in last
    }  # fmt: skip
    most = np.zeros(len(table))
    for at, each in enumerate(parts):
        number, (itemsize, shape) = each.part.number, each.tensors[-1]
        made = np.zeros(len(table))
        if lies_in[number] == number:
            made = itemsize * elements(each.made, shape, sizes)
        most = np.maximum(most, sum((found for n, found in held.items() if last[n] >= at), made))
        if lies_in[number] == number and number in last:
            held[number] = np.minimum(made, itemsize * elements(each.read, shape, sizes))
    return most


def cheapest_of_equals(seconds: np.ndarray, ports: Sequence[np.ndarray]) -> np.ndarray:
    """The labels that no earlier or cheaper one equals in all layouts, in their order."""
    key = np.zeros(len(seconds), dtype=np.int64)
    for found in ports:
        _, at = np.unique(found, return_inverse=True)
        _, key = np.unique(key * (at.max() + 1) + at, return_inverse=True)
    by_cost = np.argsort(seconds, kind="stable")
    return np.sort(by_cost[np.unique(key[by_cost], return_index=True)[1]])


# --- nodes that only rename the dims of their operand -----------------------------------------------------------------
def renames(table: Table, tensors: Tensors) -> bool:
    """Whether, at no cost, each label leaves the one output in the layout of the one operand with its dims renamed."""
    if len(table.ins) != 1 or len(table.outs) != 1 or table.seconds.any():
        return False
    (taken,), (left,), ((itemsize, shape), (size, new_shape)) = table.ins, table.outs, tensors
    if itemsize != size or sorted(shape) != sorted(new_shape):
        return False
    before, after = (states_of(codes, len(table.mesh.axes)) for codes in (taken, left))
    new = np.arange(16)
    new[before] = after
    cut = np.unique(before[before < WHOLE])
    return (
        bool((new[before] == after).all() and (taken >> ORDERS == left >> ORDERS).all())
        and len(np.unique(new[cut])) == len(cut)
        and all(new[dim] < len(shape) and shape[dim] == new_shape[new[dim]] for dim in cut)
        and bool((new[WHOLE:] == np.arange(WHOLE, 16)).all())
    )


def narrowed(table: Table, made: np.ndarray, taken: np.ndarray) -> Table:
    """The labels of a renaming that read a layout which is `made`, or leave one which is `taken`, whichever are fewer.

    All of them, where the table lacks some of these layouts.
    """
    ends = [(np.unique(made), table.ins[0]), (np.unique(taken), table.outs[0])]
    for codes, port in sorted(ends, key=lambda pair: len(pair[0])):
        if len(codes) < len(table) and np.isin(codes, port).all():
            return table.kept(np.flatnonzero(np.isin(port, codes)))
    return table
