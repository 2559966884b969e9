"""Folding: what is tied costs what it costs, and bounds of folded problems hold for the whole; the checker checks."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sbpc
from sbpc import Mesh
from sbpc.passes.assign.repeated_blocks import Run, runs
from sbpc.passes.assign.space import Space
from sbpc.solver import Problem, Solution, Value, Variable, solve, total, untied_proof
from sbpc.solver.check import Proof, checked_bound
from sbpc.solver.dual import between_ends, prove
from sbpc.solver.fold import fold
from sbpc.solver.moves import nearest
from sbpc.solver.resume import resumed, untied
from sbpc.solver.trws import ceiling
from tests import models
from tests.test_solver import brute_force, closed, problems

solver = sys.modules["sbpc.solver.solve"]  # the name is that of a function of the package, too


def numbered(problem: Problem) -> Problem:
    """The problem with a number of its own for every port."""
    seen: dict[int, int] = {}

    def place(at: int) -> int:
        seen[at] = seen.get(at, -1) + 1
        return seen[at]

    values = [
        dataclasses.replace(value, places=(place(value.producer), *(place(at) for at, _ in value.consumers)))
        for value in problem.values
    ]
    return Problem(problem.variables, values)


def chain(blocks: int, labels: int, layouts: int, seed: int, shared: bool) -> tuple[Problem, list[int], list[int]]:
    """A prologue, equal blocks of two variables that read a value shared by all, and an epilogue; classes, finer ones."""
    rng = np.random.default_rng(seed)
    digits = np.arange(labels)[:, None]
    kinds = [rng.random(labels) for _ in range(4)]
    closures = [closed(rng.random((layouts, layouts))) for _ in range(3)]
    port = {
        name: rng.integers(0, layouts, labels) for name in ("first", "a in", "a out", "b in", "b out", "c", "d", "e")
    }
    variables = [Variable("first", kinds[0], digits)]
    for block in range(blocks):
        variables += [Variable(f"a{block}", kinds[1], digits), Variable(f"b{block}", kinds[2], digits)]
    variables.append(Variable("last", kinds[3], digits))
    values = []
    for block in range(blocks):
        before = (0, port["first"]) if block == 0 else (2 * block, port["b out"])
        readers = [(2 * block + 1, port["a in"]), (2 * block + 2, port["d"])]
        values.append(Value(*before, readers, closures[0], (9, 0, 1)))
        values.append(Value(2 * block + 1, port["a out"], [(2 * block + 2, port["b in"])], closures[1], (9, 0)))
    values.append(Value(2 * blocks, port["b out"], [(2 * blocks + 1, port["c"])], closures[0], (9, 0)))
    if shared:
        readers = [(2 * block + 1, port["e"]) for block in range(blocks)]
        values.append(Value(0, port["c"], readers, closures[2], (8, *(3,) * blocks)))
    values.sort(key=lambda value: value.producer)
    classes = [0, *(1 + at % 2 for at in range(2 * blocks)), 3]
    finer = [*range(3), *(100 + at % 2 for at in range(2 * blocks - 4)), *range(3, 6)]
    return Problem(variables, values), classes, finer


def tied(problem: Problem, classes: list[int], finer: list[int]) -> Solution:
    """What is found where variables are too many to be looked at one by one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "FEW", 0)
        return solve(problem, alike=classes, finer=finer)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1), st.booleans())
def test_a_folded_plan_costs_the_same_unfolded_and_its_bound_holds_for_every_plan(
    blocks, labels, layouts, seed, shared
):
    problem, classes, finer = chain(blocks, labels, layouts, seed, shared)
    found = tied(problem, classes, finer)
    folded = fold(problem, classes)
    one = folded.fold(found.labels)
    assert folded.unfold(one) == found.labels
    assert total(folded.problem, one) == pytest.approx(total(problem, found.labels), rel=1e-9)
    assert found.seconds == pytest.approx(total(problem, found.labels), rel=1e-12)
    best = solve(problem).seconds if blocks > 3 else brute_force(problem)
    assert found.lower_bound <= best * (1 + 1e-9) and best <= found.seconds * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_a_folded_plan_is_found_where_most_boxings_are_impossible(labels, layouts, seed):
    problem, classes, finer = chain(5, labels, layouts, seed, True)
    rng = np.random.default_rng(seed)
    for closure in {id(value.closure): value.closure for value in problem.values}.values():
        closure[rng.random(closure.shape) < 0.6] = np.inf
        closure[:] = closed(closure)
    found, best = tied(problem, classes, finer), solve(fold(problem, classes).problem)
    assert np.isfinite(found.seconds) == np.isfinite(best.seconds)
    assert best.seconds * (1 - 1e-9) <= found.seconds and found.lower_bound <= solve(problem).seconds * (1 + 1e-9)


