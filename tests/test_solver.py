"""The solver equals brute force, its bounds hold, and it is the same in every run."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sbpc.solver import Problem, Solution, Value, Variable, solve, star, total
from sbpc.solver.highs import cheapest, solve_lp
from sbpc.solver.messages.trws import Messages, big_m
from sbpc.solver.problem import star_seconds
from sbpc.solver.program import build
from sbpc.solver.subsets import everything
from sbpc.solver.surroundings import Surroundings

INF = float("inf")


def brute_force(problem: Problem, fixed: dict[int, int] | None = None) -> float:
    """The least objective over all labels (some may be fixed): every alias of every value is tried in plain Python."""
    costs = [v.costs.tolist() for v in problem.variables]
    free = [[fixed[at]] if fixed and at in fixed else range(len(c)) for at, c in enumerate(costs)]
    tables = []
    for value in problem.values:
        closure, memo = value.closure.tolist(), {}

        def price(source, wanted, closure=closure, memo=memo):
            key = (source, wanted)
            if key not in memo:
                memo[key] = min(
                    closure[source][alias] + sum(closure[alias][to] for to in wanted if to not in (alias, source))
                    for alias in range(len(closure))
                )
            return memo[key]

        tables.append((value.producer, value.out.tolist(), [(at, w.tolist()) for at, w in value.consumers], price))
    complete = [max([producer, *(at for at, _ in consumers)]) for producer, _, consumers, _ in tables]
    best = INF

    def search(labels: tuple[int, ...], seconds: float) -> None:
        """All labels that begin like `labels`, whose values cost `seconds` already (no cost is negative)."""
        nonlocal best
        at = len(labels)
        if seconds >= best or at == len(costs):
            best = min(best, seconds)
            return
        for label in free[at]:
            longer, more = (*labels, label), seconds + costs[at][label]
            for (producer, out, consumers, price), last in zip(tables, complete):
                if last == at and more < best:
                    more += price(out[longer[producer]], frozenset(w[longer[to]] for to, w in consumers))
            search(longer, more)

    search((), 0.0)
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
    assert found.seconds == pytest.approx(best, rel=1e-8, abs=1e-12)
    assert found.exact and found.lower_bound == found.seconds


@settings(max_examples=300, deadline=None)
@given(problems(variables=6, labels=8, axes=1))
def test_one_axis_equals_brute_force(problem):
    compare(problem)


@settings(max_examples=120, deadline=None)
@given(problems(variables=4, labels=64, axes=2))
def test_two_axes_equal_brute_force(problem):
    compare(problem)


@settings(max_examples=120, deadline=None)
@given(problems(variables=5, labels=9, axes=2))
def test_where_nothing_is_solved_exactly_the_bound_lies_below_and_the_plan_above_brute_force(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbpc.solver.search.COLUMNS", -1)
        found = solve(problem)
    best = brute_force(problem)
    assert found.lower_bound <= best * (1 + 1e-8) and best <= found.seconds * (1 + 1e-8)
    assert found.lower_bound == found.seconds or not found.exact
    alone = solve(problem, bounded=False)
    assert alone.lower_bound == 0 <= best <= alone.seconds * (1 + 1e-8)


@settings(max_examples=120, deadline=None)
@given(problems(variables=4, labels=6, axes=1), st.integers(1, 8))
def test_messages_bound_every_label_from_below(problem, sweeps):
    """Also while the cost shares of boxings change from sweep to sweep."""
    messages = Messages(problem, big_m(problem))
    for _ in range(sweeps):
        messages.sweep()
    assert messages.bound <= brute_force(problem) * (1 + 1e-9) + 1e-15
    for (kind, at), bounds in zip(messages.names, messages.label_bounds()):
        for label, bound in enumerate(bounds):
            if kind == 0:
                assert bound <= brute_force(problem, {at: label}) * (1 + 1e-9) + 1e-15


@settings(max_examples=200, deadline=None)
@given(problems(variables=14, labels=8, axes=1), st.integers(0, 2**32 - 1))
def test_no_sweep_lowers_the_bound_whatever_parts_of_beliefs_go_along_paths(problem, seed):
    """The bounds of single labels rest on it."""
    rng, messages = np.random.default_rng(seed), Messages(problem, big_m(problem))
    for _ in range(16):
        messages.follow_paths(bool(rng.integers(2)))
        messages.sweeps += 1
        messages.send(False)
        bound = messages.send(True, messages.balance_from)
        assert bound >= messages.bound - 1e-9 * abs(bound) - 1e-15
        messages.bound = bound


def test_the_relaxed_program_of_a_shared_boxing_costs_what_its_best_plan_does():
    """Without this a program of a thousand labels is not solved at its root, and may take a minute."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        layouts, consumers = int(rng.integers(4, 8)), int(rng.integers(3, 5))
        nodes = [
            Variable(f"v{at}", rng.random(6) * 1e-3, np.zeros((6, 1), dtype=np.int64)) for at in range(consumers + 1)
        ]
        takers = [(at, rng.integers(0, layouts, 6)) for at in range(1, consumers + 1)]
        closure = closed(rng.random((layouts, layouts)) * 2e-3)
        problem = Problem(nodes, [Value(0, rng.integers(0, layouts, 6), takers, closure)])
        seconds = solve_lp(build(problem, everything(problem)), 1e-3)[1]
        assert seconds == pytest.approx(brute_force(problem), rel=1e-6)


