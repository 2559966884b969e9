"""What a step costs whose stages work on micro-batches: seconds, bubble, communication and memory of the busiest rank."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import Tensor
from torch.fx import Node

from sbpc.graph.ports import GRADIENT, PARAMETER, results
from sbpc.graph.recomputed import is_recomputed
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.cost import OPTIMIZER_STATE, numel
from sbpc.plans.measure import comm_totals, compute_totals, kernel_of, transfer_of
from sbpc.plans.plan import Plan
from sbpc.plans.staged.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, spans
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, FREE, parts_of
from sbpc.plans.timeline import COMPUTE, works


@dataclass(frozen=True)
class StagedCost:
    """What one step of a plan with stages costs on the busiest rank.

    seconds: from the start of the step to its end, as the schedule goes. compute_seconds, comm_seconds: that the busiest rank computes
    and communicates; exposed_seconds: of the latter, inside a stage and between stages, those that nothing hides; bubble_seconds: that
    it waits for other stages. bytes_sent: by axis. memory: by kind, "total" is the peak of the busiest rank. lower_bound: what no
    layouts of these stages can beat.
    """

    seconds: float
    compute_seconds: float
    comm_seconds: float
    bubble_seconds: float
    bytes_sent: dict[str, float]
    memory: dict[str, int]
    flops: float
    lower_bound: float
    recompute_seconds: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which nothing is computed, since a collective is waited for."""
        return self.seconds - self.compute_seconds - self.bubble_seconds

    @property
    def gap(self) -> float:
        """(seconds - lower_bound) / seconds: bubble and uneven stages are in it."""
        return (self.seconds - self.lower_bound) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class PartCost:
    """What a chunk costs: by part the seconds, the flops and the bytes sent by axis; and bytes of memory on the busiest rank.

    homes: by parameter. trained: of trained ones. added: of gradients while they add up. gathered: of what is boxed before the
    micro-batches. saved: of what a micro-batch keeps between forward and backward. transient: of what else is alive at the peak of one;
    first: at that of the first one to come back, with the gradients that it makes; ending: before or behind all of them.
    again: seconds in a micro-batch of computing values again.
    """

    compute: dict[str, float]
    comm: dict[str, float]
    flops: dict[str, float]
    sent: dict[str, dict[str, float]]
    homes: dict[str, int]
    trained: int
    added: int
    gathered: int
    saved: int
    transient: int
    first: int
    ending: int
    again: float = 0.0

    def total(self, part: str) -> float:
        """Returns the seconds of a part."""
        return self.compute.get(part, 0.0) + self.comm.get(part, 0.0)

    @classmethod
    def of(cls, plan: Plan, once: Container[str]) -> PartCost:
        """Measures the boxed graph of a chunk. once: what is boxed once for all micro-batches."""
        boxed, mesh = plan.unscheduled, plan.mesh
        parts, every = parts_of(boxed, once), works(boxed, mesh)
        groups: dict[str, list[Node]] = {}
        for node, part in parts.items():
            groups.setdefault(FORWARD if part == FREE else part, []).append(node)
        compute, comm = dict[str, float](), dict[str, float]()
        flops, sent = dict[str, float](), dict[str, dict[str, float]]()
        for part, nodes in groups.items():
            moved = Counter(transfer_of(node) for node in nodes if "step" in node.meta)
            kernels = Counter(kernel_of(n) for n in nodes if "choice" in n.meta and n.op == "call_function")
            compute[part] = sum(every[node].seconds for node in nodes if every[node].stream == COMPUTE)
            comm[part], sent[part] = comm_totals(moved, mesh)
            flops[part] = compute_totals(kernels, mesh)[1]
        again = sum(work.seconds for node, work in every.items() if is_recomputed(node))
        return cls(compute, comm, flops, sent, *memory_of(plan, parts), again)


