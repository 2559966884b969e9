"""Prepare a rank's program to be run: on its device, with waits where they belong, and with results that share no
memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node

from sbpc._compat import OpOverload, schema_of
from sbpc.graph.operands import is_sum
from sbpc.graph.ports import results
from sbpc.graph.rewrite import Copies
from sbpc.runtime.device_kernels import placed

aten = torch.ops.aten
wait = torch.ops._c10d_functional.wait_tensor.default


def prepared(
    gm: GraphModule, where: torch.device, scheduled: bool, early: int, late: int, left: int | None = None
) -> GraphModule:
    """Returns a program whose first `left` outputs are left, by default all: `early` results of the forward, then
    `late` of the backward.

    No result is a placeholder, and no two are the same tensor object. No two of the backward share memory, nor with
    an input or with anything before them: a training loop adds to gradients in place. scheduled: whether waits stand
    where they are to be.
    """
    copies = Copies()
    for node in gm.graph.find_nodes(op="placeholder"):
        copies.keep(node)
    body = list(gm.graph.nodes)
    program = copies.extracted(gm, body if scheduled else late_waits(body), results(gm)[:left])
    separate(program, range(early), aten.alias.default, lambda node: node)
    separate(program, range(early, early + late), aten.clone.default, memory_of)
    return placed(program, where)


def late_waits(body: Sequence[Node]) -> list[Node]:
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
        view = (
            not is_sum(node) and memory_of(node) is not node and any(used in waiting for used in node.all_input_nodes)
        )
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
    values = results(gm)
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
    # a function of `sbpc.runtime.device_kernels`
    if call.op != "call_function" or not isinstance(call.target, OpOverload):
        return node
    if call.target is wait:
        return memory_of(call.all_input_nodes[0])
    for argument, given in zip(schema_of(call.target).arguments, call.args):
        if argument.alias_info is not None and isinstance(given, Node):
            return memory_of(given)
    return node