def two_ways(closure: list[list[float]], wants: list[int]) -> Value:
    """A value made in layout 0, with consumers that want these layouts."""
    consumers = [(at + 1, np.array([want])) for at, want in enumerate(wants)]
    return Value(0, np.array([0]), consumers, closed(np.array(closure)))


def test_an_alias_is_boxed_once_and_equal_wants_are_paid_once():
    value = two_ways([[0, 4, INF], [0, 0, 1], [0, 0, 0]], [1, 2, 2])
    assert star(value, [0] * 4) == (1, (2,))  # 4 to layout 1, from there 1 to layout 2, for both
    assert star_seconds(value, [0] * 4) == 5


def test_among_equal_aliases_the_layout_that_was_made_comes_first_then_the_lowest():
    assert star(two_ways([[0, 1, 2], [9, 0, 9], [9, 9, 0]], [1, 2]), [0] * 3) == (0, (1, 2))
    assert star(two_ways([[0, 1, 1], [9, 0, 0], [9, 0, 0]], [1, 2]), [0] * 3) == (1, (2,))
    assert star(two_ways([[0]], []), [0]) == (0, ())


def test_where_no_boxing_is_possible_the_seconds_are_infinite():
    variables = [Variable(name, np.zeros(1), np.zeros((1, 1), dtype=int)) for name in ("a", "b")]
    found = solve(Problem(variables, [two_ways([[0, INF], [0, 0]], [1])]))
    assert (found.labels, found.seconds, found.lower_bound, found.exact, found.gap) == ([0, 0], INF, INF, True, 0)


def chain(length: int, labels: int, seed: int) -> Problem:
    """Variables in a row, each value also wanted two further on, with a closure that all values share."""
    rng = np.random.default_rng(seed)
    digits = np.array(list(itertools.product(range(labels), repeat=2)))
    closure = closed(rng.random((len(digits),) * 2))
    variables = [Variable(f"v{at}", rng.random(len(digits)), digits) for at in range(length)]

    def port() -> np.ndarray:
        return rng.permutation(len(digits))

    takers = [[to for to in (at + 1, at + 2) if to < length] for at in range(length)]
    return Problem(variables, [Value(at, port(), [(to, port()) for to in takers[at]], closure) for at in range(length)])


def labels_of(found: Solution) -> tuple[list[int], float, float]:
    return found.labels, found.seconds, found.lower_bound


def test_every_run_gives_the_same_labels():
    code = "from tests.test_solver import *; print(labels_of(solve(chain(10, 3, 1))))"
    environment = os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    once, again = (f"{labels_of(solve(chain(10, 3, 1)))}\n" for _ in range(2))
    assert run.stdout == once == again


def by_programming(problem: Problem) -> float:
    """The least objective of a chain by dynamic programming over the labels of two neighbours."""
    variables, values = problem.variables, problem.values
    best = variables[0].costs[:, None] + variables[1].costs
    for at in range(len(values) - 2):
        value, ((_, near), (_, far)) = values[at], values[at].consumers
        hops = value.closure[:, near][:, :, None] + value.closure[:, far][:, None]
        hops -= np.where(near[:, None] == far, value.closure[:, near][:, :, None], 0)
        stars = (value.closure[value.out][:, :, None, None] + hops).min(1)
        best = (best[:, :, None] + stars).min(0) + variables[at + 2].costs
    value, ((_, near),) = values[-2], values[-2].consumers
    return (best + value.closure[np.ix_(value.out, near)]).min()


def test_the_bound_of_a_longer_chain_lies_below_its_optimum_and_the_plan_at_most_a_percent_above():
    problem = chain(40, 4, 2)
    found, best = solve(problem), by_programming(problem)
    assert found.lower_bound * (1 - 1e-9) <= best <= found.seconds * (1 + 1e-9) <= 1.01 * best


