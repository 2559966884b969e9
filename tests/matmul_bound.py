"""The least that a matrix product can move, whatever its algorithm: what plans of one are held against."""

from __future__ import annotations

import math


def matmul_words(m: int, n: int, k: int, ranks: int) -> float:
    """Words that the busiest of `ranks` ranks sends at least for [m, k] @ [k, n], each matrix stored once over all.

    The tight bound of Al Daas, Ballard, Grigori, Kumar and Rouse 2022, "Tight memory-independent parallel matrix
    multiplication communication lower bounds", attained where the ideal grid of ranks is made of integers.

    >>> [round(matmul_words(64, 64, 64, p), 9) for p in (1, 8, 64)], matmul_words(64, 2, 2, 4)
    ([0.0, 1536.0, 576.0], 3.0)
    """
    long, middle, short = sorted((m, n, k), reverse=True)
    if ranks * middle <= long:  # a 1-D grid: only the smallest matrix moves
        return (1 - 1 / ranks) * middle * short
    if ranks * short**2 <= long * middle:  # 2-D: the largest matrix stays
        return 2 * math.sqrt(long * middle / ranks) * short - (long + middle) * short / ranks
    return 3 * (m * n * k / ranks) ** (2 / 3) - (m * n + n * k + k * m) / ranks
