"""A chunk of the model, and its programs. A program runs some parts of a step at once, and has an order of its own,
in which collectives run beside computing.

A program is a boxed graph. It reads what other programs gave, by name, and the sums of gradients to which it adds
its own. Where boxings home are among its parts, they read the sums.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from sbpc.graph.about import about
from sbpc.graph.operands import ADD, ancestors, is_sum
from sbpc.graph.ports import (
    BUFFER,
    GRADIENT,
    INPUT,
    OUTPUT,
    PARAMETER,
    SEED,
    TANGENT,
    Port,
    outputs,
    placeholders,
    results,
)
from sbpc.graph.rewrite import Copies, called, rebuild
from sbpc.plans.chunk import Chunk
from sbpc.plans.measure import dims_at, layout_at
from sbpc.plans.memory import Life
from sbpc.plans.staged.pieces import parted, pieces_in
from sbpc.plans.staged.schedules import INPUTS, WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, MEASURED, PARTS, Parts, calls_in, parts_of, summand
from sbpc.plans.stored_order import Numbers, numbered
from sbpc.plans.timeline import bucket_of, is_awaited


@dataclass(frozen=True)
class Program:
    """The boxed graph of some parts of a step, and the names of the values that it reads and gives.

    reads: in the order of its placeholders. sums: of the gradients whose sums so far are its last placeholders.
    added: those of `sums` to which the program adds a gradient of its own. gives: of its outputs. late: by piece, those
    of `gives` that are still on their way home when all else is done. Their calls stand last, in pieces: each waits for
    what the pieces before it sent, and may run whenever other programs have run meanwhile. early: those of `reads` of
    which the calls are made that stand first, a piece that sends what is gathered for the others and waits for nothing:
    it may run before other programs. `gm.meta["pieces"]` has the number of a piece by the name of its first node, see
    `piece_of`.
    """

    gm: GraphModule
    reads: tuple[str, ...]
    sums: tuple[str, ...]
    added: tuple[str, ...]
    gives: tuple[str, ...]
    late: tuple[tuple[str, ...], ...] = ()
    early: tuple[str, ...] = ()


class Budget(NamedTuple):
    """What a schedule may take, see `schedule`."""

    most: float | None = None
    room: float = 0.0


class ChunkPrograms:
    """The programs of a chunk, made on first use.

    in_loop: see `parts_of`. overlaps: whether collectives run beside computing. budget: see `schedule`. goes_on:
    whether its stage has other chunks to run while its gradients are on their way home, and its parameters on theirs
    here. parts: by node of the boxed graph. homes: by node in which a gradient ends, the node whose values add up.
    accumulated, home: by port of a gradient, their names. fixed, own: by port of what all micro-batches read, and of
    what each has of its own, the name. outputs: by port of an OUTPUT.
    """

    def __init__(
        self,
        chunk: Chunk,
        in_loop: Container[Port],
        overlaps: bool,
        budget: Callable[[], Budget] = Budget,
        goes_on: bool = False,
    ) -> None:
        self.chunk, self.in_loop, self.overlaps, self.budget, self.goes_on = chunk, in_loop, overlaps, budget, goes_on
        self.known = dict[tuple[Parts, bool], Program]()
        self.local = dict[tuple[Parts, bool, Any], GraphModule]()
        self.parted = dict[tuple[Parts, bool, Any], dict[int, GraphModule]]()

    @functools.cached_property
    def boxed(self) -> GraphModule:
        """The graph out of which all these programs are cut, whatever the chunk forgets meanwhile."""
        return self.chunk.unscheduled

    @functools.cached_property
    def parts(self) -> dict[Node, str]:
        return parts_of(self.boxed, self.in_loop)

    @functools.cached_property
    def homes(self) -> dict[Node, Node]:
        return {node: summand(node, self.parts) for _, node in outputs(self.boxed, GRADIENT)}

    @functools.cached_property
    def summed(self) -> dict[Node, None]:
        """The nodes whose values add up, each once."""
        return dict.fromkeys(self.homes.values())

    @functools.cached_property
    def home(self) -> dict[Port, str]:
        return {port: node.name for port, node in outputs(self.boxed, GRADIENT)}

    @functools.cached_property
    def accumulated(self) -> dict[Port, str]:
        return {port: self.homes[node].name for port, node in outputs(self.boxed, GRADIENT)}

    @functools.cached_property
    def outputs(self) -> dict[Port, str]:
        return {port: node.name for port, node in outputs(self.boxed, OUTPUT)}

    @functools.cached_property
    def ends(self) -> set[Node]:
        """The nodes in which programs end."""
        return {node for port, node in outputs(self.boxed) if port.kind != GRADIENT or self.parts[node] == AFTER}

    @functools.cached_property
    def fixed(self) -> dict[Port, str]:
        return {port: node.name for port, node in placeholders(self.boxed, PARAMETER, BUFFER, SEED).items()}

    @functools.cached_property
    def own(self) -> dict[Port, str]:
        return {port: node.name for port, node in placeholders(self.boxed, INPUT, TANGENT).items()}

    @functools.cached_property
    def calls(self) -> dict[str, list[Node]]:
        """By part its calls."""
        return {part: calls_in(self.parts, (part,)) for part in PARTS}

    def of(self, which: Iterable[str]) -> Parts:
        """Returns those of some parts that have any call; all of them where they are the whole step."""
        return PARTS if which == PARTS else tuple(part for part in which if self.calls.get(part))

    @functools.cached_property
    def before(self) -> frozenset[str]:
        """The names of the values that are made before all micro-batches."""
        return frozenset(node.name for node in self.calls[BEFORE])

    @functools.cached_property
    def later(self) -> Mapping[str, frozenset[str]]:
        """By part of the backward the names of what it reads of others."""
        return {
            part: frozenset(used.name for node in self.calls[part] for used in node.all_input_nodes)
            for part in (INPUTS, WEIGHTS)
        }

    def makes(self, which: Parts) -> frozenset[str]:
        """Returns the names of the gradients that add up and that some parts make."""
        return frozenset(node.name for node in self.summed if self.parts[node] in which)

    def begins(self, which: Parts) -> bool:
        """Returns whether some parts make gradients, which may then be the first ones."""
        return which == PARTS or bool(self.makes(which))

    def program(self, which: Parts, adding: bool = True) -> Program:
        """Returns the program of some parts. adding: whether earlier micro-batches have left sums of the gradients
        that it makes; that of the whole step adds nothing."""
        which = self.of(which)
        adding = adding and which != PARTS
        if (which, adding) not in self.known:
            if which == PARTS:
                self.known[which, adding] = whole(self.boxed, self.scheduled(self.boxed, which))
            elif adding:
                program = extracted(self, which)
                program = replace(program, gm=self.scheduled(program.gm, which))
                apart = self.overlaps and self.goes_on and len(which) > 1
                program = early_first(self, program) if apart and BEFORE in which else program
                self.known[which, adding] = late_last(self, program) if apart and AFTER in which else program
            else:
                self.known[which, adding] = without_sums(self, which, self.program(which))
        return self.known[which, adding]

    def scheduled(self, boxed: GraphModule, which: Parts) -> GraphModule:
        """Returns the boxed graph of some parts in the order in which it runs."""
        if not self.overlaps:
            return boxed
        stored = self.chunk.orders.get(which)
        tried = self.tried if boxed is self.boxed and stored is None else None
        return self.chunk.rewriter.schedule(boxed, self.chunk.mesh, *self.budget(), tried, stored)

    @functools.cached_property
    def tried(self) -> Any:
        """The orders of `boxed` that are tried, see `Orders`, and what its calls occupy."""
        return self.chunk.rewriter.tried(self.boxed, self.chunk.mesh)

    def orders(self, kinds: Collection[Parts]) -> list[tuple[Parts, Numbers]]:
        """Returns for files the orders of the programs of some parts, and in a loop of those that are measured besides;
        none of those that wait for every collective at once."""
        kinds = [*kinds] if PARTS in kinds else [*kinds, *MEASURED]
        which = [*dict.fromkeys(map(self.of, kinds))] if self.overlaps else []
        boxed = [self.boxed if each == PARTS else extracted(self, each).gm for each in which]
        found = [(each, numbered(gm, self.program(each).gm)) for each, gm in zip(which, boxed)]
        return [(each, numbers) for each, numbers in found if numbers]

    def local_at(self, which: Parts, adding: bool, rank: int) -> GraphModule:
        """Returns the program of a rank. Behind the placeholders of `program` come those of its position on each
        axis."""
        mesh, key = self.chunk.mesh, (self.of(which), adding and which != PARTS, self.chunk.shape_class(rank))
        if key not in self.local:
            self.local[key] = self.chunk.rewriter.localize(self.program(which, adding).gm, mesh, mesh.coordinates(rank))
        return self.local[key]

    def pieces_at(self, which: Parts, adding: bool, rank: int) -> dict[int, GraphModule]:
        """Returns by number the pieces of the program of a rank, see `piece_of`. Each but the first reads what the one
        before it leaves behind its own results, that of the action before what the program reads."""
        key = self.of(which), adding, self.chunk.shape_class(rank)
        if key not in self.parted:
            program, gm = self.program(which, adding), self.local_at(which, adding, rank)
            last = {name: piece for piece, names in enumerate(program.late, 1) for name in names}
            ends = [last.get(name, 0) for name in program.gives]
            come = {at for at, name in enumerate(program.reads) if name not in program.early}
            self.parted[key] = parted(gm, ends, come) if pieces_in(gm) else {0: gm}
        return self.parted[key]

    @functools.cached_property
    def life(self) -> Life:
        """What is alive at every moment of the whole step."""
        return Life.of(self.program(PARTS).gm, self.chunk.mesh)


def whole(boxed: GraphModule, gm: GraphModule) -> Program:
    """Returns the program of all parts of a step: `gm`, the scheduled graph of `boxed`."""
    reads = tuple(node.name for node in placeholders(gm).values())
    return Program(gm, reads, (), (), tuple("" if node is None else node.name for node in results(boxed)))


def extracted(chunk: ChunkPrograms, which: Parts) -> Program:
    """Returns the program of some parts, in the order of the chunk's graph. It adds its gradients to sums as soon as
    they are there."""
    gm, parts, body = chunk.boxed, chunk.parts, calls_in(chunk.parts, which)
    inside, summed = set(body), chunk.summed
    made = [node for node in summed if parts[node] in which]
    boxed = {used for node in body if parts[node] == AFTER for used in node.all_input_nodes if used in summed}
    reads = list(
        dict.fromkeys(
            used
            for node in body
            for used in node.all_input_nodes
            if used not in inside and not (parts[node] == AFTER and used in boxed)
        )
    )
    sums = [*made, *(node for node in summed if node in boxed and node not in inside)]
    copies, totals = Copies(), dict[Node, Node]()
    for node in reads:
        copies[node] = copies.given(node.name, value_meta(node))
    for node in sums:
        totals[node] = copies.given(f"sum_{node.name}", sum_meta(node))
    for node in body:
        copies.keep(node, (ChainMap(totals, copies) if parts[node] == AFTER else copies).__getitem__)
        if parts[node] in which and node in summed:
            meta = about(node) | sum_meta(node)
            totals[node] = called(copies.graph, ADD, (totals[node], copies[node]), {}, f"add_{node.name}", meta)
    gives = [node for node in body if parts[node] in which and is_given(chunk, node, which)]
    copies.left(gives)
    known = {node: port for port, node in placeholders(gm).items()}
    late = (INPUTS, WEIGHTS)  # what they made comes in as a tangent does
    inputs = [known.get(node, Port(TANGENT if parts[node] in late else INPUT, node.name)) for node in reads]
    inputs += [Port(TANGENT, f"sum_{node.name}") for node in sums]
    read, so_far, added, given = (tuple(node.name for node in nodes) for nodes in (reads, sums, made, gives))
    return Program(with_ports(gm, copies, inputs, given), read, so_far, added, given)


def early_first(chunk: ChunkPrograms, program: Program) -> Program:
    """Returns a program with what gathers parameters before all else, as far as it waits for nothing."""
    calls = [node for node in program.gm.graph.nodes if node.op != "output"]
    later = {
        bucket_of(node)
        for node in filter(is_awaited, calls)
        if node.name not in chunk.before or any("awaits" in used.meta for used in ancestors([node]))
    }
    first = ancestors(node for node in filter(is_awaited, calls) if bucket_of(node) not in later)
    reads = tuple(name for name, node in zip(program.reads, calls) if node in first)
    calls.sort(key=lambda node: node.op != "placeholder" and 1 + (node not in first))
    if not first:
        return program
    gm = rebuild(program.gm, order=calls)
    gm.meta["pieces"] = {next(node.name for node in calls if node.op != "placeholder" and node not in first): 0}
    return replace(program, gm=gm, early=reads)


def late_last(chunk: ChunkPrograms, program: Program) -> Program:
    """Returns a program with what waits for gradients on their way home behind all else, in pieces: what sends again
    as soon as it may, and at last what sends nothing more."""
    home, level = {node.name for node in chunk.calls[AFTER]}, dict[Node, int]()
    calls = [node for node in program.gm.graph.nodes if node.op != "output"]
    together = dict[str, list[Node]]()  # by message what it begins with
    for node in calls:
        together.setdefault(bucket_of(node), []).append(node)
    for node in calls:
        start = node.all_input_nodes[0] if "awaits" in node.meta else node
        if start.name in home:
            before = [used for each in together[bucket_of(node)] for used in each.all_input_nodes]
            level[node] = max((level.get(used, 0) for used in before), default=0) + (start is not node)
    sending = ancestors(node for node in level if is_awaited(node))
    last = 1 + max((each for node, each in level.items() if node in sending), default=0)
    pieces = {node: each if node in sending or not each else last for node, each in level.items()}
    if last not in pieces.values():
        return program
    gm = rebuild(program.gm, order=sorted(calls, key=lambda node: pieces.get(node, 0)))
    first = {piece: node.name for node, piece in reversed(pieces.items())}
    gm.meta["pieces"] = {first[piece]: piece for piece in range(1, last + 1)}
    piece_of = {name: pieces.get(node) for name, node in zip(program.gives, results(program.gm)) if node is not None}
    late = [tuple(name for name, piece in piece_of.items() if piece == at) for at in range(1, last + 1)]
    return replace(program, gm=gm, late=tuple(late))


def value_meta(node: Node) -> dict[str, Any]:
    """Returns what a node that stands for a value of another says of it."""
    dims = dims_at(node)
    return {"val": node.meta["val"], "sbp": layout_at(node)} | ({"dims": (dims,)} if dims else {})


def sum_meta(node: Node) -> dict[str, Any]:
    """Returns what a sum of gradients says of itself, whose elements lie in order, whatever a gradient's do."""
    value = node.meta["val"]
    return value_meta(node) | {"val": torch.empty(value.shape, dtype=value.dtype, device="meta")}


