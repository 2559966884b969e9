"""Search whole strategies: stages of a pipeline, layouts inside a stage, micro-batches and recompute, ranked by
predicted seconds.

What a block costs is measured on a model with two blocks of each run of equal ones, planned once for every mesh of a
stage and size of micro-batch. The seconds of any number of stages and blocks are put together from that; the plan of a
row is made when it is asked for.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from sbpc.api.candidates import PIPE, Candidate, Refused, block_times, total
from sbpc.api.experts import routed
from sbpc.api.recompute import forms_of
from sbpc.api.staging import EXPERTS, plan_stages, short_plans
from sbpc.api.task import Task
from sbpc.errors import LayoutError, MemoryLimitError, PinError, PlanError, SbpcError
from sbpc.graph.expert_rows import MESSAGE
from sbpc.graph.no_gc import uncollected
from sbpc.graph.operands import is_late, made_of
from sbpc.graph.ports import PARAMETER, Port, placeholders
from sbpc.graph.rewrite import rebuild
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Axes
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.joins import in_order
from sbpc.passes.loop.recompute import memory_of
from sbpc.passes.loop.recompute import recompute as compute_again
from sbpc.plans.options import AUTO, FULL, NONE, SELECTIVE, Options
from sbpc.plans.plan import Plan
from sbpc.plans.staged.estimate import Estimate, repeated
from sbpc.plans.staged.loop import Loop
from sbpc.plans.usage import Usage

SLOWER, LATE = "at full speed it takes longer than the best row", "the seconds of the search were over"
TOO_LARGE = "it does not fit into the memory"
Progress = Callable[[int, int, Any], None]


class TooLarge(MemoryLimitError):
    """No way of a strategy that was looked at fits. needed: bytes of a rank of the one that takes least; passing: those
    that are no parameters, gradients or states of the optimizer."""

    def __init__(self, needed: int, memory: float, what: str, passing: int = 0) -> None:
        self.needed, self.passing = needed, passing
        super().__init__(
            f"the strategy that needs least, {what}, takes {needed:,} bytes a rank, the limit is {memory:,.0f}: it "
            f"lacks {needed - memory:,.0f}\n  Give more devices, or more memory."
        )


@dataclass
class StrategyRow:
    """A strategy and what a step is predicted to take. `plan` is made when it is asked for.

    mesh: axes pipe, data and tensor, or expert in its place. stages: ranks along pipe. cost: seconds of a training
    step. Of these the busiest stage computes compute_seconds, recompute_seconds among them, waits exposed_seconds for
    collectives and bubble_seconds for other stages, and optimizer_seconds are the optimizer's. usage: the share of the
    peak, tokens or samples a second; None where nothing is told of the machine. memory: bytes of a rank by kind,
    "total" at the peak. lower_bound: what no strategy of the search takes less, those among them that have no row.
    refused: the strategies without a row, each with the reason.
    """

    mesh: Mesh
    stages: int
    schedule: str
    microbatches: int
    recompute: str
    cost: float
    compute_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    recompute_seconds: float
    optimizer_seconds: float
    usage: Usage | None
    memory: dict[str, int]
    make: Callable[[], Plan] = field(repr=False)
    lower_bound: float = 0.0
    refused: tuple[Refused, ...] = field(default=(), repr=False)

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of this strategy."""
        return self.make()


