"""The boxings that no others replace: over them every layout is reached as cheaply as over all, and they are far fewer.

Of 28 layouts on two axes there are 756 boxings from one to another; about 190 of them are not a detour over a third layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbpc.solver.problem import SLACK


@dataclass(frozen=True, eq=False)
class Arcs:
    """Boxings by number: from which layout, to which, and in how many seconds."""

    tails: np.ndarray
    heads: np.ndarray
    seconds: np.ndarray


def arcs(closure: np.ndarray) -> Arcs:
    """Arcs over which the cheapest way between any two layouts costs what `closure` [layouts, layouts] says.

    A boxing is left out where others that are still there lead to the same over a third layout for as much. In the turn of
    that layout no boxing to or from it is left out, so boxings for nothing that lead in a circle do not replace each other.
    """
    there = np.isfinite(closure) & ~np.eye(len(closure), dtype=bool)
    for over in range(len(closure)):
        into, out_of = np.flatnonzero(there[:, over]), np.flatnonzero(there[over])
        pairs = np.ix_(into, out_of)
        detour = closure[into, over][:, None] + closure[over, out_of]
        there[pairs] &= detour > closure[pairs] * (1 + SLACK)
    tails, heads = np.nonzero(there)
    return Arcs(tails, heads, closure[tails, heads])
