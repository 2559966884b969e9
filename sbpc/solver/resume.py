"""Messages of a problem in which nothing is tied, that begin where multipliers of a tied one are.

They begin at about its bound, and rise where members of a class want different multipliers, or where the ends of runs of
blocks want what the blocks do not.
"""

from __future__ import annotations

import math
import time

import numpy as np

from sbpc.solver.check import Proof, checked_bound, consumers, name
from sbpc.solver.dual import everywhere, settle
from sbpc.solver.fold import Slot
from sbpc.solver.network import Port
from sbpc.solver.paths import HALF, LITTLE
from sbpc.solver.problem import Problem, Value
from sbpc.solver.smooth import HEATS, smooth
from sbpc.solver.trws import Messages


def untied(problem: Problem, proof: Proof, cap: float, aim: float, until: float = -math.inf) -> tuple[float, Proof]:
    """A bound of the problem, and its proof, from one of the problem folded in any way.

    aim: a bound with which it is enough. until: CPU time of this process up to which smooth messages better it.
    """
    values = [value for value in problem.values if value.consumers]
    messages = resumed(Problem(problem.variables, values), proof, cap)
    settle(messages, (HALF, LITTLE, HALF), aim=aim)
    if messages.bound < aim and time.process_time() < until:
        messages.soft = HEATS[-1], messages.state.copy()
        smooth(messages, aim, until)
    multipliers, charges = dict[Slot, np.ndarray](), {}
    for value, found in zip(values, messages.multipliers()):
        multipliers |= zip(met(value), found)
    for at, charged in messages.charges().items():
        producer, *taken = met(values[at])
        key = (*producer, tuple((*slot, 1) for slot in taken))
        charges[key] = charged
    better = Proof(range(len(problem.variables)), multipliers, charges)
    return checked_bound(problem, better), better


def met(value: Value) -> list[Slot]:
    """Where a value meets its producer, and its distinct consumers."""
    taken = [(value.consumers[number][0], value.places[1 + number]) for number in value.distinct]
    return [(value.producer, value.places[0]), *taken]


def resumed(problem: Problem, proof: Proof, cap: float) -> Messages:
    """Messages that begin where a proof ends."""
    messages = everywhere(problem, cap)
    paid: dict[int, np.ndarray] = {}  # by port: what it pays by layout
    for value, ports in zip(problem.values, messages.ports):
        for (at, place), port in zip(met(value), ports):
            paid[id(port)] = by_layout(port, proof.multipliers.get((proof.classes[at], place)))
    for edge in messages.edges:
        if id(edge.first) in paid:
            edge.first.inbox[:] = paid[id(edge.first)]
        elif edge.star is not None:
            edge.star.sent[edge.branch - 1][:] = -paid[id(edge.last)]
        elif id(edge.last) in paid:
            edge.first.inbox[:] = (edge.seconds - paid[id(edge.last)]).min(1)
    for at, (value, alias) in enumerate(zip(problem.values, messages.space.aliases)):
        star = None if alias is None else messages.stars.get(messages.place[1, at])
        given = None if star is None else charged(value, proof)
        if star is not None and given is not None:
            for charge, found in zip(star.share.charges, given):
                charge[:] = found
    messages.hear(fill=True)
    return messages


def charged(value: Value, proof: Proof) -> list[np.ndarray] | None:
    """What each distinct consumer of a value is charged for boxings; those of one class pay equal parts."""
    groups = consumers(value, proof.classes)
    given = proof.charges.get(name(value, proof.classes, groups))
    if given is None:
        return None
    parts = {slot: part / len(group) for group, part in zip(groups.values(), given) for slot in group}
    return [parts[slot] for slot in met(value)[1:]]


def by_layout(port: Port, multipliers: np.ndarray | None) -> np.ndarray:
    """What a port pays by layout, by what it pays by label."""
    if multipliers is None:
        return np.zeros(len(port.layouts))
    found = np.full(len(port.layouts), -np.inf)
    np.maximum.at(found, port.at, multipliers)
    return found
