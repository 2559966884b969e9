"""What a stage holds while it runs what it is to run: the bytes of a rank, and their peak over the step. plan: a
`Pipeline`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sbpc.plans.staged.part_memory import ADDED, GATHERED, HANDED, HOME, LEFT, SAVED, Kind
from sbpc.plans.staged.schedules import EARLY, FORWARD, INPUTS, LATE, STEP, WEIGHTS, piece_of
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, Parts


class Moment(NamedTuple):
    """A program that runs: its parts, its chunk, and whether its gradients are the first ones. flying: by chunk and
    what is held of a micro-batch, how many of these are in flight; less than none of an input that several chunks
    hold, as the stage has it once. once: what else chunks hold, see `ChunkCost.held`."""

    which: Parts
    chunk: int
    first: bool
    flying: Mapping[tuple[int, Kind], int]
    once: Sequence[tuple[int, Kind]]


def memory_of(plan: Any, stage: int) -> dict[str, int]:
    """Returns the bytes that a rank of a stage takes, by kind; "total" is the peak of the step.

    Activations are those of the micro-batches in flight, and what one program has alive between its forward and
    its backward. Gradients are there from a chunk's first backward on. Temporaries are what the peak has beyond
    all these.
    """
    mine = [plan.chunk_costs[at] for at in plan.chunks_on(stage)]
    summed = plan.schedule != STEP
    kinds = {
        "parameters": sum(sum(part.homes.values()) for part in mine),
        "gradients": sum(part.held(ADDED) if summed else part.trained for part in mine),
        "optimizer": plan.options.copies * sum(part.trained for part in mine),
        "activations": 0,
    }
    buffers = sum(part.buffers for part in mine)
    peak = buffers + (0 if summed else kinds["gradients"])  # these while the optimizer steps
    for moment in moments(plan, stage):
        alive, once, more, saved = held_at(plan, moment)
        peak, kinds["activations"] = (
            max(peak, buffers + alive + once + more),
            max(kinds["activations"], buffers + alive + saved),
        )
    total = kinds["parameters"] + kinds["optimizer"] + peak
    return kinds | {"temporaries": max(0, total - sum(kinds.values())), "total": total}


def held_at(plan: Any, moment: Moment) -> tuple[int, int, int, int]:
    """Returns the bytes of the micro-batches in flight, those of what else a stage holds, and what the program
    adds at its most and between its forward and its backward."""
    alive = sum(times * plan.chunk_costs[at].held(kind) for (at, kind), times in moment.flying.items())
    once = sum(plan.chunk_costs[at].held(kind) for at, kind in moment.once)
    cost = plan.chunk_costs[moment.chunk]
    return alive, once, *(cost.rise(moment.which, moment.first) if moment.which else (0, 0))


def moments(plan: Any, stage: int) -> Iterator[Moment]:
    """Yields what a stage runs, in order, and what it holds when that begins; last that nothing runs, unless all
    was one program."""
    flying, once, begun = Counter[tuple[int, Kind]](), list[tuple[int, Kind]](), dict[int, Parts]()
    same, holders = shared_inputs(plan, stage), Counter[tuple[tuple[int, int], int]]()

    def hold(at: int, batch: int, kind: str, more: int) -> None:
        for number in plan.chunk_costs[at].keeps(kind) if same else ():
            if value := same.get((at, number)):
                before, holders[value, batch] = holders[value, batch], holders[value, batch] + more
                flying[value] -= max(holders[value, batch], 1) - max(before, 1)

    for which, (_, at, batch) in plan.orders[stage]:
        if LATE in which:
            parts, piece = piece_of(which)
            first = begun[at] == parts
            yield Moment(which, at, first, flying, once)
            last = piece == len(plan.chunk_costs[at].late(parts))
            once[once.index((at, (which[:-1], first)))] = at, HOME if last else (which, first)
            continue
        first = at not in begun
        if FORWARD in which and EARLY not in which and which != PARTS:
            hold(at, batch, SAVED, 1)
        yield Moment(which, at, first, flying, once)
        if EARLY in which:
            once.append((at, (which, first)))
            continue
        early = at, ((*which, EARLY), first)
        if early in once:
            once.remove(early)
        if which == PARTS:
            return
        if FORWARD in which:
            flying[at, SAVED] += 1
        if INPUTS in which:
            flying[at, SAVED] -= 1
            flying[at, HANDED] += 1
            hold(at, batch, SAVED, -1)
            hold(at, batch, HANDED, 1)
        if WEIGHTS in which:
            flying[at, HANDED] -= 1
            hold(at, batch, HANDED, -1)
            once += [(at, LEFT if AFTER in which else ADDED)] if first else []
            begun.setdefault(at, which)
        home: Kind = (which, first) if plan.chunk_costs[at].late(which) else HOME
        once += [(at, kind) for part, kind in ((BEFORE, GATHERED), (AFTER, home)) if part in which]
    yield Moment((), plan.chunks_on(stage)[0], False, flying, once)


def shared_inputs(plan: Any, stage: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns, by chunk and number of an input that several chunks of a stage receive, the first of these: it comes
    once, and lies in one place for all."""
    readers: dict[str, list[tuple[int, int]]] = {}
    for at in plan.chunks_on(stage):
        for arrival in plan.arrivals[at] if len(plan.chunk_costs) > 1 else ():
            readers.setdefault(arrival.name, []).append((at, arrival.number))
    return {each: inputs[0] for name, inputs in readers.items() if name and len(inputs) > 1 for each in inputs}
