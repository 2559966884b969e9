"""Bounds by cases hold for all plans under limits, close what no prices alone can close, and are checked without the solver."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sbpc
from sbpc import Mesh
from sbpc.passes.memory import search as memory
from sbpc.passes.memory.priced_space import Divided
from sbpc.solver import Limit, Problem, Variable, bound_by_cases, cases, near
from sbpc.solver.cases import Cut, Division, Leaf, Tree, sides
from tests import models
from tests.test_near import limited, placed
from tests.test_proof import spoiled
from tests.test_solver import problems


def leaves(tree: Tree) -> list[Leaf]:
    """The parts that are not cut."""
    return [tree] if isinstance(tree, Leaf) else [leaf for part in tree.parts for leaf in leaves(part)]


def changed(tree: Tree, seed: int, size: float) -> Tree:
    """The same cases with other multipliers, and prices of which some are negative."""
    if isinstance(tree, Leaf):
        prices = np.random.default_rng(seed).normal(tree.prices, size)
        return Leaf(prices.tolist(), spoiled(tree.proof, seed, size))
    one, other = (changed(part, seed + at, size) for at, part in enumerate(tree.parts))
    return Cut(tree.variable, tree.labels, (other, one) if seed % 2 else (one, other))


def test_cases_bound_the_plans_under_limits_and_close_most_gaps() -> None:
    gaps = list[tuple[float, float, int]]()

    @settings(max_examples=60, deadline=None)
    @given(problems(variables=5, labels=5, axes=1), st.integers(0, 999))
    def run(problem: Problem, seed: int) -> None:
        assume(np.prod([len(v.costs) for v in problem.variables]) <= 1_000)
        limits, plans = limited(placed(problem), seed)
        assume(plans)
        (least, labels), scale = plans[0], max(abs(plans[0][0]), 1e-6)
        division = Division(problem, limits, labels, scale, [np.zeros(len(v.costs)) for v in problem.variables])
        division.run(-math.inf)
        assert isinstance(division.root.tree, Leaf)
        before = division.bound
        division.run(least)
        assert before <= division.bound <= least + 1e-9 * scale
        tree, outside = division.root.tree, division.outside
        assert bound_by_cases(problem, limits, tree, outside) == pytest.approx(division.bound, rel=1e-9, abs=1e-12)
        for other in (0.0, 100 * scale):
            assert bound_by_cases(problem, limits, tree, other) <= least + 1e-9 * scale
        assert bound_by_cases(problem, limits, changed(tree, seed, scale / 10), outside) <= least + 1e-9 * scale
        gaps.append((1 - before / scale, 1 - division.bound / scale, len(leaves(tree))))

    run()
    before, after, cuts = map(np.array, zip(*gaps))
    assert max(cuts) > 2 and (before > 1e-6).sum() >= 5
    assert (after > 1e-6).sum() <= (before > 1e-6).sum() // 4


def two_ways() -> tuple[Problem, list[Limit]]:
    """A variable that is fast or small, and a second one that is the same: the mixture of both fits and is as good as half."""
    digits = np.zeros((2, 1), dtype=np.int64)
    room = Limit({at: np.array([2.0, 0.0]) for at in range(2)}, 3.0)
    return Problem([Variable(f"v{at}", np.array([1.0, 5.0]), digits) for at in range(2)], []), [room]


def test_cases_close_the_gap_of_a_mixture() -> None:
    problem, limits = two_ways()
    division = Division(problem, limits, [0, 1], 6.0, [np.zeros(2)] * 2)
    division.run(-math.inf)
    assert division.bound == pytest.approx(4.0)  # each mixes a quarter of the small one
    division.run(6.0)
    assert division.bound == pytest.approx(6.0) and len(leaves(division.root.tree)) == 3


def test_a_part_begins_with_what_the_proof_of_the_whole_bounds_it_by() -> None:
    variable = Variable("v", np.array([1.0, 5.0, 9.0]), np.zeros((3, 1), dtype=np.int64))
    division = Division(Problem([variable], []), [Limit({0: np.array([2.0, 0.0, 0.0])}, 1.0)], [1], 5.0, [np.zeros(3)])
    division.run(-math.inf)
    assert division.bound == pytest.approx(3.0)  # half fast, half small
    assert division.part(division.root, {0: np.array([False, False, True])}).bound == pytest.approx(7.0)  # 9, of which 2 are for room


def test_no_case_is_cut_beyond_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, limits = two_ways()
    monkeypatch.setattr(cases, "WORK", 0)
    division = Division(problem, limits, [0, 1], 6.0, [np.zeros(2)] * 2)
    division.run(6.0)
    assert division.bound == pytest.approx(4.0) and isinstance(division.root.tree, Leaf)
    division.run(6.0, until=-math.inf)
    assert isinstance(division.root.tree, Leaf)
    division.run(6.0, until=1e12)
    assert division.bound == pytest.approx(6.0)


def test_labels_that_were_not_looked_at_go_with_those_that_are_like_them() -> None:
    labels, dear = np.array([0, 2]), np.array([False, True])
    found = sides(labels, dear, np.array([1.0, 1.5, 9.0, 8.0]), np.array([1.0, 1.0, 1.1, 1.0]))
    assert found.tolist() == [False, False, True, True]


def test_under_a_memory_limit_cases_are_a_proof_that_certify_makes_sharper(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a search that knows of few labels, as of larger models."""
    torch.manual_seed(0)
    model, args = models.gpt2(layers=1, batch=8, seq=16, vocab=64, width=64, heads=4)
    mesh = Mesh(x=4, cluster="h100")
    free = sbpc.plan(model, args, mesh, optimizer="adam")
    for module, name, setting in ((near, "FEW", 0), (near, "BOUNDED", 0), (memory, "CASED", 0.0), (memory, "GOOD", 0.0), (cases, "WORK", 3e4)):
        monkeypatch.setattr(module, name, setting)
    plan = sbpc.plan(model, args, mesh, optimizer="adam", memory=0.6 * free.cost.memory["total"])
    assert isinstance(plan.prover, Divided) and isinstance(plan.proof, Cut)
    checked = plan.check_bound()
    assert checked.bound == pytest.approx(plan.lower_bound, rel=1e-9) and checked.bound <= checked.paid
    assert plan.check_bound(changed(plan.proof, 1, checked.paid / 100)).bound < checked.bound
    assert plan.check_bound(leaves(plan.proof)[0].proof).bound <= checked.paid
    gap = plan.cost.gap
    assert 0 < gap < 0.1
    assert plan.certify(seconds=10) < gap
    assert plan.check_bound().bound == pytest.approx(plan.lower_bound, rel=1e-9)
