"""Finds the boxings that may go in panels, and the dim along which each product next to them is cut."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from sbpc.graph.operands import operands
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.measure import layout_at
from sbpc.plans.memory import shard_bytes
from sbpc.plans.plan import Plan
from sbpc.plans.timeline import exposed_seconds, works

aten = torch.ops.aten
PRODUCTS = (
    aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.einsum.default, aten.linear.default, aten.mm.default,
)  # fmt: skip
RESULT = -1  # the place of what a product makes, in place of the number of an operand


@dataclass(frozen=True)
class Move:
    """Boxings of one value that send something: only products read what comes out, or a product made what goes in.

    value: the node of the annotated graph. ends: those products, each with the number of the operand that the value is, or RESULT.
    seconds: what the boxings take. exposed: of these, when nothing is computed. latency: of these, what does not depend on the bytes.
    beside: seconds that the products take. joining: seconds in which what they make is put together from panels.
    """

    value: Node
    before: Layout
    after: Layout
    ends: tuple[tuple[Node, int], ...]
    seconds: float
    exposed: float
    latency: float
    beside: float
    joining: float


@dataclass(frozen=True)
class Cut:
    """A factor of a product to be cut into panels. A panel has a part of each of so many blocks, so that cuts into blocks stay even."""

    factor: str
    blocks: int
    panels: int


Cuts = dict[Node, Cut]


def moves(plan: Plan) -> list[Move]:
    """Returns what may go in panels, in the order of the graph."""
    nodes = {node.name: node for node in plan.graph.graph.nodes}
    work, exposed = works(plan.unscheduled, plan.mesh), exposed_seconds(plan.timeline())
    found = []
    for last in plan.unscheduled.graph.nodes:
        if "step" not in last.meta or (len(last.users) == 1 and "step" in next(iter(last.users)).meta):
            continue
        chain = [last]
        while "step" in (source := operands(chain[-1])[0]).meta and len(source.users) == 1:
            chain.append(source)
        value = source
        while "step" in value.meta:
            (value,) = operands(value)
        seconds, ends = sum(work[node].seconds for node in chain), ends_of(value, chain)
        if not seconds or not ends or not all(node.name in nodes for node in (value, *(node for node, _ in ends))):
            continue  # a name that is not there is that of a part of an op which is taken apart
        before, after = layout_at(source), layout_at(last)
        held = sum(held_bytes(node, after if slot == RESULT else layout_at(node), plan.mesh) for node, slot in ends)
        shown, latency = sum(exposed.get(node.name, 0.0) for node in chain), sum(work[node].latency for node in chain)
        beside, joining = sum(work[node].seconds for node, _ in ends), 2 * held / plan.mesh.cluster.memory_bandwidth
        known = tuple((nodes[node.name], slot) for node, slot in ends)
        found.append(Move(nodes[value.name], before, after, known, seconds, shown, latency, beside, joining))
    return found


def held_bytes(node: Node, layout: Layout, mesh: Mesh) -> int:
    """Returns the bytes that a rank holds of the result of a product in a layout."""
    value = node.meta["val"]
    return shard_bytes(layout, tuple(value.shape), value.dtype, mesh.sizes)


def ends_of(value: Node, chain: Sequence[Node]) -> list[tuple[Node, int]]:
    """Returns the products at the ends of boxings of a value, the last one first in `chain`; none if something else is there."""
    if value.target in PRODUCTS and list(value.users) == [chain[-1]]:
        return [(value, RESULT)]
    if not all(reader.target in PRODUCTS for reader in chain[0].users):
        return []
    return [(reader, slot) for reader in chain[0].users for slot, read in enumerate(operands(reader)) if read is chain[0]]


def cuts(plan: Plan, found: Sequence[Move], wanted: Iterable[tuple[Move, int]]) -> Cuts:
    """Returns the products to be cut so that moves go in so many panels, as far as one way of cutting does for all at a product.

    wanted: the moves with their numbers of panels; what is decided for an earlier one stays. Of the dims of a value the one is taken
    by which most seconds of moves go in panels; of equal ones that by which fewest products are sums of panels, as those are added.
    """
    decided: Cuts = {}
    for move, panels in wanted:
        ways = [way for dim in range(move.value.meta["val"].dim()) if (way := cut_along(plan, found, move, dim, panels, decided))]
        if ways:
            best: Cuts = max(ways, key=lambda way: (covered(found, way), -sum(is_summed(node, cut.factor) for node, cut in way.items())))
            decided |= best
    return decided


def cut_along(plan: Plan, found: Sequence[Move], move: Move, dim: int, panels: int, decided: Cuts) -> Cuts:
    """Returns how the products of a move are cut along one dim of its value; nothing if one of them cannot, or is cut otherwise."""
    way: Cuts = {}
    for node, slot in move.ends:
        factor = factors_of(node, slot)[dim]
        blocks = 0 if factor is None else blocks_of(plan, found, node, factor, panels)
        if not blocks or factor is None:
            return {}
        cut = Cut(factor, blocks, panels)
        if decided.get(node, way.get(node, cut)) != cut:
            return {}
        way[node] = cut
    return way if len({cut.blocks for cut in way.values()}) == 1 else {}


def factors_of(node: Node, slot: int) -> list[str | None]:
    """Returns by dim of an operand or of the result of a product the factor that it is; None for a dim that is not one factor."""
    bound = node.meta["match"].bound
    dims = (bound.outputs[0] if slot == RESULT else bound.inputs[slot]).dims
    return [dim.factors[0] if len(dim.factors) == 1 and dim.literal == 1 else None for dim in dims]


def is_summed(node: Node, factor: str) -> bool:
    """Returns whether the result of a product is a sum over a factor."""
    return factor not in factors_of(node, RESULT)


def blocks_of(plan: Plan, found: Sequence[Move], node: Node, factor: str, panels: int) -> int:
    """Returns into how many blocks all layouts next to a product together cut a factor; 0 if it does not come out even in panels."""
    choice, axes, sizes = plan.assignment.choices[node.name], plan.mesh.axes, plan.mesh.sizes
    slots = range(len(operands(node)))
    read = [(slot, choice.input(slot, axes)) for slot in slots] + [(RESULT, choice.output(0, axes))]
    read += [(slot, layout) for move in found for end, slot in move.ends if end is node for layout in (move.before, move.after)]
    if is_summed(node, factor) and not all(factor in factors_of(node, slot) for slot in slots):
        return 0  # what lacks it is added once, not with every panel
    blocks, size = 1, node.meta["match"].sizes[factor]
    for slot, layout in read:
        factors = factors_of(node, slot)
        cut = layout.cuts.get(factors.index(factor), ()) if factor in factors else ()
        if any(sizes[axis] == 1 for axis in cut):
            return 0
        blocks = math.lcm(blocks, math.prod(sizes[axis] for axis in cut))
    return blocks if size % (blocks * panels) == 0 and size > panels else 0


def covered(found: Iterable[Move], way: Cuts) -> float:
    """Returns the seconds of the moves that go in panels if these products are cut so."""
    ends = [(move, node, slot) for move in found for node, slot in move.ends if node in way]
    return sum({move: move.seconds for move, node, slot in ends if way[node].factor in factors_of(node, slot)}.values())


def dim_of(move: Move, decided: Cuts) -> int | None:
    """Returns the dim of a move's value along which it goes in panels; None if its products are not all cut alike along one."""
    dims = {
        (factors_of(node, slot).index(decided[node].factor), decided[node].blocks, decided[node].panels)
        if node in decided and decided[node].factor in factors_of(node, slot)
        else None
        for node, slot in move.ends
    }
    (one, *others) = dims
    return None if one is None or others else one[0]
