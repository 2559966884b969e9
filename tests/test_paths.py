"""Paths: parts of what nodes say add up to no more than one, no sweep lowers a bound, and what is far away is heard."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from sbpc.solver import Problem, Value, Variable, compiled, solve
from sbpc.solver.dual import everywhere, far
from sbpc.solver.paths import HALF, LITTLE, along
from sbpc.solver.trws import Messages, ceiling
from tests.test_compiled import built
from tests.test_fold import chain

TURN = 10.0  # seconds from one layout to another


def ladder(rungs: int) -> Problem:
    """A forward and a backward of layers that are each a little cheaper in the second layout, with ends that are dear in it.

    What a layer makes goes on to the next one, and is read in the backward of its own layer.
    """
    ends = {0: 3.0, 2 * rungs - 1: 3.0}
    costs = [np.array([0.02, ends.get(at, 0.0)]) for at in range(2 * rungs)]
    closure, same = np.array([[0.0, TURN], [TURN, 0.0]]), np.array([0, 1])
    values = [
        Value(at, same, [(at + 1, same)] + [(2 * rungs - 1 - at, same)] * (at < rungs - 1), closure, (0, 1, 2)[: 2 + (at < rungs - 1)])
        for at in range(2 * rungs - 1)
    ]
    return Problem([Variable(f"v{at}", found, np.array([[0], [1]])) for at, found in enumerate(costs)], values)


def swept(problem: Problem, rest: float | None, sweeps: int) -> Messages:
    """Messages after so many sweeps."""
    messages = everywhere(problem, ceiling(problem))
    messages.split(rest)
    for _ in range(sweeps):
        messages.sweep()
    return messages


@pytest.mark.parametrize("rest", [HALF, LITTLE, None])
@pytest.mark.parametrize("shared", [True, False])
def test_a_node_gives_no_more_than_all_of_what_it_says_to_either_side(rest, shared):
    messages = everywhere(chain(6, 4, 5, 3, shared)[0], 100.0)
    messages.split(rest)
    sides = [side for node in messages.nodes.values() for side in (node.earlier, node.later) if side.edges]
    assert all(min(side.parts) > 0 and sum(side.parts) <= 1 + 1e-12 for side in sides)
    if rest is not None:
        assert all(sum(side.parts) == pytest.approx(1.0) for side in sides)
        most = [max(side.parts) for side in sides if any(id(edge) in messages.paths for edge in side.edges)]
        assert most and min(most) >= 1 - rest


def test_no_two_edges_of_paths_begin_or_end_at_one_node():
    messages = everywhere(chain(6, 4, 5, 3, True)[0], 100.0)
    found = [edge for edge in messages.edges if id(edge) in along(messages.edges)]
    for ends in ([edge.first.node for edge in found], [edge.last.node for edge in found]):
        assert len(set(ends)) == len(ends)
    assert len(found) >= len(messages.nodes) - 4  # one way through all the blocks, and through little else


@pytest.mark.parametrize("machine", [pytest.param(True, marks=built), False], ids=["machine code", "Python"])
def test_no_sweep_lowers_a_bound_however_it_is_divided(machine, monkeypatch):
    if not machine:
        monkeypatch.setattr(sys.modules["sbpc.solver.trws"], "machine", None)
    for seed in range(4):
        problem, _, _ = chain(6, 5, 6, seed, True)
        best, messages, before = solve(problem).seconds, everywhere(problem, ceiling(problem)), -np.inf
        for rest in (LITTLE, None, HALF, LITTLE, HALF, None):
            messages.split(rest)
            for _ in range(4):
                messages.forward()
                bound = messages.backward()
                assert before - 1e-9 * abs(before) <= bound <= best * (1 + 1e-9)
                before = bound


def test_what_the_ends_of_a_long_model_want_is_heard_in_its_middle():
    """In equal parts it fades, however often it is said."""
    problem = ladder(100)
    best = solve(problem)
    assert best.exact
    assert swept(problem, LITTLE, 2).bound > 0.99 * best.seconds > 2 * swept(problem, None, 40).bound
    assert far(problem, ceiling(problem)).bound > 0.99 * best.seconds


@built
def test_machine_code_divides_as_it_is_told_at_any_time():
    problem, _, _ = chain(6, 4, 5, 3, True)
    late, early = everywhere(problem, 100.0), everywhere(problem, 100.0)
    late.forward(), late.backward()
    early.split(None)
    early.split(HALF)
    early.forward(), early.backward()
    assert compiled.machine is not None and np.array_equal(late.state, early.state)
    late.split(LITTLE)
    late.forward()
    early.forward()
    assert not np.array_equal(late.state, early.state)
