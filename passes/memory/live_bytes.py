"""Bytes that are alive at one moment of a step, as a sum over nodes: what a price of memory is put on.

A moment counts, by node and place, how many times the bytes there count (see `sbpc.passes.assign.local_bytes`). A
result in the layout in which it is left has the name `result_name`. A moment never counts more than are alive in a
plan, whatever its layouts: of values that overlap in a storage one, of a value that may stand in several layouts an
equal share of its elements. So prices on moments bound what plans take.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

from torch.fx import GraphModule, Node

from sbpc.graph.operands import operands, outputs_of, shape_of, value_of
from sbpc.graph.ports import GRADIENT, PARAMETER, placeholders, result_name, results
from sbpc.passes.assign.local_bytes import Place, PlaceKind
from sbpc.plans.plan import Plan
from sbpc.plans.storages import is_view

STORED = "stored"  # the key in the meta of a node that stands for what is kept of a value until the backward
Moment = Mapping[tuple[str, Place], float]
Key = tuple[Node, int]  # a value: a node, and which of its outputs
OUTPUT = Place(PlaceKind.OUTPUT)


def at_optimizer(gm: GraphModule, copies: int) -> Moment:
    """Returns the moment of the optimizer's step: parameters, and `copies` more tensors of the size of each trained
    one."""
    trained = {port.name for port in gm.meta["ports"].outputs if port.kind == GRADIENT}
    return {
        (node.name, OUTPUT): 1.0 + copies * (port.name in trained) for port, node in placeholders(gm, PARAMETER).items()
    }


def bytes_alive_in_every_plan(gm: GraphModule, call: Node, copies: int) -> Moment:
    """Returns what is alive while a call runs, whatever the plan.

    That is what the caller holds, the optimizer's state, results that are there, what the call reads and makes, and
    values that nothing has read yet. Values that have been read and will be again count what they take at the least.
    """
    counter = MomentCounter(gm, call, copies)
    for key, place in counter.last_reads.items():
        if place > counter.now and counter.take_waiting(key):
            counter.moment[key[0].name, Place(PlaceKind.LEAST, key[1])] = 1.0
    return counter.moment


def bytes_at_next_reads(gm: GraphModule, call: Node, copies: int) -> Moment:
    """Returns an estimate that is nearer to what a plan holds while a call runs, but no bound.

    It differs in values that have been read and will be again: they count in the layout in which they are read next.
    """
    counter, next_reads = MomentCounter(gm, call, copies), dict[Key, tuple[Node, int]]()
    for key, reader, slot in counter.reads:
        if counter.order[reader] > counter.now:
            next_reads.setdefault(key, (reader, slot))
    for key, (reader, slot) in next_reads.items():
        if counter.take_waiting(key):
            counter.moment[reader.name, Place(PlaceKind.OPERAND, slot)] = 1.0
    return counter.moment


class MomentCounter:
    """Counts all that is alive while a call runs, except values that were read and will be again. No element of a
    storage is counted twice."""

    def __init__(self, gm: GraphModule, call: Node, copies: int) -> None:
        self.gm, self.call = gm, call
        self.order = {node: place for place, node in enumerate(gm.graph.nodes)}
        self.now = self.order[call]
        self.homes = {port.name: node for port, node in placeholders(gm, PARAMETER).items()}
        self.parameters = set(self.homes.values())
        self.reads = [  # every value that a call reads, the call, and the number of the operand, in order
            (value_of(operand), reader, slot)
            for reader in self.order
            if "candidates" in reader.meta
            for slot, operand in enumerate(operands(reader))
        ]
        self.moment: dict[tuple[str, Place], float] = {}
        self.storages: dict[Key, list[Sequence[Key]]] = {}  # by value that fills a storage, the counted parts of it
        # by value that is read in every plan, also where a call runs in two phases, the place of the last such call
        sure = ((key, reader, reader.meta["candidates"].phases, slot) for key, reader, slot in self.reads)
        self.last_reads = {
            key: self.order[reader]
            for key, reader, phases, slot in sure
            if phases is None or any(slot in part.reads for part in phases.parts)
        }
        self.count_caller(copies)
        self.count_results()
        self.count_call()
        self.count_unread()

    def take(self, key: Key) -> bool:
        """Counts a value, unless a part of it has been or elements of it are repeated. Returns whether it is counted
        now."""
        part = slices_of(key)
        if part is None or not all(disjoint(part, other) for other in self.storages.get(storage_of(key), ())):
            return False
        self.storages.setdefault(storage_of(key), []).append(part)
        return True

    def take_waiting(self, key: Key) -> bool:
        """Whether a value that an earlier call made has not been counted. From now on it has."""
        return made_by_call(key) and self.order[key[0]] < self.now and self.take(key)

    def count_caller(self, copies: int) -> None:
        """Counts what the caller holds, and the optimizer's state: the gradient is counted as it is made."""
        self.moment |= {(node.name, OUTPUT): 1.0 for node in placeholders(self.gm).values()}
        for port in self.gm.meta["ports"].outputs:
            if port.kind == GRADIENT:
                self.moment[self.homes[port.name].name, OUTPUT] += copies - 1

    def count_results(self) -> None:
        """Counts the results that are there, as they are left."""
        for place, result in enumerate(results(self.gm)):
            if result is not None and self.order[result] < self.now:
                key = value_of(result)
                if made_by_call(key) and self.take(key):
                    self.moment[result_name(place), OUTPUT] = 1.0

    def count_call(self) -> None:
        """Counts what the call reads and makes."""
        call, keys = self.call, list(map(value_of, operands(self.call)))
        slots = [slot for slot, key in enumerate(keys) if made_by_call(key) and self.take(key)]
        if is_view(call):
            self.moment |= {(call.name, Place(PlaceKind.OPERAND, slot)): 1.0 for slot in slots}
        else:
            read = {value_of(user)[1] if user.target is operator.getitem else 0 for user in call.users}
            mask = sum(1 << bit for bit in (*slots, *(len(keys) + index for index in read)))
            self.moment[call.name, Place(PlaceKind.WORKING_SET, mask=mask)] = 1.0
        one_phase = call.meta["candidates"].phases is None
        for slot, key in enumerate(keys):
            root = storage_of(key)
            if one_phase and root[0] in self.parameters and root not in self.storages and self.take(key):
                self.count_copy(call, Place(PlaceKind.OPERAND_NOT_FULLY_SPLIT, slot), root[0])
            if not made_by_call(key) or slices_of(key) is None:  # count nothing more of this storage
                self.storages.setdefault(root, []).append(())

    def count_unread(self) -> None:
        """Counts values that no call has read yet: they are in the layout in which they were made."""
        first_reads: dict[Key, int] = {}
        for key, reader, _ in self.reads:
            if key in self.last_reads:
                first_reads.setdefault(key, self.order[reader])
        for key, place in first_reads.items():
            if key[0].op != "call_function" or not self.order[key[0]] < self.now < place or not self.take(key):
                continue
            home = storage_of(key)[0]
            if made_by_call(key):
                self.moment[key[0].name, Place(PlaceKind.OUTPUT, key[1])] = 1.0
            elif home in self.parameters and (home.name, Place(PlaceKind.FULLY_SPLIT)) not in self.moment:
                self.count_copy(key[0], Place(PlaceKind.NOT_FULLY_SPLIT, key[1]), home)

    def count_copy(self, node: Node, place: Place, home: Node) -> None:
        """Counts a copy of a parameter, which may be the home itself if both are in one layout.

        So of the home only what all axes cut counts, and of the copy only what not all do: these are two tensors.
        """
        self.moment[node.name, place] = 1.0
        self.moment[home.name, OUTPUT] -= 1.0
        self.moment[home.name, Place(PlaceKind.FULLY_SPLIT)] = 1.0


