"""Estimate a step with stages from the plan of a short model, of which every block is a chunk: blocks are repeated
in a row."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sbpc.errors import PlanError
from sbpc.mesh.mesh import Mesh
from sbpc.plans.options import Options
from sbpc.plans.plan import Plan
from sbpc.plans.staged.chunk_cost import ChunkCost, JoinedCost
from sbpc.plans.staged.pipeline_cost import RUNS, Pipeline
from sbpc.plans.staged.schedules import BACKWARD, FORWARD, Arrival, forwards_first, owners

STEADY = 3  # micro-batches for each stage, from which on each further one takes the same


@dataclass
class Estimate(Pipeline):
    """A step with stages whose chunks have a cost and no plan. Of many micro-batches the first ones are simulated."""

    mesh: Mesh
    axis: str
    schedule: str
    count: int
    chunk_costs: Sequence[ChunkCost]
    arrivals: Sequence[Sequence[Arrival]]
    lower_bound: float = 0.0
    options: Options = field(default_factory=Options)

    @property
    def simulated(self) -> int:
        every = self.schedule == forwards_first(self.schedule)  # what all of them keep is there at once
        return self.count if every else min(self.count, STEADY * self.stages)

    def last_ends(self) -> list[float]:
        ends = super().last_ends()
        if self.count == self.simulated:
            return ends
        fewer = replace(self, count=self.simulated - self.stages)
        more = (self.count - self.simulated) / self.stages
        return [end + more * (end - before) for end, before in zip(ends, fewer.last_ends())]


def repeated(
    plan: Plan, times: Sequence[int], mesh: Mesh, axis: str, schedule: str, count: int, bound: float = 0.0
) -> Estimate:
    """Returns the estimate of a model with as many blocks in a row as `times` says by chunk of a plan with one chunk
    a stage.

    Chunks are as even as can be. Raises PlanError for fewer blocks than chunks.
    """
    row = [at for at, often in enumerate(times) for _ in range(often)]
    chunks = len(owners(schedule, mesh.sizes[mesh.axis(axis)]))
    if len(row) < chunks:
        raise PlanError(f"{chunks} chunks of a model of {len(row)} blocks\n  Give fewer stages.")
    seconds = [sum(part.program(RUNS[kind]).seconds for kind in (FORWARD, BACKWARD)) for part in plan.chunk_costs]
    ends = even_ends([seconds[at] for at in row], chunks)
    joined = functools.cache(lambda blocks: JoinedCost([plan.chunk_costs[at] for at in blocks]))
    parts = [joined(tuple(row[a:b])) for a, b in itertools.pairwise(ends)]
    arrivals: list[list[Arrival]] = [[] for _ in parts]
    for chunk, at in enumerate(row[end - 1] for end in ends[1:-1]):
        border = at - 1 if times[at] > 1 else at  # between two blocks of a list
        down, up = (
            sum(
                size
                for (source, target, _), size in plan.sent.items()
                if min(source, target) <= border < max(source, target) and (target > source) == forward
            )
            for forward in (True, False)
        )
        arrivals[chunk + 1].append(Arrival(chunk, False, False, down))
        arrivals[chunk].append(Arrival(chunk + 1, True, True, up))
    return Estimate(mesh, axis, schedule, count, parts, arrivals, bound, plan.options)


def even_ends(seconds: Sequence[float], chunks: int) -> list[int]:
    """Returns where chunks of a row begin, and its length, so that the slowest chunk is as fast as can be.

    >>> even_ends([1, 1, 1, 3], 2)
    [0, 3, 4]
    """
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    took = total[None, :] - total[:, None]
    took[np.tril_indices(len(total))] = np.inf
    return best_steps(took, chunks, np.maximum)[1]


def best_steps(cost: np.ndarray, count: int, join: np.ufunc) -> tuple[float, list[int]]:
    """Returns the least cost of so many steps from the first to the last end, and the ends between which they go,
    these two too.

    cost [from, to]: of a step. join: what costs of steps come to, such as their sum.
    """
    best, back = cost[0], []
    for _ in range(count - 1):
        through = join(best[:, None], cost)
        back.append(through.argmin(axis=0))
        best = through.min(axis=0)
    found = [len(cost) - 1]
    for step in reversed(back):
        found.append(int(step[found[-1]]))
    return float(best[-1]), [0, *found[::-1]]