@dataclass
class Search:
    """The search of one model. task: the whole model, or how to capture it; short: that with two blocks of a run, as
    it is planned; lengths: of the runs. routing: what is asked about rows of experts, by keyword of `sbpc.plan`."""

    task: Callable[[], Task]
    short: Task
    lengths: dict[str, int]
    optimizer: str | None
    memory: float | None
    recompute: str
    seconds: float
    routing: Mapping[str, Any] = field(default_factory=dict)
    loops: dict[tuple[str, int], Loop] = field(default_factory=dict)
    plans: dict[Any, tuple[list[str], Callable[[int], Plan]]] = field(default_factory=dict)
    forms: dict[str, GraphModule] = field(default_factory=dict)
    kept: dict[str, float] = field(default_factory=dict)

    @uncollected()
    def rows(self, candidates: Sequence[Candidate], progress: Progress | None = None) -> list[StrategyRow]:
        """Returns the rows of candidates, best first, for so many CPU seconds: what seems fastest is looked at next.

        A guess knows nothing but flops, parameters and rows of experts. So a kind that was looked at counts as many
        times as it took, and one that was not as many times as the kind that took least. Where activations are why one
        does not fit, those with as large a part of the batch at once come last. Each row has the bound of all
        candidates, whether they have a row or not: one that was refused might have been cut or laid out otherwise.
        Raises MemoryLimitError if none fits, PlanError if none can be cut.
        """
        start, found, refused = time.process_time(), list[StrategyRow](), list[Refused]()
        errors, times, left = list[SbpcError](), dict[tuple[int, int], float](), list(candidates)
        large = math.inf
        for number in range(len(candidates)):
            best = min((row.cost for row in found), default=math.inf)
            late = bool(found) and time.process_time() - start > self.seconds
            refused += [
                each.refused(SLOWER if each.least >= best else LATE) for each in left if late or each.least >= best
            ]
            left = [] if late else [each for each in left if each.least < best]
            if not left:
                break
            usual = min(times.values(), default=1.0)  # of a kind that was not looked at
            each = min(left, key=lambda other: (other.part >= large, other.guess * times.get(other.kind, usual)))
            left.remove(each)
            if progress is not None:
                progress(number, len(candidates), each.mesh)
            try:
                found.append(self.row(each))
                times[each.kind] = min(times.get(each.kind, math.inf), found[-1].cost / each.guess)
            except (MemoryLimitError, PlanError) as error:
                errors.append(error)
                why: tuple[str, int | None] = str(error).partition("\n")[0], None
                if isinstance(error, TooLarge):
                    why = TOO_LARGE, error.needed
                    large = min(large, each.part) if 2 * error.passing > (self.memory or 0) else large
                refused.append(each.refused(*why))
        if not found:
            raise closest_error(errors)
        found.sort(key=lambda row: (row.cost, row.mesh.sizes, row.microbatches))
        bound = min([each.floor for each in candidates] + [row.cost for row in found])
        return [replace(row, lower_bound=bound, refused=tuple(refused)) for row in found]

    def row(self, each: Candidate) -> StrategyRow:
        """Returns the fastest way of a candidate that fits, with as little recompute as can be. Only where none fits
        are parameters boxed for every micro-batch."""
        forms = (NONE, SELECTIVE, FULL) if self.recompute == AUTO else (self.recompute,)
        looked_at = list[Estimate]()
        for levels, form in itertools.product(((0, 1), (2, 3)) if self.memory is not None else ((0,),), forms):
            if self.memory is not None and form != forms[-1] and self.least_kept(each, form) > self.memory:
                continue
            ways = list(self.ways(each, form, levels))
            fitting = list(filter(self.fits, ways))
            if fitting:
                best, schedule = (
                    min((way.cost for way in fitting), key=lambda cost: cost.step_seconds),
                    ways[0].schedule,
                )
                make = functools.partial(self.planned, replace(each, schedule=schedule), form)
                seconds = (
                    best.step_seconds,
                    best.compute_seconds,
                    best.exposed_seconds,
                    best.bubble_seconds,
                    best.recompute_seconds,
                    best.optimizer_seconds,
                )
                usage = Usage.of(best, each.mesh, self.shapes)
                return StrategyRow(
                    each.mesh, each.stages, schedule, each.microbatches, form, *seconds, usage, best.memory, make
                )
            looked_at += ways
        least = min(looked_at, key=lambda way: way.memory["total"])
        assert self.memory is not None
        passing = least.memory["activations"] + least.memory["temporaries"]
        raise TooLarge(least.memory["total"], self.memory, f"{least.mesh} with {least.count} micro-batches", passing)

    @functools.cached_property
    def shapes(self) -> dict[Port, Any]:
        """The example values of the whole batch by port."""
        return {port: node.meta["val"] for port, node in placeholders(self.short.gm).items()}

    def fits(self, way: Estimate) -> bool:
        """Returns whether a rank has the memory for a way."""
        return self.memory is None or way.memory["total"] <= self.memory

    def ways(self, each: Candidate, form: str, levels: Sequence[int]) -> Iterator[Estimate]:
        """Yields the candidate with the layouts of the experts and with the fastest ones, each with all parameters at
        the first of some levels (`sbpc.passes.stages.zero`) at which it fits. Where rows of experts are shared out they
        are so over all ranks first, which stores least: the fastest layouts are looked at if these fit."""
        every = tuple(at for at, size in enumerate(each.mesh.without(PIPE).sizes) if size > 1)
        schemes: list[str | Axes | None] = [None] if self.shares else [None, *experts_of(each)]
        if self.shares and len(every) > 1:
            shared = self.at_levels(each, form, every, levels)
            yield from shared
            if shared and not self.fits(shared[-1]):
                return
        for scheme in schemes:
            yield from self.at_levels(each, form, scheme, levels)

    def at_levels(self, each: Candidate, form: str, scheme: str | Axes | None, levels: Sequence[int]) -> list[Estimate]:
        """Returns the candidate with the layouts of a scheme at the levels that may fit, up to the first that does."""
        found = list[Estimate]()
        for level in levels:
            if self.memory is not None and each.stored[level] > self.memory:
                continue
            try:
                blocks, plan_at = self.short_plans(each, form, scheme)
            except (PlanError, PinError, LayoutError):
                if scheme is not None:  # which does not fit the model, or its mesh
                    break
                raise
            times = [block_times(self.lengths, block) for block in blocks]
            schedule = in_order(self.loop(form, each.microbatches), each.schedule, may_change=True)
            about = each.mesh, PIPE, schedule, each.microbatches, each.floor
            found.append(repeated(plan_at(level), times, *about))
            if self.fits(found[-1]) or (level == 0 and self.at_higher(found[-1]) > (self.memory or 0)):
                break
        return found

    def at_higher(self, way: Estimate) -> float:
        """Returns the bytes of a rank that are there however parameters and the optimizer's state are stored, and at
        least of these."""
        stored = min(way.memory["parameters"], self.stored / way.mesh.ranks) * (1 + way.options.copies)
        return way.memory["total"] - way.memory["parameters"] - way.memory["optimizer"] + stored

    @functools.cached_property
    def stored(self) -> float:
        """The bytes of all parameters of the whole model."""
        sizes = {port.name: node.meta["val"].nbytes for port, node in placeholders(self.short.gm, PARAMETER).items()}
        return total(self.lengths, sizes.items())

    @functools.cached_property
    def shares(self) -> bool:
        """Whether ranks may share out rows of experts."""
        return any(node.target in MESSAGE for node in self.short.gm.graph.nodes)

    def least_kept(self, each: Candidate, form: str) -> float:
        """Returns bytes that a rank of the first stage holds at least between the forwards and the backwards of all
        micro-batches in flight there, if it has its part of the blocks and its ranks share all values."""
        blocks = sum(self.lengths.values()) or 1
        if form not in self.kept:
            self.kept[form] = total(self.lengths, kept_of(self.recomputed(form)))
        flying = min(1.0, each.stages / each.microbatches)  # of the batch
        return self.kept[form] * (blocks // each.stages / blocks) * flying * each.stages / each.mesh.ranks

    def short_plans(
        self, each: Candidate, form: str, scheme: str | Axes | None
    ) -> tuple[list[str], Callable[[int], Plan]]:
        """Returns the blocks of the short model and what plans it, the same for all numbers of stages. scheme: an
        expert's, or the axes of a stage over which rows of experts are shared out."""
        key = each.mesh.sizes[1:], each.microbatches, form, scheme
        if key not in self.plans:
            inner = each.mesh.without(PIPE)
            baseline, shared = (scheme, None) if isinstance(scheme, str) else (None, scheme)
            asked = self.short.stages, self.short.about, inner, PIPE, self.optimizer, baseline, shared
            self.plans[key] = short_plans(self.loop(form, each.microbatches), *asked)
        return self.plans[key]

    def loop(self, form: str, count: int) -> Loop:
        """Returns the short model's loop over so many micro-batches, written once for all meshes and layouts."""
        if (form, count) not in self.loops:
            self.loops[form, count] = loop_of(rebuild(self.recomputed(form)), count)
        return self.loops[form, count]

    def recomputed(self, form: str) -> GraphModule:
        """Returns the short model's graph with a form of recompute."""
        if form not in self.forms:
            gm = self.short.again().gm
            self.forms[form] = compute_again(gm, forms_of(gm, form))
        return self.forms[form]

    def planned(self, each: Candidate, form: str) -> Plan:
        """Returns the plan of a row: free, or as an expert's where that is faster."""
        task = self.task()
        asked = Options(optimizer=self.optimizer, memory=self.memory, stages=PIPE, schedule=each.schedule, **task.about)
        asked = replace(asked, microbatches=each.microbatches, recompute=form, **self.routing)
        plans, errors = list[Plan](), list[SbpcError]()
        for baseline in (None, *experts_of(each)):
            again = task.again()
            gm, mesh, options = routed(again.gm, each.mesh, replace(asked, baseline=baseline), again.stages)
            try:
                plans.append(plan_stages(gm, again.stages, mesh, options))
            except (PlanError, MemoryLimitError) as error:  # an expert's may not fit the model or the mesh
                errors.append(error)
        if not plans:
            raise errors[0]
        return min(plans, key=lambda plan: plan.cost.seconds)


def kept_of(gm: GraphModule) -> Iterator[tuple[str, int]]:
    """Yields the module and the bytes of each value of a forward that is kept for the backward."""
    fixed = made_of(gm, placeholders(gm, PARAMETER).values())
    read = (used for node in gm.graph.nodes if is_late(node) for used in node.all_input_nodes)
    kept = {memory_of(used): None for used in read if used.op == "call_function" and not is_late(used)}
    for node in kept:
        value = node.meta["val"]
        if node.op == "call_function" and node not in fixed and isinstance(value, Tensor):
            yield node.meta.get("module") or "", value.nbytes


def experts_of(each: Candidate) -> tuple[str, ...]:
    """Returns the experts whose layouts a candidate is to be no slower than: without tensor parallelism all are the
    last one."""
    return EXPERTS if each.mesh.sizes[2] > 1 else EXPERTS[-1:]


def closest_error(errors: Sequence[SbpcError]) -> SbpcError:
    """Returns the error of a search without any row: where some strategies do not fit, that of the one that needs
    least."""
    large = [error for error in errors if isinstance(error, TooLarge)]
    if large:
        return min(large, key=lambda error: error.needed)
    return errors[-1] if errors else PlanError("there is no strategy to look at\n  Give another number of devices.")
