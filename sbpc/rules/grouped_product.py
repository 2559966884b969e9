"""Products of groups of rows, on a rank that has a part of the rows or of the groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sbpc.rules.match import Call, Shard

aten = torch.ops.aten
GROUPED = {  # by the number of dims of both operands; e and f: what 16 bytes hold, by which the kernel aligns rows
    (2, 2): "(k e) m, m (n f), h -> g (k e) (n f) ; +m ; idx m ; idx g ; fix h e f ; lin(0) ; lin(1)",
    (2, 3): "m (k e), g (k e) (n f), h -> m (n f) ; +k g ; idx m ; idx g ; fix h e f ; lin(0) ; lin(1)",
    (3, 3): "g m (k e), g (k e) (n f) -> g m (n f) ; +k ; fix e f ; lin(0) ; lin(1)",
}


def grouped_local(shard: Shard) -> Any:
    """A shard of the rows has its own ends of groups. Where groups are split, their rows are rolled to the front."""
    call, local, offsets, text = shard.call, shard.local, shard.offsets, shard.match.rule.text
    if text == GROUPED[3, 3]:
        return product(shard, shard.given)
    given, turned, sums = dict(shard.given), text == GROUPED[2, 2], text == GROUPED[2, 3]
    rows = call(aten.permute.default, given["self"], [1, 0]) if turned else given["self"]
    number = start = None
    if "m" in offsets:
        ends = call(aten.clamp.default, call(aten.sub.Tensor, given["offs"], offsets["m"]), 0, local["m"])
        given["offs"] = call(aten._to_copy.default, ends, dtype=torch.int32)
    if "g" in offsets:
        number, group = (numbers(call, given["offs"], local[factor]) for factor in ("m", "g"))
        before = call(aten.constant_pad_nd.default, given["offs"], [1, 0])
        start = call(aten.index_select.default, before, 0, call(aten.view.default, offsets["g"], [1]))
        ends = call(aten.index_select.default, given["offs"], 0, call(aten.add.Tensor, group, offsets["g"]))
        given["offs"] = call(aten.sub.Tensor, ends, start)
    rows = dense(call, rows, local["m"], number, start)
    given["self"] = call(aten.permute.default, rows, [1, 0]) if turned else rows
    if turned:
        given["mat2"] = dense(call, given["mat2"], local["m"], number, start)
    made = product(shard, given)
    if start is None or not sums:
        return made
    last = call(aten.slice.Tensor, given["offs"], 0, local["g"] - 1, local["g"])
    behind = call(aten.unsqueeze.default, call(aten.ge.Tensor, number, last), 1)
    made = call(aten.masked_fill.Scalar, made, behind, 0)
    return dense(call, made, local["m"], number, call(aten.neg.default, start))


def product(shard: Shard, given: Mapping[str, Any]) -> Any:
    """The op itself, or for float64, which its kernels do not take, one product for each group, of all rows with zeros for the others."""
    if shard.match.bound.outputs[0].dtype != torch.float64:
        return shard.plain(**given)
    call, local, x, y, text = shard.call, shard.local, given["self"], given["mat2"], shard.match.rule.text
    if text == GROUPED[3, 3]:
        return call(aten.bmm.default, x, y)
    number = numbers(call, given["offs"], local["m"])
    below = call(aten.lt.Tensor, number, call(aten.unsqueeze.default, given["offs"], 1))  # [g, m]
    first = call(aten.slice.Tensor, below, 0, 0, local["g"] - 1)  # behind the end of one group is the start of the next
    behind = call(aten.constant_pad_nd.default, first, [0, 0, 1, 0])
    other = call(aten.unsqueeze.default, call(aten.eq.Tensor, below, behind), 2)

    def alone(rows: Any) -> Any:
        return call(aten.masked_fill.Scalar, call(aten.unsqueeze.default, rows, 0), other, 0)

    if text == GROUPED[2, 3]:
        return call(aten.sum.dim_IntList, call(aten.bmm.default, alone(x), y), [0])
    rows = alone(call(aten.permute.default, x, [1, 0]))
    return call(aten.bmm.default, call(aten.permute.default, rows, [0, 2, 1]), alone(y))


def numbers(call: Call, like: Any, count: int) -> Any:
    """0, 1, 2, ... on the device of `like`."""
    return call(aten.sub.Scalar, call(aten.cumsum.default, call(aten.new_ones.default, like, [count]), 0), 1)


def dense(call: Call, rows: Any, count: int, number: Any, start: Any) -> Any:
    """Rows one after the other in memory, from number `start` on and then around."""
    if start is not None:
        around = call(aten.remainder.Scalar, call(aten.add.Tensor, number, start), count)
        return call(aten.index_select.default, rows, 0, around)
    one = {"memory_format": torch.contiguous_format}  # a lone row counts as contiguous whatever its stride
    return call(aten.clone.default, rows, **one) if count == 1 else call(aten.contiguous.default, rows)
