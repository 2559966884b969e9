"""Finds the boxings that may go in panels and the dim along which each product next to them is cut, and writes the
graph in panels.

A dim of a value is seen as (blocks, panels, rest): a panel is one part of every block, and its layout is that of the
value. So what is split over ranks by blocks stays so, and each panel is gathered, or reduced and scattered, on its
own. Panels of a dim of the result are put together, those of a dim that a product sums over are added up. This is
the loop of SUMMA (van de Geijn and Watts 1997) as Optimus runs it (Xu and You 2021).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from sbpc.graph.about import PANEL_OF, maker_of
from sbpc.graph.operands import operands
from sbpc.graph.rewrite import Writer, mode_of
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Split, State
from sbpc.passes.annotate import annotate_call, lines_about_rules
from sbpc.plans.chunk import Assignment
from sbpc.plans.measure import layout_at
from sbpc.plans.plan import Plan
from sbpc.plans.storages import shard_bytes
from sbpc.plans.timeline import exposed_seconds, works
from sbpc.rules.choices import Candidates, Choice
from sbpc.rules.sum_types import begins_sums

aten = torch.ops.aten
PRODUCTS = (
    aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.einsum.default, aten.linear.default,
    aten.mm.default,
)  # fmt: skip
RESULT = -1  # the place of what a product makes, in place of the number of an operand
# products that add to an operand
ADDED: dict[Any, Any] = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}


@dataclass(frozen=True)
class Move:
    """Boxings of one value that send something: only products read what comes out, or a product made what goes in.

    value: the node of the annotated graph. ends: those products, each with the number of the operand that the value
    is, or RESULT. seconds: what the boxings take. exposed: of these, when nothing is computed. latency: of these,
    what does not depend on the bytes. beside: seconds that the products take. joining: seconds in which what they
    make is put together from panels.
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
    """A factor of a product to be cut into panels. A panel has a part of each of so many blocks, so that cuts into
    blocks stay even."""

    factor: str
    blocks: int
    panels: int


Cuts = dict[Node, Cut]


def in_panels(plan: Plan, found: Sequence[Move], decided: Cuts) -> tuple[GraphModule, Assignment]:
    """Returns the graph of a plan with some products cut into panels, and the same layouts in it.

    Before: an annotated graph that `plan` lays out. After: the same, `meta[PANEL_OF]` on the products of panels;
    what stands for the result of a product has its name.
    """
    return PanelWriter(plan, found, decided).run()


