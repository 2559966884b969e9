"""Rows that stand sorted by expert, of which each rank has its own: those of its part of the tokens, sorted. L, and for
the ends of their groups P(own), are the states of the values between the sort and what adds the rows up again.

What a rank gets where it sorts its part alone is no chunk of what is sorted, and nobody else learns its order; but of
each row the op does what it would do to it among all rows. So only ops whose rows all stand in the order of one sort
have these signatures, and none leaves that order but those that take rows by the very numbers that were sorted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from sbpc.graph.expert_rows import GATHER, SCATTER
from sbpc.graph.operands import named_arguments, operands, value_of
from sbpc.mesh.states import OWN, B, Local, P, S, Split, State
from sbpc.rules.binding import Signature
from sbpc.rules.grouped_product import GROUPED
from sbpc.rules.match import Match, overloads
from sbpc.rules.shared_rows import APART, PRODUCT, Key, dim_of, free_factors, values_of

L = Local
aten = torch.ops.aten
SORTS, CASTS = overloads("sort sort.stable"), overloads("_to_copy alias clone")
VIEWS = overloads("view reshape _unsafe_view")
KNOWN = *CASTS, *overloads("cumsum floor_divide histc")
EXACT = torch.int32, torch.int64, torch.float32, torch.float64
PRODUCTS: dict[str, tuple[tuple[State, ...], State]] = {
    GROUPED[2, 2]: ((L(1), L(0), OWN), P),
    GROUPED[2, 3]: ((L(0), B, OWN), L(0)),
}


@dataclass
class Owned:
    """What is known of values, each by the sort. dims: the dim on which places of what is sorted stand in its order.
    numbers: of how many items its elements are the numbers, in its order, where each item is that of as many elements
    that follow each other in what is sorted. ids: what is sorted, in either order. counts, ends: of rows by id."""

    dims: dict[Key, tuple[Node, int]] = field(default_factory=dict)
    numbers: dict[Key, int] = field(default_factory=dict)
    ids: dict[Key, Node] = field(default_factory=dict)
    counts: dict[Key, Node] = field(default_factory=dict)
    ends: dict[Key, Node] = field(default_factory=dict)

    def note(self, node: Node, signature: Signature) -> None:
        """Notes in which order the results of a call stand that has this signature."""
        sorts = [self.dims[key][0] for key in map(value_of, operands(node)) if key in self.dims]
        places = [(at, state.dim) for at, state in enumerate(signature.outputs) if isinstance(state, Local)]
        self.dims |= {(node, at): (sorts[0], dim) for at, dim in places}

    def note_numbers(self, node: Node) -> None:
        """Notes whether the result of a call holds exact numbers, counts, or ends."""
        key, made, exact = value_of(node.args[0]), (node, 0), node.meta["val"].dtype in EXACT  # type: ignore[arg-type]
        if node.target in CASTS and exact:
            for known in (self.numbers, self.ids, self.counts, self.ends):
                if key in known:
                    known[made] = known[key]  # type: ignore[index, assignment]
        elif node.target is aten.floor_divide.default and key in self.numbers and isinstance(node.args[1], int):
            if node.args[1] > 0 and self.numbers[key] % node.args[1] == 0:
                self.numbers[made] = self.numbers[key] // node.args[1]
        elif node.target is aten.histc.default and key in self.ids and node.args[2:3] == (0,):
            self.counts[made] = self.ids[key]  # none is below 0, so that those that are not counted come last
        elif node.target is aten.cumsum.default and key in self.counts and exact:
            self.ends[made] = self.counts[key]


def owned_rows(matches: Mapping[Node, Match]) -> Owned:
    """Returns what is known of the values of a graph, whose nodes stand in order."""
    known = Owned()
    for node in matches:
        if ascends(node) and is_chosen(node.args[0]):
            known.ids.setdefault(value_of(node.args[0]), node)  # type: ignore[arg-type]
    sorts = {*known.ids.values()}
    for node, match in matches.items():
        if node in sorts:
            known.dims |= {(node, at): (node, 0) for at in range(2)}
            known.numbers[node, 1], known.ids[node, 0] = match.sizes["a"], node
        elif operands(node):
            if isinstance(node.args[0], Node) and node.target in KNOWN:
                known.note_numbers(node)
            for signature in own_rows(node, match, known):
                known.note(node, signature)
    return known


def ascends(node: Node) -> bool:
    """Returns whether a node sorts one dim from the least on."""
    if node.target not in SORTS or node.meta["val"][0].dim() != 1:
        return False
    return not named_arguments(node.target, node.args, node.kwargs)["descending"]  # type: ignore[arg-type]


def is_chosen(ids: Any) -> bool:
    """Returns whether these are numbers of the largest of some values, in rows one after the other: none is below 0."""
    source, index = value_of(behind(ids, (*CASTS, *VIEWS)))
    return source.target is aten.topk.default and index == 1


def behind(x: Any, ops: tuple[Any, ...]) -> Any:
    """Returns what calls of these ops were given."""
    return behind(x.args[0], ops) if x.target in ops else x


def own_rows(node: Node, match: Match, known: Owned) -> list[Signature]:
    """Returns the signatures of a call of which each rank has rows of its own."""
    if node.target in SORTS:
        own = known.ids.get((node, 0)) is node and match.sizes["a"] > 1
        return [Signature((S(0),), (L(0), L(0)), "a", own="a")] if own else []
    if node.target in (GATHER, SCATTER):
        return [*moved(node, match, known)]
    if node.target is PRODUCT:
        return product(node, match, known)
    if (node, 0) in known.ends or ((node, 0) in known.counts and node.target is not aten.histc.default):
        return [Signature((OWN,), (OWN,))]
    if (node, 0) in known.counts:
        state = L(0) if value_of(operands(node)[0]) in known.dims else S(0)
        return [Signature((state,), (OWN,), s.factor, own=s.factor) for s in match.signatures if s.inputs == (S(0),)]
    return [*by_rows(node, match, known)] if node.target not in APART else []


def moved(node: Node, match: Match, known: Owned) -> Iterator[Signature]:
    """Yields those of rows that are taken to their places or from there, by number. What has as many rows as there are
    items comes from the rank's part of them; any other one all ranks have."""
    x, index, ends = map(value_of, operands(node))
    sort, dim = known.dims.get(index, (None, 0))
    if sort is None or dim != 0 or known.ends.get(ends) is not sort or not by_place(node):
        return
    items = known.numbers.get(index) == match.sizes["v"] > 1
    factor = "v" if items else "i"
    if node.target is GATHER:
        yield Signature((S(0) if items else B, L(0), OWN), (L(0),), factor, own="i")
    elif known.dims.get(x) == (sort, 0):
        yield Signature((L(0), L(0), OWN), (S(0) if items else P,), factor, own="i")


