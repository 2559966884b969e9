"""The solver equals brute force, its bounds hold, and it is the same in every run."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbpc.solver.problem import Problem, Value, Variable, star, total
from sbpc.solver.solve import solve

INF = float("inf")


def brute_force(problem: Problem) -> float:
    """The least objective over all labels: for each, every alias of every value is tried in plain Python."""
    costs = [v.costs.tolist() for v in problem.variables]
    tables = []
    for value in problem.values:
        closure, memo = value.closure.tolist(), {}

        def price(source, wanted, closure=closure, memo=memo):
            key = (source, wanted)
            if key not in memo:
                memo[key] = min(
                    closure[source][alias] + sum(closure[alias][to] for to in wanted if to != alias)
                    for alias in range(len(closure))
                )
            return memo[key]

        tables.append((value.producer, value.out.tolist(), [(at, w.tolist()) for at, w in value.consumers], price))
    best = INF
    for labels in itertools.product(*(range(len(c)) for c in costs)):
        seconds = sum(c[label] for c, label in zip(costs, labels))
        for producer, out, consumers, price in tables:
            if seconds >= best:
                break
            seconds += price(out[labels[producer]], frozenset(w[labels[at]] for at, w in consumers))
        best = min(best, seconds)
    return best


def closed(seconds: np.ndarray) -> np.ndarray:
    """The cheapest way over any number of steps (Floyd, Warshall)."""
    seconds = seconds.copy()
    np.fill_diagonal(seconds, 0)
    for middle in range(len(seconds)):
        seconds = np.minimum(seconds, seconds[:, middle, None] + seconds[None, middle])
    return seconds


@st.composite
def problems(draw, variables: int, labels: int, axes: int) -> Problem:
    """Random problems; every draw decides on ties, impossible boxings, double consumers and values per variable."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ties, holes = draw(st.booleans()), draw(st.sampled_from([0.0, 0.0, 0.2, 0.6, 0.95]))
    fan, layouts = draw(st.integers(1, 4)), draw(st.integers(1, 7))

    def numbers(*shape: int) -> np.ndarray:
        return rng.integers(0, 4, shape) * 1e-3 if ties else rng.random(shape) * 3e-3

    side = max(1, round(labels ** (1 / axes)))
    count = draw(st.integers(1, variables))
    nodes = []
    for number in range(count):
        digits = np.array(list(itertools.product(range(int(rng.integers(1, side + 1))), repeat=axes)))
        nodes.append(Variable(f"v{number}", numbers(len(digits)), digits))
    values = []
    for producer in range(count):
        for _ in range(int(rng.integers(0, 3))):
            seconds = numbers(layouts, layouts)
            seconds[rng.random(seconds.shape) < holes] = INF
            later = range(producer + 1, count)
            takers = rng.choice(later, int(rng.integers(0, fan + 1))).tolist() if later else []
            if rng.random() < 0.2:  # a gradient lands in the home of a parameter, which came first
                takers.append(int(rng.integers(0, count)))
            consumers = [(at, rng.integers(0, layouts, len(nodes[at].costs))) for at in takers]
            if consumers and rng.random() < 0.3:  # the same variable takes it twice, in the same or in another way
                at, wants = consumers[0]
                consumers.append((at, wants if rng.random() < 0.5 else rng.permutation(wants)))
            out = rng.integers(0, layouts, len(nodes[producer].costs))
            values.append(Value(producer, out, consumers, closed(seconds)))
    return Problem(nodes, values)


def compare(problem: Problem) -> None:
    best, found = brute_force(problem), solve(problem)
    assert found.seconds == pytest.approx(total(problem, found.labels), rel=1e-12)
    assert found.seconds == pytest.approx(best, rel=1e-9, abs=1e-12)
    assert found.exact and found.lower_bound == found.seconds


@settings(max_examples=150, deadline=None)
@given(problems(variables=6, labels=8, axes=1))
def test_one_axis_equals_brute_force(problem):
    compare(problem)


@settings(max_examples=40, deadline=None)
@given(problems(variables=4, labels=64, axes=2))
def test_two_axes_equal_brute_force(problem):
    compare(problem)
