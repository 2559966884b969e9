"""Measures a step: stamps stand in every program that it runs, and around every wait for other stages.

On the computing stream, what a rank does between two programs is "bubble" while it waits for what other stages send,
and "between programs" while it cuts the batch, adds up, or takes in and hands on. What it sends is not measured:
gloo does not tell the sender when that is there.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from sbpc.errors import PlanError
from sbpc.plans.plan import Plan
from sbpc.plans.staged.staged_timeline import BUBBLE, moved, phase_of, program_events
from sbpc.plans.step_programs import JOINT
from sbpc.plans.timeline import COMPUTE, Event
from sbpc.runtime.executors import BoxedFunction
from sbpc.runtime.module import runner_of
from sbpc.runtime.staged.loop_runner import LoopRunner
from sbpc.runtime.start.mail import Mail
from sbpc.runtime.step import Runner
from sbpc.runtime.trace import Clock, Recorder, Run, clock_of, median

# the kind of what is done there, and the name of what is done behind the last one
BETWEEN, END = "between programs", "end"


@dataclass
class StepRun:
    """The moments of one step, as the clock has them.

    runs: of what ran, in order. waits: by how many had run, from when to when the rank waited for other stages.
    """

    start: Any
    end: Any = None
    runs: list[tuple[Recorder, Run]] = field(default_factory=list)
    waits: defaultdict[int, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))

    def waited(self, start: Any, end: Any) -> None:
        """Keeps from when to when the rank waited for other stages."""
        self.waits[len(self.runs)].append((start, end))


class StampedMail(Mail):
    """The messages of one step, which take the time. They are the first and the last of it."""

    def __init__(self, where: torch.device, clock: Clock) -> None:
        super().__init__(where)
        self.clock, self.step = clock, StepRun(clock.moment())

    def receive(self, number: int) -> Tensor:
        """Returns a message, as soon as it is there."""
        if number in self.kept:
            return super().receive(number)
        start, value = self.clock.moment(), super().receive(number)
        self.step.waited(start, self.clock.moment())
        return value

    def finish(self) -> None:
        """Waits until all that was sent has gone."""
        start, waits = self.clock.moment(), bool(self.sent)
        super().finish()
        self.step.end = self.clock.moment()
        if waits:
            self.step.waited(start, self.step.end)


class StepRecorder:
    """Keeps the moments of every step that a rank runs."""

    def __init__(self, runner: Runner) -> None:
        if not isinstance(runner.plan, Plan):
            raise PlanError(
                "the programs of an exported file have no prediction to measure\n  Run the plan in it: sbpc.load(file)."
            )
        self.plan, self.stage, self.clock = runner.plan, runner.stage, clock_of(runner.where)
        self.steps: list[StepRun] = []

    def mail(self, where: torch.device) -> Mail:
        """Begins a step."""
        mail = StampedMail(where, self.clock)
        self.steps.append(mail.step)
        return mail

    def compiled(self, program: GraphModule) -> BoxedFunction:
        """Returns a function that runs a program and keeps the moments, as an executor does."""
        recorder = Recorder(program, self.clock)

        def run(given: list[Tensor]) -> tuple[Any, ...]:
            results, run = recorder(given), recorder.runs.pop()
            if self.plan.loop is None:
                self.steps.append(StepRun(run.stamps[0], run.stamps[-1]))
            self.steps[-1].runs.append((recorder, run))
            return results

        return run

    def length(self, step: StepRun) -> float:
        """Returns the seconds of a step."""
        return self.clock.seconds(step.start, step.end)

    def busiest(self) -> dict[str, float]:
        """Returns by module the rows of experts of the rank that has most, as a multiple of the mean: the largest of
        all steps, and under "" the mean of all modules and steps; nothing where no rows are shared out."""
        every = [each for step in self.steps for _, run in step.runs for each in run.busiest().items()]
        found: dict[str, float] = {"": sum(times for _, times in every) / len(every)} if every else {}
        for module, times in every:
            found[module] = max(times, found.get(module, 0.0))
        return found

    def events(self) -> list[Event]:
        """Returns what happened in the step of median length, in seconds since it began, in the order of the starts.

        Every event of `stage_events` is there once, by the same name. See `Recorder.events_of` for what else the
        programs have.
        """
        step, predicted = median(self.steps, self.length), functools.partial(program_events, self.plan)
        since = functools.partial(self.clock.seconds, step.start)
        waits = {at: [(since(start), since(end)) for start, end in spans] for at, spans in step.waits.items()}
        found, now = list[Event](), 0.0
        for at, ((which, action), (recorder, run)) in enumerate(
            zip(self.plan.orders[self.stage], step.runs, strict=True)
        ):
            start = since(run.stamps[0])
            found += between(now, start, waits.get(at, ()), str(action), phase_of(action))
            found += [
                moved(event, action, start) for event in recorder.events_of(run, predicted(action.chunk, which)[0])
            ]
            now = since(run.stamps[-1])
        found += between(now, since(step.end), waits.get(len(step.runs), ()), END, "backward")
        return sorted(found, key=lambda event: event.start)


def between(start: float, end: float, waits: Iterable[tuple[float, float]], name: str, phase: str) -> Iterator[Event]:
    """Yields what a rank does between two programs: nothing while it waits. A step of one program has nothing around
    it."""
    for first, last in waits:
        yield Event(COMPUTE, start, first, name, BETWEEN, "", phase)
        yield Event(COMPUTE, first, last, name, BUBBLE, "", phase)
        start = last
    if end > start:
        yield Event(COMPUTE, start, end, name, BETWEEN, "", phase)


@contextmanager
def recorded(module: nn.Module) -> Iterator[StepRecorder]:
    """While this lasts, `step` of a parallel module takes the time. All ranks are to do this at the same steps,
    outside of `no_sync`."""
    runner = runner_of(module)
    recorder = StepRecorder(runner)
    plain = {key: value for key, value in vars(runner).items() if key in ("executor", "functions", "mail")}
    if isinstance(runner, LoopRunner):
        runner.executor, runner.functions, runner.mail = recorder.compiled, {}, recorder.mail
        for key in plain["functions"]:  # what earlier steps ran, before any step is timed
            runner.chunk_function(*key)
    else:
        runner.functions = runner.functions | {JOINT: recorder.compiled(runner.program(JOINT))}
    try:
        yield recorder
    finally:
        vars(runner).update(plain)
        recorder.clock.close()
