"""The ops of a program for the device on which it runs: attention as CPUs have it becomes what other devices have.

A plan made on the meta device, or on a machine without a GPU, holds the attention ops of CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.fx import Graph, GraphModule, Node

from sbpc._compat import OpOverload, has_kernel
from sbpc.errors import PlanError, at_node
from sbpc.graph.operands import named_arguments

aten = torch.ops.aten
AHEAD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACK = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Choice = Callable[[list[Tensor], Tensor | None, bool], str]


def placed(gm: GraphModule, where: torch.device) -> GraphModule:
    """The program as it runs on `where`, whatever device it was captured on: its factories, its attention.

    Raises PlanError for an op that is not there.
    """
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": where}
    if where.type != "cpu":
        attend(graph, lambda parts, mask, causal: fastest(parts, mask, causal, where))
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and not has_kernel(node.target, where.type):
            what = f"%{node.name} is an op that is not there on {where.type}: the plan was made for another device"
            raise PlanError(at_node(what, node, f"Plan again, with the model on {where.type} or on the meta device."))
    result = GraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result


def attend(graph: Graph, choose: Choice) -> None:
    """Put the kernels of `choose` in the place of the attention of CPUs.

    They agree in their results but for the logsumexp, which is padded by some; where anything but the backward of the
    same attention reads it, such as a collective, the formula is taken.
    """
    ahead = [node for node in graph.nodes if node.target is AHEAD]
    back = {node: named_arguments(BACK, node.args, node.kwargs) for node in graph.nodes if node.target is BACK}
    kernels: dict[Node, str] = {}
    for node in ahead:
        given = named_arguments(AHEAD, node.args, node.kwargs)
        operands = [given[name] for name in ("query", "key", "value")]
        sums = [user for user in node.users if user.args[1] == 1]
        own = all(back[user]["logsumexp"] in sums if user in back else False for part in sums for user in part.users)
        known = all(isinstance(part.meta.get("val"), Tensor) for part in operands)
        mask = given["attn_mask"]
        value = None if mask is None else mask.meta.get("val")
        chosen = own and known and (mask is None or value is not None)
        kernel = choose([part.meta["val"] for part in operands], value, given["is_causal"]) if chosen else "formula"
        kernels |= dict.fromkeys(sums, kernel)
        rewritten(node, KERNELS[kernel][0], [*operands, mask, given["is_causal"], given["scale"]])
    for node, given in back.items():
        operands = [given[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp")]
        kernel = kernels.get(given["logsumexp"], "formula")
        rewritten(node, KERNELS[kernel][1], [*operands, given["attn_mask"], given["is_causal"], given["scale"]])


def rewritten(node: Node, function: Callable[..., Any], args: list[Any]) -> None:
    """Have a node call something else."""
    node.target, node.args, node.kwargs = function, tuple(args), {}


def fastest(parts: list[Tensor], mask: Tensor | None, causal: bool, where: torch.device) -> str:
    """Which kernel of a GPU takes operands of these looks, as torch has it."""
    query, key, value = (torch.empty(part.shape, dtype=part.dtype, device=where, requires_grad=True) for part in parts)
    bias = None if mask is None else torch.empty(mask.shape, dtype=query.dtype, device=where)
    asked = SDPAParams(query, key, value, bias, 0.0, causal, query.shape[1] != key.shape[1])
    return "flash" if can_use_flash_attention(asked) else "efficient" if can_use_efficient_attention(asked) else "formula"


def flash(q: Tensor, k: Tensor, v: Tensor, mask: None, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    found = aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def flash_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: None, causal: bool, scale: float | None
) -> Any:
    seed = q.new_empty((), dtype=torch.int64)  # nothing is drawn: dropout is an op of its own in a plan
    ends = None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed
    return aten._scaled_dot_product_flash_attention_backward.default(g, q, k, v, out, lse, *ends, scale=scale)


def bias_of(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as the efficient kernel reads it: rows that begin at multiples of 8 elements."""
    if mask is None:
        return None
    rows = torch.nn.functional.pad(mask.to(q.dtype).contiguous(), (0, -k.shape[2] % 8))[..., : k.shape[2]]
    return rows.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    bias = bias_of(q, k, mask)
    found = aten._scaled_dot_product_efficient_attention.default(q, k, v, bias, True, 0.0, causal, scale=scale)
    return found[0], found[1]


def efficient_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Any, causal: bool, scale: float | None
) -> Any:
    seed, bias, asked = q.new_empty((), dtype=torch.int64), bias_of(q, k, mask), [True, True, True, False]
    back = aten._scaled_dot_product_efficient_attention_backward.default
    return back(g, q, k, v, bias, out, lse, seed, seed, 0.0, asked, causal, scale=scale)[:3]


def scores_of(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    found = q @ k.mT * scale
    found = found if mask is None else found + mask
    if causal:
        found = found.masked_fill(torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return found


def widened(*parts: Tensor) -> list[Tensor]:
    """16-bit numbers as float32, in which they are summed."""
    return [part.float() if part.dtype in (torch.float16, torch.bfloat16) else part for part in parts]


def formula(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + mask) v, and the logarithm of the sum in the softmax."""
    dtype, r = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = widened(q, k.repeat_interleave(r, 1), v.repeat_interleave(r, 1))
    scores = scores_of(q, k, mask, causal, scale or 1 / math.sqrt(q.shape[-1]))
    return (aten._safe_softmax.default(scores, -1) @ v).to(dtype), scores.logsumexp(-1)


def formula_back(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Any, causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """The gradients of q, k and v from the output and the logsumexp, as Dao et al. (2022) have it."""
    dtype, r, scale = q.dtype, q.shape[1] // k.shape[1], scale or 1 / math.sqrt(q.shape[-1])
    g, q, k, v, out = widened(g, q, k.repeat_interleave(r, 1), v.repeat_interleave(r, 1), out)
    scores = scores_of(q, k, mask, causal, scale)
    p = (scores - lse.unsqueeze(-1)).exp().masked_fill(scores == -math.inf, 0.0)
    ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * scale
    dk, dv = (part.unflatten(1, (-1, r)).sum(2) for part in (ds.mT @ q, p.mT @ g))
    return (ds @ k).to(dtype), dk.to(dtype), dv.to(dtype)


KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "efficient": (efficient, efficient_back),
    "flash": (flash, flash_back),
    "formula": (formula, formula_back),
}
