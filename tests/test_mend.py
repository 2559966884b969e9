"""Plans that take a little too much, changed in one node where they hold what no row of a program counts."""

from __future__ import annotations

import math

import pytest
import torch

import sbpc
from sbpc import Mesh
from sbpc.passes.memory import search as memory
from sbpc.passes.memory.candidate_plans import Found
from sbpc.passes.memory.local_repair import mends
from tests import models


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> tuple[sbpc.Plan, list[tuple[memory.Search, Found]]]:
    """A plan under three quarters of what a GPT takes, most of which is parameters; the plans that were mended on the way."""
    torch.manual_seed(0)
    model, mesh = models.gpt2(layers=2, batch=8, seq=16, vocab=64, width=64, heads=4), Mesh(data=2, tensor=2)
    asked, mend = [], memory.Search.mend

    def seen(search: memory.Search, found: Found) -> None:
        asked.append((search, found))
        mend(search, found)

    monkeypatch.setattr(memory.Search, "mend", seen)
    most = 0.75 * sbpc.plan(*model, mesh, optimizer="adam").memory["total"]
    return sbpc.plan(*model, mesh, optimizer="adam", memory=most), asked


def test_where_programs_find_no_plan_that_fits_one_is_mended(tight) -> None:
    plan, asked = tight
    assert plan.memory["total"] <= plan.options["memory"] and plan.cost.gap <= 3e-3
    assert not any(search.fits(found) for search, found in asked)  # what the programs found


def test_mends_differ_in_one_node_and_are_faster_than_asked_fast_ones_first(tight) -> None:
    search, found = tight[1][0]
    calls, seconds = [search.calls[name] for name in found.peaks], search.seconds
    labels = search.keep(found.labels).labels
    every = list(mends(search.space, found.plan, calls, search.copies, math.inf))
    assert len(every) > 10 and all(sum(map(int.__ne__, labels, each)) == 1 for each in every)
    assert list(map(seconds, every)) == pytest.approx(sorted(map(seconds, every)))
    most = seconds(every[len(every) // 2])
    fewer = list(mends(search.space, found.plan, calls, search.copies, most))
    assert fewer == every[: len(fewer)] and all(seconds(each) < most * (1 + 1e-9) for each in fewer) and len(fewer) < len(every)
