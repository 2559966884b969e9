"""Counts the bytes that are alive on the busiest rank at every moment of a step, in whatever order its calls run."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch.fx import GraphModule, Node

from sbpc.boxing.steps import Step
from sbpc.mesh.mesh import Mesh
from sbpc.plans.storages import POSITION, Moment, Storages


@dataclass
class SharedBuffer:
    """The memory of collectives that go in one message. missing: how many of them have not started. sent, received:
    bytes so far. operands: the storages that it is joined from. joined, result: its own, before and after. ended:
    whether one was waited for.
    """

    missing: int
    sent: int = 0
    received: int = 0
    operands: list[int] = field(default_factory=list)
    joined: int = 0
    result: int = 0
    ended: bool = False

    def take(self, step: Step, call: Moment, mesh: Mesh) -> None:
        """Takes in what one of its collectives sends."""
        received, ranks = sum(size for _, size in call.makes), math.prod(mesh.sizes[axis] for axis in step.axes)
        self.sent += {"reduce_scatter": received * ranks, "all_gather": received // ranks}.get(step.carrier, received)
        self.received += received
        self.operands += call.reads
        self.missing -= 1


@dataclass
class Life:
    """All moments of a step.

    moments: in order. size, owner, last: by storage its bytes, the node that made it, and the last moment at which it
    is alive. live: bytes at each moment. values: by node the storages of its outputs. always: bytes that are there
    throughout, which `live` counts.
    """

    moments: list[Moment]
    size: list[int]
    owner: list[Node]
    last: list[float]
    live: list[int]
    values: dict[Node, tuple[int, ...]]
    always: int

    @property
    def peak(self) -> int:
        """The most bytes alive at any moment."""
        return max(self.live, default=0)

    @functools.cached_property
    def saved(self) -> int:
        """Bytes alive just before the backward begins, 0 where there is none."""
        turn = turn_of([phase_of(moment.node) for moment in self.moments])
        if turn is None or turn == len(self.moments):  # an order in which all of the forward comes last
            return 0
        return self.live[turn] - self.always - sum(size for _, size in self.moments[turn].makes)

    @classmethod
    def of(cls, boxed: GraphModule, mesh: Mesh) -> Life:
        """Replays a boxed graph."""
        nodes = [node for node in boxed.graph.nodes if node.op != "output"]
        order = [(node.all_input_nodes[0], True) if "awaits" in node.meta else (node, False) for node in nodes]
        return cls.in_order(Storages(boxed, mesh), order, {n: n.meta["bucket"] for n in nodes if "bucket" in n.meta})

    @classmethod
    def in_order(cls, storages: Storages, order: Iterable[tuple[Node, bool]], buckets: Mapping[Node, Hashable]) -> Life:
        """Returns what is alive in an order, see `ordered`. buckets: what is equal for collectives that share one."""
        order, size, owner = list(order), list(storages.size), list(storages.owner)
        awaited, moments = {node for node, waits in order if waits}, list[Moment]()
        shared = {name: SharedBuffer(count) for name, count in Counter(buckets.values()).items()}
        lies = dict[int, int]()  # by storage, that of a bucket in which it lies
        for node, waits in order:
            calls, sent = storages.moments[node], storages.sent.get(node)
            if sent is None or node not in awaited:
                moments += () if waits else calls
            elif sent.step is None or node not in buckets:
                moments += [sent.wait, *calls[sent.at :]] if waits else calls[: sent.at]
            elif waits:
                bucket, end, received = shared[buckets[node]], sent.wait.node, calls[sent.at - 1].makes
                moments.append(Moment(end, (bucket.result,) if bucket.ended else (bucket.joined, bucket.result), ()))
                bucket.ended = True
                if sent.step.carrier in ("all_gather", "all_to_all"):  # and copied out of it
                    moments.append(Moment(end, (bucket.result,), received))
                    owner[received[0][0]] = end
                else:
                    lies[received[0][0]] = bucket.result
                moments += calls[sent.at :]
            else:
                moments += calls[: sent.at - 1]
                bucket = shared[buckets[node]]
                bucket.take(sent.step, calls[sent.at - 1], storages.mesh)
                if not bucket.missing:  # behind the last one is the collective
                    bucket.joined, bucket.result = len(size), len(size) + 1
                    size += [bucket.sent, bucket.received]
                    owner += [node, node]
                    moments.append(Moment(node, tuple(bucket.operands), ((bucket.joined, bucket.sent),)))
                    moments.append(Moment(node, (bucket.joined,), ((bucket.result, bucket.received),)))
        values, kept = storages.values, storages.kept
        if lies:
            moments = [
                each if lies.keys().isdisjoint(each.reads) else Moment(each.node, found(each.reads, lies), each.makes)
                for each in moments
            ]
            values, kept = {node: found(each, lies) for node, each in values.items()}, {*found(kept, lies)}
        return cls.counted(moments, size, owner, values, kept, POSITION * len(storages.mesh.axes))

    @classmethod
    def counted(
        cls,
        moments: list[Moment],
        size: list[int],
        owner: list[Node],
        values: dict[Node, tuple[int, ...]],
        kept: Iterable[int],
        always: int,
    ) -> Life:
        """Counts the bytes alive at every moment. kept: the storages that are alive at the end, too."""
        last, dying, live, alive = [-1.0] * len(size), [0] * len(moments), list[int](), always
        for at, (_, reads, makes) in enumerate(moments):
            for storage in reads:
                last[storage] = at
            for storage, _ in makes:
                last[storage] = at
        for storage in kept:
            last[storage] = math.inf
        for at, (_, _, makes) in enumerate(moments):
            for storage, each in makes:
                if last[storage] < math.inf:
                    dying[int(last[storage])] += each
                alive += each
            live.append(alive)
            alive -= dying[at]
        return cls(moments, size, owner, last, live, values, always)

    def alive(self, at: int) -> list[int]:
        """Returns the storages that are alive at a moment."""
        made = (storage for moment in self.moments[: at + 1] for storage, _ in moment.makes)
        return [storage for storage in made if self.last[storage] >= at]

    def at_peak(self) -> Iterator[tuple[Node, int]]:
        """Yields what is alive at the peak: the node that made it, and its bytes."""
        for storage in self.alive(self.live.index(self.peak)):
            yield self.owner[storage], self.size[storage]


def found(storages: Iterable[int], lies: Mapping[int, int]) -> tuple[int, ...]:
    """Returns where storages lie."""
    return tuple(lies.get(each, each) for each in storages)


def phase_of(node: Node) -> str:
    """Returns the phase of a call; what is stored is there before the forward."""
    return "stored" if node.op == "placeholder" else str(node.meta.get("phase", "forward"))


def turn_of(phases: Sequence[str]) -> int | None:
    """Returns the moment at which the backward begins: fewest calls of it stand before, and of the forward behind.
    None without one.

    A schedule may start early what the backward only sends, and end late what the forward only sends.

    >>> turn_of(["stored", "backward", "forward", "forward", "backward", "forward", "backward"])
    4
    """
    misplaced = list(accumulate(({"forward": -1, "backward": 1}.get(phase, 0) for phase in phases), initial=0))
    return misplaced.index(min(misplaced)) if "backward" in phases else None
