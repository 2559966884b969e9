"""What a step costs whose stages work on micro-batches: seconds, bubble, communication and memory of the busiest rank."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy

from sbpc.errors import PlanError
from sbpc.graph.ports import Port
from sbpc.graph.recomputed import is_recomputed
from sbpc.plans.cost import OPTIMIZER_STATE, Cost
from sbpc.plans.measure import comm_totals, compute_totals, kernel_of, transfer_of
from sbpc.plans.plan import Plan
from sbpc.plans.staged.part_memory import memory_of
from sbpc.plans.staged.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, spans
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, calls_in, parts_of
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
    formulas_of: Callable[[StagedCost], Cost] | None = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def formulas(self) -> Cost:
        """Kernels and collectives of the busiest stage, with those in the loop `m` times each. Raises PlanError for an estimate."""
        if self.formulas_of is None:
            raise PlanError("an estimate of a step has no formula\n  Ask the plan of the row, row.plan.cost.")
        return self.formulas_of(self)

    @property
    def expr(self) -> sympy.Expr:
        """`compute_seconds + comm_seconds` as a formula in the micro-batches `m`, the `batch` or what `dynamic=` names, sizes of axes and
        figures of the cluster; see `sbpc.plans.cost.Cost.expr`."""
        return self.formulas.expr

    @property
    def bytes_expr(self) -> dict[str, sympy.Expr]:
        """What the busiest stage sends over its own axes, as formulas."""
        return self.formulas.bytes_expr

    @property
    def symbols(self) -> dict[str, sympy.Symbol]:
        """The symbols of the formulas by name."""
        return self.formulas.symbols

    @property
    def numbers(self) -> dict[str, float]:
        """The value of every symbol."""
        return self.formulas.numbers

    def subs(self, values: Mapping[str, float] | None = None, **more: float) -> float:
        """Returns `expr` with other values, as in `plan.cost.subs(m=8, batch=64)`; see `sbpc.plans.cost.Cost.subs`."""
        return self.formulas.subs(values, **more)

    def evaluate(self, values: Mapping[str, Any] | None = None, **more: Any) -> np.ndarray:
        """Returns what `subs` does, for arrays of values."""
        return self.formulas.evaluate(values, **more)

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
    def of(cls, plan: Plan, in_loop: Container[Port]) -> PartCost:
        """Measures the boxed graph of a chunk. in_loop: parameters and gradients that are boxed for every micro-batch."""
        boxed, mesh = plan.unscheduled, plan.mesh
        parts, every = parts_of(boxed, in_loop), works(boxed, mesh)
        compute, comm = dict[str, float](), dict[str, float]()
        flops, sent = dict[str, float](), dict[str, dict[str, float]]()
        for part in PARTS:
            nodes = calls_in(parts, part)
            moved = Counter(transfer_of(node) for node in nodes if "step" in node.meta)
            kernels = Counter(kernel_of(n) for n in nodes if "choice" in n.meta and n.op == "call_function")
            compute[part] = sum(every[node].seconds for node in nodes if every[node].stream == COMPUTE)
            comm[part], sent[part] = comm_totals(moved, mesh)
            flops[part] = compute_totals(kernels, mesh)[1]
        again = sum(work.seconds for node, work in every.items() if is_recomputed(node))
        return cls(compute, comm, flops, sent, *memory_of(plan, parts), again)


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
        figures = compute[most], communicate[most], max(0.0, seconds - busy), self.bytes_sent, self.memory, flops, bound, again
        return StagedCost(seconds, *figures, self.formulas_of(most))

    def formulas_of(self, stage: int) -> Callable[[StagedCost], Cost] | None:
        """Returns what makes the formulas of a stage's cost; None where nothing is known of its kernels."""
        return None

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