class PanelWriter(Writer):
    """The graph and the assignment that are being written. pieces: by value, dim, numbers of blocks and panels, and
    layout, its panels."""

    def __init__(self, plan: Plan, found: Sequence[Move], decided: Cuts) -> None:
        super().__init__(mode_of(plan.annotated))
        self.gm, self.mesh, self.decided = plan.annotated, plan.mesh, decided
        self.choices, self.aliases = dict(plan.assignment.choices), dict(plan.assignment.aliases)
        self.outputs = plan.assignment.outputs
        self.moves = {
            (node, slot): move for move in found if dim_of(move, decided) is not None for node, slot in move.ends
        }
        self.names = {node.name for node in plan.annotated.graph.nodes}
        self.pieces: dict[Any, list[Node]] = {}
        self.candidates: dict[int, Candidates] = {}

    def run(self) -> tuple[GraphModule, Assignment]:
        """Writes node by node."""
        for node in self.gm.graph.nodes:
            self.turn_to(node)
            self[node] = self.product(node) if node in self.decided else self.keep(node)
        result = self.module(self.gm)
        result.meta["notes"], result.meta["remarks"] = lines_about_rules(result)
        return result, Assignment(self.choices, self.aliases, self.outputs)

    def product(self, node: Node) -> Node:
        """Writes a product in panels."""
        cut, choice = self.decided[node], self.choices[node.name]
        reads = [self.operand(node, slot, operand, cut) for slot, operand in enumerate(operands(node))]
        panels = [[each[at] for each in reads] for at in range(cut.panels)]
        if is_summed(node, cut.factor):
            return self.summed(node, choice, panels)
        made = [self.panel(node, choice, read, f"{node.name}_panel_{at}") for at, read in enumerate(panels)]
        move = self.moves.get((node, RESULT))
        layout = choice.output(0, self.mesh.axes) if move is None else move.after
        if move is not None:
            self.aliases[node.name, 0] = layout
        return self.joined(node, made, factors_of(node, RESULT).index(cut.factor), cut, layout)

    def operand(self, node: Node, slot: int, operand: Node, cut: Cut) -> list[Node]:
        """Returns what each panel of a product reads: panels of an operand, or the whole of one that lacks the
        factor."""
        factors, move = factors_of(node, slot), self.moves.get((node, slot))
        if cut.factor not in factors:
            return [self[operand]] * cut.panels
        layout = self.choices[node.name].input(slot, self.mesh.axes) if move is None else move.before
        key = operand, factors.index(cut.factor), cut.blocks, cut.panels, layout
        if key not in self.pieces:
            self.pieces[key] = self.divided(*key)
        return self.pieces[key]

    def divided(self, value: Node, dim: int, blocks: int, panels: int, layout: Layout) -> list[Node]:
        """Writes the panels of a value that lies in a layout, along one dim."""
        shape, many = tuple(value.meta["val"].shape), blocks > 1
        rest = shape[dim] // (blocks * panels)
        apart = (blocks, panels, rest) if many else (panels, rest)
        whole = self.shaped(self[value], shape, dim, apart, layout, f"{value.name}_panels")
        result = []
        for at in range(panels):
            name, after = f"{value.name}_panel_{at}", wider(layout, dim, int(many))
            first = f"{name}_blocks" if many else name
            part = self.laid_out(
                aten.select.int, whole, dim + many, at, name=first, read=(wider(layout, dim, 1 + many),), left=after
            )
            size = (*shape[:dim], blocks * rest, *shape[dim + 1 :])
            result.append(self.reshaped(part, size, after, layout, name) if many else part)
        return result

    def joined(self, node: Node, made: list[Node], dim: int, cut: Cut, layout: Layout) -> Node:
        """Writes a value of which there are panels, in the layout in which these are boxed."""
        shape, many = tuple(node.meta["val"].shape), cut.blocks > 1
        if many:
            rest = shape[dim] // (cut.blocks * cut.panels)
            small = tuple(made[0].meta["val"].shape)
            made = [self.shaped(each, small, dim, (cut.blocks, rest), layout, f"{each.name}_blocks") for each in made]
        one, several = wider(layout, dim, int(many)), wider(layout, dim, 1 + many)
        stacked = self.laid_out(
            aten.stack.default, made, dim + many, name=f"{node.name}_panels", read=(one,) * len(made), left=several
        )
        return self.reshaped(stacked, shape, several, layout, node.name)

    def summed(self, node: Node, choice: Choice, panels: list[list[Node]]) -> Node:
        """Writes a product as the sum of products of panels."""
        layout, add = choice.output(0, self.mesh.axes), ADDED.get(node.target)
        total = self.panel(node, choice, panels[0], f"{node.name}_panel_0")
        for at, read in enumerate(panels[1:], start=1):
            name = node.name if at == len(panels) - 1 else f"{node.name}_sum_{at}"
            if add is None:
                product = self.panel(node, choice, read, f"{node.name}_panel_{at}")
                total = self.laid_out(aten.add.Tensor, total, product, name=name, read=(layout, layout), left=layout)
            else:
                inputs = [choice.input(slot, self.mesh.axes) for slot in range(len(read))]
                total = self.laid_out(
                    add, total, *read, name=name, read=(layout, *inputs), left=layout, order=choice.order
                )
                total.meta[PANEL_OF] = node.name
        return total

    def panel(self, node: Node, choice: Choice, read: Iterable[Node], name: str) -> Node:
        """Writes the product of one panel, with the signatures of the whole one."""
        reads = iter(read)
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda _: next(reads))
        made = self.written(node.target, args, kwargs, name)
        made.meta[PANEL_OF] = node.name
        self.note(made, choice)
        return made

    def shaped(
        self, x: Node, shape: tuple[int, ...], dim: int, apart: tuple[int, ...], layout: Layout, name: str
    ) -> Node:
        """Writes a value with one dim as several, the first of which is cut as that was."""
        return self.reshaped(
            x, (*shape[:dim], *apart, *shape[dim + 1 :]), layout, wider(layout, dim, len(apart) - 1), name
        )

    def reshaped(self, x: Node, shape: tuple[int, ...], before: Layout, after: Layout, name: str) -> Node:
        """Writes a value in another shape."""
        return self.laid_out(aten.reshape.default, x, list(shape), name=name, read=(before,), left=after)

    def laid_out(
        self,
        op: Any,
        *args: Any,
        name: str,
        read: tuple[Layout, ...],
        left: Layout,
        order: tuple[int, ...] | None = None,
    ) -> Node:
        """Writes a call that reads its operands and leaves its result in these layouts."""
        node = self.written(op, args, {}, name)
        signatures = []
        for axis in range(len(self.mesh.axes)):
            states = tuple(layout.states[axis] for layout in read), (left.states[axis],)
            signatures.append(next(s for s in node.meta["signatures"] if (s.inputs, s.outputs) == states))
        rest = (axis for axis in range(len(self.mesh.axes)) if axis not in left.order)
        self.note(node, Choice(tuple(signatures), order or (*left.order, *rest)))
        return node

    def written(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], name: str) -> Node:
        """Writes a call at the place of the node that is being rewritten, with its value and its candidates."""
        while name in self.names and name != self.about.name:
            name += "_"
        self.names.add(name)
        node = self.made(op, args, kwargs, name)
        annotate_call(node, self.candidates)
        return node

    def note(self, node: Node, choice: Choice) -> None:
        """Notes the choice of a call. A value that the plan does not have is boxed from where it was made to each
        place that reads it."""
        self.choices[node.name] = choice
        self.aliases.setdefault((node.name, 0), choice.output(0, self.mesh.axes))