def memory_of(plan: Plan, parts: Mapping[Node, str]) -> tuple[dict[str, int], int, int, int, int, int, int, int]:
    """Returns the memory of a chunk as `PartCost` has it, from `homes` on."""
    boxed, mesh, life = plan.unscheduled, plan.mesh, plan.life
    ends = list(zip(plan.ports.outputs, results(boxed)))
    homes = {
        port.name: bytes_at(value, plan.given[port], mesh) for port, value in plan.shapes.items() if port.kind == PARAMETER
    }
    trained = sum(homes[port.name] for port, _ in ends if port.kind == GRADIENT)
    sums = {summand(node, parts) for port, node in ends if port.kind == GRADIENT and node is not None}
    added = sum(bytes_at(node.meta["val"], node.meta["sbp"], mesh) for node in sums)
    added_up = {storage for node in sums for storage in life.values[node]}
    phase = [PROGRAMS.index(FORWARD if part == FREE else part) for part in (parts.get(moment.node, FORWARD) for moment in life.moments)]
    order = sorted(range(len(phase)), key=phase.__getitem__)
    close = {phase[number]: at for at, number in enumerate(order)}
    last, readers = dict[int, int](), dict[int, set[str]]()
    for at, number in enumerate(order):
        moment = life.moments[number]
        for storage in (*moment.reads, *(made for made, _ in moment.makes)):
            readers.setdefault(storage, set()).add(parts.get(moment.node, FORWARD))
            if storage not in added_up or PROGRAMS[phase[number]] != AFTER:  # behind the micro-batches it is the sum that is read
                last[storage] = at
    kept = {
        storage: kind
        for storage, owner in enumerate(life.owner)
        if (kind := kind_of(parts[owner], readers.get(storage, set()), owner.op == "placeholder")) is not None
    }
    saved, gathered = (sum(life.size[each] for each, kind in kept.items() if kind == which) for which in (SAVED, GATHERED))
    alive, most = 0, [0] * len(PROGRAMS)
    made = first = 0  # gradients so far
    dying: dict[int, int] = {}
    for at, number in enumerate(order):
        for storage, size in life.moments[number].makes:
            if storage not in kept:
                alive += size
                end = last[storage] if storage in added_up or life.last[storage] < inf else close[phase[number]]
                dying[end] = dying.get(end, 0) + size
        most[phase[number]] = max(most[phase[number]], alive)
        first = max(first, alive + made) if PROGRAMS[phase[number]] in (INPUTS, WEIGHTS) else first
        alive -= dying.pop(at, 0)
        made += sum(life.size[storage] for storage in added_up if last[storage] == at)
    return homes, trained, added, gathered, saved, max(most[1:-1]), first, max(most[0], most[-1])


PROGRAMS = (BEFORE, FORWARD, INPUTS, WEIGHTS, AFTER)  # the order in which parts run, whatever that of the graph


FIXED, SAVED, GATHERED = "fixed", "saved", "gathered"


def kind_of(part: str, readers: set[str], given: bool) -> str | None:
    """Returns as what a storage is counted, None if it is alive for a moment. part: that makes it. given: a placeholder."""
    if given and part in (BEFORE, FREE):
        return FIXED
    if part == BEFORE and readers - {BEFORE}:
        return GATHERED
    return SAVED if part == FORWARD and readers & {INPUTS, WEIGHTS, AFTER} else None


def summand(node: Node, parts: Mapping[Node, str]) -> Node:
    """Returns what goes into the boxings of a gradient on its way home."""
    while parts[node] == AFTER:
        (node,) = (used for used in node.all_input_nodes if parts[used] not in (FREE, BEFORE))
    return node


def bytes_at(value: Tensor, layout: Layout | None, mesh: Mesh) -> int:
    """Returns the bytes of a tensor in a layout on the busiest rank."""
    cuts = {} if layout is None else layout.cuts
    return value.element_size() * int(numel(value.shape, [cuts.get(dim, ()) for dim in range(value.dim())], mesh.sizes))


