"""Buckets: several collectives of one kind over the same ranks, written as one that moves their operands side by side.

An operand is laid out as rows, one for each rank that gets a part of it; a bucket is the rows of all its operands,
joined. What comes back are rows, too, one for each rank that sent a part, of which every member takes its columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sbpc.mesh.states import Numbers, Shape

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
REDUCE, GATHER, SCATTER, EXCHANGE = (
    c10d.all_reduce.default,
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
)
COLLECTIVES = REDUCE, GATHER, SCATTER, EXCHANGE
RANKS = {GATHER: 0, SCATTER: 1}  # where the number of ranks stands among the arguments behind the operand


@dataclass
class Bucket:
    """Collectives that go in one message.

    name: of the first of them. op, args: the collective, and its arguments behind the operand. operands: by the name
    of a member what it sends, contiguous, and the shape of that. Ranks that hold no part of a member, as all of its
    group do, do not send it.
    """

    name: str
    op: Any = None
    args: tuple[Any, ...] = ()
    operands: dict[str, tuple[Any, Shape]] = field(default_factory=dict)
    received: Any = None

    def add(self, member: str, op: Any, x: Any, shape: Numbers, args: tuple[Any, ...]) -> None:
        """Takes in the operand of a member."""
        self.op, self.args = op, args
        self.operands[member] = x, tuple(shape)

    @property
    def rows(self) -> tuple[int, int]:
        """How many rows are sent, and how many are received."""
        if self.op is EXCHANGE:
            return (len(self.args[0]),) * 2
        ranks = self.args[RANKS[self.op]] if self.op in RANKS else 1
        return (ranks, 1) if self.op is SCATTER else (1, ranks)

    @property
    def widths(self) -> dict[str, int]:
        """By member the columns that it takes."""
        return {member: math.prod(shape) // self.rows[0] for member, (_, shape) in self.operands.items()}

    def send(self, call: Callable[..., Any]) -> None:
        """Writes the collective, if any member is sent, up to its wait."""
        if not self.operands:
            return
        rows, width = self.rows[0], sum(self.widths.values())
        parts = [call(aten.view.default, x, [rows, -1]) for x, _ in self.operands.values()]
        joined = call(aten.view.default, call(aten.cat.default, parts, 1), [-1])
        args = ([width] * rows, [width] * rows, *self.args[2:]) if self.op is EXCHANGE else self.args
        self.received = call(self.op, joined, *args)

    def wait(self, call: Callable[..., Any]) -> None:
        """Writes that it is waited for; once."""
        if self.received.target is not c10d.wait_tensor.default:
            self.received = call(c10d.wait_tensor.default, self.received)

    def take(self, member: str, call: Callable[..., Any]) -> Any:
        """Writes what a member receives, contiguous and in its shape. Ranks that hold no part of it do not call
        this."""
        names = list(self.widths)
        ends = list(itertools.accumulate(self.widths.values()))
        at, (sent, rows) = names.index(member), self.rows
        start, end, shape = (ends[at - 1] if at else 0), ends[at], self.operands[member][1]
        # a number has no dim, and is as large as it was
        whole = [*(size * rows // sent for size in shape[:1]), *shape[1:]]
        if rows == 1:
            return call(aten.view.default, call(aten.slice.Tensor, self.received, 0, start, end), whole)
        columns = call(aten.slice.Tensor, call(aten.view.default, self.received, [rows, ends[-1]]), 1, start, end)
        return call(aten.view.default, call(aten.contiguous.default, columns), whole)
