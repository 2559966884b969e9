"""Measures the last steps of `sbpc run ... --trace FILE` on rank 0 beside their prediction. With stages it is a rank
of the first one."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sbpc.errors import SbpcError
from sbpc.inspect.tables import Report, quantity
from sbpc.inspect.trace import Comparison
from sbpc.plans.plan import Plan
from sbpc.plans.staged.staged_timeline import stage_events
from sbpc.plans.timeline import Event
from sbpc.plans.trace_file import MEASURED, PREDICTED, save_trace
from sbpc.runtime.step_trace import StepRecorder, recorded

TRACED, LEAST = 3, 3  # steps that are measured at most; steps in all, one of which warms up


class TracedSteps:
    """Takes the steps of a module: the first one warms up, the last ones run with time stamps, those between
    without."""

    def __init__(self, module: nn.Module, plan: Plan, steps: int) -> None:
        check_steps(steps)
        self.step: Any = module.step
        self.module, self.plan, self.plain = module, plan, steps - min(TRACED, steps - 2)
        self.seconds: list[float] = []
        self.recording = contextlib.ExitStack()
        self.recorder: StepRecorder | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step. All ranks take the time at the same steps."""
        if len(self.seconds) == self.plain:
            self.recorder = self.recording.enter_context(recorded(self.module))
        start = now()
        result = self.step(*args, **kwargs)
        self.seconds.append(now() - start)
        return result

    def finish(self, file: str) -> tuple[dict[str, Any], Report]:
        """Writes the trace of the measured step of median length, and returns its figures and what is told of it."""
        self.recording.close()
        predicted, measured = self.sides()
        save_trace({PREDICTED: predicted, MEASURED: measured}, Path(file))
        comparison = Comparison.of(predicted, measured)
        plain, traced = (statistics.median(each) for each in (self.seconds[1 : self.plain], self.seconds[self.plain :]))
        took = f"module.step took {quantity(traced, 's')} with time stamps, {quantity(plain, 's')} without"
        routed = self.recorder.busiest() if self.recorder else {}
        told = [f"{took}, on rank 0", *routing_lines(routed), f"written   {file}"]
        report = comparison.report(self.plan.mesh, told)
        figures = {
            "routing": routed.get(""),
            "file": file,
            "seconds_with_stamps": traced,
            "seconds_without": plain,
            **comparison.as_json(),
        }
        return figures, report

    def sides(self) -> tuple[list[Event], list[Event]]:
        """Returns what this rank was predicted to do, and what it did in the step of median length."""
        assert self.recorder is not None, "no step was measured"
        return stage_events(self.plan, self.recorder.stage), self.recorder.events()


def routing_lines(busiest: Mapping[str, float]) -> list[str]:
    """Returns a line about how uneven experts were chosen, none without experts. busiest: by module, and of all."""
    if not busiest:
        return []
    most = max((module for module in busiest if module), key=lambda module: busiest[module])
    of_all = f"the busiest rank had {busiest['']:.3g} times the mean of experts' rows, {busiest[most]:.3g} in {most}"
    return [f"routing   {of_all}: plan with --routing {max(1, busiest['']):.3g}"]


def check_steps(steps: int) -> None:
    """Raises SbpcError for too few steps."""
    if steps < LEAST:
        raise SbpcError(
            f"--trace with {steps} steps to go\n  Give {LEAST} at least: one warms up, one runs as ever, one with "
            "time stamps."
        )


def now() -> float:
    """Returns the time at which all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
