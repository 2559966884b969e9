"""Makes the table of a kind of node: all combinations of its signatures that are legal, the cheapest of equal ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sbpc.mesh.layout_codes import ORDERS, STATES, WHOLE, order_bits, pairs, states_of
from sbpc.mesh.mesh import Mesh
from sbpc.passes.assign.label_tables import (
    Table,
    Tensors,
    call_seconds,
    codes_of,
    cut_masks,
    dispatch_seconds,
    factor_masks,
    legal_labels,
)
from sbpc.passes.assign.two_phase_tables import may_run, two_phase_seconds
from sbpc.rules import Match
from sbpc.rules.choices import Candidates
from sbpc.solver.problem import Array


def tabulate(
    candidates: Candidates, match: Match | None, tensors: Tensors, mesh: Mesh, free: bool, every: bool
) -> Table:
    """Returns the table of a kind of node. Of labels with the same layouts at all tensors it has the cheapest.

    free: the node takes no time. every: in all orders of cutting, else in mesh order only.
    """
    factors = [signature.factor for signature in candidates.signatures]
    digits, bits = all_labels(factors, mesh, every)
    legal = legal_labels(candidates, cut_masks(candidates.signatures, digits), bits, mesh.sizes)
    table = laid_out(candidates, mesh, digits[legal], bits[legal])
    table = table.subset(may_run(table))
    if any(signature.ordered for signature in candidates.signatures):
        table = table.subset(
            np.array([candidates.legal(table.choice(at), mesh.sizes) for at in range(len(table))], bool)
        )
    if not free:
        points = float(np.prod(tensors[len(table.ins)][1]))
        masks = cut_masks(candidates.signatures, table.digits)
        rows = factor_masks([(signature.ragged,) for signature in candidates.signatures], table.digits)
        seconds = call_seconds(match, masks, tensors, table.ports, points, mesh, rows)
        seconds = seconds + dispatch_seconds(match, table.sharing, table.apart, tensors, table.ports, mesh)
        two_phase = table.two_phase
        if two_phase.any():
            seconds[two_phase] = two_phase_seconds(table.subset(two_phase), tensors)
        table = replace(table, seconds=seconds)
    return table.subset(cheapest_of_equals(table))


def all_labels(factors: Sequence[str | None], mesh: Mesh, every: bool) -> tuple[Array, Array]:
    """Returns the digits and bits of all combinations of signatures and orders. factors: that the signatures cut."""
    per_axis = [len(factors) if size > 1 else 1 for size in mesh.sizes]
    digits = np.indices(per_axis).reshape(len(per_axis), -1).T
    if not every:
        return digits, np.zeros(len(digits), dtype=np.int64)
    numbers = {factor: -1 if factor is None else at for at, factor in enumerate(dict.fromkeys(factors))}
    rows, bits = with_orders(np.array([numbers[factor] for factor in factors])[digits])
    return digits[rows], bits


def with_orders(factors: Array) -> tuple[Array, Array]:
    """Returns row numbers and bits for each order in which the axes of a row can cut. factors [rows, axes]: -1 for
    none."""
    shared = np.zeros(len(factors), dtype=np.int64)
    for bit, (a, b) in enumerate(pairs(factors.shape[1])):
        shared |= ((factors[:, a] == factors[:, b]) & (factors[:, a] >= 0)).astype(np.int64) << bit
    rows, bits = [], []
    for mask in np.unique(shared).tolist():
        at = np.flatnonzero(shared == mask)
        orders = orders_of_cutting(factors[at[0]].tolist(), mask)
        rows.append(np.repeat(at, len(orders)))
        bits.append(np.tile(orders, len(at)))
    row, bits_of_row = np.concatenate(rows), np.concatenate(bits)
    by_row = np.argsort(row, kind="stable")
    return row[by_row], bits_of_row[by_row]


def orders_of_cutting(factors: Sequence[int], mask: int) -> Array:
    """Returns the bits of all orders of the axes that cut the same factors, mesh order first."""
    groups: dict[int, list[int]] = {}
    for axis, factor in enumerate(factors):
        if factor >= 0:
            groups.setdefault(factor, []).append(axis)
    orders = itertools.product(*(itertools.permutations(group) for group in groups.values()))
    bits = [order_bits(tuple(itertools.chain(*order)), len(factors)) & mask for order in orders]
    return np.array(bits, dtype=np.int64)


def laid_out(candidates: Candidates, mesh: Mesh, digits: Array, bits: Array) -> Table:
    """Returns the table of these digits and orders, which take no time yet."""
    ins, outs = (
        tuple(codes_of(states, digits, bits) for states in zip(*columns))
        for columns in ([s.inputs for s in candidates.signatures], [s.outputs for s in candidates.signatures])
    )
    return Table(candidates, mesh, digits, bits, np.zeros(len(digits)), ins, outs)


def cheapest_of_equals(table: Table) -> Array:
    """Returns the labels that no earlier or cheaper one equals in all layouts, in their order."""
    key = np.zeros(len(table), dtype=np.int64)
    for codes in table.ports:
        _, at = np.unique(codes, return_inverse=True)
        _, key = np.unique(key * (at.max() + 1) + at, return_inverse=True)
    by_cost = np.argsort(table.seconds, kind="stable")
    return np.sort(by_cost[np.unique(key[by_cost], return_index=True)[1]])


def only_renames(table: Table, tensors: Tensors) -> bool:
    """Whether, at no cost, each label leaves the one output in the layout of the one operand with its dims renamed."""
    if len(table.ins) != 1 or len(table.outs) != 1 or table.seconds.any():
        return False
    (taken,), (left,), ((itemsize, shape), (new_itemsize, new_shape)) = table.ins, table.outs, tensors
    if itemsize != new_itemsize or sorted(shape) != sorted(new_shape):
        return False
    before, after = (states_of(codes, len(table.mesh.axes)) for codes in (taken, left))
    renamed = np.arange(STATES)
    renamed[before] = after
    cut = np.unique(before[before < WHOLE])
    return (
        bool((renamed[before] == after).all() and (taken >> ORDERS == left >> ORDERS).all())
        and len(np.unique(renamed[cut])) == len(cut)
        and all(renamed[dim] < len(shape) and shape[dim] == new_shape[renamed[dim]] for dim in cut)
        and bool((renamed[WHOLE:] == np.arange(WHOLE, STATES)).all())
    )


def narrowed(table: Table, made: Array, taken: Array) -> Table:
    """Returns the labels of a renaming that read a layout which is `made`, or leave one which is `taken`: the fewer
    of these.

    All of them, where the table lacks some of these layouts.
    """
    ends = [(np.unique(made), table.ins[0]), (np.unique(taken), table.outs[0])]
    for codes, port in sorted(ends, key=lambda pair: len(pair[0])):
        if len(codes) < len(table) and np.isin(codes, port).all():
            return table.subset(np.isin(port, codes))
    return table
