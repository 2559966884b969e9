"""Products of groups of rows, on a rank that has a part of the rows or of the groups."""

from __future__ import annotations

from typing import Any

import torch

from sbpc.graph import product_shapes  # noqa: F401 - it tells what torch does not know
from sbpc.rules.match import Arguments, Call, Match, Shard

GROUPED = {  # by the number of dims of both operands; e and f: what 16 bytes hold, by which the kernel aligns rows
    (2, 2): "(k e) m, m (n f), h -> g (k e) (n f) ; +m ; idx m ; idx g ; fix h e f ; lin(0) ; lin(1)",
    (2, 3): "m (k e), g (k e) (n f), h -> m (n f) ; +k g ; idx m ; idx g ; fix h e f ; lin(0) ; lin(1)",
    (3, 3): "g m (k e), g (k e) (n f) -> g m (n f) ; +k ; fix e f ; lin(0) ; lin(1)",
}


def grouped_local(shard: Shard) -> Any:
    """A shard of the rows has its own ends of groups. Where groups are split, their rows are rolled to the front."""
    call, local, offsets, text = shard.aten, shard.local, shard.offsets, shard.match.rule.text
    if not local["g"]:
        return shard.zeros()  # no matrix is this rank's
    if text == GROUPED[3, 3]:
        return product(shard, shard.given)
    given, turned, sums = dict(shard.given), text == GROUPED[2, 2], text == GROUPED[2, 3]
    rows = call("permute", given["self"], [1, 0]) if turned else given["self"]
    number = start = None
    count = local["m"] if shard.sharing is None else None
    if "m" in offsets and shard.part is None:  # else the ends are those of the rank's own rows
        ends = call("clamp", call("sub.Tensor", given["offs"], offsets["m"]), 0, local["m"])
        given["offs"] = call("_to_copy", ends, dtype=torch.int32)
    if "g" in offsets:
        group = numbers(call, given["offs"], local["g"])
        number = numbers(call, given["offs"], local["m"]) if count is not None else None
        before = call("constant_pad_nd", given["offs"], [1, 0])
        start = call("index_select", before, 0, call("view", offsets["g"], [1]))
        ends = call("index_select", given["offs"], 0, call("add.Tensor", group, offsets["g"]))
        given["offs"] = call("sub.Tensor", ends, start)
        start = start if count is not None else None  # rows that are shared out by their groups are the rank's own
    rows = dense(call, rows, count, number, start)
    given["self"] = call("permute", rows, [1, 0]) if turned else rows
    if turned:
        given["mat2"] = dense(call, given["mat2"], count, number, start)
    made = product(shard, given)
    if start is None or not sums:
        return made
    last = call("slice.Tensor", given["offs"], 0, local["g"] - 1, local["g"])
    behind = call("unsqueeze", call("ge.Tensor", number, last), 1)
    made = call("masked_fill.Scalar", made, behind, 0)
    return dense(call, made, local["m"], number, call("neg", start))


def is_several(match: Match) -> bool:
    """Returns whether a call is such a product that is written as others, as no kernel takes its type."""
    return match.rule.text in GROUPED.values() and match.bound.outputs[0].dtype == torch.float64


def product(shard: Shard, given: Arguments) -> Any:
    """The op itself, or for float64 one product for each group, of all rows with zeros for the others."""
    if not is_several(shard.match):
        return shard.plain(**given)
    call, local, x, y, text = shard.aten, shard.local, given["self"], given["mat2"], shard.match.rule.text
    if text == GROUPED[3, 3]:
        return call("bmm", x, y)
    rows = x if text == GROUPED[2, 3] else call("permute", x, [1, 0])
    number = numbers(call, given["offs"], local["m"]) if shard.sharing is None else counted(call, rows)
    below = call("lt.Tensor", number, call("unsqueeze", given["offs"], 1))  # [g, m]
    first = call("slice.Tensor", below, 0, 0, local["g"] - 1)  # behind the end of one group is the start of the next
    behind = call("constant_pad_nd", first, [0, 0, 1, 0])
    other = call("unsqueeze", call("eq.Tensor", below, behind), 2)

    def alone(rows: Any) -> Any:
        return call("masked_fill.Scalar", call("unsqueeze", rows, 0), other, 0)

    if text == GROUPED[2, 3]:
        return call("sum.dim_IntList", call("bmm", alone(x), y), [0])
    return call("bmm", call("permute", alone(rows), [0, 2, 1]), alone(y))


def numbers(call: Call, like: Any, count: int) -> Any:
    """0, 1, 2, ... on the device of `like`."""
    return call("sub.Scalar", call("cumsum", call("new_ones", like, [count]), 0), 1)


def counted(call: Call, rows: Any) -> Any:
    """The numbers of rows of which there are as many as the data says."""
    ones = call("ones_like", call("select.int", rows, 1, 0), dtype=torch.int64)
    return call("sub.Scalar", call("cumsum", ones, 0), 1)


def dense(call: Call, rows: Any, count: int | None, number: Any, start: Any) -> Any:
    """Rows one after the other in memory, from number `start` on and then around."""
    if start is not None:
        around = call("remainder.Scalar", call("add.Tensor", number, start), count)
        return call("index_select", rows, 0, around)
    one = {"memory_format": torch.contiguous_format}  # a lone row counts as contiguous whatever its stride
    return call("clone", rows, **one) if count == 1 else call("contiguous", rows)