class Pipeline(ABC):
    """Stages that work on micro-batches. What has `parts`, knows what needs what, and what crosses, has a cost."""

    options: dict[str, Any]
    schedule: str
    bound: float

    @property
    @abstractmethod
    def count(self) -> int:
        """How many micro-batches there are."""

    @property
    @abstractmethod
    def stages(self) -> int:
        """How many ranks the axis of stages has."""

    @property
    @abstractmethod
    def owners(self) -> Sequence[int]:
        """By chunk the stage that has it."""

    @property
    @abstractmethod
    def actions(self) -> Sequence[Sequence[Action]]:
        """By stage what it does, in order."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[PartCost]:
        """What the parts of each chunk cost."""

    @property
    @abstractmethod
    def bytes_sent(self) -> dict[str, float]:
        """By axis the bytes that the busiest rank sends in a step."""

    @abstractmethod
    def needs(self, action: Action) -> Sequence[Action]:
        """Returns the actions that one can begin only after."""

    @abstractmethod
    def sending(self, source: Action, action: Action) -> float:
        """Returns the seconds for what one action sends to another one."""

    @property
    def split(self) -> bool:
        """Whether the backward runs in two parts."""
        return self.schedule == "zbv"

    @functools.cached_property
    def spans(self) -> dict[Action, tuple[float, float]]:
        """When every action starts and ends, in seconds since the first one."""
        seconds: dict[tuple[str, int], float] = {}
        for at, part in enumerate(self.parts):
            seconds |= {(kind, at): part.total(kind) for kind in (FORWARD, INPUTS, WEIGHTS)}
            seconds[BACKWARD, at] = seconds[INPUTS, at] + seconds[WEIGHTS, at]
        return spans(self.actions, self.needs, seconds, self.sending)

    def single(self, stage: int, part: str) -> float:
        """Returns the seconds that a stage needs once, BEFORE or AFTER the micro-batches."""
        return sum(self.parts[at].total(part) for at, owner in enumerate(self.owners) if owner == stage)

    @functools.cached_property
    def cost(self) -> StagedCost:
        """Seconds, bytes and memory of a step."""
        stages = range(self.stages)
        before, after = ([self.single(stage, part) for stage in stages] for part in (BEFORE, AFTER))
        ends = self.last_ends()
        seconds = max(before) + max(end + once for end, once in zip(ends, after))
        compute = [self.totals(stage, "compute") for stage in stages]
        communicate = [self.totals(stage, "comm") for stage in stages]
        most = max(stages, key=lambda stage: compute[stage] + communicate[stage])
        busy = compute[most] + communicate[most]
        flops = max(self.totals(stage, "flops") for stage in stages)
        bound = min(self.bound, seconds)
        mine = [part for part, owner in zip(self.parts, self.owners) if owner == most]
        again = self.count * sum(part.again for part in mine)
        sent = self.bytes_sent
        return StagedCost(seconds, compute[most], communicate[most], max(0.0, seconds - busy), sent, self.memory, flops, bound, again)

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """The bytes that a rank of the stage that takes most has, by kind."""
        return max((self.memory_of(stage) for stage in range(self.stages)), key=lambda each: each["total"])

    def last_ends(self) -> list[float]:
        """Returns by stage when its last action ends."""
        return [max(self.spans[action][1] for action in actions) for actions in self.actions]

    def totals(self, stage: int, which: str) -> float:
        """Returns a figure of a stage, added up over its chunks and micro-batches."""
        mine = [part for part, owner in zip(self.parts, self.owners) if owner == stage]
        return sum(getattr(part, which)[key] * self.times_of(key) for part in mine for key in getattr(part, which))

    def times_of(self, part: str) -> int:
        """Returns how often a part runs in a step."""
        return 1 if part in (BEFORE, AFTER) else self.count

    def memory_of(self, stage: int) -> dict[str, int]:
        """Returns the bytes that a rank of a stage takes, by kind; "total" is the peak of the step.

        Activations are those of the micro-batches in flight, and gradients are there from a chunk's first backward on: not every kind
        has its most at the peak.
        """
        parts = [self.parts[at] for at, owner in enumerate(self.owners) if owner == stage]
        kinds = {
            "parameters": sum(sum(part.homes.values()) for part in parts),
            "gradients": sum(part.added for part in parts),
            "optimizer": OPTIMIZER_STATE[self.options.get("optimizer")] * sum(part.trained for part in parts),
            "activations": 0,
            "temporaries": sum(part.gathered for part in parts),
        }
        held = kinds["parameters"] + kinds["optimizer"] + kinds["temporaries"]
        beside = max(part.ending for part in parts)  # what is alive for a moment
        peak = kinds["gradients"] + beside
        alive = added = 0
        begun: set[int] = set()
        for action in self.actions[stage]:
            part = self.parts[action.chunk]
            alive += part.saved if action.kind == FORWARD else 0
            now = part.transient if action.kind == FORWARD or action.chunk in begun else part.first
            kinds["activations"], beside = max(kinds["activations"], alive), max(beside, part.transient)
            peak = max(peak, alive + added + now)
            if action.kind == (WEIGHTS if self.split else BACKWARD):
                alive -= part.saved
                added += 0 if action.chunk in begun else part.added
                begun.add(action.chunk)
        kinds["temporaries"] += beside
        return kinds | {"total": held + peak}
