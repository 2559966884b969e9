"""Rewrites a captured graph into a canonical one: no second names for a value, one op per idea, no means.

A mean of local means is wrong where ranks hold different counts, so a mean becomes a sum and a global divisor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sbpc._compat import OpOverload
from sbpc.graph.rewrite import Writer, permute, rewrite, view
from sbpc.passes.canonicalize.bags import BAGS
from sbpc.passes.canonicalize.foreach_ops import LISTS

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers for the reduction of a loss


def normalize(gm: GraphModule) -> GraphModule:
    """Returns the canonical graph of `gm`, which stays as it was.

    Before: as captured. After: no op of `REWRITES` is left but where its row says so; no node without a use; meta and
    ports as before, `val` new for the new nodes.
    """
    # the library that defines the ops in BY_NAME may not be there
    found = [op for op in dict.fromkeys(node.target for node in gm.graph.nodes) if isinstance(op, OpOverload)]
    return rewrite(gm, REWRITES | {op: BY_NAME[op._schema.name] for op in found if op._schema.name in BY_NAME})


def overwritten(write: Writer, x: Node, values: Node, *_: Any) -> Node | None:
    """Replaces a copy over all of a tensor by its values, where they need no conversion."""
    same = all(getattr(x.meta["val"], key) == getattr(values.meta["val"], key) for key in ("shape", "dtype", "device"))
    return values if same else None


def added(write: Writer, x: Node, other: Any, **_: Any) -> Node | None:
    """Drops the addition of 0, with which Python's `sum` begins: a partial sum to which nothing is added stays one."""
    nothing = isinstance(other, (int, float)) and not isinstance(other, bool) and other == 0
    return x if nothing and x.meta["val"].dtype == write.value.dtype else None


def result_of(_: Writer, x: Any, at: int) -> Any:
    """Returns one result of an op that was rewritten into several; None leaves the getitem."""
    return x[at] if isinstance(x, tuple) else None


def transpose(write: Writer, x: Node, first: int = 0, second: int = -1) -> Node:
    order = list(range(x.meta["val"].dim()))
    if order:
        order[first], order[second] = order[second], order[first]
    return permute(write, x, order)


def unchanged(write: Writer, x: Node, *_: Any, **__: Any) -> Node | None:
    """Drops another name for the same values, and an expand or a slice that takes all there is."""
    return x if x.meta["val"].shape == write.value.shape else None


def made(write: Writer, x: Node, *args: Any, **_: Any) -> Node:
    """Makes a tensor that takes no more than its type from another one without that, in whose layout it would stand."""
    value = write.value
    return write.call(FACTORIES[write.target], *args, dtype=value.dtype, device=value.device)


