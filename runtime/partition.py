"""Cut a joint program into its forward and its backward, and find what the forward saves for the backward."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from sbpc._compat import OpOverload, schema_of
from sbpc.graph.operands import ancestors, is_late, is_sum, nodes_in
from sbpc.graph.ports import GRADIENT, INPUT_GRADIENT, TANGENT, placeholders, results
from sbpc.graph.rewrite import Copies

aten = torch.ops.aten
wait = torch.ops._c10d_functional.wait_tensor.default
BACKWARD = (GRADIENT, INPUT_GRADIENT)
Results = Sequence[Node | None]


@dataclass(frozen=True)
class Partition:
    """The programs of forward and backward.

    forward: every placeholder but the tangents -> the results, then the values saved for the backward.
    backward: the saved values, then the tangents -> the gradients. inference: the forward without the saved values.

    No two gradients share memory, nor do a gradient and a saved value: a training loop adds to gradients in place.
    Likewise no result is a placeholder, and no two results are the same tensor object.
    """

    forward: GraphModule
    backward: GraphModule
    inference: GraphModule


def partition(gm: GraphModule) -> Partition:
    """Cuts a local program into its forward and its backward."""
    nodes, late = list(gm.graph.nodes), backward_nodes(gm)
    tangents, early_results, late_results = ends(gm)
    saved = saved_for(gm, late, late_results)
    inputs = [node for node in nodes if node.op == "placeholder" and node not in late]
    body = [node for node in nodes if node not in late]
    forward = extract(gm, inputs, body, early_results, [], saved)
    backward = extract(gm, [*saved, *tangents], [node for node in nodes if node in late], [], late_results)
    return Partition(forward, backward, extract(gm, inputs, body, early_results, []))


def saved_for(gm: GraphModule, late: set[Node], late_results: list[Node | None]) -> list[Node]:
    """Returns what the forward saves for the backward, whose nodes are `late`."""
    used = [n for node in gm.graph.nodes if node in late for n in nodes_in((node.args, node.kwargs))]
    used += [node for node in late_results if node is not None]
    return list(dict.fromkeys(node for node in used if node not in late))


def joint(gm: GraphModule) -> GraphModule:
    """Returns the program of forward and backward: every placeholder, the tangents last -> the results, then the gradients."""
    nodes = list(gm.graph.nodes)
    tangents, early_results, late_results = ends(gm)
    inputs = [node for node in nodes if node.op == "placeholder" and node not in tangents]
    return extract(gm, [*inputs, *tangents], nodes, early_results, late_results)


def ends(gm: GraphModule) -> tuple[list[Node], list[Node | None], list[Node | None]]:
    """Returns the tangents, the results of the forward and those of the backward."""
    tangents = list(placeholders(gm, TANGENT).values())
    by_kind = [(port.kind in BACKWARD, node) for port, node in zip(gm.meta["ports"].outputs, results(gm))]
    early, late = ([node for backward, node in by_kind if backward == which] for which in (False, True))
    return tangents, early, late


def is_scheduled(gm: GraphModule) -> bool:
    """Returns whether the waits of a local program stand apart from their collectives: a schedule has put them where they are to be."""
    nodes = list(gm.graph.nodes)
    return any(node.target is wait and node.all_input_nodes != [before] for before, node in itertools.pairwise(nodes))


def backward_nodes(gm: GraphModule) -> set[Node]:
    """Returns the tangents and the nodes of the backward: those marked `phase: backward`, and all that depend on either.

    Where parts of the batch go all the way one after the other, a boxing that the backward of one and the forward of the next read is
    marked as the first one's: what results of the forward are made of is none of the backward's.
    """
    tangents, early_results, _ = ends(gm)
    late, needed = set(tangents), ancestors(node for node in early_results if node is not None)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        marked = is_late(node) and node.target is not operator.getitem and node not in needed
        if marked or any(used in late for used in node.all_input_nodes):
            late.add(node)
    return late


def late_waits(body: list[Node]) -> list[Node]:
    """Moves each wait, and the views of its result, right before the first node that computes with it.

    Until then the collective runs beside the computation: on a GPU on a stream of its own, with gloo on another thread.
    Collectives still start in the order of `body`, which is the same on all ranks.
    """
    order: list[Node] = []
    waiting: set[Node] = set()

    def emit(node: Node) -> None:
        for used in node.all_input_nodes:
            if used in waiting:
                waiting.remove(used)
                emit(used)
        order.append(node)

    for node in body:
        view = not is_sum(node) and memory_of(node) is not node and any(used in waiting for used in node.all_input_nodes)
        if node.target is wait or view:
            waiting.add(node)
        else:
            emit(node)
    for node in body:
        if node in waiting:
            waiting.remove(node)
            emit(node)
    return order


def separate(gm: GraphModule, places: range, op: OpOverload, root: Callable[[Node], Node]) -> None:
    """Applies `op` to each of the outputs at `places` whose root is a placeholder, or that of an earlier output."""
    end = gm.graph.output_node()
    values = list(results(gm))
    roots = {node for node in gm.graph.nodes if node.op != "call_function"}
    roots |= {root(value) for value in values[: places.start] if value is not None}
    with gm.graph.inserting_before(end):
        for at in places:
            value = values[at]
            if value is None:
                continue
            if root(value) in roots:
                values[at] = gm.graph.call_function(op, (value,))
            roots.add(root(value))
    end.args = (tuple(values),)
    gm.recompile()


def memory_of(node: Node) -> Node:
    """Returns the node in whose memory a value may lie: itself, or what it is a view of."""
    call = node.all_input_nodes[0] if node.target is operator.getitem else node
    if call.op != "call_function" or not isinstance(call.target, OpOverload):  # a function of `sbpc.runtime.device_kernels`
        return node
    if call.target is wait:
        return memory_of(call.all_input_nodes[0])
    for argument, given in zip(schema_of(call.target).arguments, call.args):
        if argument.alias_info is not None and isinstance(given, Node):
            return memory_of(given)
    return node


def extract(
    gm: GraphModule, inputs: list[Node], body: list[Node], early: Results, late: Results, rest: Results = ()
) -> GraphModule:
    """Returns the program that computes from `inputs`, by the calls in `body`, results of the forward, of the backward, and others."""
    copies = Copies()
    for node in inputs:
        copies[node] = copies.given(node.name, node.meta)
    program = copies.extracted(gm, body if is_scheduled(gm) else late_waits(body), [*early, *late, *rest])
    first = len(early)
    separate(program, range(first), aten.alias.default, lambda node: node)
    separate(program, range(first, first + len(late)), aten.clone.default, memory_of)
    return program
