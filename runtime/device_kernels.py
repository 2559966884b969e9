"""Adapt a program to the device on which it runs: replace the attention ops of CPUs by kernels of that device.

A plan that was made on the meta device, or on a machine without a GPU, holds the attention ops of CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.fx import Graph, GraphModule, Node

from sbpc._compat import OpOverload, has_kernel
from sbpc.errors import PlanError, at_node
from sbpc.graph.operands import named_arguments
from sbpc.rules.strides import laid_out

aten = torch.ops.aten
AHEAD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACK = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
OPERANDS = ("query", "key", "value", "attn_mask")
WHOLE = torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64
REAL = torch.float16, torch.bfloat16, torch.float32, torch.float64
GLOO = {*WHOLE, *REAL, torch.complex64, torch.complex128}  # types of numbers that it sends
NCCL = GLOO | {torch.float8_e4m3fn, torch.float8_e5m2}
Choice = Callable[[list[Tensor], Tensor | None, bool], str]


def placed(gm: GraphModule, where: torch.device) -> GraphModule:
    """Returns the program with its factories and its attention on `where`, whatever device it was captured on.

    Raises PlanError for an op that this device lacks, and for numbers that its collectives cannot send or sum.
    """
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    backend, types = ("gloo", GLOO) if where.type == "cpu" else ("NCCL", NCCL)
    for node in graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": where}
    if where.type != "cpu":
        attend(graph, lambda operands, mask, causal: fastest(operands, mask, causal, where))
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and not has_kernel(node.target, where.type):
            what = f"%{node.name} is an op that is not there on {where.type}: the plan was made for another device"
            raise PlanError(at_node(what, node, f"Plan again, with the model on {where.type} or on the meta device."))
        if "c10d" in str(node.target) and (kind := type_of(node)) not in (None, *types):
            what = f"%{node.name} sends numbers of {kind} to other ranks, which {backend} cannot"
            raise PlanError(at_node(what, node, "Have the model compute it in a type such as torch.int32."))
    result = GraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result


def type_of(node: Node) -> torch.dtype | None:
    """Returns the type of what a collective sends: that of the last value before it of which a plan knows, if any."""
    while node.meta.get("val") is None and node.all_input_nodes:
        if node.target is aten.view.dtype:
            return node.args[1]  # type: ignore[return-value]
        node = node.all_input_nodes[0]
    return getattr(node.meta.get("val"), "dtype", None)


def attend(graph: Graph, choose: Choice) -> None:
    """Replaces the attention ops of CPUs by the kernels of `choose`.

    The kernels agree in their results. If anything but the backward of the same attention reads the logsumexp, such
    as a collective, the formula is taken. Where the backward is a program of its own, which is given the logsumexp,
    it chooses by the same operands.
    """
    back = {node: named(node) for node in graph.nodes if node.target is BACK}
    kernels: dict[Node, str] = {}  # by the node of the logsumexp
    for node in graph.nodes:
        if node.target is AHEAD:
            given = named(node)
            sums = [user for user in node.users if user.args[1] == 1]
            readers = [reader for each in sums for reader in each.users]
            private = all(
                reader.op == "output" or (reader in back and back[reader]["logsumexp"] in sums) for reader in readers
            )
            kernel = kernel_of(given, choose) if private else "formula"
            kernels |= dict.fromkeys(sums, kernel)
            replace_call(node, KERNELS[kernel][0], given, ("query", "key", "value", "attn_mask", "is_causal", "scale"))
    names = ("grad_out", "query", "key", "value", "out", "logsumexp", "attn_mask", "is_causal", "scale")
    for node, given in back.items():
        sums = given["logsumexp"]
        kernel = kernel_of(given, choose) if sums.op == "placeholder" else kernels.get(sums, "formula")
        replace_call(node, KERNELS[kernel][1], given, names)


def kernel_of(given: dict[str, Any], choose: Choice) -> str:
    """Returns the kernel that `choose` names for an attention; the formula where an operand's shape is not known."""
    values: list[Any] = [None if given[name] is None else given[name].meta.get("val") for name in OPERANDS]
    *operands, mask = values
    known = all(isinstance(value, Tensor) for value in operands) and (given["attn_mask"] is None or mask is not None)
    return choose(operands, mask, given["is_causal"]) if known else "formula"


def named(node: Node) -> dict[str, Any]:
    """Returns the arguments of a call by name, defaults included."""
    return named_arguments(node.target, node.args, node.kwargs)  # type: ignore[arg-type]


