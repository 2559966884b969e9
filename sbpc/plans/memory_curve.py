"""What is alive over a step: bytes at every moment on the busiest rank, and what holds them at the peak, grouped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch.fx import GraphModule, Node

from sbpc.graph.ports import GRADIENT, PARAMETER, placeholders, results
from sbpc.mesh.mesh import Mesh
from sbpc.plans.memory import POSITION, Life, local_bytes, phase_of
from sbpc.plans.options import OPTIMIZER_STATE

PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COPIES, INPUTS = (
    "parameters", "gradients", "optimizer", "activations", "gathered copies", "inputs",
)  # fmt: skip
GROUPS = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COPIES, INPUTS)


@dataclass(frozen=True)
class Held:
    """A tensor that is alive: the name of the node that made it, its group, the module it belongs to, its bytes on a rank."""

    name: str
    group: str
    module: str
    bytes: int


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes alive on the busiest rank at every moment of a step; a moment is a call.

    calls: by moment the name of the node of the boxed graph that runs; the last moment is the optimizer's step, "". phases: by moment.
    groups: by name of a group, its bytes at every moment; they sum to `bytes`. peak: the moment at which most is alive. held: what is
    alive there, the largest first.
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


def memory_curve(life: Life, boxed: GraphModule, mesh: Mesh, optimizer: str | None) -> MemoryCurve:
    """Returns the curve of a step. life: that of the boxed graph."""
    groups = groups_of(life, boxed)
    born = {storage: at for at, moment in enumerate(life.moments) for storage, _ in moment.makes}
    ends = len(life.moments)
    change = {group: np.zeros(ends + 1, dtype=np.int64) for group in GROUPS}
    for storage, at in born.items():
        change[groups[storage]][at] += life.size[storage]
        change[groups[storage]][int(min(life.last[storage] + 1, ends))] -= life.size[storage]
    alive = {group: np.cumsum(each) for group, each in change.items()}
    alive[INPUTS][:ends] += POSITION * len(mesh.axes)
    stored, trained = stored_bytes(boxed, mesh)
    state = OPTIMIZER_STATE[optimizer] * trained
    alive[OPTIMIZER][:] = state
    alive[PARAMETERS][ends], alive[GRADIENTS][ends] = stored, trained
    at_peak = int(np.argmax(sum(alive.values())))
    held = [Held(OPTIMIZER, OPTIMIZER, "", state)] if state else []
    if at_peak == ends:
        held += [Held(PARAMETERS, PARAMETERS, "", stored), Held(GRADIENTS, GRADIENTS, "", trained)]
    else:
        names = {node: port.name for port, node in placeholders(boxed).items() if port.kind == PARAMETER}
        held += [held_by(life, storage, groups[storage], names) for storage in life.alive(at_peak) if life.size[storage]]
    calls = (*(moment.node.name for moment in life.moments), "")
    phases = (*(phase_of(moment.node) for moment in life.moments), OPTIMIZER)
    rows = {group: tuple(each.tolist()) for group, each in alive.items()}
    return MemoryCurve(calls, phases, rows, at_peak, tuple(sorted(held, key=lambda each: -each.bytes)))


def groups_of(life: Life, boxed: GraphModule) -> list[str]:
    """Returns the group of every storage, by what made it and what it is left as."""
    ports = {node: port for port, node in placeholders(boxed).items()}
    parameters = {node.name for node, port in ports.items() if port.kind == PARAMETER}
    groups = []
    for owner in life.owner:
        if owner.op == "placeholder":
            groups.append(PARAMETERS if owner.name in parameters else INPUTS)
        else:
            groups.append(COPIES if owner.meta.get("of") in parameters else ACTIVATIONS)
    for port, node in zip(boxed.meta["ports"].outputs, results(boxed)):
        for storage in life.values[node] if port.kind == GRADIENT and node is not None else ():
            groups[storage] = GRADIENTS if groups[storage] == ACTIVATIONS else groups[storage]
    return groups


def stored_bytes(boxed: GraphModule, mesh: Mesh) -> tuple[int, int]:
    """Returns the bytes of all parameters, and of those that are trained."""
    stored = {port.name: local_bytes(node, mesh) for port, node in placeholders(boxed).items() if port.kind == PARAMETER}
    return sum(stored.values()), sum(stored[port.name] for port in boxed.meta["ports"].outputs if port.kind == GRADIENT)


def held_by(life: Life, storage: int, group: str, names: Mapping[Node, str]) -> Held:
    """Returns what a storage holds. names: of parameters, by node."""
    owner = life.owner[storage]
    name = names.get(owner, owner.name)
    module = name.rpartition(".")[0] if owner in names else str(owner.meta.get("module", ""))
    return Held(name, group, module, life.size[storage])
