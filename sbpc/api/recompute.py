"""Decides which blocks compute activations again: for `recompute="auto"` as few as the memory asks for."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from numpy import interp
from torch.fx import GraphModule

from sbpc.errors import MemoryLimitError, PlanError, least_of
from sbpc.graph.operands import is_late
from sbpc.graph.ports import GRADIENT, PARAMETER
from sbpc.passes.loop.recompute import blocks_of
from sbpc.passes.schedule.choice import overlapped
from sbpc.plans.memory_curve import GRADIENTS, OPTIMIZER, PARAMETERS
from sbpc.plans.options import AUTO, BYTES, FULL, NONE, SELECTIVE
from sbpc.plans.plan import Plan

log = logging.getLogger("sbpc")
Forms = Mapping[str, str]  # by block, what its backward computes again


def forms_of(gm: GraphModule, form: str) -> Forms:
    """Returns one form for all blocks. Raises PlanError if there is no block in which anything can be computed
    again."""
    if form in (NONE, AUTO) or not any(map(is_late, gm.graph.nodes)):
        return {}
    forms = dict.fromkeys(blocks_of(gm).values(), form)
    if not forms:
        raise PlanError(
            f"recompute={form!r}, and the model has no block whose backward reads values of its own forward\n"
            "  Make the parts that are to be computed again modules, in a list or as children of the model, or leave "
            "it out."
        )
    return forms


def least_recompute(gm: GraphModule, memory: float, planned: Callable[..., Plan], quick: Mapping[str, Any]) -> Plan:
    """Returns the plan in which blocks compute again where `memory` asks for it: none if it fits without, else the
    fastest that was found.

    gm: the annotated graph. planned: plans with `forms` and other options of `Task.plan`. quick: options with which
    a plan takes about as many bytes and less time to make. What a form saves is seen from a plan without a limit in
    which all blocks have it; with fewer blocks bytes are taken to be linear in their number. That gives the fewest
    blocks that may fit, but what little room they leave may cost more than computing again: overlap, gathered
    copies. So the search under the limit is done with nothing computed again, with the fewest, with what is cheap in
    all blocks, half the way to all of them and with all, the least first, as long as a plan that computes more again
    could be faster. Raises MemoryLimitError, of the search which came nearest.
    """
    free = planned(forms={}, memory=None)
    limited = overlapped(free, replace(free.options, memory=memory), free.prover, free.lower_bound, free.serial_bound)
    limited.again = lambda **other: planned(**{"forms": {}, **other})
    if limited.cost.memory["total"] <= memory:
        return limited
    names = list(dict.fromkeys(blocks_of(gm).values())) if any(map(is_late, gm.graph.nodes)) else []
    rungs, again = [(NONE, reachable(free))], [0.0]
    for form in (SELECTIVE, FULL) if names else ():
        alike = planned(forms=dict.fromkeys(names, form), memory=None, **quick)
        if (size := reachable(alike)) < rungs[-1][1]:
            rungs.append((form, size))
            again.append(alike.cost.recompute_seconds)
    turns = [len(names) * at for at in range(len(rungs))]
    best, errors = None, list[MemoryLimitError]()
    for step in steps(rungs, len(names), memory):
        least = free.cost.paid + (0.0 if free.options.objective == BYTES else float(interp(step, turns, again)))
        if best is not None and best.cost.paid <= least:
            break
        log.info("recompute: %d of %d steps", step, turns[-1])
        try:
            other = planned(forms=forms_at(rungs, names, step))
        except MemoryLimitError as error:
            errors.append(error)
            continue
        if best is None or other.cost.paid < best.cost.paid:
            best = other
    if best is None:
        raise least_of(errors)
    return best


def steps(rungs: Sequence[tuple[str, float]], blocks: int, memory: float) -> list[int]:
    """Returns the numbers of changes of one block to the next form with which plans are looked for, rising.

    >>> steps([("none", 100.0), ("selective", 60.0), ("full", 20.0)], 4, 55.0)
    [0, 4, 5, 6, 8]
    """
    last = blocks * (len(rungs) - 1)
    first = first_step(rungs, blocks, memory)
    return sorted({0, min(blocks, last), first, (first + last) // 2, last})


def reachable(plan: Plan) -> float:
    """Returns the bytes of a plan at its peak if parameters, gradients and optimizer were spread over all ranks.

    So far a plan under a limit may go without computing anything again.
    """
    curve = replace(plan, options=plan.options.in_order).memory_curve()
    others = [sizes for name, sizes in curve.groups.items() if name not in (PARAMETERS, GRADIENTS, OPTIMIZER)]
    held = max(map(sum, zip(*others)))
    sizes = {port.name: value.nbytes for port, value in plan.shapes.items() if port.kind == PARAMETER}
    trained = sum(sizes[port.name] for port in plan.ports.outputs if port.kind == GRADIENT)
    return held + (sum(sizes.values()) + (1 + plan.options.copies) * trained) / plan.mesh.ranks


def first_step(rungs: Sequence[tuple[str, float]], blocks: int, memory: float) -> int:
    """Returns the least number of changes of one block to the next form after which no more than `memory` is held;
    all if none is.

    rungs: forms, and the bytes that are held where all blocks have them, falling.

    >>> first_step([("none", 100.0), ("selective", 60.0), ("full", 20.0)], 4, 55.0)
    5
    """
    for at, ((_, more), (_, less)) in enumerate(pairwise(rungs)):
        if less <= memory:
            return at * blocks + max(0, math.ceil(blocks * (more - memory) / (more - less)))
    return blocks * (len(rungs) - 1)


def forms_at(rungs: Sequence[tuple[str, float]], names: Sequence[str], step: int) -> Forms:
    """Returns the forms after so many changes of one block to the next form, the first block first: what a late one
    drops is made again while much else is alive.

    >>> forms_at([("none", 100.0), ("selective", 60.0), ("full", 20.0)], ["a", "b"], 3)
    {'a': 'full', 'b': 'selective'}
    """
    forms = [form for form, _ in rungs]
    return {
        name: forms[min((step + len(names) - 1 - at) // len(names), len(forms) - 1)] for at, name in enumerate(names)
    }
