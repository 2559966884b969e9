"""The programs of one stage on one rank: what it does before, in and after the micro-batches."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from sbpc.graph.operands import nodes_in
from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, OUTPUT, PARAMETER, SEED, TANGENT, Port, placeholders, results
from sbpc.graph.rewrite import copied
from sbpc.plans.staged.part_memory import summand
from sbpc.plans.staged.schedules import FORWARD, INPUTS, WEIGHTS
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, calls_in, parts_of
from sbpc.runtime.partition import extract

aten = torch.ops.aten


@dataclass(frozen=True)
class Program:
    """A program and the names of the values that it reads and gives."""

    gm: GraphModule
    reads: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class StagePrograms:
    """The programs of a stage on one rank, by part, and what the names in them stand for.

    fixed: placeholders that are the same for all micro-batches, by port; `positions` those of the rank's place. own: those of a
    micro-batch. outputs: by port of an OUTPUT its name. accumulated: by port of a GRADIENT the name of what adds up; `home` that of
    the gradient after the last boxing.
    """

    programs: dict[str, Program]
    fixed: dict[Port, str]
    positions: tuple[str, ...]
    own: dict[Port, str]
    outputs: dict[Port, str]
    accumulated: dict[Port, str]
    home: dict[Port, str]


def stage_programs(gm: GraphModule, in_loop: Container[Port]) -> StagePrograms:
    """Cuts the local program of a stage into its parts. in_loop: see `parts_of`."""
    parts = parts_of(gm, in_loop)
    ends = [(port, node) for port, node in zip(gm.meta["ports"].outputs, results(gm)) if node is not None]
    added = {port: summand(node, parts) for port, node in ends if port.kind == GRADIENT}
    kept = {node for _, node in ends} | set(added.values())
    programs = {part: program_of(gm, part, parts, kept) for part in (BEFORE, FORWARD, INPUTS, WEIGHTS, AFTER)}
    sums = {node.name for node in added.values()} - set(programs[WEIGHTS].reads)
    programs |= {adding(part): with_sums(programs[part], sums) for part in (INPUTS, WEIGHTS)}
    ports = placeholders(gm)
    known = set(ports.values())
    return StagePrograms(
        programs,
        {port: node.name for port, node in ports.items() if port.kind in (PARAMETER, BUFFER, SEED)},
        tuple(node.name for node in gm.graph.find_nodes(op="placeholder") if node not in known),
        {port: node.name for port, node in ports.items() if port.kind in (INPUT, TANGENT)},
        {port: node.name for port, node in ends if port.kind == OUTPUT},
        {port: node.name for port, node in added.items()},
        {port: node.name for port, node in ends if port.kind == GRADIENT},
    )


def program_of(gm: GraphModule, part: str, parts: dict[Node, str], kept: set[Node]) -> Program:
    """Returns the program of a part: from what it reads of other parts to what they, or the results, read of it."""
    body = calls_in(parts, part)
    inside = set(body)
    reads = list(dict.fromkeys(used for node in body for used in node.all_input_nodes if used not in inside))
    mine = [node for node in body if parts[node] == part]
    gives = [node for node in mine if node in kept or any(parts.get(user) not in (part, None) for user in node.users)]
    program = extract(gm, reads, body, [*gives])
    return Program(program, tuple(node.name for node in reads), tuple(node.name for node in gives))


def adding(part: str) -> str:
    """Returns the key of a part's program that adds its gradients to those of earlier micro-batches."""
    return f"{part}+"


def with_sums(program: Program, sums: set[str]) -> Program:
    """Returns the program that adds each gradient to a sum as soon as it is there, and gives the other values.

    It reads the sums under the gradients' names, after all else.
    """
    graph, copies = Graph(), dict[Node, Node]()
    output = program.gm.graph.output_node()
    given = nodes_in(output.args[0])
    ends = {node: name for node, name in zip(given, program.gives) if name in sums}
    totals: dict[Node, Node] = {}
    for node in program.gm.graph.find_nodes(op="placeholder"):
        copies[node] = copied(graph, node, copies.__getitem__)
    for node, name in ends.items():
        totals[node] = graph.placeholder(f"sum_{name}")
    for node in program.gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            copies[node] = copied(graph, node, copies.__getitem__)
        if node in ends:
            graph.call_function(aten.add_.Tensor, (totals[node], copies[node]))
    gives = tuple(name for name in program.gives if name not in sums)
    graph.output(tuple(copies[node] for node, name in zip(given, program.gives) if name not in sums))
    return Program(GraphModule(program.gm, graph), (*program.reads, *ends.values()), gives)
