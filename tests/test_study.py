"""Overlapped plans of the smallest nets are within 2 % of the best of all plans; `tests.bench.study` tries more."""

from __future__ import annotations

import pytest

from tests.bench.study import NEAR, Row, study

ROOMY = "squares, ethernet (2, 2)", "three layers, h100 (2,)"  # fastest where schedules may take what the device has


@pytest.mark.parametrize("name", ["one layer, h100 (4,)", "squares, h100 (4,)", "tied, slow (2,)", *ROOMY])
def test_no_plan_is_faster_by_more_than_2_percent_and_none_is_below_the_bound(name: str) -> None:
    row = study(name)
    assert row.holds, row


def test_no_plan_that_differs_in_one_label_is_faster_by_more_than_2_percent() -> None:
    row = study("three layers, h100 (4,)", parts=1_000)  # all others are too many
    assert row.tried > 50 and row.ratio <= 1 + NEAR, row


def test_a_plan_below_the_bound_or_far_below_ours_is_told() -> None:
    fine = Row("net", 10, 10, 100, ours=1.0, best=0.99, bound=0.9, proved=True, cpu=0.0)
    assert fine.holds
    for wrong in ({"best": 0.9, "bound": 0.8}, {"bound": 0.995}, {"proved": False}):
        assert not Row(**vars(fine) | wrong).holds
