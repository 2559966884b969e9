"""Messages from one stage of a pipeline to another: sent without waiting, received when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Mail:
    """The messages of one step. A message has a number, the same on both ends, and no two have the same."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self.coming: dict[int, tuple[Tensor, Any]] = {}
        self.kept: dict[int, tuple[Tensor, int]] = {}
        self.sent: list[tuple[Any, Tensor]] = []

    def expect(self, number: int, source: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Begins to receive a message, unless that has begun: it comes while this rank computes."""
        if number not in self.coming:
            value = torch.empty(tuple(shape), dtype=dtype, device=self.where)
            self.coming[number] = value, dist.irecv(value, source, tag=number)

    def receive(self, number: int) -> Tensor:
        """Returns a message, as soon as it is there."""
        if number in self.kept:
            value, times = self.kept.pop(number)
            if times > 1:
                self.kept[number] = value, times - 1
            return value
        value, work = self.coming[number]
        if work is not None:
            work.wait()
            self.coming[number] = value, None
        return value

    def keep(self, number: int, value: Tensor, times: int) -> None:
        """Keeps a message for this rank itself, to be read so often."""
        self.kept[number] = value, times

    def send(self, number: int, target: int, value: Tensor) -> None:
        """Sends a message without waiting."""
        self.sent.append((dist.isend(value, target, tag=number), value))

    def from_one(self, number: int, value: Tensor, owner: int, peers: Sequence[int]) -> Tensor:
        """Returns on every one of `peers` (ranks) the value that `owner` has. value: of its shape on the others."""
        if dist.get_rank() != owner:
            self.expect(number, owner, value.shape, value.dtype)
            return self.receive(number)
        value = value.contiguous()
        for peer in peers:
            if peer != owner:
                self.send(number, peer, value)
        return value

    def finish(self) -> None:
        """Waits until all that was sent has gone."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()
