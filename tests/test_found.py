"""Which of the plans that were made is the best under a limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sbpc.passes.memory.candidate_plans import Found, Plans


def plans(limit: float, taken: dict[int, tuple[float, int]]) -> Plans:
    """Plans of one label each, and the seconds and bytes that they take."""
    nothing: Any = None
    found = Plans(limit, nothing, nothing, nothing)
    for label, (seconds, size) in taken.items():
        plan: Any = SimpleNamespace(memory={"total": size})
        found.found[label,] = Found(plan, [label], seconds, {"mm": size} if size > limit else {})
    return found


@pytest.mark.parametrize(
    ("limit", "best"),
    [(9, None), (10, 3), (20, 1), (30, 1), (40, 2)],
)
def test_the_fastest_plan_that_fits_is_the_best_and_of_equally_fast_ones_that_with_the_fewest_bytes(limit, best) -> None:
    found = plans(limit, {0: (2.0, 30), 1: (2.0 * (1 + 1e-12), 20), 2: (1.0, 40), 3: (3.0, 10)})
    assert (found.best and found.best.labels[0]) == best
    assert [each.peak for each in found.plans] == ["mm" if each.bytes > limit else None for each in found.plans]
