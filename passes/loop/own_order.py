"""Rows that micro-batches sort each for itself: those of experts, which the whole batch sorts by their groups.

Micro-batches are cut as tokens are, so a sort of the groups to which tokens go would join them. But nothing outside
sees in which order rows stand between the sort and the way back. So a micro-batch takes its own rows into groups, and
back: states S and P are then those of its own order, with numbers of its own rows, and its summand of where groups end
is where groups of its own rows end. No boxing may lead from there to another layout, so each call has one signature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from sbpc.graph.expert_rows import GATHER, SCATTER
from sbpc.graph.operands import named_arguments, operands, outputs_of, value_of
from sbpc.graph.rewrite import rebuild
from sbpc.mesh.states import B, P, S, State
from sbpc.passes.annotate import set_candidates
from sbpc.rules.binding import Signature
from sbpc.rules.match import overloads
from sbpc.rules.shared_rows import PRODUCT, Key

aten = torch.ops.aten
SORTS, INDICES = overloads("sort sort.stable"), overloads("argmax max.dim sort sort.stable topk")
EMPTY, COUNTED = overloads("empty_like zeros_like"), overloads("alias cumsum _to_copy")
Kinds = tuple[str | None, ...]
IDS, ROWS, GIVEN, PLACED, COUNTS, ENDS = "ids", "rows", "given", "placed", "counts", "ends"


class OwnOrder(Signature):
    """Of a call that runs in a micro-batch as it is, on its own rows and their numbers."""


class Own(NamedTuple):
    """What a value is to a sort of groups: groups of rows, or rows, with dim `at` as they are sorted; numbers of rows
    of `at` that were given, or of those that are sorted; how many rows a group has, or where it ends."""

    sort: Node
    kind: str
    at: int = 0


Step = tuple[Signature, tuple[Own, ...]]  # of a call, and what its results are


def in_own_order(gm: GraphModule, count: int) -> GraphModule:
    """Returns an annotated graph in which each of `count` micro-batches sorts rows of experts for itself, where nothing
    else reads their order."""
    result = rebuild(gm)
    orders = Orders(count)
    for node in result.graph.nodes:
        if value_of(node)[0] is node:
            orders.add(node)
    for node, (sort, signature) in orders.signatures.items():
        if sort in orders.taken and sort not in orders.seen:
            set_candidates(node, replace(node.meta["candidates"], signatures=(signature,)))
    return result


class Orders:
    """What is known of the values that are made of sorts, and how the calls run that make them. taken: sorts whose rows
    products of groups read. seen: those whose order other calls see."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.known: dict[Key, Own] = {}
        self.signatures: dict[Node, tuple[Node, Signature]] = {}
        self.counting: dict[Node, Node] = {}  # by call that adds up counts, which others may read besides, its sort
        self.taken: set[Node] = set()
        self.seen: set[Node] = set()

    def add(self, node: Node) -> None:
        """Looks at the next call of a graph."""
        read = [self.known.get(value_of(used)) for used in operands(node)]
        sorts = {own.sort: None for own in read if own is not None and own.kind not in (COUNTS, ENDS)}
        step = None
        if not sorts and node.target in SORTS:
            sorts, step = {node: None}, self.sorted(node)
        elif len(sorts) == 1 and "match" in node.meta and not node.meta["match"].entry.source:
            step = self.step(node, read)
        elif not sorts:
            self.counted(node, read)
        if step is None:
            self.seen.update(sorts)
            return
        self.signatures[node] = next(iter(sorts)), step[0]
        self.known.update({(node, at): own for at, own in enumerate(step[1])})

    def sorted(self, node: Node) -> Step | None:
        """Returns how a micro-batch sorts the groups of its rows."""
        ids, size = operands(node)[0], node.meta["val"][0].numel()
        ascending = not named_arguments(node.target, node.args, node.kwargs)["descending"]  # type: ignore[arg-type]
        if ids.meta["val"].dim() != 1 or size % self.count or not ascending or not is_index(ids):
            return None
        return OwnOrder((S(0),), (S(0), S(0)), factor_of(node)), (Own(node, IDS), Own(node, GIVEN, size))

    def counted(self, node: Node, read: list[Own | None]) -> None:
        """Notes a call that adds up counts, or takes them to another type."""
        if node.target in COUNTED and (own := read[0]) is not None:
            self.counting[node] = own.sort
            ends = own.kind == ENDS or node.target is aten.cumsum.default
            self.known[node, 0] = Own(own.sort, ENDS if ends else COUNTS)

    def step(self, node: Node, read: list[Own | None]) -> Step | None:
        """Returns how a micro-batch does a call on its own rows; None if it cannot."""
        kinds = tuple(None if own is None else own.kind for own in read)
        own = next(own for own in reversed(read) if own is not None and own.kind != ENDS)
        if node.target not in (GATHER, SCATTER, PRODUCT):
            return (
                self.numbered(node, own, kinds) or self.moved(node, read, own, kinds) or self.by_row(node, read, kinds)
            )
        if kinds[2] != ENDS or read[2].sort is not own.sort:  # type: ignore[union-attr]
            return None
        if node.target is not PRODUCT:
            step = self.moved(node, read, own, kinds[:2])
        else:
            step = multiplied(node, read, kinds[:2])
            self.taken.add(own.sort)
        each = operands(node)[2]
        while each in self.counting and step is not None:  # whole numbers, which may be added in any type
            self.signatures[each] = self.counting.pop(each), OwnOrder((P,), (P,))
            (each,) = operands(each)
        return step

    def numbered(self, node: Node, own: Own, kinds: Kinds) -> Step | None:
        """Returns how it makes numbers of rows of others."""
        target, divisor = node.target, node.args[-1]
        if target is aten.floor_divide.default and kinds == (GIVEN,) and isinstance(divisor, int) and divisor > 0:
            made = Own(own.sort, GIVEN, own.at // divisor)
            return None if own.at % (divisor * self.count) else (as_it_is(node, S(0)), (made,))
        inverse = Own(own.sort, PLACED, own.at)
        if target in SORTS and kinds == (GIVEN,) and own.at == own.sort.meta["val"][0].numel():
            signature = OwnOrder((S(0),), (S(0), S(0)), factor_of(node))
            return signature, (Own(own.sort, ROWS), inverse)
        if target in EMPTY and kinds == (GIVEN,):
            return as_it_is(node, S(0)), (Own(own.sort, ROWS),)
        if target is aten.index_put.default and kinds == (ROWS, GIVEN, None) and inverts(node, own.at):
            return as_it_is(node, S(0), S(0), B, slot=1), (inverse,)
        return None

    def moved(self, node: Node, read: list[Own | None], own: Own, kinds: Kinds) -> Step | None:
        """Returns how it takes its rows into their order, or back. own: the numbers."""
        target, args, first = node.target, node.args, operands(node)[0]
        if target is aten.index.Tensor and len(args[1]) != 1:  # type: ignore[arg-type]
            return None
        ends = () if target is aten.index.Tensor else (P,)
        signature, rows = as_it_is(node, S(0), S(0), *ends, slot=1) if len(kinds) == 2 else None, Own(own.sort, ROWS)
        if signature is None or (read[0] is not None and read[0].at != 0):
            return None
        if kinds == (None, IDS) and target is GATHER:  # what groups have, for each row
            return as_it_is(node, B, S(0), P, slot=1), (rows,)
        if kinds == (ROWS, IDS) and target is SCATTER:
            return OwnOrder((S(0), S(0), P), (P,), factor_of(node, 1)), ()
        if target in (GATHER, aten.index.Tensor):
            if kinds == (None, GIVEN) and own.at == first.meta["val"].shape[0]:
                return signature, (Own(own.sort, IDS) if is_same(first, operands(own.sort)[0]) else rows,)
            return (signature, ()) if kinds in ((ROWS, PLACED), (IDS, PLACED)) else None
        if target is SCATTER and own.at == args[3]:
            return (
                (signature, ()) if kinds == (ROWS, GIVEN) else (signature, (rows,)) if kinds == (None, PLACED) else None
            )
        return None

    def by_row(self, node: Node, read: list[Own | None], kinds: Kinds) -> Step | None:
        """Returns how it does the same to each of its rows, or adds them up."""
        match = node.meta["match"]
        if match.rule.idx or not {*kinds} <= {ROWS, IDS, None}:
            return None
        through = match.phases.factors if match.phases is not None else frozenset()
        cut = [None if own is None else S(own.at) for own in read]
        for s in match.signatures:
            if s.factor is None or s.factor in through or [x if isinstance(x, S) else None for x in s.inputs] != cut:
                continue
            (sort,) = {own.sort for own in read if own is not None}
            if not any(isinstance(state, S) for state in s.outputs):
                return s, (Own(sort, COUNTS),) if node.target is aten.histc.default and kinds == (IDS,) else ()
            if all(isinstance(state, S) for state in s.outputs):
                kind = IDS if node.target is aten._to_copy.default and kinds == (IDS,) else ROWS
                return s, tuple(Own(sort, kind, state.dim) for state in s.outputs)  # type: ignore[union-attr]
        return None


def multiplied(node: Node, read: list[Own | None], kinds: Kinds) -> Step | None:
    """Returns how a micro-batch multiplies its rows by the matrices of their groups, or by each other."""
    x, y = read[:2]
    if kinds == (ROWS, None) and x is not None and x.at == 0 and node.meta["val"].dim() == 2:
        return as_it_is(node, S(0), B, P), (x,)
    if kinds == (ROWS, ROWS) and x is not None and y is not None and (x.at, y.at) == (1, 0):
        return OwnOrder((S(1), S(0), P), (P,), factor_of(node, 1, 0)), ()
    return None


def as_it_is(node: Node, *inputs: State, slot: int = 0) -> OwnOrder:
    """Returns the signature of a call that makes rows. slot: of the operand whose first dim it cuts."""
    return OwnOrder(inputs, (S(0),), factor_of(node, slot))


def factor_of(node: Node, slot: int = 0, dim: int = 0) -> str:
    """Returns the factor of a dim of an operand."""
    factor: str = node.meta["match"].bound.inputs[slot].dims[dim].factors[0]
    return factor


def is_index(node: Node) -> bool:
    """Returns whether a value is of numbers of elements of a dim: none is below 0."""
    producer, at = value_of(node)
    if producer.target in (aten.view.default, aten._to_copy.default, aten.clone.default):
        return is_index(operands(producer)[0])
    return producer.target in INDICES and at == outputs_of(producer) - 1


def inverts(node: Node, size: int) -> bool:
    """Returns whether a call writes to each place of a permutation of `size` numbers where that stands: its inverse."""
    target, indices, values, *accumulate = node.args
    made: Any = values
    return (
        made.target is aten.arange.default
        and made.args == (size,)
        and target.meta["val"].shape == made.meta["val"].shape  # type: ignore[union-attr]
        and len(indices) == 1  # type: ignore[arg-type]
        and accumulate in ([], [False])
    )


def is_same(one: Node, other: Node) -> bool:
    """Returns whether two nodes are one, or views of one in the same shape."""
    if one is other:
        return True
    views = one.target is aten.view.default is other.target
    return views and one.args == other.args
