"""The proof of every plan: a bound recomputed from multipliers, below brute force whatever the multipliers are."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError
from sbpc.plans.plan import Plan
from sbpc.solver import Proof, checked_bound
from tests import models
from tests.test_assign import program, seconds_of_labels, spaces


def spoiled(proof: Proof, seed: int, size: float) -> Proof:
    """The proof with noise of about `size` seconds on all multipliers, and cost shares of another sum."""
    rng = np.random.default_rng(seed)
    noisy = {slot: found + rng.normal(0, size, found.shape) for slot, found in proof.multipliers.items()}
    shares = {name: [found * rng.uniform(0.5, 3) for found in parts] for name, parts in proof.shares.items()}
    return dataclasses.replace(proof, multipliers=noisy, shares=shares)


def test_on_graphs_the_bound_never_exceeds_brute_force_and_other_labels_have_a_larger_gap() -> None:
    tried = 0

    @settings(max_examples=60)
    @given(program(5), st.sampled_from([Mesh(x=2), Mesh(x=3, cluster="h100"), Mesh(x=2, y=2)]), st.integers(0, 999))
    def run(drawn: Any, mesh: Mesh, seed: int) -> None:
        nonlocal tried
        space = spaces(drawn, mesh)
        counts = [len(table) for table in space.tables]
        if np.prod(counts, dtype=float) > 4_000:
            return
        tried += 1
        costs = {labels: seconds_of_labels(space, labels) for labels in itertools.product(*map(range, counts))}
        best = min(costs.values())
        assignment, _ = space.solve()
        paid, bound = space.check(assignment, space.proof)
        assert paid == pytest.approx(best, rel=1e-9) and bound <= best * (1 + 1e-9)
        for size in (best / 10, 10 * best):
            assert space.check(assignment, spoiled(space.proof, seed, size))[1] <= best * (1 + 1e-9)
        assert space.check(assignment, Proof([0] * len(counts)))[1] <= best * (1 + 1e-9)
        labels = list(costs)[seed * 7919 % len(costs)]
        assert space.check(space.assignment(list(labels)), space.proof)[0] - bound >= (paid - bound) * (1 - 1e-9)
        if costs[labels] > best * (1 + 1e-6):
            assert space.check(space.assignment(list(labels)), space.proof)[0] > paid

    run()
    assert tried >= 15, "hardly any program was small enough to be enumerated"


def corrupted(plan: Plan, seed: int) -> Plan:
    """The plan with other labels at a fifth of its nodes."""
    space, generator = plan.problem, torch.Generator().manual_seed(seed)
    labels = space.labels(plan.assignment)  # type: ignore[attr-defined]
    for at, table in enumerate(space.tables):  # type: ignore[attr-defined]
        if torch.rand((), generator=generator) < 0.2:
            labels[at] = int(torch.randint(len(table), (), generator=generator))
    return plan.with_layouts(space.assignment(labels))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["unfolded, exact by search", "folded", "bytes"])
def test_every_plan_has_a_proof_that_is_recomputed_and_corruption_shows(name: str) -> None:
    torch.manual_seed(0)
    mesh, options = Mesh(x=2, y=2, cluster="h100"), {"objective": "bytes" if name == "bytes" else "serial"}
    if name == "folded":
        model, args = models.gpt2(layers=6, batch=8, seq=8, vocab=32, width=16, heads=4)
    else:
        model, args = models.mlp()
    plan = sbpc.plan(model, args, mesh, pin={"*up*.weight": "S(0)@x"}, **options)
    checked = plan.check_bound()
    assert checked.paid == pytest.approx(plan.cost.paid, rel=1e-9) and checked.searched == plan.lower_bound
    assert 0.9 * checked.paid <= checked.bound <= checked.paid * (1 + 1e-9)
    assert checked.bound <= checked.searched * (1 + 1e-9) and checked.gap >= plan.cost.gap - 1e-9
    if name == "folded":
        assert checked.bound == pytest.approx(checked.searched, rel=1e-9)
    for seed in range(4):
        assert corrupted(plan, seed).check_bound().gap > checked.gap
        assert plan.check_bound(spoiled(plan.proof, seed, checked.paid / 100)).bound <= checked.paid * (1 + 1e-9)


def test_under_a_memory_limit_multipliers_and_prices_are_a_proof() -> None:
    torch.manual_seed(0)
    model, args = models.gpt2(layers=1, batch=8, seq=16, vocab=64, width=64, heads=4)
    mesh = Mesh(x=4, cluster="h100")
    free = sbpc.plan(model, args, mesh, optimizer="adam", objective="serial")
    plan = sbpc.plan(model, args, mesh, optimizer="adam", memory=0.6 * free.cost.memory["total"], objective="serial")
    checked = plan.check_bound()
    assert plan.cost.memory["total"] <= 0.6 * free.cost.memory["total"]
    assert checked.paid == pytest.approx(plan.cost.seconds, rel=1e-9) and checked.searched == plan.lower_bound
    assert free.check_bound().bound < checked.bound <= checked.searched * (1 + 1e-9) <= checked.paid * (1 + 1e-9)
    for seed in range(4):
        assert plan.check_bound(spoiled(plan.proof, seed, checked.paid / 100)).bound < checked.bound
    _, problem, allowed = plan.prover.priced()
    assert allowed > 0
    assert checked.bound == pytest.approx(checked_bound(problem, plan.proof) - allowed, rel=1e-9)


def test_a_plan_from_a_file_says_that_it_holds_no_problem(tmp_path: Path) -> None:
    plan = sbpc.plan(*models.mlp(), Mesh(x=2), objective="serial")
    plan.save(tmp_path / "plan")
    with pytest.raises(PlanError, match="does not hold the problem that it solves\n  Plan the model anew"):
        sbpc.load(tmp_path / "plan").check_bound()
