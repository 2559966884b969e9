"""Writes the products of groups of rows that `transformers` has as ops of its own as torch's `_grouped_mm`, which has a rule.

A mixture of experts of that library calls its own ops in the place of torch's while it is being compiled, in other types
than bfloat16. Torch's op wants rows that are dense and a multiple of 16 bytes long; others are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sbpc._compat import OpOverload
from sbpc.graph.rewrite import Writer, permute

aten = torch.ops.aten


def grouped(write: Writer, rows: Node, matrices: Node, ends: Node) -> Node | None:
    """Writes the product of each group of rows with its matrix."""
    return product(write, rows, matrices, ends) if divides(rows, matrices) else None


def grouped_backward(write: Writer, rows: Node, matrices: Node, ends: Node, gradient: Node) -> tuple[Node, Node] | None:
    """Writes the gradients of the rows and of the matrices."""
    if not divides(rows, matrices):
        return None
    of_rows = product(write, gradient, permute(write, matrices, [0, 2, 1]), ends)
    turned = write.call(aten.permute.default, dense(write, rows), [1, 0])
    return of_rows, write.call(aten._grouped_mm.default, turned, dense(write, gradient), ends)


def product(write: Writer, rows: Node, matrices: Node, ends: Node) -> Node:
    """Writes the op."""
    if not matrices.meta["val"].mT.is_contiguous():
        matrices = dense(write, matrices)
    return write.call(aten._grouped_mm.default, dense(write, rows), matrices, ends)


def dense(write: Writer, x: Node) -> Node:
    """Returns x itself or a contiguous copy."""
    whole = {"memory_format": torch.contiguous_format}
    return x if x.meta["val"].is_contiguous() else write.call(aten.clone.default, x, **whole)


def divides(rows: Node, matrices: Node) -> bool:
    """Returns whether 16 bytes divide a row of the operands, of the result and of their gradients."""
    value = matrices.meta["val"]
    same = rows.meta["val"].dtype == value.dtype
    return same and all(size * value.element_size() % 16 == 0 for size in value.shape[1:])


BY_NAME: Mapping[str, Callable[..., Any]] = {
    "transformers::grouped_mm_fallback": grouped,
    "transformers::grouped_mm_fallback_backward": grouped_backward,
}


def found_in(gm: GraphModule) -> dict[Any, Callable[..., Any]]:
    """Returns the rewrites by op of those that a graph has: the library that defines them may not be there."""
    ops = [node.target for node in gm.graph.nodes if isinstance(node.target, OpOverload)]
    return {op: BY_NAME[op._schema.name] for op in ops if op._schema.name in BY_NAME}
