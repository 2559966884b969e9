"""The cheapest totals over the edges of a graph: from some of its nodes to all, by the edges' prices.

Totals are relaxed until nothing changes (Bellman and Ford): in machine code, where a C compiler was at hand when sbpc
was installed, and in numpy elsewhere. Both add the prices of a path in its order, and so come to the same numbers.
"""

from __future__ import annotations

import importlib
from functools import cached_property

import numpy as np

try:
    machine = importlib.import_module("sbpc.boxing._shortest_paths")
except ImportError:
    machine = None  # type: ignore[assignment]


class Edges:
    """The edges of a graph, sorted by the nodes to which they lead; target, source [edges]: int64; nodes: how many,
    at least one."""

    def __init__(self, target: np.ndarray, source: np.ndarray, nodes: int) -> None:
        self.before = np.ascontiguousarray(source)
        self.after = np.ascontiguousarray(target[np.argsort(source, kind="stable")])
        self.into, self.out = (np.r_[0, np.cumsum(np.bincount(ends, minlength=nodes))] for ends in (target, source))

    def totals(self, prices: np.ndarray, sources: np.ndarray) -> np.ndarray:
        """The cheapest totals [sources, nodes], inf where no path leads; prices: by edge, none below 0."""
        assert prices.dtype == np.float64 and prices.shape == self.before.shape and sources.dtype == np.int64
        if machine is not None:
            found = np.empty((len(sources), len(self.into) - 1))
            machine.totals(self.into, self.before, self.out, self.after, prices, sources, found)
            return found
        total = np.full((len(self.into) - 1, len(sources)), np.inf)
        total[sources, range(len(sources))] = 0.0
        self.relax(total, prices, sources)
        return np.ascontiguousarray(total.T)

    def relax(self, total: np.ndarray, prices: np.ndarray, sources: np.ndarray) -> None:
        """Lower the totals [nodes, sources] node by node, so that what was lowered is used at once."""
        waiting = np.zeros(len(total), dtype=bool)  # rows to be computed anew, as one before them was lowered
        sums, better = np.empty((int(np.diff(self.into).max()), len(sources))), np.empty(len(sources))
        for at in sources.tolist():
            waiting[self.onward[at]] = True
        while waiting.any():
            for target, (into, source) in enumerate(self.inward):
                if waiting[target]:
                    waiting[target] = False
                    found = np.take(total, source, axis=0, out=sums[: len(source)], mode="clip")
                    found += prices[into, None]
                    np.minimum.reduce(found, axis=0, out=better)
                    if (better < total[target]).any():
                        np.minimum(total[target], better, out=total[target])
                        waiting[self.onward[target]] = True

    @cached_property
    def onward(self) -> list[np.ndarray]:
        """By node the nodes to which its edges lead."""
        return np.split(self.after, self.out[1:-1])

    @cached_property
    def inward(self) -> list[tuple[slice, np.ndarray]]:
        """By node its edges, and the nodes from which they come."""
        cuts = [slice(start, stop) for start, stop in zip(self.into[:-1].tolist(), self.into[1:].tolist())]
        return [(cut, self.before[cut]) for cut in cuts]
