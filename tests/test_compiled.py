"""Sweeps as machine code are those that trws.py, share.py and least.py say: pass by pass, from the same numbers."""

from __future__ import annotations

import copy
import pickle
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbpc.solver import Problem, Value, Variable, compiled, trws
from sbpc.solver.network import Space, aliased, distinct
from sbpc.solver.paths import HALF, LITTLE
from sbpc.solver.trws import Messages, ceiling
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


def stars(rng: np.random.Generator, consumers: int, layouts: int, labels: int, cost: float, holes: float = 0.0) -> Problem:
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


def messages_of(problem: Problem, real: type[np.floating], aliases: int = 1 << 30) -> Messages:
    space = [np.arange(len(v.closure))[-aliases:] if aliased(v) else None for v in problem.values]
    return Messages(problem, Space([np.arange(len(v.costs)) for v in problem.variables], space), ceiling(problem), real)


def numbers(messages: Messages) -> Iterator[np.ndarray]:
    """All that passes read and write."""
    yield from (at.inbox for at in messages.nodes.values())
    for star in messages.stars.values():
        yield from (star.made, *star.over, *star.direct, *star.sent, *star.share.charges)


def twice(one: Messages, other: Messages, act: Callable[[Messages], float | None]) -> tuple[float | None, float | None]:
    """What `act` returns of `one` in Python, and of `other`, set to the same numbers before, in machine code."""
    for found, to in zip(numbers(one), numbers(other), strict=True):
        to[...] = found
    other.sweeps = one.sweeps
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        said = act(other)
        patch.setattr(trws, "machine", None)
        return act(one), said


def assert_passes_are_the_same(problem: Problem, real: type[np.floating], heat: float, aliases: int = 1 << 30) -> None:
    one, other = (messages_of(problem, real, aliases) for _ in range(2))
    precise = PRECISE * float(np.finfo(real).eps)
    dearest = max(float(v.costs.max()) for v in problem.variables)
    cold = [lambda m: m.forward(), lambda m: m.backward()]
    hot = [lambda m: m.forward(heat), lambda m: m.backward(heat)]
    refill = [lambda m: m.hear(), lambda m: m.backward(heat / 3), lambda m: m.hear(fill=True)]
    little, alike, half = (lambda m, rest=rest: m.split(rest) for rest in (LITTLE, None, HALF))
    for act in (*cold * 3, little, *cold * 3, alike, *cold, *hot, *refill, *hot, half, *cold):
        wanted, said = twice(one, other, act)
        most = max([dearest, heat, *(float(np.abs(part[np.isfinite(part)]).max(initial=0)) for part in numbers(one))])
        if wanted is not None:
            assert said == pytest.approx(wanted, rel=precise, abs=precise * most * len(one.names))
        for found, expected in zip(numbers(other), numbers(one), strict=True):
            assert np.allclose(found, expected, rtol=0, atol=precise * most, equal_nan=True)


SHAPES = {
    "few": (5, 4, 4, 1.0, 0.0), "closed ways": (6, 5, 4, 1e-3, 0.6), "one layout": (5, 1, 3, 1.0, 0.0),
    "one label": (5, 4, 1, 1.0, 0.0), "two layouts": (5, 2, 2, 1e-3, 0.0), "large": (5, 70, 90, 1e-2, 0.0),
    "many consumers": (150, 2, 3, 1e-3, 0.0),
}  # fmt: skip


@built
def test_sweeps_are_built_where_they_can_be():
    assert compiled.machine is not None, "make the environment again: the sweeps were not built, or of other sources"


@built
@pytest.mark.parametrize("real", [np.float64, np.float32])
@pytest.mark.parametrize("heat", [1e-2, 1.0, 100.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_passes_are_the_same_as_machine_code(shape, heat, real):
    for seed in range(3):
        problem = stars(np.random.default_rng(seed), *SHAPES[shape])
        assert_passes_are_the_same(problem, real, heat * SHAPES[shape][3])


@built
@pytest.mark.parametrize("aliases", [1, 2])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_stars_of_few_alias_layouts_are_the_same_as_machine_code(aliases, seed):
    assert_passes_are_the_same(stars(np.random.default_rng(seed), 6, 5, 4, 1.0), np.float64, 0.1, aliases)


@built
def test_charges_of_next_to_nothing_are_none():
    one, other = (messages_of(stars(np.random.default_rng(1), 6, 5, 4, 1.0), np.float64) for _ in range(2))
    for star in one.stars.values():
        for charges in star.share.charges:
            charges[:] = 1e-40
    twice(one, other, lambda messages: messages.hear(fill=True))
    for messages in (one, other):
        assert all((charges <= 1e-40).all() for star in messages.stars.values() for charges in star.share.charges)


@built
def test_what_is_not_a_number_is_not_passed_over():
    one, other = (messages_of(stars(np.random.default_rng(1), 6, 5, 4, 1.0), np.float64) for _ in range(2))
    [at.inbox for at in one.nodes.values() if at.earlier.edges and len(at.inbox)][-1][:] = np.nan
    assert np.isnan(twice(one, other, lambda messages: messages.backward())).all()


@built
def test_tables_are_of_the_arrays_that_messages_have():
    problem, _, _ = chain(4, 6, 5, 1, True)
    messages = messages_of(problem, np.float64)
    messages.sweep()
    before, again = [part.copy() for part in numbers(messages)], messages.restrict(messages.space)
    again.sweep()
    assert all(np.array_equal(one, other) for one, other in zip(before, numbers(messages), strict=True))
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
    for one, other in zip(distinct(np.array(layouts, np.intp)), np.unique(np.array(layouts, np.intp), return_inverse=True)):
        assert (one == other).all()
