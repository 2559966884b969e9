"""Plans a step with pipeline stages: one solve for the body of the loop, cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from sbpc.errors import MeshError
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import GRADIENT, Port, placeholders, results
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import B, Partial, Split
from sbpc.passes.annotate import annotate
from sbpc.passes.assign.layout_problem import ONCE
from sbpc.passes.loop.body import loop_of
from sbpc.passes.stages.balance import cuts_of, places_of
from sbpc.passes.stages.cut import Piece, cut
from sbpc.plans.pipeline import CHUNKS
from sbpc.plans.plan import Assignment, Plan
from sbpc.plans.staged_plan import Chunk, StagedPlan, bytes_at
from sbpc.rules.choices import Candidates, Choice, of_stored

Made = Callable[[GraphModule, Assignment], Plan]


def mesh_of_stage(mesh: Mesh, axis: str) -> Mesh:
    """Returns the mesh of one stage: all axes but that of the stages. Raises MeshError if there is no such axis."""
    at = mesh.axis(axis)
    sizes = {name: size for number, (name, size) in enumerate(zip(mesh.axes, mesh.sizes)) if number != at}
    if mesh.sizes[at] < 2:
        raise MeshError(f"axis {axis!r} of stages has {mesh.sizes[at]} rank\n  Give it 2 at least, or plan without stages=.")
    return Mesh(cluster=mesh.cluster, **(sizes or {axis: 1}))


def staged(
    gm: GraphModule, mesh: Mesh, axis: str, count: int, schedule: str, options: dict[str, Any],
    solve: Callable[[GraphModule, Mesh], Plan], made: Made,
) -> StagedPlan:  # fmt: skip
    """Returns the plan of an annotated step with stages along `axis`.

    count: micro-batches. solve: plans the body on the mesh of a stage. made: makes the plan of a chunk there. Raises PlanError if the
    model cannot be cut so.
    """
    inner = mesh_of_stage(mesh, axis)
    loop = loop_of(gm, count, mesh.cluster)
    loop.body.meta[ONCE] = 1 / count
    whole = solve(loop.body, inner)
    places = places_of(loop.body)
    stages = mesh.sizes[mesh.axis(axis)] * CHUNKS[schedule]
    pieces = cut(loop.body, places, cuts_of(loop.body, places, stages, inner))
    chunks = chunks_of(whole, pieces, made)
    plan = StagedPlan(mesh, axis, loop, chunks, schedule, 0.0, options)
    plan.bound = bound_of(plan, whole)
    return plan


def bound_of(plan: StagedPlan, whole: Plan) -> float:
    """Returns seconds that the busiest stage cannot beat: the mean of all stages, as no layouts of the body take less in all."""
    return plan.loop.count * whole.lower_bound / plan.stages


def chunks_of(whole: Plan, pieces: list[Piece], made: Made) -> list[Chunk]:
    """Returns the chunks with the layouts of the plan of the whole body."""
    borders = {name: border(whole, name) for piece in pieces for name in piece.receives.values()}
    chunks = []
    for piece in pieces:
        gm = annotate(piece.graph)
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
        aliases |= {key: layout for key, layout in whole.assignment.aliases.items() if key[0] in choices and key[0] not in received}
        outputs = [left(whole, piece, borders, port) for port in gm.meta["ports"].outputs]
        for node, layout in zip(results(gm), outputs):
            producer, index = value_of(node)  # type: ignore[arg-type]
            aliases.setdefault((producer.name, index), layout)
        plan = made(gm, Assignment(choices, aliases, tuple(outputs)))
        chunks.append(Chunk(plan, piece.arguments, piece.results, piece.receives, piece.sends))
    return chunks


def left(whole: Plan, piece: Piece, borders: Mapping[str, Layout], port: Port) -> Layout:
    """Returns the layout in which a chunk leaves an output."""
    if port in piece.sends:
        return borders[piece.sends[port]]
    if port.kind == GRADIENT:
        return whole.parameters[port.name]
    outputs = [layout for each, layout in whole.left.items() if each.kind == port.kind]
    layout = outputs[piece.results[port]]
    assert layout is not None
    return layout


def border(whole: Plan, name: str) -> Layout:
    """Returns the layout in which a value crosses: of those in which it is made or read the one of the fewest bytes a rank."""
    node = next(node for node in whole.graph.graph.nodes if node.name == name)
    producer, index = value_of(node)
    axes, choices = whole.mesh.axes, whole.assignment.choices
    layouts = [choices[producer.name].output(index, axes)]
    for user in node.users:
        if user.op == "call_function" and user.name in choices:
            layouts += [choices[user.name].input(slot, axes) for slot, used in enumerate(operands(user)) if used is node]
    layouts += [whole.assignment.aliases[producer.name, index]] if (producer.name, index) in whole.assignment.aliases else []
    kept = [layout for layout in dict.fromkeys(layouts) if not layout.partial and may_hold(layout, node, whole.mesh)]
    if not kept:  # a partial sum wherever it is made or read: it is added up on its way
        kept = [layout for each in layouts for layout in added_up(each, node) if may_hold(layout, node, whole.mesh)]
    return min(kept, key=lambda layout: bytes_at(node.meta["val"], layout, whole.mesh))


def added_up(layout: Layout, node: Node) -> Iterator[Layout]:
    """Yields the layouts in which the axes of a partial sum cut one dim, or none."""
    partial = [axis for axis, state in enumerate(layout.states) if isinstance(state, Partial)]
    for state in (*(Split(dim) for dim in range(node.meta["val"].dim())), B):
        yield layout.replace(dict.fromkeys(partial, state))


def may_hold(layout: Layout, node: Node, mesh: Mesh) -> bool:
    """Returns whether a received tensor may come in a layout."""
    candidates = of_stored(tuple(node.meta["val"].shape))
    return candidates.legal(stored(candidates, layout), mesh.sizes)


def stored(candidates: Candidates, layout: Layout) -> Choice:
    """Returns the choice of a stored tensor in a layout."""
    by_state = {signature.outputs[0]: signature for signature in candidates.signatures}
    order = (*layout.order, *(axis for axis in range(len(layout.states)) if axis not in layout.order))
    return Choice(tuple(by_state[state] for state in layout.states), order)


