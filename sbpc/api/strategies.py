"""Search whole strategies: stages of a pipeline, layouts inside a stage, micro-batches and recompute, ranked by predicted seconds.

What a block costs is measured on a model with two blocks of each list, planned once for every mesh of a stage and size of micro-batch.
The seconds of any number of stages and blocks are put together from that; the plan of a row is made when it is asked for.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule

from sbpc.api.candidates import PIPE, Candidate, block_times
from sbpc.api.planning import Task
from sbpc.api.recompute import forms_of
from sbpc.api.staging import SPARING, plan_stages, units_of
from sbpc.errors import MemoryLimitError, PlanError, SbpcError
from sbpc.graph.no_gc import uncollected
from sbpc.graph.ports import GRADIENT, PARAMETER
from sbpc.mesh.mesh import Mesh
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.recompute import block_of
from sbpc.passes.loop.recompute import recompute as compute_again
from sbpc.plans.cost import Cost
from sbpc.plans.options import AUTO, FULL, NONE, OPTIMIZER_STATE, SELECTIVE, Options
from sbpc.plans.staged.chunk_cost import ChunkCost
from sbpc.plans.staged.chunk_programs import Chunk
from sbpc.plans.staged.estimate import Estimate, Unit
from sbpc.plans.staged.part_memory import bytes_at
from sbpc.plans.staged.staged_plan import StagedPlan

FASTEST, SPREAD, SHARDED, EXPERT = "fastest", "spread", "sharded", (SPARING,)  # kinds of layouts inside a stage, see `kinds`
IN_LOOP = ((), (PARAMETER,), (GRADIENT,), (PARAMETER, GRADIENT))  # kinds of what is boxed for every micro-batch
SLOWER, LATE = "at full speed it takes longer than the best row", "the seconds of the search were over"
TOO_LARGE = "it does not fit into the memory"
Progress = Callable[[int, int, Any], None]


class TooLarge(MemoryLimitError):
    """No way of a strategy that was looked at fits. needed: bytes of a rank of the one that takes least."""

    def __init__(self, needed: int, memory: float, what: str) -> None:
        self.needed = needed
        super().__init__(
            f"the strategy that needs least, {what}, takes {needed:,} bytes a rank, the limit is {memory:,.0f}: it lacks "
            f"{needed - memory:,.0f}\n  Give more devices, or more memory."
        )


@dataclass
class StrategyRow:
    """A strategy and what a step is predicted to take. `plan` is made when it is asked for.

    mesh: axes pipe, data and tensor. stages: ranks along pipe. cost: seconds of a step, of which compute_seconds, exposed_seconds,
    bubble_seconds; recompute_seconds are among those of computing. memory: bytes of a rank. lower_bound: what no strategy of the
    search takes less, those among them that have no row. refused: the strategies without a row, each with the reason.
    """

    mesh: Mesh
    stages: int
    schedule: str
    microbatches: int
    recompute: str
    figures: Cost
    make: Callable[[], StagedPlan] = field(repr=False)
    lower_bound: float = 0.0
    refused: tuple[Refused, ...] = field(default=(), repr=False)

    @functools.cached_property
    def plan(self) -> StagedPlan:
        """The plan of this strategy."""
        return self.make()

    @property
    def cost(self) -> float:
        """Predicted seconds of a step."""
        return self.figures.seconds

    @property
    def compute_seconds(self) -> float:
        """Seconds in which the busiest stage computes."""
        return self.figures.compute_seconds

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which it waits for collectives."""
        return self.figures.exposed_seconds

    @property
    def bubble_seconds(self) -> float:
        """Seconds in which it waits for other stages."""
        return self.figures.bubble_seconds

    @property
    def recompute_seconds(self) -> float:
        """Seconds in which it computes values again."""
        return self.figures.recompute_seconds

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of a rank by kind, "total" at the peak."""
        return self.figures.memory


@dataclass(frozen=True)
class Refused:
    """A strategy without a row. reason: a sentence; needed: bytes of a rank where that is that it does not fit, else None."""

    mesh: Mesh
    schedule: str
    microbatches: int
    reason: str
    needed: int | None = None


@dataclass
class Search:
    """The search of one model. task: the whole model, or how to capture it; short: that with two blocks a list; lengths: of the lists."""

    task: Callable[[], Task]
    short: Task
    lengths: dict[str, int]
    optimizer: str | None
    memory: float | None
    recompute: str
    seconds: float
    bodies: dict[tuple[str, int], GraphModule] = field(default_factory=dict)
    chunks: dict[Any, list[Chunk]] = field(default_factory=dict)
    units: dict[Any, list[Unit]] = field(default_factory=dict)
    order: Estimate | None = None  # of the candidate that is looked at, whose order of work its other estimates share

    @uncollected()
    def rows(self, candidates: Sequence[Candidate], progress: Progress | None = None) -> list[StrategyRow]:
        """Returns the rows of candidates, best first, for so many CPU seconds: what seems fastest is looked at next.

        A guess knows nothing but flops and parameters. So first each kind is looked at once, and then counts as many times as it took.
        Each row has the bound of all candidates, whether they have a row or not: one that was refused might have been cut or laid out
        otherwise. Raises MemoryLimitError if none fits, PlanError if none can be cut.
        """
        start, found, refused = time.process_time(), list[StrategyRow](), list[Refused]()
        errors, times, left = list[SbpcError](), dict[tuple[int, int], float](), list(candidates)
        for number in range(len(candidates)):
            best = min((row.cost for row in found), default=math.inf)
            late = bool(found) and time.process_time() - start > self.seconds
            refused += [refusal(each, SLOWER if each.least >= best else LATE) for each in left if late or each.least >= best]
            left = [] if late else [each for each in left if each.least < best]
            if not left:
                break
            each = min(left, key=lambda other: other.guess * times.get(other.kind, 1.0))
            left.remove(each)
            if progress is not None:
                progress(number, len(candidates), each.mesh)
            try:
                found.append(self.row(each))
                times[each.kind] = min(times.get(each.kind, math.inf), found[-1].cost / each.guess)
            except (MemoryLimitError, PlanError) as error:
                errors.append(error)
                needed = error.needed if isinstance(error, TooLarge) else None
                refused.append(refusal(each, TOO_LARGE if needed is not None else str(error).partition("\n")[0], needed))
        if not found:
            raise closest_error(errors)
        found.sort(key=lambda row: (row.cost, row.mesh.sizes, row.microbatches))
        bound = min([each.floor for each in candidates] + [row.cost for row in found])
        return [replace(row, lower_bound=bound, refused=tuple(refused)) for row in found]

    def row(self, each: Candidate) -> StrategyRow:
        """Returns the fastest way of a candidate that fits, with as little recompute as can be. Only where none fits are parameters boxed
        for every micro-batch."""
        forms = (NONE, SELECTIVE, FULL) if self.recompute == AUTO else (self.recompute,)
        tried = [(form, self.kinds(each)) for form in forms]
        tried += [(form, (SHARDED,)) for form in forms if self.memory is not None]
        closest: Estimate | None = None
        self.order = None
        for form, kinds in tried:
            ways = [way for kind in kinds for way in self.ways(each, form, kind)]
            fitting = list(filter(self.fits, ways))
            if fitting:
                best = min(fitting, key=lambda way: way.cost.seconds)
                make = functools.partial(self.planned, each, form)
                return StrategyRow(each.mesh, each.stages, each.schedule, each.microbatches, form, best.cost, make)
            closest = min([*ways, *([closest] if closest else [])], key=lambda way: way.memory["total"], default=None)
        assert closest is not None and self.memory is not None
        raise TooLarge(closest.memory["total"], self.memory, f"{closest.mesh} with {closest.count} micro-batches")

    def fits(self, way: Estimate) -> bool:
        """Returns whether a rank has the memory for a way."""
        return self.memory is None or way.memory["total"] <= self.memory

    def kinds(self, each: Candidate) -> Sequence[str]:
        """Returns what layouts inside a stage to look at first: the fastest ones, and, under a limit, the fastest that store each parameter
        once over the ranks of a stage, and the expert's. Those whose parameters and gradients alone take more are left out."""
        if self.memory is None:
            return (FASTEST,)
        gathered = each.whole * 2 / (2 + OPTIMIZER_STATE[self.optimizer])
        experts = EXPERT if each.mesh.sizes[2] > 1 else ()
        return (*((FASTEST, *experts) if each.whole <= self.memory else ()), *((SPREAD,) if gathered <= self.memory else ()))

    def ways(self, each: Candidate, form: str, kind: str) -> Iterator[Estimate]:
        """Yields the candidate with all boxed once a step; with "sharded" layouts in all ways to box in the loop, until one fits."""
        for kinds in IN_LOOP if kind == SHARDED else IN_LOOP[:1]:
            try:
                units = self.measured(each, form, kind, kinds)
            except PlanError:
                if kind in EXPERT:  # whose scheme does not fit the model
                    return
                raise
            options = Options(optimizer=self.optimizer)
            made = Estimate(each.mesh, PIPE, units, each.schedule, each.microbatches, each.floor, options)
            if len(made.row) < len(made.owners):
                raise PlanError(f"{len(made.owners)} chunks of a model of {len(made.row)} blocks\n  Give fewer stages.")
            self.order = self.order or made
            made.take_order(self.order)
            yield made
            if self.fits(made):
                return

    def measured(self, each: Candidate, form: str, kind: str, kinds: Sequence[str]) -> list[Unit]:
        """Returns the units of the model on the mesh of a stage, planned and measured once for each size of micro-batch."""
        key = each.mesh.sizes[1:], each.microbatches, form, kind
        if (key, kinds) in self.units:
            return self.units[key, kinds]
        if key not in self.chunks:
            body = self.body(form, each.microbatches)
            inner = Mesh(cluster=each.mesh.cluster, **dict(zip(each.mesh.axes[1:], each.mesh.sizes[1:])))
            once = () if kind == SHARDED else (PARAMETER, GRADIENT)
            expert = kind if kind in EXPERT else None
            about = self.short.stages, self.short.about, inner, each.microbatches
            self.chunks[key] = units_of(body, *about, kind in (SPREAD, SHARDED), once, expert)
        chunks = self.chunks[key]
        ports = (port for chunk in chunks for port in (*chunk.plan.ports.inputs, *chunk.plan.ports.outputs))
        in_loop = {port for port in ports if port.kind in kinds}
        costs = [ChunkCost.of(chunk.plan, in_loop) for chunk in chunks]
        names = [name_of(chunk) for chunk in chunks]
        borders = [crossing(chunks, at) for at in range(len(chunks))]
        units = self.units[key, kinds] = []
        for at, (cost, name) in enumerate(zip(costs, names)):
            folder, _, place = name.rpartition(".")
            often = block_times(self.lengths, folder, place)
            units.append(Unit(cost, often, *borders[at - 1 if often > 1 else at]))
        return units

    def body(self, form: str, count: int) -> GraphModule:
        """Returns the body of the short model's loop over so many micro-batches, written once for all meshes and kinds of layouts."""
        if (form, count) not in self.bodies:
            gm = self.short.again().gm
            self.bodies[form, count] = loop_of(compute_again(gm, forms_of(gm, form)), count).body
        return self.bodies[form, count]

    def planned(self, each: Candidate, form: str) -> StagedPlan:
        """Returns the plan of a row."""
        task = self.task()
        asked = Options(optimizer=self.optimizer, memory=self.memory, stages=PIPE, schedule=each.schedule, **task.about)
        return plan_stages(task.gm, task.stages, each.mesh, replace(asked, microbatches=each.microbatches, recompute=form))


