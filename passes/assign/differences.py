"""What two plans of one layout problem pay otherwise: the boxings that only one of them has, and computing by
module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sbpc.boxing.paths import path
from sbpc.boxing.steps import step_cost
from sbpc.graph.operands import shape_of
from sbpc.graph.ports import PARAMETER, placeholders
from sbpc.inspect.explain import Moved
from sbpc.mesh.layout_codes import decode
from sbpc.passes.assign.space import Space
from sbpc.solver import star
from sbpc.solver.problem import Labels

Edge = tuple[int, int, int]  # a value, and the layout codes from and to which it is boxed


def only_in(space: Space, numbers: Sequence[int], labels: Labels, other: Labels) -> tuple[Moved, ...]:
    """Returns the collectives of the plan of `labels` that the plan of `other` has not, dearest first.

    numbers: the values that meet a variable which has different labels in the two.
    """
    known = {edge for number in numbers for edge in edges(space, number, other)}
    new = [edge for number in numbers for edge in edges(space, number, labels) if edge not in known]
    moved = [each for edge in new for each in moved_by(space, edge, labels) if each.bytes_sent]
    return tuple(sorted(moved, key=lambda each: -each.seconds))


def computing(space: Space, changed: Sequence[int], labels: Labels, other: Labels) -> dict[str, float]:
    """Returns by module how many more seconds its ops take under `labels` than under `other`, where that differs.

    changed: the variables which have different labels in the two.
    """
    seconds: dict[str, float] = {}
    for at in changed:
        costs, module = space.variables[at].costs, module_of(space, at)
        if costs[labels[at]] != costs[other[at]]:
            seconds[module] = seconds.get(module, 0.0) + float(costs[labels[at]] - costs[other[at]])
    return seconds


def edges(space: Space, number: int, labels: Labels) -> list[Edge]:
    """Returns the boxings of a value in a plan."""
    value, codes = space.values[number], space.codes[number].tolist()
    source, (alias, targets) = int(value.out[labels[value.producer]]), star(value, labels)
    first = [(number, codes[source], codes[alias])] if alias != source else []
    return first + [(number, codes[alias], codes[target]) for target in targets]


def moved_by(space: Space, edge: Edge, labels: Labels) -> Iterator[Moved]:
    """Yields what each step of a boxing sends, for whom; of what is done once for all micro-batches, the part of
    one."""
    mesh, (number, before, after) = space.mesh, edge
    value, (node, index), share = space.values[number], space.keys[number], space.counted_parts[number]
    readers = [at for at, wants in value.consumers if space.codes[number][wants[labels[at]]] == after]
    reader = readers[0] if readers else value.consumers[0][0]  # the first of all where others box it on
    about = node if reader >= len(space.nodes) or space.nodes[reader].op == "placeholder" else space.nodes[reader]
    module, phase = module_of(space, space.number[about]), about.meta.get("phase", "forward")
    ends = decode(before, mesh.axes), decode(after, mesh.axes)
    shape, itemsize = shape_of(node, index)
    for step in path(*ends, shape, itemsize, mesh, space.sums_of[number]):
        sized, _ = ends[0].busiest(shape, mesh.sizes, mesh.routing.expected)
        taken, sent = step_cost(step, sized, itemsize, mesh)
        states = str(step.before), str(step.after)
        yield Moved(
            step.collective, mesh.key(step.axes), node.name, module, phase, *states, share * sent, share * taken
        )


def module_of(space: Space, at: int) -> str:
    """Returns the module of a variable: of a parameter the one that holds it, of a result the model."""
    if at >= len(space.nodes):
        return ""
    node = space.nodes[at]
    if node.op != "placeholder":
        return str(node.meta.get("module", ""))
    names = {found: port.name for port, found in placeholders(space.gm).items() if port.kind == PARAMETER}
    return names.get(node, "").rpartition(".")[0]
