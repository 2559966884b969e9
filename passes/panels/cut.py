"""Writes a planned graph with products cut into panels, and what boxes their operands and results with them.

A dim of a value is seen as (blocks, panels, rest): a panel is one part of every block, and its layout is that of the value. So
what is split over ranks by blocks stays so, and each panel is gathered, or reduced and scattered, on its own. Panels of a dim of
the result are put together, those of a dim that a product sums over are added up. This is the loop of SUMMA (van de Geijn and Watts
1997) as Optimus runs it (Xu and You 2021).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from sbpc.graph.about import ORIGIN, PANEL_OF, about
from sbpc.graph.operands import operands
from sbpc.graph.rewrite import Copies, called, mode_of, put
from sbpc.mesh.layout import Layout
from sbpc.mesh.states import Split, State
from sbpc.passes.annotate import annotate_call, lines_about_rules
from sbpc.passes.panels.moves import RESULT, Cut, Cuts, Move, dim_of, factors_of, is_summed
from sbpc.plans.plan import Assignment, Plan
from sbpc.rules.choices import Candidates, Choice

aten = torch.ops.aten
ADDED: dict[Any, Any] = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}  # products that add to an operand


def in_panels(plan: Plan, found: Sequence[Move], decided: Cuts) -> tuple[GraphModule, Assignment]:
    """Returns the graph of a plan with some products cut into panels, and the same layouts in it.

    Before: an annotated graph that `plan` lays out. After: the same, `meta[PANEL_OF]` on the products of panels; what stands for
    the result of a product has its name.
    """
    return PanelWriter(plan, found, decided).run()


class PanelWriter:
    """The graph and the assignment that are being written. pieces: by value, dim, numbers of blocks and panels, and layout, its panels."""

    def __init__(self, plan: Plan, found: Sequence[Move], decided: Cuts) -> None:
        self.gm, self.mesh, self.decided = plan.graph, plan.mesh, decided
        self.choices, self.aliases = dict(plan.assignment.choices), dict(plan.assignment.aliases)
        self.outputs = plan.assignment.outputs
        self.moves = {(node, slot): move for move in found if dim_of(move, decided) is not None for node, slot in move.ends}
        self.copies, self.mode = Copies(), mode_of(plan.graph)
        self.names = {node.name for node in plan.graph.graph.nodes}
        self.pieces: dict[Any, list[Node]] = {}
        self.known: dict[int, Candidates] = {}
        self.about: Node

    def run(self) -> tuple[GraphModule, Assignment]:
        """Writes node by node."""
        for node in self.gm.graph.nodes:
            self.about = node
            self.copies[node] = self.product(node) if node in self.decided else self.copies.keep(node)
        result = self.copies.module(self.gm)
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
        """Returns what each panel of a product reads: panels of an operand, or the whole of one that lacks the factor."""
        factors, move = factors_of(node, slot), self.moves.get((node, slot))
        if cut.factor not in factors:
            return [self.copies[operand]] * cut.panels
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
        whole = self.shaped(self.copies[value], shape, dim, apart, layout, f"{value.name}_panels")
        result = []
        for at in range(panels):
            name, after = f"{value.name}_panel_{at}", wider(layout, dim, int(many))
            first = f"{name}_blocks" if many else name
            part = self.call(aten.select.int, whole, dim + many, at, name=first, read=(wider(layout, dim, 1 + many),), left=after)
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
        stacked = self.call(aten.stack.default, made, dim + many, name=f"{node.name}_panels", read=(one,) * len(made), left=several)
        return self.reshaped(stacked, shape, several, layout, node.name)

    def summed(self, node: Node, choice: Choice, panels: list[list[Node]]) -> Node:
        """Writes a product as the sum of products of panels."""
        layout, add = choice.output(0, self.mesh.axes), ADDED.get(node.target)
        total = self.panel(node, choice, panels[0], f"{node.name}_panel_0")
        for at, read in enumerate(panels[1:], start=1):
            name = node.name if at == len(panels) - 1 else f"{node.name}_sum_{at}"
            if add is None:
                product = self.panel(node, choice, read, f"{node.name}_panel_{at}")
                total = self.call(aten.add.Tensor, total, product, name=name, read=(layout, layout), left=layout)
            else:
                inputs = [choice.input(slot, self.mesh.axes) for slot in range(len(read))]
                total = self.call(add, total, *read, name=name, read=(layout, *inputs), left=layout, order=choice.order)
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

    def shaped(self, x: Node, shape: tuple[int, ...], dim: int, apart: tuple[int, ...], layout: Layout, name: str) -> Node:
        """Writes a value with one dim as several, the first of which is cut as that was."""
        return self.reshaped(x, (*shape[:dim], *apart, *shape[dim + 1 :]), layout, wider(layout, dim, len(apart) - 1), name)

    def reshaped(self, x: Node, shape: tuple[int, ...], before: Layout, after: Layout, name: str) -> Node:
        """Writes a value in another shape."""
        return self.call(aten.reshape.default, x, list(shape), name=name, read=(before,), left=after)

    def call(
        self, op: Any, *args: Any, name: str, read: tuple[Layout, ...], left: Layout, order: tuple[int, ...] | None = None
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
        node = called(self.copies.graph, op, args, kwargs, name)
        given, named = map_arg((args, kwargs), lambda operand: operand.meta["val"])
        with self.mode, torch.no_grad():
            value: Tensor = op(*given, **named)
        put(node, "meta", about(self.about, ORIGIN) | {"val": value})
        annotate_call(node, self.known)
        return node

    def note(self, node: Node, choice: Choice) -> None:
        """Notes the choice of a call. A value that the plan does not have is boxed from where it was made to each place that reads it."""
        self.choices[node.name] = choice
        self.aliases.setdefault((node.name, 0), choice.output(0, self.mesh.axes))


def wider(layout: Layout, dim: int, more: int) -> Layout:
    """Returns the layout of the same value with `more` dims behind `dim`, which nothing cuts."""

    def moved(state: State) -> State:
        return Split(state.dim + more) if isinstance(state, Split) and state.dim > dim else state

    return Layout(layout.axes, tuple(map(moved, layout.states)), layout.order)


