"""Plans under limits, bettered in a window of variables at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sbpc
from sbpc import Mesh
from sbpc.passes.annotate import annotate
from sbpc.passes.memory import search as memory
from sbpc.passes.memory.candidate_plans import Found
from sbpc.passes.memory.priced_space import PricedSpace
from sbpc.passes.memory.saved_values import store
from sbpc.solver import Limit, Problem, Variable, Windows, total
from sbpc.solver import windows as windows_module
from sbpc.solver.moves import Neighbours
from tests import models
from tests.test_near import limited, placed
from tests.test_solver import problems


@settings(max_examples=80, deadline=None)
@given(problems(variables=5, labels=5, axes=1), st.integers(0, 999))
def test_a_window_of_everything_gives_the_cheapest_plan_under_the_limits(problem, seed):
    if np.prod([len(v.costs) for v in problem.variables]) > 1_000:
        return
    limits, plans = limited(placed(problem), seed)
    windows = Windows(problem, [np.zeros(len(v.costs)) for v in problem.variables])
    for seconds, labels in plans[:: max(1, len(plans) // 3)]:
        found = windows.cheaper(0, list(labels), limits)
        reached = set(windows.window(0))
        apart = {at for at, (one, other) in enumerate(zip(labels, found or labels)) if one != other}
        assert apart <= reached
        among = [each for each, other in plans if all(labels[at] == other[at] for at in set(range(len(labels))) - reached)]
        after = seconds if found is None else total(problem, found)
        assert after == pytest.approx(min(among), rel=2e-4, abs=1e-9)
        if found is not None:
            assert after < seconds
            assert all(sum(float(w[found[at]]) for at, w in limit.weights.items()) <= limit.most * (1 + 1e-6) for limit in limits)


@pytest.mark.parametrize("wide", [6, 30])
def test_windows_are_what_lies_next_to_their_centers_and_reach_every_variable(wide, monkeypatch):
    monkeypatch.setattr(windows_module, "WIDE", wide)
    problem = PricedSpace(annotate(store(sbpc.plan(*models.gpt2(layers=1), Mesh(x=4)).graph)), Mesh(x=4), {}, {}).problem
    windows = Windows(problem, [np.zeros(len(v.costs)) for v in problem.variables])
    near = Neighbours(problem).near
    assert len(windows.centers) < 5 * len(problem.variables) / wide
    for center in windows.centers:
        found = windows.window(center)
        assert found[0] == center and len(found) == len(set(found)) == wide
        assert all(any(other in near[at] for other in found[:place]) for place, at in enumerate(found) if place)
    reached = {at for center in windows.centers for at in windows.window(center)}
    assert reached == set(range(len(problem.variables)))


def test_of_the_labels_of_a_window_the_nearest_are_looked_at(monkeypatch):
    monkeypatch.setattr(windows_module, "EACH", 2)
    problem = Problem([Variable("v", np.array([3.0, 0.0, 2.0, 1.0]), np.zeros((4, 1), dtype=np.int64))], [])
    everything = Limit({0: np.ones(4)}, 2.0)
    far = Windows(problem, [np.array([0.0, 9.0, 1.0, 9.0])])
    assert far.cheaper(0, [0], [everything]) == [2] and far.cheaper(0, [2], [everything]) is None
    assert Windows(problem, [np.array([9.0, 0.0, 1.0, 9.0])]).cheaper(0, [0], [everything]) == [1]
    assert Windows(problem, [np.array([9.0, 0.0, 1.0, 9.0])]).cheaper(0, [0], [Limit({0: np.array([0.0, 2.0, 0.0, 0.0])}, 1.0)]) == [2]


def test_windows_go_on_from_plans_that_fit_until_a_whole_turn_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """By window and plan the labels that it gives one after the other, with rows for those that do not fit; 9, 6 and 5 fit."""
    given = {(0, 9): [8, 7, 6], (1, 6): [3, 2, 1], (2, 6): [5]}
    asked: list[tuple[int, int, list[str]]] = []

    class Scripted:
        centers = range(3)

        def __init__(self, *of: object) -> None:
            self.left = {key: list(labels) for key, labels in given.items()}

        def cheaper(self, center: int, labels: list[int], limits: list[str]) -> list[int] | None:
            asked.append((center, labels[0], limits))
            return [self.left[center, labels[0]].pop(0)] if self.left.get((center, labels[0])) else None

    monkeypatch.setattr(memory, "Windows", Scripted)
    search: Any = object.__new__(memory.Search)
    search.space, search.near, search.limits = SimpleNamespace(problem=None), SimpleNamespace(distances=None), ["kept"]
    search.keep = lambda labels: SimpleNamespace(labels=labels)
    search.fits = lambda found: found.labels[0] in (9, 6, 5)
    search.hold = lambda found: search.limits.append(f"held {found.labels[0]}")
    search.guess = lambda found, known: {"call": f"guessed {found.labels[0]}"}
    search.room = lambda found: {"call": f"room {found.labels[0]}"}
    search.improve(search.keep([9]))
    assert [(center, label) for center, label, _ in asked] == [(0, 9)] * 3 + [(1, 6)] * 3 + [(2, 6), (0, 5), (1, 5), (2, 5)]
    assert asked[0][2] == ["kept", "room 9"] and asked[1][2] == ["kept", "held 8", "guessed 8"]
    assert asked[-1][2] == ["kept", *(f"held {label}" for label in (8, 7, 3, 2, 1)), "room 5"]


class Enough(Exception):
    """What the test is about is done."""


def test_a_slow_plan_that_fits_is_bettered_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the plans that the search knows the one that takes least: windows come about as far as the search itself does."""
    torch.manual_seed(0)
    model, mesh = models.mlp(), Mesh(a=2, b=4, cluster="h100")

    def sharpen(search: memory.Search, best: Found) -> None:
        small = min(search.plans, key=lambda each: each.bytes)
        search.found = {tuple(small.labels): small}
        assert search.fits(small) and small.seconds > 1.2 * best.seconds
        search.improve(small)
        assert search.best.seconds < 1.05 * best.seconds
        raise Enough

    most = 0.7 * sbpc.plan(*model, mesh, optimizer="adam").memory["total"]
    monkeypatch.setattr(memory.Search, "sharpen", sharpen)
    with pytest.raises(Enough):
        sbpc.plan(*model, mesh, optimizer="adam", memory=most)
