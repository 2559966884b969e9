"""Folding: what is tied costs what it costs, and bounds of folded problems hold for the whole; the checker checks."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sbpc
from sbpc import Mesh
from sbpc.graph.repeats import Run, runs
from sbpc.passes.assign.space import Space
from sbpc.solver import Bounder, Problem, Proof, Solution, Value, Variable, certify, checked_bound, solve, total
from sbpc.solver.bounder import blocks, raised
from sbpc.solver.fold import fold
from sbpc.solver.messages.trws import BALANCE, Messages, big_m
from sbpc.solver.problem import with_ports
from sbpc.solver.subsets import least_reduced
from tests import models
from tests.test_solver import brute_force, closed, problems

solver = sys.modules["sbpc.solver.search"]  # the name is that of a function of the package, too


def untied_proof(problem: Problem) -> Proof:
    """Multipliers of a problem in which nothing is tied."""
    return Bounder(problem, fold(problem, range(len(problem.variables)))).proof


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
    """What is found if bounds are raised no further than by finer classes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "is_wide", lambda _: True)
        return solve(problem, classes=classes, finer=finer)


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
    found, best = solve(problem, classes=classes, finer=finer), solve(problem)
    assert best.exact and found.lower_bound <= best.seconds <= found.seconds <= 1.01 * found.lower_bound


@settings(max_examples=200, deadline=None)
@given(problems(variables=5, labels=6, axes=1), st.integers(0, 2**32 - 1))
def test_no_multipliers_whatever_give_a_bound_above_brute_force(problem, seed):
    problem = with_ports(problem)
    best, proof, rng = brute_force(problem), untied_proof(problem), np.random.default_rng(seed)
    assert checked_bound(problem, proof) <= best * (1 + 1e-9)
    spoiled = {slot: found + rng.normal(0, 1e-3, found.shape) for slot, found in proof.multipliers.items()}
    charges = {name: [found * rng.uniform(0.5, 3) for found in parts] for name, parts in proof.shares.items()}
    for numbers in (spoiled, {}, proof.multipliers):
        for charged in (charges, {}, proof.shares):
            bad = Proof(rng.permutation(proof.classes).tolist() if seed % 2 else proof.classes, numbers, charged)
            assert checked_bound(problem, bad) <= best * (1 + 1e-9) + 1e-15


@settings(max_examples=60, deadline=None)
@given(problems(variables=5, labels=6, axes=1))
def test_the_checker_finds_what_the_messages_promise(problem):
    problem = with_ports(problem)
    folded = fold(problem, range(len(problem.variables)))
    messages = Messages(blocks(folded).problem, big_m(problem))
    raised(messages)
    bound = messages.bound
    best = brute_force(problem)
    assume(np.isfinite(best))  # messages cut off what impossible boxings cost, the checker does not
    assert checked_bound(problem, untied_proof(problem)) >= min(bound, best) * (1 - 1e-9) - 1e-15


def test_a_corrupted_plan_has_a_larger_gap():
    problem, classes, finer = chain(8, 3, 4, 1, False)
    found = solve(problem, classes=classes, finer=finer)
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
    plan = sbpc.plan(model, args, Mesh(x=2, y=2, cluster="h100"), objective="serial")
    space = Space(plan.graph, plan.mesh, {}, {})
    counts = np.bincount(np.unique(space.classes(), return_inverse=True)[1])
    assert len(counts) < 0.5 * len(space.variables) and counts.max() in (5, 6)
    assert plan.cost.lower_bound <= plan.cost.seconds and plan.cost.gap <= 0.02


def test_layers_held_in_16_bits_fold_though_casts_end_the_sums_of_their_gradients():
    torch.manual_seed(0)
    model, args = models.gpt2(layers=6, batch=8, seq=8, vocab=32, width=16, heads=4)
    plan = sbpc.plan(model.bfloat16(), args, Mesh(x=2, y=2, cluster="h100"), objective="serial")
    assert plan.options.masters
    space = Space(plan.graph, plan.mesh, {}, {})
    counts = np.bincount(np.unique(space.classes(), return_inverse=True)[1])
    assert len(counts) < 0.5 * len(space.variables) and counts.max() in (5, 6)


