"""Writes the chunks of a loop: its body cut, with the layouts of one plan of it, and in which order they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torch.fx import Node

from sbpc.errors import MemoryLimitError, PlanError, lacking
from sbpc.graph.operands import value_of
from sbpc.graph.ports import GRADIENT, PARAMETER, Port, placeholders, results
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import B, Partial, Split, State
from sbpc.passes.stages.balance import cuts_at, cuts_of, names_of, places_of
from sbpc.passes.stages.cut import StageGraph, cut
from sbpc.plans.chunk import Assignment, Chunk
from sbpc.plans.options import Options
from sbpc.plans.plan import Plan
from sbpc.plans.staged.loop import Loop
from sbpc.plans.staged.part_memory import bytes_at
from sbpc.plans.staged.schedules import BREADTH_FIRST, FORWARD, INPUTS, WEIGHTS, chunks_in
from sbpc.plans.staged.stage_parts import AFTER, BEFORE
from sbpc.rules.choices import Candidates, Choice, of_stored

Made = Callable[..., Chunk]  # of a piece, its layouts, and what its ports stand for
CHUNKS = 4, 8  # of a loop that goes breadth-first
GAIN = 2e-2  # the part of a step that chunks, or parts of calls, are to save


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
    assert plan.loop is not None
    pieces = pieces_of(body, count, plan.options, plan.loop)
    options = replace(plan.options, schedule=schedule)
    return replace(plan, chunks=chunks_of(body, pieces, made), options=options, body=body)


def pieces_of(body: Plan, count: int, options: Options, loop: Loop) -> list[StageGraph]:
    """Returns the graphs of so many chunks of a body: cut where `options` say, or else even ones."""
    places, named = places_of(body.annotated), options.cuts
    if named is not None and len(named) != count - 1:
        raise PlanError(
            f"cuts= names {len(named)} parameters for {count} chunks\n  Give plan.cuts of a plan like this."
        )
    gm, mesh = body.annotated, body.mesh
    even = cuts_of(gm, places, count, mesh) if named is None else cuts_at(gm, places, named, mesh)
    return cut(gm, places, even, loop.joined)


def better(plan: Plan, tried: Plan) -> Plan:
    """Returns another plan if it is faster and fits: into the limit, or else the memory of a device."""
    limit = plan.options.memory or max(plan.memory["total"], plan.mesh.cluster.memory)
    gains = tried.cost.seconds < (1 - GAIN) * plan.cost.seconds and tried.memory["total"] <= limit
    return tried if gains else plan


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
    axes, known, (producer, index) = whole.mesh.axes, whole.assignment, value_of(node)
    layouts = [known.made(node, axes), *known.read(node, axes)]
    layouts += [layout] if (layout := known.aliases.get((producer.name, index))) is not None else []
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
