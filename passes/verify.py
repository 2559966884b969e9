"""Checks after every pass that states agree on every edge, shapes agree, and gradients land at home."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch.fx import GraphModule, Node

from sbpc.boxing.steps import steps
from sbpc.errors import VerifyError
from sbpc.graph.about import EXCHANGE
from sbpc.graph.operands import is_sum, operands, outputs_of, value_of
from sbpc.graph.ports import GRADIENT, HOMES, PARAMETER, Port, placeholders, results
from sbpc.mesh.collectives import WIRE, eight_bits
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import P
from sbpc.plans.chunk import Assignment, Chunk
from sbpc.plans.measure import layout_at, sent_by
from sbpc.plans.options import AS_COMPUTED, Options
from sbpc.plans.program_check import REPORT, require, verify_local
from sbpc.plans.rank_programs import wrong_collectives
from sbpc.plans.timeline import kind_of
from sbpc.rules.binding import has_sums
from sbpc.rules.sum_types import dtype_of, ends_sums, narrower, sum_types

ADDED = torch.ops.aten.add.Tensor
MOST_RANKS = 64  # whose programs are checked


Programs = tuple[GraphModule, Callable[[int], GraphModule]]  # a boxed graph, and by rank what is written for it


def verify(chunk: Chunk, programs: Iterable[Programs], options: Options) -> int:
    """Checks all graphs of a chunk, and returns the number of edges checked. Raises VerifyError with the offending
    node.

    programs: those that ranks run. options: of the plan.
    """
    edges = verify_captured(chunk.annotated)
    edges += verify_annotated(chunk.annotated)
    verify_assigned(chunk.annotated, chunk.assignment, chunk.mesh)
    classes = [chunk.shape_class(rank) for rank in range(min(chunk.mesh.ranks, MOST_RANKS))]
    kinds = list(dict.fromkeys(classes))
    for boxed, local_at in programs:
        edges += verify_boxed(boxed, chunk.mesh)
        verify_sent(chunk.annotated, boxed, options)
        if options.reduce != AS_COMPUTED:
            verify_sums(boxed)
        written = [local_at(classes.index(key)) for key in kinds]
        edges += sum(map(verify_local, written))
        verify_order(chunk.mesh, written, [kinds.index(key) for key in classes])
    return edges


def verify_order(mesh: Mesh, programs: list[GraphModule], ranks: list[int]) -> None:
    """Checks that every collective of every program has one wait, and that all ranks of a group start the same ones
    in one order.

    ranks: the number of its program by rank.
    """
    if len(ranks) == mesh.ranks:
        for mistake in wrong_collectives(mesh, programs, ranks):
            raise VerifyError(f"{mistake}\n  {REPORT}")


def verify_captured(gm: GraphModule) -> int:
    """Checks that every value has a shape, every port a placeholder or output, and that fx itself finds the graph
    sound."""
    gm.graph.lint()
    ports, output = gm.meta["ports"], gm.graph.output_node()
    inputs, outputs = len(gm.graph.find_nodes(op="placeholder")), len(results(gm))
    require(inputs == len(ports.inputs), f"{inputs} placeholders, {len(ports.inputs)} ports", output)
    require(outputs == len(ports.outputs), f"{outputs} outputs, {len(ports.outputs)} ports", output)
    edges = 0
    for node in gm.graph.nodes:
        if node.op != "output":
            require("val" in node.meta, "a value without a shape", node)
        edges += len(operands(node))
    shapes = {port: node.meta["val"].shape for port, node in placeholders(gm).items()}
    for port, node in placeholders(gm, PARAMETER).items():
        require(port.name not in ports.masters or dtype_of(node) == torch.float32, "a master of another type", node)
    for port, node in zip(ports.outputs, results(gm)):
        home = HOMES.get(port.kind)
        if home is not None and node is not None:
            same = node.meta["val"].shape == shapes[Port(home, port.name)]
            require(same, f"the {port.kind} of {port.name} has another shape", node)
    return edges


def verify_annotated(gm: GraphModule) -> int:
    """Checks that every node has candidates with one state for each operand and output."""
    edges, seen = 0, set[tuple[int, tuple[int, int]]]()
    for node in gm.graph.nodes:
        if node.op == "output" or node.target is operator.getitem:
            continue
        require("candidates" in node.meta, "a node without candidates", node)
        counts, signatures = (len(operands(node)), outputs_of(node)), node.meta["signatures"]
        if (id(signatures), counts) not in seen:  # equal nodes share theirs
            for signature in signatures:
                states = len(signature.inputs), len(signature.outputs)
                require(states == counts, f"signature {signature} has {states} states for {counts} tensors", node)
            seen.add((id(signatures), counts))
        edges += counts[0] * len(signatures)
    return edges


def verify_assigned(gm: GraphModule, assignment: Assignment, mesh: Mesh) -> None:
    """Checks that every node has a legal choice among its candidates, and that gradients are left in their
    parameter's home."""
    seen = set[tuple[int, int]]()  # equal nodes share their choice
    for node in gm.graph.nodes:
        if "candidates" not in node.meta:
            continue
        require(node.name in assignment.choices, "a node without a choice", node)
        choice, candidates = assignment.choices[node.name], node.meta["candidates"]
        if (id(choice), id(candidates)) in seen:
            continue
        known = all(s in candidates.signatures for s in choice.signatures)
        require(known, f"{choice} is not among the candidates", node)
        require(candidates.legal(choice, mesh.sizes), f"{choice} cuts a factor that may not be cut so", node)
        seen.add((id(choice), id(candidates)))
    homes = {port.name: assignment.choices[node.name].output(0, mesh.axes) for port, node in placeholders(gm).items()}
    ends, outputs = gm.graph.output_node(), gm.meta["ports"].outputs
    require(
        len(assignment.outputs) == len(outputs), f"{len(outputs)} outputs in {len(assignment.outputs)} layouts", ends
    )
    for port, node, layout in zip(outputs, results(gm), assignment.outputs):
        if node is None:
            require(layout is None, f"there is no {port.kind} {port.name}, and it is left in {layout}", ends)
            continue
        require(layout is not None and not layout.partial, f"an output is left in {layout}", node)
        if port.kind == GRADIENT:
            home = homes[port.name]
            require(layout == home, f"the gradient of {port.name} is left in {layout}, its home is {home}", node)


