"""Holds how long kernels take: by flops, bytes and a launch, and on GPUs whose kernels were measured by the shape of
the work.

A product of b matrices of m x k and k x n is computed in square tiles of `TILE`, as many at once as the GPU has
multiprocessors (a wave). Libraries take larger tiles where these are faster, and split k where tiles are few: as
seconds, both are near small tiles at the speed of large ones. With `begin` for what a product takes before and behind
its waves

    seconds = begin + max(waves * (2 k TILE^2 / (speed of a multiprocessor) + wave), bytes / bandwidth)

is within 5 % on average of 80 products of bfloat16 on an H100, within 5 % of each of those above 30 Gflop
(`tests.bench.published` prints them).

Attention computes its two products (five in the backward) at part of the peak, and for each pair of a query and a key
what a softmax takes. Every block of queries begins and ends, as long as `RAMP` keys take. With a causal mask half of
the pairs are computed, and the blocks on the diagonal are filled up: as long as `DIAGONAL` keys take. Where queries or
keys are split the mask is written out, and all pairs are computed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy

TILE = 64  # rows and columns
RAMP, DIAGONAL = 180.0, 600.0  # keys, on A100 and H100 alike, for heads of 64 and of 128


@dataclass(frozen=True)
class Product:
    """Sizes of a product on one rank: so many of [rows, depth] x [depth, columns]. Numbers, arrays or formulas."""

    batch: Any
    rows: Any
    columns: Any
    depth: Any

    def part(self, parts: int) -> Product:
        """Returns one of so many equal parts."""
        return Product(self.batch, self.rows / parts, self.columns, self.depth)

    def seconds(self, device: Device, flops: Any, peak: Any, moving: Any) -> Any:
        """Returns the seconds of its kernel. moving: what its bytes take."""
        tiles = self.batch * ceiling(self.rows / TILE) * ceiling(self.columns / TILE)
        waves = ceiling(tiles / device.multiprocessors)
        loop = 2 * TILE**2 * device.multiprocessors * self.depth / (device.product * peak)
        return device.begin + largest(waves * (loop + device.wave), moving)


@dataclass(frozen=True)
class Attention:
    """Sizes of attention on one rank. pairs: of queries and keys, of all its heads. causal: 1 where the kernel leaves
    out what a causal mask hides, else 0. backward: whether it is the backward."""

    pairs: Any
    keys: Any
    causal: Any
    backward: bool

    def part(self, parts: int) -> Attention:
        """Returns one of so many equal parts."""
        return Attention(self.pairs / parts, self.keys, self.causal, self.backward)

    def seconds(self, device: Device, flops: Any, peak: Any, moving: Any) -> Any:
        """Returns the seconds of its kernel. flops: of all pairs. moving: what its bytes take."""
        part, pair = (device.back, device.back_pair) if self.backward else (device.ahead, device.ahead_pair)
        whole = flops / (part * peak) + pair * self.pairs
        ramp = 1 + (RAMP + (DIAGONAL - RAMP) * self.causal) / self.keys
        return largest((1 - self.causal / 2) * ramp * whole, moving)


@dataclass(frozen=True)
class Device:
    """What kernels reach on a GPU, where that is known by their shape: products of 16-bit numbers.

    multiprocessors: how many compute side by side. moving: the part of the memory bandwidth that kernels reach.
    product: the part of the peak at which a wave of a product multiplies while it does nothing but such products, as
    warm as that makes it. wave, begin: seconds of a product for each wave, and before and behind all. ahead, back: the part of the
    peak at which attention multiplies in the forward and in the backward. ahead_pair, back_pair: seconds that it takes
    for each pair of a query and a key besides.
    """

    multiprocessors: int
    moving: float
    product: float
    wave: float
    begin: float
    ahead: float
    ahead_pair: float
    back: float
    back_pair: float

    def scaled(self, times: float) -> Device:
        """Returns a device on which all that is given in seconds takes so many times as long."""
        names = "wave", "begin", "ahead_pair", "back_pair"
        return replace(self, **{name: times * getattr(self, name) for name in names})

    def seconds(self, flops: Any, moved: Any, shape: Product | Attention | None, rates: Any) -> Any:
        """Returns the seconds of a kernel. shape: of its work; none for pointwise ops and the like. rates: peak,
        memory bandwidth and launch."""
        peak, bandwidth, launch = rates
        moving = moved / (self.moving * bandwidth)
        if shape is None:
            return largest(flops / (self.product * peak), moving, launch)
        return largest(shape.seconds(self, flops, peak, moving), launch)


def kernel_seconds(
    flops: Any, bytes_moved: Any, peak: Any, memory_bandwidth: Any, launch: Any, hidden: float = 1.0
) -> Any:
    """Seconds of one kernel; every argument but `hidden` a number, a numpy array or a sympy expression. hidden: see
    `Cluster`."""
    terms = flops / peak, bytes_moved / memory_bandwidth, launch
    most = largest(*terms)
    return most if hidden == 1.0 else hidden * most + (1.0 - hidden) * sum(terms)


def largest(*terms: Any) -> Any:
    """The largest of numbers, of numpy arrays element by element, or of sympy expressions."""
    if any(isinstance(term, sympy.Basic) for term in terms):
        return sympy.Max(*terms)
    return functools.reduce(np.maximum, terms)


def ceiling(term: Any) -> Any:
    """The next whole number, of numbers, arrays or sympy expressions."""
    return sympy.ceiling(term) if isinstance(term, sympy.Basic) else np.ceil(term)
