"""Explains the layout of one value: solves the problem of a plan again with the value laid out otherwise."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from sbpc.errors import PlanError
from sbpc.graph.no_gc import uncollected
from sbpc.graph.operands import value_of
from sbpc.graph.ports import BUFFER, INPUT, PARAMETER, TANGENT, placeholders
from sbpc.inspect.explain import CLOSE, Alternative, Explanation
from sbpc.inspect.tables import quantity
from sbpc.mesh.layout import Layout
from sbpc.passes.assign.alternatives import Otherwise, Solved, alternatives
from sbpc.passes.assign.differences import computing, only_in
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import wishes
from sbpc.plans.plan import Plan, Prover
from sbpc.solver import checked_bound

TRIED = 4  # pins without which the step is planned again, those that name the value first
EXACT = "solved again with each layout pinned and all else free: exact"
NEAR = (
    "solved again with each layout pinned and what is near it free, as far as anything changes; `at least` is what\n"
    "          the multipliers of the bound prove for every plan with the layout"
)
OUTSIDE = {  # by kind of a port
    INPUT: "it comes in from outside: `inputs=` of sbpc.plan says in which layout",
    TANGENT: "it comes in from outside: `outputs=` of sbpc.plan says in which layout",
    BUFFER: "buffers are whole on every rank",
}


@uncollected()
def explain(plan: Plan, name: str) -> Explanation:
    """Returns why a parameter or a value has its layout. Raises PlanError for a name that is neither."""
    plan = of_whole_batch(plan)
    layout, solved = plan.layout(name), solved_by(plan, prover_of(plan))
    known = alternatives(solved, *variable(plan, solved.space, name))
    rows = tuple(alternative(plan, solved, each) for each in known if each.labels is not None)
    beyond = tuple((each.layout, each.at_least) for each in known if each.labels is None)
    how = EXACT if all(row.exact for row in rows) and not beyond else NEAR
    if not rows:
        how = "there is no other layout that it may have"
    return Explanation(name, layout, solved.seconds, rows, beyond, decided(plan, name, layout), how, plan)


@uncollected()
def best_alternatives(plan: Plan, names: Sequence[str], most: int) -> dict[str, tuple[Alternative, ...]]:
    """Returns alternatives of several parameters, at most so many of each; none of a plan under a limit that was
    read from a file, nor of a loop that was, or is under a limit."""
    if plan.loop is not None and (plan.body is None or plan.options.memory is not None):
        return {}
    plan = of_whole_batch(plan.solved)
    if plan.prover is None and plan.options.memory is not None:
        return {}
    solved = solved_by(plan, prover_of(plan))
    found = {name: alternatives(solved, *variable(plan, solved.space, name), most) for name in names}
    return {
        name: tuple(alternative(plan, solved, each) for each in known if each.labels) for name, known in found.items()
    }


def of_whole_batch(plan: Plan) -> Plan:
    """Returns the plan that was solved: where a step runs in halves of the batch, that of the whole batch."""
    return getattr(plan.prover, "whole", None) or plan


def solved_by(plan: Plan, prover: Any) -> Solved:
    """Returns the solved problem of a plan; where streams overlap, that of a step in which nothing does."""
    prover = getattr(prover, "serial", prover)
    space, problem, allowed = prover.priced()
    return Solved(
        space, problem, prover.proof, checked_bound(problem, prover.proof), space.labels(plan.assignment), allowed
    )


def alternative(plan: Plan, solved: Solved, each: Otherwise) -> Alternative:
    """Returns an alternative with what it pays otherwise."""
    assert each.labels is not None
    space, labels = solved.space, solved.labels
    changed, numbers = solved.touched(each.labels)
    return Alternative(
        each.layout,
        solved.seconds + each.difference,
        each.difference,
        each.at_least,
        each.exact,
        only_in(space, numbers, each.labels, labels),
        only_in(space, numbers, labels, each.labels),
        computing(space, changed, each.labels, labels),
        partial(whole, plan, solved, each),
    )


def prover_of(plan: Plan) -> Prover:
    """Returns the problem that a plan solves; of a plan from a file, that of the graph in it, with multipliers of
    messages alone."""
    if plan.prover is not None:
        return plan.prover
    if plan.options.memory is not None:
        raise PlanError(
            "the file of a plan does not hold the prices of its memory limit, without which nothing explains its "
            "layouts\n"
            "  Plan the model anew and explain that plan: `sbpc explain file.py:function NAME --mesh ... --memory ...`."
        )
    if plan.options.objective == "bytes":
        return plan.again().problem
    asked = wishes(plan.annotated, plan.mesh, plan.options)
    return Space(plan.annotated, plan.mesh, asked.nodes, asked.outputs)


def variable(plan: Plan, space: Space, name: str) -> tuple[int, int]:
    """Returns the number of the variable that makes a value, and which of its outputs the value is."""
    nodes = {node.name: node for node in space.gm.graph.nodes}
    first = plan.ports.tied.get(name, name)
    nodes |= {port.name: node for port, node in placeholders(space.gm).items() if port.kind != INPUT}
    producer, index = value_of(nodes[first])
    return space.named[producer.name], index


@uncollected()
def whole(plan: Plan, solved: Solved, each: Otherwise) -> Plan:
    """Returns the whole plan of an alternative."""
    assert each.labels is not None
    same = math.isclose(plan.cost.paid, solved.seconds, rel_tol=CLOSE)
    least = max(solved.seconds + each.at_least, plan.lower_bound) if same else plan.lower_bound
    return Plan(plan.mesh, plan.with_layouts(solved.space.assignment(each.labels)).chunks, plan.options, least)


def decided(plan: Plan, name: str, layout: Layout) -> tuple[str, ...]:
    """Returns what pins, limits and options have to do with a layout, found by planning without each of them."""
    options, lines = plan.options, []
    if (kind := kind_of(plan, name)) in OUTSIDE:
        lines.append(OUTSIDE[kind])
    if options.spread:
        lines.append("spread=True stores inputs, parameters and outputs exactly once")
    if options.baseline:
        lines.append(f"the scheme {options.baseline!r} is followed")
    names = {name, plan.ports.tied.get(name, name)}
    pins = sorted(options.pin.items(), key=lambda pin: not fnmatch.filter(names, pin[0]))
    for pattern, text in pins[:TRIED]:
        named = fnmatch.filter(names, pattern)
        others = {other: pin for other, pin in options.pin.items() if other != pattern}
        without = effect(plan, layout, name, plan.again(pin=others))
        lines.append(f"pin {pattern!r}: {text!r} {'names it' if named else 'names others'}; without the pin {without}")
    if len(pins) > TRIED:
        lines.append(f"{len(pins) - TRIED} more pins, which name others, were not tried")
    if options.memory is not None:
        most = quantity(options.memory, "B")
        lines.append(f"limit of {most} a rank; without the limit {effect(plan, layout, name, plan.again(memory=None))}")
    return tuple(lines or ["no pin and no limit has to do with it"])


def kind_of(plan: Plan, name: str) -> str:
    """Returns the kind of the port of a value, "" where it has none."""
    first = plan.ports.tied.get(name, name)
    for port, node in placeholders(plan.annotated).items():
        if first in (node.name, port.name if port.kind in (PARAMETER, BUFFER) else node.name):
            return port.kind
    return ""


def effect(plan: Plan, layout: Layout, name: str, other: Plan) -> str:
    """Returns how a value is laid out in another plan, and what that takes."""
    found = other.layouts.get(name)
    where = "it stays so" if found == layout else f"it is {found}"
    return f"{where}, a step takes {quantity(other.cost.seconds, 's')} instead of {quantity(plan.cost.seconds, 's')}"
