"""The checks after each pass: what a pass may get wrong is refused, also in one of many calls that are otherwise alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.fx import GraphModule, Node

from sbpc import Mesh
from sbpc.api.task import Task, prepare
from sbpc.errors import VerifyError
from sbpc.graph.operands import operands
from sbpc.graph.ports import results
from sbpc.mesh.layout import Layout
from sbpc.mesh.states import B, Partial
from sbpc.passes.verify import verify_annotated, verify_assigned, verify_boxed, verify_captured
from sbpc.plans.chunk import Assignment
from sbpc.plans.options import Options
from sbpc.plans.plan import Plan
from sbpc.rules.choices import Choice
from tests import models

MESH = Mesh(x=2)
Broken = Callable[[GraphModule, Assignment], Assignment | None]


@functools.cache
def task() -> Task:
    return prepare(*models.mlp(layers=3))


def planned() -> Plan:
    """A plan of its own for each test, as tests break it; captured once."""
    return task().again().plan(MESH, Options())


@pytest.fixture
def plan() -> Plan:
    return planned()


def last_alike(gm: GraphModule, choices: dict[str, Choice] | None = None) -> Node:
    """The last call that shares its candidates, and its choice, with an earlier one, and whose value is no result."""
    seen, found = set(), []
    for node in gm.graph.nodes:
        if node.op == "call_function" and "match" in node.meta and node not in results(gm):
            key = id(node.meta["signatures"]), id(choices and choices[node.name])
            found += [node] if key in seen else []
            seen.add(key)
    return found[-1]


def chosen(assignment: Assignment, node: Node, choice: Choice | None) -> Assignment:
    """The assignment with another choice of a node, or none."""
    choices = {name: made for name, made in assignment.choices.items() if name != node.name}
    return replace(assignment, choices=choices if choice is None else {**choices, node.name: choice})


def shapeless(gm: GraphModule, _: Assignment) -> None:
    del last_alike(gm).meta["val"]


def of_another_shape(gm: GraphModule, _: Assignment) -> None:
    weight = next(node for node in gm.graph.nodes if node.name.endswith("weight"))
    weight.meta["val"] = weight.meta["val"].new_empty(1)


def without_candidates(gm: GraphModule, _: Assignment) -> None:
    del last_alike(gm).meta["candidates"]


def a_state_too_few(gm: GraphModule, _: Assignment) -> None:
    node = last_alike(gm)
    first, *rest = node.meta["signatures"]
    node.meta["signatures"] = (replace(first, inputs=first.inputs[1:]), *rest)


def a_result_too_many(gm: GraphModule, _: Assignment) -> None:
    node = last_alike(gm)
    node.meta["val"] = [node.meta["val"], node.meta["val"]]


def without_a_choice(gm: GraphModule, assignment: Assignment) -> Assignment:
    return chosen(assignment, last_alike(gm, assignment.choices), None)


def not_a_candidate(gm: GraphModule, assignment: Assignment) -> Assignment:
    node = last_alike(gm, assignment.choices)
    choice = assignment.choices[node.name]
    strange = replace(choice.signatures[0], factor="nothing", inputs=choice.signatures[0].inputs[::-1] * 2)
    return chosen(assignment, node, replace(choice, signatures=(strange,)))


def cut_of_one(gm: GraphModule, assignment: Assignment) -> None:
    """What is split has one element for two ranks."""
    node = last_alike(gm, assignment.choices)
    (factor,) = assignment.choices[node.name].cuts()
    candidates = node.meta["candidates"]
    sizes = tuple((name, 1 if name == factor else size) for name, size in candidates.sizes)
    node.meta["candidates"] = replace(candidates, sizes=sizes, nonempty=frozenset([factor]))


def partial_output(_: GraphModule, assignment: Assignment) -> Assignment:
    return replace(assignment, outputs=(Layout.parse("[P]", MESH.axes), *assignment.outputs[1:]))


def gradient_elsewhere(gm: GraphModule, assignment: Assignment) -> Assignment:
    at = next(at for at, port in enumerate(gm.meta["ports"].outputs) if port.kind == "gradient")
    outputs = list(assignment.outputs)
    outputs[at] = next(
        layout for layout in (Layout.parse(text, MESH.axes) for text in ("[B]", "[S(0)]")) if layout != outputs[at]
    )
    return replace(assignment, outputs=tuple(outputs))


def test_what_a_pass_got_wrong_is_refused() -> None:
    for broken, message in [
        (shapeless, "a value without a shape"),
        (of_another_shape, "has another shape"),
        (without_candidates, "a node without candidates"),
        (a_state_too_few, "states for"),
        (a_result_too_many, "states for"),
        (without_a_choice, "a node without a choice"),
        (not_a_candidate, "is not among the candidates"),
        (cut_of_one, "cuts a factor that may not be cut so"),
        (partial_output, r"an output is left in \[P\]"),
        (gradient_elsewhere, "its home is"),
    ]:
        plan = planned()

        def check(assignment: Assignment, plan: Plan = plan) -> None:
            verify_captured(plan.graph)
            verify_annotated(plan.graph)
            verify_assigned(plan.graph, assignment, MESH)

        check(plan.assignment)
        annotated = [node for node in plan.graph.graph.nodes if "candidates" in node.meta]
        edges = sum(len(operands(node)) * len(node.meta["signatures"]) for node in annotated)
        assert verify_annotated(plan.graph) == edges
        wrong = broken(plan.graph, plan.assignment)
        with pytest.raises(VerifyError, match=message):
            check(plan.assignment if wrong is None else wrong)


def test_a_value_that_is_read_in_another_layout_than_it_is_in_is_refused(plan: Plan) -> None:
    assert verify_boxed(plan.boxed, MESH) > 0
    node = next(node for node in plan.boxed.graph.nodes if "choice" in node.meta and operands(node))
    (operand, *_) = operands(node)
    operand.meta["sbp"] = Layout.parse("[S(0)]" if operand.meta["sbp"].states == (B,) else "[B]", MESH.axes)
    with pytest.raises(VerifyError, match="and is read as"):
        verify_boxed(plan.boxed, MESH)


def test_a_boxing_that_no_collective_does_is_refused(plan: Plan) -> None:
    node = next(node for node in plan.boxed.graph.nodes if "step" in node.meta)
    step = node.meta["step"]
    strange = "[P(max)]" if step.after.states != (Partial("max"),) else "[P(min)]"
    node.meta["step"] = replace(step, after=Layout.parse(strange, MESH.axes))
    with pytest.raises(VerifyError, match="is no boxing step"):
        verify_boxed(plan.boxed, MESH)
