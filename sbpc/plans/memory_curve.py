"""What is alive over a step: bytes at every moment on the busiest rank, and what holds them at the peak, grouped."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.fx import Node

from sbpc.graph.ports import BUFFER, PARAMETER, SEED, results
from sbpc.plans.memory import Life, phase_of
from sbpc.plans.planned import PlannedStep
from sbpc.plans.staged.chunk_programs import ChunkPrograms, Program
from sbpc.plans.staged.part_memory import ADDED, GATHERED, HANDED, HOME, LEFT, SAVED, bytes_at, scope
from sbpc.plans.staged.schedules import EARLY, LATE, STEP
from sbpc.plans.staged.stage_memory import moments
from sbpc.plans.staged.stage_parts import Parts
from sbpc.plans.storages import POSITION, Moment

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COPIES, INPUTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "gathered copies",
    "inputs",
)
GROUPS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COPIES, INPUTS)
GROUP_OF = {
    SAVED: ACTIVATIONS,
    HANDED: ACTIVATIONS,
    GATHERED: COPIES,
    ADDED: GRADIENTS,
    LEFT: GRADIENTS,
    HOME: GRADIENTS,
}


@dataclass(frozen=True)
class Held:
    """A tensor that is alive: the name of the node that made it, its group, the module it belongs to, its bytes on a
    rank."""

    name: str
    group: str
    module: str
    bytes: int


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes alive on the busiest rank at every moment of a step; a moment is a call.

    calls: by moment the name of the node of the boxed graph that runs, in a loop behind that of the action; the last
    moment is the optimizer's step, "". phases: by moment. groups: by name of a group, its bytes at every moment; they
    sum to `bytes`. peak: the moment at which most is alive. held: what is alive there, the largest first.
    """

    calls: tuple[str, ...]
    phases: tuple[str, ...]
    groups: Mapping[str, tuple[int, ...]]
    peak: int
    held: tuple[Held, ...]

    @property
    def bytes(self) -> tuple[int, ...]:
        """Bytes alive at every moment. The largest is the memory that the plan takes."""
        return tuple(map(sum, zip(*self.groups.values())))

    def by_module(self, group: str = ACTIVATIONS) -> dict[str, int]:
        """Returns the bytes of a group at the peak by module, the largest first."""
        found: dict[str, int] = {}
        for each in self.held:
            if each.group == group:
                found[each.module] = found.get(each.module, 0) + each.bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class ProgramCurve:
    """The curve of one program. calls: by moment. alive: by group its bytes, besides what is there before. life,
    start: of its calls, and the first of these. groups: by storage."""

    calls: list[Node]
    alive: dict[str, np.ndarray]
    life: Life
    start: int
    groups: list[str]


def memory_curve(plan: PlannedStep, stage: int) -> MemoryCurve:
    """Returns the curve of a step on a rank of a stage."""
    parts = {at: plan.chunk_costs[at] for at in plan.chunks_on(stage)}
    trained = sum(part.trained for part in parts.values())
    stored = {
        PARAMETERS: sum(sum(part.homes.values()) for part in parts.values()),
        OPTIMIZER: plan.options.copies * trained,
    }
    always = Counter(stored) + Counter({INPUTS: sum(part.buffers for part in parts.values())})
    known = functools.cache(functools.partial(curve_of, plan))
    found: list[tuple[str, Counter[tuple[str, str]], ProgramCurve]] = []
    for (which, at, first, flying, once), (_, action) in zip(moments(plan, stage), plan.orders[stage]):
        held = Counter[tuple[str, str]]()
        for (chunk, kind), times in [*flying.items(), *((each, 1) for each in once)]:
            stays = SAVED if isinstance(kind, int) else kind  # what is held once less
            name = stays if isinstance(stays, str) else GATHERED if EARLY in stays[0] else LATE
            about = GROUP_OF.get(name, GRADIENTS), f"{name} of chunk {chunk}" if len(parts) > 1 else name
            held[about] += times * parts[chunk].held(kind)
        found.append(("" if action.kind == STEP else f"{action} ", held, known(at, which, first)))
    rows = {group: list[np.ndarray]() for group in GROUPS}
    for _, held, each in found:
        for group in GROUPS:
            more = sum(size for (name, _), size in held.items() if name == group)
            rows[group].append(each.alive[group] + always[group] + more)
    at_end = always + Counter({GRADIENTS: trained})  # while the optimizer steps
    alive = {group: np.concatenate([*pieces, [at_end[group]]]).astype(np.int64) for group, pieces in rows.items()}
    peak = int(np.argmax(sum(alive.values())))
    calls = [(before + node.name, phase_of(node)) for before, _, each in found for node in each.calls]
    names, phases = zip(*calls, ("", OPTIMIZER))
    held_there = sorted(held_at(plan, stage, found, peak, trained), key=lambda each: -each.bytes)
    return MemoryCurve(
        names, phases, {group: tuple(each.tolist()) for group, each in alive.items()}, peak, tuple(held_there)
    )


