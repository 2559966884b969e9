"""Workers: what crashes or hangs costs one item, and what raises is told."""

from __future__ import annotations

import os
import signal
import time

import pytest

from sbpc.rules.proof.worker import Lost, attempt


def work(item: int) -> int:
    """Crashes on 2, hangs on 3."""
    if item == 2:
        os.kill(os.getpid(), signal.SIGFPE)
    if item == 3:
        time.sleep(60)
    return item * item


def test_an_item_that_crashes_or_hangs_is_lost_and_the_others_are_not():
    found = list(attempt(work, [1, 2, 3, 2, 4], 0.5))
    crash, hang = Lost("killed by SIGFPE"), Lost("not done after 0.5 s")
    assert found == [(1, 1), (2, crash), (3, hang), (2, crash), (4, 16)]


def test_what_a_worker_raises_is_raised():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        list(attempt(lambda item: 1 // item, [1, 0, 2], 5))


def test_a_reader_that_stops_leaves_no_worker():
    results = attempt(work, [1, 4, 3], 5)
    assert next(results) == (1, 1)
    child = results.gi_frame.f_locals["child"]
    results.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
