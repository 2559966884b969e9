"""Where rows stand group by group in a graph, and the signatures of ops whose rows are shared out by their groups: R.

An op that does the same to each place of a dim may be done on any places of it. So where rows of all its operands with
that dim stand in the same groups, R takes the place of S there. A product of groups reads the rows of the rank's groups
beside its matrices. What makes such rows, and takes them back, are `gather_rows` and `scatter_rows`. Nothing else does,
as no boxing knows where groups end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.fx import Node

from sbpc.graph.expert_rows import GATHER, SCATTER
from sbpc.graph.operands import operands, outputs_of, value_of
from sbpc.mesh.states import B, Ragged, S, Split, State
from sbpc.rules.binding import Signature
from sbpc.rules.grouped_product import GROUPED
from sbpc.rules.match import Match, overloads
from sbpc.rules.ops.views import reshaped, squeeze_dims

ALIAS = torch.ops.aten.alias.default
PRODUCT = torch.ops.aten._grouped_mm.default
APART = GATHER, SCATTER, PRODUCT, *overloads("index.Tensor index_put")  # which tell of their rows otherwise, or not
SIZELESS = None, reshaped, squeeze_dims  # kernels that run on any number of rows
R = Ragged
Key = tuple[Node, int]  # a value: a node, and which of its outputs


class Rows(NamedTuple):
    """Of a value the dim on which rows stand in groups, and the value that says where these end."""

    dim: int
    ends: Key


Pair = tuple[
    tuple[State, ...], State, str, str
]  # of one signature: operands, result, the factor that is split, the rows
PRODUCTS: dict[str, Pair] = {
    GROUPED[2, 2]: ((R(1), R(0), B), S(0), "g", "m"),
    GROUPED[2, 3]: ((R(0), S(0), B), R(0), "g", "m"),
}
BY_PLACE: dict[object, int] = {GATHER: 3, SCATTER: 4}  # which argument it is
MOVES: dict[tuple[object, bool], Pair] = {  # by op and by_place
    (GATHER, True): ((S(0), B, B), R(0), "v", "i"),
    (GATHER, False): ((R(0), B, B), S(0), "i", "v"),
    (SCATTER, True): ((R(0), B, B), S(0), "v", "i"),
    (SCATTER, False): ((S(0), B, B), R(0), "i", "v"),
}


def pair_of(node: Node, match: Match) -> Pair | None:
    """Returns the signature of an op that knows where groups end."""
    if node.target in (GATHER, SCATTER):
        return MOVES[node.target, bool(node.args[BY_PLACE[node.target]])]
    return PRODUCTS.get(match.rule.text)


def values_of(node: Node) -> list[Key]:
    """Returns the operands and the results of a call."""
    return [*map(value_of, operands(node)), *((node, at) for at in range(outputs_of(node)))]


def known_rows(node: Node, match: Match) -> Iterator[tuple[Key, Rows]]:
    """Yields the rows of an op that knows where groups end: its last operand says so, or the one before that."""
    pair = pair_of(node, match)
    if pair is not None:
        values = values_of(node)
        for key, state in zip(values, (*pair[0], pair[1])):
            if isinstance(state, Ragged):
                yield key, Rows(state.dim, same(values[2]))


def same(key: Key) -> Key:
    """Returns the value of which one is another name."""
    node, index = key
    return same(value_of(operands(node)[0])) if node.target is ALIAS else (node, index)


def row_factors(match: Match) -> set[str]:
    """Returns the factors of which an op does the same to each place, whatever places there are. Where it is told how
    many there are, they are counted."""
    if match.entry.local not in SIZELESS:
        return set()
    dims = [dim for fill in match.bound.fills for dim in fill.dims if dim.literal != 1 or len(dim.factors) > 1]
    sized = {factor for dim in dims for factor in dim.factors}
    return free_factors(match) - sized


def free_factors(match: Match) -> set[str]:
    """Returns the factors of which an op does the same to each place."""
    if match.entry.source or match.rule.idx:
        return set()
    through = match.phases.factors if match.phases is not None else frozenset()
    return {s.factor for s in match.signatures if s.factor is not None} - through


def dim_of(dims: Sequence[object] | None, factor: str) -> int | None:
    """Returns the dim of a value that is this factor alone."""
    return next((at for at, dim in enumerate(dims or ()) if getattr(dim, "factors", ()) == (factor,)), None)


def grouped_rows(matches: Mapping[Node, Match]) -> dict[Key, Rows]:
    """Returns where rows stand in groups, by value: those of ops that know it, and of ops that do the same to each
    row."""
    found: dict[Key, Rows] = {}
    for node, match in matches.items():
        for key, rows in known_rows(node, match):
            found.setdefault(key, rows)
    todo = list(found)
    while todo:
        node = todo.pop()[0]
        readers = [reader for user in node.users for reader in (user.users if value_is_part(user) else (user,))]
        for call in dict.fromkeys((node, *readers)):
            if call in matches and call.target not in APART:
                for key, rows in carried(call, matches[call], found):
                    if key not in found:
                        found[key] = rows
                        todo.append(key)
    return found


def value_is_part(node: Node) -> bool:
    """Returns whether a node is one of several results."""
    return value_of(node)[0] is not node


def carried(node: Node, match: Match, found: Mapping[Key, Rows]) -> Iterator[tuple[Key, Rows]]:
    """Yields the values of a call that have the rows of others of its values."""
    values = list(zip(values_of(node), match.bound.values))
    for factor in sorted(row_factors(match)):
        places = [(key, dim) for key, value in values if (dim := dim_of(value.dims, factor)) is not None]
        known = {found[key].ends for key, dim in places if key in found and found[key].dim == dim}
        if len(known) == 1:
            yield from ((key, Rows(dim, *known)) for key, dim in places)


def shared(node: Node, match: Match, rows: Mapping[Key, Rows]) -> list[Signature]:
    """Returns the signatures of a call with rows that are shared out by their groups. rows: see `grouped_rows`."""
    pair = pair_of(node, match)
    if pair is not None:
        agree = all(rows.get(key) == known for key, known in known_rows(node, match))
        return [Signature(pair[0], (pair[1],), pair[2], pair[3])] if agree and match.sizes[pair[2]] > 1 else []
    free, made = row_factors(match), []
    for s in match.signatures:
        if s.factor in free:
            states = list(zip(values_of(node), (*s.inputs, *s.outputs)))
            held = [rows.get(key) for key, state in states if isinstance(state, Split)]
            dims = [state.dim for _, state in states if isinstance(state, Split)]
            same = {each.ends for each in held if each is not None}
            if None not in held and len(same) == 1 and [each and each.dim for each in held] == dims and max(dims) < 2:
                made.append(
                    replace(s, inputs=as_rows(s.inputs), outputs=as_rows(s.outputs), factor=None, ragged=s.factor)
                )
    return made


def as_rows(states: Sequence[State]) -> tuple[State, ...]:
    """Returns R in the place of S."""
    return tuple(Ragged(state.dim) if isinstance(state, Split) else state for state in states)
