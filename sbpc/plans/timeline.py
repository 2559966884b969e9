"""Simulates a step on two kinds of streams: one computes, and each kind of link carries one collective at a time.

A program runs its nodes in order. A kernel takes the computing stream. A collective starts where it stands, as soon
as its link is free, and goes on beside the kernels that follow, up to the node that waits for it. One that nobody
waits for apart is waited for where it stands. Collectives of one bucket (`meta["bucket"]`) are one: the first takes
its whole time, each other one what it makes the message longer, and all end together. Durations are those of the
busiest rank, as in `Cost`; where the cluster says so, both take longer while a kernel and a collective run beside each
other.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from sbpc.boxing.steps import Step, group, kernels_of, link_seconds, step_cost
from sbpc.mesh.cluster import Cluster
from sbpc.mesh.collectives import DISPATCH, WIRE, Lines, seconds_on
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Ragged
from sbpc.plans.cost import kernel_work
from sbpc.plans.measure import counts_of, dispatch_of, kernel_key, kernel_of, sent_by, transfer_of

COMPUTE, INSIDE, ACROSS = "compute", "links inside a node", "links across nodes"
STREAMS = COMPUTE, INSIDE, ACROSS
SAME = 1e-9  # relative: moments that differ by less are one
CALL = 5e-6  # seconds of a CPU for a kernel but for its launch: half of what code of a GPT with tiny kernels takes


@dataclass(frozen=True)
class Event:
    """A kernel or a collective on its stream, from `start` to `end` in seconds since the step began.

    stream: one of `STREAMS`. name: of the node of the boxed graph. kind: the op or the collective. phase: "forward"
    or "backward". axis: over which a collective goes, merged axes as "a+b". bucket: of a collective that goes in one
    message with others, the name of the first of them.
    """

    stream: str
    start: float
    end: float
    name: str
    kind: str
    module: str
    phase: str
    axis: str = ""
    bucket: str = ""


@dataclass(frozen=True)
class Work:
    """What a node of a boxed graph occupies: a stream, for so many seconds. Views and local boxings take none.

    latency: the part of the seconds that a collective does not take where it goes in one message with another: all but
    what its bytes take in a long message. block, lines: of one that is sent otherwise in longer messages, its bytes and
    what messages take (see `Mesh.lines`). pack, unpack: seconds in which kernels prepare what it sends,
    and add up or unpack what it gives once it is waited for.
    """

    stream: str
    seconds: float
    latency: float = 0.0
    block: float = 0.0
    lines: Lines = ()
    pack: float = 0.0
    unpack: float = 0.0

    def longer(self, before: float) -> float:
        """Returns the seconds by which it makes a message longer in which a block of so many bytes is already."""
        if not self.lines:
            return self.seconds - self.latency
        return seconds_on(self.lines, before + self.block) - seconds_on(self.lines, before)


NOTHING = Work(COMPUTE, 0.0)


def works(boxed: GraphModule, mesh: Mesh) -> dict[Node, Work]:
    """Returns what every node of a boxed graph occupies on the busiest rank."""
    known: dict[Any, Work] = {}
    result = {}
    for node in boxed.graph.nodes:
        if "step" in node.meta:
            result[node] = transfer_work(node, mesh)
        elif "choice" in node.meta and node.op == "call_function":
            key = kernel_key(node)
            if key not in known:
                known[key] = kernel_work_of(node, mesh)
            result[node] = known[key]
        elif "awaits" in node.meta:
            step, value = node.meta["awaits"], node.meta["val"]
            rows = step.collective == DISPATCH
            work = None if rows else step_work(step, tuple(value.shape), value.element_size(), mesh)
            result[node] = unpacking(result[node.all_input_nodes[0]] if work is None else work)
        else:
            result[node] = NOTHING
    return result


def unpacking(transfer: Work) -> Work:
    """Returns what is computed once a collective is waited for."""
    return Work(COMPUTE, transfer.unpack) if transfer.unpack else NOTHING


def transfer_work(node: Node, mesh: Mesh) -> Work:
    """Returns what a boxing occupies: the link of its widest axis, or nothing if it sends nothing."""
    transfer = transfer_of(node, mesh)
    return step_work(transfer.step, transfer.shape, transfer.itemsize, mesh)


@functools.lru_cache(maxsize=1 << 14)
def step_work(step: Any, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> Work:
    """Returns what one boxing step of a tensor occupies."""
    if step.collective not in WIRE or all(mesh.sizes[axis] == 1 for axis in step.axes):
        return NOTHING
    _, block = group(step, shape, itemsize, mesh.sizes)
    seconds, (lines, _) = link_seconds(step, block, mesh), mesh.lines(step.axes, step.collective)
    stream, latency = INSIDE if mesh.inside(step.axes) else ACROSS, seconds - float(block * lines[-1][1])
    known = (float(block), lines) if len(lines) > 1 else (0.0, ())
    return Work(stream, seconds, latency, *known, *kernels_of(step, shape, mesh))


def kernel_work_of(node: Node, mesh: Mesh) -> Work:
    """Returns what one kernel occupies. One that sends rows to the ranks of their groups puts them in order before and
    behind that; where ranks tell each other before how many there are, it waits for the numbers."""
    kernel, sent, counts = kernel_of(node, mesh), dispatch_of(node, mesh), counts_of(node, mesh)
    if kernel.free:
        return NOTHING
    seconds = float(mesh.cluster.kernel_seconds(kernel.op, *kernel_work(kernel, mesh.sizes)))
    if sent is None:
        return Work(COMPUTE, seconds)
    stream, (moving, _) = (
        INSIDE if mesh.inside(sent.step.axes) else ACROSS,
        step_cost(sent.step, sent.shape, sent.itemsize, mesh),
    )
    waiting = 0.0 if counts is None else step_cost(counts.step, counts.shape, counts.itemsize, mesh)[0]
    if not moving:
        return Work(COMPUTE, seconds)
    return Work(stream, moving, pack=seconds / 2 + waiting, unpack=seconds / 2)


def sends(node: Node, mesh: Mesh) -> bool:
    """Returns whether a node of a boxed graph is a collective that sends anything."""
    return "step" in node.meta and transfer_work(node, mesh) is not NOTHING


def is_awaited(node: Node) -> bool:
    """Returns whether a boxing has a node of its own that waits for it."""
    return any("awaits" in user.meta for user in node.users)


Message = tuple[Hashable, str]  # of which program, and its name there, see `bucket_of`
Left = tuple[tuple[str, Message, float], ...]  # what is on its way: its stream, and the seconds until it is there


def timeline(boxed: GraphModule, mesh: Mesh) -> list[Event]:
    """Returns the events of one step of a boxed graph, in the order of its nodes."""
    return played(works(boxed, mesh), mesh)[0]


def played(
    work_of: Mapping[Node, Work], mesh: Mesh, owner: Hashable = None, before: Left = ()
) -> tuple[list[Event], float, Left]:
    """Returns the events of calls of a boxed graph, when all is done that is waited for, and what is on its way then.

    owner: of the messages of these calls. before: what is on its way when they begin.
    """
    clock, found = Clock(mesh.cluster, before), list[tuple[Node, Work, Span]]()
    for node, work in work_of.items():
        if "awaits" in node.meta:
            clock.wait((owner, bucket_of(node.all_input_nodes[0])))
        if work.seconds:
            found.append((node, work, clock.take(work, (owner, bucket_of(node)), is_awaited(node))))
    left = clock.left()
    clock.settle()
    events = [event_of(node, work.stream, span.start, span.end, mesh) for node, work, span in found]
    ready = clock.now if before or left else makespan(events)
    return events, ready, left


@dataclass
class Span:
    """When a kernel or a collective starts and ends."""

    start: float
    end: float


class Clock:
    """The time on the computing stream while a program runs, and the collectives that are on their way.

    Beside a collective kernels take `kernels_beside` times as long, and it takes `links_beside` times as long beside
    kernels. To start one that is waited for later takes `start` seconds.
    now: seconds since the step began. at: the same on the clock of the links, which is slow beside kernels; theirs are
    the spans of collectives until these are settled. turns: how it went: moments of links and of the step from which
    on a second of links took so long. ends: by stream when its last collective ends. sent: of collectives the stream,
    what its message is called, and its span. last: by message, the last span of it. blocks: likewise the bytes of all.
    """

    def __init__(self, cluster: Cluster, before: Left = ()) -> None:
        self.now, self.at, self.kernels, self.slow = 0.0, 0.0, cluster.kernels_beside, cluster.links_beside
        self.start = cluster.start
        self.turns = list[tuple[float, float, float]]()
        self.ends = dict.fromkeys((stream for stream in STREAMS if stream != COMPUTE), 0.0)
        self.sent = list[tuple[str, Hashable, Span]]()
        self.last = dict[Hashable, Span]()
        self.blocks = dict[Hashable, float]()
        for stream, message, seconds in before:
            self.send(stream, message, Span(0.0, seconds))

    def take(self, work: Work, message: Hashable, awaited: bool) -> Span:
        """Runs a kernel, or starts a collective as part of a message, which is waited for at once unless it is
        `awaited` later."""
        if work.stream == COMPUTE:
            start = self.now
            self.compute(work.seconds)
            return Span(start, self.now)
        if work.pack:
            self.compute(work.pack)
        start = max(self.at, self.ends[work.stream])
        first, before = message not in self.last, self.blocks.get(message, 0.0)
        span = Span(start, start + (work.seconds if first else work.longer(before)))
        self.blocks[message] = before + work.block
        self.send(work.stream, message, span)
        if not awaited:
            self.wait(message)
            if work.unpack:
                begun = self.now - (self.at - span.start)
                self.compute(work.unpack)
                return Span(begun, self.now)
        elif first:
            self.go(self.start, 1.0)
        return span

    def send(self, stream: str, message: Hashable, span: Span) -> None:
        """Puts a collective behind the others of its stream."""
        self.ends[stream] = span.end
        self.last[message] = span
        self.sent.append((stream, message, span))

    def left(self) -> Left:
        """Returns the messages that are on their way, in order, with the seconds until each is there."""
        flying = [each for each in self.sent if self.last[each[1]] is each[2] and each[2].end > self.at]
        flying.sort(key=lambda each: STREAMS.index(each[0]))
        return tuple((stream, message, span.end - self.at) for stream, message, span in flying)  # type: ignore[misc]

    def wait(self, message: Hashable) -> None:
        """Waits for all collectives of a message, unless it came before the calls began."""
        if message in self.last:
            self.go(self.last[message].end - self.at, 1.0)

    def compute(self, seconds: float) -> None:
        """Runs a kernel that takes so long if nothing is on its way."""
        while busy := [end - self.at for end in self.ends.values() if end > self.at]:
            took = min(seconds * self.kernels, min(busy) * self.slow)
            self.go(took, self.slow)
            if took == seconds * self.kernels:
                return
            seconds -= took / self.kernels
        self.go(seconds, 1.0)

    def go(self, seconds: float, slow: float) -> None:
        """Lets time pass; slow: of it links take so many seconds for one of theirs."""
        if seconds > 0:
            self.turns.append((self.at, self.now, slow))
            self.now, self.at = self.now + seconds, self.at + seconds / slow

    def settle(self) -> None:
        """Gives all collectives their seconds since the step began."""
        turns = [*self.turns, (self.at, self.now, 1.0)]
        for _, _, span in self.sent:
            span.start, span.end = (
                now + (moment - at) * slow
                for moment in (span.start, span.end)
                for at, now, slow in (turns[bisect.bisect_right(turns, (moment, math.inf)) - 1],)
            )


def bucket_of(node: Node) -> str:
    """Returns the name of the first collective of those that go in one message with this one: its own where it goes
    alone."""
    return str(node.meta.get("bucket", node.name))


def kind_of(node: Node) -> Hashable:
    """Returns what is equal for collectives that may go in one message: what they do over which ranks, with what,
    and when. Rows that are counted as the program runs go alone."""
    step = node.meta["step"]
    (reduction,) = {getattr(step.before.states[axis], "op", None) for axis in step.axes}
    alone = node.name if any(isinstance(state, Ragged) for state in step.before.states) else None
    return step.collective, step.axes, reduction, node.meta["val"].dtype, node.meta.get("phase"), alone


def exposed_seconds(events: Sequence[Event]) -> dict[str, float]:
    """Returns by name of a collective for how long nothing is computed while it goes on."""
    computing = [event for event in events if event.stream == COMPUTE]
    ends, starts = (
        [0.0, *(event.end for event in computing)],
        [*(event.start for event in computing), makespan(list(events))],
    )
    result = {}
    for event in events:
        if event.stream != COMPUTE:
            first, last = bisect.bisect_left(starts, event.start), bisect.bisect_right(ends, event.end)
            idle = (min(event.end, starts[at]) - max(event.start, ends[at]) for at in range(first, last))
            result[event.name] = sum(max(0.0, seconds) for seconds in idle)
    return result


def critical_seconds(events: Sequence[Event]) -> dict[str, float]:
    """Returns by name of a call what it adds to the step: its seconds, where it stands on the chain of events, each
    begun as soon as the one before it ended, that ends last."""
    in_order = sorted(events, key=lambda event: event.end)
    ends, at, result = [event.end for event in in_order], len(in_order) - 1, dict[str, float]()
    while at >= 0:
        event = in_order[at]
        result[event.name] = event.end - event.start
        at = min(at, bisect.bisect_right(ends, event.start * (1 + SAME))) - 1
    return result


def event_of(node: Node, stream: str, start: float, end: float, mesh: Mesh) -> Event:
    """Returns the event of a node."""
    step: Step | None = node.meta.get("step")
    kind = step.collective if step else str(node.target).removesuffix(".default")
    sent = sent_by(node) if step is None and stream != COMPUTE else step
    axis = mesh.key(sent.axes) if sent else ""
    kind = f"after {node.meta['awaits'].collective}" if "awaits" in node.meta else kind
    module, phase = node.meta.get("module") or "", node.meta.get("phase", "forward")
    return Event(stream, start, end, node.name, kind, module, phase, axis, node.meta.get("bucket", ""))


def makespan(events: list[Event]) -> float:
    """Returns the seconds after which the last event ends."""
    return max((event.end for event in events), default=0.0)


def busy_seconds(events: list[Event]) -> Mapping[str, float]:
    """Returns the seconds that each stream is busy."""
    busy = dict.fromkeys(STREAMS, 0.0)
    for event in events:
        busy[event.stream] += event.end - event.start
    return busy


def launches_bound(graphs: Iterable[GraphModule], mesh: Mesh) -> bool:
    """Returns whether a device would have done the kernels of boxed graphs before a CPU has launched them. On a
    cluster without a time of launches it would not."""
    cluster, work, calls = mesh.cluster, 0.0, 0
    if not cluster.launch:
        return False
    rates = cluster.peak, cluster.memory_bandwidth, 0.0
    for node in (node for gm in graphs for node in gm.graph.nodes):
        if "choice" in node.meta and node.op == "call_function" and not (kernel := kernel_of(node, mesh)).free:
            work += float(cluster.kernel_seconds(kernel.op, *kernel_work(kernel, mesh.sizes), rates))
            calls += 1
    return work < calls * (cluster.launch + CALL)
