"""The busy seconds and bytes of the busiest stage of a loop over micro-batches as formulas, with their number as the symbol `m`.

The batch is `batch`, unless `dynamic=` of `sbpc.plan` names it: an input of the body that is a part of an argument has a dim batch / m.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import sympy
from torch.fx import GraphModule, Node

from sbpc.errors import SbpcError
from sbpc.graph.operands import value_of
from sbpc.graph.ports import INPUT, placeholders
from sbpc.mesh.mesh import Mesh
from sbpc.plans.cost import Cost, Kernel, Transfer
from sbpc.plans.measure import kernel_of, transfer_of
from sbpc.plans.plan import Plan
from sbpc.plans.staged.loop import Loop
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, calls_in, parts_of
from sbpc.plans.symbolic_sizes import name_dims, symbol

M, BATCH = "m", "batch"


def name_parts(gm: GraphModule, loop: Loop, mesh: Mesh, dynamic: Mapping[str, Any]) -> dict[str, int]:
    """Makes the dims of a body symbolic, and returns the numbers of symbols; none where a micro-batch or their number is 1.

    dynamic: that of `sbpc.plan` for the whole step. Dims of one element are not told apart, so such a body keeps its numbers.
    """
    cut = {name: source.dim for name, source in loop.inputs.items() if source.kind == "argument" and source.dim is not None}
    nodes = {port.name: node for port, node in placeholders(gm).items() if port.kind == INPUT and port.name in cut}
    sizes = [node.meta["val"].shape[cut[name]] for name, node in nodes.items()]
    if loop.count == 1 or min(sizes, default=1) == 1:
        return {}
    given: dict[str, Any] = {**dynamic, M: loop.count}
    for name, node in nodes.items():
        shape, dim = node.meta["val"].shape, cut[name]
        dims = list(dynamic[node.name]) if node.name in dynamic else [None] * len(shape)
        if dims[dim] is None:
            dims[dim] = BATCH
            given[BATCH] = shape[dim] * loop.count
        dims[dim] = f"({dims[dim]})/{M}"
        given[node.name] = dims
    name_dims(gm, mesh, given)
    numbers: dict[str, int] = gm.meta["dynamic"]
    return numbers


def check_names(gm: GraphModule, mesh: Mesh, dynamic: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `dynamic=` of a loop as JSON values. Raises SbpcError for what does not fit the whole step."""
    checked = name_dims(gm, mesh, dynamic)
    if M in gm.meta["dynamic"]:
        raise SbpcError(f"dynamic: {M!r} is the number of micro-batches\n  Call the dim otherwise.")
    return checked


def formulas(plans: Iterable[Plan], numbers: Mapping[str, int], in_loop: frozenset[Any], count: int, like: Any) -> Cost:
    """Returns the kernels and transfers of a stage's chunks, with those in the loop m times each.

    plans: of the chunks, their graphs with symbolic dims if `numbers` has any. like: the `StagedCost`.
    """
    m = symbol(M)
    kernels, transfers = dict[Kernel, Any](), dict[Transfer, Any]()
    mesh: Mesh | None = None
    for plan in plans:
        boxed, mesh = plan.unscheduled, plan.mesh
        parts = parts_of(boxed, in_loop)
        for part in PARTS:
            times = sympy.Integer(1) if part in (BEFORE, AFTER) else m
            for node in calls_in(parts, part):
                if "step" in node.meta:
                    moved = transfer_of(node)
                    transfers[moved] = transfers.get(moved, 0) + times
                elif "choice" in node.meta and node.op == "call_function":
                    kernel = kernel_of(node)
                    kernels[kernel] = kernels.get(kernel, 0) + times
    assert mesh is not None, "a stage has a chunk"
    sent = {axis: size for axis, size in like.bytes_sent.items() if axis in (*mesh.axes, *map(mesh.key, mesh.runs()))}
    known = {M: count, **numbers}
    return Cost(
        mesh, like.compute_seconds, like.comm_seconds, like.flops, like.flops, sent, dict(like.memory), like.lower_bound,
        tuple(kernels.items()), tuple(transfers.items()), known, "serial",
    )  # fmt: skip


def with_dims(plan: Plan, source: GraphModule) -> Plan:
    """Returns a chunk's plan, boxed anew, whose graph has the symbolic dims that values of the same names have in `source`."""
    known = {node.name: node for node in source.graph.nodes}
    for node in plan.graph.graph.nodes:
        if node.op != "output" and node.name in known:
            take_dims(node, known[node.name])
    return replace(plan, programs={})


def take_dims(node: Node, source: Node) -> None:
    """Gives a node the dims of its source; a value that a chunk receives may be one of several results."""
    producer, index = value_of(source)
    if "dims" not in producer.meta:
        return
    if source is not producer and node.op == "placeholder":
        node.meta["dims"] = (producer.meta["dims"][index],)
        return
    node.meta |= {key: source.meta[key] for key in ("dims", "factors", "parts") if key in source.meta}
