"""Measures a program: runs it with a time stamp between its nodes, as the executor "code" does, and tells when each
of them ran.

A stamp takes less than a microsecond.
On a GPU, stamps are events on the computing stream. A collective lasts from its start to when its work is done:

- on a GPU, to when the link's stream is through with it;
- on gloo, to the first stamp that finds it done: late by one kernel or one wait at most;
- where it is a direct exchange, to when its messages are there; the sums that the waiting thread then makes are part
  of the wait.

A group does collectives of one sort one after the other, so one that starts while another is on its way begins when
that is done. On gloo two may run at a time: one that is done before the other was under way beside it since its start.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sbpc.graph.expert_rows import OF_PEERS, PLACES, rows_by_rank
from sbpc.plans.timeline import COMPUTE, Event
from sbpc.runtime.executors import code
from sbpc.runtime.prepared import wait
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.direct_exchange import DirectGroup, DirectWork

KERNEL, START, WAIT = "kernel", "start", "wait"
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Neighbouring calls of a program that are measured together: the first of them, and what they are."""

    node: Node
    role: str

    @property
    def name(self) -> str:
        """The name of the node of the boxed graph for which they are written, else their own."""
        return str(self.node.meta.get("boxed", self.node.name))


@dataclass
class Run:
    """The moments of one run, as its clock has them.

    stamps: before the first part, then after each. done: by the name of a collective, when its work was done. queue:
    by its name, in what it stands behind others. routed: by module what tells how many rows of experts each rank has,
    see `rows_by_rank`.
    """

    stamps: list[Any] = field(default_factory=list)
    done: dict[str, Any] = field(default_factory=dict)
    queue: dict[str, Any] = field(default_factory=dict)
    routed: dict[str, tuple[Tensor, Sequence[int], int]] = field(default_factory=dict)

    def busiest(self) -> dict[str, float]:
        """Returns by module the rows of the rank that has most, as a multiple of the mean."""
        counts = {module: rows_by_rank(*each) for module, each in self.routed.items()}
        return {module: max(each) * len(each) / sum(each) for module, each in counts.items()}


class HostClock:
    """Takes the time of the CPU. flying, direct: by the result of a collective, what ran it, its name, and its work
    while it is on its way: what waits for it may be another program."""

    def __init__(self) -> None:
        self.run, self.flying = Run(), dict[int, tuple[Run, str, dist.Work]]()
        self.direct, self.begun = dict[int, DirectWork](), dict[int, tuple[Run, str]]()
        self.threads: dict[str, ThreadPoolExecutor] = {}  # by group: what waits for its direct exchanges

    def stamp(self) -> None:
        """Takes the time."""
        self.run.stamps.append(self.moment())

    def moment(self) -> float:
        """Returns the time, at which it looks which collectives are done."""
        now = time.perf_counter()
        for key in [key for key, (_, _, work) in self.flying.items() if work.is_completed()]:
            run, name, _ = self.flying.pop(key)
            run.done[name] = now
        return now

    def start(self, name: str, op: Callable[..., Any], *args: Any) -> Any:
        """Starts a collective, and keeps hold of its work where it can be had."""
        group, works = process_groups.named[args[-1]], list[dist.Work]()
        self.run.queue[name] = name
        if not isinstance(group, DirectGroup):
            return op(*args)
        group.started = works
        value = op(*args)
        group.started = None
        (work,) = works
        self.begun[id(value)] = self.run, name
        if isinstance(work, DirectWork):
            thread = self.threads.setdefault(args[-1], ThreadPoolExecutor(1))
            work.received = thread.submit(work.receive)
            self.direct[id(value)] = work
        else:
            self.flying[id(value)] = self.run, name, work
        self.run.queue[name] = args[-1], type(work)
        return value

    def wait(self, name: str, x: Tensor) -> Tensor:
        """Waits for a collective."""
        value, direct = wait(x), self.direct.pop(id(x), None)
        now = self.moment()
        run, name = self.begun.pop(id(x), (self.run, name))
        if name not in run.done:
            run.done[name] = direct.received.result() if direct and direct.received else now
        return value

    def close(self) -> None:
        """Ends the threads."""
        for thread in self.threads.values():
            thread.shutdown()

    @staticmethod
    def seconds(first: float, then: float) -> float:
        """Returns the seconds between two moments."""
        return then - first


