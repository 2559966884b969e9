"""Runs the stages of a pipeline over micro-batches, whoever moves the values: the run on real ranks and the simulation share this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sbpc._compat import storage_of
from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, TANGENT, Port
from sbpc.plans.staged.loop import Loop
from sbpc.plans.staged.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action
from sbpc.plans.staged.stage_parts import AFTER, BEFORE
from sbpc.plans.staged.staged_plan import Chunk
from sbpc.runtime.staged.stage_programs import StagePrograms, adding

Values = dict[str, Any]
ADDING = (INPUTS, WEIGHTS)
PARTS = {FORWARD: (FORWARD,), BACKWARD: (INPUTS, WEIGHTS), INPUTS: (INPUTS,), WEIGHTS: (WEIGHTS,)}
Run = Callable[[str, Sequence[Any]], Sequence[Any]]  # runs a part's program on its inputs


class StageRun:
    """One chunk on one rank during a step.

    fixed: values that are the same for all micro-batches. batches: those of each micro-batch in flight. added: the gradients so far.
    """

    def __init__(self, chunk: Chunk, programs: StagePrograms, fixed: Values) -> None:
        self.chunk, self.programs, self.fixed = chunk, programs, fixed
        self.batches: dict[int, Values] = {}
        self.added: Values = {}

    def program(self, part: str) -> str:
        """Returns which program runs a part: the one that adds to the gradients of earlier micro-batches, if there are any."""
        return adding(part) if part in ADDING and self.added.keys() & set(self.programs.programs[part].gives) else part

    def given(self, part: str, batch: int) -> list[Any]:
        """Returns the inputs of a part's program."""
        values, own = self.batches.get(batch, {}), len(self.programs.programs[part].reads)
        reads = self.programs.programs[self.program(part)].reads
        found = [values[name] if name in values else self.known(name) for name in reads[:own]]
        return found + [self.added[name] for name in reads[own:]]

    def known(self, name: str) -> Any:
        """Returns a value that is the same for all micro-batches, or a sum of gradients."""
        return self.fixed[name] if name in self.fixed else self.added[name]

    def take(self, part: str, batch: int, results: Sequence[Any]) -> None:
        """Keeps what a part's program gave: as long as later parts read it, and gradients as sums."""
        named = dict(zip(self.programs.programs[self.program(part)].gives, results))
        if part in (BEFORE, AFTER):
            self.fixed |= named
            return
        later = {FORWARD: (INPUTS, WEIGHTS), INPUTS: (WEIGHTS,), WEIGHTS: ()}[part]
        read = {name for each in later for name in self.programs.programs[each].reads}
        values = self.batches.pop(batch) | named
        if part != WEIGHTS:
            self.batches[batch] = {name: value for name, value in values.items() if name in read}
        for name in set(self.programs.accumulated.values()) & named.keys():
            self.add(name, named[name])

    def add(self, name: str, value: Tensor) -> None:
        """Adds a micro-batch's gradient to those before; the first one is the sum, in memory of its own."""
        if name in self.added:
            self.added[name].add_(value)
            return
        others = (self.fixed, self.added, *self.batches.values())
        taken = any(storage_of(value) == storage_of(v) for each in others for v in each.values() if isinstance(v, Tensor))
        own = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes and not taken
        self.added[name] = value if own else value.clone(memory_format=torch.contiguous_format)

    def gradients(self) -> dict[Port, Tensor]:
        """Returns the gradients in their homes, each in memory of its own."""
        found: dict[Port, Tensor] = {}
        seen = {storage_of(value) for value in self.fixed.values() if isinstance(value, Tensor)}
        for port, name in self.programs.home.items():
            boxed = name in self.programs.programs[AFTER].gives
            value = self.fixed.pop(name) if boxed else self.added[name]
            others = seen - {storage_of(value)} if boxed else seen
            found[port] = value.clone() if storage_of(value) in others else value
            seen.add(storage_of(found[port]))
        return found


def micro_batch(loop: Loop, name: str, batch: int, leaves: Sequence[Tensor], before: Sequence[Tensor]) -> Tensor:
    """Returns an input of the body for a micro-batch, whole. leaves: the tensors of the step's arguments."""
    source = loop.inputs[name]
    if source.kind == "index":
        return torch.tensor(batch)
    if source.kind == "before":
        return before[source.number]
    leaf = leaves[source.number]
    return leaf if source.dim is None else leaf.chunk(loop.count, source.dim)[batch]


def before_loop(loop: Loop, leaves: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns what every micro-batch reads of the whole batch."""
    given = [leaves[int(p.name)] if p.kind == INPUT else buffers[p.name] for p in loop.ports.inputs if p.kind in (INPUT, BUFFER)]
    with torch.no_grad():
        return list(loop.before(*given))


class Joined:
    """What comes out of the body, joined over the micro-batches."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.values: dict[int, dict[int, Tensor]] = {}

    def take(self, number: int, batch: int, value: Tensor) -> None:
        """Takes output `number` of a micro-batch, whole."""
        self.values.setdefault(number, {})[batch] = value

    def results(self, numbers: Sequence[int]) -> list[Tensor]:
        """Returns these outputs, joined as the loop says."""
        return [join(self.loop.joins[number], [self.values[number][at] for at in range(self.loop.count)]) for number in numbers]

    def after(self, joined: Sequence[Tensor]) -> dict[Port, Any]:
        """Returns the results of the step from all joined outputs, in order."""
        with torch.no_grad():
            values = self.loop.after(*joined)
        ports = [port for port in self.loop.ports.outputs if port.kind != GRADIENT]
        return dict(zip(ports, values))


def join(how: Any, values: Sequence[Tensor]) -> Tensor:
    """Returns the values of all micro-batches as one."""
    if how == "same":
        return values[0]
    if isinstance(how, int):
        return torch.cat(list(values), how)
    stacked = torch.stack(list(values))
    return stacked.sum(0) if how == "sum" else stacked.amax(0) if how == "max" else stacked.amin(0)


def kinds_of(action: Action) -> tuple[str, ...]:
    """Returns the parts that an action runs."""
    return PARTS[action.kind]


def arrivals(chunk: Chunk, part: str) -> list[Port]:
    """Returns the ports of a chunk that a micro-batch fills before a part runs."""
    kind = {FORWARD: INPUT, INPUTS: TANGENT}.get(part)
    return [port for port in chunk.plan.ports.inputs if port.kind == kind]
