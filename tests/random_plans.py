"""Random legal plans and loops: a signature drawn for every node on every axis. They find wrong rules and wrong boxings."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch.fx import GraphModule, Node

from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, INPUT_GRADIENT, MUTATION, PARAMETER, placeholders, results
from sbpc.mesh.layout import broadcast
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish
from sbpc.mesh.states import B, P, State, is_ordered
from sbpc.passes.assign.wishes import output_wishes, placeholder_wishes
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.recompute import blocks_of, recompute
from sbpc.passes.pipeline import Stages, make_chunk, make_plan
from sbpc.passes.stages.balance import cuts_of, places_of
from sbpc.passes.stages.cut import cut
from sbpc.passes.stages.plan_stages import chunks_of
from sbpc.plans.chunk import Assignment
from sbpc.plans.options import FULL, NONE, SELECTIVE, Options
from sbpc.plans.plan import Plan
from sbpc.rules.choices import Choice
from sbpc.rules.sum_types import begins_sums
from tests.boxings import layouts


def random_plan(plan: Plan, seed: int) -> Plan:
    """Another plan of the same graph: choices, orders of cutting and alias layouts drawn at random."""
    gm, mesh, options = plan.graph, plan.mesh, plan.options
    wishes = placeholder_wishes(gm, mesh, None, None, False)
    assert not output_wishes(gm, mesh, None, False)
    return make_plan(gm, mesh, draw(gm, mesh, wishes, random.Random(seed)), 0.0, options, Stages())


def random_loop(plan: Plan, gm: GraphModule, generator: random.Random) -> Plan:
    """Another plan of the same loop with the same stages: layouts, and what is boxed once and computed again, drawn at random.

    gm: the step, as captured and annotated.
    """
    options = Options(optimizer=None, objective="serial", eval=plan.options.eval)
    forms = {name: generator.choice((NONE, SELECTIVE, FULL)) for name in dict.fromkeys(blocks_of(gm).values())}
    loop, inner = loop_of(recompute(gm, forms), plan.count), plan.inner
    assignment = draw(loop.body, inner, placeholder_wishes(loop.body, inner, None, None, False), generator)
    whole = make_plan(loop.body, inner, assignment, 0.0, options, Stages())
    places = places_of(whole.graph)
    pieces = cut(whole.graph, places, cuts_of(whole.graph, places, len(plan.chunks), inner), loop.joined)
    chunks = chunks_of(whole, pieces, partial(make_chunk, inner, Stages()))
    ports = [port for each in (loop.body.meta["ports"].inputs, loop.body.meta["ports"].outputs) for port in each]
    in_loop = {port for port in ports if port.kind in (PARAMETER, GRADIENT) and generator.random() < 0.5}
    asked = replace(options, stages=plan.axis, schedule=plan.schedule, microbatches=plan.count)
    return Plan(plan.mesh, chunks, asked, 0.0, loop, frozenset(in_loop))


def draw(gm: GraphModule, mesh: Mesh, wishes: Mapping[str, Wish], generator: random.Random) -> Assignment:
    """A random legal assignment that keeps the wishes."""
    nodes = [node for node in gm.graph.nodes if "candidates" in node.meta]
    known: dict[Choice, Choice] = {}  # equal ones are one object, as in a plan of the solver
    drawn: dict[str, Choice] = {}
    axes = generator.choice(mesh.runs()) if generator.random() < 0.5 else ()
    shared = rows_shared(nodes, mesh, axes) if axes else {}
    if shared and generator.random() < 0.5:
        shared = rows_shared(nodes, mesh, axes, apart=True) or shared
    for node in nodes:
        sums: tuple[State, ...] = ()
        if begins_sums(node):  # what it reads is not summed before
            producer, index = value_of(operands(node)[0])
            sums = drawn[producer.name].output(index, mesh.axes).states
        if node in shared:
            drawn[node.name] = shared[node]
            continue
        drawn[node.name] = draw_choice(node, mesh, wishes.get(node.name), generator, sums)
    choices = {name: known.setdefault(choice, choice) for name, choice in drawn.items()}
    homes = {(port.kind, port.name): choices[node.name].output(0, mesh.axes) for port, node in placeholders(gm).items()}
    kinds = {GRADIENT: PARAMETER, INPUT_GRADIENT: INPUT, MUTATION: BUFFER}
    outputs = tuple(
        None if node is None else homes.get((kinds.get(port.kind), port.name), broadcast(mesh.axes))
        for port, node in zip(gm.meta["ports"].outputs, results(gm))
    )
    read: dict[tuple[Node, int], list[Node]] = {}
    for node in nodes:
        for operand in operands(node):
            read.setdefault(value_of(operand), []).append(node)
    for node in results(gm):
        if node is not None:
            read.setdefault(value_of(node), [])
    aliases = {}
    for producer, index in read:
        source = choices[producer.name].output(index, mesh.axes)
        value = producer.meta["val"]
        dims = (value[index] if isinstance(value, (tuple, list)) else value).dim()
        plain = [layout for layout in layouts(dims, mesh.axes, partial=False)]
        alias = generator.choice([source, generator.choice(plain)])
        if any(map(is_ordered, source.states)):
            alias = source
        aliases[producer.name, index] = source if any(map(begins_sums, read[producer, index])) else alias
    return Assignment(choices, aliases, outputs)


def rows_shared(nodes: list[Node], mesh: Mesh, axes: tuple[int, ...], apart: bool = False) -> dict[Node, Choice]:
    """The choices in which these axes share out rows by their groups, and the others have all; none if one is not legal.

    apart: each rank sorts its own rows, where there are signatures for that."""
    found, ranks = {}, range(len(mesh.axes))
    for node in nodes:
        whole, *others = node.meta["candidates"].signatures
        among = sorted((s for s in others if s.ragged is not None), key=lambda s: (s.own is not None) != apart)
        own = [s for s in others if s.ordered] if apart else []
        for each in (among or own)[:1]:
            found[node] = Choice(tuple(each if axis in axes else whole for axis in ranks), tuple(ranks))
    legal = all(node.meta["candidates"].legal(choice, mesh.sizes) for node, choice in found.items())
    made = all(  # rows that come in from outside are not shared out, and no boxing leads to another order
        producer in found and found[producer].output(index, mesh.axes) == read
        for node, choice in found.items()
        for slot, (producer, index) in enumerate(map(value_of, operands(node)))
        if any(map(is_ordered, (read := choice.input(slot, mesh.axes)).states))
    )
    return found if legal and made else {}


def draw_choice(
    node: Node, mesh: Mesh, wish: Wish | None, generator: random.Random, sums: tuple[State, ...] = ()
) -> Choice:
    """One legal choice: a signature per axis, uniformly, and an order of axes; drawn again until it is legal.

    sums: by axis the state of an operand that is read as a partial sum where it is one.
    """
    candidates = node.meta["candidates"]
    every = [s for s in candidates.signatures if not s.ordered]
    free = [[s for s in every if (s.inputs == (P,)) == (state == P)] for state in sums]
    for _ in range(200):
        signatures = tuple(map(generator.choice, free or [every] * len(mesh.axes)))
        order = tuple(generator.sample(range(len(mesh.axes)), len(mesh.axes)))
        choice = Choice(signatures, order)
        if candidates.legal(choice, mesh.sizes) and (wish is None or wish.admits(choice.output(0, mesh.axes))):
            return choice
    first = tuple(each[0] for each in free or [every] * len(mesh.axes))
    return Choice(first, tuple(range(len(mesh.axes))))


def share_split(plans: list[Plan]) -> float:
    """The share of values that are not B on every axis."""
    layouts_ = [layout for plan in plans for layout in plan.layouts.values()]
    return sum(any(state != B for state in layout.states) for layout in layouts_) / len(layouts_)


def never_drawn(plans: list[Plan]) -> Counter[str]:
    """Signatures that no plan uses, by op."""
    missing: Counter[str] = Counter()
    used: dict[str, set[str]] = {}
    for plan in plans:
        for name, choice in plan.assignment.choices.items():
            used.setdefault(name, set()).update(map(str, choice.signatures))
    offered: dict[tuple[str, str], bool] = {}
    for node in plans[0].graph.graph.nodes:
        for signature in node.meta.get("signatures", ()):
            key = (str(node.target) if node.op == "call_function" else node.op, str(signature))
            offered[key] = offered.get(key, False) or str(signature) in used[node.name]
    for (op, _), drawn in offered.items():
        if not drawn:
            missing[op] += 1
    return missing


def elsewhere(plan: Plan, mesh: Mesh) -> Plan:
    """The plan of one program in the same layouts on another mesh with the same axes."""
    return replace(plan, mesh=mesh, chunks=[replace(plan.chunk, mesh=mesh)])
