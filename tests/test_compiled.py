"""Sweeps as machine code are those that trws.py and stars.py say: pass by pass, from the same numbers."""

from __future__ import annotations

import copy
import pickle
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbpc.solver import Problem, Value, Variable
from sbpc.solver.messages import compiled, trws
from sbpc.solver.messages.trws import Messages, big_m
from sbpc.solver.subsets import distinct
from tests.test_fold import chain
from tests.test_solver import closed

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
BUILDABLE = HEADERS.exists() and shutil.which(COMPILER) is not None
built = pytest.mark.skipif(
    compiled.machine is None and not BUILDABLE,
    reason="the sweeps cannot be built here: there is no C compiler, or there are no headers of Python",
)
PRECISE = 64  # units in the last place of the largest number


def stars(
    rng: np.random.Generator, consumers: int, layouts: int, labels: int, cost: float, holes: float = 0.0
) -> Problem:
    """Five variables or more, of which the third and the fourth make a value that all take, the maker too; others take parts."""
    count = max(consumers, 5)
    variables = [
        Variable(f"v{at}", cost * rng.random(size), np.zeros((size, 1), np.int64))
        for at, size in enumerate(rng.integers(1, labels + 1, count).tolist())
    ]

    def value(producer: int, taken: list[int], most: int) -> Value:
        prices = cost * rng.random((layouts, layouts))
        prices[rng.random(prices.shape) < holes] = np.inf
        wants = [(at, rng.integers(0, most if at % 4 else layouts, len(variables[at].costs))) for at in taken]
        return Value(producer, rng.integers(0, layouts, len(variables[producer].costs)), wants, closed(prices))

    values = [value(2, list(range(count)), layouts), value(3, list(range(count)), 1)]
    values += [value(at, rng.integers(0, count, 2).tolist(), layouts) for at in (0, 1, 4)]
    return Problem(variables, values)


def numbers(messages: Messages) -> Iterator[np.ndarray]:
    """All that sweeps read and write."""
    yield from (at.inbox for at in messages.nodes)
    for star in messages.stars.values():
        yield from (star.made, *star.over, *star.direct, *star.sent, *star.shares)


def twice(one: Messages, other: Messages) -> tuple[float, float]:
    """The bound after a sweep of `one` in Python, and of `other`, set to the same numbers before, in machine code."""
    for found, to in zip(numbers(one), numbers(other), strict=True):
        to[...] = found
    other.sweeps, one.bound, other.bound = one.sweeps, -np.inf, -np.inf
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        fast = other.sweep()
        patch.setattr(trws, "machine", None)
        return one.sweep(), fast


def assert_sweeps_are_the_same(problem: Problem, real: type[np.floating]) -> None:
    one, other = (Messages(problem, big_m(problem), real) for _ in range(2))
    precise = PRECISE * float(np.finfo(real).eps)
    dearest = max(float(v.costs.max()) for v in problem.variables)
    for turn in range(14):
        for messages in (one, other):
            messages.follow_paths(turn // 4 % 2 == 0)
        wanted, fast = twice(one, other)
        most = max([dearest, *(float(np.abs(part[np.isfinite(part)]).max(initial=0)) for part in numbers(one))])
        assert fast == pytest.approx(wanted, rel=precise, abs=precise * most * len(one.names))
        for found, expected in zip(numbers(other), numbers(one), strict=True):
            assert np.allclose(found, expected, rtol=0, atol=precise * most, equal_nan=True)


SHAPES = {
    "few": (5, 4, 4, 1.0, 0.0), "closed ways": (6, 5, 4, 1e-3, 0.6), "one layout": (5, 1, 3, 1.0, 0.0),
    "one label": (5, 4, 1, 1.0, 0.0), "two layouts": (5, 2, 2, 1e-3, 0.0), "large": (5, 70, 90, 1e-2, 0.0),
    "many consumers": (80, 2, 3, 1e-3, 0.0),
}  # fmt: skip


@built
def test_sweeps_are_built_where_they_can_be():
    assert compiled.machine is not None, "make the environment again: the sweeps were not built, or of other sources"


@built
def test_sweeps_are_the_same_as_machine_code():
    for shape in SHAPES:
        for real in [np.float64, np.float32]:
            for seed in range(1 if shape in ("large", "many consumers") else 3):
                assert_sweeps_are_the_same(stars(np.random.default_rng(seed), *SHAPES[shape]), real)


@built
def test_what_is_not_a_number_is_not_passed_over():
    problem = stars(np.random.default_rng(1), 6, 5, 4, 1.0)
    one, other = (Messages(problem, big_m(problem)) for _ in range(2))
    for messages in (one, other):
        [at.inbox for at in messages.nodes if at.earlier and len(at.inbox)][-1][:] = np.nan
    assert np.isnan(other.tables.run(True)) and np.isnan(one.send(True))


@built
def test_tables_are_of_the_arrays_that_messages_have():
    problem, _, _ = chain(4, 6, 5, 1, True)
    messages = Messages(problem, big_m(problem))
    messages.sweep()
    for made in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="addresses"):
            made(messages)


def test_code_of_other_tables_is_not_run(monkeypatch):
    other = ModuleType("other")
    other.rows = (8, 8, 8, 8)
    monkeypatch.setattr(compiled.importlib, "import_module", lambda name: other)
    assert compiled.built() is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=0, max_size=30))
def test_distinct_layouts_are_those_of_numpy(layouts):
    for one, other in zip(
        distinct(np.array(layouts, np.intp)), np.unique(np.array(layouts, np.intp), return_inverse=True)
    ):
        assert (one == other).all()
