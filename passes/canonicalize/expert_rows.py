"""Finds rows that stand group by group, as those of a mixture of experts, and writes what takes rows there and back as
ops that know where the groups end, so that ranks may share the rows out by their groups."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from sbpc.graph.expert_rows import GATHER, SCATTER
from sbpc.graph.operands import ancestors, operands, value_of
from sbpc.graph.rewrite import Writer, drop_unused, mode_of
from sbpc.rules.local_rows import SORTS, VIEWS, ascends, behind
from sbpc.rules.match import overloads
from sbpc.rules.registry import match_of
from sbpc.rules.shared_rows import ALIAS, PRODUCT, Key, Rows, grouped_rows

aten = torch.ops.aten
RANGES = overloads("arange arange.start")
ZEROS = aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default


def expert_rows(gm: GraphModule) -> GraphModule:
    """Returns the graph with what takes rows into groups, and out of them, written as `gather_rows` and `scatter_rows`.

    Before: a canonical graph. After: an index of one dim that takes whole rows to products of groups, or from there,
    is one of these. Where groups end is computed before.
    """
    matches = {node: matched for node in gm.graph.nodes if (matched := match_of(node)) is not None}
    return RowWriter(gm, grouped_rows(matches)).run()


def has_groups(gm: GraphModule) -> bool:
    """Returns whether a graph has products of groups of rows."""
    return any(node.target is PRODUCT for node in gm.graph.nodes)


class Move(NamedTuple):
    """The op that stands for an index into groups of rows or out of them: its operands in the old graph, where groups
    end there, and its further arguments."""

    op: Any
    operands: tuple[Node, Node]
    ends: Node
    more: tuple[Any, ...]


class RowWriter(Writer):
    """The graph that is being written. rows: where they stand in groups, by value of the old graph."""

    def __init__(self, gm: GraphModule, rows: dict[Key, Rows]) -> None:
        super().__init__(mode_of(gm))
        self.gm, self.rows = gm, rows

    def run(self) -> GraphModule:
        """Writes node by node."""
        for node in self.gm.graph.nodes:
            self.write(node)
        drop_unused(self.graph)
        return self.module(self.gm)

    def write(self, node: Node) -> None:
        """Writes a node, behind all that it reads then."""
        if node in self:
            return
        if (values := self.in_order(node)) is not None:
            self.about = node
            self[node] = self.part(self[values], 0)
            return
        moved = self.moved(node)
        if moved is None:
            self.keep(node)
            return
        before = ancestors([moved.ends], self)
        for used in self.gm.graph.nodes if moved.ends not in self else ():
            if used in before:
                self.write(used)
        self.about = node
        self[node] = self.call(moved.op, *(self[each] for each in (*moved.operands, moved.ends)), *moved.more)

    def in_order(self, node: Node) -> Node | None:
        """Returns the sort of which a call takes the operand in the order of its result."""
        args: Any = node.args
        if node.target is not aten.index.Tensor or len(args[1]) != 1:
            return None
        sort, at = value_of(args[1][0]) if args[1][0] is not None else (node, 0)
        if at != 1 or sort.target not in SORTS:
            return None
        given: Any = sort.args[0]
        shapes = {tuple(each.meta["val"].shape) for each in (args[0], given)}
        same = behind(args[0], VIEWS) is behind(given, VIEWS) and len(shapes) == 1 and args[0].meta["val"].dim() == 1
        return sort if same else None

    def moved(self, node: Node) -> Move | None:
        """Returns what stands for an index of rows into groups or out of them; None for any other call."""
        args: Any = node.args
        more: tuple[Any, ...] = ()
        order: Any = None
        if node.target is aten.index.Tensor:
            op, given, indices = GATHER, args[0], args[1]
        elif node.target is aten.index_select.default and args[1] == 0:
            op, given, indices = GATHER, args[0], args[2:]
        elif node.target is aten.index_put.default and args[3:] == (True,) and args[0].target in ZEROS:
            op, given, indices = SCATTER, args[2], args[1]
        elif node.target is aten.index_add.default and args[1] == 0 and args[0].target in ZEROS and not node.kwargs:
            op, given, indices = SCATTER, args[3], args[2:3]
        else:
            return None
        placed, numbered = ((node, 0), value_of(given))[:: 1 if op is GATHER else -1]
        more = (len(node.meta["val"]),) if op is SCATTER else ()
        known = [self.rows[key] for key in (placed, numbered) if key in self.rows]
        if len(known) != 1 or known[0].dim != 0 or not takes_rows(node, indices, given, op is SCATTER):
            return None
        ends = known[0].ends[0]
        by_place = placed in self.rows
        count = {len(each.meta["val"]) for each in (node, given, indices[0])}
        if not by_place and len(count) == 1 and (order := inverse(indices[0])):
            op, indices, by_place = (SCATTER, GATHER)[op is SCATTER], [order], True
            more = (len(node.meta["val"]),) if op is SCATTER else ()
        if isinstance(ends.meta["val"], (tuple, list)) or node in ancestors([ends]):
            return None
        return Move(op, (given, indices[0]), ends, (*more, by_place, copies(indices[0])))


def inverse(index: Node) -> Node | None:
    """Returns the order in which something is sorted, of which an index is the inverse; None if it is none: rows that
    it takes are those that the order puts there."""
    args: Any = index.args
    order: Any = None
    if index.target is aten.index_put.default and len(args) == 3 and len(args[1]) == 1:
        base, order, numbers = args[0], args[1][0], args[2]
        if numbers.target is not aten.arange.default or not len(base.meta["val"]) == numbers.args[0] == len(
            order.meta["val"]
        ):
            return None
    elif index.target is operator.getitem and args[1] == 1 and ascends(args[0]):
        order = args[0].args[0]
    sort, at = value_of(order) if isinstance(order, Node) else (index, 0)
    return order if at == 1 and sort.target in SORTS and sort.meta["val"][0].dim() == 1 else None


def takes_rows(node: Node, indices: Any, values: Node, adds: bool) -> bool:
    """Returns whether one index of numbers of one dim takes or adds whole rows, of the type of the result."""
    index = indices[0].meta["val"] if len(indices) == 1 and indices[0] is not None else None
    if index is None or index.dim() != 1 or index.dtype != torch.int64:
        return False
    made, given = node.meta["val"], values.meta["val"]
    same = not adds or tuple(given.shape) == (len(index), *made.shape[1:])
    return same and given.dim() > 0 and given.dtype == made.dtype


def copies(index: Node) -> int | None:
    """Returns how often a number stands in an index at most; None where that is not known. A permutation, as sorting
    gives one, has each once, and so has its inverse."""
    node, output = value_of(index)
    if node.target in SORTS:
        return 1 if output == 1 else None
    before = permuted(node)
    each = None if before is None else copies(before)
    if node.target is not aten.floor_divide.default or each is None:
        return each if each == 1 or node.target is ALIAS else None
    args: Any = node.args
    return each * int(args[1])


def permuted(node: Node) -> Node | None:
    """Returns the permutation of which a call gives another name, the inverse or the quotients by a number, if its
    operand is one."""
    args: Any = node.args
    if node.target is ALIAS or (node.target is aten.floor_divide.default and isinstance(args[1], int) and args[1] > 0):
        return operands(node)[0]
    if node.target is aten.index_put.default and args[2].target in RANGES and args[3:] in ((), (False,)):
        same = {tuple(each.meta["val"].shape) for each in (args[0], *args[1], args[2]) if each is not None}
        return args[1][0] if len(args[1]) == len(same) == 1 else None
    return None


def sort_of(index: Node) -> Node:
    """Returns the call that sorts what an index of known `copies` is made of."""
    node = value_of(index)[0]
    before = permuted(node)
    return node if before is None else sort_of(before)
