"""A chunk of the model, and its programs. A program runs some parts of a step at once, and has an order of its own, in which collectives
run beside computing.

A program is a boxed graph. It reads what other programs gave, by name, and the sums of gradients to which it adds its own. Where
boxings home are among its parts, they read the sums.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.graph.about import about
from sbpc.graph.no_gc import uncollected
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
    Ports,
    outputs,
    placeholders,
    results,
)
from sbpc.graph.rewrite import Copies, called
from sbpc.mesh.layout import Layout
from sbpc.plans.measure import dims_at, layout_at
from sbpc.plans.plan import Assignment, Plan
from sbpc.plans.staged.schedules import INPUTS, WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, Parts, calls_in, parts_of, summand

T = TypeVar("T")


@dataclass
class Chunk:
    """One chunk of the model: its plan on the mesh of a stage, made on first use, and what its ports stand for.

    graph: at global shapes; assignment: its layouts; made: makes the plan of these. arguments: by input, the name of the body's input.
    results: by output, the number of the body's output. receives, sends: by port, the name of the value that crosses between chunks.
    """

    graph: GraphModule
    assignment: Assignment
    made: Callable[[GraphModule, Assignment], Plan]
    arguments: dict[Port, str]
    results: dict[Port, int]
    receives: dict[Port, str]
    sends: dict[Port, str]

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of the chunk, annotated and verified when it is first asked for: of equal chunks most never are."""
        with uncollected():
            return self.made(self.graph, self.assignment)

    @property
    def ports(self) -> Ports:
        """What goes into and comes out of the chunk."""
        return self.graph.meta["ports"]

    @property
    def left(self) -> dict[Port, Layout | None]:
        """By port of an output: the layout in which it is left."""
        return dict(zip(self.ports.outputs, self.assignment.outputs))

    @functools.cached_property
    def parts(self) -> dict[Node, str]:
        """By node of the graph its part of a step."""
        return parts_of(self.graph)

    @functools.cached_property
    def sends_late(self) -> frozenset[Port]:
        """The ports of what the backward sends."""
        return frozenset(port for port, node in outputs(self.graph) if port in self.sends and self.parts[node] == INPUTS)

    def value(self, port: Port) -> Tensor:
        """Returns a tensor without data like an output."""
        node = results(self.graph)[self.ports.outputs.index(port)]
        assert node is not None
        value: Tensor = node.meta["val"]
        return value

    def joined(self, port: Port, count: int, how: Any) -> Tensor:
        """Returns a tensor of the shape of an output, joined over `count` micro-batches as `how` says."""
        value = self.value(port)
        shape = [size * count if at == how and how != "same" else size for at, size in enumerate(value.shape)]
        return torch.empty(shape, dtype=value.dtype)