def test_the_bound_of_a_folded_chain_is_tight():
    problem, classes, finer = chain(12, 3, 4, 5, True)
    found, best = solve(problem, alike=classes, finer=finer), solve(problem)
    assert best.exact and found.lower_bound <= best.seconds <= found.seconds <= 1.01 * found.lower_bound


def test_of_a_folded_problem_with_many_labels_not_everything_is_tried(monkeypatch):
    module, tried = sys.modules["sbpc.solver.solve"], []
    run = module.Search.run
    monkeypatch.setattr(module.Search, "run", lambda search: tried.append(search.problem) or run(search))
    problem, classes, finer = chain(6, 3, 5, 2, True)
    everything = tied(problem, classes, finer)
    assert tried and everything.gap > module.TIED[0][1]
    tried.clear()
    monkeypatch.setattr(module, "LABELS", 0)
    left = tied(problem, classes, finer)
    assert not tried and left.proof is not None
    assert left.lower_bound <= everything.seconds * (1 + 1e-9) and everything.seconds <= left.seconds * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(problems(variables=5, labels=6, axes=1), st.integers(0, 2**32 - 1))
def test_no_multipliers_whatever_give_a_bound_above_brute_force(problem, seed):
    problem = numbered(problem)
    best, proof, rng = brute_force(problem), untied_proof(problem), np.random.default_rng(seed)
    assert checked_bound(problem, proof) <= best * (1 + 1e-9)
    spoiled = {slot: found + rng.normal(0, 1e-3, found.shape) for slot, found in proof.multipliers.items()}
    charges = {name: [found * rng.uniform(0.5, 3) for found in parts] for name, parts in proof.charges.items()}
    for numbers in (spoiled, {}, proof.multipliers):
        for charged in (charges, {}, proof.charges):
            bad = Proof(rng.permutation(proof.classes).tolist() if seed % 2 else proof.classes, numbers, charged)
            assert checked_bound(problem, bad) <= best * (1 + 1e-9) + 1e-15


@settings(max_examples=60, deadline=None)
@given(problems(variables=5, labels=6, axes=1))
def test_the_checker_finds_what_the_messages_promise(problem):
    problem = numbered(problem)
    folded = fold(problem, range(len(problem.variables)))
    from sbpc.solver.dual import blocks, passed

    bound = passed(blocks(folded).problem, ceiling(problem)).bound
    assert checked_bound(problem, untied_proof(problem)) >= min(bound, brute_force(problem)) * (1 - 1e-9) - 1e-15


def test_a_corrupted_plan_has_a_larger_gap():
    problem, classes, finer = chain(8, 3, 4, 1, False)
    found = solve(problem, alike=classes, finer=finer)
    assert found.proof is not None
    bound = checked_bound(problem, found.proof)
    worse = [(label + 1) % 3 for label in found.labels]
    assert total(problem, worse) - bound > found.seconds - bound >= 0


def test_runs_of_blocks_are_found_between_other_things_and_beside_each_other():
    assert list(runs("pqabcabcabcabcabrs")) == [Run(2, 16, 3)]
    assert list(runs("abcabcabcabcxyxyxyxyxy")) == [Run(0, 12, 3), Run(12, 22, 2)]
    assert list(runs("abcabcabc")) == []  # three blocks are not worth it
    assert list(runs("")) == []


def test_layers_of_a_model_fold_and_the_plan_costs_what_its_graph_costs():
    torch.manual_seed(0)
    model, args = models.gpt2(layers=6, batch=8, seq=8, vocab=32, width=16, heads=4)
    plan = sbpc.plan(model, args, Mesh(x=2, y=2, cluster="h100"))
    space = Space(plan.graph, plan.mesh, {}, {})
    counts = np.bincount(np.unique(space.classes(None), return_inverse=True)[1])
    assert len(counts) < 0.5 * len(space.variables) and counts.max() in (5, 6)
    assert plan.cost.lower_bound <= plan.cost.seconds and plan.cost.gap <= 0.02


