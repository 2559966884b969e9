"""The cheapest totals over edges: machine code and numpy come to the same numbers, which are those of Dijkstra's search."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbpc.boxing import shortest_paths as totals
from sbpc.boxing.shortest_paths import Edges
from tests.test_compiled import BUILDABLE


def drawn(rng: np.random.Generator, nodes: int, edges: int) -> tuple[Edges, np.ndarray, networkx.DiGraph]:
    """A random graph, some of its nodes out of reach and some of its edges for nothing; its prices; the same for networkx."""
    ends = np.unique(rng.integers(0, nodes, (edges, 2)), axis=0)
    prices = rng.random(len(ends)) * rng.integers(0, 3, len(ends)) * 10.0 ** rng.integers(-9, 1, len(ends))
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(nodes))
    graph.add_weighted_edges_from((int(source), int(target), float(p)) for (target, source), p in zip(ends, prices))
    return Edges(ends[:, 0], ends[:, 1], nodes), prices, graph


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 100), st.integers(1, 300), st.sampled_from([1, 3, 32, 33, 70]))
def test_totals_are_the_same_in_machine_code_and_in_numpy_and_those_of_dijkstra(seed, nodes, edges, count):
    rng = np.random.default_rng(seed)
    made, prices, graph = drawn(rng, nodes, edges)
    sources = rng.permutation(nodes)[:count]
    found = made.totals(prices, sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(totals, "machine", None)
        assert np.array_equal(made.totals(prices, sources), found)
    for source, row in zip(sources.tolist(), found):
        known = networkx.single_source_dijkstra_path_length(graph, source)
        assert np.allclose(row, [known.get(node, np.inf) for node in range(nodes)], rtol=1e-12, atol=0)


def test_no_sources_have_no_totals(monkeypatch):
    for machine in [totals.machine, None]:
        monkeypatch.setattr(totals, "machine", machine)
        made, prices, _ = drawn(np.random.default_rng(0), 5, 10)
        assert made.totals(prices, np.array([], dtype=np.int64)).shape == (0, 5)


@pytest.mark.skipif(totals.machine is None and not BUILDABLE, reason="no C compiler, or no headers of Python")
def test_totals_are_built_where_they_can_be():
    assert totals.machine is not None, "make the environment again: the totals were not built"
