"""How many rows of experts a rank has where ranks share them out by their groups: the state R."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import sympy

ANY = math.inf  # times the mean: one rank may have all rows


@dataclass(frozen=True)
class Routing:
    """Rows of the busiest rank, as a multiple of the mean: what prices expect, and what a rank may have at most."""

    expected: float = 1.0
    most: float = ANY


def exact(times: float) -> Fraction:
    """Returns a multiple as it is written: 1.1 is eleven tenths."""
    return Fraction(times).limit_denominator(10**6)


def stretched(size: Any, ranks: Any, times: float) -> Any:
    """Returns of how many rows each rank has as many, if they are shared out evenly, as the busiest one of `ranks` has
    of `size`: `times` the mean, and never more than all. Numbers, arrays or formulas.

    >>> stretched(1000, 4, 1.25), stretched(10, 4, 5.0)
    (1250, 40)
    """
    if times == 1.0:
        return size
    if isinstance(size, sympy.Basic):
        return size * sympy.Rational(exact(times))
    many, most = math.ceil(size * exact(times)), size * ranks
    return np.minimum(many, most) if isinstance(most, np.ndarray) else min(many, int(most))


def most_rows(size: int, ranks: int, times: float) -> int:
    """Returns how many of `size` rows the busiest of `ranks` ranks has."""
    return size if times == ANY else -(-stretched(size, ranks, times) // ranks)