class DeviceClock:
    """Takes the time of a GPU. Another stream waits for each collective at once, and tells the computing stream when
    it is done."""

    def __init__(self) -> None:
        self.run, self.streams = Run(), dict[str, torch.cuda.Stream]()
        # by the result of a collective: what it reads, which its early wait would free, and when it is done
        self.held: dict[int, tuple[Any, torch.cuda.Event]] = {}

    def stamp(self) -> None:
        """Marks a moment of the computing stream."""
        self.run.stamps.append(self.moment())

    @staticmethod
    def moment() -> torch.cuda.Event:
        """Marks a moment of the stream that is in use."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, name: str, op: Callable[..., Any], *args: Any) -> Any:
        """Starts a collective, and lets another stream wait for it."""
        value = op(*args)
        with torch.cuda.stream(self.streams.setdefault(args[-1], torch.cuda.Stream())):
            wait(value)
            self.run.done[name] = self.moment()
        self.held[id(value)] = args, self.run.done[name]
        self.run.queue[name] = args[-1]
        return value

    def wait(self, name: str, x: Tensor) -> Tensor:
        """Lets the computing stream wait for a collective."""
        _, done = self.held.pop(id(x))
        torch.cuda.current_stream().wait_event(done)
        return x

    def close(self) -> None:
        """Has nothing to end."""

    @staticmethod
    def seconds(first: torch.cuda.Event, then: torch.cuda.Event) -> float:
        """Returns the seconds between two moments."""
        then.synchronize()
        return first.elapsed_time(then) * 1e-3


Clock = HostClock | DeviceClock


def clock_of(where: torch.device) -> Clock:
    """Returns a clock for what is computed on a device."""
    return DeviceClock() if where.type == "cuda" else HostClock()


class Recorder:
    """Runs a program and keeps the moments of every run. clock: one for all programs that run by turns."""

    def __init__(self, program: GraphModule, clock: Clock) -> None:
        self.clock, self.parts = clock, parts_of(program)
        self.function = code(stamped(program, self.parts, self.clock))
        self.runs: list[Run] = []

    def __call__(self, given: list[Tensor]) -> tuple[Any, ...]:
        """Runs the program on values, as an executor's function does."""
        self.clock.run = Run()
        self.runs.append(self.clock.run)
        return self.function(given)

    def length(self, run: Run) -> float:
        """Returns the seconds of a run."""
        return self.clock.seconds(run.stamps[0], run.stamps[-1])

    def events_of(self, run: Run, predicted: Sequence[Event]) -> list[Event]:
        """Returns what happened in a run, in seconds since it began, in the order of the starts.

        predicted: the program's timeline. Every event of it is there once, by the same name. Besides, the computing
        stream has what is not predicted, as it takes no time in the prediction: "start" and "wait" of a collective,
        "pack" before it and "unpack" after it, and ops such as views. Collectives that go in one message are
        measured as one: each has the part of its time that is predicted.
        """
        known, seen, free = {event.name: event for event in predicted}, set[tuple[str, str]](), dict[Any, float]()
        moments = [self.clock.seconds(run.stamps[0], stamp) for stamp in run.stamps]
        found: list[Event] = []
        for part, (start, end) in zip(self.parts, itertools.pairwise(moments)):
            name, event = part.name, known.get(part.name)
            found.append(Event(COMPUTE, start, end, name, kind_of(part, event, seen), *place_of(part.node)))
            seen.add((name, part.role))
            if part.role == START and event is not None:
                queue, done = run.queue[name], self.clock.seconds(run.stamps[0], run.done[name])
                last = free.get(queue, 0.0)
                start, free[queue] = max(start, last if last <= done else 0.0), max(last, done)
                together = [each for each in predicted if each.bucket == name] if event.bucket else [event]
                first, rate = together[0].start, (done - start) / (together[-1].end - together[0].start)
                found += [
                    replace(each, start=start + rate * (each.start - first), end=start + rate * (each.end - first))
                    for each in together
                ]
        return sorted(found, key=lambda event: event.start)


