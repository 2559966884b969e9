"""Nodes that need no messages: where all but one are left out, bounds, plans and multipliers are exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sbpc.solver import Problem, Value, Variable
from sbpc.solver import chains as chains_module
from sbpc.solver.chains import shrink
from sbpc.solver.check import checked_bound
from sbpc.solver.network import Space
from sbpc.solver.problem import total
from sbpc.solver.search import whole
from sbpc.solver.solve import untied_proof
from sbpc.solver.trws import Messages, ceiling
from tests.test_solver import brute_force, closed, problems


def joined_by(pairs: list[tuple[int, int]], seed: int, labels: int, impossible: float) -> Problem:
    """Variables of random labels, and a value of one consumer per pair, made by either; impossible: part of the boxings."""
    rng = np.random.default_rng(seed)
    count = 1 + max(max(pair) for pair in pairs)
    sizes = rng.integers(1, labels + 1, count)
    costs = [rng.integers(0, 9, size).astype(float) for size in sizes]
    variables = [Variable(f"v{at}", each, np.zeros((len(each), 1), dtype=int)) for at, each in enumerate(costs)]
    values = []
    for pair in pairs:
        producer, consumer = rng.permutation(pair).tolist()
        layouts = int(rng.integers(2, 5))
        seconds = rng.integers(1, 9, (layouts, layouts)).astype(float)
        closure = closed(np.where(rng.random(seconds.shape) < impossible, np.inf, seconds))
        out, wants = (rng.integers(0, layouts, sizes[at]) for at in (producer, consumer))
        values.append((producer, out, consumer, wants, closure))
    values.sort(key=lambda found: found[0])
    places = iter(range(2 * len(values)))  # of a variable no number twice
    return Problem(
        variables,
        [Value(p, out, [(c, wants)], closure, (next(places), next(places))) for p, out, c, wants, closure in values],
    )


def alike(pairs: list[tuple[int, int]], seed: int) -> Problem:
    """All variables cost the same and all boxings as well, as in equal blocks, but their labels have other layouts. No label is
    worse than another one boxed, which would be left out."""
    rng = np.random.default_rng(seed)
    costs, closure = rng.integers(0, 2, 3).astype(float), closed(rng.integers(3, 9, (3, 3)).astype(float))
    values = [
        Value(p, rng.permutation(3), [(c, rng.permutation(3))], closure, (2 * at, 2 * at + 1))
        for at, (p, c) in enumerate(sorted(pairs))
    ]
    count = 1 + max(max(pair) for pair in pairs)
    return Problem([Variable(f"v{at}", costs, np.zeros((3, 1), dtype=int)) for at in range(count)], values)


@st.composite
def trees(draw) -> Problem:
    """Of two to seven variables, each next to one of those before it."""
    count = draw(st.integers(2, 7))
    pairs, seed = [(draw(st.integers(0, at - 1)), at) for at in range(1, count)], draw(st.integers(0, 2**32 - 1))
    return alike(pairs, seed) if draw(st.booleans()) else joined_by(pairs, seed, labels=5, impossible=0.2)


@settings(max_examples=200, deadline=None)
@given(trees())
def test_of_a_tree_one_node_is_left_and_all_that_messages_say_is_exact(problem):
    best = brute_force(problem)
    assume(np.isfinite(best))
    messages = Messages(problem, whole(problem), ceiling(problem))
    assert len(messages.nodes) == 1 and not messages.edges and len(messages.inner) == len(problem.variables) - 1
    assert messages.sweep() == pytest.approx(best, rel=1e-12)
    assert total(problem, messages.decode()) == pytest.approx(best, rel=1e-12)
    assert checked_bound(problem, untied_proof(problem)) == pytest.approx(best, rel=1e-9)
    for (_, at), bounds in zip(messages.names, messages.bounds()):
        for label, bound in zip(messages.space.labels[at], bounds):
            exact = brute_force(problem, {at: int(label)})
            assert bound == pytest.approx(exact, rel=1e-12) if np.isfinite(exact) else bound > best


RINGS = {
    "a ring": [(0, 1), (1, 2), (2, 3), (3, 0)],
    "two between the same": [(0, 1), (1, 3), (0, 2), (2, 3)],
    "three between the same": [(0, 1), (1, 4), (0, 2), (2, 4), (0, 3), (3, 4)],
    "a ring with a tail": [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4)],
    "two rings on a chain": [(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5), (5, 3)],
}


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("seed", range(25))
def test_what_is_left_of_rings_has_the_same_cheapest_plan(name, seed):
    """By trying all labels of the nodes that are left; the others follow from them."""
    problem = joined_by(RINGS[name], seed, labels=4, impossible=0.0)
    best = brute_force(problem)
    messages = Messages(problem, whole(problem), ceiling(problem))
    assert 2 <= len(messages.nodes) < len(problem.variables) and messages.inner
    found = []
    for labels in np.ndindex(*(len(node.costs) for node in messages.nodes.values())):
        label = dict(zip(messages.nodes, labels))
        seconds = [node.costs[label[at]] for at, node in messages.nodes.items()]
        seconds += [e.seconds[e.first.at[label[e.first.node]], e.last.at[label[e.last.node]]] for e in messages.edges]
        found.append(sum(seconds))
    assert min(found) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("seed", range(10))
def test_in_rings_no_bound_of_a_label_is_above_brute_force(name, seed):
    """Also of nodes that are left out: of what their neighbours say they get the part of one chain."""
    problem = joined_by(RINGS[name], seed, labels=6, impossible=0.2)
    messages = Messages(problem, whole(problem), ceiling(problem))
    assert all(edge.seconds.max() <= messages.cap for edge in messages.edges)
    for _ in range(seed % 5):
        messages.sweep()
    for (_, at), bounds in zip(messages.names, messages.bounds()):
        for label, bound in zip(messages.space.labels[at], bounds):
            assert bound <= brute_force(problem, {at: int(label)}) * (1 + 1e-9)


@pytest.mark.parametrize("name", RINGS)
def test_where_labels_are_dropped_the_same_nodes_stay_left_out_and_no_sweep_lowers_the_bound(name, monkeypatch):
    """Also where what is too large for an edge before is small enough then."""
    more = 0
    for seed in range(20):
        problem = joined_by(RINGS[name], seed, labels=4, impossible=0.0)
        monkeypatch.setattr(chains_module, "MOST", 4)
        messages = Messages(problem, whole(problem), ceiling(problem))
        messages.sweep()
        monkeypatch.setattr(chains_module, "MOST", 1 << 16)
        space = Space([labels[:2] for labels in messages.space.labels], messages.space.aliases)
        fewer = messages.restrict(space)
        assert [inner.node for inner in fewer.inner] == [inner.node for inner in messages.inner]
        more += len(Messages(problem, space, messages.cap).inner) > len(messages.inner)
        fewer.forward()
        assert fewer.backward() >= messages.bound - 1e-9 * abs(messages.bound)
        assert total(problem, fewer.decode()) >= brute_force(problem) * (1 - 1e-9)
    assert more


@settings(max_examples=300, deadline=None)
@given(st.one_of(problems(variables=6, labels=5, axes=1), trees()), st.booleans())
def test_plans_of_a_shrunk_problem_cost_what_they_cost_in_the_whole_one(problem, narrow):
    """The best one, and any other with the best labels for the variables that are left out."""
    best = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        if narrow:
            patch.setattr(chains_module, "MOST", 6)  # what is larger stays
        small = shrink(problem, ceiling(problem))
    sizes = [len(v.costs) for v in small.problem.variables]
    plans = list(itertools.product(*map(range, sizes)))
    costs = [total(small.problem, labels) for labels in plans]
    if np.isfinite(best):
        assert min(costs) == pytest.approx(best, rel=1e-9, abs=1e-15)
    for labels, seconds in zip(plans, costs):
        found = small.expand(labels)
        if np.isfinite(total(problem, found)):
            assert small.part(found) == list(labels) and total(problem, found) == pytest.approx(seconds, rel=1e-9, abs=1e-15)
        else:
            assert seconds > best or np.isinf(best)


def test_of_a_chain_the_ends_fall_and_the_middle_becomes_one_boxing():
    problem = joined_by([(0, 1), (1, 2), (2, 3), (3, 4)], 3, labels=4, impossible=0.0)
    small = shrink(problem, ceiling(problem))
    assert len(small.kept) == 1 and not small.problem.values and len(small.inner) == 4
    assert small.problem.variables[0].costs.min() == brute_force(problem)
    ring = joined_by([(0, 1), (1, 2), (2, 3), (3, 0)], 3, labels=4, impossible=0.0)
    small = shrink(ring, ceiling(ring))
    assert len(small.kept) == 2 and len(small.problem.values) == 2 and len(small.inner) == 2
