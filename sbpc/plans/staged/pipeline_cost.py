"""What a step costs: seconds, bubble, communication and memory of the busiest rank. One program is one stage with
one micro-batch."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from sbpc.mesh.mesh import Mesh
from sbpc.plans.chunk import OnUse
from sbpc.plans.cost import Cost, Terms
from sbpc.plans.options import Options
from sbpc.plans.staged import schedules, stage_memory
from sbpc.plans.staged.chunk_cost import ChunkCost
from sbpc.plans.staged.schedules import BACKWARD, EARLY, FORWARD, INPUTS, LATE, STEP, WEIGHTS, Action, Arrival, Played
from sbpc.plans.staged.stage_parts import AFTER, BEFORE, PARTS, Parts
from sbpc.plans.timeline import Left

# by kind of action
RUNS = {FORWARD: (FORWARD,), BACKWARD: (INPUTS, WEIGHTS), INPUTS: (INPUTS,), WEIGHTS: (WEIGHTS,), STEP: PARTS}


class Pipeline:
    """Stages that work on micro-batches: one stage and one micro-batch where the schedule is STEP.

    mesh: all axes. axis: that of the stages, None where all ranks are one stage. count: micro-batches.
    chunk_costs, arrivals: by chunk what it costs, and what it receives.
    """

    mesh: Mesh
    axis: str | None
    options: Options
    schedule: str
    lower_bound: float
    serial_bound: float = 0.0
    count: int
    chunk_costs: Sequence[ChunkCost]
    arrivals: Sequence[Sequence[Arrival]]

    @property
    def stages(self) -> int:
        """How many ranks the axis of stages has."""
        return 1 if self.axis is None else self.mesh.sizes[self.mesh.axis(self.axis)]

    @functools.cached_property
    def owners(self) -> list[int]:
        """By chunk the stage that has it."""
        return schedules.owners(self.schedule, self.stages)

    def chunks_on(self, stage: int) -> list[int]:
        """Returns the chunks that a stage has."""
        return [at for at, owner in enumerate(self.owners) if owner == stage]

    @functools.cached_property
    def sent(self) -> dict[tuple[int, int, bool], int]:
        """The bytes that cross to another stage, by the chunk that sends them, the one that reads them, and whether
        in the backward."""
        found = Counter[tuple[int, int, bool]]()
        for target, arrivals in enumerate(self.arrivals):
            for source, late, _, size, *_ in arrivals:
                if size is not None and self.owners[source] != self.owners[target]:
                    found[source, target, late] += size
        return found

    def needs(self, action: Action) -> list[Action]:
        """Returns the actions that one can begin only after."""
        kind, at, batch = action
        read = [each for each in self.arrivals[at] if kind != WEIGHTS and each.read_late == (kind != FORWARD)]
        batches = {False: (batch,), True: range(self.simulated)}
        found = [self.acting(each.late, each.source, other) for each in read for other in batches[each.joined]]
        if kind not in (FORWARD, STEP):
            found.append(action.of_kind(INPUTS if kind == WEIGHTS else FORWARD))
        return list(dict.fromkeys(found))

    def sending(self, source: Action, action: Action) -> float:
        """Returns the seconds for what one action sends to another one on another stage."""
        size = self.sent.get((source.chunk, action.chunk, source.kind != FORWARD))
        if size is None or self.axis is None or WEIGHTS in (source.kind, action.kind):
            return 0.0
        latency, bandwidth, _ = self.mesh.link((self.mesh.axis(self.axis),), "send")
        return latency + size / bandwidth

    @property
    def overlaps(self) -> bool:
        """Whether collectives run beside computing."""
        return self.options.overlaps

    @property
    def simulated(self) -> int:
        """How many micro-batches have actions."""
        return self.count

    # --- what an action runs ------------------------------------------------------------------------------------------
    @functools.cached_property
    def actions(self) -> list[list[Action]]:
        """By stage what it does, in order.

        Where collectives run beside computing, the last backward of a chunk is in two parts if another stage reads
        the first one: that is sent before the gradients of parameters are.
        """
        order = schedules.actions_of(self.schedule, self.stages, self.simulated)
        if not self.overlaps:
            return order
        last = {action.chunk: action for mine in order for action in mine if action.kind == BACKWARD}
        sent_late = {source for source, _, late in self.sent if late}
        parted = {action for chunk, action in last.items() if chunk in sent_late}
        split = {action: [action.of_kind(kind) for kind in (INPUTS, WEIGHTS)] for action in parted}
        return [[each for action in mine for each in split.get(action, [action])] for mine in order]

    @functools.cached_property
    def everything(self) -> dict[Action, None]:
        """The actions of all stages, in order: sums over them are to be the same in every process."""
        return {action: None for mine in self.actions for action in mine}

    def acting(self, late: bool, chunk: int, micro_batch: int) -> Action:
        """Returns the action that sends or reads what crosses, in the forward or `late`."""
        inputs = Action(INPUTS, chunk, micro_batch)
        return inputs.of_kind(FORWARD if not late else INPUTS if inputs in self.everything else BACKWARD)

    @functools.cached_property
    def merged(self) -> dict[Action, Parts]:
        """The actions that run also what is done once, beside their own computing: parameters are gathered while the
        first micro-batch is on its way forward, and gradients are sent home while the last one is on its way back.

        A stage that waits for its first micro-batch has time to gather before.
        """
        found: dict[Action, Parts] = {}
        for mine in self.actions if self.overlaps else ():
            first = {action.chunk: action for action in reversed(mine) if action.kind == FORWARD}
            last = {action.chunk: action for action in mine if action.kind in (BACKWARD, WEIGHTS)}
            waits = {mine[0]} if self.needs(mine[0]) else set()
            found |= {action: (BEFORE, *RUNS[action.kind]) for action in first.values() if action not in waits}
            found |= {action: (*RUNS[action.kind], AFTER) for action in last.values()}
        return found

    def runs(self, action: Action) -> Parts:
        """Returns the parts that an action runs, as one program."""
        return self.merged.get(action, RUNS[action.kind])

    @functools.cached_property
    def apart(self) -> dict[tuple[str, int], None]:
        """What is done once and not with an action, in order: BEFORE or AFTER, and the chunk."""
        inside = {(part, action.chunk) for action, which in self.merged.items() for part in which}
        if self.schedule == STEP:
            return {}
        every = itertools.product((BEFORE, AFTER), range(len(self.chunk_costs)))
        return {each: None for each in every if each not in inside}

    @functools.cached_property
    def orders(self) -> Sequence[list[tuple[Parts, Action]]]:
        """By stage what it runs, in order: the parts of each program, and the action. What is done once and with no
        action has the name of its part for the kind of one, and so has what comes late of a program."""
        return OnUse(self.stages, self.order)

    def order(self, stage: int) -> list[tuple[Parts, Action]]:
        """Returns what a stage runs, in order.

        What comes early runs before all actions: what is gathered for one chunk is on its way while others compute. A
        piece of what comes late runs behind the first action that ends when its messages are there, as if no stage
        waited for another one, or behind all.
        """
        mine = self.chunks_on(stage)
        before, after = (
            [((part,), Action(part, at, 0)) for at in mine if (part, at) in self.apart] for part in (BEFORE, AFTER)
        )
        found, waiting, left = list[tuple[Parts, Action]](), list[tuple[Parts, Action]](), Left()
        for action in self.actions[stage]:
            if self.chunk_costs[action.chunk].early(self.runs(action)):
                found.append(((*self.runs(action), EARLY), action.of_kind(EARLY)))
                left = self.run_of(*found[-1], left)[1]
        for action in self.actions[stage]:
            which = self.runs(action)
            found.append((which, action))
            pieces = self.chunk_costs[action.chunk].late(which)
            if pieces or left:
                left = self.run_of(which, action, left)[1]
            waiting += [((*which, *[LATE] * at), action.of_kind(f"{LATE}{at}")) for at in range(1, len(pieces) + 1)]
            while waiting and self.is_there(*waiting[0], left):
                found.append(waiting.pop(0))
                left = self.run_of(*found[-1], left)[1]
        waiting.sort(key=lambda piece: piece[0].count(LATE))  # what sends before what only waits
        return [*before, *found, *waiting, *after]

    def is_there(self, which: Parts, action: Action, left: Left) -> bool:
        """Returns whether all is there that a piece of what comes late waits for."""
        parts, piece = schedules.piece_of(which)
        messages = self.chunk_costs[action.chunk].late(parts)[piece - 1]
        return not any(owner == action.chunk and name in messages for _, (owner, name), _ in left)

    def tally(self, chunk: int) -> Counter[Parts]:
        """Returns how often each program of a chunk runs in a step."""
        found = Counter(self.runs(action) for mine in self.actions for action in mine if action.chunk == chunk)
        found.update((part,) for part, at in self.apart if at == chunk)
        steady = [RUNS[k] for k in ((FORWARD, INPUTS, WEIGHTS) if self.schedule == "zbv" else (FORWARD, BACKWARD))]
        return found + Counter(dict.fromkeys(steady, self.count - self.simulated))

    @property
    def alone(self) -> float:
        """How many times as fast a stage computes while no other one does."""
        return min(self.mesh.cluster.sharing, self.stages)

    # --- what a step costs --------------------------------------------------------------------------------------------
    @functools.cached_property
    def spans(self) -> schedules.Spans:
        """When every action starts and ends, in seconds since the step began."""
        played = (each for mine in self.played[0] for each in mine if not schedules.piece_of(each.parts)[1])
        return {each.action: (each.start, each.end) for each in played}

    @functools.cached_property
    def played(self) -> tuple[list[list[Played]], list[Left]]:
        """By stage when each program of its order starts and ends, but for what is done once and with no action, and
        what is on its way then."""
        starts = [self.single(stage, BEFORE) for stage in range(self.stages)]
        if not self.overlaps:
            starts = [max(starts)] * self.stages
        if self.alone == 1.0:
            orders = [[each for each in order if each[1].kind not in (BEFORE, AFTER)] for order in self.orders]
            return schedules.spans(orders, self.needs, self.run_of, self.sending, starts)
        spans = schedules.shared_spans(
            self.actions, self.needs, self.work_of, self.sending, starts, self.alone, self.mesh.cluster.taken
        )
        found = [[Played(self.runs(action), action, *spans[action]) for action in mine] for mine in self.actions]
        return found, [()] * self.stages

    def run_of(self, which: Parts, action: Action, before: Left) -> tuple[float, Left]:
        """Returns how long a program takes, and what is on its way then. before: what is on its way when it starts."""
        chunk = self.chunk_costs[action.chunk]
        if schedules.piece_of(which)[1]:
            return chunk.run(which, action.chunk, before)
        compute, waits = self.work_of(action)
        if not before and not chunk.parted(which):
            return compute + waits, ()
        ready, left = chunk.run(which, action.chunk, before)
        others = compute + waits - chunk.program(which).seconds  # beside the program's own seconds
        return ready + others, schedules.shorter(left, others)

    def work_of(self, action: Action) -> tuple[float, float]:
        """Returns the seconds of computing in an action, and those of waiting for its own collectives.

        The device also takes its part of what comes from other stages, starts each message at both of its ends, and
        adds gradients to those of earlier micro-batches.
        """
        chunk, cluster = self.chunk_costs[action.chunk], self.mesh.cluster
        program = chunk.program(self.runs(action))
        compute = min(program.busy, program.seconds)
        comes = sum(self.sending(need, action) for need in self.needs(action))
        adds = WEIGHTS in self.runs(action) and action.micro_batch > 0
        beside = cluster.taken * comes + cluster.start * self.messages[action] + (chunk.adds() if adds else 0.0)
        return compute + beside, program.seconds - compute

    @functools.cached_property
    def messages(self) -> Counter[Action]:
        """By action how many others on other stages it sends to and receives from; none where to start a message
        costs nothing."""
        actions = self.everything if self.mesh.cluster.start else ()
        return Counter(
            end
            for action in actions
            for need in self.needs(action)
            if self.sending(need, action)
            for end in (need, action)
        )

    def single(self, stage: int, part: str) -> float:
        """Returns the seconds that a stage needs once, before or behind all its actions."""
        mine = [self.chunk_costs[at] for at in self.chunks_on(stage) if (part, at) in self.apart]
        return sum(cost.program((part,)).seconds for cost in mine)

    @functools.cached_property
    def busy(self) -> list[float]:
        """By stage the seconds in which it computes or communicates."""
        starts = [self.mesh.cluster.start * sum(self.messages[action] for action in mine) for mine in self.actions]
        return [self.totals(stage, "seconds") + start + self.waits(stage) for stage, start in enumerate(starts)]

    def waits(self, stage: int) -> float:
        """Returns how much longer the programs of a stage take in their order than each by itself: less where what
        comes early or late goes beside others, more where they wait for its links."""
        if self.alone != 1.0:
            return 0.0
        played = self.played[0][stage]
        parted = [each for each in played if each.before or self.chunk_costs[each.action.chunk].parted(each.parts)]
        alone = sum(sum(self.work_of(each.action)) for each in parted if not schedules.piece_of(each.parts)[1])
        return sum(each.end - each.start for each in parted) - alone

    @property
    def busiest(self) -> int:
        """The stage that is busy longest."""
        return self.busy.index(max(self.busy))

    @functools.cached_property
    def cost(self) -> Cost:
        """Seconds, bytes and memory of a step."""
        return self.costs()

    def costs(self) -> Cost:
        """Measures a step."""
        stages, busy, most = range(self.stages), self.busy, self.busiest
        seconds = max(end + self.single(stage, AFTER) for stage, end in enumerate(self.last_ends()))
        compute, communicate, again = (self.totals(most, name) for name in ("compute", "comm", "again"))
        flops = max(self.totals(stage, "flops") for stage in stages)
        bubble = max(0.0, seconds - busy[most]) if self.stages > 1 else 0.0
        compute = min(compute, seconds)  # a stage that shares cores is faster while others wait
        serial_bound = min(self.serial_bound or self.lower_bound, compute + communicate)
        cost = Cost(
            compute,
            communicate,
            flops,
            self.one_device("flops_one_device"),
            self.bytes_sent,
            self.memory,
            self.lower_bound,
            self.options.objective,
            seconds if self.overlaps or self.schedule != STEP else None,
            serial_bound,
            again,
            bubble,
            self.optimizer_seconds,
            self.one_device("flops_one_device") - self.one_device("flops_again"),
            self.terms_of(most),
        )
        return replace(cost, lower_bound=min(self.lower_bound, cost.paid))

    def one_device(self, which: str) -> float:
        """Returns flops of the model on one device."""
        return sum(
            getattr(self.chunk_costs[at].program(each), which) * n
            for at in range(len(self.chunk_costs))
            for each, n in self.tally(at).items()
        )

    @property
    def optimizer_seconds(self) -> float:
        """Seconds of the optimizer's update on the stage that has most to update: parameters and its state are read
        and written, gradients read, once."""
        trained = max(sum(self.chunk_costs[at].trained for at in self.chunks_on(stage)) for stage in range(self.stages))
        if self.options.optimizer is None or not trained:
            return 0.0
        return float(self.mesh.cluster.kernel_seconds("", 0.0, (3 + 2 * self.options.copies) * trained))

    def terms_of(self, stage: int) -> Callable[[], Terms] | None:
        """Returns what makes the terms of the formulas of a stage's cost; None where nothing is known of its
        kernels."""
        return None

    @property
    def fullest(self) -> int:
        """The stage that takes most bytes."""
        return max(range(self.stages), key=lambda stage: self.memory_of(stage)["total"])

    @functools.cached_property
    def memory(self) -> dict[str, int]:
        """The bytes that a rank of the stage that takes most has, by kind."""
        return self.memory_of(self.fullest)

    def memory_of(self, stage: int) -> dict[str, int]:
        """Returns the bytes that a rank of a stage takes, by kind; "total" is the peak of the step."""
        return stage_memory.memory_of(self, stage)

    def last_ends(self) -> list[float]:
        """Returns by stage when its last program ends that an action runs."""
        return [max(each.end for each in mine) for mine in self.played[0]]

    def totals(self, stage: int, which: str) -> float:
        """Returns a figure of a stage, added up over all that its chunks run."""
        mine = self.chunks_on(stage)
        added = self.count > 1 and which in ("seconds", "compute")
        adds = sum(self.chunk_costs[at].adds() for at in mine) * (self.count - 1) if added else 0.0
        return adds + sum(
            getattr(self.chunk_costs[at].program(each), which) * times
            for at in mine
            for each, times in self.tally(at).items()
        )

    @functools.cached_property
    def bytes_sent(self) -> dict[str, float]:
        """By axis the bytes that the busiest rank sends in a step; those between stages under their axis."""
        by_stage = [self.sent_by(stage) for stage in range(self.stages)]
        axes = dict.fromkeys([*self.mesh.axes, *(axis for sent in by_stage for axis in sent)])
        return {axis: float(max(sent[axis] for sent in by_stage)) for axis in axes}

    def sent_by(self, stage: int) -> Counter[str]:
        """Returns by axis the bytes that a rank of a stage sends."""
        sent = Counter[str]()
        for at in self.chunks_on(stage):
            for which, times in self.tally(at).items():
                sent += Counter({axis: size * times for axis, size in self.chunk_costs[at].program(which).sent.items()})
        if self.axis is not None:
            sent[self.axis] += self.count * sum(
                size for (source, *_), size in self.sent.items() if self.owners[source] == stage
            )
        return sent
