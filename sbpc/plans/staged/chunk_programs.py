"""A chunk of the model, and its programs. A program runs some parts of a step at once, and has an order of its own,
in which collectives run beside computing.

A program is a boxed graph. It reads what other programs gave, by name, and the sums of gradients to which it adds
its own. Where boxings home are among its parts, they read the sums.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule, Node

from sbpc.graph.about import about
from sbpc.graph.operands import ADD, is_sum
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
from sbpc.graph.rewrite import Copies, called
from sbpc.plans.chunk import Chunk
from sbpc.plans.measure import dims_at, layout_at
from sbpc.plans.memory import Life
from sbpc.plans.staged.schedules import INPUTS, WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, Parts, calls_in, parts_of, summand


@dataclass(frozen=True)
class Program:
    """The boxed graph of some parts of a step, and the names of the values that it reads and gives.

    reads: in the order of its placeholders. sums: of the gradients whose sums so far are its last placeholders.
    added: those of `sums` to which the program adds a gradient of its own. gives: of its outputs.
    """

    gm: GraphModule
    reads: tuple[str, ...]
    sums: tuple[str, ...]
    added: tuple[str, ...]
    gives: tuple[str, ...]


class ChunkPrograms:
    """The programs of a chunk, made on first use.

    in_loop: see `parts_of`. overlaps: whether collectives run beside computing. budget: see `schedule`. parts: by
    node of the boxed graph. homes: by node in which a gradient ends, the node whose values add up. accumulated,
    home: by port of a gradient, their names. fixed, own: by port of what all micro-batches read, and of what each
    has of its own, the name. outputs: by port of an OUTPUT.
    """

    def __init__(
        self, chunk: Chunk, in_loop: Container[Port], overlaps: bool, budget: Callable[[], float | None] = lambda: None
    ) -> None:
        self.chunk, self.in_loop, self.overlaps, self.budget = chunk, in_loop, overlaps, budget
        self.known = dict[tuple[Parts, bool], Program]()
        self.local = dict[tuple[Parts, bool, Any], GraphModule]()

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
        return PARTS if which == PARTS else tuple(part for part in which if self.calls[part])

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

    def program(self, which: Parts, adding: bool = True) -> Program:
        """Returns the program of some parts. adding: whether earlier micro-batches have left sums of the gradients
        that it makes; that of the whole step adds nothing."""
        which = self.of(which)
        adding = adding and which != PARTS
        if (which, adding) not in self.known:
            if which == PARTS:
                self.known[which, adding] = whole(self.boxed, self.scheduled(self.boxed))
            elif adding:
                program = extracted(self, which)
                self.known[which, adding] = replace(program, gm=self.scheduled(program.gm))
            else:
                self.known[which, adding] = without_sums(self, which, self.program(which))
        return self.known[which, adding]

    def scheduled(self, boxed: GraphModule) -> GraphModule:
        """Returns a boxed graph in the order in which it runs."""
        return self.chunk.rewriter.schedule(boxed, self.chunk.mesh, self.budget()) if self.overlaps else boxed

    def local_at(self, which: Parts, adding: bool, rank: int) -> GraphModule:
        """Returns the program of a rank. Behind the placeholders of `program` come those of its position on each
        axis."""
        mesh, key = self.chunk.mesh, (self.of(which), adding and which != PARTS, self.chunk.shape_class(rank))
        if key not in self.local:
            self.local[key] = self.chunk.rewriter.localize(self.program(which, adding).gm, mesh, mesh.coordinates(rank))
        return self.local[key]

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
        totals[node] = copies.given(f"sum_{node.name}", value_meta(node))
    for node in body:
        copies.keep(node, (ChainMap(totals, copies) if parts[node] == AFTER else copies).__getitem__)
        if parts[node] in which and node in summed:
            meta = about(node) | value_meta(node)
            totals[node] = called(copies.graph, ADD, (totals[node], copies[node]), {}, f"add_{node.name}", meta)
    gives = [node for node in body if parts[node] in which and is_given(chunk, node, which)]
    copies.left(gives)
    known = {node: port for port, node in placeholders(gm).items()}
    late = (INPUTS, WEIGHTS)  # what they made comes in as a tangent does
    inputs = [known.get(node, Port(TANGENT if parts[node] in late else INPUT, node.name)) for node in reads]
    inputs += [Port(TANGENT, f"sum_{node.name}") for node in sums]
    names = [tuple(node.name for node in nodes) for nodes in (reads, sums, made, gives)]
    return Program(with_ports(gm, copies, inputs, names[3]), *names)


def value_meta(node: Node) -> dict[str, Any]:
    """Returns what a node that stands for a value of another says of it."""
    dims = dims_at(node)
    return {"val": node.meta["val"], "sbp": layout_at(node)} | ({"dims": (dims,)} if dims else {})


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
    return Program(with_ports(program.gm, copies, inputs, ends), program.reads, sums, (), tuple(ends))


def with_ports(gm: GraphModule, copies: Copies, inputs: Sequence[Port], gives: Iterable[str]) -> GraphModule:
    """Returns the graph of a program with its ports."""
    ports = replace(gm.meta["ports"], inputs=tuple(inputs), outputs=tuple(Port(OUTPUT, name) for name in gives))
    return copies.module(gm, gm.meta | {"ports": ports})