def wider(layout: Layout, dim: int, more: int) -> Layout:
    """Returns the layout of the same value with `more` dims behind `dim`, which nothing cuts."""

    def moved(state: State) -> State:
        return Split(state.dim + more) if isinstance(state, Split) and state.dim > dim else state

    return Layout(layout.axes, tuple(map(moved, layout.states)), layout.order)


# --- what goes in panels, and along which dims ------------------------------------------------------------------------


def moves(plan: Plan) -> list[Move]:
    """Returns what may go in panels, in the order of the graph."""
    nodes = {node.name: node for node in plan.annotated.graph.nodes}
    work, exposed = works(plan.unscheduled, plan.mesh), exposed_seconds(plan.timeline())
    found = []
    for last in plan.unscheduled.graph.nodes:
        if "step" not in last.meta or (len(last.users) == 1 and "step" in next(iter(last.users)).meta):
            continue
        chain = [last]
        while "step" in (source := operands(chain[-1])[0]).meta and len(source.users) == 1:
            chain.append(source)
        value = maker_of(source)
        seconds, ends = sum(work[node].seconds for node in chain), ends_of(value, chain)
        if not seconds or not ends or not all(node.name in nodes for node in (value, *(node for node, _ in ends))):
            continue  # a name that is not there is that of a part of an op which is taken apart
        if makes_gradient(nodes[value.name]):
            continue
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
    return shard_bytes(layout, tuple(value.shape), value.dtype, mesh.sizes, mesh.routing.most)


def ends_of(value: Node, chain: Sequence[Node]) -> list[tuple[Node, int]]:
    """Returns the products at the ends of boxings of a value, the last one first in `chain`; none if something else
    is there."""
    if value.target in PRODUCTS and list(value.users) == [chain[-1]]:
        return [(value, RESULT)]
    if not all(reader.target in PRODUCTS for reader in chain[0].users):
        return []
    return [
        (reader, slot) for reader in chain[0].users for slot, read in enumerate(operands(reader)) if read is chain[0]
    ]