def test_certify_tightens_the_bound_and_leaves_the_plan_alone():
    torch.manual_seed(0)
    model, args = models.gpt2(layers=5, batch=8, seq=8, vocab=32, width=16, heads=4)
    plan = sbpc.plan(model, args, Mesh(x=2, y=2, cluster="h100"))
    before, layouts = plan.cost.lower_bound, dict(plan.layouts)
    gap = plan.certify(seconds=5)
    assert before <= plan.cost.lower_bound <= plan.cost.seconds and gap == plan.cost.gap
    assert plan.check_bound().bound == pytest.approx(plan.cost.lower_bound, rel=1e-9)  # from the multipliers that are kept
    assert plan.layouts == layouts


@pytest.mark.parametrize(("labels", "layouts", "seed"), [(12, 8, 20), (20, 10, 8)])
def test_where_a_gap_is_left_nothing_is_tied_for_the_bound(labels, layouts, seed, monkeypatch):
    problem, classes, finer = chain(8, labels, layouts, seed, True)
    sharp, best = tied(problem, classes, finer), solve(problem)
    assert best.exact and sharp.lower_bound <= best.seconds * (1 + 1e-9)
    assert sharp.lower_bound == pytest.approx(min(checked_bound(problem, sharp.proof), sharp.seconds), rel=1e-9)
    monkeypatch.setattr(solver.Both, "resume", lambda both: None)
    plain = tied(problem, classes, finer)
    assert sharp.seconds <= plain.seconds and sharp.gap < 0.5 * plain.gap


@pytest.mark.parametrize("seed", range(4))
def test_of_few_variables_each_may_have_a_label_of_its_own(seed):
    problem, classes, finer = chain(8, 6, 5, seed, True)
    found, alike, best = solve(problem, alike=classes, finer=finer), tied(problem, classes, finer), solve(problem)
    assert best.exact and best.seconds * (1 - 1e-9) <= found.seconds <= alike.seconds and found.gap <= solver.TIED[0][1]
    assert found.lower_bound == pytest.approx(min(checked_bound(problem, found.proof), found.seconds), rel=1e-9)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_messages_go_on_where_a_proof_of_tied_variables_ends(seed, shared):
    """At its bound, but for what is rounded, and for boxings of which several members of a class pay equal parts."""
    problem, classes, _ = chain(7, 5, 4, seed, shared)
    folded = fold(problem, classes)
    cap = ceiling(folded.problem)
    before, proof = prove(problem, between_ends(folded, cap)[0], folded, cap)
    messages = resumed(Problem(problem.variables, [value for value in problem.values if value.consumers]), proof, cap)
    begun = messages.sweep()
    assert begun >= before * (0.9 if shared else 1 - 1e-9) > 0
    bound, better = untied(problem, proof, cap, np.inf)
    assert begun * (1 - 1e-9) <= bound <= solve(problem).seconds * (1 + 1e-9) and bound == checked_bound(problem, better)


@pytest.mark.parametrize("seed", range(6))
def test_messages_go_on_at_the_bound_where_nothing_was_tied(seed):
    problem, _, _ = chain(7, 5, 4, seed, True)
    folded, cap = fold(problem, range(len(problem.variables))), ceiling(problem)
    before, proof = prove(problem, between_ends(folded, cap)[0], folded, cap)
    begun = resumed(Problem(problem.variables, [value for value in problem.values if value.consumers]), proof, cap).sweep()
    assert before * (1 - 1e-9) <= begun <= solve(problem).seconds * (1 + 1e-9)


def on_three_axes(problem: Problem) -> Problem:
    """The problem, the digits of its eight labels their bits."""
    bits = np.arange(8)[:, None] >> np.arange(3) & 1
    return Problem([dataclasses.replace(v, digits=bits) for v in problem.variables], problem.values)


