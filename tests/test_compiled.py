"""Sweeps as machine code are those that trws.py, share.py and least.py say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbpc.solver import compiled, trws
from sbpc.solver.network import Space, aliased, distinct
from sbpc.solver.problem import Problem, Value
from sbpc.solver.smooth import put, state
from sbpc.solver.trws import Messages, ceiling
from tests.test_fold import chain
from tests.test_solver import problems

built = pytest.mark.skipif(compiled.machine is None, reason="the sweeps were not built: there was no C compiler")


def messages_of(problem: Problem, real: type[np.floating]) -> Messages:
    aliases = [np.arange(len(v.closure)) if aliased(v) else None for v in problem.values]
    space = Space([np.arange(len(v.costs)) for v in problem.variables], aliases)
    return Messages(problem, space, ceiling(problem), real)


def swept(problem: Problem, real: type[np.floating], heats: list[float]) -> list[tuple[float, np.ndarray]]:
    """The bound, if any, and all messages after each sweep."""
    messages, found = messages_of(problem, real), []
    for heat in heats if messages.edges else ():
        messages.forward(heat)
        bound = messages.backward(heat)
        inboxes = [at.inbox for at in messages.nodes.values()]
        heard = [part.ravel() for star in messages.stars.values() for part in (star.made, *star.over, *star.direct)]
        everything = np.concatenate([state(messages), *inboxes, *heard])
        found.append((bound, np.where(np.isfinite(everything), everything, -1.0)))
    if messages.edges:
        put(messages, state(messages), fill=True)
        found.append((0.0, state(messages)))
    return found


def same(problem: Problem, real: type[np.floating], heats: list[float], precise: float) -> None:
    """Both say the same, but for rounding; what costs as much as an impossible boxing is rounded the most."""
    with pytest.MonkeyPatch.context() as patch, np.errstate(over="ignore", invalid="ignore"):
        one = swept(problem, real, heats)
        patch.setattr(trws, "machine", None)
        other = swept(problem, real, heats)
    most = ceiling(problem)
    for (bound, found), (said, wanted) in zip(one, other, strict=True):
        assert bound == pytest.approx(said, rel=precise, abs=precise * most)
        assert np.allclose(found, wanted, rtol=precise, atol=precise * most)


@built
@settings(max_examples=100, deadline=None)
@given(problems(variables=7, labels=6, axes=1), st.sampled_from([(np.float64, 1e-12), (np.float32, 1e-5)]))
def test_sweeps_are_the_same_as_machine_code(problem, precision):
    same(problem, precision[0], [0.0] * 7, precision[1])  # twice the sweeps from one balance to the next


@built
@settings(max_examples=100, deadline=None)
@given(problems(variables=7, labels=6, axes=1), st.sampled_from([0.3, 0.03]))
def test_sweeps_at_a_heat_are_the_same_as_machine_code(problem, heat):
    same(problem, np.float64, [0.0, 0.0, heat, heat, heat, 0.0], 1e-9)


@built
@pytest.mark.parametrize("real", [np.float64, np.float32])
def test_many_layouts_and_consumers_are_the_same_as_machine_code(real):
    """More than fit into one step over a row, and stars whose consumers come before and after them."""
    problem, _, _ = chain(4, 40, 35, 2, True)
    values = list(problem.values)
    values.append(Value(3, values[0].out, [(at, values[0].out) for at in (0, 1, 2, *range(4, len(problem.variables)))], values[0].closure))
    same(Problem(problem.variables, values), real, [0.0, 0.0, 0.0, 0.1, 0.1], 1e-9 if real is np.float64 else 2e-4)


@built
def test_tables_are_of_the_arrays_that_messages_have():
    problem, _, _ = chain(4, 6, 5, 1, True)
    messages = messages_of(problem, np.float64)
    messages.sweep()
    before, again = state(messages), messages.restrict(messages.space)
    again.sweep()
    assert (state(messages) == before).all() and (state(again) != before).any()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=0, max_size=30))
def test_distinct_layouts_are_those_of_numpy(layouts):
    for one, other in zip(distinct(np.array(layouts, np.intp)), np.unique(np.array(layouts, np.intp), return_inverse=True)):
        assert (one == other).all()
