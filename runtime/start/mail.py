"""Messages from one stage of a pipeline to another: sent without waiting, received when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sbpc.runtime.start.lost_ranks import wait_for


class Mail:
    """The messages of one step. A message has a number, the same on both ends, and no two have the same.

    None is held longer than it must: one that came until it has been read so often as was said, one that was sent until
    it is known to be there. gloo does not tell the sender that, but what the receiver does next does, see `arrived`.
    """

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.coming: dict[int, Any] = {}
        self.kept: dict[int, tuple[Tensor, int]] = {}
        # whom to, which of its actions reads it, the work, the message
        self.sent: list[tuple[int, float, Any, Tensor]] = []

    def expect(self, number: int, source: int, shape: Sequence[int], dtype: torch.dtype, times: int = 1) -> None:
        """Begins to receive a message, unless that has begun: it comes while this rank computes. times: how often it
        is read."""
        if number not in self.coming and number not in self.kept:
            value = torch.empty(tuple(shape), dtype=dtype, device=self.where)
            self.coming[number] = value, dist.irecv(value, source, tag=number), times

    def receive(self, number: int) -> Tensor:
        """Returns a message, as soon as it is there."""
        if number in self.kept:
            value, times = self.kept.pop(number)
        else:
            value, work, times = self.coming.pop(number)
            wait_for(work, self.where)
        if times > 1:
            self.kept[number] = value, times - 1
        return value

    def keep(self, number: int, value: Tensor, times: int) -> None:
        """Keeps a message for this rank itself, to be read so often."""
        self.kept[number] = value, times

    def send(self, number: int, target: int, value: Tensor, place: float = inf) -> None:
        """Sends a message without waiting. place: of the action of the target that reads it, among its actions."""
        self.sent.append((target, place, dist.isend(value, target, tag=number), value))

    def arrived(self, target: int, place: float) -> None:
        """Lets go what was sent to a rank for its actions up to a place: it has done that one, so it has received
        all that."""
        sent, self.sent = self.sent, []
        for each in sent:
            if each[0] == target and each[1] <= place:
                wait_for(each[2], self.where)
            else:
                self.sent.append(each)

    def from_one(self, number: int, value: Tensor, owner: int, peers: Sequence[int]) -> Tensor:
        """Returns on every one of `peers` (ranks) the value that `owner` has. value: of its shape on the others."""
        if dist.get_rank() != owner:
            self.expect(number, owner, value.shape, value.dtype)
            return self.receive(number)
        value = value.contiguous()
        for peer in (peer for peer in peers if peer != owner):
            self.send(number, peer, value)
        return value

    def finish(self) -> None:
        """Waits until all that was sent has gone."""
        for _, _, work, _ in self.sent:
            wait_for(work, self.where)
        self.sent.clear()
