"""The order in which the stages of a pipeline work on micro-batches, and how long that takes.

A schedule gives every rank of the axis of stages a list of actions. One list serves the prediction, the simulation
and the run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from sbpc.errors import PlanError, SbpcError, VerifyError
from sbpc.plans.timeline import Left

# I and W: the backward of what a stage received, then that of its weights
FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
# what comes early and what comes late of a program, and the actions of these: see `Program`
EARLY, LATE = "early", "late"
STEP = "S"  # the action, and the schedule, of a step that is one program: of one chunk and one micro-batch
# how many chunks of the model each stage has, where that is not said
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2, "breadth-first": 2}
USUAL = "1f1b"
INTERLEAVED, BREADTH_FIRST = COUNTED = "interleaved", "breadth-first"  # may say how many: "interleaved:3"
MOST_CHUNKS = 1024


def chunks_in(schedule: str) -> int:
    """Returns how many chunks of the model each stage has.

    >>> chunks_in("1f1b"), chunks_in("interleaved"), chunks_in("interleaved:3")
    (1, 2, 3)

    Raises SbpcError for a schedule that is none.
    """
    name, colon, given = schedule.partition(":")
    if name not in SCHEDULES or (colon and name not in COUNTED):
        raise SbpcError(f"no schedule {schedule!r} is known\n  Known are {', '.join(map(repr, SCHEDULES))}.")
    if colon and not (given.isdecimal() and given.isascii() and 2 <= int(given) <= MOST_CHUNKS):
        raise SbpcError(
            f"the schedule is {schedule!r}\n  Behind the colon stands how many chunks of the model each stage has, as "
            f"in 'interleaved:3': 2 to {MOST_CHUNKS}. One is '1f1b'."
        )
    return int(given) if colon else SCHEDULES[name]


def forwards_first(schedule: str) -> str:
    """Returns a schedule with as many chunks in which a stage does all forwards before the first backward.

    >>> forwards_first("1f1b"), forwards_first("interleaved:3"), forwards_first("breadth-first:3")
    ('gpipe', 'breadth-first:3', 'breadth-first:3')
    """
    if schedule.startswith(BREADTH_FIRST):
        return schedule
    chunks = chunks_in(schedule)
    return f"{BREADTH_FIRST}:{chunks}" if chunks > 1 else "gpipe"


class Action(NamedTuple):
    """Runs a part of a chunk's program, FORWARD to WEIGHTS, for a micro-batch."""

    kind: str
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"

    def of_kind(self, kind: str) -> Action:
        """Returns the action that runs another part."""
        return Action(kind, self.chunk, self.micro_batch)


class Arrival(NamedTuple):
    """A value that a chunk receives. source: the chunk that sends it. late, read_late: whether it is sent and read
    in the backward. size: its bytes on the busiest rank; None where the stage has it already, as an earlier reader
    is on it. name: of the value, the same for all readers. number: among the inputs of the chunk. joined: whether it is
    what the forwards of all micro-batches make."""

    source: int
    late: bool
    read_late: bool
    size: int | None
    name: str = ""
    number: int = -1
    joined: bool = False


def owners(schedule: str, stages: int) -> list[int]:
    """Returns by chunk the rank of the axis of stages that has it: one after the other, for "zbv" there and back.

    >>> owners("interleaved", 2), owners("zbv", 2)
    ([0, 1, 0, 1], [0, 1, 1, 0])
    """
    if schedule == STEP:
        return [0]
    there = list(range(stages))
    return there + there[::-1] if schedule == "zbv" else there * chunks_in(schedule)


