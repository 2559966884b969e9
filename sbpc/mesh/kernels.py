"""Holds how long kernels take: by flops, bytes and a launch, and on GPUs whose kernels were measured by the shape of
the work.

A product of b matrices of m x k and k x n is computed in square tiles, of `TILE` on GPUs, as many at once as the GPU
has multiprocessors (a wave). Libraries take larger tiles where these are faster, and split k where tiles are few: as
seconds, both are near small tiles at the speed of large ones. With `begin` for what a product takes before and behind
its waves

    seconds = begin + max(waves * (2 k tile^2 / (speed of a multiprocessor) + wave), bytes / bandwidth)

is within 5 % on average of 80 products of bfloat16 on an H100, within 5 % of each of those above 30 Gflop
(`tests.bench.published` prints them).

Attention computes its two products (five in the backward) at part of the peak, and for each pair of a query and a key
what a softmax takes. Every block of queries begins and ends, as long as `ramp` keys take. With a causal mask half of
the pairs are computed, and the blocks on the diagonal are filled up: as long as `diagonal` keys take. Where queries or
keys are split the mask is written out, and all pairs are computed.

What fits into a cache is moved faster: bytes / bandwidth is max(bytes / (cached * bandwidth), (bytes - cache) /
bandwidth). On a processor, as `sbpc profile` measures one, multiplying and moving hide each other but in part (see
`Cluster.hidden`), and tiles are small.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import sympy

TILE = 64  # rows and columns
RAMP, DIAGONAL = 180.0, 600.0  # keys, on A100 and H100 alike, for heads of 64 and of 128
WIDTHS = {"float8": 1, "bfloat16": 2, "tf32": 4, "float32": 4, "float64": 8}  # bytes of a number of what is multiplied


@dataclass(frozen=True)
class Product:
    """Sizes of a product on one rank: so many of [rows, depth] x [depth, columns]. Numbers, arrays or formulas. kind:
    the type of its numbers, of WIDTHS, as it is multiplied; nothing where that is not known."""

    batch: Any
    rows: Any
    columns: Any
    depth: Any
    kind: str = ""

    def part(self, parts: int) -> Product:
        """Returns one of so many equal parts: of the batch first, then of the rows."""
        of_batch = min(self.batch, parts)
        return replace(self, batch=self.batch / of_batch, rows=self.rows * of_batch / parts)

    def waves(self, tile: int, multiprocessors: int) -> tuple[Any, Any]:
        """Returns how many waves it takes, and the flops of one."""
        tiles = self.batch * ceiling(self.rows / tile) * ceiling(self.columns / tile)
        return ceiling(tiles / multiprocessors), 2 * tile**2 * multiprocessors * self.depth

    def seconds(self, device: Device, flops: Any, peak: Any, moving: Any, hidden: float) -> Any:
        """Returns the seconds of its kernel. moving: what its bytes take."""
        waves, work = self.waves(device.tile, device.multiprocessors)
        loop = device.times(self.kind) * work / (device.product * peak)
        return device.begin + beside(hidden, waves * (loop + device.wave), moving)


@dataclass(frozen=True)
class Convolution:
    """A convolution on one rank, of which flops count alone. kind: see `Product`."""

    kind: str = ""

    def part(self, parts: int) -> Convolution:
        """Returns one of so many equal parts."""
        return self

    def seconds(self, device: Device, flops: Any, peak: Any, moving: Any, hidden: float) -> Any:
        """Returns the seconds of its kernel. moving: what its bytes take."""
        return device.begin + beside(hidden, device.times(self.kind) * flops / (device.product * peak), moving)


@dataclass(frozen=True)
class Attention:
    """Sizes of attention on one rank. pairs: of queries and keys, of all its heads. causal: 1 where the kernel leaves
    out what a causal mask hides, else 0. backward: whether it is the backward."""

    pairs: Any
    keys: Any
    causal: Any
    backward: bool
    kind: str = ""

    def part(self, parts: int) -> Attention:
        """Returns one of so many equal parts."""
        return replace(self, pairs=self.pairs / parts)

    def share(self, ramp: float, diagonal: float) -> Any:
        """Returns how many times as long it takes as all pairs by themselves do."""
        return (1 - self.causal / 2) * (1 + (ramp + (diagonal - ramp) * self.causal) / self.keys)

    def seconds(self, device: Device, flops: Any, peak: Any, moving: Any, hidden: float) -> Any:
        """Returns the seconds of its kernel. flops: of all pairs. moving: what its bytes take."""
        part, pair = (device.back, device.back_pair) if self.backward else (device.ahead, device.ahead_pair)
        whole = device.times(self.kind) * flops / (part * peak) + pair * self.pairs
        return largest(self.share(device.ramp, device.diagonal) * whole, moving)


Shape = Product | Convolution | Attention


@dataclass(frozen=True)
class Device:
    """What kernels reach on a device, where that is known by their shape.

    multiprocessors: how many compute side by side. moving: the part of the memory bandwidth that kernels reach.
    product: the part of the peak at which a wave of a product multiplies while it does nothing but such products, as
    warm as that makes it. wave, begin: seconds of a product for each wave, and before and behind all. ahead, back: the
    part of the peak at which attention multiplies in the forward and in the backward. ahead_pair, back_pair: seconds
    that it takes for each pair of a query and a key besides. tile, ramp, diagonal, cache (bytes), cached: see above.

    float8 to float64: how many times as long numbers of this type take to multiply as those of the peak. A type of
    which nothing is known takes by its bytes as long as the one that is nearest in these, and as long as those of the
    peak where nothing is known of any. Products of float32 take as long as those of tf32 where torch is told so
    (`torch.set_float32_matmul_precision`).
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
    tile: int = TILE
    ramp: float = RAMP
    diagonal: float = DIAGONAL
    cache: float = 0.0
    cached: float = 1.0
    float8: float | None = None
    bfloat16: float | None = None
    tf32: float | None = None
    float32: float | None = None
    float64: float | None = None

    @functools.cached_property
    def by_kind(self) -> dict[str, float]:
        """By type of WIDTHS `times`."""
        return {kind: self.times_of(kind) for kind in WIDTHS}

    def times(self, kind: str) -> float:
        """Returns how many times as long numbers of a type take to multiply as those of the peak."""
        return self.by_kind.get(kind, 1.0)

    def times_of(self, kind: str) -> float:
        """Returns the same for a type of WIDTHS, by what is known."""
        known = {name: times for name in WIDTHS if (times := getattr(self, name)) is not None}
        if kind in known or not known:
            return known.get(kind, 1.0)
        nearest = min(known, key=lambda name: (abs(math.log(WIDTHS[kind] / WIDTHS[name])), known[name]))
        return known[nearest] * max(1.0, WIDTHS[kind] / WIDTHS[nearest])

    def lacks(self, kind: str) -> bool:
        """Returns whether a type has no rate, while those that the device multiplies have one. Types of more bits are
        multiplied by any device."""
        known = any(getattr(self, name) is not None for name in WIDTHS)
        return kind == "float8" and known and self.float8 is None

    @property
    def fastest(self) -> float:
        """How many times the peak any kernel reaches at most."""
        return max(self.product, self.ahead, self.back) / min(1.0, *self.by_kind.values())

    def scaled(self, times: float) -> Device:
        """Returns a device on which all that is given in seconds takes so many times as long."""
        names = "wave", "begin", "ahead_pair", "back_pair"
        return replace(self, **{name: times * getattr(self, name) for name in names})

    def moved(self, size: Any, bandwidth: Any) -> Any:
        """Returns the seconds in which so many bytes are moved."""
        outside = size / (self.moving * bandwidth)
        if not self.cache:
            return outside
        return largest(outside / self.cached, outside - self.cache / (self.moving * bandwidth))

    def seconds(self, flops: Any, moved: Any, shape: Shape | None, rates: Any, hidden: float = 1.0) -> Any:
        """Returns the seconds of a kernel. shape: of its work; none for pointwise ops and the like. rates: peak,
        memory bandwidth and launch. hidden: see `Cluster`."""
        peak, bandwidth, launch = rates
        moving = self.moved(moved, bandwidth)
        if shape is None:
            return beside(hidden, flops / (self.product * peak), moving, launch)
        return largest(shape.seconds(self, flops, peak, moving, hidden), launch)


def kernel_seconds(
    flops: Any, bytes_moved: Any, peak: Any, memory_bandwidth: Any, launch: Any, hidden: float = 1.0
) -> Any:
    """Seconds of one kernel; every argument but `hidden` a number, a numpy array or a sympy expression. hidden: see
    `Cluster`."""
    return beside(hidden, flops / peak, bytes_moved / memory_bandwidth, launch)


def beside(hidden: float, *terms: Any) -> Any:
    """What takes so many seconds each, of which the longest hides a part of the others."""
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
