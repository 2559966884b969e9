"""What `sbpc.plan` does where it is asked for the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch.fx import GraphModule

from sbpc.api.checks import values_pinned
from sbpc.api.recompute import forms_of
from sbpc.errors import LayoutError, MemoryLimitError, PinError, PlanError, least_of
from sbpc.graph.no_gc import uncollected
from sbpc.graph.ports import GRADIENT, ONCE, PARAMETER
from sbpc.graph.rewrite import rebuild
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import both
from sbpc.mesh.states import Axes
from sbpc.passes.assign.expert_structure import Model
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import Wishes, expert_alternatives, sharing, wishes
from sbpc.passes.loop.micro_batches import in_halves
from sbpc.passes.loop.recompute import blocks_of
from sbpc.passes.panels.choice import faster_in_panels
from sbpc.passes.pipeline import Stages, few_calls, finish, make_chunk, make_plan, searched
from sbpc.passes.schedule.choice import Overlap, Weights, bare_seconds, heaviest, overlapped, streams_of, weighted
from sbpc.passes.stages.balance import between_blocks, blocks_at, places_of
from sbpc.passes.stages.cut import cut
from sbpc.passes.stages.plan_stages import chunks_of, staged
from sbpc.passes.stages.zero import Zero, groups_of
from sbpc.plans.chunk import Assignment
from sbpc.plans.options import AUTO, FULL, NONE, SECONDS, SELECTIVE, SERIAL, Options
from sbpc.plans.plan import Plan
from sbpc.plans.staged.loop import Loop
from sbpc.plans.staged.loop_formula import check_names

EXPOSED = 5e-2  # the part of a step that is exposed where parts of calls are tried
EXPERTS = "megatron+sp", "megatron", "data"  # the layouts of the first take fewest bytes


@uncollected()
def plan_stages(gm: GraphModule, clocks: Stages, mesh: Mesh, asked: Options) -> Plan:
    """Returns the plan of an annotated step with stages along an axis of `mesh`, or of a loop over micro-batches
    where that is None."""
    if asked.recompute == AUTO:
        forms = (NONE, SELECTIVE, FULL) if blocks_of(gm) else (NONE,)
        return least(forms, lambda form: plan_stages(gm, clocks, mesh, replace(asked, recompute=form)))
    axis, baseline = asked.stages, asked.baseline
    if asked.dynamic is not None:
        asked = replace(asked, dynamic=check_names(gm, mesh, asked.dynamic))
    gm = clocks.with_sums(gm, asked)
    asked = replace(asked, masters=bool(gm.meta["ports"].masters))
    if again := forms_of(gm, asked.recompute):
        gm = clocks.run("recompute", gm, again)
    count = asked.microbatches or usual_count(gm, 1 if axis is None else mesh.sizes[mesh.axis(axis)])
    asked = replace(asked, microbatches=count)
    options = of_body(asked)

    def solve(body: GraphModule, inner: Mesh) -> list[Plan]:
        plan = serial(body, inner)
        return beside(plan, wishes(body, inner, options)) if asked.overlaps else [plan]

    def serial(body: GraphModule, inner: Mesh, **other: Any) -> Plan:
        changed = replace(options, **other)
        wished = wishes(body, inner, changed)
        experts = None if baseline else partial(expert_alternatives, body, inner, wished.nodes)
        plan = finish(body, inner, wished, changed, clocks, experts)
        plan.again = partial(serial, body, inner)
        return plan

    def as_experts(names: Sequence[str], body: GraphModule, inner: Mesh) -> list[Assignment]:
        found = []
        for name in names if baseline is None else ():
            with suppress(LayoutError, PinError, PlanError):  # it does not fit the model, or not beside the pins
                wished = wishes(body, inner, replace(options, baseline=name))
                found.append(finish(body, inner, wished, options, clocks, exact=False).assignment)
        return found

    def experts(body: GraphModule, inner: Mesh) -> list[Assignment]:
        alone = not asked.overlaps or inner.cluster.name == "ideal"  # there layouts that send least are as good as any
        return [] if alone else as_experts(EXPERTS if len(inner.axes) > 1 else EXPERTS[-1:], body, inner)

    def in_two(plan: Plan) -> Plan | None:
        body = alive(plan)
        if body is None or values_pinned(body.annotated, asked.pin):
            return None
        try:
            asked_of = wishes(body.annotated, body.mesh, options)
            return settled(body, in_halves(body, asked_of, replace(body.options, microbatches=2), of_body_graph))
        except (PlanError, PinError, LayoutError):  # the micro-batch cannot be halved, or not beside the pins
            return None

    def panelled(plan: Plan) -> Plan | None:
        body = alive(plan)
        cut = body if body is None else faster_in_panels(body, 0.0, of_body_graph)
        return None if cut is body or cut is None or body is None else settled(body, cut)

    def of_body_graph(gm: GraphModule, assignment: Assignment) -> Plan:
        return make_plan(gm, mesh.without(axis), assignment, 0.0, options, clocks)

    spare = partial(as_experts, EXPERTS[:1])
    made = partial(make_chunk, mesh.without(axis), clocks)
    limits = partial(search, options=options, count=count, clocks=clocks)
    with clocks.timed("stages"):
        plan = staged(gm, mesh, asked, solve, spare, limits, made, (in_two, panelled), experts)
    plan.times = clocks.times
    if clocks.dump is not None:
        assert plan.loop is not None
        clocks.passed("loop", plan.loop.body)
        clocks.show_plan(plan)
    return plan


def alive(plan: Plan) -> Plan | None:
    """Returns the body of a loop as if collectives ran beside computing in it alone; None where parts gain nothing."""
    body = plan.body
    if body is None or not may_gain(plan, body):
        return None
    options = replace(body.options, objective=plan.options.objective)
    return overlapped(body, options, body.prover, body.lower_bound, body.serial_bound)  # type: ignore[arg-type]


def settled(body: Plan, parts: Plan) -> Plan:
    """Returns the body in parts with the bounds, and the objective, of the body that it was."""
    return replace(parts, options=replace(parts.options, objective=SERIAL), again=body.again)


def may_gain(plan: Plan, whole: Plan) -> bool:
    """Returns whether a step in parts may be shorter, and can be planned in little time. whole: what is to be parted.

    Not on the ideal cluster, where a kernel of half the size takes half the time however small it is.
    """
    options = plan.options
    free = options.overlaps and options.baseline is None and options.dynamic is None
    if not free or plan.mesh.cluster.name == "ideal" or not few_calls(whole.annotated):
        return False
    return plan.cost.exposed_seconds > EXPOSED * plan.cost.seconds


def of_body(asked: Options) -> Options:
    """Returns the options of the plans of chunks and of the body of a loop: one micro-batch, on the mesh of a stage."""
    return replace(
        asked,
        memory=None,
        objective=SERIAL,
        microbatches=1,
        panels=1,
        stages=None,
        recompute=NONE,
        dynamic=None,
        inputs=None,
        outputs=None,
        guards={},
    )


def search(whole: Plan, options: Options, count: int, clocks: Stages) -> Callable[[float], Plan]:
    """Returns what plans a body under limits of bytes, one after the other, and as if parameters were boxed in every
    micro-batch.

    whole: the plan of the body without a limit.
    """
    body, free = rebuild(whole.annotated), replace(whole, lower_bound=whole.serial_bound or whole.lower_bound)
    body.meta[ONCE] = {GRADIENT: 1 / count}
    found = searched(body, free, wishes(body, free.mesh, options), clocks)

    def limited(limit: float) -> Plan:
        with clocks.timed("assign"):
            found.run(free, limit)
            return found.finished()

    return limited


def beside(plan: Plan, asked: Wishes) -> list[Plan]:
    """Returns the plan of a body and one at other weights of its streams, with the bound of steps where collectives
    run beside computing.

    The weights lie between equal ones, whose layouts are good ones, and those at which the plan costs most, whose
    bound is. asked: what the user wants of the body.
    """
    mesh, streams = plan.mesh, streams_of(plan.mesh)
    if len(streams) == 1:
        return [plan]
    prover = Overlap.of(plan)
    assignments = [plan.assignment]

    def layouts_at(weights: Weights) -> Space:
        return Space(plan.annotated, weighted(mesh, weights), asked.nodes, asked.outputs)

    if mesh.cluster.name != "ideal":  # where the layouts that send least are as good as any
        most, _ = heaviest(streams, [bare_seconds(plan)])
        weights = {stream: (most[stream] + 1 / len(streams)) / 2 for stream in streams}
        space = layouts_at(weights)
        assignment, bound = space.solve(exact=False)
        prover.improve(space, bound)
        assignments.append(assignment)
    prover.improve_by_computing(layouts_at)
    bounds: dict[str, Any] = {"lower_bound": prover.bound, "serial_bound": plan.lower_bound, "prover": prover}
    return [plan.with_layouts(each, **bounds) for each in assignments]


def short_plans(
    loop: Loop,
    clocks: Stages,
    about: Mapping[str, Any],
    inner: Mesh,
    axis: str,
    optimizer: str | None,
    baseline: str | None = None,
    shared: Axes | None = None,
) -> tuple[list[str], Callable[[int], Plan]]:
    """Returns the blocks of a model, and what makes the plan of its step with each of them a stage along `axis`, all
    parameters at a level of `sbpc.passes.stages.zero`. inner: the mesh of a stage. baseline: the expert to follow.
    shared: the axes of `inner` over which rows of experts are shared out. The plan of a level is made once.
    """
    options = of_body(Options(optimizer=optimizer, baseline=baseline, **about))
    body = rebuild(loop.body)
    body.meta[ONCE] = dict.fromkeys((PARAMETER, GRADIENT), 1 / loop.count)
    wished = Wishes(wishes(body, inner, options).nodes, {})
    if shared is not None:
        wished = Wishes(both(wished.nodes, sharing(body, shared, ()), inner), {})
    plan = finish(body, inner, wished, options, clocks, exact=False)  # a search needs no last half percent
    places = places_of(plan.annotated)
    starts, blocks = between_blocks(places), blocks_at(places) or [""]
    pieces = cut(plan.annotated, places, starts)
    mesh = inner.like(inner.cluster, **{axis: len(pieces)}, **dict(zip(inner.axes, inner.sizes)))
    zero = Zero(plan, groups_of(plan.annotated), loop.count)

    made = partial(make_chunk, inner, clocks)
    asked = replace(options, objective=SECONDS, stages=axis, microbatches=loop.count)

    @cache
    def at(level: int) -> Plan:
        levels = dict.fromkeys(range(len(zero.groups)), level)
        chunks = chunks_of(plan.with_layouts(zero.assignment(levels)), pieces, made)
        return Plan(mesh, chunks, asked, 0.0, loop, zero.in_loop(levels))

    return [blocks[place] for place in (0, *starts)], at


def least(forms: Sequence[str], planned: Callable[[str], Plan]) -> Plan:
    """Returns the plan of the first form of recompute with which all stages fit. Raises MemoryLimitError, of that
    which takes least."""
    errors = []
    for form in forms:
        try:
            return planned(form)
        except MemoryLimitError as error:
            errors.append(error)
    raise least_of(errors)


def usual_count(gm: GraphModule, stages: int) -> int:
    """Returns the largest divisor of the batch that is at most four times the number of stages."""
    batch = Model(gm).batch
    return max(count for count in range(1, 4 * stages + 1) if batch % count == 0)
