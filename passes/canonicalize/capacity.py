"""Lets each expert take a part of the rows at most, as in GShard (Lepikhin et al. 2020): the rows beyond add nothing.

Rows keep their number. Those that are too many for their expert stand in the place of rows that others have too few,
and are zeros where they are taken back, as are their gradients. So numbers are the same on any mesh. What else is
computed of the choice, as losses that balance it, is that of the choice itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sbpc.errors import PlanError, at_node
from sbpc.graph.expert_rows import GATHER, MESSAGE, SCATTER
from sbpc.graph.operands import ancestors, operands, outputs_of, value_of
from sbpc.graph.rewrite import Writer, copied, drop_unused, mode_of
from sbpc.mesh.routing import exact
from sbpc.passes.canonicalize.expert_rows import copies, sort_of
from sbpc.rules.local_rows import SORTS
from sbpc.rules.ops.expert_rows import WITHIN
from sbpc.rules.shared_rows import BY_PLACE, PRODUCT, grouped_rows

aten = torch.ops.aten
VIEWS = aten.view.default, aten.alias.default, aten._unsafe_view.default, aten.clone.default
TODO = 'overflow="drop" needs rows sorted by the expert that a token chose, as transformers does it: leave it out.'


@dataclass(frozen=True)
class Chosen:
    """The experts that tokens choose. ids: before they are flattened and sorted. sort: sorts them. ends: where the rows
    of each expert end then."""

    ids: Node
    sort: Node
    ends: Node

    def most(self, capacity: float) -> int:
        """Returns how many rows each expert takes at most."""
        rows, experts = self.sort.meta["val"][0].numel(), len(self.ends.meta["val"])
        return math.ceil(exact(capacity) * rows / experts)


def within_capacity(gm: GraphModule, capacity: float) -> GraphModule:
    """Returns the graph in which each expert takes `capacity` times the mean of all experts' rows at most, the first
    ones of the batch.

    Before: an annotated graph. After: one to be annotated anew. Raises PlanError where rows are not those of sorted
    experts.
    """
    found = {each.ids: each for each in chosen(gm)}
    check_exits(gm)
    return CapacityWriter(gm, found, capacity).run()


def chosen(gm: GraphModule) -> Iterator[Chosen]:
    """Yields the experts that tokens choose, by the ops that take their rows there. Raises PlanError for others."""
    known: dict[Node, Node] = {}  # by where rows end, what sorts them
    for move in (node for node in gm.graph.nodes if node.target in MESSAGE):
        index, ends = operands(move)[1:]
        numbers = value_of(index)[0].target in SORTS  # of experts, in order, as the rows of their biases are taken by
        sort = sort_of(index) if numbers or copies(index) is not None else None
        if sort is None or known.setdefault(ends, sort) is not sort or not is_ascending(sort):
            raise PlanError(at_node("the order of these rows of experts is not known", move, TODO))
    for ends, sort in known.items():
        ids = operands(sort)[0]
        while ids.target in VIEWS:
            ids = operands(ids)[0]
        yield Chosen(ids, sort, ends)


def is_ascending(sort: Node) -> bool:
    """Returns whether a call sorts integers of one dim, the smallest first."""
    values, descending = sort.meta["val"][0], {"descending": False, **sort.kwargs}["descending"]
    return values.dim() == 1 and not values.is_floating_point() and not descending and True not in sort.args[1:]


def check_exits(gm: GraphModule) -> None:
    """Raises PlanError where a forward makes of rows of experts what is no row, but by taking them back."""
    rows = grouped_rows({node: node.meta["match"] for node in gm.graph.nodes if "match" in node.meta})
    for node in gm.graph.nodes:
        known = node.target in (*MESSAGE, PRODUCT) or value_of(node)[0] is not node or node.op == "output"
        if known or node.meta.get("phase", "forward") != "forward":
            continue
        made = [(node, at) for at in range(outputs_of(node))]
        if any(value_of(used) in rows for used in operands(node)) and not any(each in rows for each in made):
            raise PlanError(at_node("this is computed of all rows of experts", node, TODO))


class CapacityWriter(Writer):
    """The graph that is being written. found: by what they choose. changed: what stands for a value where rows are
    sorted, and for where they end. kept: by where rows end, which of them their expert takes, by number and by place.
    """

    def __init__(self, gm: GraphModule, found: dict[Node, Chosen], capacity: float) -> None:
        super().__init__(mode_of(gm))
        self.gm, self.found, self.capacity = gm, found, capacity
        self.changed: dict[Node, Node] = {}
        self.kept: dict[Node, dict[bool, Node]] = {}

    def run(self) -> GraphModule:
        """Writes node by node."""
        told = [used for node in self.gm.graph.nodes if node.target in MESSAGE for used in operands(node)[1:]]
        before = ancestors(told, ())
        for node in self.gm.graph.nodes:
            if node.target in MESSAGE:
                self.write_move(node)
                continue
            self.keep(node, self.as_changed if node.target is PRODUCT else None)
            if node in self.found:
                self.choose(self.found[node])
            elif node in before and self.changed.keys() & set(operands(node)):
                self.changed[node] = copied(self.graph, node, self.as_changed)
        drop_unused(self.graph)
        return self.module(self.gm)

    def as_changed(self, node: Node) -> Any:
        """Returns what stands for an operand of what sorts rows, or knows where they end."""
        return self.changed.get(node, self[node])

    def choose(self, about: Chosen) -> None:
        """Writes which experts take the rows, and which of them as chosen."""
        self.turn_to(about.sort)
        ids = about.ids.meta["val"]
        flat = self.call(aten.reshape.default, self[about.ids], [ids.numel()])
        made = self.call(WITHIN, flat, len(about.ends.meta["val"]), about.most(self.capacity))
        self.changed[about.ids] = self.call(aten.reshape.default, self.part(made, 0), list(ids.shape))
        self.kept[about.ends] = {False: self.part(made, 1)}

    def write_move(self, move: Node) -> None:
        """Writes what takes rows there or back, with zeros for those that are not taken: on the way back, and for its
        gradients."""
        forward, by_place = move.meta.get("phase", "forward") == "forward", bool(move.args[BY_PLACE[move.target]])
        values, back = operands(move)[0], not by_place or forward == (move.target is SCATTER)
        read = self[values]
        if back and move.target is SCATTER:
            read = self.masked(read, move, by_place)
        made = self.keep(move, lambda used: read if used is values else self.as_changed(used))
        if back and move.target is GATHER:
            self[move] = self.masked(made, move, by_place)

    def masked(self, x: Node, move: Node, by_place: bool) -> Node:
        """Writes rows with zeros for those that are not taken."""
        self.turn_to(move)
        _, index, ends = operands(move)
        kept = self.kept[ends]
        if by_place and True not in kept:
            order = next(user for user in sort_of(index).users if value_of(user)[1] == 1)
            kept[True] = self.call(GATHER, kept[False], *map(self.as_changed, (order, ends)), True, 1)
        lost = self.call(aten.logical_not.default, kept[by_place])
        for _ in range(x.meta["val"].dim() - 1):
            lost = self.call(aten.unsqueeze.default, lost, -1)
        return self.call(aten.masked_fill.Scalar, x, lost, 0)
