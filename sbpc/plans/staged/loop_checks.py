"""What must hold between the chunks of a step, and in a loop that was read from a file: each function yields what is
wrong, and may rely on what is checked before it. plan: a `Plan`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from itertools import chain
from typing import Any

from torch import Tensor

from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, INPUTS, OUTPUT, PARAMETER, TANGENT, Port, results
from sbpc.plans.staged import schedules
from sbpc.plans.staged.loop import JOINED, Loop, Source
from sbpc.plans.staged.schedules import chunks_in, in_turn

JOINS = ("sum", "max", "min", "same")


def mistakes(plan: Any, loop: Loop) -> Iterator[str]:
    """Yields what is wrong with the loop of a plan. Raises VerifyError if its stages would wait for each other for
    ever."""
    yield from chain(
        wrong_counts(plan, loop),
        wrong_loop(loop),
        wrong_chunks(plan, loop),
        wrong_crossings(plan),
        wrong_parameters(plan),
    )
    in_turn(plan.actions, plan.needs)


def wrong_counts(plan: Any, loop: Loop) -> Iterator[str]:
    """Yields what is wrong with the numbers of micro-batches and of chunks."""
    if type(loop.count) is not int or loop.count < 1:
        yield f"{loop.count} micro-batches"
    if len(plan.chunks) != plan.stages * chunks_in(plan.schedule):
        yield f"{len(plan.chunks)} chunks for {plan.stages} stages"


def wrong_loop(loop: Loop) -> Iterator[str]:
    """Yields what does not fit in what is done around the loop."""
    given = {port for port in loop.ports.inputs if port.kind != TANGENT}
    if set(loop.shapes) != given or not all(isinstance(value, Tensor) for value in loop.shapes.values()):
        yield "shapes of other ports than the step has"
    reads = sum(port.kind in (INPUT, BUFFER) for port in loop.ports.inputs)
    leaves = sum(port.kind != GRADIENT for port in loop.ports.outputs)
    counts = {"before": (reads, None), "after": (len(loop.joins), leaves)}
    for (key, (taken, made)), gm in zip(counts.items(), (loop.before, loop.after)):
        if len(gm.graph.find_nodes(op="placeholder")) != taken or made not in (None, len(results(gm))):
            yield f"a graph {key} the loop with other inputs or results"
    for name, source in loop.inputs.items():
        if not fits(loop, source):
            yield f"an input of the body that does not fit: {name} is {source}"
    for how in loop.joins:
        if how not in JOINS and type(how) is not int:
            yield f"values joined as {how!r}"


def fits(loop: Loop, source: Source) -> bool:
    """Returns whether an input of the body can come from there."""
    if source.kind == "argument" and type(source.number) is int:
        leaf, dim = loop.shapes.get(Port(INPUT, str(source.number))), source.dim
        inside = type(dim) is int and leaf is not None and 0 <= dim < leaf.dim() and leaf.shape[dim] % loop.count == 0
        return leaf is not None and (dim is None or inside)
    if source.kind == "before" and type(source.number) is int:
        return 0 <= source.number < len(results(loop.before))
    if source.kind == JOINED and type(source.number) is int:
        return 0 <= source.number < len(loop.joins)
    return source.kind == "index"


def wrong_chunks(plan: Any, loop: Loop) -> Iterator[str]:
    """Yields ports of chunks that stand for nothing, or for more than one thing."""
    for at, chunk in enumerate(plan.chunks):
        ports = chunk.ports
        taken = [port for port in ports.inputs if port.kind in (INPUT, TANGENT)]
        left = [port for port in ports.outputs if port.kind == OUTPUT]
        for side, has in (((chunk.arguments, chunk.receives), taken), ((chunk.results, chunk.sends), left)):
            if sorted(map(astuple, chain(*side))) != sorted(map(astuple, has)):
                yield f"chunk {at} has other ports than its plan"
        wrong = [port for port, name in chunk.arguments.items() if (port.kind == TANGENT) != (name in loop.joined)]
        if wrong or not set(chunk.arguments.values()) <= loop.inputs.keys():
            yield f"chunk {at} has arguments that the body has not"
    numbers = sorted(number for chunk in plan.chunks for number in chunk.results.values())
    if numbers != list(range(len(loop.joins))):
        yield f"results of the body {numbers}"
    for chunk in plan.chunks:
        for port, number in chunk.results.items():
            how, dims = loop.joins[number], chunk.joined(port, 1, "same").dim()
            if how not in JOINS and not 0 <= how < dims:
                yield f"a result of {dims} dims joined along dim {how}"


def wrong_parameters(plan: Any) -> Iterator[str]:
    """Yields parameters and buffers of chunks that the step has not, or in another shape or layout."""
    for port in sorted(plan.in_loop, key=str):
        if port.kind not in (PARAMETER, GRADIENT) or port.name not in plan.parameters:
            yield f"{port.kind} {port.name} boxed for every micro-batch"
    for at, chunk in enumerate(plan.chunks):
        for port, value in chunk.shapes.items():
            if port.kind in set(INPUTS) - {INPUT, TANGENT} and (
                port not in plan.shapes or alike(plan.shapes[port]) != alike(value)
            ):
                yield f"chunk {at} has a {port.kind} {port.name} that the step has not"
            if port.kind == PARAMETER and chunk.given[port] != plan.parameters[port.name]:
                yield f"{port.name} is stored in two layouts"


def wrong_crossings(plan: Any) -> Iterator[str]:
    """Yields what chunks receive that does not come as it is read, and what they are to send and do not leave.

    It relies on chunks that are right in themselves.
    """
    if len(plan.sources) != sum(len(chunk.sends) for chunk in plan.chunks):
        yield "a value that two chunks send"
    for at, chunk in enumerate(plan.chunks):
        for port, name in chunk.receives.items():
            if name not in plan.sources:
                yield f"{name}, which chunk {at} receives and none sends"
                return
            number, sent = plan.sources[name]
            source = plan.chunks[number]
            if number == at or alike(source.value(sent)) != alike(chunk.shapes[port]):
                yield f"{name}, which chunk {number} sends in another shape than chunk {at} receives"
            if source.left[sent] != chunk.given[port]:
                yield f"{name}, which chunk {number} sends in another layout than chunk {at} receives"
    for at, chunk in enumerate(plan.chunks):
        for port, name in chunk.sends.items():
            if not leaves(plan, at, port):
                yield f"{name}, which chunk {at} is to send and leaves in no micro-batch"
    makers = {number: (at, port) for at, chunk in enumerate(plan.chunks) for port, number in chunk.results.items()}
    for at, chunk in enumerate(plan.chunks if plan.loop is not None else ()):
        for port, name in chunk.arguments.items():
            if (number := plan.loop.joined.get(name)) is not None:
                source, made = makers[number]
                value = plan.chunks[source].joined(made, plan.count, plan.loop.joins[number])
                same = plan.owners[source] == plan.owners[at] and alike(value) == alike(chunk.shapes[port])
                if not same or not leaves(plan, source, made):
                    yield f"{name}, which chunk {at} reads when all forwards are done, as no chunk leaves it there"


def leaves(plan: Any, chunk: int, port: Port) -> bool:
    """Returns whether all programs of a chunk that are to leave an output do."""
    programs, kind = (
        plan.programs[chunk],
        schedules.INPUTS if port in plan.chunks[chunk].sends_late else schedules.FORWARD,
    )
    running = [
        programs.program(which, adding) for which in plan.tally(chunk) if kind in which for adding in (False, True)
    ]
    return bool(running) and all(programs.outputs.get(port) in program.gives for program in running)


def alike(value: Tensor) -> tuple[Any, ...]:
    """Returns dtype and shape of a tensor."""
    return value.dtype, tuple(value.shape)