class Steps(torch.nn.Module):
    """A recurrent net, written out in steps that each take a part of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 8)
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
        return state.square().mean()


def test_steps_over_time_fold():
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(6, 8, batch_first=True)
    for model, args, least in ((Steps(), (torch.randn(4, 8, 6),), 5), (lstm, (torch.randn(4, 8, 6),), 5)):
        plan = sbpc.plan(model, args, Mesh(x=2), objective="serial")
        space = Space(plan.graph, plan.mesh, {}, {})
        counts = np.bincount(np.unique(space.classes(), return_inverse=True)[1])
        assert len(counts) < 0.5 * len(space.variables) and counts.max() >= least
        assert plan.cost.lower_bound <= plan.cost.seconds


def test_certify_tightens_the_bound_and_leaves_the_plan_alone():
    torch.manual_seed(0)
    model, args = models.gpt2(layers=5, batch=8, seq=8, vocab=32, width=16, heads=4)
    plan = sbpc.plan(model, args, Mesh(x=2, y=2, cluster="h100"), objective="serial")
    before, layouts = plan.cost.lower_bound, dict(plan.layouts)
    gap = plan.certify(seconds=5)
    assert before <= plan.cost.lower_bound <= plan.cost.seconds and gap == plan.cost.gap
    # from the multipliers that are kept
    assert plan.check_bound().bound == pytest.approx(plan.cost.lower_bound, rel=1e-9)
    assert plan.layouts == layouts


def test_where_a_gap_is_left_nothing_is_tied_for_the_bound(monkeypatch):
    for labels, layouts, seed in [(12, 8, 20), (20, 10, 8)]:
        monkeypatch.setattr(solver, "BOUND_GAP", {False: 0.0, True: 0.0})
        problem, classes, finer = chain(8, labels, layouts, seed, True)
        sharp, plain, best = solve(problem, classes=classes, finer=finer), tied(problem, classes, finer), solve(problem)
        assert best.exact and sharp.lower_bound <= best.seconds * (1 + 1e-9)
        assert sharp.seconds <= plain.seconds and sharp.gap < 0.5 * plain.gap


def test_of_few_labels_each_variable_may_have_one_of_its_own():
    for seed in range(4):
        problem, classes, finer = chain(8, 6, 5, seed, True)
        found, alike, best = solve(problem, classes=classes, finer=finer), tied(problem, classes, finer), solve(problem)
        assert (
            best.exact
            and best.seconds * (1 - 1e-9) <= found.seconds <= alike.seconds
            and found.gap <= solver.BOUND_GAP[False]
        )


def test_a_certificate_is_as_good_as_the_bound_of_a_plan_and_checked():
    for seed in range(6):
        problem, classes, finer = chain(7, 5, 4, seed, True)
        found, best = tied(problem, classes, finer), solve(problem)
        bound, proof = certify(problem, finer, found.seconds, 5.0)
        assert found.lower_bound * (1 - 1e-3) <= bound <= best.seconds * (1 + 1e-9)
        assert bound == min(checked_bound(problem, proof), found.seconds)


def test_messages_go_on_at_other_costs_with_a_bound_of_the_new_problem():
    for seed in range(4):
        problem, classes, _ = chain(7, 5, 4, seed, True)
        rng, bounder = np.random.default_rng(seed), Bounder(problem, fold(problem, classes))
        dearer = {id(v.costs): v.costs + rng.random(len(v.costs)) for v in problem.variables}
        other = Problem([dataclasses.replace(v, costs=dearer[id(v.costs)]) for v in problem.variables], problem.values)
        bounder.solve(other)
        anew = Bounder(other, fold(other, classes))
        assert bounder.bound == checked_bound(other, bounder.proof) <= solve(other).seconds * (1 + 1e-9)
        assert bounder.bound >= 0.9 * anew.bound


@settings(max_examples=60, deadline=None)
@given(problems(variables=6, labels=8, axes=1))
def test_messages_that_start_from_others_go_on_as_these_do(problem):
    first, second = (Messages(problem, big_m(problem)) for _ in range(2))
    for _ in range(2 * BALANCE):  # then the same sweep is next
        first.sweep()
    second.start_from(first, range(len(problem.values)))
    assert second.sweep() == pytest.approx(first.sweep(), rel=1e-9, abs=1e-15)


def on_three_axes(problem: Problem) -> Problem:
    """The problem, the digits of its eight labels their bits."""
    bits = np.arange(8)[:, None] >> np.arange(3) & 1
    return Problem([dataclasses.replace(v, digits=bits) for v in problem.variables], problem.values)


def test_the_nearest_labels_are_near_among_all_and_in_their_variable():
    extra = [np.array([0.0, 3.0, 1.0, 2.0]), np.array([5.0, 9.0]), np.array([0.5, 0.5, 0.5])]
    assert [found.tolist() for found in least_reduced(extra, 2)] == [[0, 2], [], [0, 1]]
    assert [found.tolist() for found in least_reduced(extra, 99)] == [[0, 2, 3, 1], [0, 1], [0, 1, 2]]


def test_on_three_axes_ends_of_runs_on_their_own_better_the_bound(monkeypatch):
    monkeypatch.setattr(solver, "BOUND_GAP", {True: 0.0})
    bounds = []
    for seed in range(6):
        problem, classes, finer = chain(8, 8, 6, seed, True)
        found = [solve(on_three_axes(problem), classes=classes, finer=apart).lower_bound for apart in (finer, classes)]
        bounds.append(found)
    assert all(apart >= together * (1 - 1e-6) for apart, together in bounds)
    assert any(apart > together * 1.01 for apart, together in bounds)


def test_a_proof_can_be_checked_where_nothing_costs_anything_and_where_all_is_tied():
    problem, classes, finer = chain(5, 3, 4, 1, False)
    free = Problem(
        [dataclasses.replace(v, costs=np.zeros(3)) for v in problem.variables],
        [dataclasses.replace(v, closure=np.zeros((4, 4))) for v in problem.values],
    )
    found = solve(free, classes=classes, finer=finer)
    assert found.seconds == found.lower_bound == checked_bound(free, found.proof) == 0.0
    pairs = [
        Value(2 * at, np.array([0, 1]), [(2 * at + 1, np.array([1, 0]))], 1 - np.eye(2), (0, 0)) for at in range(4)
    ]
    variables = [Variable(f"v{at}", np.array([1.0, 3.0]), np.arange(2)[:, None]) for at in range(8)]
    for finer in ([0, 1] * 4, [0, 1, *[2, 3] * 2, 4, 5]):
        found = solve(Problem(variables, pairs), classes=[0, 1] * 4, finer=finer)
        assert found.seconds == 12.0 == pytest.approx(found.lower_bound, rel=1e-9)
