"""Rewrite a captured graph into a canonical one: no second names for a value, one op per idea, no means.

A mean of local means is wrong where ranks hold different counts, so a mean becomes a sum and a global divisor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sbpc._compat import FakeTensorMode

aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers for the reduction of a loss


class Writer:
    """The new graph being written, at the place of the node `about` of the old graph."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.graph = Graph()
        self.about: Any = None

    @property
    def target(self) -> Any:
        """The op that is being rewritten."""
        return self.about.target

    @property
    def value(self) -> Tensor:
        """What that op gave."""
        found: Tensor = self.about.meta["val"]
        return found

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of that op by name, in the order of its schema, defaults filled in."""
        schema = self.target._schema.arguments
        given = {**dict(zip((arg.name for arg in schema), args)), **kwargs}
        return {arg.name: given.get(arg.name, arg.default_value) for arg in schema}

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """A node of `op` with its value recomputed."""
        node = self.graph.create_node("call_function", op, args, kwargs, name=str(op._schema.name).split("::")[1])
        given, named = map_arg((args, kwargs), lambda operand: operand.meta["val"])
        with self.mode, torch.no_grad():
            return self._described(node, op(*given, **named))

    def part(self, source: Node, at: int) -> Node:
        """One of the results of an op that gives several."""
        node = self.graph.create_node("call_function", operator.getitem, (source, at))
        return self._described(node, source.meta["val"][at])

    def _described(self, node: Node, value: Any) -> Node:
        node.meta = {**self.about.meta, "val": value}
        return node


def normalize(gm: GraphModule) -> GraphModule:
    """The canonical graph of `gm`, which stays as it was.

    Before: as captured. After: no op of `REWRITES` is left but where its row says so; no node without a use; meta and
    ports as before, `val` new for the new nodes.
    """
    return _rewrite(gm, REWRITES)


def lift(gm: GraphModule) -> GraphModule:
    """Matrix products over flattened dims as products over the dims themselves, so that every one of them can be split.

    Before: a canonical graph, in which linear layers on [b, s, k] are view, mm, view. After: they are einsums.
    """
    return _rewrite(gm, LIFTS)


def _rewrite(gm: GraphModule, rewrites: Mapping[Any, Callable[..., Any]]) -> GraphModule:
    new: dict[Node, Any] = {}
    writer = Writer(_mode(gm))
    for node in gm.graph.nodes:
        rewrite = rewrites.get(node.target)
        if rewrite is not None:
            writer.about = node
            args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
            new[node] = rewrite(writer, *args, **kwargs)
        if new.get(node) is None:
            new[node] = writer.graph.node_copy(node, new.__getitem__)
    _erase_dead(writer.graph)
    result = GraphModule(gm, writer.graph)
    result.meta.update(gm.meta)
    return result


def _erase_dead(graph: Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _mode(gm: GraphModule) -> FakeTensorMode:
    return next(node.meta["val"].fake_mode for node in gm.graph.nodes if isinstance(node.meta.get("val"), Tensor))


# Every rewrite takes the writer and the arguments of the call, and gives a node or a tuple of nodes for several
# results; None leaves the node as it is.


def same(_: Writer, x: Node) -> Node:
    """Another name for the same values."""
    return x


def part(_: Writer, x: Any, at: int) -> Any:
    """A result of an op that was rewritten into several."""
    return x[at] if isinstance(x, tuple) else None


def permute(write: Writer, x: Node, dims: Sequence[int]) -> Node:
    """Permutations of permutations become one; the identity goes."""
    order = [dim % len(dims) for dim in dims]
    if x.target is aten.permute.default:
        inner: Any = x.args[1]
        x, order = x.args[0], [inner[dim] for dim in order]  # type: ignore[assignment]
    return x if order == sorted(order) else write.call(aten.permute.default, x, order)


def transpose(write: Writer, x: Node, first: int, second: int) -> Node:
    order = list(range(x.meta["val"].dim()))
    if order:
        order[first], order[second] = order[second], order[first]
    return permute(write, x, order)


def transpose_matrix(write: Writer, x: Node) -> Node:
    return transpose(write, x, 0, -1)


def view(write: Writer, x: Node, size: Sequence[int]) -> Node:
    """Sizes without -1; a view that leads back to an earlier shape is that earlier value."""
    shape = list(write.value.shape)
    source: Any = x
    while list(source.meta["val"].shape) != shape:
        if source.target is not aten.view.default:
            return write.call(aten.view.default, x, shape)
        source = source.args[0]
    return source


def unchanged_shape(write: Writer, x: Node, *_: Any, **__: Any) -> Node | None:
    """An expand or a slice that takes all there is."""
    return x if x.meta["val"].shape == write.value.shape else None


def mean(
    write: Writer, x: Node, dims: Sequence[int] | None = None, keepdim: bool = False, *, dtype: Any = None
) -> Node:
    """sum / global count; in float32 where a sum of 16-bit numbers could overflow or lose digits."""
    value = x.meta["val"]
    dtype = dtype or value.dtype
    dims = list(dims or range(value.dim()))
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    options = {} if wide == value.dtype else {"dtype": wide}
    total = write.call(aten.sum.dim_IntList, x, dims, keepdim, **options)
    result = write.call(aten.div.Scalar, total, math.prod(value.shape[dim] for dim in dims))
    return result if wide == dtype else write.call(aten._to_copy.default, result, dtype=dtype)


def nll_loss(write: Writer, x: Any, target: Node, weight: Any, reduction: int, ignore: int) -> Any:
    """The mean is the sum over the total weight of all targets that count. A float16 sum could overflow."""
    if reduction != MEAN:
        return None
    half = x.meta["val"].dtype == torch.float16
    if half:
        x, weight = (value and write.call(aten._to_copy.default, value, dtype=torch.float32) for value in (x, weight))
    both = write.call(write.target, x, target, weight, SUM, ignore)
    loss, total = write.part(both, 0), write.part(both, 1)
    loss = write.call(aten.div.Tensor, loss, total)
    if half:
        loss, total = (write.call(aten._to_copy.default, value, dtype=torch.float16) for value in (loss, total))
    return loss, total


def nll_loss_backward(
    write: Writer, gradient: Node, x: Node, target: Node, weight: Any, reduction: int, ignore: int, total: Node
) -> Node | None:
    if reduction != MEAN:
        return None
    each = write.call(aten.div.Tensor, gradient, total)
    return write.call(write.target, each, x, target, weight, SUM, ignore, total)


def loss_of_points(write: Writer, *args: Any, **kwargs: Any) -> Node | None:
    """mse_loss and its kin: the loss of every element, then the sum, then the global count."""
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


REWRITES: dict[Any, Callable[..., Any]] = {
    aten._unsafe_view.default: view,
    aten.alias.default: same,
    aten.binary_cross_entropy.default: loss_of_points,
    aten.binary_cross_entropy_backward.default: loss_of_points_backward,
    aten.detach.default: same,
    aten.expand.default: unchanged_shape,
    aten.huber_loss.default: loss_of_points,
    aten.huber_loss_backward.default: loss_of_points_backward,
    aten.lift_fresh.default: same,
    aten.lift_fresh_copy.default: same,
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.mse_loss.default: loss_of_points,
    aten.mse_loss_backward.default: loss_of_points_backward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
    aten.nll_loss2d_forward.default: nll_loss,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss_forward.default: nll_loss,
    aten.permute.default: permute,
    aten.slice.Tensor: unchanged_shape,
    aten.smooth_l1_loss.default: loss_of_points,
    aten.smooth_l1_loss_backward.default: loss_of_points_backward,
    aten.soft_margin_loss.default: loss_of_points,
    aten.soft_margin_loss_backward.default: loss_of_points_backward,
    aten.t.default: transpose_matrix,
    aten.transpose.int: transpose,
    aten.view.default: view,
    operator.getitem: part,
}


def unflattened(x: Any) -> Node | None:
    """The value [*b, k] of which x is the view [product of b, k]; None if there is none."""
    source = x.args[0] if x.target is aten.view.default else None
    shape: Sequence[int] = source.meta["val"].shape if source is not None else ()
    return source if len(shape) > 2 and shape[-1] == x.meta["val"].shape[-1] and x.meta["val"].dim() == 2 else None


def product(write: Writer, x: Node, y: Node) -> Node | None:
    """view(x) @ y over [*b, k], or the gradient of a weight, view(x).T @ view(y), summed over all of b."""
    rows = unflattened(x)
    if rows is not None:
        dims = DIMS[: rows.meta["val"].dim() - 1]
        lifted = write.call(aten.einsum.default, f"{dims}y,yz->{dims}z", [rows, y])
        return write.call(aten.view.default, lifted, list(write.value.shape))
    turned: Any = x.args[0] if x.target is aten.permute.default else x
    left, right = unflattened(turned) if turned is not x else None, unflattened(y)
    if left is None or right is None or left.meta["val"].shape[:-1] != right.meta["val"].shape[:-1]:
        return None
    dims = DIMS[: left.meta["val"].dim() - 1]
    return write.call(aten.einsum.default, f"{dims}y,{dims}z->yz", [left, right])


def affine(write: Writer, bias: Node, x: Node, y: Node, **scales: Any) -> Node | None:
    """view(x) @ y + bias, the bias added over [*b, n]."""
    if unflattened(x) is None or scales:
        return None
    flat: Any = product(write, x, y)
    lifted = write.call(aten.add.Tensor, flat.args[0], bias)
    return write.call(aten.view.default, lifted, list(write.value.shape))


def sum_of_rows(write: Writer, x: Node, dims: Sequence[int], keepdim: bool = False, **options: Any) -> Node | None:
    """The gradient of a bias: the sum of view(x) over its rows."""
    rows = unflattened(x)
    if rows is None or list(dims) != [0]:
        return None
    total = write.call(aten.sum.dim_IntList, rows, list(range(rows.meta["val"].dim() - 1)), **options)
    return write.call(aten.view.default, total, list(write.value.shape)) if keepdim else total


DIMS = "abcdefgh"
LIFTS: dict[Any, Callable[..., Any]] = {
    aten.addmm.default: affine,
    aten.mm.default: product,
    aten.sum.dim_IntList: sum_of_rows,
    aten.view.default: view,
}
