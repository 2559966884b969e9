"""Leaves a step the gradient of its loss alone: those of other results are zero, and what they are added to goes on
without them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from sbpc.graph.about import about
from sbpc.graph.loss import number_of_loss
from sbpc.graph.operands import is_late, just_in_time, operands
from sbpc.graph.ports import GRADIENT, TANGENT, outputs, placeholders, results
from sbpc.graph.rewrite import Copies, called, rebuild
from sbpc.rules.sum_types import is_cast_gradient

aten = torch.ops.aten


def one_loss(gm: GraphModule) -> GraphModule:
    """Returns an annotated graph in which the loss has the gradient 1 and no other result has one.

    Before: a tangent for every result that may have a gradient. After: none; that of the loss is a constant. Raises
    PlanError if no result is a loss.
    """
    ports = gm.meta["ports"]
    tangents = {node: port for port, node in placeholders(gm, TANGENT).items()}
    loss = number_of_loss(ports, {port: node.meta["val"] for node, port in tangents.items()})
    zeros = set[Node]()

    def write(copies: Copies, node: Node) -> Node | None:
        if node in tangents:
            number = float(tangents[node].name == str(loss))
            zeros.update(() if number else (node,))
            return constant_tangent(copies, node, number, tangents[node].name)
        if is_view_of(node, zeros):
            zeros.add(node)
        elif (other := other_term(node, zeros)) is not None:
            zeros.update((node,) if other in zeros else ())
            return copies[other]
        return None

    result = rebuild(gm, write)
    result.graph.eliminate_dead_code()
    result.meta["ports"] = replace(ports, inputs=tuple(port for port in ports.inputs if port.kind != TANGENT))
    return ordered(result)


def uncast_gradients(gm: GraphModule) -> GraphModule:
    """Returns the graph with gradients in the types in which they are summed: those of micro-batches and of stages are
    added up before they are cast to the types of their parameters."""
    result = rebuild(gm)
    end, casts = result.graph.output_node(), {node for _, node in outputs(result, GRADIENT) if is_cast_gradient(node)}
    end.args = (tuple(operands(node)[0] if node in casts else node for node in results(result)),)
    result.graph.eliminate_dead_code()
    return result


def constant_tangent(copies: Copies, tangent: Node, number: float, name: str) -> Node:
    """Adds a tensor that holds one number in the place of the tangent of result `name`."""
    value = tangent.meta["val"]
    where = {"dtype": value.dtype, "device": value.device}
    meta = about(tangent) | {"val": value, "phase": "backward"}
    return called(copies.graph, aten.full.default, (list(value.shape), number), where, f"gradient_of_{name}", meta)


def is_view_of(node: Node, zeros: set[Node]) -> bool:
    """Returns whether a node only shows zeros in another shape."""
    match = node.meta.get("match")
    return match is not None and bool(match.view) and bool(node.all_input_nodes) and set(node.all_input_nodes) <= zeros


def other_term(node: Node, zeros: set[Node]) -> Node | None:
    """Returns the other term of a sum with zeros of the same shape and dtype, None if the node is no such sum."""
    if node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2 or node.kwargs:
        return None
    first, second = node.all_input_nodes
    other = second if first in zeros else first if second in zeros else None
    if other is None:
        return None
    here, there = node.meta["val"], other.meta["val"]
    return other if (here.shape, here.dtype) == (there.shape, there.dtype) else None


def ordered(gm: GraphModule) -> GraphModule:
    """Returns the graph with its placeholders first, and what the backward makes of nothing right before it is read."""
    nodes = [*gm.graph.find_nodes(op="placeholder"), *gm.graph.nodes]
    return rebuild(
        gm, order=just_in_time(nodes, {node for node in nodes if is_late(node) and not node.all_input_nodes})
    )
