"""The order in which the stages of a pipeline work on micro-batches, and how long that takes.

A schedule gives every rank of the axis of stages a list of actions. One list serves the prediction, the simulation and the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sbpc._compat import torch_pipeline_order
from sbpc.errors import PlanError, VerifyError

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"  # I and W: the backward of what a stage received, then that of its weights
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv")
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}  # of the model on each rank of the axis


@dataclass(frozen=True)
class Action:
    """Runs a part of a chunk's program, FORWARD to WEIGHTS, for a micro-batch."""

    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"


def owners(schedule: str, stages: int) -> list[int]:
    """Returns by chunk the rank of the axis of stages that has it: one after the other, for "zbv" there and back.

    >>> owners("interleaved", 2), owners("zbv", 2)
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    there = list(range(stages))
    if CHUNKS[schedule] == 1:
        return there
    return there + (there[::-1] if schedule == "zbv" else there)


def actions_of(schedule: str, stages: int, count: int) -> list[list[Action]]:
    """Returns by rank of the axis of stages its actions for `count` micro-batches, in order.

    >>> [str(action) for action in actions_of("1f1b", 2, 3)[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']

    Raises PlanError if the schedule cannot have so few micro-batches.
    """
    if CHUNKS[schedule] == 1:
        return [one_chunk(rank, stages if schedule == "1f1b" else count + rank + 1, count) for rank in range(stages)]
    try:
        order = torch_pipeline_order(schedule, stages, count, owners(schedule, stages))
    except ValueError as error:
        raise PlanError(f"{schedule} with {stages} stages and {count} micro-batches: {error}\n  Give another number.") from error
    return [[Action(*each) for each in order[rank]] for rank in range(stages)]


def one_chunk(rank: int, stages: int, count: int) -> list[Action]:
    """Returns the actions of a rank with one chunk: as many forwards as stages follow, then forwards and backwards by turns."""
    ahead = min(count, stages - rank - 1)
    actions = [Action(FORWARD, rank, at) for at in range(ahead)]
    for at in range(count):
        actions += [Action(FORWARD, rank, at + ahead)] if at + ahead < count else []
        actions.append(Action(BACKWARD, rank, at))
    return actions


Needs = Callable[[Action], Sequence[Action]]


def in_turn(actions: Sequence[Sequence[Action]], needs: Needs) -> list[tuple[int, Action]]:
    """Returns all actions with their ranks in an order in which each comes after those that it needs.

    Raises VerifyError if ranks would wait for each other for ever.
    """
    order: list[tuple[int, Action]] = []
    done: set[Action] = set()
    at = [0] * len(actions)
    while True:
        before = len(order)
        for rank, mine in enumerate(actions):
            while at[rank] < len(mine) and all(need in done for need in needs(mine[at[rank]])):
                done.add(mine[at[rank]])
                order.append((rank, mine[at[rank]]))
                at[rank] += 1
        if len(order) == before:
            break
    stuck = [mine[place] for mine, place in zip(actions, at) if place < len(mine)]
    if stuck:
        raise VerifyError(f"the pipeline waits for ever at {', '.join(map(str, stuck))}\n  Mend the schedule.")
    return order


def spans(
    actions: Sequence[Sequence[Action]], needs: Needs, seconds: Mapping[tuple[str, int], float], sending: Callable[[Action, Action], float]
) -> dict[Action, tuple[float, float]]:
    """Returns when every action starts and ends. seconds: by kind and chunk. sending: from one action to one that needs it."""
    found: dict[Action, tuple[float, float]] = {}
    free = [0.0] * len(actions)
    for rank, action in in_turn(actions, needs):
        start = max([free[rank], *(found[need][1] + sending(need, action) for need in needs(action))])
        free[rank] = start + seconds[action.kind, action.chunk]
        found[action] = start, free[rank]
    return found
