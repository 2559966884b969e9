"""Plan further steps of a model: of other shapes, in other modes, with the parameters at the same homes.

A step that is the same program but for its sizes takes the layouts of a plan as they are, if they are legal for these
sizes. Nothing is searched then. A GPT-2 of 2 layers takes 0.4 s of a core for a new shape, capture, programs and the
step itself included; one of 12 layers takes 0.4 s for its capture alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from sbpc.api.checks import checked
from sbpc.api.task import Captured, captured
from sbpc.errors import SbpcError
from sbpc.graph.pytree import flatten
from sbpc.mesh.mesh import Mesh
from sbpc.passes.assign.wishes import wishes
from sbpc.passes.pipeline import make_plan
from sbpc.passes.verify import verify_boxed, verify_sums
from sbpc.plans.options import AS_COMPUTED, NONE, Options
from sbpc.plans.plan import Plan
from sbpc.rules.choices import Candidates, Choice

OF_STEPS = ("microbatches", "schedule", "stages", "panels", "slices", "recompute")  # of forward and backward together


@dataclass(frozen=True)
class Alike:
    """Plans further steps like one that was planned. about, options: what was asked then. targets: how many of the
    arguments, the last ones, are those of the loss. made: makes the plan of a captured step."""

    mesh: Mesh
    about: Mapping[str, Any]
    options: Mapping[str, Any]
    targets: int
    made: Callable[[Captured, Mesh, Options], Plan]

    def captured(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], train: bool) -> Captured:
        """Captures a step. args: with the targets."""
        first = len(args) - self.targets
        return captured(model, args[:first], kwargs=kwargs, targets=args[first:], train=train, **self.about)

    @staticmethod
    def relaid(step: Captured, plan: Plan) -> Plan | None:
        """Returns the plan of a captured step in the layouts of another plan, None where they do not serve."""
        return relaid(step, plan)

    def planned(self, step: Captured, args: Sequence[Any], pin: Any, cuts: Sequence[str], at_once: bool) -> Plan:
        """Returns the plan of a captured step. pin, cuts: where parameters are stored. at_once: whether forward and
        backward run together."""
        staged = self.options.get("stages") is not None
        kept = {name: value for name, value in self.options.items() if name not in ("pin", "dynamic")}
        asked = {name: value for name, value in kept.items() if at_once or staged or name not in OF_STEPS}
        if staged:
            asked["cuts"] = cuts
        if count := asked.get("microbatches"):
            batch = next((len(each) for each in flatten(args)[0] if each.dim()), 1)
            asked["microbatches"] = max(parts for parts in range(1, count + 1) if batch % parts == 0)
        return self.made(step, self.mesh, checked(self.mesh, train=step.about["train"], pin=pin, **asked))


def relaid(step: Captured, plan: Plan) -> Plan | None:
    """Returns a plan of a step in the layouts of another plan; None where the steps differ in more than sizes, where
    these layouts are not legal or not as asked for, or do not fit. Its bound is 0: nothing is proved of it."""
    asked = plan.options
    parted = (asked.microbatches or 1, asked.panels or 1, asked.slices or 1) != (1, 1, 1)
    if plan.loop is not None or parted or asked.recompute != NONE or asked.dynamic is not None:
        return None
    if (asked.train, asked.dtype) != (step.about["train"], step.about["dtype"]):
        return None
    gm, options = step.stages.with_sums(step.task.gm, asked.reduce), replace(asked, **step.about)
    if program_of(gm) != program_of(plan.annotated):
        return None
    choices = {node.name: node.meta["candidates"] for node in gm.graph.nodes if "candidates" in node.meta}
    with suppress(SbpcError, KeyError):  # not among the candidates, not legal, not as wished
        same = {name: same_choice(plan.assignment.choices[name], each) for name, each in choices.items()}
        found = make_plan(gm, plan.mesh, replace(plan.assignment, choices=same), 0.0, options, step.stages)
        if not as_wished(gm, found):
            return None
        verify_boxed(found.chunk.unscheduled, found.mesh)
        if options.reduce != AS_COMPUTED:
            verify_sums(found.chunk.unscheduled)
        return found if options.memory is None or found.cost.memory["total"] <= options.memory else None
    return None


def program_of(gm: GraphModule) -> list[Any]:
    """Returns what is the same in programs that differ in sizes alone: which calls read what, and the ports."""
    calls = [
        (node.name, node.op, str(node.target), [used.name for used in node.all_input_nodes]) for node in gm.graph.nodes
    ]
    return [gm.meta["ports"], calls]


def same_choice(choice: Choice, candidates: Candidates) -> Choice:
    """Returns a choice as one among the candidates of the same call at other sizes. Raises KeyError if it is none."""
    known = {(each.text, each.factor): each for each in candidates.signatures}
    return Choice(tuple(known[each.text, each.factor] for each in choice.signatures), choice.order)


def as_wished(gm: GraphModule, plan: Plan) -> bool:
    """Returns whether a plan is as its options ask."""
    asked, assignment = wishes(gm, plan.mesh, plan.options), plan.assignment
    nodes = (wish.admits(assignment.choices[name].output(0, plan.mesh.axes)) for name, wish in asked.nodes.items())
    ends = (assignment.outputs[at] for at in asked.outputs)
    return all(nodes) and all(end is not None and wish.admits(end) for end, wish in zip(ends, asked.outputs.values()))