def held_at(plan: PlannedStep, stage: int, found: Sequence[Any], moment: int, trained: int) -> Iterator[Held]:
    """Yields what is alive at a moment of a step."""
    for at in plan.chunks_on(stage):
        chunk, homes = plan.chunks[at], plan.chunk_costs[at].homes
        yield from (Held(name, PARAMETERS, name.rpartition(".")[0], size) for name, size in homes.items() if size)
        for port, value in chunk.shapes.items():
            if port.kind in (BUFFER, SEED) and (size := bytes_at(value, chunk.given[port], chunk.mesh)):
                yield Held(port.name, INPUTS, port.name.rpartition(".")[0], size)
    if state := plan.options.copies * trained:
        yield Held(OPTIMIZER, OPTIMIZER, "", state)
    for _, held, each in found:
        if moment < len(each.calls):
            yield from (Held(name, group, "", size) for (group, name), size in held.items() if size)
            for storage in each.life.alive(each.start + moment):
                if each.groups[storage] and each.life.size[storage]:
                    owner = each.life.owner[storage]
                    yield Held(
                        owner.name, each.groups[storage], str(owner.meta.get("module", "")), each.life.size[storage]
                    )
            return
        moment -= len(each.calls)
    yield Held(GRADIENTS, GRADIENTS, "", trained)


def curve_of(plan: PlannedStep, at: int, which: Parts, first: bool) -> ProgramCurve:
    """Returns the curve of a program of a chunk. first: whether its gradients are the first ones."""
    programs = plan.programs[at]
    program = programs.program(which, not (first and programs.begins(which)))
    life, start, ends, there, beside = scope(programs, which, program)
    groups = ["" if at in there else group for at, group in enumerate(groups_of(life, programs, program))]
    start = next((at for at in range(start, ends) if not is_there(life.moments[at], there)), ends)
    most = len(life.moments)
    change = {group: np.zeros(most + 1, dtype=np.int64) for group in GROUPS}
    for made, moment in enumerate(life.moments):
        for storage, size in moment.makes:
            if groups[storage]:
                change[groups[storage]][max(made, start)] += size
                change[groups[storage]][int(min(life.last[storage] + 1, most))] -= size
    alive = {group: np.cumsum(each)[start:ends] for group, each in change.items()}
    come = sum(
        bytes_at(programs.chunk.shapes[port], programs.chunk.given[port], programs.chunk.mesh) for port in beside
    )
    alive[INPUTS] += (0 if LATE in which else POSITION * len(programs.chunk.mesh.axes)) + come
    return ProgramCurve([moment.node for moment in life.moments[start:ends]], alive, life, start, groups)


def is_there(moment: Moment, there: Container[int]) -> bool:
    """Returns whether a moment is that of a placeholder whose value is there before."""
    return moment.node.op == "placeholder" and all(storage in there for storage, _ in moment.makes)


def groups_of(life: Life, programs: ChunkPrograms, program: Program) -> list[str]:
    """Returns the group of every storage, by what made it and what it is left as."""
    parameters = {name for port, name in programs.fixed.items() if port.kind == PARAMETER}
    groups = []
    for owner in life.owner:
        copied = owner.op != "placeholder" and owner.meta.get("of") in parameters
        groups.append(INPUTS if owner.op == "placeholder" else COPIES if copied else ACTIVATIONS)
    gradients = {*programs.home.values(), *programs.accumulated.values()}
    for name, node in zip(program.gives, results(program.gm)):
        for storage in life.values[node] if name in gradients and node is not None else ():
            groups[storage] = GRADIENTS if groups[storage] == ACTIVATIONS else groups[storage]
    return groups
