"""Bytes that are alive at one moment of a step, as a sum over nodes: what a price of memory is put on.

A moment counts, by node and place, how many times the bytes there count: of an output (place 0, 1, ...), of an operand as
it is read (-1 for the first), or what else `sbpc.passes.assign.label_tables.Table.held` knows. A result in the layout in which it is left
has the name `result_name`, and place 0. A moment never counts more than are alive in a plan, whatever its layouts: of values
that overlap in a storage one, of a value that may stand in several layouts an equal share of its elements. So prices on
moments bound what plans take.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.graph.operands import operands, outputs_of, value_of
from sbpc.graph.ports import GRADIENT, PARAMETER, placeholders, result_name, results
from sbpc.passes.assign.label_tables import LEAST, REST, SPLIT, WORK
from sbpc.plans.plan import Plan

STORED = "stored"  # the key in the meta of a node that stands for what is kept of a value until the backward
Moment = Mapping[tuple[str, int], float]
Key = tuple[Node, int]  # a node, and which of its outputs


def together(moments: Sequence[Moment], weights: Sequence[float]) -> Moment:
    """The sum of moments, each times its weight."""
    found = Counter[tuple[str, int]]()
    for moment, weight in zip(moments, weights):
        for place, many in moment.items():
            found[place] += weight * many  # type: ignore[assignment]
    return found


def at_optimizer(gm: GraphModule, copies: int) -> Moment:
    """The optimizer's step: parameters, and `copies` more tensors of the size of each that is trained."""
    trained = {port.name for port in gm.meta["ports"].outputs if port.kind == GRADIENT}
    found = [(port, node) for port, node in placeholders(gm).items() if port.kind == PARAMETER]
    return {(node.name, 0): 1.0 + copies * (port.name in trained) for port, node in found}


def at_call(gm: GraphModule, call: Node, copies: int, sure: bool = True, aside: bool = False) -> Moment:
    """While a call runs: what the caller holds, the optimizer's state, results that are there, what the call reads and
    makes, and values of which it is certain in which layout they are kept: those that nothing has read yet. Of those that
    have been read and will be again what they take at the least.

    sure: no more. Else these as they are read next: no moment, but nearer to what a plan holds.
    aside: without what the call itself reads and makes: what is alive also while something is boxed for it, or while it is
    taken apart.
    """
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    homes = {port.name: node for port, node in placeholders(gm).items() if port.kind == PARAMETER}
    found = {(node.name, 0): 1.0 for node in placeholders(gm).values()}
    storages = Storages()
    for place, (port, result) in enumerate(zip(gm.meta["ports"].outputs, results(gm))):
        if port.kind == GRADIENT:
            found[homes[port.name].name, 0] += copies - 1
        if result is None or not order[result] < order[call] or not made(value_of(result)):
            continue
        if storages.take(value_of(result)):
            found[result_name(place), 0] = 1.0

    def copied(name: str, place: int, home: Node) -> None:
        """Count a copy of a parameter, which is its home if both are in one layout: of a home only what all axes cut, of a
        copy only what not all do. These are two."""
        found[name, REST + place] = 1.0
        found[home.name, 0] -= 1.0
        found[home.name, SPLIT] = 1.0

    parameters = set(homes.values())
    taken = [] if aside else list(map(value_of, operands(call)))
    counted = [slot for slot, key in enumerate(taken) if made(key) and storages.take(key)]
    if is_view(call):
        found |= {(call.name, -1 - slot): 1.0 for slot in counted}
    elif not aside:
        left = {value_of(user)[1] if user.target is operator.getitem else 0 for user in call.users}
        found[call.name, WORK + sum(1 << bit for bit in (*counted, *(len(taken) + index for index in left)))] = 1.0
    whole = call.meta["candidates"].phases is None
    for slot, key in enumerate(taken):
        if whole and root(key)[0] in parameters and not storages.has(key) and storages.take(key):
            copied(call.name, -1 - slot, root(key)[0])
        if not made(key) or within(key) is None:
            storages.close(key)
    for key, read in first_reads(gm, order).items():
        if key[0].op != "call_function" or not order[key[0]] < order[call] < read or not storages.take(key):
            continue
        if made(key):
            found[key[0].name, key[1]] = 1.0
        elif root(key)[0] in parameters and (root(key)[0].name, SPLIT) not in found:
            copied(key[0].name, key[1], root(key)[0])
    if sure:
        for key, read in last_reads(gm, order).items():
            if made(key) and order[key[0]] < order[call] < read and storages.take(key):
                found[key[0].name, LEAST + key[1]] = 1.0
    else:
        for key, (reader, slot) in next_reads(gm, order, order[call]).items():
            if made(key) and order[key[0]] < order[call] and storages.take(key):
                found[reader.name, -1 - slot] = 1.0
    return found


