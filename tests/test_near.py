"""Plans under limits equal brute force, and what limits are worth bounds them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sbpc.solver import Limit, Near, Problem, Value, Variable, charged, checked_bound, sharp, split_by_costs, total
from sbpc.solver import near as near_module
from sbpc.solver.near import bounded_by
from tests.test_fold import chain
from tests.test_solver import problems


def placed(problem: Problem) -> Problem:
    """The problem with a number of its own for every port."""
    numbers = itertools.count()
    for value in problem.values:
        value.places = tuple(itertools.islice(numbers, 1 + len(value.consumers)))
    return problem


def limited(problem: Problem, seed: int) -> tuple[list[Limit], list[tuple[float, tuple[int, ...]]]]:
    """Two limits, and all plans with finite costs that keep them, the cheapest first."""
    rng = np.random.default_rng(seed)
    weights = [{at: rng.random(len(v.costs)) for at, v in enumerate(problem.variables)} for _ in range(2)]
    plans = list(itertools.product(*(range(len(v.costs)) for v in problem.variables)))
    taken = [[sum(float(w[at][label]) for at, label in enumerate(labels)) for w in weights] for labels in plans]
    most = np.quantile(np.array(taken), rng.uniform(0.02, 0.5), axis=0)
    kept = [labels for labels, each in zip(plans, taken) if (np.array(each) <= most).all()]
    found = sorted((total(problem, labels), labels) for labels in kept)
    return [Limit(w, float(m)) for w, m in zip(weights, most)], [pair for pair in found if np.isfinite(pair[0])]


@settings(max_examples=80, deadline=None)
@given(problems(variables=5, labels=5, axes=1), st.integers(0, 999))
def test_the_cheapest_plan_under_limits_equals_brute_force_and_their_worth_bounds_it(problem, seed):
    assume(np.prod([len(v.costs) for v in problem.variables]) <= 1_000)
    limits, plans = limited(placed(problem), seed)
    alike = range(len(problem.variables))
    near = Near(problem, alike)
    assert near.complete
    scale = max(abs(plans[0][0]), 1e-6) if plans else 1e-3
    answer = near.cheapest(limits, scale, 0.0)
    if not plans:
        assert answer.labels is None
        return
    assert answer.labels is not None
    assert total(problem, answer.labels) == pytest.approx(plans[0][0], rel=1e-6, abs=1e-9)
    assert plans[0][0] - 2e-6 * scale <= answer.bound <= plans[0][0] + 1e-9 * scale
    near.add(plans[0][1], [np.zeros(len(v.costs)) for v in problem.variables])
    seconds, prices = near.worth(limits, scale, 100 * scale)
    assert seconds <= plans[0][0] + 1e-6 * scale and min(prices) >= 0
    relaxed = [
        total(problem, labels) + sum(p * (sum(w[at] for w, at in zip(limit.weights.values(), labels)) / limit.most - 1)
                                     for p, limit in zip(prices, limits))
        for labels in itertools.product(*(range(len(v.costs)) for v in problem.variables))
    ]  # fmt: skip
    assert min(relaxed) <= plans[0][0] + 1e-6 * scale
    assert min(relaxed) >= seconds - 1e-6 * scale or max(prices) > 99 * scale


def test_a_limit_is_worth_what_the_last_of_it_saves_or_the_dearest_price_where_nothing_fits():
    digits = np.zeros((2, 1), dtype=np.int64)
    problem = Problem([Variable("v", np.array([0.0, 1.0]), digits)], [])
    near = Near(problem, [0])
    near.add([0], [np.zeros(2)])
    seconds, (price,) = near.worth([Limit({0: np.array([2.0, 0.5])}, 1.0)], 1.0, 100.0)
    assert (seconds, price) == pytest.approx((2 / 3, 2 / 3))
    seconds, (price,) = near.worth([Limit({0: np.array([3.0, 2.0])}, 1.0)], 1.0, 100.0)
    assert (seconds, price) == pytest.approx((101.0, 100.0))


@settings(max_examples=60, deadline=None)
@given(problems(variables=5, labels=5, axes=1), st.integers(0, 999))
def test_what_is_closed_holds_every_plan_that_is_cheap_enough(problem, seed):
    assume(np.prod([len(v.costs) for v in problem.variables]) <= 1_000)
    costs = {p: total(problem, p) for p in itertools.product(*(range(len(v.costs)) for v in problem.variables))}
    finite = sorted(cost for cost in costs.values() if np.isfinite(cost))
    assume(finite)
    most = finite[seed % len(finite)] * (1 + 1e-9) + 1e-15
    space = bounded_by(problem, most)
    assert space is not None
    for labels, cost in costs.items():
        if cost <= most:
            assert all(label in kept for label, kept in zip(labels, space.labels))


def test_no_labels_are_near_but_those_that_were_added(monkeypatch):
    monkeypatch.setattr(near_module, "FEW", 0)
    problem, classes, _ = chain(4, 3, 4, 1, False)
    near = Near(problem, classes)
    assert not near.complete
    first = [0] * len(problem.variables)
    near.add(first)
    everything = Limit({0: np.ones(len(problem.variables[0].costs))}, 1e9)
    assert near.cheapest([everything], 1.0, 0.0).labels == first
    near.add(first, [np.zeros(len(v.costs)) for v in problem.variables])
    answer = near.cheapest([everything], 1.0, 0.0)
    assert total(problem, answer.labels) < total(problem, first)


def test_under_a_limit_some_of_the_equal_blocks_have_another_label_than_the_rest(monkeypatch):
    """Six blocks are fast and large or slow and small, and there is room for three that are large; a change costs 0.1."""
    digits, closure = np.arange(2)[:, None], np.array([[0.0, 0.1], [0.1, 0.0]])
    costs, port = np.array([0.0, 1.0]), np.arange(2)
    problem = Problem(
        [Variable(f"block {at}", costs, digits) for at in range(6)],
        [Value(at, port, [(at + 1, port)], closure, (9, 0)) for at in range(5)],
    )
    room = Limit({at: np.array([2.0, 1.0]) for at in range(6)}, 9.0)

    def found() -> tuple[bool, list[int]]:
        near = Near(problem, [0] * 6)
        for label in (0, 1):
            near.add([label] * 6)
        return near.complete, near.cheapest([room], 1.0, 0.0).labels

    for few, untied, many in ((12_000, 1_200, 20_000), (0, 1_200, 20_000), (0, 0, 20_000), (0, 0, 0)):
        for name, setting in (("FEW", few), ("UNTIED", untied), ("MANY", many)):
            monkeypatch.setattr(near_module, name, setting)
        complete, labels = found()
        assert complete == (few > 0)
        assert total(problem, labels) == pytest.approx(3.1 if many else 6.0)


@settings(max_examples=60, deadline=None)
@given(problems(variables=5, labels=5, axes=1), st.integers(0, 999))
def test_what_all_rows_are_worth_and_sharp_messages_bound_the_plans_under_them(problem, seed):
    assume(np.prod([len(v.costs) for v in problem.variables]) <= 1_000)
    limits, plans = limited(placed(problem), seed)
    assume(plans)
    (least, labels), scale = plans[0], max(abs(plans[0][0]), 1e-6)
    near = Near(problem, range(len(problem.variables)))
    near.add(labels, [np.zeros(len(v.costs)) for v in problem.variables])
    prices = near.dear(limits, scale, labels)
    assert min(prices) >= 0
    paid, allowed = charged(problem, limits, prices), math.fsum(prices)
    for _, each in plans[:20]:
        more = sum(p * sum(w[each[at]] for at, w in limit.weights.items()) / limit.most for p, limit in zip(prices, limits))
        assert total(paid, each) == pytest.approx(total(problem, each) + more, rel=1e-9, abs=1e-12)
    alike = split_by_costs(paid, [0] * len(problem.variables))
    assert all((paid.variables[at].costs is paid.variables[to].costs) == (alike[at] == alike[to]) for at in range(len(alike)) for to in range(at))
    bound, proof = sharp(paid, range(len(alike)), range(len(alike)), total(paid, labels), least + allowed)
    assert bound - allowed <= least + 1e-9 * scale
    assert checked_bound(paid, proof) == pytest.approx(bound, rel=1e-9, abs=1e-12)
