"""Writes a plan with pipeline stages into a plan's file, and reads it: every chunk as a plan, and what is done around the loop.

The body of the file has the mesh, the ports and the options of the step, as any plan's, and under `stages` what is below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, INPUTS, OUTPUT, PARAMETER, TANGENT, Port, results
from sbpc.plans import plan_file
from sbpc.plans.plan import Plan
from sbpc.plans.plan_file import Decoder
from sbpc.plans.staged.chunk_programs import Chunk
from sbpc.plans.staged.loop import Loop, Source
from sbpc.plans.staged.schedules import chunks_in, in_turn
from sbpc.plans.staged.staged_plan import StagedPlan, alike

STAGES = "stages"
JOINS = ("sum", "max", "min", "same")
NAMED = ("arguments", "results", "receives", "sends")  # what a chunk says of its ports


def save(plan: StagedPlan, path: Path) -> None:
    """Writes a plan with stages to a file that `decode` reads."""
    plan_file.write(encode(plan), path)


def encode(plan: StagedPlan) -> dict[str, Any]:
    """Returns a plan with stages as JSON values."""
    loop = plan.loop
    return {
        "torch": torch.__version__,
        "mesh": list(zip(plan.mesh.axes, plan.mesh.sizes)),
        "cluster": plan.mesh.cluster.figures(),
        "ports": asdict(loop.ports),
        "options": plan_file.encode_options(plan.options),
        STAGES: {
            "axis": plan.axis,
            "schedule": plan.schedule,
            "count": loop.count,
            "in_loop": sorted(map(list, map(astuple, plan.in_loop))),
            "bound": plan.bound,
            "serial_bound": plan.serial_bound,
            "before": plan_file.encode_graph(loop.before),
            "after": plan_file.encode_graph(loop.after),
            "inputs": {name: list(astuple(source)) for name, source in loop.inputs.items()},
            "joins": list(loop.joins),
            "shapes": [[*astuple(port), plan_file.encode_value(value)] for port, value in loop.shapes.items()],
            "chunks": [encode_chunk(chunk) for chunk in plan.chunks],
        },
    }


def encode_chunk(chunk: Chunk) -> dict[str, Any]:
    """Returns a chunk as JSON values: its plan, and lists of ports with what they stand for."""
    named = {key: [[*astuple(port), what] for port, what in getattr(chunk, key).items()] for key in NAMED}
    return {"plan": plan_file.encode(chunk.plan), **named}


def decode(decoder: Decoder, plan_in: Callable[[Decoder], Plan]) -> StagedPlan:
    """Returns the plan with stages in a file. plan_in: reads a plan, and checks it. Raises PlanError if the file makes no sense."""
    body, mesh = decoder.body[STAGES], decoder.mesh()
    shapes = {Port(kind, name): decoder.value(value) for kind, name, value in body["shapes"]}
    inputs = {str(name): Source(*source) for name, source in body["inputs"].items()}
    before, after = decoder.bare_graph(body["before"]), decoder.bare_graph(body["after"])
    loop = Loop(body["count"], None, before, after, inputs, tuple(body["joins"]), decoder.ports(), shapes)
    chunks = [decode_chunk(Decoder(chunk["plan"], decoder.path), chunk, plan_in) for chunk in body["chunks"]]
    options, in_loop = decoder.options(), frozenset(Port(*each) for each in body["in_loop"])
    plan = StagedPlan(mesh, body["axis"], loop, chunks, body["schedule"], float(body["bound"]), in_loop, options)
    plan.serial_bound = float(body["serial_bound"])
    for mistake in chain(wrong_mesh(plan), wrong_loop(plan), wrong_chunks(plan), plan.wrong_crossings(), wrong_parameters(plan)):
        raise decoder.fail(mistake)
    in_turn(plan.actions, plan.needs)
    plan.verify()
    str(plan)
    return plan


def decode_chunk(decoder: Decoder, body: Mapping[str, Any], plan_in: Callable[[Decoder], Plan]) -> Chunk:
    """Returns a chunk."""
    named: dict[str, Any] = {key: {Port(kind, name): what for kind, name, what in body[key]} for key in NAMED}
    plan = plan_in(decoder)
    return Chunk(plan.graph, plan.assignment, lambda *_: plan, **named)


# --- what the parts of a file must have in common: each yields what is wrong, and may rely on what is checked before it --------------
def wrong_mesh(plan: StagedPlan) -> Iterator[str]:
    """Yields what is wrong with the meshes, the schedule and the number of chunks."""
    if plan.axis is not None and plan.axis not in plan.mesh.axes:
        yield f"stages along {plan.axis!r} of {plan.mesh}"
    if type(plan.loop.count) is not int or plan.loop.count < 1:
        yield f"{plan.loop.count} micro-batches"
    if len(plan.chunks) != plan.stages * chunks_in(plan.schedule):
        yield f"{len(plan.chunks)} chunks for {plan.stages} stages"
    sizes = {name: size for name, size in zip(plan.mesh.axes, plan.mesh.sizes) if name != plan.axis} or dict.fromkeys(plan.mesh.axes, 1)
    for at, chunk in enumerate(plan.chunks):
        mesh = chunk.plan.mesh
        if dict(zip(mesh.axes, mesh.sizes)) != sizes or mesh.cluster != plan.mesh.cluster:
            yield f"chunk {at} is for {mesh}"


def wrong_loop(plan: StagedPlan) -> Iterator[str]:
    """Yields what does not fit in what is done around the loop."""
    loop, given = plan.loop, {port for port in plan.loop.ports.inputs if port.kind != TANGENT}
    if set(loop.shapes) != given or not all(isinstance(value, Tensor) for value in loop.shapes.values()):
        yield "shapes of other ports than the step has"
    reads = sum(port.kind in (INPUT, BUFFER) for port in loop.ports.inputs)
    leaves = sum(port.kind != GRADIENT for port in loop.ports.outputs)
    counts = {"before": (reads, None), "after": (len(loop.joins), leaves)}
    for (key, (taken, made)), gm in zip(counts.items(), (loop.before, loop.after)):
        if len(gm.graph.find_nodes(op="placeholder")) != taken or made not in (None, len(results(gm))):
            yield f"a graph {key} the loop with other inputs or results"
    for name, source in loop.inputs.items():
        if not fits(plan, source):
            yield f"an input of the body that does not fit: {name} is {source}"
    for how in loop.joins:
        if how not in JOINS and type(how) is not int:
            yield f"values joined as {how!r}"


def fits(plan: StagedPlan, source: Source) -> bool:
    """Returns whether an input of the body can come from there."""
    if source.kind == "argument" and type(source.number) is int:
        leaf, dim = plan.loop.shapes.get(Port(INPUT, str(source.number))), source.dim
        inside = type(dim) is int and leaf is not None and 0 <= dim < leaf.dim() and leaf.shape[dim] % plan.loop.count == 0
        return leaf is not None and (dim is None or inside)
    if source.kind == "before" and type(source.number) is int:
        return 0 <= source.number < len(results(plan.loop.before))
    return source.kind == "index"


def wrong_chunks(plan: StagedPlan) -> Iterator[str]:
    """Yields ports of chunks that stand for nothing, or for more than one thing."""
    for at, chunk in enumerate(plan.chunks):
        ports = chunk.plan.ports
        taken = [port for port in ports.inputs if port.kind in (INPUT, TANGENT)]
        left = [port for port in ports.outputs if port.kind == OUTPUT]
        for side, has in (((chunk.arguments, chunk.receives), taken), ((chunk.results, chunk.sends), left)):
            if sorted(map(astuple, chain(*side))) != sorted(map(astuple, has)):
                yield f"chunk {at} has other ports than its plan"
        late = [port for port in chunk.arguments if port.kind != INPUT]
        if late or not set(chunk.arguments.values()) <= plan.loop.inputs.keys():
            yield f"chunk {at} has arguments that the body has not"
    numbers = sorted(number for chunk in plan.chunks for number in chunk.results.values())
    if numbers != list(range(len(plan.loop.joins))):
        yield f"results of the body {numbers}"
    for chunk in plan.chunks:
        for port, number in chunk.results.items():
            how, dims = plan.loop.joins[number], chunk.joined(port, 1, "same").dim()
            if how not in JOINS and not 0 <= how < dims:
                yield f"a result of {dims} dims joined along dim {how}"


def wrong_parameters(plan: StagedPlan) -> Iterator[str]:
    """Yields parameters and buffers of chunks that the step has not, or in another shape or layout."""
    for port in sorted(plan.in_loop, key=str):
        if port.kind not in (PARAMETER, GRADIENT) or port.name not in plan.parameters:
            yield f"{port.kind} {port.name} boxed for every micro-batch"
    for at, chunk in enumerate(plan.chunks):
        for port, value in chunk.plan.shapes.items():
            if port.kind in set(INPUTS) - {INPUT, TANGENT} and (port not in plan.shapes or alike(plan.shapes[port]) != alike(value)):
                yield f"chunk {at} has a {port.kind} {port.name} that the step has not"
            if port.kind == PARAMETER and chunk.plan.given[port] != plan.parameters[port.name]:
                yield f"{port.name} is stored in two layouts"
