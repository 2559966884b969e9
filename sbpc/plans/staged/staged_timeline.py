"""What the ranks of a plan are predicted to do, and when. plan: a `Plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from sbpc.plans.staged.pieces import pieces_in
from sbpc.plans.staged.schedules import EARLY, FORWARD, STEP, Action, Played, piece_of
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, Parts
from sbpc.plans.timeline import COMPUTE, Event, Left, makespan, played, works

SEND, BUBBLE = "send", "bubble"  # the kinds of what a stage sends, and of its waiting for others


def stage_lanes(plan: Any) -> list[Event]:
    """Returns a step by stage: on one lane what its chunks do, on others beside it the collectives inside it and
    what it sends."""
    return [
        event
        for stage in range(plan.stages)
        for event in (*actions_of(plan, stage), *links_of(plan, stage), *sends_of(plan, stage))
    ]


def actions_of(plan: Any, stage: int) -> Iterator[Event]:
    """Yields what the chunks of a stage do, except what takes no time."""
    for _, action, start, end, _ in program_spans(plan, stage):
        if end > start:
            yield lane_event(stage, action, start, end)


def measured_actions(plan: Any, stage: int, measured: Sequence[Event]) -> Iterator[Event]:
    """Yields what the chunks of a stage did, of the measured kernels and collectives of one of its ranks."""
    known = dict[str, list[Event]]()
    for event in measured:
        action, _, name = event.name.partition(" ")
        if name:
            known.setdefault(action, []).append(event)
    for _, action in plan.orders[stage]:
        if events := known.get(str(action)):
            yield lane_event(stage, action, min(event.start for event in events), makespan(events))


def lane_event(stage: int, action: Action, start: float, end: float) -> Event:
    """Returns an action on the lane of its stage."""
    return Event(f"stage {stage}", start, end, str(action), action.kind, f"chunk {action.chunk}", phase_of(action))


def links_of(plan: Any, stage: int) -> list[Event]:
    """Returns the collectives inside a stage, in the order of their streams."""
    found = [replace(e, stream=f"stage {stage}, {e.stream}") for e in stage_events(plan, stage) if e.stream != COMPUTE]
    return sorted(found, key=lambda event: event.stream)


def sends_of(plan: Any, stage: int) -> Iterator[Event]:
    """Yields what a stage sends to others, from when it is there."""
    for action, (begins, _) in sorted(plan.spans.items(), key=lambda each: each[1]):
        for need in plan.needs(action):
            took = plan.sending(need, action)
            if plan.owners[need.chunk] == stage and took:
                start = min(plan.spans[need][1], begins - took)
                lane, to = f"stage {stage}, sends", f"chunk {need.chunk} to chunk {action.chunk}"
                yield Event(
                    lane, start, start + took, f"{need} to {action}", SEND, to, phase_of(action), plan.axis or ""
                )


def stage_events(plan: Any, stage: int) -> list[Event]:
    """Returns the kernels and collectives of a rank of a stage on their streams, as `Plan.timeline` does, and
    between them its bubble.

    Their names begin with that of the action. What an action does besides, such as taking in what other stages send,
    is spread over them.
    """
    known = dict[tuple[Any, ...], tuple[list[Event], float]]()
    found, now = list[Event](), 0.0
    for which, action, start, end, before in program_spans(plan, stage):
        if start > now:
            found.append(Event(COMPUTE, now, start, str(action), BUBBLE, "", phase_of(action)))
        now = end
        key = action.chunk, which, before
        if key not in known:
            known[key] = program_events(plan, *key)
        events, whole = known[key]
        scale = (end - start) / whole if whole else 1.0
        found += [moved(event, action, start, scale, whole) for event in events]
    return found


def program_events(plan: Any, chunk: int, which: Parts, before: Left = ()) -> tuple[list[Event], float]:
    """Returns the events of the program of some parts of a chunk, in seconds since it began, and when it is done.
    before: what is on its way then."""
    (parts, piece), inner = piece_of(which), plan.inner
    gm = plan.programs[chunk].program(parts).gm
    piece_at = pieces_in(gm)
    work = {node: each for node, each in works(gm, inner).items() if piece_at.get(node, 0) == piece}
    return played(work, inner, chunk, before)[:2]


def moved(event: Event, action: Action, start: float, scale: float = 1.0, until: float = inf) -> Event:
    """Returns an event of an action's program as one of the step; one program needs no name of its action. scale: of
    the times up to `until`, when the action ends; what is on its way longer is there when it would be."""
    first, last = (
        start + (scale * moment if moment <= until else max(scale * until, moment))
        for moment in (event.start, event.end)
    )
    if action.kind == STEP:
        return replace(event, start=first, end=last)
    name, bucket = f"{action} {event.name}", event.bucket and f"{action} {event.bucket}"
    return replace(event, start=first, end=last, name=name, bucket=bucket)


def program_spans(plan: Any, stage: int) -> Iterator[Played]:
    """Yields what a stage runs, in order, with its start and end in seconds since the step began."""
    now, known = 0.0, iter(plan.played[0][stage])
    for which, action in plan.orders[stage]:
        if action.kind in (BEFORE, AFTER):
            yield Played(which, action, now, now + plan.chunk_costs[action.chunk].program(which).seconds)
            now += plan.chunk_costs[action.chunk].program(which).seconds
        else:
            yield (each := next(known))
            now = each.end


def phase_of(action: Action) -> str:
    """Returns the phase of what an action does."""
    return "forward" if action.kind in (BEFORE, EARLY, FORWARD) else "backward"
