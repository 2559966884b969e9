"""Cuts a program into pieces, of which equal ones are compiled once: the layers of a deep model.

In the order in which calls run, equal layers are a tandem repeat of calls. A piece is one block of it, or what lies
between such runs. Blocks begin where fewest bytes are handed on; what a piece hands on is what any of its equals does.
Calls on values whose sizes are known as the program runs are pieces of their own, which are not compiled.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sbpc.graph.operands import hashable
from sbpc.graph.repeats import runs

NEVER = 1e30  # bytes
progress = logging.getLogger("sbpc.progress")
Function = Callable[[list[Tensor]], tuple[Any, ...]]


@dataclass(frozen=True)
class Piece:
    """Calls that follow each other. takes: the values that they read from before, in the order of their first use.
    gives: the places among the calls of what may be read behind them. key: what equal pieces have in common."""

    calls: list[Node]
    takes: list[Node]
    gives: list[int]
    key: Hashable


def in_pieces(
    graph: Graph,
    gm: GraphModule,
    compile_piece: Callable[[GraphModule], Function],
    apart: Container[Node] = (),
    apart_piece: Callable[[GraphModule], Function] | None = None,
) -> Function:
    """Returns a function of one list, which it empties, that runs a graph piece by piece. compile_piece: makes such a
    function of a piece, once for equal ones; apart_piece: of pieces of the calls that are `apart`."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    results: Any = graph.output_node().args[0]
    constants = {node: getattr(gm, str(node.target)) for node in graph.find_nodes(op="get_attr")}
    pieces = cut(graph, apart)
    made: dict[Hashable, Function] = {}
    for piece in pieces:
        if piece.key not in made:
            make = apart_piece if apart_piece is not None and piece.calls[0] in apart else compile_piece
            made[piece.key] = make(program_of(piece))
    functions = [made[piece.key] for piece in pieces]
    progress.debug("%d pieces of a program, %d of them to be compiled", len(pieces), len(made))
    piece_of = {node: at for at, piece in enumerate(pieces) for node in piece.calls}
    last: dict[Node, int] = {}  # the piece that reads a value last
    for node in graph.nodes:
        reading = [piece_of.get(user, len(pieces)) for user in readers(node)]
        last |= {node: max(reading)} if reading else {}
    ends: list[list[Node]] = [[] for _ in range(len(pieces) + 1)]
    for node, at in last.items():
        ends[at].append(node)

    def run(given: list[Tensor]) -> tuple[Any, ...]:
        alive: dict[Node, Any] = {node: value for node, value in zip(placeholders, given) if node in last} | constants
        given.clear()
        for at, piece in enumerate(pieces):
            values = [alive[node] for node in piece.takes]
            for node in ends[at]:
                alive.pop(node, None)
            for place, value in zip(piece.gives, functions[at](values)):
                if last.get(piece.calls[place], -1) > at:
                    alive[piece.calls[place]] = value
        return tuple(None if node is None else alive[node] for node in results)

    return run


def cut(graph: Graph, apart: Container[Node] = ()) -> list[Piece]:
    """Returns the pieces of a graph, with none in which some calls are `apart` and others are not."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    place = {node: at for at, node in enumerate(calls)}
    ends = [max((place.get(user, len(calls)) for user in readers(node)), default=at) for at, node in enumerate(calls)]
    handed = crossing(calls, ends)
    borders = {0, len(calls), *(at for at in range(1, len(calls)) if (calls[at] in apart) != (calls[at - 1] in apart))}
    for run in runs([token(node) for node in calls]):
        first = min(range(run.start, run.start + run.period), key=lambda at: (handed[at], at))
        borders |= {at for at in range(first, run.stop + 1, run.period) if handed[at] < NEVER}
    order = sorted(borders)
    spans = [calls[start:stop] for start, stop in itertools.pairwise(order)]
    keys = [((span[0] in apart, *key), takes) for span in spans for key, takes in (key_of(span),)]
    read: dict[Hashable, set[int]] = {}
    for span, (key, _) in zip(spans, keys):
        last = place[span[-1]]
        read.setdefault(key, set()).update(at for at, node in enumerate(span) if ends[place[node]] > last)
    return [Piece(span, takes, sorted(read[key]), key) for span, (key, takes) in zip(spans, keys)]


def readers(node: Node) -> Iterator[Node]:
    """Yields what reads a value: its users, and what waits for a collective that does. Memory that a piece hands on is
    not written anew while the collective is in flight."""
    for user in node.users:
        yield user
        if "_c10d_functional" in str(user.target) and "wait_tensor" not in str(user.target):
            yield from user.users


def crossing(calls: Sequence[Node], ends: Sequence[int]) -> list[float]:
    """Returns by place the bytes that calls before it hand to calls from it on, NEVER where that is no tensor. ends:
    by call the place of its last reader."""
    changes = [0.0] * (len(calls) + 2)
    for at, node in enumerate(calls):
        value = node.meta.get("val")
        size = value.nbytes if isinstance(value, Tensor) else NEVER
        changes[at + 1] += size
        changes[max(ends[at], at) + 1] -= size
    return list(itertools.accumulate(changes))


def token(node: Node) -> Hashable:
    """Returns what a call is and reads, as far as that is the same in equal layers."""
    read = map_arg((node.args, dict(node.kwargs)), lambda used: hashable(used.meta.get("val"), about))
    return node.target, repr(read), hashable(node.meta.get("val"), about)


def about(value: Tensor) -> Hashable:
    """Returns what tensors have in common that the same code may take."""
    return Tensor, tuple(value.shape), value.dtype


def key_of(span: Sequence[Node]) -> tuple[tuple[Hashable, ...], list[Node]]:
    """Returns what calls have in common with equal ones, and the values that they read from before."""
    own, takes = {node: at for at, node in enumerate(span)}, dict[Node, int]()

    def named(used: Node) -> Any:
        return ("own", own[used]) if used in own else ("takes", takes.setdefault(used, len(takes)))

    calls = [(node.target, repr(map_arg((node.args, dict(node.kwargs)), named))) for node in span]
    return (*calls, *(hashable(node.meta.get("val"), about) for node in takes)), list(takes)


def program_of(piece: Piece) -> GraphModule:
    """Returns the program of a piece."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for at, node in enumerate(piece.takes):
        copies[node] = graph.placeholder(f"taken_{at}")
        copies[node].meta = dict(node.meta)
    for node in piece.calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[piece.calls[at]] for at in piece.gives))
    return GraphModule(torch.nn.Module(), graph)
