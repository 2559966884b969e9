"""What `sbpc.plan` does where it is asked for the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import Any, NamedTuple

from torch.fx import GraphModule

from sbpc.api.checks import values_pinned
from sbpc.api.recompute import forms_of
from sbpc.errors import LayoutError, MemoryLimitError, PinError, PlanError, least_of
from sbpc.graph.no_gc import uncollected
from sbpc.graph.ports import GRADIENT, ONCE, PARAMETER, Port
from sbpc.graph.rewrite import rebuild
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import both
from sbpc.mesh.states import Axes
from sbpc.passes.assign.expert_structure import Model
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import Wishes, expert_alternatives, sharing, wishes
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.joins import in_order
from sbpc.passes.loop.micro_batches import batch_of, in_halves
from sbpc.passes.loop.recompute import blocks_of
from sbpc.passes.panels.choice import faster_in_panels
from sbpc.passes.pipeline import Stages, few_calls, finish, make_chunk, make_plan, searched
from sbpc.passes.schedule.choice import Overlap, Weights, bare_seconds, heaviest, overlapped, streams_of, weighted
from sbpc.passes.stages.balance import between_blocks, blocks_at, places_of
from sbpc.passes.stages.cut import cut
from sbpc.passes.stages.plan_stages import (
    GAIN,
    better,
    breadth_first,
    chunks_of,
    fastest,
    pieces_of,
    rewritten,
    with_cuts,
)
from sbpc.passes.stages.zero import Build, Zero, groups_of, within_levels
from sbpc.plans.chunk import Assignment
from sbpc.plans.options import AUTO, FULL, NONE, SECONDS, SELECTIVE, SERIAL, Options
from sbpc.plans.plan import Plan
from sbpc.plans.staged.loop import Loop
from sbpc.plans.staged.loop_formula import check_names
from sbpc.plans.staged.schedules import USUAL, actions_of, chunks_in
from sbpc.plans.staged.stages_bound import stages_bound

EXPOSED = 5e-2  # the part of a step that is exposed where parts of calls are tried
TRIES, LESS = 5, 0.98  # limits of the body under which it is planned; each is so much below what the last plan suggests
ENOUGH = 1e-2  # fraction by which a plan under a limit may be slower than one without before layouts are searched
EXPERTS = "megatron+sp", "megatron", "data"  # the layouts of the first take fewest bytes


@uncollected()
def plan_stages(gm: GraphModule, clocks: Stages, mesh: Mesh, asked: Options) -> Plan:
    """Returns the plan of an annotated step with stages along an axis of `mesh`, or of a loop over micro-batches
    where that is None."""
    if asked.recompute == AUTO:
        forms = (NONE, SELECTIVE, FULL) if blocks_of(gm) else (NONE,)
        return least(forms, lambda form: plan_stages(gm, clocks, mesh, replace(asked, recompute=form)))
    if asked.dynamic is not None:
        asked = replace(asked, dynamic=check_names(gm, mesh, asked.dynamic))
    gm = clocks.with_sums(gm, asked)
    if again := forms_of(gm, asked.recompute):
        gm = clocks.run("recompute", gm, again)
    count = asked.microbatches or usual_count(gm, stages_of(mesh, asked))
    asked = replace(asked, masters=bool(gm.meta["ports"].masters), microbatches=count)
    with clocks.timed("stages"):
        plan = LoopPlanner(gm, clocks, mesh, asked).planned()
    plan.times = clocks.times
    if clocks.dump is not None:
        assert plan.loop is not None
        clocks.passed("loop", plan.loop.body)
        clocks.show_plan(plan)
    return plan


class Draft(NamedTuple):
    """A plan of the step, that of its body, and what makes the first from other layouts of the second."""

    plan: Plan
    body: Plan
    build: Build


class LoopPlanner:
    """Plans an annotated step as a loop over micro-batches, with stages along an axis where `asked` names one.

    inner: the mesh of a stage. body: the graph that a micro-batch runs. options: those of its plan. made: makes a
    chunk. Raises PlanError if there cannot be so many micro-batches, LoopError if the step is no loop.
    """

    def __init__(self, gm: GraphModule, clocks: Stages, mesh: Mesh, asked: Options) -> None:
        count, schedule, self.may_change = asked.microbatches, asked.schedule or USUAL, asked.schedule is None
        assert count is not None
        self.clocks, self.mesh, self.inner = clocks, mesh, mesh.without(asked.stages)
        self.stages, self.options = stages_of(mesh, asked), of_body(asked)
        batch_of(gm, count)
        actions_of(schedule, self.stages, count)  # raises where it cannot have so many, before hard work
        self.loop = loop_of(gm, count)
        self.schedule = in_order(self.loop, schedule, self.may_change)
        self.asked = replace(asked, schedule=self.schedule)
        self.body = self.loop.body
        self.body.meta[ONCE] = dict.fromkeys((PARAMETER, GRADIENT), 1 / count)
        self.made = partial(make_chunk, self.inner, clocks)

    def planned(self) -> Plan:
        """Returns the plan of the step. Raises PlanError if the model cannot be cut so, MemoryLimitError if no plan
        fits.

        Of several plans of the body the one whose step is shortest is taken. It is to be no slower than with layouts
        of experts. The body in halves, or in panels, is taken where that makes the step shorter.
        """
        free, memory = min(map(self.draft, self.solved()), key=seconds), self.asked.memory
        if (1 - GAIN) * seconds(free) > free.plan.cost.compute_seconds:
            known = (self.draft(free.body.with_layouts(each), free.plan) for each in self.experts())
            free = min([free, *known], key=seconds)
        plan = free.plan
        if memory is not None and plan.memory["total"] > memory:
            plan = self.within_memory(free, memory)
        for write in (self.in_two, self.panelled):
            body = write(plan)
            plan = plan if body is None else better(plan, rewritten(plan, body, self.schedule, self.made))
        if self.stages > 1:
            return with_cuts(plan)
        return breadth_first(plan, self.made) if self.may_change else plan

    def draft(self, whole: Plan, free: Plan | None = None) -> Draft:
        """Returns a plan of the step with the body in the layouts of a plan of it. free: a plan whose bounds it has."""
        pieces = pieces_of(whole, self.stages * chunks_in(self.schedule), self.asked, self.loop)
        times = self.loop.count / self.stages  # of the mean stage: no layouts take less in all
        # while a stage communicates, others may compute faster
        alone = 1.0 if whole.serial_bound else min(self.mesh.cluster.sharing, self.stages)
        bounds = times * (whole.serial_bound or whole.lower_bound), times * whole.lower_bound / alone
        serial_bound, bound = bounds if free is None else (free.serial_bound, free.lower_bound)

        def build(assignment: Assignment, in_loop: frozenset[Port]) -> Plan:
            body = whole.with_layouts(assignment)
            chunks = chunks_of(body, pieces, self.made)
            return Plan(self.mesh, chunks, self.asked, bound, self.loop, in_loop, serial_bound, body)

        first = build(whole.assignment, frozenset())
        if free is None:
            first.lower_bound = bound = max(bound, stages_bound(first, whole.problem.least))
        return Draft(first, whole, build)

    # --- plans and layouts of the body --------------------------------------------------------------------------------
    def solved(self) -> list[Plan]:
        """Returns the best plan of the body, and where collectives run beside computing one at other weights."""
        plan = self.serial()
        return beside(plan, wishes(self.body, self.inner, self.options)) if self.asked.overlaps else [plan]

    def serial(self, **other: Any) -> Plan:
        """Returns the best plan of the body where nothing overlaps. other: options that are others."""
        changed = replace(self.options, **other)
        wished = wishes(self.body, self.inner, changed)
        experts = None
        if self.asked.baseline is None:
            experts = partial(expert_alternatives, self.body, self.inner, wished.nodes)
        plan = finish(self.body, self.inner, wished, changed, self.clocks, experts)
        plan.again = self.serial
        return plan

    def as_experts(self, names: Sequence[str]) -> list[Assignment]:
        """Returns the layouts of some experts, as far as they fit the model and the pins."""
        found = []
        for name in names if self.asked.baseline is None else ():
            with suppress(LayoutError, PinError, PlanError):
                wished = wishes(self.body, self.inner, replace(self.options, baseline=name))
                found.append(finish(self.body, self.inner, wished, self.options, self.clocks, exact=False).assignment)
        return found

    def experts(self) -> list[Assignment]:
        """Returns the layouts that the step is to be no slower with."""
        # on the ideal cluster layouts that send least are as good as any
        alone = not self.asked.overlaps or self.inner.cluster.name == "ideal"
        return [] if alone else self.as_experts(EXPERTS if len(self.inner.axes) > 1 else EXPERTS[-1:])

    # --- the body in parts --------------------------------------------------------------------------------------------
    def in_two(self, plan: Plan) -> Plan | None:
        """Returns the plan of the body in two halves; None if that gains nothing or cannot be."""
        body = alive(plan)
        if body is None or values_pinned(body.annotated, self.asked.pin):
            return None
        try:
            wished = wishes(body.annotated, body.mesh, self.options)
            return settled(body, in_halves(body, wished, replace(body.options, microbatches=2), self.plan_of))
        except (PlanError, PinError, LayoutError):  # the micro-batch cannot be halved, or not beside the pins
            return None

    def panelled(self, plan: Plan) -> Plan | None:
        """Returns the plan of the body in panels; None if that gains nothing."""
        body = alive(plan)
        if body is None:
            return None
        cut = faster_in_panels(body, 0.0, self.plan_of)
        return None if cut is body else settled(body, cut)

    def plan_of(self, gm: GraphModule, assignment: Assignment) -> Plan:
        """Returns the plan of a graph that does what the body does."""
        return make_plan(gm, self.inner, assignment, 0.0, self.options, self.clocks)

    # --- under a limit of bytes ---------------------------------------------------------------------------------------
    def within_memory(self, free: Draft, memory: float) -> Plan:
        """Returns a plan that fits into `memory` bytes on each rank.

        Layouts that spare bytes are tried, and those of the plan without a limit, with parameters cut and gathered
        (`sbpc.passes.stages.zero`). If none of these is almost as fast as the plan without a limit, the body is planned
        under a limit, too, and under others, at most TRIES in all, until the busiest stage fits: lower ones than what
        the last body takes, higher ones than those that no body keeps. Raises MemoryLimitError.
        """
        plan, whole, _ = free
        plans = list[Plan]()

        def add(each: Draft) -> None:
            known = [plan.cost.seconds for plan in plans if plan.memory["total"] <= memory]
            plans.append(within_levels(each.plan, each.body, memory, each.build, min(known, default=inf)))

        for assignment in self.as_experts(EXPERTS[:1]):
            add(self.draft(whole.with_layouts(assignment), plan))
        add(free)
        enough = (1 + ENOUGH) * plan.cost.seconds
        if any(each.memory["total"] <= memory and each.cost.seconds <= enough for each in plans):
            return fastest(plans, memory)
        total, limited, refused = plan.memory["total"], self.limited(whole), 0.0
        for _ in range(TRIES):
            most = whole.memory["total"] * memory / total  # as much less as the busiest stage is to take less
            if most <= refused:
                break
            limit = LESS * most if LESS * most > refused else (refused + most) / 2
            try:
                whole = limited(limit)
            except MemoryLimitError as error:
                whole, refused = error.nearest, limit
            add(self.draft(whole, plan))
            total = plans[-1].memory["total"]
            if min(each.memory["total"] for each in plans) <= memory:
                break
        return fastest(plans, memory)

    def limited(self, whole: Plan) -> Callable[[float], Plan]:
        """Returns what plans the body under limits of bytes, one after the other, and as if parameters were boxed in
        every micro-batch.

        whole: the plan of the body without a limit.
        """
        body, free = rebuild(whole.annotated), replace(whole, lower_bound=whole.serial_bound or whole.lower_bound)
        body.meta[ONCE] = {GRADIENT: 1 / self.loop.count}
        found = searched(body, free, wishes(body, free.mesh, self.options), self.clocks)

        def planned(limit: float) -> Plan:
            with self.clocks.timed("assign"):
                found.run(free, limit)
                return found.finished()

        return planned


def seconds(draft: Draft) -> float:
    """Returns the seconds of a step."""
    return draft.plan.cost.seconds


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
    pieces = cut(plan.annotated, places, starts, loop.joined)
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


def stages_of(mesh: Mesh, asked: Options) -> int:
    """Returns the number of stages that are asked for."""
    return 1 if asked.stages is None else mesh.sizes[mesh.axis(asked.stages)]


def usual_count(gm: GraphModule, stages: int) -> int:
    """Returns the largest divisor of the batch that is at most four times the number of stages."""
    batch = Model(gm).batch
    return max(count for count in range(1, 4 * stages + 1) if batch % count == 0)
