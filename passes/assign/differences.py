"""What two plans of one layout problem pay otherwise: the boxings that only one of them has, and computing by module."""

from __future__ import annotations

from collections.abc import Sequence

from sbpc.boxing.paths import path
from sbpc.boxing.steps import Step, wire
from sbpc.graph.operands import shape_of
from sbpc.graph.ports import PARAMETER, placeholders
from sbpc.inspect.explain import Moved
from sbpc.mesh.cluster import collective_seconds
from sbpc.mesh.layout_codes import decode
from sbpc.passes.assign.space import Space
from sbpc.solver import star
from sbpc.solver.problem import Labels

Edge = tuple[int, int, int]  # a value, and the layouts from and to which it is boxed


def only_in(space: Space, numbers: Sequence[int], labels: Labels, other: Labels) -> tuple[Moved, ...]:
    """Returns the collectives of the plan of `labels` that the plan of `other` has not, dearest first.

    numbers: the values that meet a variable which has different labels in the two.
    """
    known = {edge for number in numbers for edge in edges(space, number, other)}
    moved = [
        moved_by(space, edge, step, labels)
        for number in numbers
        for edge in edges(space, number, labels)
        if edge not in known
        for step in steps_of(space, edge)
    ]
    return tuple(sorted((each for each in moved if each.bytes_sent), key=lambda each: -each.seconds))


def computing(space: Space, changed: Sequence[int], labels: Labels, other: Labels) -> dict[str, float]:
    """Returns by module how many more seconds its ops take under `labels` than under `other`, where that differs.

    changed: the variables which have different labels in the two.
    """
    seconds: dict[str, float] = {}
    for at in changed:
        costs = space.variables[at].costs
        if costs[labels[at]] != costs[other[at]]:
            module = module_of(space, at)
            seconds[module] = seconds.get(module, 0.0) + float(costs[labels[at]] - costs[other[at]])
    return seconds


def edges(space: Space, number: int, labels: Labels) -> list[Edge]:
    """Returns the boxings of a value in a plan."""
    value = space.values[number]
    source = int(value.out[labels[value.producer]])
    alias, targets = star(value, labels)
    codes = [int(code) for code in space.codes[number]]
    first = [(number, codes[source], codes[alias])] if alias != source else []
    return first + [(number, codes[alias], codes[target]) for target in targets]


def steps_of(space: Space, edge: Edge) -> tuple[Step, ...]:
    """Returns the steps of a boxing."""
    number, before, after = edge
    axes = space.mesh.axes
    return path(decode(before, axes), decode(after, axes), *shape_of(*space.keys[number]), space.mesh)


def moved_by(space: Space, edge: Edge, step: Step, labels: Labels) -> Moved:
    """Returns what a step of a boxing sends, for whom; of what is done once for all micro-batches, the part of one."""
    mesh, (node, index), share = space.mesh, space.keys[edge[0]], space.counted_parts[edge[0]]
    rounds, sent = wire(step, *shape_of(node, index), mesh.sizes)
    taken = float(collective_seconds(rounds, sent, *mesh.link(step.axes, step.collective))) if rounds else 0.0
    reader = reader_of(space, edge, labels)
    about = node if reader >= len(space.nodes) or space.nodes[reader].op == "placeholder" else space.nodes[reader]
    module = module_of(space, space.number[about])
    phase, states = about.meta.get("phase", "forward"), (str(step.before), str(step.after))
    return Moved(step.collective, mesh.key(step.axes), node.name, module, phase, *states, share * float(sent), share * taken)


def reader_of(space: Space, edge: Edge, labels: Labels) -> int:
    """Returns the first variable that reads a value as it is boxed; the first of all where others box it on."""
    value = space.values[edge[0]]
    codes = space.codes[edge[0]]
    readers = [at for at, wants in value.consumers if int(codes[wants[labels[at]]]) == edge[2]]
    return readers[0] if readers else value.consumers[0][0]


def module_of(space: Space, at: int) -> str:
    """Returns the module of a variable: of a parameter the one that holds it, of a result the model."""
    if at >= len(space.nodes):
        return ""
    node = space.nodes[at]
    if node.op != "placeholder":
        return str(node.meta.get("module", ""))
    names = {found: port.name for port, found in placeholders(space.gm).items() if port.kind == PARAMETER}
    return names.get(node, "").rpartition(".")[0]