def is_given(chunk: ChunkPrograms, node: Node, which: Parts) -> bool:
    """Returns whether a program of some parts gives a value: what ends in it, and what others read but as a sum."""
    own, added = chunk.parts[node], node in chunk.summed
    if node in chunk.ends:
        return True
    readers = {chunk.parts.get(user) for user in node.users} - ({None, AFTER} if added else {None})
    return bool(readers - ({own} if own == BEFORE else set(which)))


def without_sums(chunk: ChunkPrograms, which: Parts, program: Program) -> Program:
    """Returns a program that gives the gradients that are the first ones, and adds nothing."""
    copies = Copies()
    stored = program.gm.graph.find_nodes(op="placeholder")
    dropped = {node: name for node, name in zip(stored[len(program.reads) :], program.sums) if name in program.added}
    first = dict[str, Node]()
    for node in program.gm.graph.nodes:
        if is_sum(node) and node.args[0] in dropped:
            copies[node] = first[dropped[node.args[0]]] = copies[node.args[1]]
        elif node.op != "output" and node not in dropped:
            copies.keep(node)
    ends = {name: copies[node] for name, node in zip(program.gives, results(program.gm)) if node is not None}
    homes = {node.name for node in chunk.homes}  # of these some gradients are the sums themselves
    ends |= {name: node for name, node in first.items() if AFTER not in which or name in homes}
    copies.graph.output(tuple(ends.values()))
    inputs = [port for port, node in zip(program.gm.meta["ports"].inputs, stored) if node not in dropped]
    sums = tuple(name for name in program.sums if name not in program.added)
    late = tuple(tuple(name for name in names if name in ends) for names in program.late)
    gm = with_ports(program.gm, copies, inputs, ends)
    return replace(program, gm=gm, sums=sums, added=(), gives=tuple(ends), late=late)


def with_ports(gm: GraphModule, copies: Copies, inputs: Sequence[Port], gives: Iterable[str]) -> GraphModule:
    """Returns the graph of a program with its ports."""
    ports = replace(gm.meta["ports"], inputs=tuple(inputs), outputs=tuple(Port(OUTPUT, name) for name in gives))
    return copies.module(gm, gm.meta | {"ports": ports})