def replace_call(node: Node, function: Callable[..., Any], given: dict[str, Any], names: Sequence[str]) -> None:
    """Makes a node call a function with the arguments of these names."""
    node.target, node.args, node.kwargs = function, tuple(given[name] for name in names), {}


def fastest(operands: list[Tensor], mask: Tensor | None, causal: bool, where: torch.device) -> str:
    """Returns the kernel of a GPU that torch takes for operands of these shapes and dtypes."""
    query, key, value = (torch.empty(x.shape, dtype=x.dtype, device=where, requires_grad=True) for x in operands)
    bias = None if mask is None else torch.empty(mask.shape, dtype=query.dtype, device=where)
    asked = SDPAParams(query, key, value, bias, 0.0, causal, query.shape[1] != key.shape[1])
    if can_use_flash_attention(asked):
        return "flash"
    return "efficient" if can_use_efficient_attention(asked) else "formula"


def in_eights(*tensors: Tensor) -> list[Tensor]:
    """Returns the tensors with zeros behind their last dim up to a multiple of 8, without which flash attention
    refuses them."""
    return [torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in tensors]


def flash(q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    scale = scale or 1 / math.sqrt(q.shape[-1])
    out, logsumexp, *_ = laid_out(aten._scaled_dot_product_flash_attention.default)(
        *in_eights(q, k, v), 0.0, causal, False, scale=scale
    )
    return out[..., : v.shape[-1]], logsumexp


def flash_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, causal: bool, scale: float | None
) -> Any:
    seed = q.new_empty((), dtype=torch.int64)  # nothing is drawn: dropout is an op of its own in a plan
    ends = None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed
    scale, back = (
        scale or 1 / math.sqrt(q.shape[-1]),
        laid_out(aten._scaled_dot_product_flash_attention_backward.default),
    )
    found = back(*in_eights(g, q, k, v, out), lse, *ends, scale=scale)
    return tuple(each[..., : x.shape[-1]] for each, x in zip(found, (q, k, v)))


def bias_of(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """Returns the mask as the efficient kernel reads it: rows that begin at multiples of 8 elements."""
    if mask is None:
        return None
    rows = torch.nn.functional.pad(mask.to(q.dtype).contiguous(), (0, -k.shape[2] % 8))[..., : k.shape[2]]
    return rows.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    attention = laid_out(aten._scaled_dot_product_efficient_attention.default)
    out, logsumexp, *_ = attention(q, k, v, bias_of(q, k, mask), True, 0.0, causal, scale=scale)
    return out, logsumexp[..., : q.shape[2]]  # without the rows of infinity that its backward needs


def efficient_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Any, causal: bool, scale: float | None
) -> Any:
    seed, bias, asked = q.new_empty((), dtype=torch.int64), bias_of(q, k, mask), [True, True, True, False]
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
    back = laid_out(aten._scaled_dot_product_efficient_attention_backward.default)
    return back(g, q, k, v, bias, out, lse, seed, seed, 0.0, asked, causal, scale=scale)[:3]


def scores_of(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """Returns the masked scores of which attention takes the softmax."""
    scores = q @ k.mT * scale
    scores = scores if mask is None else scores + mask
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return scores


def widened(*tensors: Tensor) -> list[Tensor]:
    """Returns the tensors with 16-bit numbers as float32, in which they are summed."""
    return [x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for x in tensors]


def formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Computes softmax(scale q k^T + mask) v and the logarithm of the sum in the softmax."""
    dtype, r = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = widened(q, k.repeat_interleave(r, 1), v.repeat_interleave(r, 1))
    scores = scores_of(q, k, mask, causal, scale or 1 / math.sqrt(q.shape[-1]))
    return (aten._safe_softmax.default(scores, -1) @ v).to(dtype), scores.logsumexp(-1)


def formula_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Any, causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """Computes the gradients of q, k and v from the output and the logsumexp, as in Dao et al. (2022)."""
    dtype, r, scale = q.dtype, q.shape[1] // k.shape[1], scale or 1 / math.sqrt(q.shape[-1])
    g, q, k, v, out = widened(g, q, k.repeat_interleave(r, 1), v.repeat_interleave(r, 1), out)
    scores = scores_of(q, k, mask, causal, scale)
    p = (scores - lse.unsqueeze(-1)).exp().masked_fill(scores == -math.inf, 0.0)
    ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * scale
    dk, dv = (each.unflatten(1, (-1, r)).sum(2) for each in (ds.mT @ q, p.mT @ g))  # a head of k, v serves r of q
    return (ds @ k).to(dtype), dk.to(dtype), dv.to(dtype)


KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "efficient": (efficient, efficient_back),
    "flash": (flash, flash_back),
    "formula": (formula, formula_back),
}
