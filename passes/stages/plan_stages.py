"""Plans a step with pipeline stages: one solve for the body of the loop, cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import NamedTuple

from torch.fx import GraphModule, Node

from sbpc.errors import MemoryLimitError, PlanError, lacking
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import GRADIENT, ONCE, PARAMETER, Port, placeholders, results
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import B, Partial, Split, State
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.micro_batches import batch_of
from sbpc.passes.stages.balance import cuts_at, cuts_of, names_of, places_of
from sbpc.passes.stages.cut import StageGraph, cut
from sbpc.passes.stages.zero import Build, within_levels
from sbpc.plans.chunk import Assignment, Chunk
from sbpc.plans.options import Options
from sbpc.plans.plan import Plan
from sbpc.plans.staged.part_memory import bytes_at
from sbpc.plans.staged.schedules import BREADTH_FIRST, FORWARD, INPUTS, USUAL, WEIGHTS, actions_of, chunks_in
from sbpc.plans.staged.stage_parts import AFTER, BEFORE
from sbpc.plans.staged.stages_bound import stages_bound
from sbpc.rules.choices import Candidates, Choice, of_stored

Made = Callable[..., Chunk]  # of a piece, its layouts, and what its ports stand for
Solve = Callable[[GraphModule, Mesh], Sequence[Plan]]
Spare = Callable[[GraphModule, Mesh], Sequence[Assignment]]
Search = Callable[[Plan], Callable[[float], Plan]]
Parts = Callable[[Plan], Plan | None]  # the body of a loop with its calls in parts, None where that gains nothing
TRIES, LESS = 5, 0.98  # limits of the body under which it is planned; each is so much below what the last plan suggests
CHUNKS = 4, 8  # of a loop that goes breadth-first
GAIN = 2e-2  # the part of a step that chunks, or parts of calls, are to save
ENOUGH = 1e-2  # fraction by which a plan under a limit may be slower than one without before layouts are searched


class Draft(NamedTuple):
    """A plan of the step, that of its body, and what makes the first from other layouts of the second."""

    plan: Plan
    body: Plan
    build: Build


def staged(
    gm: GraphModule,
    mesh: Mesh,
    options: Options,
    solve: Solve,
    spare: Spare,
    search: Search,
    made: Made,
    parts: Sequence[Parts] = (),
    experts: Spare = lambda body, inner: (),
) -> Plan:
    """Returns the plan of an annotated step with stages along an axis, with one stage where `options` name none.

    solve: plans the body on the mesh of a stage; of several plans the one whose step is shortest is taken. spare: lays
    it out in other ways that may take fewer bytes. search: what plans it under limits of bytes, from the plan without.
    made: makes a chunk there. parts: ways to write the body, in halves, in panels; what makes the step shorter is
    taken. experts: layouts of the body that the step is to be no slower with. Raises PlanError if the model cannot be
    cut so, MemoryLimitError if no plan fits.
    """
    axis, schedule, count = options.stages, options.schedule or USUAL, options.microbatches
    may_change, options = options.schedule is None, replace(options, schedule=schedule)
    assert count is not None
    stages = 1 if axis is None else mesh.sizes[mesh.axis(axis)]
    batch_of(gm, count)
    actions_of(schedule, stages, count)  # raises where the schedule cannot have so many micro-batches, before hard work
    loop, inner = loop_of(gm, count), mesh.without(axis)
    loop.body.meta[ONCE] = dict.fromkeys((PARAMETER, GRADIENT), 1 / count)

    def draft(whole: Plan, free: Plan | None = None) -> Draft:
        pieces = pieces_of(whole, stages * chunks_in(schedule), options)
        times = count / stages  # of the mean stage: no layouts take less in all
        # while a stage communicates, others may compute faster
        alone = 1.0 if whole.serial_bound else min(mesh.cluster.sharing, stages)
        bounds = times * (whole.serial_bound or whole.lower_bound), times * whole.lower_bound / alone
        serial_bound, bound = bounds if free is None else (free.serial_bound, free.lower_bound)

        def build(assignment: Assignment, in_loop: frozenset[Port]) -> Plan:
            body = whole.with_layouts(assignment)
            chunks = chunks_of(body, pieces, made)
            return Plan(mesh, chunks, options, bound, loop, in_loop, serial_bound, body)

        first = build(whole.assignment, frozenset())
        if free is None:
            first.lower_bound = bound = max(bound, stages_bound(first, whole.problem.least))
        return Draft(first, whole, build)

    free = min(map(draft, solve(loop.body, inner)), key=lambda each: each.plan.cost.seconds)
    if (1 - GAIN) * free.plan.cost.seconds > free.plan.cost.compute_seconds:
        known = (draft(free.body.with_layouts(each), free.plan) for each in experts(loop.body, inner))
        free = min([free, *known], key=lambda each: each.plan.cost.seconds)
    memory = options.memory
    plan = free.plan
    if memory is not None and plan.memory["total"] > memory:
        plan = within_memory(
            free, memory, lambda: spare(loop.body, inner), search, lambda whole: draft(whole, free.plan)
        )
    for write in parts:
        body = write(plan)
        plan = plan if body is None else better(plan, rewritten(plan, body, schedule, made))
    if stages > 1:
        return with_cuts(plan)
    return breadth_first(plan, made) if may_change else plan


def with_cuts(plan: Plan) -> Plan:
    """Returns the plan with its cuts among its options, unless the first parameters of its chunks lead back to them:
    a chunk may have none of its own, or begin behind what reads it."""
    assert plan.body is not None
    gm, mesh = plan.body.annotated, plan.body.mesh
    places = places_of(gm)
    if plan.options.cuts is not None:
        return plan
    even = cuts_of(gm, places, len(plan.chunks), mesh)
    with suppress(PlanError):
        if cuts_at(gm, places, plan.cuts, mesh) == even:
            return plan
    return replace(plan, options=replace(plan.options, cuts=tuple(names_of(gm, places, even))))


def breadth_first(plan: Plan, made: Made) -> Plan:
    """Returns a loop in which all micro-batches go through one chunk of the model before the next if that is faster
    and fits: gradients of a chunk then go home beside the backward of those before it, and what is gathered for a chunk
    comes beside the forward of those before it. Else the loop as it is."""
    (cost,), body = plan.chunk_costs, plan.body
    send = sum(
        cost.program(which).seconds - cost.program(tuple(part for part in which if part not in (BEFORE, AFTER))).seconds
        for which in ((BEFORE, FORWARD), (INPUTS, WEIGHTS, AFTER))
    )
    if not plan.overlaps or plan.mesh.cluster.name == "ideal" or send < GAIN * plan.cost.seconds:
        return plan
    assert body is not None
    tried = list[Plan]()
    with suppress(PlanError):  # fewer blocks than chunks
        for chunks in CHUNKS:
            tried.append(rewritten(plan, body, f"{BREADTH_FIRST}:{chunks}", made))
    for each in sorted(tried, key=lambda plan: plan.cost.seconds):
        if better(plan, each) is each:
            return each
    return plan


def rewritten(plan: Plan, body: Plan, schedule: str, made: Made) -> Plan:
    """Returns the plan of the same step with another body, and in another order."""
    count = plan.stages * chunks_in(schedule)
    pieces = pieces_of(body, count, plan.options)
    options = replace(plan.options, schedule=schedule)
    return replace(plan, chunks=chunks_of(body, pieces, made), options=options, body=body)


def pieces_of(body: Plan, count: int, options: Options) -> list[StageGraph]:
    """Returns the graphs of so many chunks of a body: cut where `options` say, or else even ones."""
    places, named = places_of(body.annotated), options.cuts
    if named is not None and len(named) != count - 1:
        raise PlanError(
            f"cuts= names {len(named)} parameters for {count} chunks\n  Give plan.cuts of a plan like this."
        )
    gm, mesh = body.annotated, body.mesh
    even = cuts_of(gm, places, count, mesh) if named is None else cuts_at(gm, places, named, mesh)
    return cut(gm, places, even)


def better(plan: Plan, tried: Plan) -> Plan:
    """Returns another plan if it is faster and fits: into the limit, or else the memory of a device."""
    limit = plan.options.memory or max(plan.memory["total"], plan.mesh.cluster.memory)
    gains = tried.cost.seconds < (1 - GAIN) * plan.cost.seconds and tried.memory["total"] <= limit
    return tried if gains else plan


def within_memory(
    free: Draft,
    memory: float,
    spare: Callable[[], Sequence[Assignment]],
    search: Search,
    draft: Callable[[Plan], Draft],
) -> Plan:
    """Returns a plan that fits into `memory` bytes on each rank.

    Layouts that spare bytes are tried, and those of the plan without a limit, with parameters cut and gathered
    (`sbpc.passes.stages.zero`). If none of these is almost as fast as the plan without a limit, the body is planned
    under a limit, too, and under others, at most TRIES in all, until the busiest stage fits: lower ones than what the
    last body takes, higher ones than those that no body keeps. Raises MemoryLimitError.
    """
    plan, whole, _ = free
    plans = list[Plan]()

    def add(each: Draft) -> None:
        seconds = [known.cost.seconds for known in plans if known.memory["total"] <= memory]
        plans.append(within_levels(each.plan, each.body, memory, each.build, min(seconds, default=inf)))

    for assignment in spare():
        add(draft(whole.with_layouts(assignment)))
    add(free)
    if any(each.memory["total"] <= memory and each.cost.seconds <= (1 + ENOUGH) * plan.cost.seconds for each in plans):
        return fastest(plans, memory)
    total, limited, refused = plan.memory["total"], search(whole), 0.0
    for _ in range(TRIES):
        most = whole.memory["total"] * memory / total  # as much less as the busiest stage is to take less
        if most <= refused:
            break
        limit = LESS * most if LESS * most > refused else (refused + most) / 2
        try:
            whole = limited(limit)
        except MemoryLimitError as error:
            whole, refused = error.nearest, limit
        add(draft(whole))
        total = plans[-1].memory["total"]
        if min(plan.memory["total"] for plan in plans) <= memory:
            break
    return fastest(plans, memory)


def fastest(plans: Sequence[Plan], memory: float) -> Plan:
    """Returns the fastest of the plans that fit into `memory` bytes. Raises MemoryLimitError if none does."""
    fitting = [plan for plan in plans if plan.memory["total"] <= memory]
    if not fitting:
        raise too_large(min(plans, key=lambda plan: plan.memory["total"]), memory)
    return min(fitting, key=lambda plan: plan.cost.seconds)


def too_large(plan: Plan, memory: float) -> MemoryLimitError:
    """Returns the error about a plan of a loop that does not fit into `memory`: that which takes least."""
    what, parts = lacking(plan.memory, memory)
    ranks = "more ranks" if plan.axis is None else "more stages or more ranks on the other axes"
    return MemoryLimitError(f"{what}\n  {parts}\n  Give more memory, more micro-batches, or {ranks}.", plan)


def chunks_of(whole: Plan, pieces: list[StageGraph], made: Made) -> list[Chunk]:
    """Returns the chunks with the layouts of the plan of the whole body."""
    nodes = {node.name: node for node in whole.annotated.graph.nodes}
    borders = {name: border(whole, nodes[name]) for piece in pieces for name in piece.receives.values()}
    known = dict[str, dict[tuple[str, int], Layout]]()
    for key, layout in whole.assignment.aliases.items():
        known.setdefault(key[0], {})[key] = layout
    chunks = []
    for piece in pieces:
        gm = piece.graph
        received = {node.name for port, node in placeholders(gm).items() if port in piece.receives}
        choices: dict[str, Choice] = {}
        aliases: dict[tuple[str, int], Layout] = {}
        for node in gm.graph.nodes:
            if node.op == "output" or value_of(node)[0] is not node:
                continue
            if node.name in received:
                choices[node.name] = stored(of_stored(tuple(node.meta["val"].shape)), borders[node.name])
                aliases[node.name, 0] = borders[node.name]
            else:
                choices[node.name] = whole.assignment.choices[node.name]
                aliases |= known.get(node.name, {})
        outputs = [left(whole, piece, borders, port) for port in gm.meta["ports"].outputs]
        for node, layout in zip(results(gm), outputs):
            producer, index = value_of(node)  # type: ignore[arg-type]
            aliases.setdefault((producer.name, index), layout)
        about = piece.arguments, piece.results, piece.receives, piece.sends
        chunks.append(made(gm, Assignment(choices, aliases, tuple(outputs)), *about))
    return chunks


def left(whole: Plan, piece: StageGraph, borders: Mapping[str, Layout], port: Port) -> Layout:
    """Returns the layout in which a chunk leaves an output."""
    if port in piece.sends:
        return borders[piece.sends[port]]
    if port.kind == GRADIENT:
        return whole.given[Port(PARAMETER, port.name)]
    outputs = [layout for each, layout in whole.left.items() if each.kind == port.kind]
    layout = outputs[piece.results[port]]
    assert layout is not None
    return layout


def border(whole: Plan, node: Node) -> Layout:
    """Returns the layout in which a value crosses: of those in which it is made or read the one of the fewest bytes
    a rank, or whole."""
    producer, index = value_of(node)
    axes, choices = whole.mesh.axes, whole.assignment.choices
    layouts = [choices[producer.name].output(index, axes)]
    for user in node.users:
        if user.op == "call_function" and user.name in choices:
            layouts += [
                choices[user.name].input(slot, axes) for slot, used in enumerate(operands(user)) if used is node
            ]
    layouts += (
        [whole.assignment.aliases[producer.name, index]] if (producer.name, index) in whole.assignment.aliases else []
    )
    kept = [layout for layout in dict.fromkeys(layouts) if not layout.partial and may_hold(layout, node, whole.mesh)]
    if not kept:  # a partial sum wherever it is made or read: it is added up on its way
        kept = [layout for each in layouts for layout in added_up(each, node) if may_hold(layout, node, whole.mesh)]
    kept = kept or [layouts[0].replace(dict.fromkeys(range(len(axes)), B))]
    return min(kept, key=lambda layout: bytes_at(node.meta["val"], layout, whole.mesh))


def added_up(layout: Layout, node: Node) -> Iterator[Layout]:
    """Yields the layouts in which the axes of a partial sum cut one dim, or none."""
    partial = [axis for axis, state in enumerate(layout.states) if isinstance(state, Partial)]
    states: list[State] = [*(Split(dim) for dim in range(node.meta["val"].dim())), B]
    for state in states:
        yield layout.replace(dict.fromkeys(partial, state))


def may_hold(layout: Layout, node: Node, mesh: Mesh) -> bool:
    """Returns whether a received tensor may come in a layout."""
    candidates = of_stored(tuple(node.meta["val"].shape))
    known = {signature.outputs[0] for signature in candidates.signatures}
    return known.issuperset(layout.states) and candidates.legal(stored(candidates, layout), mesh.sizes)


def stored(candidates: Candidates, layout: Layout) -> Choice:
    """Returns the choice of a stored tensor in a layout."""
    by_state = {signature.outputs[0]: signature for signature in candidates.signatures}
    order = (*layout.order, *(axis for axis in range(len(layout.states)) if axis not in layout.order))
    return Choice(tuple(by_state[state] for state in layout.states), order)
