"""held: rows under a limit for what a plan holds at its peaks beyond what is sure to be there in every plan.

That is copies that boxings make, and values that have been read and will be again. Whether such a storage is alive follows
from layouts at a few ports: those of the values that stand in it, where they are made and where they are read. A row counts
it in all plans with these layouts, and allows as much in all others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
from torch.fx import Node

from sbpc.choices import operands, value_of
from sbpc.layout import Layout
from sbpc.memory import Life
from sbpc.moments import Moment, at_call, result_name
from sbpc.passes.prices import PricedSpace
from sbpc.plan import Plan, results
from sbpc.solver import Limit
from sbpc.tables import REST, SPLIT, WORK

Place = tuple[str, Layout | None]  # the value of a node in a layout
SMALL = 1e-3  # of the limit: storages that are smaller are not counted


def rows(space: PricedSpace, plan: Plan, calls: Sequence[Node], copies: int, limit: float) -> dict[str, Limit]:
    """By name of a call of these the row for the moment with the most alive while the plan runs it or boxes for it; those that
    say something against the plan. No plan under the limit breaks one. copies: see `at_call`."""
    life, labels, found = Life.of(plan.boxed, plan.mesh), space.labels(plan.assignment), {}
    standing = values_in(life)
    for call in calls:
        at = max(of_call(life, call), key=life.live.__getitem__)
        moment = life.moments[at]
        aside = "step" in moment.node.meta or apart(space, call.name, labels)
        sure = at_call(space.gm, call, copies, aside=aside)
        made = set() if aside else {storage for storage, _ in moment.makes}
        there = places(space, plan, labels, sure)
        more = [
            (life.size[storage], {name for name, _ in standing[storage]})
            for storage in life.alive(at)
            if life.size[storage] > SMALL * limit and life.owner[storage].op != "placeholder"
            if storage not in made and not standing[storage] & there
        ]
        row = row_of(space, labels, sure, more, limit)
        if row is not None:
            found[call.name] = row
    return found


def of_call(life: Life, call: Node) -> list[int]:
    """The moments at which a call runs, or what it is taken apart into, or what it reads or leaves is boxed for it."""
    return [at for at, moment in enumerate(life.moments) if moment.node.meta.get("call") == call.name]


def values_in(life: Life) -> list[set[Place]]:
    """By storage the values that stand in it; that of a storage which a boxing needs on the way has no layout."""
    found: list[set[Place]] = [{(name_of(owner), None)} for owner in life.owner]
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


def places(space: PricedSpace, plan: Plan, labels: Sequence[int], moment: Moment) -> set[Place]:
    """The values whose bytes a moment counts, but for placeholders and what a call makes itself."""
    left = {result_name(place): pair for place, pair in enumerate(zip(results(space.gm), plan.assignment.outputs))}
    axes, found = plan.mesh.axes, set[Place]()
    for name, place in moment:
        number = space.named[name]
        if name in left:
            node, layout = left[name]
            assert node is not None
            found.add((value_of(node)[0].name, layout))
            continue
        node, choice = space.nodes[number], plan.assignment.choices[name]
        index = place - next((kind for kind in (WORK, REST, SPLIT) if place > kind // 2), 0)
        if node.op == "placeholder" or not space.bytes_of(number, place)[labels[number]]:
            continue
        if index >= 0 and place < WORK:
            found.add((name, choice.output(index, axes)))
        for slot, operand in enumerate(operands(node)):
            if index == -1 - slot or (place >= WORK and index >> slot & 1):
                found.add((value_of(operand)[0].name, choice.input(slot, axes)))
    return found


def row_of(
    space: PricedSpace, labels: Sequence[int], sure: Moment, more: Sequence[tuple[int, set[str]]], limit: float
) -> Limit | None:
    """The row of a moment, and of more storages: their bytes, and whose values stand in them; None if the labels keep it."""
    weights, most = {number: found.copy() for number, found in space.weights(sure).items()}, limit
    for size, names in more:
        same = ports(space, names, labels)
        most += size * (len(same) - 1)
        for number, those in same.items():
            weights[number] = weights.get(number, 0.0) + size * those
    taken = sum(float(found[labels[number]]) for number, found in weights.items())
    return Limit(weights, most) if taken > most else None


def ports(space: PricedSpace, names: set[str], labels: Sequence[int]) -> dict[int, np.ndarray]:
    """By number of a variable its labels with the layouts that it has where values of these nodes are made and read."""
    found: dict[int, np.ndarray] = {}
    for (node, _), value in zip(space.keys, space.values):
        if node.name in names:
            for number, layouts in ((value.producer, value.out), *value.consumers):
                found[number] = found.get(number, True) & (layouts == layouts[labels[number]])
    for number in map(space.named.__getitem__, names):
        if apart(space, space.nodes[number].name, labels):
            found[number] = np.arange(len(space.tables[number])) == labels[number]
    return {number: same for number, same in found.items() if not same.all()}


def apart(space: PricedSpace, name: str, labels: Sequence[int]) -> bool:
    """Whether a node is taken apart."""
    number = space.named[name]
    return bool(space.nodes[number].meta["candidates"].apart(space.tables[number].choice(labels[number])))
