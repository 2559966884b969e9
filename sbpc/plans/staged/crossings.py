"""What must hold between chunks: what one receives, another sends in the same shape and layout, and its programs leave. plan: a `Plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from sbpc.graph.ports import Port
from sbpc.plans.staged.schedules import FORWARD, INPUTS


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


def leaves(plan: Any, chunk: int, port: Port) -> bool:
    """Returns whether all programs of a chunk that are to leave an output do."""
    programs, kind = plan.programs[chunk], INPUTS if port in plan.chunks[chunk].sends_late else FORWARD
    running = [programs.program(which, adding) for which in plan.tally(chunk) if kind in which for adding in (False, True)]
    return bool(running) and all(programs.outputs.get(port) in program.gives for program in running)


def alike(value: Tensor) -> tuple[Any, ...]:
    """Returns dtype and shape of a tensor."""
    return value.dtype, tuple(value.shape)
