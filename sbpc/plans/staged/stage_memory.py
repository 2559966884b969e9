"""What a stage holds while it runs what it is to run: the bytes of a rank, and their peak over the step."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sbpc.plans.options import Options
from sbpc.plans.staged.chunk_cost import ChunkCost
from sbpc.plans.staged.part_memory import ADDED, GATHERED, HANDED, HOME, LEFT, SAVED, Kind
from sbpc.plans.staged.schedules import FORWARD, INPUTS, LATE, STEP, WEIGHTS, Action, without_late
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, Parts


class Moment(NamedTuple):
    """A program that runs: its parts, its chunk, and whether its gradients are the first ones. flying: by chunk and
    what is held of a micro-batch, how many of these are in flight. once: what else chunks hold, see
    `ChunkCost.held`."""

    which: Parts
    chunk: int
    first: bool
    flying: Mapping[tuple[int, str], int]
    once: Sequence[tuple[int, Kind]]


class StageMemory:
    """The bytes that stages take. See `Pipeline`, which has the same fields."""

    options: Options
    schedule: str
    chunk_costs: Sequence[ChunkCost]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        raise NotImplementedError

    @property
    def orders(self) -> Sequence[list[tuple[Parts, Action]]]:
        """By stage what it runs, in order."""
        raise NotImplementedError

    def chunks_on(self, stage: int) -> list[int]:
        """Returns the chunks that a stage has."""
        raise NotImplementedError

    @property
    def fullest(self) -> int:
        """The stage that takes most bytes."""
        return max(range(self.stages), key=lambda stage: self.memory_of(stage)["total"])

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """The bytes that a rank of the stage that takes most has, by kind."""
        return self.memory_of(self.fullest)

    def memory_of(self, stage: int) -> dict[str, int]:
        """Returns the bytes that a rank of a stage takes, by kind; "total" is the peak of the step.

        Activations are those of the micro-batches in flight, and what one program has alive between its forward and
        its backward. Gradients are there from a chunk's first backward on. Temporaries are what the peak has beyond
        all these.
        """
        mine = [self.chunk_costs[at] for at in self.chunks_on(stage)]
        summed = self.schedule != STEP
        kinds = {
            "parameters": sum(sum(part.homes.values()) for part in mine),
            "gradients": sum(part.held(ADDED) if summed else part.trained for part in mine),
            "optimizer": self.options.copies * sum(part.trained for part in mine),
            "activations": 0,
        }
        buffers = sum(part.buffers for part in mine)
        peak = buffers + (0 if summed else kinds["gradients"])  # these while the optimizer steps
        for moment in self.moments(stage):
            alive, once, more, saved = self.held_at(moment)
            peak, kinds["activations"] = (
                max(peak, buffers + alive + once + more),
                max(kinds["activations"], buffers + alive + saved),
            )
        total = kinds["parameters"] + kinds["optimizer"] + peak
        return kinds | {"temporaries": max(0, total - sum(kinds.values())), "total": total}

    def held_at(self, moment: Moment) -> tuple[int, int, int, int]:
        """Returns the bytes of the micro-batches in flight, those of what else a stage holds, and what the program
        adds at its most and between its forward and its backward."""
        alive = sum(times * self.chunk_costs[at].held(kind) for (at, kind), times in moment.flying.items())
        once = sum(self.chunk_costs[at].held(kind) for at, kind in moment.once)
        cost = self.chunk_costs[moment.chunk]
        return alive, once, *(cost.rise(moment.which, moment.first) if moment.which else (0, 0))

    def moments(self, stage: int) -> Iterator[Moment]:
        """Yields what a stage runs, in order, and what it holds when that begins; last that nothing runs, unless all
        was one program."""
        flying, once, begun = Counter[tuple[int, str]](), list[tuple[int, Kind]](), dict[int, Parts]()
        for which, (_, at, _) in self.orders[stage]:
            if LATE in which:
                parts, piece = without_late(which)
                first = begun[at] == parts
                yield Moment(which, at, first, flying, once)
                last = piece == len(self.chunk_costs[at].late(parts))
                once[once.index((at, (which[:-1], first)))] = at, HOME if last else (which, first)
                continue
            first = at not in begun
            yield Moment(which, at, first, flying, once)
            if which == PARTS:
                return
            if FORWARD in which:
                flying[at, SAVED] += 1
            if INPUTS in which:
                flying[at, SAVED] -= 1
                flying[at, HANDED] += 1
            if WEIGHTS in which:
                flying[at, HANDED] -= 1
                once += [(at, LEFT if AFTER in which else ADDED)] if first else []
                begun.setdefault(at, which)
            home: Kind = (which, first) if self.chunk_costs[at].late(which) else HOME
            once += [(at, kind) for part, kind in ((BEFORE, GATHERED), (AFTER, home)) if part in which]
        yield Moment((), self.chunks_on(stage)[0], False, flying, once)
