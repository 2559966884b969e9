"""A terminal is told what planning is at; a file is not."""

from __future__ import annotations

import io
import logging
import signal
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import sbpc
from sbpc import Mesh
from sbpc.cli.progress import STEPS, progress
from sbpc.solver import highs
from sbpc.solver.highs import Quiet, model_of
from sbpc.solver.program import build
from sbpc.solver.subsets import everything
from tests import models
from tests.test_compiled import stars


def shown(terminal: bool) -> str:
    """What is written while a model is planned."""
    out = io.StringIO()
    with progress(Console(file=out, force_terminal=terminal, width=120)):
        model, args = models.gpt2(layers=1) if terminal else models.mlp()
        sbpc.plan(model, args, Mesh(x=2, y=2), objective="serial")
    return out.getvalue()


def test_a_terminal_sees_the_passes_and_how_far_the_search_is() -> None:
    """The line is drawn a few times a second: of short messages it shows the last one for sure."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    STEPS.addHandler(handler)
    try:
        text = shown(terminal=True)
    finally:
        STEPS.removeHandler(handler)
    assert "annotate" in said and any(line.startswith("assign: ") and "gap" in line for line in said)
    assert said[-1] in text
    assert text.endswith("\x1b[2K")  # the line is cleared in the end


def test_a_file_sees_nothing() -> None:
    assert shown(terminal=False) == ""


def test_nothing_is_left_behind_when_planning_is_interrupted() -> None:
    before = STEPS.level, STEPS.propagate, list(STEPS.handlers)
    with pytest.raises(KeyboardInterrupt), progress(Console(file=io.StringIO(), force_terminal=True)):
        assert STEPS.isEnabledFor(logging.DEBUG)
        raise KeyboardInterrupt
    assert (STEPS.level, STEPS.propagate, list(STEPS.handlers)) == before


def test_an_interrupt_while_a_program_is_solved_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a callback of HiGHS raises is swallowed there: the program would seem to have no solution."""
    asked = []

    def once(_: object) -> None:
        asked.append(len(asked))
        if len(asked) == 1:
            signal.raise_signal(signal.SIGINT)

    def watched(*args: Any) -> Quiet:
        model = model_of(*args)
        model.cbMipInterrupt.subscribe(once)
        return model

    monkeypatch.setattr(highs, "model_of", watched)
    monkeypatch.setattr(highs, "by_relaxation", lambda *_: None)
    problem = stars(np.random.default_rng(0), 14, 9, 16, 1.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            highs.cheapest(problem, everything(problem), 1.0)
        assert asked == [0] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_after_an_interrupt_that_a_handler_lets_pass_a_model_runs_as_ever() -> None:
    problem, came, runs = stars(np.random.default_rng(0), 12, 6, 12, 1.0), [], []
    program = build(problem, everything(problem))
    model = model_of(program, sum(map(len, program.x)), 1.0)

    def once(event: Any) -> None:
        if not runs and not came and not model.stopped:
            signal.raise_signal(signal.SIGINT)
        event.data_in.user_interrupt = model.stopped

    model.cbMipInterrupt.subscribe(once)
    before = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    try:
        for _ in range(2):
            model.run()
            runs.append((model.stopped, model.getModelStatus().name))
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [1] and runs == [(True, "kInterrupt"), (False, "kOptimal")]
