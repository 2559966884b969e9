"""The least of some numbers, sharply or softly.

Softly, at a heat h, it is -h log(sum exp(-x / h)): below the least number by h times the logarithm of their count at most,
and smooth, so that steps which better one message at a time come to rest at the best bound only.
"""

from __future__ import annotations

import numpy as np


def least(found: np.ndarray, axis: int, heat: float, out: np.ndarray | None = None) -> np.ndarray:
    """The least along an axis."""
    if not heat:
        return np.minimum.reduce(found, axis=axis, out=out)
    floor = found.min(axis, keepdims=True)
    parts = floor - found
    parts /= heat
    sums = np.exp(parts, out=parts).sum(axis)
    return np.subtract(floor.squeeze(axis), heat * np.log(sums), out=out)


def least_of_runs(found: np.ndarray, starts: np.ndarray, run: np.ndarray, heat: float) -> np.ndarray:
    """The least of every run of numbers; run: by number in which run it is."""
    floor = np.minimum.reduceat(found, starts)
    if not heat:
        return floor
    sums = np.add.reduceat(np.exp((floor[run] - found) / heat), starts)
    return floor - heat * np.log(sums)


def lesser(one: np.ndarray, other: np.ndarray, heat: float, out: np.ndarray | None = None) -> np.ndarray:
    """The lesser of two, of which the second may be infinite."""
    if not heat:
        return np.minimum(one, other, out=out)
    apart = one - other
    np.abs(apart, out=apart)
    apart /= -heat
    np.exp(apart, out=apart)
    apart += 1
    np.log(apart, out=apart)
    apart *= heat
    return np.subtract(np.minimum(one, other), apart, out=out)
