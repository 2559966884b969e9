"""Paths along which messages lose little: how a node divides what it says among its edges to one side.

TRW-S gives equal parts to all chains through a node, so that what is known at one end of a model fades from node to node,
and multipliers that have to change along a hundred blocks need thousands of sweeps. No sweep lowers the bound whatever the
parts are, as long as those of the earlier edges, and those of the later ones, add up to no more than one (Kolmogorov, "A new
look at reweighted message passing", PAMI 2015). So each node gives most to one edge, on a path on which the next node does
likewise: in a model mostly one path through all of its forward and all of its backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbpc.solver.network import Edge, Node

HALF, LITTLE = 0.5, 0.05  # what goes to the other edges: for most problems, and where all has to be carried far


def along(edges: Sequence[Edge]) -> set[int]:
    """The edges of paths, by `id`: of each node at most one earlier and one later one, shorter ones first."""
    taken: tuple[set[int], set[int]] = set(), set()
    found = set()
    for edge in sorted(edges, key=lambda edge: (edge.last.node - edge.first.node, edge.first.node)):
        if edge.first.node not in taken[0] and edge.last.node not in taken[1]:
            taken[0].add(edge.first.node)
            taken[1].add(edge.last.node)
            found.add(id(edge))
    return found


def divide(nodes: Mapping[int, Node], paths: set[int], rest: float | None) -> None:
    """Tell the nodes to give all but `rest` to the edge of a path, and `rest` in equal parts to the others; None: as TRW-S."""
    for node in nodes.values():
        for side in (node.earlier, node.later):
            count = len(side.edges)
            if rest is None:
                side.parts = [node.weight] * count
            elif count < 2 or not any(id(edge) in paths for edge in side.edges):
                side.parts = [1 / max(count, 1)] * count
            else:
                side.parts = [1 - rest if id(edge) in paths else rest / (count - 1) for edge in side.edges]
