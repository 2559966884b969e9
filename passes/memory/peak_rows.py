"""held: rows under a limit for what a plan holds at its peaks beyond what is sure to be there in every plan.

That is copies that boxings make, and values that have been read and will be again. Whether such a storage is alive follows
from a few layouts: those in which the values that stand in it are made and read, as a plan boxes each value by the cheapest
way that these allow (see `Space.assignment`). A row counts it in all plans with these layouts, and allows as much in others.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import numpy as np
from torch.fx import Node

from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import result_name, results
from sbpc.mesh.layout import Layout
from sbpc.passes.assign.label_tables import LEAST, WORK, kind_of
from sbpc.passes.memory.live_bytes import Moment, at_call
from sbpc.passes.memory.priced_space import PricedSpace
from sbpc.plans.memory import Life
from sbpc.plans.plan import Plan
from sbpc.solver import Limit

Standing = tuple[str, Layout | None]  # the node whose value stands in a storage, and in which layout
SMALL = 1e-3  # of the limit: storages that are smaller are counted only where it depends on them


def rows(space: PricedSpace, plan: Plan, calls: Sequence[Node], copies: int, limit: float) -> list[Limit]:
    """For each of these calls the row of the moment at which most is alive while the plan runs it or boxes for it, where the
    plan breaks that row. No plan under the limit breaks any. copies: see `at_optimizer`."""
    life, labels, found = plan.life, space.labels(plan.assignment), []
    standing = values_in(life)
    for call in calls:
        sure, more = beyond(space, plan, labels, standing, call, copies)
        for least in (SMALL * limit, 0.0):
            row = row_of(space, labels, sure, [each for each in more if each[0] > least], limit)
            if sum(float(weights[labels[number]]) for number, weights in row.weights.items()) > row.most:
                found.append(row)
                break
    return found


def beyond(
    space: PricedSpace, plan: Plan, labels: Sequence[int], standing: Sequence[set[Standing]], call: Node, copies: int
) -> tuple[Moment, list[tuple[float, set[str]]]]:
    """At the moment when most is alive while a plan runs a call or boxes for it: what is sure to be alive; the storages beyond
    that, the bytes that it does not count and the nodes whose values stand in them. standing: see `values_in`."""
    life = plan.life
    at = max(of_call(life, call), key=life.live.__getitem__)
    moment, number = life.moments[at], space.named[call.name]
    aside = "step" in moment.node.meta or bool(space.tables[number].apart[labels[number]])
    sure = at_call(space.gm, call, copies, aside=aside)
    counted = counted_in(space, plan, labels, sure)
    made = set() if aside else {storage for storage, _ in moment.makes}
    more = [
        (life.size[storage], {name for name, _ in standing[storage]})
        for storage in life.alive(at)
        if life.owner[storage].op != "placeholder" and storage not in made and not standing[storage] & counted
    ]
    return sure, without(more, least_of(space, sure))


def least_of(space: PricedSpace, moment: Moment) -> dict[str, float]:
    """By name of a node the bytes that a moment counts of its outputs whatever their layouts."""
    found: dict[str, float] = {}
    for name, place in moment:
        if kind_of(place)[0] == LEAST:
            found[name] = found.get(name, 0.0) + float(space.bytes_of(space.named[name], place)[0])
    return found


def without(storages: Sequence[tuple[int, set[str]]], least: Mapping[str, float]) -> list[tuple[float, set[str]]]:
    """Storages, less the bytes that a moment counts of the values that stand in them: in whatever plan some of them are there,
    no byte is counted twice. They are taken off a storage of few names, which is there in all plans that have one of more."""
    found = [(float(size), names) for size, names in sorted(storages, key=lambda each: (len(each[1]), -each[0]))]
    for name, counted in least.items():
        taken: list[set[str]] = []
        for at, (size, names) in enumerate(found):
            if name in names and not any(other <= names for other in taken):
                found[at] = max(size - counted, 0.0), names
                taken += [names] if size >= counted else []
    return found


def of_call(life: Life, call: Node) -> list[int]:
    """The moments at which a call runs, or what it is taken apart into, or something is boxed for it."""
    return [at for at, moment in enumerate(life.moments) if moment.node.meta.get("call") == call.name]


def values_in(life: Life) -> list[set[Standing]]:
    """By storage the values that stand in it, and that of its owner without a layout, as a boxing may need a storage only
    on the way."""
    found: list[set[Standing]] = [{(name_of(owner), None)} for owner in life.owner]
    for node, storages in life.values.items():
        layouts = node.meta["sbp"] if isinstance(node.meta["sbp"], tuple) else [node.meta["sbp"]] * len(storages)
        for storage, layout in zip(storages, layouts):
            found[storage].add((name_of(node), layout))
    return found


def name_of(node: Node) -> str:
    """The name of the node of the annotated graph whose value a node of the boxed graph has."""
    if node.target is operator.getitem:
        node = value_of(node)[0]
    return str(node.meta["of"] if "step" in node.meta else node.meta["call"])


def counted_in(space: PricedSpace, plan: Plan, labels: Sequence[int], moment: Moment) -> set[Standing]:
    """The values whose bytes a moment counts, but for placeholders and what a call makes itself."""
    left = {result_name(place): pair for place, pair in enumerate(zip(results(space.gm), plan.assignment.outputs))}
    axes, found = plan.mesh.axes, set[Standing]()
    for name, place in moment:
        number, (kind, index) = space.named[name], kind_of(place)
        if name in left:
            result, layout = left[name]
            assert result is not None
            found.add((value_of(result)[0].name, layout))
            continue
        node, choice = space.nodes[number], plan.assignment.choices[name]
        if node.op == "placeholder" or kind == LEAST or not space.bytes_of(number, place)[labels[number]]:
            continue
        if kind < WORK and index >= 0:
            found.add((name, choice.output(index, axes)))
        for slot, operand in enumerate(operands(node)):
            if index == -1 - slot or (kind == WORK and index >> slot & 1):
                found.add((value_of(operand)[0].name, choice.input(slot, axes)))
    return found


def row_of(
    space: PricedSpace, labels: Sequence[int], sure: Moment, more: Sequence[tuple[float, set[str]]], limit: float
) -> Limit:
    """The row of a moment, and of more storages: their bytes, and the nodes whose values stand in them."""
    weights, most = space.weights(sure), limit
    for size, names in more:
        same = same_layouts(space, names, labels)
        most += size * (len(same) - 1)
        for number, those in same.items():
            weights[number] = weights.get(number, 0.0) + size * those
    return Limit(weights, most)


def same_layouts(space: PricedSpace, names: set[str], labels: Sequence[int]) -> dict[int, np.ndarray]:
    """By number of a variable, which of its labels make and read the values of these nodes in the layouts of `labels`, taken
    apart or not as there; variables of which all do are left out."""
    found: dict[int, np.ndarray] = {}
    for (node, _), value in zip(space.keys, space.values):
        if node.name in names:
            for number, layouts in ((value.producer, value.out), *value.consumers):
                same, apart = layouts == layouts[labels[number]], space.tables[number].apart
                found[number] = found.get(number, True) & same & (apart == apart[labels[number]])
    for number, node in enumerate(space.nodes):
        if node.name in names and space.tables[number].apart[labels[number]]:  # what it holds meanwhile is of all its layouts
            found[number] = np.arange(len(space.tables[number])) == labels[number]
    return {number: same for number, same in found.items() if not same.all()}