def mean(
    write: Writer, x: Node, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Node:
    """Writes sum / global count, in float32 where a sum of 16-bit numbers could overflow or lose digits."""
    value = x.meta["val"]
    dtype = dtype or value.dtype
    dims = list(dims or range(value.dim()))
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    options = {} if wide == value.dtype else {"dtype": wide}
    total = write.call(aten.sum.dim_IntList, x, dims, keepdim, **options)
    result = write.call(aten.div.Scalar, total, math.prod(value.shape[dim] for dim in dims))
    return result if wide == dtype else write.call(aten._to_copy.default, result, dtype=dtype)


def nll_loss(write: Writer, x: Any, target: Node, weight: Any, reduction: int, ignore: int) -> Any:
    """Writes the mean as the sum over the total weight of all targets that count, in float32 where a float16 sum
    could overflow.

    The op gives that weight too, but only together with the loss: made from the targets alone it is there before the
    forward has run.
    """
    if reduction != MEAN:
        return None
    dtype = x.meta["val"].dtype
    half = dtype == torch.float16
    if half:
        x, weight = (value and write.call(aten._to_copy.default, value, dtype=torch.float32) for value in (x, weight))
    both = write.call(write.target, x, target, weight, SUM, ignore)
    total = total_weight(write, target, weight, ignore, x.meta["val"].dtype)
    loss = write.call(aten.div.Tensor, write.part(both, 0), total)
    if half:
        loss, total = (write.call(aten._to_copy.default, value, dtype=dtype) for value in (loss, total))
    return loss, total


def total_weight(write: Writer, target: Node, weight: Node | None, ignore: int, dtype: torch.dtype) -> Node:
    """Writes the sum of the weights of the targets that count; without weights, their number."""
    counts = write.call(aten.ne.Scalar, target, ignore)
    if weight is None:
        return write.call(aten._to_copy.default, write.call(aten.sum.default, counts), dtype=dtype)
    classes = write.call(aten.where.ScalarOther, counts, target, 0)
    weights = write.call(aten.index.Tensor, weight, [classes])
    return write.call(aten.sum.default, write.call(aten.where.ScalarOther, counts, weights, 0.0))


def nll_loss_backward(
    write: Writer, gradient: Node, x: Node, target: Node, weight: Any, reduction: int, ignore: int, total: Node
) -> Node | None:
    if reduction == SUM:  # which does not read the total weight: that of all targets need not come from the forward
        if total.target is not operator.getitem:
            return None
        value = total.meta["val"]
        total = write.call(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
        return write.call(write.target, gradient, x, target, weight, SUM, ignore, total)
    if reduction != MEAN:
        return None
    each = write.call(aten.div.Tensor, gradient, total)
    return write.call(write.target, each, x, target, weight, SUM, ignore, total)


def loss_of_points(write: Writer, *args: Any, **kwargs: Any) -> Node | None:
    """Writes mse_loss and its kin as the loss of every element, then the sum, then the global count."""
    named = write.arguments(args, kwargs)
    reduction = named["reduction"]
    if reduction not in (MEAN, SUM):
        return None
    points = write.call(write.target, *{**named, "reduction": 0}.values())
    return mean(write, points) if reduction == MEAN else write.call(aten.sum.default, points)


def loss_of_points_backward(write: Writer, *args: Any, **kwargs: Any) -> Node | None:
    named = write.arguments(args, kwargs)
    reduction, gradient = named["reduction"], named["grad_output"]
    if reduction not in (MEAN, SUM):
        return None
    shape = torch.broadcast_shapes(*(named[name].meta["val"].shape for name in ("self", "target")))
    if reduction == MEAN:
        gradient = write.call(aten.div.Scalar, gradient, math.prod(shape))
    gradient = write.call(aten.expand.default, gradient, list(shape))
    return write.call(write.target, *{**named, "grad_output": gradient, "reduction": 0}.values())


def grouped(write: Writer, rows: Node, matrices: Node, ends: Node) -> Node | None:
    """Writes the product of each group of rows with its matrix, an op of `transformers`, as torch's `_grouped_mm`,
    which has a rule.

    A mixture of experts of that library calls its own ops in the place of torch's while it is being compiled, in
    other types than bfloat16. Torch's op wants rows that are dense and a multiple of 16 bytes long; others are left
    as they are.
    """
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


BY_NAME: dict[str, Callable[..., Any]] = {
    "transformers::grouped_mm_fallback": grouped,
    "transformers::grouped_mm_fallback_backward": grouped_backward,
}
OF_POINTS = "binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss", "soft_margin_loss"
BY_WRITER: dict[Callable[..., Any], Sequence[str]] = {  # the default overloads that each rewrites
    loss_of_points: OF_POINTS,
    loss_of_points_backward: [f"{name}_backward" for name in OF_POINTS],
    mean: ["mean"],
    nll_loss: ["nll_loss_forward", "nll_loss2d_forward"],
    nll_loss_backward: ["nll_loss_backward", "nll_loss2d_backward"],
    overwritten: ["copy"],
    permute: ["permute"],
    transpose: ["t"],
    unchanged: ["alias", "detach", "expand", "lift_fresh", "lift_fresh_copy"],
    view: ["view", "_unsafe_view"],
}
FACTORIES = {
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_full.default: aten.full.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_zeros.default: aten.zeros.default,
}
REWRITES: dict[Any, Callable[..., Any]] = {
    **BAGS,
    **dict.fromkeys(FACTORIES, made),
    **LISTS,
    **{getattr(aten, name).default: write for write, names in BY_WRITER.items() for name in names},
    aten.add.Scalar: added,
    aten.add.Tensor: added,
    aten.mean.dim: mean,
    aten.slice.Tensor: unchanged,
    aten.transpose.int: transpose,
    operator.getitem: result_of,
}
