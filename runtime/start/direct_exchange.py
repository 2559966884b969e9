"""Reduce-scatter and all-to-all on gloo by direct exchange: every rank sends each block straight to the rank that
owns it.

gloo's own reduce-scatter is an all-reduce of which a rank keeps its part, so that it sends twice the bytes of the
textbook. In its all-to-all, a rank asks for blocks after it has begun to send. On a slow link the request waits
behind the data, and the two ranks of a pair send one after the other. Here a rank asks for all blocks first.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = tuple[list[dist.Work], Callable[[], Any]]
COMBINE = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
)  # as `sbpc.mesh.states.REDUCE`


class DirectGroup(dist.ProcessGroup):
    """A gloo group that does reduce-scatters by direct exchange, and all-to-alls between nodes; all else gloo does.

    messages: a group of the same ranks that does nothing else. across: whether they are on several nodes, which says
    which way an all-to-all goes. started: a list to which the work of every collective is added, where one is given.
    """

    started: list[dist.Work] | None = None

    def __init__(self, group: dist.ProcessGroup, messages: dist.ProcessGroup, across: bool) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.gloo, self.messages, self.across = group, messages, across
        self.tags = itertools.cycle(range(1 << 20))  # a tag for each collective; all ranks start them in one order

    def reduce_scatter_tensor_coalesced(  # type: ignore[override]  # torch passes the arguments by place
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any
    ) -> dist.Work:
        """Starts a reduce-scatter of every input. What `torch.ops._c10d_functional` calls for one as for several."""
        combine = next((function for op, function in COMBINE if options.reduceOp == op), None)
        if combine is None or any(x.device.type != "cpu" for x in inputs):
            return self.noted(self.gloo.reduce_scatter_tensor_coalesced(outputs, inputs, options))
        return self.noted(DirectWork([self.reduce_scatter_of(out, x, combine) for out, x in zip(outputs, inputs)]))

    def alltoall_base(  # type: ignore[override]  # torch passes the arguments by place
        self, output: Tensor, x: Tensor, received: list[int], sent: list[int], options: Any
    ) -> dist.Work:
        """Starts an all-to-all of pieces of these sizes. Which way it goes does not depend on them: they may be what
        data says, as of rows of experts, and then a rank knows none of the pieces that others send each other."""
        if not self.across or x.device.type != "cpu":
            return self.noted(self.gloo.alltoall_base(output, x, received, sent, options))
        whole, even = x.contiguous(), len(x) // self.size()
        blocks, own = output.split(received or even), whole.split(sent or even)
        return self.noted(
            DirectWork([(self.exchange(blocks, own), lambda: blocks[self.rank()].copy_(own[self.rank()]))])
        )

    def noted(self, work: dist.Work) -> dist.Work:
        """Adds a work to `started`, where that is asked for."""
        if self.started is not None:
            self.started.append(work)
        return work

    def reduce_scatter_of(self, out: Tensor, x: Tensor, combine: Callable[..., Tensor]) -> Exchange:
        """Starts to bring into `out` the blocks of all ranks, put together in the order of the ranks: the same in
        every run."""
        me, own = self.rank(), x.contiguous().chunk(self.size())
        blocks = [out, *(torch.empty_like(out) for _ in own[1:])]
        messages = self.exchange(blocks, own)

        def finish() -> None:
            blocks[me] = own[me]
            if me == 0:
                out.copy_(own[0])
            for block in blocks[1:]:
                combine(out, block, out=out)

        return messages, finish

    def exchange(self, into: Sequence[Tensor], out_of: Sequence[Tensor]) -> list[dist.Work]:
        """Starts to receive a block from every other rank, then to send one to each, unless it is empty; no two ranks
        begin with the same one.

        A rank that is ready to receive is sent the data at once. Were the order the other way round, its request
        would wait behind the data that it sends itself.
        """
        tag, others = next(self.tags), [(self.rank() + step) % self.size() for step in range(1, self.size())]
        receives = [self.messages.recv([into[rank]], rank, tag) for rank in reversed(others) if into[rank].numel()]
        return receives + [self.messages.send([out_of[rank]], rank, tag) for rank in others if out_of[rank].numel()]

    # The rest is gloo's. torch would hold Python's lock while it calls methods that are not here, and a thread of gloo
    # that frees a tensor needs that lock while it holds the one that torch then waits for.

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        """Starts an all-reduce."""
        return self.noted(self.gloo.allreduce(tensors, options))

    def allgather_into_tensor_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any
    ) -> dist.Work:
        """Starts an all-gather of every input."""
        return self.noted(self.gloo.allgather_into_tensor_coalesced(outputs, inputs, options))

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        """Starts a broadcast."""
        return self.gloo.broadcast(tensors, options)


class DirectWork(dist.Work):
    """What `wait_tensor` waits for: messages on their way, and what is done with them once all are there.

    gloo's threads move the data meanwhile. Sums are made at the end, on the thread that waits. received: of a thread
    that runs `receive`, where one does.
    """

    received: Future[float] | None = None

    def __init__(self, exchanges: list[Exchange]) -> None:
        super().__init__()
        self.exchanges = exchanges

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for every message as long as the group allows. Raises RuntimeError after that, and if a rank is
        gone."""
        if self.received is None:
            self.receive()
        else:
            self.received.result()
        for _, finish in self.exchanges:
            finish()
        self.exchanges = []
        return True

    def receive(self) -> float:
        """Waits for every message. Returns the moment at which all are there, of `time.perf_counter`."""
        for messages, _ in self.exchanges:
            for message in messages:
                message.wait()
        return time.perf_counter()