def median(runs: Sequence[T], length: Callable[[T], float]) -> T:
    """Returns the run of median length, of two in the middle the shorter one."""
    return sorted(runs, key=length)[(len(runs) - 1) // 2]


def kind_of(part: Part, predicted: Event | None, seen: set[tuple[str, str]]) -> str:
    """Returns what a part is on the computing stream. seen: the names and roles of the parts before it."""
    if part.role != KERNEL:
        return part.role
    if predicted is None:
        return str(part.node.target).removesuffix(".default")
    if predicted.stream != COMPUTE:
        return "unpack" if (part.name, START) in seen else "pack"
    return "rest" if (part.name, KERNEL) in seen else predicted.kind


def place_of(node: Node) -> tuple[str, str]:
    """Returns the module and the phase of a node."""
    return node.meta.get("module") or "", node.meta.get("phase", "forward")


def parts_of(program: GraphModule) -> list[Part]:
    """Returns the parts of a program in order: collectives, waits, and what else is written for one node of the
    boxed graph: also what a call that sends rows of experts exchanges before, so that ranks know how many these are."""
    found: list[Part] = []
    parts = [Part(node, role_of(node)) for node in program.graph.nodes if node.op in ("call_function", "get_attr")]
    last = {(part.name, part.role): part for part in parts}
    for part in parts:
        role = part.role if last[part.name, part.role] is part else KERNEL
        part = replace(part, role=role)
        if not found or role != KERNEL or (found[-1].role, found[-1].name) != (role, part.name):
            found.append(part)
    return found


def role_of(node: Node) -> str:
    """Returns whether a call starts a collective, or waits for one, or computes."""
    return WAIT if node.target is wait else START if "_c10d_functional" in str(node.target) else KERNEL


def stamped(program: GraphModule, parts: Sequence[Part], clock: Clock) -> GraphModule:
    """Returns a program that takes the time before its first part and after every part."""

    def stamp() -> None:
        clock.stamp()

    def start(name: str, *args: Any) -> Any:
        return clock.start(name, ops[name], *args)

    def wait_for(name: str, x: Tensor) -> Tensor:
        return clock.wait(name, x)

    def places(module: str, index: Tensor, ends: Tensor, rank: Tensor, groups: Sequence[int], *args: Any) -> Any:
        clock.run.routed[module] = ends, groups, len(index)
        return PLACES(index, ends, rank, groups, *args)

    def of_peers(module: str, ends: Tensor, rank: Tensor, groups: Sequence[int], size: int, *args: Any) -> Any:
        clock.run.routed[module] = ends.view(len(groups), -1).sum(0), groups, size * len(groups)
        return OF_PEERS(ends, rank, groups, size, *args)

    graph, ops = Graph(), dict[str, Any]()
    copies: dict[Node, Node] = {}
    results: Any = graph.graph_copy(program.graph, copies)
    for node, copy in copies.items():
        if node.target is OF_PEERS or (node.target is PLACES and node.args[5]):
            told = of_peers if node.target is OF_PEERS else places
            copy.target, copy.args = told, (place_of(node)[0] or node.name, *copy.args)
    for part in parts:
        node = copies[part.node]
        with graph.inserting_before(node):
            graph.call_function(stamp)
        if part.role == START:
            ops[part.name] = node.target
            node.target, node.args = start, (part.name, *node.args)
        elif part.role == WAIT:
            node.target, node.args = wait_for, (part.name, *node.args)
    graph.call_function(stamp)
    graph.output(results)
    return GraphModule(program, graph)