def actions_of(schedule: str, stages: int, count: int) -> list[list[Action]]:
    """Returns by rank of the axis of stages its actions for `count` micro-batches, in order.

    >>> [str(action) for action in actions_of("1f1b", 2, 3)[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']

    Raises PlanError if the schedule cannot have so few micro-batches.
    """
    if schedule == STEP:
        return [[Action(STEP, 0, 0)]]
    if schedule == "zbv":
        return zbv(stages, count)
    chunks = chunks_in(schedule)
    if schedule.startswith(BREADTH_FIRST):  # Lamy-Poirier, arXiv 2211.05953
        return [by_turns(range(rank, stages * chunks, stages), count, count, chunks * count) for rank in range(stages)]
    if chunks > 1:
        return [interleaved(rank, stages, chunks, count) for rank in range(stages)]
    return [
        by_turns([rank], count, count, count if schedule == "gpipe" else stages - rank - 1) for rank in range(stages)
    ]


def zbv(stages: int, count: int) -> list[list[Action]]:
    """Returns the actions of every rank in torch's ZBV zero bubble (Qi et al., arXiv 2405.15362)."""
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble  # takes half a second

    ranks = owners("zbv", stages)
    fields = {  # of a stage: plain objects with these will do, and need no process group
        "num_stages": len(ranks), "group_size": stages, "group_rank": 0, "has_backward": True, "group": None,
        "submod": torch.nn.Identity(), "stage_index_to_group_rank": dict(enumerate(ranks)),
        "device": torch.device("cpu"),
    }  # fmt: skip
    first: Any = SimpleNamespace(stage_index=0, is_first=True, is_last=False, **fields)
    last: Any = SimpleNamespace(stage_index=len(ranks) - 1, is_first=False, is_last=True, **fields)
    schedule = ScheduleZBVZeroBubble([first, last], count, loss_fn=lambda output, target: output)
    kinds = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD, "BACKWARD_INPUT": INPUTS, "BACKWARD_WEIGHT": WEIGHTS}
    return [
        [
            Action(kinds[each.computation_type.name], each.stage_index, int(each.microbatch_index or 0))
            for each in schedule.pipeline_order[rank]
            if each is not None and each.computation_type.name in kinds
        ]
        for rank in range(stages)
    ]


def interleaved(rank: int, stages: int, chunks: int, count: int) -> list[Action]:
    """Returns the actions of a rank with several chunks (Narayanan et al., arXiv 2104.04473, section 2.2): a round
    of micro-batches goes through the first chunk, then through the next one.

    A round has as many micro-batches as there are stages, or a few more if `count` is no multiple. Raises PlanError
    if no such number divides `count`.
    """
    length = count // max(1, count // stages)
    if count % length:
        what = f"interleaved with {stages} stages and {count} micro-batches, which rounds of {length} do not divide"
        raise PlanError(f"{what}\n  Give a multiple of {stages}.")
    mine = [rank + stages * at for at in range(chunks)]
    return by_turns(mine, count, length, (chunks - 1) * length + 2 * (stages - rank - 1))


def by_turns(chunks: Sequence[int], count: int, length: int, ahead: int) -> list[Action]:
    """Returns `ahead` forwards of a rank, then forwards and backwards by turns. length: micro-batches of a round
    through the chunks."""
    rounds = [range(first, first + length) for first in range(0, count, length)]
    forwards = [Action(FORWARD, chunk, batch) for each in rounds for chunk in chunks for batch in each]
    backwards = [Action(BACKWARD, chunk, batch) for each in rounds for chunk in reversed(chunks) for batch in each]
    actions = forwards[:ahead]
    for at, backward in enumerate(backwards):
        actions += [*forwards[ahead + at : ahead + at + 1], backward]
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


Spans = dict[Action, tuple[float, float]]
Run = tuple[tuple[str, ...], Action]  # the parts of the program that an action runs


class Played(NamedTuple):
    """A program that a rank ran: from when to when, and what was on its way before."""

    parts: tuple[str, ...]
    action: Action
    start: float
    end: float
    before: Left = ()