@settings(max_examples=200, deadline=None)
@given(problems(variables=6, labels=8, axes=1), st.integers(0, 2**32 - 1))
def test_what_a_label_costs_around_a_plan_is_what_the_plan_with_it_costs_more(problem, seed):
    rng, near = np.random.default_rng(seed), Surroundings(problem)
    labels = [int(rng.integers(len(v.costs))) for v in problem.variables]
    assume(np.isfinite(total(problem, labels)))
    for at, variable in enumerate(problem.variables):
        costs = near.costs(at, labels)
        with_it = [total(problem, [*labels[:at], each, *labels[at + 1 :]]) for each in range(len(variable.costs))]
        assert costs - costs[labels[at]] == pytest.approx(np.array(with_it) - with_it[labels[at]], abs=1e-12)


def boxings(problem: Problem, labels: list[int]) -> int:
    """How many boxings the cheapest stars take."""
    found = [(value, star(value, labels)) for value in problem.values]
    return sum(len(to) + (alias != value.out[labels[value.producer]]) for value, (alias, to) in found)


def test_of_plans_that_cost_the_same_one_with_fewer_boxings_is_taken_then_earlier_labels():
    """From 0 to 1 and on to 2 costs what the straight way does; the last label is like the one before it."""
    straight = closed(np.array([[0.0, 1, 2, 2], [9, 0, 1, 1], [9, 9, 0, 9], [9, 9, 9, 0]]))
    digits = np.zeros((4, 1), dtype=int)
    first, last = (Variable(name, np.zeros(1), np.zeros((1, 1), dtype=int)) for name in ("first", "last"))
    middle = Variable("middle", np.array([0.0, 0, 0, 0]), digits)
    layouts = np.array([1, 2, 2, 3])
    values = [Value(0, np.array([0]), [(1, layouts)], straight), Value(1, layouts, [(2, np.array([2]))], straight)]
    problem = Problem([first, middle, last], values)
    near = Surroundings(problem)
    assert near.tidy([0, 0, 0], 2.0) == near.tidy([0, 2, 0], 2.0) == [0, 1, 0]
    assert solve(problem).labels == [0, 1, 0] and boxings(problem, [0, 0, 0]) == 2 == 1 + boxings(problem, [0, 1, 0])


@settings(max_examples=60, deadline=None)
@given(problems(variables=6, labels=8, axes=1), st.integers(0, 2**32 - 1))
def test_a_tidied_plan_costs_no_more(problem, seed):
    rng = np.random.default_rng(seed)
    near = Surroundings(problem)
    labels = [int(rng.integers(len(v.costs))) for v in problem.variables]
    seconds = total(problem, labels)
    assume(0 < seconds < np.inf)
    assert total(problem, near.tidy(labels, seconds)) <= seconds * (1 + 1e-10)


@settings(max_examples=150, deadline=None)
@given(problems(variables=6, labels=8, axes=1), st.sampled_from([0.0, 0.02, 0.2]))
def test_a_program_gives_labels_within_the_gap_that_is_asked_for(problem, gap):
    best = brute_force(problem)
    answer = cheapest(problem, everything(problem), best if np.isfinite(best) else 1.0, gap)
    if answer.labels is None:
        assert np.isinf(best)
        return
    found = total(problem, answer.labels)
    assert answer.bound <= best * (1 + 1e-6) + 1e-12 and found <= answer.bound * (1 + gap + 1e-6) + 1e-12
    assert not answer.proved or found == pytest.approx(best, rel=1e-6, abs=1e-12)


def test_labels_of_a_relaxation_that_is_a_mixture_are_near_enough_or_searched_for():
    """Three variables, of which any two want different ones of two layouts: half of each, the relaxation says."""
    variables = [Variable(f"v{at}", np.array([10.0, 10.0]), np.arange(2)[:, None]) for at in range(3)]
    pairs = [(0, 1), (0, 2), (1, 2)]
    values = [Value(one, np.array([0, 1]), [(other, np.array([1, 0]))], 1 - np.eye(2)) for one, other in pairs]
    problem = Problem(variables, values)
    rough, right = (cheapest(problem, everything(problem), 31.0, gap) for gap in (0.2, 0.0))
    assert rough.labels is not None and not rough.proved and rough.bound == pytest.approx(30.0)
    assert right.labels is not None and right.proved and total(problem, right.labels) == brute_force(problem) == 31.0


def test_a_search_among_labels_that_are_all_as_near_comes_to_an_end(monkeypatch):
    monkeypatch.setattr("sbpc.solver.search.COLUMNS", 1_000)
    rng, labels = np.random.default_rng(0), 25
    variables = [Variable(f"v{at}", np.full(labels, 10.0), np.arange(labels)[:, None]) for at in range(4)]
    values = [
        Value(
            a, rng.permutation(labels), [(b, rng.permutation(labels)), (c, rng.permutation(labels))], 1 - np.eye(labels)
        )
        for a, b, c in itertools.combinations(range(4), 3)
    ]
    problem = Problem(variables, values)
    found = solve(problem)
    assert found.lower_bound <= found.seconds == total(problem, found.labels) <= 44 and found.lower_bound >= 40 * (
        1 - 1e-9
    )
