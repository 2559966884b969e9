"""A terminal is told what planning is at; a file is not."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

import sbpc
from sbpc import Mesh
from sbpc.commands.progress import STEPS, progress
from tests import models


def shown(terminal: bool) -> str:
    """What is written while a small GPT is planned."""
    out = io.StringIO()
    with progress(Console(file=out, force_terminal=terminal, width=120)):
        model, args = models.gpt2(layers=1)
        sbpc.plan(model, args, Mesh(x=2, y=2))
    return out.getvalue()


def test_a_terminal_sees_the_passes_and_how_far_the_search_is() -> None:
    text = shown(terminal=True)
    assert "assign: " in text and "labels left to look at" in text
    assert text.endswith("\x1b[2K")  # the line is cleared in the end


def test_a_file_sees_nothing() -> None:
    assert shown(terminal=False) == ""


def test_nothing_is_left_behind_when_planning_is_interrupted() -> None:
    before = STEPS.level, STEPS.propagate, list(STEPS.handlers)
    with pytest.raises(KeyboardInterrupt), progress(Console(file=io.StringIO(), force_terminal=True)):
        assert STEPS.isEnabledFor(logging.DEBUG)
        raise KeyboardInterrupt
    assert (STEPS.level, STEPS.propagate, list(STEPS.handlers)) == before