def spans(
    orders: Sequence[Sequence[Run]],
    needs: Needs,
    run: Callable[[tuple[str, ...], Action, Left], tuple[float, Left]],
    sending: Callable[[Action, Action], float],
    starts: Sequence[float],
) -> tuple[list[list[Played]], list[Left]]:
    """Returns by rank when every program of its order starts and ends, and what is on its way then.

    run: by what it runs, and what is on its way before, its seconds and what is on its way then. sending: seconds
    from one action to one that needs it. starts: of each rank.
    """
    found, ends = [list[Played]() for _ in orders], dict[Action, float]()
    needs = functools.cache(needs)
    free, left = list(starts), [Left()] * len(orders)
    actions = [[action for which, action in order if not piece_of(which)[1]] for order in orders]
    for rank, action in in_turn(actions, needs):
        for which, each in orders[rank][len(found[rank]) :]:
            piece = piece_of(which)[1]
            if not piece and each != action:
                break
            come = (ends[need] + sending(need, action) for need in needs(action)) if not piece else ()
            start = max([free[rank], *come])
            before = shorter(left[rank], start - free[rank])
            seconds, left[rank] = run(which, each, before)
            free[rank] = ends[each] = start + seconds
            found[rank].append(Played(which, each, start, free[rank], before))
    return found, left


def piece_of(which: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """Returns the parts of a program, and the number of a piece of it: 0 for what its action runs, -1 for what comes
    early, and from 1 on what comes late, which is how often LATE is among them."""
    return tuple(part for part in which if part not in (EARLY, LATE)), which.count(LATE) - which.count(EARLY)


def shorter(left: Left, seconds: float) -> Left:
    """Returns what is on its way some seconds later."""
    return tuple((stream, message, each - seconds) for stream, message, each in left if each > seconds)


def shared_spans(
    actions: Sequence[Sequence[Action]],
    needs: Needs,
    work: Callable[[Action], tuple[float, float]],
    sending: Callable[[Action, Action], float],
    starts: Sequence[float],
    sharing: float,
    load: float,
) -> Spans:
    """Returns `spans` of stages that share cores.

    work: of an action the seconds of computing, where all stages compute, and those that it only waits for its own
    collectives. sharing: how many times as fast a stage computes while no other one does. load: of the cores that a
    rank takes while it computes, the part that it takes while its collectives run.
    """
    in_turn(actions, needs)  # raises if stages would wait for ever
    needs, work = functools.cache(needs), functools.cache(work)
    # with the part left
    began, ends, running = dict[Action, float](), dict[Action, float](), dict[int, tuple[Action, float]]()
    at, now = [0] * len(actions), 0.0
    while True:
        later = []  # when what waits may start
        for rank, mine in enumerate(actions):
            if rank not in running and at[rank] < len(mine) and all(need in ends for need in needs(mine[at[rank]])):
                action = mine[at[rank]]
                moment = max([starts[rank], *(ends[need] + sending(need, action) for need in needs(action))])
                if moment <= now:
                    began[action], running[rank] = now, (action, 1.0)
                    at[rank] += 1
                else:
                    later.append(moment)
        if not running and not later:
            return {action: (start, ends[action]) for action, start in began.items()}
        loads = {rank: share(*work(action), load) for rank, (action, _) in running.items()}
        left = {}  # seconds to its end, if nothing changes
        for rank, (action, part) in running.items():
            compute, waits = work(action)
            speed = min(sharing, len(actions) / (1 + sum(loads.values()) - loads[rank]))
            left[rank] = part, waits + compute / speed
        until = min([*later, *(now + part * seconds for part, seconds in left.values())])
        for rank, (part, seconds) in left.items():
            action = running[rank][0]
            rest = part - (until - now) / seconds if seconds else 0.0
            running[rank] = action, rest
            if rest <= 1e-9:
                ends[action] = until
                del running[rank]
        now = until


def share(compute: float, waits: float, load: float) -> float:
    """Returns the part of a core that an action takes on average."""
    return (compute + load * waits) / (compute + waits) if compute + waits else 0.0
