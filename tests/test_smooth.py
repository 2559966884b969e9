"""Soft minima and steps on a smooth bound: the bound they end at holds and lies next to the best one that messages have."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sbpc.solver import Problem, Value, Variable, certify, solve
from sbpc.solver.arcs import arcs
from sbpc.solver.check import checked_bound
from sbpc.solver.dual import Effort, between_ends, everywhere, passed, prove
from sbpc.solver.exact import build, cheapest, highs, unit_of
from sbpc.solver.fold import fold
from sbpc.solver.least import least, least_of_runs, lesser
from sbpc.solver.near import all_of
from sbpc.solver.network import Space
from sbpc.solver.relax import supported
from sbpc.solver.smooth import AGAIN, mix, mixture, products, put, smooth
from sbpc.solver.trws import Messages, ceiling
from tests.test_fold import chain, solver
from tests.test_solver import brute_force, problems


def soft(found: np.ndarray, heat: float) -> float:
    """The definition."""
    return float(-heat * np.logaddexp.reduce(-found / heat))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-3, 0.1, 10.0]))
def test_soft_minima_are_what_is_said(seed, heat):
    rng = np.random.default_rng(seed)
    found = rng.random((4, 5))
    for axis in (0, 1):
        expected = [soft(row, heat) for row in (found.T if axis == 0 else found)]
        assert np.allclose(least(found, axis, heat), expected, rtol=1e-12)
        assert (least(found, axis, heat) <= found.min(axis) + 1e-15).all()
        assert (least(found, axis, heat) >= found.min(axis) - heat * np.log(5) - 1e-15).all()
        assert (least(found, axis, 0.0) == found.min(axis)).all()
    starts, run = np.array([0, 1, 4]), np.array([0, 1, 1, 1, 2])
    for row in found:
        parts = [row[:1], row[1:4], row[4:]]
        assert np.allclose(least_of_runs(row, starts, run, heat), [least(part, 0, heat) for part in parts], rtol=1e-12)
        assert (least_of_runs(row, starts, run, 0.0) == [part.min() for part in parts]).all()
    both = np.stack([found[0], found[1]])
    assert np.allclose(lesser(found[0], found[1], heat), least(both, 0, heat), rtol=1e-12)
    assert (lesser(found[0], np.full(5, np.inf), heat) == found[0]).all()


@settings(max_examples=60, deadline=None)
@given(problems(variables=8, labels=6, axes=1))
def test_no_smoothed_bound_is_above_brute_force(problem):
    best = brute_force(problem)
    assume(np.isfinite(best))
    messages = passed(problem, ceiling(problem, best))
    before = messages.bound
    smooth(messages, np.inf)
    assert before - 1e-9 * abs(before) - 1e-12 <= messages.bound <= best * (1 + 1e-8) + 1e-12


@pytest.mark.parametrize("seed", [5, 9])
def test_messages_that_rest_too_low_come_to_the_best_bound(seed):
    """That of the program without integers, where consumers that share boxings do not make it the better one."""
    problem, _, _ = chain(8, 12, 8, seed, True)
    messages = everywhere(problem, ceiling(problem))
    messages.split(None)
    for _ in range(60):
        messages.sweep()
    before = messages.bound
    everything = Space([np.arange(len(v.costs)) for v in problem.variables], messages.space.aliases)
    program, _ = build(problem, everything)
    model = highs(program, 0, unit_of(before))
    model.run()
    best = model.getInfo().objective_function_value * unit_of(before) + program.constant
    smooth(messages, np.inf)
    assert before < 0.99 * best and 0.999 * best <= messages.bound <= best * (1 + 1e-9)


def test_a_smoothed_bound_is_that_of_its_multipliers():
    """What the messages say of the bound is what one more sweep from the state that is kept gives."""
    problem, _, _ = chain(6, 5, 5, 1, True)
    messages = passed(problem, ceiling(problem))
    smooth(messages, np.inf)
    said, messages.bound = messages.bound, -np.inf
    messages.sweep()
    assert messages.bound == pytest.approx(said, rel=1e-9)


@pytest.fixture
def heats(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Messages, float]]:
    """The messages that were swept at a heat, and that as a part of what a node costs of the bound, each time."""
    found: list[tuple[Messages, float]] = []

    def watched(messages: Messages, heat: float, sweeps: int, until: float) -> None:
        found.append((messages, heat * len(messages.names)))
        mix(messages, heat, sweeps, until)

    monkeypatch.setattr("sbpc.solver.smooth.mix", watched)
    monkeypatch.setattr("sbpc.solver.smooth.GAINED", np.inf)
    return found


def test_smooth_sweeps_go_on_where_they_ended_at_other_heats(monkeypatch):
    problem, _, _ = chain(8, 12, 8, 5, True)
    heats, begun, ended = [], [], []

    def watched(messages, heat, sweeps, until):
        begun.append(messages.state.copy())
        mix(messages, heat, sweeps, until)
        heats.append(heat)
        ended.append(messages.state.copy())

    monkeypatch.setattr("sbpc.solver.smooth.mix", watched)
    monkeypatch.setattr("sbpc.solver.smooth.GAINED", np.inf)
    messages = passed(problem, ceiling(problem))
    smooth(messages, np.inf)
    first, before = len(heats), messages.bound
    smooth(messages, np.inf)
    assert first == 3 and len(heats) == 3 + len(AGAIN) and messages.bound >= before
    assert heats[3:] == pytest.approx([heats[2] * times for times in AGAIN], rel=0.3)
    assert all(np.array_equal(begin, end) for begin, end in zip(begun[1:], ended)) and not np.array_equal(begun[3], messages.state.copy())


@pytest.mark.parametrize(("gained", "more"), [(1e-4, True), (0.5, False)])
def test_smooth_sweeps_go_on_at_once_where_the_last_heat_gave_much(gained, more, heats, monkeypatch):
    monkeypatch.setattr("sbpc.solver.smooth.GAINED", gained)
    problem, _, _ = chain(8, 12, 8, 5, True)
    smooth(passed(problem, ceiling(problem)), np.inf)
    assert (len(heats) > 3) == more and len(heats) % 2 == 1


def test_ends_go_on_with_the_last_multipliers_of_the_blocks(heats, monkeypatch):
    """Their messages are not begun anew, nor their heats, and what they say is still the bound that is checked."""
    problem, classes, finer = chain(8, 12, 8, 20, True)
    folded, apart, best = fold(problem, classes), fold(problem, finer), solve(problem)
    cap = ceiling(folded.problem, best.seconds)
    plain, _ = between_ends(folded, cap)
    dual, _ = between_ends(folded, cap, Effort(np.inf), plain)
    first, _ = prove(problem, dual, apart, cap, Effort(np.inf))
    begun, before = [], [messages for messages, _ in heats]
    assert len(before) == 6 and before[0] is before[2] is plain.messages.single is not before[3]
    monkeypatch.setattr("sbpc.solver.dual.passed", lambda *args: begun.append(passed(*args)) or begun[-1])
    dual, _ = between_ends(folded, cap, Effort(np.inf), dual)
    second, proof = prove(problem, dual, apart, cap, Effort(np.inf))
    after = [messages for messages, _ in heats[6:]]
    assert len(after) == 2 * len(AGAIN) and after[1] is before[0] and all(messages is not before[3] for messages in after)
    assert not begun and second == checked_bound(problem, proof)
    assert first * 0.999 <= second <= best.seconds * (1 + 1e-9)
    prove(problem, dual, folded, cap, Effort(np.inf))
    assert len(begun) == 1  # these ends are others


def test_ends_of_as_many_classes_are_not_taken_for_each_other():
    problem, classes, _ = chain(6, 5, 5, 0, True)
    middle = [10 + at % 2 for at in range(10)]
    front, back = [0, 1, 2, *middle, 3], [0, *middle, 1, 2, 3]
    best = solve(problem)
    bound, proof = certify(problem, [classes, front, back], best.seconds, 5.0)
    assert checked_bound(problem, proof) == pytest.approx(bound, rel=1e-9) and bound <= best.seconds * (1 + 1e-9)


def test_where_a_gap_is_left_sweeps_are_smooth_at_three_heats_and_for_a_certificate_at_others(heats, monkeypatch):
    """Of the blocks, the largest problem."""
    problem, classes, finer = chain(8, 12, 8, 20, True)
    monkeypatch.setattr(solver, "TIED", ((0.0, 0.0),) * 2)
    monkeypatch.setattr(solver, "FEW", 0)
    runs = (lambda: solve(problem, alike=classes, finer=finer), 0), (lambda: certify(problem, [classes], 1e9, 60.0), 1)
    for run, more in runs:
        heats.clear()
        run()
        blocks = [heat for messages, heat in heats if messages is heats[0][0]]
        assert blocks[:3] == sorted(blocks[:3], reverse=True) and (len(blocks) - 3) % len(AGAIN) == 0
        assert (len(blocks) > 3) == more and blocks[-1] <= blocks[2]


@pytest.mark.filterwarnings("error")
def test_of_what_is_far_too_dear_nothing_is_said():
    """In single precision it overflows, as a multiple of the heat."""
    problem, _, _ = chain(8, 6, 5, 3, True)
    bits = np.arange(6)[:, None] >> np.arange(3) & 1
    variables = [
        Variable(v.name, np.where(np.arange(6) == 5, 1e10, 1e-30 * v.costs), bits) for v in problem.variables
    ]
    values = [replace(value, closure=1e-30 * value.closure) for value in problem.values]
    tiny = Problem(variables, values)
    best = solve(tiny)
    messages = passed(tiny, ceiling(tiny, best.seconds))
    before = messages.bound
    smooth(messages, np.inf)
    assert best.exact and 0 < before <= messages.bound <= best.seconds * (1 + 1e-6)


def test_a_state_that_is_put_back_gives_the_same_sweeps():
    problem, _, _ = chain(5, 4, 4, 3, True)
    messages = passed(problem, ceiling(problem))
    assert messages.stars  # charges are part of the state
    kept, sweeps = messages.state.copy(), messages.sweeps
    first = [messages.sweep() for _ in range(4)]
    mix(messages, 0.1, 20, np.inf)
    put(messages, kept)
    messages.bound, messages.sweeps = -np.inf, sweeps
    assert [messages.sweep() for _ in range(4)] == pytest.approx(first, rel=1e-12)


def test_sweeps_are_mixed_to_their_fixed_point():
    """Of an affine map of few dimensions as many turns as there are dimensions, and two, find the fixed point."""
    rng = np.random.default_rng(0)
    matrix, offset = 0.9 * np.linalg.qr(rng.normal(size=(4, 4)))[0], rng.normal(size=4)
    fixed, at = np.linalg.solve(np.eye(4) - matrix, offset), np.zeros(4)
    steps, ends = [], []
    for _ in range(6):
        ends.append(matrix @ at + offset)
        steps.append(ends[-1] - at)
        turns, moves = np.diff(steps, axis=0), np.diff(ends, axis=0)
        square = np.array([products(turns, turn) for turn in turns])
        at = mixture(square, turns, moves, steps[-1], ends[-1]) if len(ends) > 1 else ends[-1]
    assert np.allclose(at, fixed, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(problems(variables=5, labels=5, axes=1))
def test_charges_are_never_more_than_the_price(problem):
    messages = passed(problem, ceiling(problem))
    assume(messages.edges)
    for _ in range(3):
        mix(messages, 0.1 * abs(messages.bound) / len(messages.nodes) + 1e-6, 20, np.inf)
        for star in messages.stars.values():
            share = star.share
            every = np.zeros((len(share.charges), *share.price.shape))
            for at, (columns, charges) in enumerate(zip(share.columns, share.charges)):
                assert (charges >= 0).all()
                every[at][:, columns] = charges
            wanted = np.stack([np.isin(np.arange(share.price.shape[1]), np.arange(share.price.shape[1])[c]) for c in share.columns])
            paid = every.sum(0) - np.where(wanted.all(0), every.min(0), 0.0)
            assert (paid <= share.price * (1 + 1e-9) + 1e-15).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 9), st.booleans())
def test_arcs_lead_everywhere_for_what_the_closure_says(seed, count, free):
    """Boxings for nothing, circles of them and impossible ones included."""
    rng = np.random.default_rng(seed)
    closure = rng.integers(0 if free else 1, 6, (count, count)).astype(float)
    closure[rng.random((count, count)) < 0.3] = np.inf
    np.fill_diagonal(closure, 0.0)
    for over in range(count):
        closure = np.minimum(closure, closure[:, over, None] + closure[over])
    found = arcs(closure)
    again = np.full((count, count), np.inf)
    np.fill_diagonal(again, 0.0)
    again[found.tails, found.heads] = found.seconds
    for over in range(count):
        again = np.minimum(again, again[:, over, None] + again[over])
    assert (again == closure).all()
    for tail, head in zip(found.tails, found.heads):
        others = [over for over in range(count) if over not in (tail, head)]
        detours = [closure[tail, over] + closure[over, head] for over in others]
        assert closure[tail, head] == 0 or min(detours, default=np.inf) >= closure[tail, head]


def test_arcs_are_far_fewer_than_pairs():
    """Two axes, three layouts each, a boxing of both at once costing what one after the other does."""
    one = np.array([[0.0, 2.0, 3.0], [1.0, 0.0, 2.0], [0.5, 1.5, 0.0]])
    both = (one[:, None, :, None] + 1.1 * one[None, :, None, :]).reshape(9, 9)
    assert len(arcs(both).seconds) == 36  # the pairs that differ on one axis; there are 72


@settings(max_examples=40, deadline=None)
@given(problems(variables=5, labels=5, axes=1))
def test_the_best_plan_of_an_integral_relaxation_is_supported(problem):
    """Its labels are among those that the interior solution takes, where the program without integers has the same best."""
    space, best = all_of(problem), brute_force(problem)
    assume(space is not None and np.isfinite(best))
    taken = supported(problem, space, max(best, 1e-6), 10**6)
    assert taken is not None and all(len(found) for found in taken)
    space.labels = taken
    answer = cheapest(problem, space, max(best, 1e-6))
    assert answer.labels is not None and answer.bound >= best * (1 - 1e-7) - 1e-12


def test_where_there_is_no_plan_nothing_is_supported():
    closure = np.full((4, 4), np.inf)
    np.fill_diagonal(closure, 0.0)
    variables = [Variable(name, np.ones(2), np.arange(2)[:, None]) for name in "ab"]
    problem = Problem(variables, [Value(0, np.array([0, 1]), [(1, np.array([2, 3]))], closure, (0, 0))])
    assert supported(problem, all_of(problem), 1.0, 100) is None
    assert supported(problem, all_of(problem), 1.0, 1) is None


@pytest.mark.parametrize("seed", range(30, 50))
def test_a_bound_that_was_bettered_is_that_of_its_proof(seed):
    """The multipliers of the better one are kept, not a mixture of what was found before and after."""
    rng = np.random.default_rng(seed)
    problem, classes, finer = chain(int(rng.integers(5, 9)), int(rng.integers(2, 7)), int(rng.integers(2, 7)), seed, True)
    folded = fold(problem, classes)
    dual, _ = between_ends(folded, ceiling(folded.problem))
    bound, proof = prove(problem, dual, fold(problem, finer), ceiling(folded.problem), Effort(np.inf))
    assert checked_bound(problem, proof) == bound


@pytest.mark.parametrize("seed", [1, 3])
def test_sweeps_at_a_heat_are_the_same_in_single_precision(seed):
    """Its messages lie in an array of their own, in the order of those in double precision."""
    problem, _, _ = chain(6, 6, 5, seed, True)
    messages = passed(problem, ceiling(problem))
    single, heat = messages.single, 0.1 * messages.bound / len(messages.names)
    assert single is messages.single and single.state.dtype == np.float32 and single.single is single
    single.split(None)
    assert messages.stars and single.charged == messages.charged and not np.shares_memory(single.state, messages.state)
    put(single, messages.state)
    assert np.array_equal(single.state[single.charged :], messages.state[messages.charged :].astype(np.float32))
    for each in (messages, single):
        each.forward(heat)
        each.backward(heat)
    assert np.allclose(single.state, messages.state, rtol=1e-3, atol=1e-5 * messages.bound)


@pytest.mark.parametrize("seed", range(4))
def test_charges_that_come_from_single_precision_are_not_above_the_price(seed):
    problem, _, _ = chain(6, 6, 5, seed, True)
    messages = passed(problem, ceiling(problem))
    smooth(messages, np.inf)
    for star in messages.stars.values():
        charges = np.zeros((len(star.share.charges), *star.share.price.shape))
        for row, columns, found in zip(charges, star.share.columns, star.share.charges):
            row[:, columns] = found
        assert (charges.sum(0) - charges.min(0) <= star.share.price * (1 + 1e-12)).all()
