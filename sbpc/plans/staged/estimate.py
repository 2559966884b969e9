"""Estimate a step with stages from what one block costs: chunks are put together from equal blocks that were measured once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sbpc.mesh.mesh import Mesh
from sbpc.plans.options import Options
from sbpc.plans.staged.chunk_cost import ChunkCost, together
from sbpc.plans.staged.pipeline_cost import RUNS, Pipeline
from sbpc.plans.staged.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS, Action, owners

STEADY = 3


@dataclass(frozen=True)
class Unit:
    """A piece of the model, such as one block: what it costs, how often it stands in a row, and the bytes that a rank sends over the
    border behind it, forward and back, for each micro-batch."""

    cost: ChunkCost
    times: int
    down: float
    up: float

    @property
    def seconds(self) -> float:
        """Seconds of a micro-batch's forward and backward."""
        return sum(self.cost.program(RUNS[kind]).seconds for kind in (FORWARD, BACKWARD))


@dataclass
class Estimate(Pipeline):
    """A step with stages, put together from units.

    mesh, axis: as those of a `StagedPlan`. units: in the order of the model.
    """

    mesh: Mesh
    axis: str
    units: Sequence[Unit]
    schedule: str
    micro_batches: int
    bound: float = 0.0
    options: Options = field(default_factory=Options)

    @property
    def count(self) -> int:
        return self.micro_batches

    @property
    def stages(self) -> int:
        return self.mesh.sizes[self.mesh.axis(self.axis)]

    @functools.cached_property
    def owners(self) -> list[int]:
        return owners(self.schedule, self.stages)

    @property
    def simulated(self) -> int:
        """How many micro-batches are simulated: from STEADY for each stage on, each further one takes the same."""
        return self.count if self.schedule == "gpipe" else min(self.count, STEADY * self.stages)

    def take_order(self, other: Estimate) -> None:
        """Takes over the order of work of another estimate with this mesh, schedule and number of micro-batches: it is the same."""
        vars(self).update((name, getattr(other, name)) for name in ("owners", "actions", "everything", "merged", "apart"))

    def last_ends(self) -> list[float]:
        ends = super().last_ends()
        if self.count == self.simulated:
            return ends
        fewer = replace(self, micro_batches=self.simulated - self.stages)
        vars(fewer).update(ends=self.ends, parts=self.parts, crossings=self.crossings)
        more = (self.count - self.simulated) / self.stages
        return [end + more * (end - before) for end, before in zip(ends, fewer.last_ends())]

    @functools.cached_property
    def row(self) -> list[Unit]:
        """All units in a row, each once."""
        return [replace(unit, times=1) for unit in self.units for _ in range(unit.times)]

    @functools.cached_property
    def ends(self) -> list[int]:
        """The numbers of the units at which chunks begin, and the number of all."""
        return even_ends([unit.seconds for unit in self.row], len(self.owners))

    @functools.cached_property
    def parts(self) -> list[ChunkCost]:
        return [together([unit.cost for unit in self.row[a:b]]) for a, b in zip(self.ends, self.ends[1:])]

    def needs(self, action: Action) -> list[Action]:
        """Returns the actions that one can begin only after: its neighbours' and its own."""
        _, chunk, batch = action
        if action.kind == FORWARD:
            return [self.acting(False, chunk - 1, batch)] if chunk else []
        if action.kind == WEIGHTS:
            return [Action(INPUTS, chunk, batch)]
        return [self.acting(False, chunk, batch), *([self.acting(True, chunk + 1, batch)] if chunk + 1 < len(self.owners) else [])]

    def sends_back(self, chunk: int) -> bool:
        return chunk > 0 and self.owners[chunk - 1] != self.owners[chunk]

    def sending(self, source: Action, action: Action) -> float:
        """Returns the seconds for what one action sends to another one on another stage."""
        if self.owners[source.chunk] == self.owners[action.chunk]:
            return 0.0
        return self.crossings[source.chunk, action.chunk]

    @functools.cached_property
    def crossings(self) -> dict[tuple[int, int], float]:
        """The seconds for what a chunk sends to the one behind it, and to the one before."""
        latency, bandwidth, _ = self.mesh.link((self.mesh.axis(self.axis),), "send")
        pairs = [pair for at in range(len(self.owners) - 1) for pair in ((at, at + 1), (at + 1, at))]
        return {pair: latency + self.border(*pair) / bandwidth for pair in pairs}

    def border(self, source: int, target: int) -> float:
        """Returns the bytes that a rank sends from one chunk to the next or the one before."""
        unit = self.row[self.ends[max(source, target)] - 1]
        return unit.down if target > source else unit.up

    @functools.cached_property
    def bytes_sent(self) -> dict[str, float]:
        by_stage = [self.sent_within(stage) for stage in range(self.stages)]
        for at, owner in enumerate(self.owners):
            for target in (at - 1, at + 1):
                if 0 <= target < len(self.owners) and self.owners[target] != owner:
                    by_stage[owner][self.axis] += self.count * self.border(at, target)  # type: ignore[assignment]
        axes = dict.fromkeys([*self.mesh.axes, *(axis for sent in by_stage for axis in sent)])
        return {axis: float(max(sent[axis] for sent in by_stage)) for axis in axes}


def even_ends(seconds: Sequence[float], chunks: int) -> list[int]:
    """Returns where chunks of a row begin, and its length, so that the slowest chunk is as fast as can be.

    >>> even_ends([1, 1, 1, 3], 2)
    [0, 3, 4]
    """
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    took = total[None, :] - total[:, None]
    took[np.tril_indices(len(total))] = np.inf
    best, back = took[0], []
    for _ in range(chunks - 1):
        through = np.maximum(best[:, None], took)
        back.append(through.argmin(axis=0))
        best = through.min(axis=0)
    found = [len(seconds)]
    for step in reversed(back):
        found.append(int(step[found[-1]]))
    return [0, *found[::-1]]