class Storages:
    """What has been counted: by the value that fills a storage, the parts of it."""

    def __init__(self) -> None:
        self.parts: dict[Key, list[Sequence[Key]]] = {}

    def take(self, key: Key) -> bool:
        """Whether nothing of a value has been counted; from now on it has."""
        part = within(key)
        if part is None or not all(apart(part, other) for other in self.parts.get(root(key), ())):
            return False
        self.parts.setdefault(root(key), []).append(part)
        return True

    def has(self, key: Key) -> bool:
        """Whether something of the storage in which a value lies has been counted."""
        return root(key) in self.parts

    def close(self, key: Key) -> None:
        """Count nothing more of the storage in which a value lies."""
        self.parts.setdefault(root(key), []).append(())


def kept(gm: GraphModule, copies: int) -> Moment:
    """All that is kept for long, each once: parameters with `copies` more tensors, and values stored for the backward.

    That is no moment: it may count more than is alive at once.
    """
    stored = {(node.name, 0): 1.0 for node in gm.graph.nodes if STORED in node.meta}
    return {**at_optimizer(gm, copies), **stored}


def calls_of(gm: GraphModule) -> dict[str, Node]:
    """The calls of an annotated graph by name; a getitem is none."""
    return {node.name: node for node in gm.graph.nodes if node.op == "call_function" and "candidates" in node.meta}


def peak_calls(plan: Plan, gm: GraphModule, limit: float) -> dict[str, int]:
    """By name of a call the most bytes while it runs or something is boxed for it, if these are more than `limit`; most first.
    A getitem counts to the call behind it."""
    life, calls, held = plan.life, calls_of(gm), plan.memory["optimizer"]
    most: dict[str, int] = {}
    call = None
    for moment, live in zip(reversed(life.moments), reversed(life.live)):
        if moment.node.meta.get("call") in calls:
            call = str(moment.node.meta["call"])
        if call is not None and live + held > limit:
            most[call] = max(live + held, most.get(call, 0))
    return {name: most[name] for name in sorted(most, key=lambda name: -most[name])}


def first_reads(gm: GraphModule, order: Mapping[Node, int]) -> dict[Key, int]:
    """By value that is read in all plans the place of the first call that may read it."""
    found: dict[Key, int] = {}
    sure: set[Key] = set()
    for node, place in order.items():
        if "candidates" in node.meta:
            for slot, operand in enumerate(operands(node)):
                found.setdefault(value_of(operand), place)
                if surely_reads(node, slot):
                    sure.add(value_of(operand))
    return {key: place for key, place in found.items() if key in sure}


def last_reads(gm: GraphModule, order: Mapping[Node, int]) -> dict[Key, int]:
    """By value that is read in all plans the place of the last call that reads it in all of them."""
    return {
        value_of(operand): place
        for node, place in order.items()
        if "candidates" in node.meta
        for slot, operand in enumerate(operands(node))
        if surely_reads(node, slot)
    }


def surely_reads(call: Node, slot: int) -> bool:
    """Whether a call reads an operand also where it is taken apart; some need only its shape."""
    phases = call.meta["candidates"].phases
    return phases is None or any(slot in part.reads for part in phases.parts)


def next_reads(gm: GraphModule, order: Mapping[Node, int], after: int) -> dict[Key, tuple[Node, int]]:
    """By value the first call behind a place that reads it, and as which operand."""
    found: dict[Key, tuple[Node, int]] = {}
    for node, place in order.items():
        if "candidates" in node.meta and place > after:
            for slot, operand in enumerate(operands(node)):
                found.setdefault(value_of(operand), (node, slot))
    return found


def within(key: Key) -> Sequence[Key] | None:
    """The views on the way from a storage to a value that are smaller than what they are views of, outermost first; None
    if one is larger, as elements are repeated."""
    found: list[Key] = []
    while is_view(key[0]):
        source = value_of(operands(key[0])[0])
        if numel(source) < numel(key):
            return None
        if numel(source) > numel(key):
            found.insert(0, key)
        key = source
    return found


def apart(one: Sequence[Key], other: Sequence[Key]) -> bool:
    """Whether values that lie so in one storage have no element in common, being in different outputs of one call."""
    first, second = next(((a, b) for a, b in zip(one, other) if a != b), (None, None))
    if first is None or second is None or first[0] is not second[0]:
        return False
    pieces = sum(numel((first[0], index)) for index in range(outputs_of(first[0])))
    return pieces <= numel(value_of(operands(first[0])[0]))


def root(key: Key) -> Key:
    """The value in whose storage a value lies if no boxing comes between."""
    while is_view(key[0]):
        key = value_of(operands(key[0])[0])
    return key


def is_view(node: Node) -> bool:
    """Whether a call's outputs lie in the storage of its first operand."""
    match = node.meta.get("match")
    return node.op == "call_function" and match is not None and match.view and bool(operands(node))


def made(key: Key) -> bool:
    """Whether a value lies in a storage that a call made."""
    return root(key)[0].op == "call_function"


def numel(key: Key) -> int:
    """The elements of a value; 0 for what is not a tensor."""
    value = key[0].meta.get("val")
    if isinstance(value, (tuple, list)):
        value = value[key[1]]
    return value.numel() if isinstance(value, Tensor) else 0