def test_where_two_axes_are_free_the_third_stays_as_it_is():
    problem, classes, _ = chain(5, 8, 6, 1, True)
    folded = fold(on_three_axes(problem), classes).problem
    search = solver.Search(folded, first=False)
    labels, extra = search.labels, [np.zeros(8) for _ in folded.variables]
    search.pair(extra, (0, 2))
    assert search.seconds < total(folded, labels)
    assert all(found & 2 == label & 2 for found, label in zip(search.labels, labels))
    search.widen(extra)
    assert any(found & 2 != label & 2 for found, label in zip(search.labels, labels))


def test_the_nearest_labels_are_near_among_all_and_in_their_variable():
    extra = [np.array([0.0, 3.0, 1.0, 2.0]), np.array([5.0, 9.0]), np.array([0.5, 0.5, 0.5])]
    assert [found.tolist() for found in nearest(extra, 4)] == [[0, 2], [], [0, 1, 2]]
    assert [found.tolist() for found in nearest(extra, 5, 2)] == [[0, 2], [], [0, 1]]
    assert [found.tolist() for found in nearest(extra, 99, 2)] == [[0, 2], [0, 1], [0, 1]]


def test_labels_near_other_bounds_and_around_the_plan_are_looked_at(monkeypatch):
    """Where what the bound says of labels is of no use the others find a better plan."""
    problem, classes, _ = chain(5, 8, 6, 1, True)
    folded = fold(problem, classes).problem
    search = solver.Search(folded)
    before = search.seconds
    useless = [np.where(np.arange(8) == label, 0.0, 1.0) for label in search.labels]
    for name, many in (("TIMES", 1), ("EACH", 1), ("OWN", 0)):
        monkeypatch.setattr(sys.modules["sbpc.solver.search"], name, many)
    search.widen(useless)
    assert search.seconds == before
    monkeypatch.setattr(sys.modules["sbpc.solver.search"], "OWN", 2)
    search.widen(useless)
    assert search.seconds < before


def test_on_three_axes_pairs_of_them_are_freed(monkeypatch):
    """Where a gap is left, and one axis at a time does not close it."""
    problem, classes, finer = chain(5, 8, 6, 1, True)
    for name in ("offer", "approach", "move"):
        monkeypatch.setattr(solver.Search, name, lambda *args: None)
    monkeypatch.setattr(solver, "LABELS", 0)
    tried = []

    def watched(self, extra, axes):
        tried.append(axes)

    monkeypatch.setattr(solver.Search, "pair", watched)
    found = solve(on_three_axes(problem), alike=classes, finer=finer)
    assert tried == [(0, 1), (0, 2), (1, 2)] and found.gap > 0.03


def test_on_three_axes_ends_of_runs_on_their_own_better_the_bound(monkeypatch):
    monkeypatch.setattr(solver, "LABELS", 0)
    monkeypatch.setattr(solver, "TIED", ((0.0, 0.0),) * 2)
    bounds = []
    for seed in range(6):
        problem, classes, finer = chain(8, 8, 6, seed, True)
        found = [solve(on_three_axes(problem), alike=classes, finer=apart).lower_bound for apart in (finer, classes)]
        bounds.append(found)
    assert all(apart >= together * (1 - 1e-6) for apart, together in bounds)
    assert any(apart > together * 1.01 for apart, together in bounds)


def test_a_proof_can_be_checked_where_nothing_costs_anything_and_where_all_is_tied():
    problem, classes, finer = chain(5, 3, 4, 1, False)
    free = Problem(
        [dataclasses.replace(v, costs=np.zeros(3)) for v in problem.variables],
        [dataclasses.replace(v, closure=np.zeros((4, 4))) for v in problem.values],
    )
    found = solve(free, alike=classes, finer=finer)
    assert found.seconds == found.lower_bound == checked_bound(free, found.proof) == 0.0
    pairs = [Value(2 * at, np.array([0, 1]), [(2 * at + 1, np.array([1, 0]))], 1 - np.eye(2), (0, 0)) for at in range(4)]
    variables = [Variable(f"v{at}", np.array([1.0, 3.0]), np.arange(2)[:, None]) for at in range(8)]
    for finer in ([0, 1] * 4, [0, 1, *[2, 3] * 2, 4, 5]):
        found = solve(Problem(variables, pairs), alike=[0, 1] * 4, finer=finer)
        assert found.seconds == 12.0 == pytest.approx(found.lower_bound, rel=1e-9)
