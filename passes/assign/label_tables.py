"""Tables: all that a kind of node may do on a mesh, as arrays by label; a Choice is made only for the label chosen."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sbpc.boxing.steps import kernel_seconds
from sbpc.graph.expert_rows import ENDS, MESSAGE, SCANS
from sbpc.mesh.collectives import COUNTS, DISPATCH, seconds_on
from sbpc.mesh.layout import Layout
from sbpc.mesh.layout_codes import decode, elements, joined, sorted_axes, state_code
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish
from sbpc.mesh.routing import stretched
from sbpc.mesh.states import State
from sbpc.rules import Match, Signature
from sbpc.rules.choices import Candidates, Choice, may_cut
from sbpc.rules.moved_rows import asks
from sbpc.solver.problem import Array

PAIR_BITS = 6  # bits for an order of cutting: one per pair of up to four axes
Tensors = tuple[tuple[int, tuple[int, ...]], ...]
"""Bytes per element and global shape of every operand and output."""


@dataclass(frozen=True, eq=False)
class Table:
    """The labels of a node.

    digits [labels, axes]: the number of the signature that each axis takes. bits [labels]: the order of axes that
    cut one factor, see `sbpc.mesh.layout_codes`. seconds [labels]: of the local op. ins, outs: by operand and output
    the layout codes [labels].
    """

    candidates: Candidates
    mesh: Mesh
    digits: Array
    bits: Array
    seconds: Array
    ins: tuple[Array, ...]
    outs: tuple[Array, ...]

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def ports(self) -> tuple[Array, ...]:
        """The layout codes of all operands and outputs."""
        return (*self.ins, *self.outs)

    @property
    def two_phase(self) -> Array:
        """Which labels run the node in two phases."""
        phases = self.candidates.phases
        if phases is None:
            return np.zeros(len(self), dtype=bool)
        return np.array([phases.apart([s]) for s in self.candidates.signatures])[self.digits].any(1)

    @property
    def sharing(self) -> Array:
        """Which axes share out rows by their groups, [labels, axes]."""
        return np.array([signature.ragged is not None for signature in self.candidates.signatures])[self.digits]

    @property
    def apart(self) -> Array:
        """Which labels share out rows of which each rank has sorted its own."""
        sent = [bool(signature.ragged and signature.own) for signature in self.candidates.signatures]
        return np.array(sent)[self.digits].any(1)

    def choice(self, label: int) -> Choice:
        """Returns what the label stands for."""
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
        """Returns the label that stands for a choice, or for what is the same in all layouts; None if there is none."""
        digit = {signature: at for at, signature in enumerate(self.candidates.signatures)}
        same = np.flatnonzero((self.digits == [digit[s] for s in choice.signatures]).all(1)).tolist()
        return next((label for label in same if self.choice(label).cuts() == choice.cuts()), None)

    def output(self, index: int, label: int) -> Layout:
        """Returns the layout in which the label leaves an output."""
        return decode(int(self.outs[index][label]), self.mesh.axes)

    def admitted(self, wish: Wish) -> Table:
        """Returns the labels whose first output is as wished."""
        codes, at = np.unique(self.outs[0], return_inverse=True)
        good = np.array([wish.admits(decode(int(code), self.mesh.axes)) for code in codes], dtype=bool)
        return self.subset(good[at])

    def subset(self, labels: Array) -> Table:
        """Returns some of the labels, given by their numbers or by a mask."""
        return replace(
            self,
            digits=self.digits[labels],
            bits=self.bits[labels],
            seconds=self.seconds[labels],
            ins=tuple(codes[labels] for codes in self.ins),
            outs=tuple(codes[labels] for codes in self.outs),
        )


def codes_of(states: Sequence[State], digits: Array, bits: Array) -> Array:
    """Returns the layout codes of a tensor, by label. states: by digit."""
    return joined(np.array([state_code(state) for state in states])[digits], bits)


def cut_masks(signatures: Sequence[Signature], digits: Array) -> dict[str, Array]:
    """Returns, by factor and label, the axes that cut it, as bits. signatures: by digit."""
    return factor_masks([(signature.factor, signature.own) for signature in signatures], digits)


def factor_masks(factors: Sequence[Collection[str | None]], digits: Array) -> dict[str, Array]:
    """Returns, by factor and label, the axes on which it is one of those that the digit has, as bits. factors: by
    digit."""
    bit = np.arange(digits.shape[1])
    cut = {f: np.array([f in some for some in factors]) for some in factors for f in some if f is not None}
    return {factor: (which[digits].astype(np.int64) << bit).sum(1) for factor, which in cut.items()}


def legal_labels(candidates: Candidates, masks: Mapping[str, Array], bits: Array, sizes: Sequence[int]) -> Array:
    """Returns which labels keep the conditions of every factor that they cut. masks: see `cut_masks`."""
    legal = np.ones(len(bits), dtype=bool)
    factor_sizes = dict(candidates.sizes)
    for factor, mask in masks.items():
        cuts, at = np.unique(mask << PAIR_BITS | bits, return_inverse=True)
        good = []
        for cut in cuts.tolist():
            group = [axis for axis in range(len(sizes)) if cut >> PAIR_BITS + axis & 1]
            axes = sorted_axes(group, cut & (1 << PAIR_BITS) - 1, len(sizes))
            even = factor in candidates.divides or (candidates.mesh_order and axes != tuple(sorted(axes)))
            ranks = tuple(sizes[axis] for axis in axes)
            good.append(may_cut(factor_sizes[factor], ranks, even, factor in candidates.nonempty))
        legal &= np.array(good, dtype=bool)[at]
    return legal


def call_seconds(
    match: Match | None,
    masks: Mapping[str, Array],
    tensors: Tensors,
    ports: Sequence[Array],
    points: float,
    mesh: Mesh,
    rows: Mapping[str, Array] | None = None,
) -> Array:
    """Returns the seconds of the local kernel, by label.

    masks: see `cut_masks`. ports: by tensor the layout codes. points: the flops of a call without a rule. rows: as
    masks, the axes that share out the rows of a factor by their groups.
    """
    labels = len(ports[0])
    if match is not None and match.view:
        return np.zeros(labels)
    flops: Any = points
    form = None
    if match is not None:
        uncut = np.zeros(labels, dtype=np.int64)
        shared = rows or {}
        local = {f: local_size(n, masks.get(f, uncut), shared.get(f, uncut), mesh) for f, n in match.sizes.items()}
        flops = match.flops(local)
        form = match.shape(local, {f: (masks.get(f, uncut) | shared.get(f, uncut)) != 0 for f in {**masks, **shared}})
    bytes_moved = np.zeros(labels)
    for (itemsize, shape), codes in zip(tensors, ports):
        bytes_moved += itemsize * elements(codes, shape, mesh.sizes, mesh.routing.expected)
    if rows and match is not None and match.op in MESSAGE:
        (itemsize, shape), codes = tensors[1], ports[1]
        scanned = itemsize * elements(codes, shape, mesh.sizes, mesh.routing.expected)
        bytes_moved += SCANS * scanned * (sum(rows.values()) > 0)
    seconds = mesh.cluster.kernel_seconds("" if match is None else str(match.op), flops, bytes_moved, form)
    return np.broadcast_to(seconds, (labels,)).astype(float)


def dispatch_seconds(
    match: Match | None, sharing: Array, apart: Array, tensors: Tensors, ports: Sequence[Array], mesh: Mesh
) -> Array:
    """Returns the seconds, by label, in which a call sends rows to the ranks of their groups, or back.

    sharing: by label the axes that share out rows. apart: whether each has sorted its own, so that all learn from each
    other how many there are for each group.
    """
    found = np.zeros(len(sharing))
    if match is None or match.op not in MESSAGE:
        return found
    at = MESSAGE[match.op]
    (itemsize, shape), codes = tensors[at], ports[at]
    for row in np.unique(sharing, axis=0):
        labels = (sharing == row).all(1) if row.any() else np.zeros(len(sharing), dtype=bool)
        if labels.any():
            lines, least = mesh.lines(np.flatnonzero(row).tolist(), DISPATCH)
            block = itemsize * elements(codes[labels], shape, mesh.sizes, mesh.routing.expected)
            found[labels] = np.maximum(np.min([start + each * block for start, each in lines], axis=0), least)
            found[labels] += sum(kernel_seconds(DISPATCH, 0, 0, mesh))
            if asks(match):
                lines, least = mesh.lines(np.flatnonzero(row).tolist(), COUNTS)
                itemsize_of_ends, ends = tensors[ENDS]
                found[labels & apart] += max(seconds_on(lines, itemsize_of_ends * math.prod(ends)), least)
    return found


def local_size(size: int, masks: Array, rows: Array, mesh: Mesh) -> Array:
    """Returns what the busiest rank holds of a factor of `size`, by label. masks, rows: the axes that cut it, and those
    that share out its rows, as bits."""
    cut, shared = (ranks_of(each, mesh.sizes) for each in (masks, rows))
    whole = stretched(size, shared, mesh.routing.expected) if rows.any() else size
    return (-(-whole // (cut * shared))).astype(float)


def ranks_of(masks: Array, sizes: Sequence[int]) -> Array:
    """Returns how many ranks axes have together, by label. masks: the axes, as bits."""
    cut = (masks[:, None] >> np.arange(len(sizes))) & 1
    made: Array = np.where(cut == 1, np.array(sizes), 1).prod(1)
    return made
