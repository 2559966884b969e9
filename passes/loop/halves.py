"""Runs a planned step as two halves of the batch: one computes while the other communicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import GraphModule

from sbpc.mesh.pins import Wish, both, exactly
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import Wishes
from sbpc.passes.loop.micro_batches import micro_batches
from sbpc.passes.schedule.choice import Overlap, overlapped
from sbpc.plans.options import Options
from sbpc.plans.plan import Assignment, Plan


def in_halves(plan: Plan, asked: Wishes, options: Options, made: Callable[[GraphModule, Assignment], Plan]) -> Plan:
    """Returns the plan of the same step in two micro-batches side by side, in the layouts of `plan`.

    asked: what the user wants. options: of the plan to be returned. made: makes the plan of a graph and an assignment. The bounds
    are those of `plan`: a kernel or a collective of half the size takes no less than half the time, so two halves in any layouts
    are busy for no less than the mean of two steps of whole batches, one in the layouts of each. Raises PlanError if the batch
    cannot be halved.
    """
    mesh, prover = plan.mesh, plan.problem
    gm = micro_batches(plan.graph, 2, mesh.cluster, in_turn=False)
    space = Space(gm, mesh, both(asked.nodes, same_layouts(plan, gm), mesh), asked.outputs)
    halves = made(gm, space.solve()[0])
    if isinstance(prover, Overlap):
        prover = replace(prover, whole=plan)
    return overlapped(halves, options, prover, plan.lower_bound, plan.serial_bound)


def same_layouts(plan: Plan, gm: GraphModule) -> dict[str, Wish]:
    """Returns, for what stands for a node of the plan's graph in `gm`, that its first output is laid out as there."""
    wishes = {}
    for node in gm.graph.nodes:
        choice = plan.assignment.choices.get(node.meta.get("origin", node.name))
        if choice is not None and ("origin" in node.meta or node.op == "placeholder"):
            wishes[node.name] = exactly(choice.output(0, plan.mesh.axes), f"%{node.name} as in the whole batch")
    return wishes
