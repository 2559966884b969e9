"""Cut a joint program into its forward and its backward, with what the one saves for the other."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from sbpc._compat import OpOverload, schema_of
from sbpc.graph.operands import nodes_in
from sbpc.graph.ports import GRADIENT, INPUT_GRADIENT, TANGENT, placeholders, results
from sbpc.graph.rewrite import copied

aten = torch.ops.aten
wait = torch.ops._c10d_functional.wait_tensor.default
BACKWARD = (GRADIENT, INPUT_GRADIENT)


@dataclass(frozen=True)
class Partition:
    """forward: every placeholder but the tangents -> the results, then `saved` more values. backward: these, then the
    tangents -> the gradients. inference: as forward, without the saved values.

    No two gradients share memory, nor do a gradient and a saved value: a training loop adds to gradients in place.
    Likewise no differentiable result is a placeholder, or twice the same tensor.
    """

    forward: GraphModule
    backward: GraphModule
    inference: GraphModule


def partition(gm: GraphModule) -> Partition:
    """The two halves of a local program; a node of the backward is one marked `phase: backward` or fed by one."""
    ports = gm.meta["ports"]
    nodes = list(gm.graph.nodes)
    tangents = [node for port, node in placeholders(gm).items() if port.kind == TANGENT]
    late = set(tangents)
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        inputs = node.all_input_nodes
        follows = any(used in late for used in inputs)
        own = node.meta.get("phase") == "backward" and node.target is not operator.getitem
        if follows or own:
            late.add(node)
    pairs = list(zip(ports.outputs, results(gm)))
    early_results = [node for port, node in pairs if port.kind not in BACKWARD]
    late_results = [node for port, node in pairs if port.kind in BACKWARD]
    used = [n for node in nodes if node in late for n in nodes_in((node.args, node.kwargs))]
    used += [node for node in late_results if node is not None]
    saved = list(dict.fromkeys(node for node in used if node not in late))
    first = [node for node in nodes if node.op == "placeholder" and node not in late]
    body = [node for node in nodes if node not in late]
    forward = extract(gm, first, body, [*early_results, *saved])
    inference = extract(gm, first, body, early_results)
    backward = extract(gm, [*saved, *tangents], [node for node in nodes if node in late], late_results)
    apart(forward, range(len(early_results)), aten.alias.default, lambda node: node)
    apart(inference, range(len(early_results)), aten.alias.default, lambda node: node)
    apart(backward, range(len(late_results)), aten.clone.default, memory_of)
    return Partition(forward, backward, inference)


def late_waits(body: list[Node]) -> list[Node]:
    """The nodes with each wait, and the views of what it gives, right before the first that computes with it.

    Until then the collective runs beside the computation: on a GPU on a stream of its own, with gloo on another thread.
    Collectives are started in the order in which they were, on all ranks alike.
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
        view = memory_of(node) is not node and any(used in waiting for used in node.all_input_nodes)
        if node.target is wait or view:
            waiting.add(node)
        else:
            emit(node)
    for node in body:
        if node in waiting:
            waiting.remove(node)
            emit(node)
    return order


def apart(gm: GraphModule, places: Iterable[int], op: OpOverload, root: Callable[[Node], Node]) -> None:
    """Put `op` on each output at `places` whose root is a placeholder, or that of an earlier output."""
    end = gm.graph.output_node()
    values = list(results(gm))
    seen = [node for node in gm.graph.nodes if node.op != "call_function"]
    with gm.graph.inserting_before(end):
        for at in places:
            value = values[at]
            if value is None:
                continue
            if root(value) in seen:
                values[at] = gm.graph.call_function(op, (value,))
            seen.append(root(value))
    end.args = (tuple(values),)
    gm.recompile()


def memory_of(node: Node) -> Node:
    """The node whose memory a value may lie in: itself, or what it is a view of."""
    call = node.all_input_nodes[0] if node.target is operator.getitem else node
    if call.op != "call_function" or not isinstance(call.target, OpOverload):  # a function of `sbpc.runtime.device_kernels`
        return node
    if call.target is wait:
        return memory_of(call.all_input_nodes[0])
    for argument, given in zip(schema_of(call.target).arguments, call.args):
        if argument.alias_info is not None and isinstance(given, Node):
            return memory_of(given)
    return node


def extract(gm: GraphModule, inputs: list[Node], body: list[Node], outputs: list[Node | None]) -> GraphModule:
    """The part of a program that computes `outputs` from `inputs` by the calls in `body`."""
    graph = Graph()
    made: dict[Node, Node] = {}
    for node in inputs:
        made[node] = graph.placeholder(node.name)
        made[node].meta = node.meta
    for node in late_waits(body):
        if node.op not in ("placeholder", "output") and node not in made:
            made[node] = copied(graph, node, lambda n: made[n])
    graph.output(tuple(None if node is None else made[node] for node in outputs))
    graph.eliminate_dead_code()
    return GraphModule(gm, graph)
