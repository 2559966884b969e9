"""Writes embedding bags as lookups and sums, whose rules split rows of the table, features and bags.

Bags of one length, as of a matrix of indices, are sums over a dim. Others begin at `offsets`: position i lies in the
bag whose number is how many offsets are at most i, less 1. What is added to one bag comes from several ranks where
positions are split. A maximum over bags, and gradients that are sparse or scaled by frequency, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from sbpc.graph.rewrite import Writer, shaped

aten = torch.ops.aten
SUM, MEAN = 0, 1  # torch's numbers for modes


class Bags(NamedTuple):
    """Bags of indices. length: of each, 0 where they differ. number: by position the number of its bag, where so.
    count: by bag how many indices count. dtype: in which sums are taken."""

    write: Writer
    indices: Node
    length: int
    number: Any
    count: Any
    dtype: torch.dtype

    def rows(self, table: Node) -> Node:
        """Writes the rows of a table by bag to which the positions belong."""
        if not self.length:
            return self.write.call(aten.index_select.default, table, 0, self.number)
        bags, *rest = table.meta["val"].shape
        between = self.write.call(aten.unsqueeze.default, table, 1)
        return self.write.call(aten.expand.default, between, [bags, self.length, *rest])

    def sums(self, rows: Node, count: int) -> Node:
        """Writes the sum over each of `count` bags of a row of each position."""
        if self.length:
            return self.write.call(aten.sum.dim_IntList, rows, [1])
        value = rows.meta["val"]
        shape = [count + 1, *value.shape[1:]]  # the last one: positions behind the last offset, where that is given
        zeros = self.write.call(aten.full.default, shape, 0, dtype=value.dtype, device=value.device)
        added = self.write.call(aten.index_add.default, zeros, 0, self.number, rows)
        return self.write.call(aten.slice.Tensor, added, 0, 0, count)

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Writes a cast, if one is needed."""
        return x if x.meta["val"].dtype == dtype else self.write.call(aten._to_copy.default, x, dtype=dtype)


def bags_of(write: Writer, table: torch.Tensor, given: dict[str, Any], number: Any = None, count: Any = None) -> Bags:
    """Writes what is known of the bags. given: arguments of the op by name."""
    indices, offsets = given["indices"], given["offsets"]
    wide = torch.float32 if table.dtype in (torch.float16, torch.bfloat16) else table.dtype
    positions = indices.meta["val"].numel()
    length = length_of(offsets, positions) if not given.get("include_last_offset") else 0
    if length:
        return Bags(write, shaped(write, indices, [positions // length, length]), length, number, count, wide)
    if number is None:
        value = offsets.meta["val"]
        each = write.call(aten.arange.start_step, 0, positions, 1, dtype=value.dtype, device=value.device)
        number = write.call(aten.sub.Tensor, write.call(aten.bucketize.Tensor, each, offsets, right=True), 1)
    return Bags(write, indices, 0, number, count, wide)


def length_of(offsets: Node, positions: int) -> int:
    """Returns how long bags are that begin at equal distances, else 0."""
    if offsets.target is not aten.arange.start_step or offsets.args[:2] != (0, positions) or len(offsets.args) != 3:
        return 0
    length = int(offsets.args[2])  # type: ignore[arg-type]
    return 0 if positions % length else length


def factors(bags: Bags, given: dict[str, Any]) -> Any:
    """Writes by position what its row is multiplied by: 0 for the padding, else a weight or 1. None for all 1."""
    write, weights = bags.write, given["per_sample_weights"]
    if weights is not None:
        weights = bags.cast(shaped(write, weights, list(bags.indices.meta["val"].shape)), bags.dtype)
    if given["padding_idx"] < 0:
        return weights
    kept = bags.cast(write.call(aten.ne.Scalar, bags.indices, given["padding_idx"]), bags.dtype)
    return kept if weights is None else write.call(aten.mul.Tensor, weights, kept)


def times(write: Writer, rows: Any, factor: Any) -> Any:
    """Writes each row times its factor, None for all 1."""
    if factor is None:
        return rows
    return write.call(aten.mul.Tensor, rows, write.call(aten.unsqueeze.default, factor, -1))


def may_be_written(given: dict[str, Any]) -> bool:
    """Returns whether a call adds rows up, or takes their mean, and nothing else."""
    return given["mode"] in (SUM, MEAN) and not given["sparse"] and not given["scale_grad_by_freq"]


def forward(write: Writer, *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
    """Writes the op. What it gives besides is kept for the backward: numbers of bags and how many indices count."""
    given = write.arguments(args, kwargs)
    if not may_be_written(given):
        return None
    table, result = given["weight"], write.about.meta["val"][0]
    bags = bags_of(write, table.meta["val"], given)
    factor = factors(bags, given)
    rows = times(write, bags.cast(write.call(aten.embedding.default, table, bags.indices), bags.dtype), factor)
    total, count = bags.sums(rows, result.shape[0]), None
    if given["mode"] == MEAN:
        if factor is None:
            value = bags.indices.meta["val"]
            factor = write.call(aten.full.default, list(value.shape), 1, dtype=bags.dtype, device=value.device)
        count = write.call(aten.clamp.default, bags.sums(factor, result.shape[0]), 1)
        total = write.call(aten.div.Tensor, total, write.call(aten.unsqueeze.default, count, 1))
    other = bags.indices if bags.number is None else bags.number
    return bags.cast(total, result.dtype), other, other if count is None else count, other


def backward(write: Writer, *args: Any, **kwargs: Any) -> Node | None:
    """Writes the gradient of the table."""
    given = write.arguments(args, kwargs)
    if not may_be_written(given):
        return None
    gradient = given["grad"]
    bags = bags_of(write, gradient.meta["val"], given, given["offset2bag"], given["bag_size"])
    gradient = bags.cast(gradient, bags.dtype)
    if given["mode"] == MEAN:
        gradient = write.call(aten.div.Tensor, gradient, write.call(aten.unsqueeze.default, bags.count, 1))
    rows = times(write, bags.rows(gradient), factors(bags, given | {"padding_idx": -1}))
    size, padding = given["num_weights"], given["padding_idx"]
    found = write.call(aten.embedding_dense_backward.default, rows, bags.indices, size, padding, False)
    return bags.cast(found, write.value.dtype)


def weights_backward(write: Writer, *args: Any, **kwargs: Any) -> Node | None:
    """Writes the gradient of the weights of the indices."""
    given = write.arguments(args, kwargs)
    table, gradient = given["weight"], given["grad"]
    bags = bags_of(write, table.meta["val"], given, given["offset2bag"])
    rows = write.call(aten.embedding.default, table, bags.indices)
    found = write.call(aten.mul.Tensor, bags.cast(rows, bags.dtype), bags.rows(bags.cast(gradient, bags.dtype)))
    found = write.call(aten.sum.dim_IntList, found, [-1])
    if (kept := factors(bags, given | {"per_sample_weights": None})) is not None:
        found = write.call(aten.mul.Tensor, found, kept)
    return bags.cast(shaped(write, found, list(write.value.shape)), write.value.dtype)


BAGS: dict[Any, Callable[..., Any]] = {
    aten._embedding_bag.default: forward,
    aten._embedding_bag_forward_only.default: forward,
    aten._embedding_bag_backward.default: backward,
    aten._embedding_bag_per_sample_weights_backward.default: weights_backward,
}