def cuts(plan: Plan, found: Sequence[Move], wanted: Iterable[tuple[Move, int]]) -> Cuts:
    """Returns the products to be cut so that moves go in so many panels, as far as one way of cutting does for all
    at a product.

    wanted: the moves with their numbers of panels; what is decided for an earlier one stays. Of the dims of a value
    the one is taken by which most seconds of moves go in panels; of equal ones that by which fewest products are
    sums of panels, as those are added.
    """
    decided: Cuts = {}
    for move, panels in wanted:
        ways = [
            way
            for dim in range(move.value.meta["val"].dim())
            if (way := cut_along(plan, found, move, dim, panels, decided))
        ]
        if ways:
            best: Cuts = max(
                ways,
                key=lambda way: (covered(found, way), -sum(is_summed(node, cut.factor) for node, cut in way.items())),
            )
            decided |= best
    return decided


def cut_along(plan: Plan, found: Sequence[Move], move: Move, dim: int, panels: int, decided: Cuts) -> Cuts:
    """Returns how the products of a move are cut along one dim of its value; nothing if one of them cannot, or is
    cut otherwise."""
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
    """Returns by dim of an operand or of the result of a product the factor that it is; None for a dim that is not
    one factor."""
    bound = node.meta["match"].bound
    dims = (bound.outputs[0] if slot == RESULT else bound.inputs[slot]).dims
    return [dim.factors[0] if len(dim.factors) == 1 and dim.literal == 1 else None for dim in dims]


def is_summed(node: Node, factor: str) -> bool:
    """Returns whether the result of a product is a sum over a factor."""
    return factor not in factors_of(node, RESULT)


def blocks_of(plan: Plan, found: Sequence[Move], node: Node, factor: str, panels: int) -> int:
    """Returns into how many blocks all layouts next to a product together cut a factor; 0 if it does not come out
    even in panels."""
    choice, axes, sizes = plan.assignment.choices[node.name], plan.mesh.axes, plan.mesh.sizes
    slots = range(len(operands(node)))
    read = [(slot, choice.input(slot, axes)) for slot in slots] + [(RESULT, choice.output(0, axes))]
    read += [
        (slot, layout)
        for move in found
        for end, slot in move.ends
        if end is node
        for layout in (move.before, move.after)
    ]
    alone = not all(factor in factors_of(node, slot) for slot in slots)  # what lacks it is added once, not with each
    if is_summed(node, factor) and (alone or makes_gradient(node)):
        return 0
    blocks, size = 1, node.meta["match"].sizes[factor]
    for slot, layout in read:
        factors = factors_of(node, slot)
        cut = layout.cuts.get(factors.index(factor), ()) if factor in factors else ()
        if any(sizes[axis] == 1 for axis in cut):
            return 0
        blocks = math.lcm(blocks, math.prod(sizes[axis] for axis in cut))
    return blocks if size % (blocks * panels) == 0 and size > panels else 0


def makes_gradient(node: Node) -> bool:
    """Returns whether a product is a gradient that is summed in a wider type: its panels would be summed in its own."""
    return any(map(begins_sums, node.users))


def covered(found: Iterable[Move], way: Cuts) -> float:
    """Returns the seconds of the moves that go in panels if these products are cut so."""
    ends = [(move, node, slot) for move in found for node, slot in move.ends if node in way]
    return sum({move: move.seconds for move, node, slot in ends if way[node].factor in factors_of(node, slot)}.values())


def dim_of(move: Move, decided: Cuts) -> int | None:
    """Returns the dim of a move's value along which it goes in panels; None if its products are not all cut alike
    along one."""
    dims = {
        (factors_of(node, slot).index(decided[node].factor), decided[node].blocks, decided[node].panels)
        if node in decided and decided[node].factor in factors_of(node, slot)
        else None
        for node, slot in move.ends
    }
    (one, *others) = dims
    return None if one is None or others else one[0]