def refusal(each: Candidate, reason: str, needed: int | None = None) -> Refused:
    """Returns what is told of a candidate without a row."""
    return Refused(each.mesh, each.schedule, each.microbatches, reason, needed)


def closest_error(errors: Sequence[SbpcError]) -> SbpcError:
    """Returns the error of a search without any row: where some strategies do not fit, that of the one that needs least."""
    large = [error for error in errors if isinstance(error, TooLarge)]
    if large:
        return min(large, key=lambda error: error.needed)
    return errors[-1] if errors else PlanError("there is no strategy to look at\n  Give another number of devices.")


def name_of(chunk: Chunk) -> str:
    """Returns the block that a chunk is, "" if it is none."""
    nodes = [node for node in chunk.plan.graph.graph.nodes if node.op == "call_function" and node.meta.get("phase") != "backward"]
    blocks = [block_of(node.meta.get("module") or "") for node in nodes]
    return max(dict.fromkeys(blocks), key=blocks.count, default="")


def crossing(chunks: Sequence[Chunk], at: int) -> tuple[float, float]:
    """Returns the bytes that a rank sends over the border behind a chunk: forward, and back."""
    down = up = 0
    for target, chunk in enumerate(chunks):
        for port, name in chunk.receives.items():
            source = next(number for number, other in enumerate(chunks) if name in other.sends.values())
            size = bytes_at(chunk.plan.shapes[port], chunk.plan.given[port], chunk.plan.mesh)
            down += size if source <= at < target else 0
            up += size if target <= at < source else 0
    return float(down), float(up)
