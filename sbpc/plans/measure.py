"""Measures a boxed graph: gathers its kernels and its transfers, and adds up what they cost the busiest rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from sbpc.boxing.steps import Step, step_cost
from sbpc.graph.about import is_recomputed
from sbpc.graph.expert_rows import ENDS, MESSAGE, SCANS
from sbpc.graph.operands import operands, value_of
from sbpc.mesh.collectives import COUNTS, DISPATCH, WIRE
from sbpc.mesh.layout import Layout, broadcast
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Split
from sbpc.plans.cost import Kernel, Transfer, kernel_work
from sbpc.rules.binding import flat_outputs
from sbpc.rules.moved_rows import asks


def kernels_and_transfers(
    nodes: Iterable[Node], mesh: Mesh
) -> tuple[Counter[Kernel], Counter[Kernel], Counter[Transfer]]:
    """Returns the kernels of some nodes of a boxed graph, those of them that compute a value again, and the
    transfers."""
    calls: dict[Any, list[Node]] = {}
    transfers: Counter[Transfer] = Counter()
    for node in nodes:
        if "step" in node.meta:
            transfers[transfer_of(node, mesh)] += 1
        elif "choice" in node.meta and node.op == "call_function":
            calls.setdefault(kernel_key(node), []).append(node)
            transfers.update(filter(None, (dispatch_of(node, mesh), counts_of(node, mesh))))
    kernels: Counter[Kernel] = Counter()
    again: Counter[Kernel] = Counter()
    for alike in calls.values():
        kernel = kernel_of(alike[0], mesh)
        kernels[kernel] += len(alike)
        again[kernel] += sum(map(is_recomputed, alike))
    return kernels, again, transfers


def kernel_key(node: Node) -> Any:
    """Returns what is equal for calls of one kernel, as far as that is cheap to tell: their match knows all shapes,
    and their choice the layouts in which they read and leave tensors."""
    match = node.meta.get("match")
    return node if match is None or "dims" in node.meta else (id(match), id(node.meta["choice"]))


def kernel_of(node: Node, mesh: Mesh) -> Kernel:
    """Returns the kernel of a call, in the layouts that its choice gives."""
    match, choice, symbolic, times = (
        node.meta.get("match"),
        node.meta["choice"],
        "dims" in node.meta,
        mesh.routing.expected,
    )
    read, sbp = operands(node), node.meta["sbp"]
    values = [*(operand.meta["val"] for operand in read), *flat_outputs(node.meta["val"])]
    layouts = [*map(layout_at, read), *(sbp if isinstance(sbp, tuple) else (sbp,))]
    shards = [(v, layout) for v, layout in zip(values, layouts) if isinstance(v, torch.Tensor)]
    tensors = tuple((v.element_size(), *layout.busiest(v.shape, mesh.sizes, times)) for v, layout in shards)
    dims: tuple[tuple[Any, ...], ...] = ()
    if symbolic:
        each = [*map(dims_at, read), *node.meta["dims"]]
        named = [symbols for symbols, v in zip(each, values) if isinstance(v, torch.Tensor)]
        dims = tuple(layout.busiest(symbols, mesh.sizes, times)[0] for symbols, (_, layout) in zip(named, shards))
    if match is None:  # one flop per element of the first output
        first = values[len(read)]
        shape = tuple(first.shape) if isinstance(first, torch.Tensor) else (0,)
        factors = tuple((str(dim), size, ()) for dim, size in enumerate(shape))
        dims = (node.meta["dims"][0], *dims) if symbolic else ()
        return Kernel("", factors, tensors, False, lambda local: math.prod(local.values()), dims)
    factors = tuple((factor, *choice.busiest(factor, size, mesh.sizes, times)) for factor, size in match.sizes.items())
    if symbolic:
        sizes = ((factor, node.meta["factors"][factor]) for factor in match.sizes)
        dims = (tuple(choice.busiest(*each, mesh.sizes, times)[0] for each in sizes), *dims)
    if choice.sharing and match.op in MESSAGE:
        (itemsize, *about), *rest = tensors[1:]
        tensors = (tensors[0], ((1 + SCANS) * itemsize, *about), *rest)
    alone = float(match.flops(match.sizes)) if choice.sharing else None
    return Kernel(str(match.op), factors, tensors, match.view, match.flops, dims, match.shape, alone)


def sum_kernel(node: Node) -> Kernel:
    """Returns the kernel that adds a value, in its layout, to a sum of others."""
    value, layout, dims = node.meta["val"], layout_at(node), dims_at(node)
    cuts = tuple(layout.cuts.get(dim, ()) for dim in range(value.dim()))
    factors = tuple((str(dim), size, each) for dim, (size, each) in enumerate(zip(value.shape, cuts)))
    tensor = value.element_size(), tuple(value.shape), cuts
    return Kernel(
        "add", factors, (tensor,) * 3, False, lambda local: math.prod(local.values()), (dims,) * 4 if dims else ()
    )


def dims_at(node: Node) -> tuple[Any, ...]:
    """Returns the symbolic dims of the value that a node stands for; none if the graph has none."""
    while "step" in node.meta:
        (node,) = operands(node)
    producer, index = value_of(node)
    return producer.meta["dims"][index] if "dims" in producer.meta else ()


def lacks_rule(node: Node) -> bool:
    """Returns whether the node is a call that every rank does whole, for want of a rule."""
    return node.op == "call_function" and "candidates" in node.meta and "match" not in node.meta


def replicated(boxed: GraphModule, mesh: Mesh) -> tuple[str, ...]:
    """Returns a line for every op without a rule: what it costs that every rank computes all of it and reads all
    operands."""
    calls: dict[str, list[Node]] = {}
    for node in boxed.graph.nodes:
        if lacks_rule(node):
            calls.setdefault(str(node.target), []).append(node)
    return tuple(replicated_line(op, nodes, mesh) for op, nodes in calls.items())


def replicated_line(op: str, nodes: Sequence[Node], mesh: Mesh) -> str:
    """Returns the line for the calls of one op. A boxing that several of them read is counted once."""
    compute, *_ = compute_totals(Counter(kernel_of(node, mesh) for node in nodes), mesh)
    values = [value for node in nodes for value in flat_outputs(node.meta["val"]) if isinstance(value, torch.Tensor)]
    size = sum(value.numel() * value.element_size() for value in values)
    steps: dict[Node, None] = {}
    for node in nodes:
        for operand in operands(node):
            while "step" in operand.meta:
                steps[operand] = None
                operand = operands(operand)[0]
    comm, sent = comm_totals(Counter(transfer_of(step, mesh) for step in steps), mesh)
    where = nodes[0].meta.get("module") or "the model"
    which = f"%{nodes[0].name} in {where}" + (f" and {len(nodes) - 1} more calls" if len(nodes) > 1 else "")
    costs = (
        f"{size:,} bytes of results, {compute:.3g} s; to gather its operands {sum(sent.values()):,.0f} bytes, "
        f"{comm:.3g} s"
    )
    return f"no rule for {op}, so every rank computes all of it ({which}): {costs}. `sbpc probe` looks for a rule"


def transfer_of(node: Node, mesh: Mesh) -> Transfer:
    """Returns what a boxing step moves on the busiest rank."""
    value, sized = node.meta["val"], partial(layout_at(node).busiest, sizes=mesh.sizes, times=mesh.routing.expected)
    dims = dims_at(node)
    return Transfer(node.meta["step"], sized(value.shape)[0], value.element_size(), dims and sized(dims)[0])


def dispatch_of(node: Node, mesh: Mesh) -> Transfer | None:
    """Returns what a call sends to the ranks that share out rows, None for any other call."""
    if (step := sent_by(node)) is None:
        return None
    target: Any = node.target
    message = [*operands(node), node][MESSAGE[target]]
    sized = partial(layout_at(message).busiest, sizes=mesh.sizes, times=mesh.routing.expected)
    return Transfer(
        step, sized(message.meta["val"].shape)[0], message.meta["val"].element_size(), sized(dims_at(message))[0]
    )


def counts_of(node: Node, mesh: Mesh) -> Transfer | None:
    """Returns by what ranks that have each sorted their own rows learn before where the groups of each one's end, None
    for a call that sends none, or reads what another one has learnt."""
    choice, match = node.meta["choice"], node.meta.get("match")
    if match is None or not choice.apart or not asks(match):
        return None
    whole, ends, axes = broadcast(mesh.axes), operands(node)[ENDS].meta["val"], choice.sharing
    step = Step(COUNTS, axes, whole.replace(dict.fromkeys(axes, Split(0))), whole)
    every = len(ends) * sympy.Mul(*(sympy.Symbol(mesh.axes[axis], positive=True) for axis in axes))
    return Transfer(step, (len(ends) * math.prod(mesh.sizes[axis] for axis in axes),), ends.element_size(), (every,))


def transfers_of(node: Node, mesh: Mesh) -> list[Transfer]:
    """Returns what a boxing step, or a call that sends rows to the ranks of their groups, sends; none for others."""
    if "choice" in node.meta and node.op == "call_function":
        return [sent for sent in (counts_of(node, mesh), dispatch_of(node, mesh)) if sent is not None]
    return [transfer_of(node, mesh)] if "step" in node.meta and node.meta["step"].collective in WIRE else []


def sent_by(node: Node) -> Step | None:
    """Returns what a boxing step, or a call that sends rows to the ranks of their groups, sends; None for others."""
    if "choice" in node.meta and node.op == "call_function":
        axes, values = node.meta["choice"].sharing, [*operands(node), node]
        return Step(DISPATCH, axes, layout_at(values[0]), node.meta["sbp"]) if axes and node.target in MESSAGE else None
    step: Step | None = node.meta.get("step")
    return step


def layout_at(node: Node) -> Layout:
    """Returns the layout of the value that a node stands for."""
    producer, index = value_of(node)
    sbp = producer.meta["sbp"]
    return sbp[index] if isinstance(sbp, tuple) else sbp


def compute_totals(kernels: Mapping[Kernel, int], mesh: Mesh) -> tuple[float, float, float]:
    """Returns seconds of computing, flops of a rank, and flops of one device doing it all."""
    seconds = flops = one_device = 0.0
    for kernel, count in kernels.items():
        local, *about = kernel_work(kernel, mesh.sizes)
        whole = kernel_work(kernel, (1,) * len(mesh.sizes))[0] if kernel.alone is None else kernel.alone
        flops, one_device = flops + count * local, one_device + count * whole
        if not kernel.free:
            seconds += count * float(mesh.cluster.kernel_seconds(kernel.op, local, *about))
    return seconds, flops, one_device


def comm_totals(transfers: Mapping[Transfer, int], mesh: Mesh) -> tuple[float, dict[str, float]]:
    """Returns seconds of communicating, and by axis the bytes that the busiest rank sends."""
    seconds, sent = 0.0, dict.fromkeys(mesh.axes, 0.0)
    for transfer, count in transfers.items():
        step = transfer.step
        taken, each = step_cost(step, transfer.shape, transfer.itemsize, mesh)
        key = mesh.key(step.axes)
        sent[key] = sent.get(key, 0.0) + count * each
        seconds += count * taken
    return seconds, sent
