"""What `sbpc.plan` does where it is asked for the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch.fx import GraphModule

from sbpc.api.recompute import AUTO, forms_of
from sbpc.errors import MemoryLimitError, SbpcError, check_kinds
from sbpc.graph.no_gc import uncollected
from sbpc.graph.ports import ONCE, PARAMETER, placeholders
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.passes.assign.expert_structure import Model
from sbpc.passes.assign.wishes import Requests, expert_alternatives, wishes
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.recompute import FULL, NONE, SELECTIVE
from sbpc.passes.loop.recompute import recompute as compute_again
from sbpc.passes.pipeline import Stages, finish, make_plan
from sbpc.passes.stages.balance import between_blocks, places_of
from sbpc.passes.stages.cut import cut
from sbpc.passes.stages.plan_stages import chunks_of, mesh_of_stage, staged
from sbpc.plans.plan import Assignment, Plan
from sbpc.plans.staged.schedules import chunks_in
from sbpc.plans.staged.staged_plan import Chunk, StagedPlan


@uncollected()
def plan_stages(
    gm: GraphModule, clocks: Stages, about: Mapping[str, Any], mesh: Mesh, axis: str, schedule: str, microbatches: int | None,
    recompute: str, optimizer: str | None, memory: float | None, pin: Mapping[str, str | Layout], baseline: str | None = None,
) -> StagedPlan:  # fmt: skip
    """Returns the plan of an annotated step with stages along an axis of `mesh`.

    about: what every plan's options say of the step. baseline: the expert to follow in each stage. The other options are those of
    `sbpc.plan`, already checked.
    """
    if recompute == AUTO:
        asked = (gm, clocks, about, mesh, axis, schedule, microbatches)
        return least(lambda form: plan_stages(*asked, form, optimizer, memory, pin, baseline))
    gm = compute_again(gm, forms_of(gm, recompute))
    pins = {name: str(layout) for name, layout in pin.items()}
    options = {"optimizer": optimizer, "memory": None, "objective": "serial", "pin": pins, "spread": False, **about}
    options |= {"baseline": baseline} if baseline else {}
    count = microbatches or usual_count(gm, mesh.sizes[mesh.axis(axis)])
    asked_for = {**options, "memory": memory, "stages": axis, "schedule": schedule, "microbatches": count, "recompute": recompute}

    def solve(body: GraphModule, inner: Mesh, limit: float | None, pin: Mapping[str, str] = pins) -> Plan:
        asked = wishes(body, inner, Requests(pin, baseline=baseline))
        experts = None if baseline else partial(expert_alternatives, body, inner, asked.nodes)
        plan = finish(body, inner, asked.nodes, asked.outputs, options | {"memory": limit, "pin": pin}, clocks, experts)
        plan.again = partial(solve, body, inner, limit)
        return plan

    def made(piece: GraphModule, assignment: Assignment) -> Plan:
        return make_plan(piece, mesh_of_stage(mesh, axis), assignment, 0.0, options, clocks)

    with clocks.timed("stages"):
        plan = staged(gm, mesh, axis, count, schedule, asked_for, solve, made)
    plan.times = clocks.times
    return plan


def units_of(
    gm: GraphModule, clocks: Stages, about: Mapping[str, Any], inner: Mesh, count: int, spread: bool, once: Sequence[str],
    baseline: str | None = None,
) -> list[Chunk]:  # fmt: skip
    """Returns the body of a step on the mesh of a stage, every block of the model a chunk of its own.

    spread: every parameter is stored once over the ranks of a stage. once: kinds of what is priced as boxed once for all micro-batches.
    baseline: the expert to follow.
    """
    options = {"optimizer": None, "memory": None, "objective": "serial", "pin": {}, "spread": False, **about}
    loop = loop_of(gm, count, inner.cluster)
    loop.body.meta[ONCE] = dict.fromkeys(once, 1 / count)
    asked = wishes(loop.body, inner, Requests({}, baseline=baseline)).nodes
    if spread:
        stored = wishes(loop.body, inner, Requests({}, spread=True)).nodes
        asked |= {name: stored[name] for name in parameters_of(loop.body)}
    plan = finish(loop.body, inner, asked, {}, options, clocks)
    places = places_of(plan.graph)
    pieces = cut(plan.graph, places, between_blocks(places))
    return chunks_of(plan, pieces, lambda piece, assignment: make_plan(piece, inner, assignment, 0.0, options, clocks))


def parameters_of(gm: GraphModule) -> set[str]:
    """Returns the names of the nodes of parameters."""
    return {node.name for port, node in placeholders(gm).items() if port.kind == PARAMETER}


def least(planned: Callable[[str], StagedPlan]) -> StagedPlan:
    """Returns the plan of the first form of recompute with which all stages fit. Raises MemoryLimitError if none does."""
    for form in (NONE, SELECTIVE):
        with suppress(MemoryLimitError):
            return planned(form)
    return planned(FULL)


def usual_count(gm: GraphModule, stages: int) -> int:
    """Returns the largest divisor of the batch that is at most four times the number of stages."""
    batch = Model(gm).batch
    return max(count for count in range(1, 4 * stages + 1) if batch % count == 0)


def check_staged(mesh: Mesh, stages: Any, schedule: Any, *, train: bool, **options: Any) -> None:
    """Raises SbpcError for what cannot be asked of a plan with stages."""
    check_kinds(stages=(stages, "a text"), schedule=(schedule, "a text"))
    mesh_of_stage(mesh, stages)
    chunks_in(schedule)
    if not train:
        raise SbpcError("stages= is for training\n  Plan the forward alone without it.")
    given = [name for name in ("inputs", "outputs", "dynamic") if options.get(name) is not None]
    given += ["spread"] if options.get("spread") else []
    given += ["objective"] if options.get("objective") == "bytes" else []
    if options.get("panels") not in (None, 1):
        raise SbpcError("panels= with stages=\n  Leave it out: nothing overlaps inside a stage.")
    if given:
        raise SbpcError(f"{given[0]}= with stages=\n  Leave it out: inputs and outputs are whole on every rank.")