def calls_of(gm: GraphModule) -> dict[str, Node]:
    """Returns the calls of an annotated graph by name; a getitem is none."""
    return {node.name: node for node in gm.graph.nodes if node.op == "call_function" and "candidates" in node.meta}


def peak_calls(plan: Plan, gm: GraphModule, limit: float) -> dict[str, int]:
    """Returns, by name of a call, the most bytes while it runs or something is boxed for it, if more than `limit`;
    most first.

    A getitem counts to the call behind it.
    """
    life, calls, optimizer = plan.life, calls_of(gm), plan.memory["optimizer"]
    most: dict[str, int] = {}
    call = None
    for moment, live in zip(reversed(life.moments), reversed(life.live)):
        if moment.node.meta.get("call") in calls:
            call = str(moment.node.meta["call"])
        if call is not None and live + optimizer > limit:
            most[call] = max(live + optimizer, most.get(call, 0))
    return {name: most[name] for name in sorted(most, key=lambda name: -most[name])}


def slices_of(key: Key) -> Sequence[Key] | None:
    """Returns the views between a storage and a value that are smaller than what they view, outermost first.

    None if one is larger, as elements are repeated.
    """
    views: list[Key] = []
    while is_view(key[0]):
        source = value_of(operands(key[0])[0])
        if numel(source) < numel(key):
            return None
        if numel(source) > numel(key):
            views.insert(0, key)
        key = source
    return views


def disjoint(one: Sequence[Key], other: Sequence[Key]) -> bool:
    """Whether values with these slices of one storage have no element in common, as different outputs of one call."""
    for (call, at), (other_call, other_at) in zip(one, other):
        if (call, at) != (other_call, other_at):
            pieces = sum(numel((call, index)) for index in range(outputs_of(call)))
            return call is other_call and pieces <= numel(value_of(operands(call)[0]))
    return False


def storage_of(key: Key) -> Key:
    """Returns the value in whose storage a value lies if no boxing comes between."""
    while is_view(key[0]):
        key = value_of(operands(key[0])[0])
    return key


def made_by_call(key: Key) -> bool:
    """Whether a value lies in a storage that a call made."""
    return storage_of(key)[0].op == "call_function"


def numel(key: Key) -> int:
    """Returns the elements of a value; 0 for what is not a tensor."""
    return math.prod(shape_of(*key)[0])