def verify_boxed(gm: GraphModule, mesh: Mesh) -> int:
    """Checks that on every edge the layout that is produced is the one that is read, and that each boxing is one
    legal step."""
    edges = 0
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if "awaits" in node.meta:
            (start,) = operands(node)
            fits = sent_by(start) == node.meta["awaits"] and len(start.users) == 1
            require(fits, "what is waited for is not one collective, or something else reads it before", node)
            edges += 1
            continue
        for slot, operand in enumerate(operands(node)):
            produced, step = layout_at(operand), node.meta.get("step")
            read = (
                step.before
                if step is not None
                else layout_at(node)
                if is_sum(node)
                else node.meta["choice"].input(slot, mesh.axes)
            )
            require(produced == read, f"operand {slot} is {produced}, and is read as {read}", node)
            if step is not None:
                sums = EXCHANGE if step.collective == EXCHANGE else eight_bits(step.collective)
                legal = all(part in steps(part.before, node.meta["val"].dim(), sums) for part in step.parts)
                require(legal, f"{step} is no boxing step", node)
                adds = step.before.partial or step.after.partial
                require(not adds or has_sums(dtype_of(node)), f"{dtype_of(node)} has no sums, and is in P", node)
            edges += 1
    verify_buckets(gm)
    return edges


def verify_sums(gm: GraphModule) -> None:
    """Checks that no gradient is summed in a narrower type than `sum_types` says, over ranks or over micro-batches, and
    that no other partial sum is cast to a narrower type."""
    types = sum_types(gm)
    for node in gm.graph.nodes:
        kind = torch.float32 if is_sum(node) else types.get(node)
        if is_sum(node) or node.target is ADDED or adds_up(node):
            require(
                not narrower(dtype_of(node), kind), f"a gradient is summed in {dtype_of(node)}, not in {kind}", node
            )
        if ends_sums(node) and node not in types:
            require(P not in layout_at(node).states, "a partial sum is cast to a narrower type", node)


def verify_sent(gm: GraphModule, boxed: GraphModule, options: Options) -> None:
    """Checks that nothing but gradients and parameters of float32 is sent in 8 bits, in the types that options name.
    gm: the annotated graph."""
    sent = {node: eight_bits(node.meta["step"].collective) for node in boxed.graph.nodes if "step" in node.meta}
    if not any(sent.values()):
        return
    gradients = {value_of(node)[0].name for node, kind in sum_types(gm).items() if kind == torch.float32}
    known = dict.fromkeys(gradients, options.reduce)
    known |= {node.name: options.gather for node in placeholders(gm, PARAMETER).values()}
    for node, kind in sent.items():
        if kind:
            fits = known.get(node.meta["of"]) == kind and dtype_of(node) == torch.float32
            require(fits, f"what is no gradient or parameter to be sent so is sent in {kind}", node)


def adds_up(node: Node) -> bool:
    """Returns whether a node is a boxing step that takes a partial sum in the type of its numbers."""
    step = node.meta.get("step")
    if step is None or step.collective not in WIRE or EXCHANGE in step.collective:
        return False
    return P in [step.before.states[axis] for axis in step.axes]


def verify_buckets(gm: GraphModule) -> None:
    """Checks that collectives that go in one message are of one kind, are waited for, and follow each other."""
    first: Node | None = None  # of the bucket to which the last call belongs
    seen = set[str]()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        name = node.meta.get("bucket")
        if name is None:
            first = None
            continue
        if first is None or first.name != name:
            require(name == node.name and name not in seen, "a bucket does not begin with its first member", node)
            first = node
            seen.add(name)
        same = kind_of(node) == kind_of(first) and all("awaits" in user.meta for user in node.users)
        require(same, f"it cannot go in one message with %{first.name}", node)