def sent_apart(node: Node, shared: Iterable[Signature], own: Iterable[Signature]) -> Iterator[Signature]:
    """Yields the signatures in which ranks share out rows of which each has sorted its own, of a call with signatures
    of both kinds: what has as many rows as there are items is the rank's part of them, in either."""
    for s, o in itertools.product(shared, own) if node.target in (GATHER, SCATTER) else ():
        if s.factor == o.factor == "v":
            yield replace(s, inputs=(s.inputs[0], *o.inputs[1:]), own=o.factor)


def by_place(node: Node) -> Any:
    """Returns whether rows are taken to the places of an index, not from them."""
    return named_arguments(node.target, node.args, node.kwargs)["by_place"]  # type: ignore[arg-type]


def product(node: Node, match: Match, known: Owned) -> list[Signature]:
    """Returns that of a product of groups whose rows stand in the order of the sort of which it reads the ends."""
    if match.rule.text not in PRODUCTS:
        return []
    ins, out = PRODUCTS[match.rule.text]
    keys = list(map(value_of, operands(node)))
    sort = known.ends.get(keys[2])
    rows = [(key, state.dim) for key, state in zip(keys, ins) if isinstance(state, Local)]
    if sort is None or match.sizes["m"] < 2 or any(known.dims.get(key) != (sort, dim) for key, dim in rows):
        return []
    return [Signature(ins, (out,), "m", own="m")]


def by_rows(node: Node, match: Match, known: Owned) -> Iterator[Signature]:
    """Yields those of a call that does the same to each row, where all that have rows have them in one order."""
    values, free = values_of(node), free_factors(match)
    for s in match.signatures:
        if s.factor not in free:
            continue
        cut = [(key, state.dim) for key, state in zip(values, s.inputs) if isinstance(state, Split)]
        orders = [known.dims.get(key) for key, _ in cut]
        sorts = {order[0] for order in orders if order is not None}
        in_rows = len(sorts) == 1 and [order and order[1] for order in orders] == [dim for _, dim in cut]
        dims = [dim_of(value.dims, str(s.factor)) for value in match.bound.values]
        states = (*s.inputs, *s.outputs)
        if in_rows and all(dim in (0, 1) for dim, state in zip(dims, states) if isinstance(state, Split)):
            ins, outs = (tuple(map(in_order, each)) for each in (s.inputs, s.outputs))
            yield Signature(ins, outs, s.factor, own=s.factor)


def in_order(state: State) -> State:
    """Returns L in the place of S."""
    return Local(state.dim) if isinstance(state, Split) else state