class OnUse(Sequence[T]):
    """So many items, each made when it is first asked for."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self.size, self.make, self.made = count, make, dict[int, T]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: Any) -> Any:
        place = range(self.size)[at]
        if isinstance(place, range):
            return [self[each] for each in place]
        if place not in self.made:
            self.made[place] = self.make(place)
        return self.made[place]


@dataclass(frozen=True)
class Program:
    """The boxed graph of some parts of a step, and the names of the values that it reads and gives.

    reads: in the order of its placeholders. sums: of the gradients whose sums so far are its last placeholders. added: those of `sums`
    to which the program adds a gradient of its own. gives: of its outputs.
    """

    gm: GraphModule
    reads: tuple[str, ...]
    sums: tuple[str, ...]
    added: tuple[str, ...]
    gives: tuple[str, ...]


class ChunkPrograms:
    """The programs of a chunk, made on first use.

    plan: that of the chunk. in_loop: see `parts_of`. overlaps: whether collectives run beside computing. parts: by node of the boxed graph.
    homes: by node in which a gradient ends, the node whose values add up. accumulated, home: by port of a gradient, their names.
    fixed, own: by port of what all micro-batches read, and of what each has of its own, the name. outputs: by port of an OUTPUT.
    """

    def __init__(self, plan: Plan, in_loop: Container[Port], overlaps: bool) -> None:
        self.plan, self.overlaps = plan, overlaps
        gm = plan.unscheduled
        self.parts = parts_of(gm, in_loop)
        gradients = dict(outputs(gm, GRADIENT))
        self.homes = {node: summand(node, self.parts) for node in gradients.values()}
        self.home = {port: node.name for port, node in gradients.items()}
        self.accumulated = {port: self.homes[node].name for port, node in gradients.items()}
        self.outputs = {port: node.name for port, node in outputs(gm, OUTPUT)}
        self.ends = {node for port, node in outputs(gm) if port.kind != GRADIENT or self.parts[node] == AFTER}
        self.fixed = {port: node.name for port, node in placeholders(gm, PARAMETER, BUFFER, SEED).items()}
        self.own = {port: node.name for port, node in placeholders(gm, INPUT, TANGENT).items()}
        self.calls = {part: calls_in(self.parts, (part,)) for part in PARTS}
        self.known = dict[tuple[Parts, bool], Program]()
        self.local = dict[tuple[Parts, bool, Any], GraphModule]()

    def of(self, which: Iterable[str]) -> Parts:
        """Returns those of some parts that have any call."""
        return tuple(part for part in which if self.calls[part])

    @functools.cached_property
    def before(self) -> frozenset[str]:
        """The names of the values that are made before all micro-batches."""
        return frozenset(node.name for node in self.calls[BEFORE])

    @functools.cached_property
    def later(self) -> Mapping[str, frozenset[str]]:
        """By part of the backward the names of what it reads of others."""
        return {part: frozenset(used.name for node in self.calls[part] for used in node.all_input_nodes) for part in (INPUTS, WEIGHTS)}

    def makes(self, which: Parts) -> frozenset[str]:
        """Returns the names of the gradients that add up and that some parts make."""
        return frozenset(node.name for node in self.homes.values() if self.parts[node] in which)

    def program(self, which: Parts, adding: bool = True) -> Program:
        """Returns the program of some parts. adding: whether earlier micro-batches have left sums of the gradients that it makes."""
        which = self.of(which)
        if (which, adding) not in self.known:
            if adding:
                program = extracted(self, which)
                boxed = self.plan.rewriter.schedule(program.gm, self.plan.mesh, None) if self.overlaps else program.gm
                self.known[which, adding] = replace(program, gm=boxed)
            else:
                self.known[which, adding] = without_sums(self, which, self.program(which))
        return self.known[which, adding]

    def local_at(self, which: Parts, adding: bool, rank: int) -> GraphModule:
        """Returns the program of a rank. Behind the placeholders of `program` come those of its position on each axis."""
        mesh, key = self.plan.mesh, (self.of(which), adding, self.plan.shape_class(rank))
        if key not in self.local:
            self.local[key] = self.plan.rewriter.localize(self.program(which, adding).gm, mesh, mesh.coordinates(rank))
        return self.local[key]


def extracted(chunk: ChunkPrograms, which: Parts) -> Program:
    """Returns the program of some parts, in the order of the chunk's graph. It adds its gradients to sums as soon as they are there."""
    gm, parts, body = chunk.plan.unscheduled, chunk.parts, calls_in(chunk.parts, which)
    inside, summed = set(body), dict.fromkeys(chunk.homes.values())
    made = [node for node in summed if parts[node] in which]
    boxed = {used for node in body if parts[node] == AFTER for used in node.all_input_nodes if used in summed}
    reads = list(dict.fromkeys(
        used for node in body for used in node.all_input_nodes
        if used not in inside and not (parts[node] == AFTER and used in boxed)
    ))  # fmt: skip
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
    own, added = chunk.parts[node], node in chunk.homes.values()
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
