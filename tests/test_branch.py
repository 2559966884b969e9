"""Branch and bound under limits equals brute force, in whatever order of cases, and tells what it has not looked at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sbpc.solver import Limit, Problem, Variable, total
from sbpc.solver.branch import Case, Part, Tree, Unsolved, cheapest, halves
from sbpc.solver.network import Space, aliased
from tests.test_near import limited, placed
from tests.test_solver import problems

SLACK = 1e-7  # relative: what tilts and tolerances come to


def everything(problem: Problem) -> Space:
    """All labels and aliases."""
    aliases = [np.arange(len(v.closure)) if aliased(v) else None for v in problem.values]
    return Space([np.arange(len(v.costs)) for v in problem.variables], aliases)


def fits(limits: Sequence[Limit], labels: Sequence[int]) -> bool:
    """Whether labels keep limits, but for rounding."""
    return all(taken(limit, labels) <= limit.most * (1 + 1e-6) for limit in limits)


@settings(max_examples=120, deadline=None)
@given(problems(variables=5, labels=5, axes=1), st.integers(0, 999), st.integers(1, 3), st.booleans())
def test_the_cheapest_labels_under_limits_equal_brute_force(problem, seed, classes, begun):
    """Whatever variables are called alike, and whether a plan is known."""
    assume(np.prod([len(v.costs) for v in problem.variables]) <= 1_000)
    limits, plans = limited(placed(problem), seed)
    scale = max(abs(plans[0][0]), 1e-6) if plans else 1e-3
    alike = [at % classes if len(v.costs) == len(problem.variables[at % classes].costs) else -at for at, v in enumerate(problem.variables)]
    known = list(plans[-1][1]) if plans and begun else None
    answer = cheapest(problem, everything(problem), scale, limits, 0.0, alike, known=known)
    if not plans:
        assert answer.labels is None and answer.bound == math.inf
        return
    assert answer.labels is not None and fits(limits, answer.labels)
    assert total(problem, answer.labels) == pytest.approx(plans[0][0], rel=1e-6, abs=1e-9)
    assert plans[0][0] - 2 * SLACK * scale <= answer.bound <= plans[0][0] + SLACK * scale


@settings(max_examples=60, deadline=None)
@given(problems(variables=5, labels=5, axes=1), st.integers(0, 999), st.sampled_from([0.0, 0.05, 0.3]), st.integers(0, 3))
def test_a_bound_holds_wherever_the_search_stops(problem, seed, gap, cuts):
    assume(np.prod([len(v.costs) for v in problem.variables]) <= 1_000)
    limits, plans = limited(placed(problem), seed)
    assume(plans)
    scale, space = max(abs(plans[0][0]), 1e-6), everything(problem)
    columns = Tree(problem, space, scale, limits, range(len(problem.variables))).program.columns
    answer = cheapest(problem, space, scale, limits, gap, most=cuts * columns)
    assert answer.bound <= plans[0][0] + SLACK * scale
    whole = cheapest(problem, space, scale, limits, gap)
    assert whole.labels is not None and fits(limits, whole.labels)
    assert total(problem, whole.labels) * (1 - gap) <= whole.bound + 2 * SLACK * scale


def test_equal_variables_are_cut_by_how_many_have_a_label_and_not_one_by_one() -> None:
    """Twelve equal ones, of which a limit has room for seven and a half at their dear label: two cases are left, not hundreds."""
    problem = repeated(12)
    limits = [Limit({at: np.array([1.0, 0.0]) for at in range(12)}, 7.5)]
    counts = []
    for classes in ([0] * 12, list(range(12))):
        tree = Tree(problem, everything(problem), 1.0, limits, classes)
        answer = tree.run(0.0, math.inf, None)
        assert answer.labels is not None and sorted(answer.labels) == [0] * 7 + [1] * 5
        assert answer.proved and total(problem, answer.labels) == pytest.approx(5.0)
        counts.append(next(tree.count))
    assert counts[0] <= 3 < 100 < counts[1]


@settings(max_examples=60, deadline=None)
@given(problems(variables=5, labels=5, axes=1), st.integers(0, 999), st.integers(0, 50))
def test_a_plan_that_is_known_is_beaten_or_near_the_bound_and_keeps_the_limits(problem, seed, place):
    assume(np.prod([len(v.costs) for v in problem.variables]) <= 1_000)
    limits, plans = limited(placed(problem), seed)
    assume(plans and plans[0][0] > 0)
    least, scale, space = plans[0][0], plans[0][0], everything(problem)
    seconds, known = plans[place % len(plans)]
    answer = cheapest(problem, space, scale, limits, 0.3, known=known)
    assert answer.labels is not None and total(problem, answer.labels) <= seconds * (1 + SLACK)
    assert answer.bound <= least + SLACK * scale
    every = itertools.product(*(range(len(v.costs)) for v in problem.variables))
    over = min((each for each in every if not fits(limits, each)), key=lambda labels: total(problem, labels), default=known)
    answer = cheapest(problem, space, scale, limits, 0.0, known=over)
    assert answer.labels is not None and fits(limits, answer.labels)


def taken(limit: Limit, labels: Sequence[int]) -> float:
    """What labels take of a limit."""
    return sum(float(w[labels[at]]) for at, w in limit.weights.items())


def repeated(count: int) -> Problem:
    """Variables on their own that cost nothing or 1."""
    digits = np.zeros((2, 1), dtype=np.int64)
    return Problem([Variable(f"v{at}", np.array([0.0, 1.0]), digits) for at in range(count)], [])


def test_what_is_impossible_stays_so_in_every_case() -> None:
    """A label with an infinite boxing is not to be had after a case that kept it out is left."""
    problem = repeated(3)
    tree = Tree(problem, everything(problem), 1.0, [], range(3))
    tree.most[0] = 0.0
    tree.take(Part({0: np.array([True, False])}))
    tree.take(Part())
    assert tree.model.getLp().col_upper_[:2] == [0.0, 1.0]


@pytest.mark.parametrize("seed", range(20))
def test_halves_part_what_is_dearer_than_the_mixture_from_what_is_cheaper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    part, paid, costs = rng.dirichlet(np.ones(6)), rng.random(6), 0.1 * rng.random(6)
    dear, apart = halves(part, paid, costs)
    assert dear.any() and not dear.all() and paid[dear].min() > part @ paid > paid[~dear].max()
    assert apart == pytest.approx(np.average(paid[dear], weights=part[dear]) - np.average(paid[~dear], weights=part[~dear]))
    equal, none = halves(part, np.ones(6), np.ones(6))
    assert none == 0.0 and equal.tolist() == (np.arange(6) == part.argmax()).tolist()


@pytest.mark.parametrize("after", range(6))
def test_a_relaxation_that_is_not_solved_leaves_a_bound_that_holds(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one from some on ends with no status."""
    problem = repeated(6)
    limits = [Limit({at: np.array([1.0, 0.3]) for at in range(6)}, 4.2)]
    tree = Tree(problem, everything(problem), 1.0, limits, range(6))
    whole, relaxed = Tree(problem, everything(problem), 1.0, limits, range(6)).run(0.0, math.inf, None), tree.relaxed

    def failing(part: Part, least: float = -math.inf) -> Case | None:
        if next(calls) >= after:
            raise Unsolved
        return relaxed(part, least)

    calls = itertools.count()
    monkeypatch.setattr(tree, "relaxed", failing)
    answer = tree.run(0.0, math.inf, None)
    assert answer.bound <= whole.bound + SLACK and not answer.proved and whole.proved
