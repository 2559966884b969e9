"""Measure what a flop, a byte of memory and a call cost on the device of a rank, while the other ranks do the same:
products by shape and type, attention by width and length, memory by size. A `Device` is fitted to that."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import conv2d, scaled_dot_product_attention

from sbpc._compat import float8_product
from sbpc.mesh.kernels import Attention, Device, Product
from sbpc.runtime.start.process_groups import from_all_ranks

WINDOW = 0.2  # seconds in which all ranks call the same kernel, so that those that share cores share them all the time
SHORT = 0.05  # the same, where many are measured of which a curve is fitted
TILES = 1, 2, 4, 8, 16, 32, 64
OUTSIDE = 1 << 28  # bytes that no cache holds
KEYS = 0.0, 30.0, 60.0, 120.0, 180.0, 300.0, 600.0, 1200.0  # which beginnings of attention are tried, see `Attention`
PARTS = np.geomspace(0.02, 1.0, 40)  # and which parts of the peak
# Of a product as wide as is measured, rows, columns and depth.
SHAPES: tuple[tuple[float, float, float], ...] = (
    (1, 1, 1), (1 / 2, 1 / 2, 1 / 2), (1 / 4, 1 / 4, 1 / 4), (1 / 8, 1 / 8, 1 / 8), (1 / 16, 1, 1 / 4),
    (1, 1 / 16, 1 / 4), (1 / 4, 1 / 4, 1 / 64), (1 / 16, 1 / 16, 1), (1 / 64, 1, 1),
)  # fmt: skip


def device_figures(
    where: torch.device,
    side: int,
    dtype: torch.dtype,
    repeats: int,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measures the figures of a device: medians over the ranks. tell: called with what is measured next."""
    short = partial(grid, where, repeats)
    tell("memory by size")
    most, one = 28 if where.type == "cuda" else 24, torch.ones(1, device=where)
    copies = {1 << power: copying(where, 1 << power) for power in range(most - 12, most + 1, 2)}
    moved = short(copies)
    small = median(timed(lambda: torch.add(one, 1.0), where, repeats, 1000))
    bandwidth, cache, cached = cache_of({8.0 * size: seconds for size, seconds in moved.items()}, small)
    tell("matrix products by shape and type")
    sizes = [[max(1, int(side * part)) for part in each] for each in SHAPES]
    shapes = [Product(1, rows, columns, depth) for rows, columns, depth in sizes]
    alone = short({shape: multiplying(where, shape, dtype) for shape in shapes})
    square = shapes[0]
    known: dict[str, Any] = {
        kind: seconds / alone[square] for kind, seconds in short(by_type(where, side, dtype)).items()
    }
    known[name_of(dtype)] = 1.0
    processors = torch.cuda.get_device_properties(where).multi_processor_count if where.type == "cuda" else 1
    device = Device(processors, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, cache=cache, cached=cached, **known)
    peak, hidden, device = products_of(alone, device, bandwidth, dtype.itemsize)
    tell("attention by width and length, and convolutions")
    calls = list(attentions(where, dtype))
    attended = short({at: each.run for at, each in enumerate(calls)})
    device = replace(device, **attention_of([(each, attended[at]) for at, each in enumerate(calls)], peak))
    rates = peak, bandwidth, small
    convolved = {flops: run for run, flops in convolutions(where, dtype)}
    slower = [seconds * peak * device.product / flops for flops, seconds in short(convolved).items()]
    return dict(zip(("peak", "memory_bandwidth", "launch"), rates)) | {
        "hidden": hidden,
        "sharing": sharing(multiplying(where, square, dtype), where, repeats),
        "attention": 1.0,
        "convolution": statistics.median(slower),
        "device": device,
    }


def median(mine: float) -> float:
    """Returns the median over the ranks."""
    return statistics.median(from_all_ranks(mine))


def grid(where: torch.device, repeats: int, runs: Mapping[Any, Callable[[], Any]]) -> dict[Any, float]:
    """Returns the seconds of calls, each the median over the ranks of the median over turns. In a turn all take theirs,
    so that a slow spell of the machine falls on one turn of many."""
    mine = {key: list[float]() for key in runs}
    for turn in range(repeats + 1):
        for key, run in runs.items():
            seconds = window(run, where, 32 if where.type == "cuda" else 1, length=SHORT)
            mine[key] += [seconds] if turn else []  # the first one warms up
    return dict(zip(runs, map(statistics.median, zip(*from_all_ranks([*map(statistics.median, mine.values())])))))


def copying(where: torch.device, size: int) -> Callable[[], Tensor]:
    """Returns a function that reads and writes so many float32 numbers."""
    given = torch.randn(size, device=where)
    return partial(torch.add, given, 1.0, out=torch.empty_like(given))


def cache_of(seconds: Mapping[float, float], launch: float) -> tuple[float, float, float]:
    """Returns the bandwidth of memory, the bytes of a cache, and how many times as fast what fits into that is moved.

    seconds: by bytes moved.

    >>> cache_of({size: max(size / 4e10, (size - 1e6) / 1e10) for size in (1e5, 1e6, 4e6, 1e9)}, 0.0)
    (10010010010.01001, 1000000.0, 3.996)
    """
    most = max(seconds)
    slow = most / seconds[most]
    long = {size: each for size, each in seconds.items() if each > 4 * launch} or {most: seconds[most]}
    times = max(1.0, max(size / each for size, each in long.items()) / slow)

    def error(cache: float) -> float:
        told = {size: max(size / (times * slow), (size - cache) / slow) for size in long}
        return sum((told[size] / each - 1) ** 2 for size, each in long.items())

    return slow, min((0.0, *long), key=error), times


def multiplying(where: torch.device, shape: Product, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Returns a function that multiplies, as in a step operands that no cache holds into new memory."""
    sizes = (shape.rows, shape.depth), (shape.depth, shape.columns)
    pair = sum(math.prod(size) for size in sizes) * dtype.itemsize
    count = max(1, min(64, (OUTSIDE if where.type == "cuda" else OUTSIDE // 8) // pair))
    pairs = itertools.cycle([[torch.randn(size, device=where).to(dtype) for size in sizes] for _ in range(count)])
    return lambda: torch.mm(*next(pairs))


def by_type(where: torch.device, side: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Returns by type of WIDTHS, but for that of the peak, a function that multiplies square matrices of it."""
    square = Product(1, side, side, side)
    kinds = "bfloat16", "float32", "float64"
    found: dict[str, Any] = {kind: multiplying(where, square, getattr(torch, kind)) for kind in kinds}
    single, scale = found["float32"], torch.ones((), device=where)
    if where.type == "cuda":
        found |= {
            kind: partial(with_precision, way, single) for kind, way in (("float32", "highest"), ("tf32", "high"))
        }
    a = torch.randn(side, side, device=where).to(torch.float8_e4m3fn)
    found["float8"] = partial(float8_product, a, a.t(), scale)
    return {kind: run for kind, run in found.items() if kind != name_of(dtype) and works(run)}


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a type."""
    return str(dtype).removeprefix("torch.")


def with_precision(precision: str, run: Callable[[], Any]) -> None:
    """Calls a function while float32 numbers are multiplied in a precision."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        run()
    finally:
        torch.set_float32_matmul_precision(before)


def works(run: Callable[[], Any]) -> bool:
    """Returns whether every rank's device has the kernel of a call."""
    try:
        run()
    except (RuntimeError, NotImplementedError):  # torch has no kernel of this type here: it is not measured
        return all(from_all_ranks(False))
    return all(from_all_ranks(True))


def products_of(
    seconds: Mapping[Product, float], device: Device, bandwidth: float, itemsize: int
) -> tuple[float, float, Device]:
    """Returns the peak, what is hidden, see `Cluster`, and a device by what products take, as near as may be to what
    was measured of some, by squares of relative errors. bandwidth: of its memory. itemsize: bytes of a number."""
    found = []
    for tile in TILES:
        rows = []
        for s in seconds:
            waves, work = s.waves(tile, device.multiprocessors)
            moved = itemsize * (s.rows * s.depth + s.depth * s.columns + s.rows * s.columns)
            rows.append((1.0, float(waves), float(waves * work), float(device.moved(moved, bandwidth))))
        error, (begin, wave, each, moving) = fitted(rows, [*seconds.values()])
        found += [(error, tile, begin, wave, each, moving)] if each else []
    if not found:  # measured so badly that more work took no longer: all take what the fastest one did
        least = min(took / math.prod(s.waves(TILES[0], device.multiprocessors)) for s, took in seconds.items())
        found = [(math.inf, TILES[0], 0.0, 0.0, float(least), 1.0)]
    _, tile, begin, wave, each, moving = min(found)
    best = max(2 * s.rows * s.columns * s.depth / took for s, took in seconds.items())
    peak = max(best, 1 / each)
    return peak, max(0.0, 1 - moving), replace(device, tile=tile, begin=begin, wave=wave, product=1 / each / peak)


def fitted(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """Returns how far sums of terms are off, and by which numbers, none below 0, the terms are multiplied in them.

    >>> fitted([(1.0, 2.0), (1.0, 4.0), (1.0, 8.0)], [7.0, 11.0, 19.0])[1]
    (3.0, 2.0)
    """
    rows = np.array(terms) / np.array(seconds)[:, None]
    scale, found = np.linalg.norm(rows, axis=0), []
    for used in itertools.product((False, True), repeat=len(scale)):
        if (kept := np.flatnonzero(used)).size:
            numbers = np.zeros(len(scale))
            numbers[kept] = np.linalg.lstsq(rows[:, kept] / scale[kept], np.ones(len(rows)), rcond=None)[0]
            if numbers.min() >= 0:
                error = float(np.sum((rows / scale @ numbers - 1) ** 2))
                found.append((error, tuple(float(f"{number:.12g}") for number in numbers / scale)))
    return min(found)


@dataclass(frozen=True)
class Attending:
    """A call of attention. flops: as rules count them, of all pairs."""

    shape: Attention
    flops: float
    run: Callable[[], Any]


def attentions(where: torch.device, dtype: torch.dtype) -> Iterator[Attending]:
    """Yields calls of attention, forward and backward, of two widths and lengths, causal and not."""
    batch, lengths, widths = (4, (512, 2048), (64, 128)) if where.type == "cuda" else (1, (128, 512), (32, 64))
    for length, width, causal in itertools.product(lengths, widths, (False, True)):
        q, k, v = (torch.randn(batch, 8, length, width, device=where).to(dtype).requires_grad_() for _ in range(3))
        forward = partial(scaled_dot_product_attention, q, k, v, is_causal=causal)
        out, pairs = forward(), float(batch * 8 * length**2)
        back = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
        yield Attending(Attention(pairs, length, int(causal), False), 4 * pairs * width, torch.no_grad()(forward))
        yield Attending(Attention(pairs, length, int(causal), True), 10 * pairs * width, back)


def attention_of(measured: Sequence[tuple[Attending, float]], peak: float) -> dict[str, Any]:
    """Returns of a `Device` what attention takes, as near as may be to what was measured."""
    found = []
    for ramp, diagonal in itertools.product(KEYS, KEYS):
        total, figures = 0.0, {"ramp": ramp, "diagonal": diagonal}
        for name, backward in (("ahead", False), ("back", True)):
            mine = [each for each in measured if each[0].shape.backward == backward]
            share = np.array([call.shape.share(ramp, diagonal) for call, _ in mine])
            seconds = np.array([took for _, took in mine])
            multiplied = share * [call.flops / peak for call, _ in mine] / seconds
            pairs = share * [call.shape.pairs for call, _ in mine] / seconds
            left = 1 - multiplied[:, None] / PARTS
            each = np.maximum(0.0, pairs @ left / (pairs @ pairs))
            errors = np.sum((left - pairs[:, None] * each) ** 2, axis=0)
            at = int(errors.argmin())
            total += errors[at]
            figures |= {name: float(PARTS[at]), f"{name}_pair": float(each[at])}
        found.append((total, list(figures.items())))
    return dict(min(found)[1])


def sharing(run: Callable[[], Any], where: torch.device, repeats: int) -> float:
    """Returns how many times as long a call takes where all ranks call as where rank 0 alone does, the median over
    repeats.

    Both are measured in turn: a machine whose cores others use, too, is as fast in neighbouring windows, not in
    distant ones.
    """
    found = []
    for _ in range(repeats):
        together, alone = (from_all_ranks(timed(run, where, 1, 1, ranks)) for ranks in (None, 1))
        found.append(statistics.median(together) / alone[0])
    return max(1.0, statistics.median(found))


def layers(where: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """Returns a function that multiplies as layers do in a step, operands that no cache holds into new memory. On a GPU
    the products are large enough to keep it busy, and take about as long to move as to multiply.
    """
    rows, width, count = (256, 4096, 4) if where.type == "cuda" else (64, 256, 16)
    x = torch.randn(rows, width, device=where).to(dtype)
    weights = torch.randn(count, width, 4 * width, device=where).to(dtype)

    def run() -> None:
        values = [torch.mm(x, weight) for weight in weights]
        _ = [torch.mm(x.t(), value) for value in values]

    return run


def convolutions(where: torch.device, dtype: torch.dtype) -> Iterator[tuple[Callable[[], None], float]]:
    """Yields functions that run a convolution of 3 x 3 forward and backward, and the flops of each."""
    cases = ((32, 256, 32), (32, 64, 64)) if where.type == "cuda" else ((4, 32, 16), (4, 64, 32))
    for batch, channels, side in cases:
        sizes = (batch, channels, side, side), (channels, channels, 3, 3)
        images, kernel = (torch.randn(size, device=where).to(dtype).requires_grad_() for size in sizes)

        def run(images: Tensor = images, kernel: Tensor = kernel) -> None:
            out = conv2d(images, kernel, padding=1)
            torch.autograd.grad(out, (images, kernel), torch.ones_like(out))

        # 18 for each number of the forward's, twice as many in the backward
        yield run, 54.0 * batch * channels**2 * side**2


def timed(run: Callable[[], Any], where: torch.device, repeats: int, calls: int, ranks: int | None = None) -> float:
    """Returns the median seconds of a call where the first `ranks` ranks, by default all, call for a WINDOW at once.

    calls: between two looks at the clock. The other ranks return 0.
    """
    seconds = [window(run, where, calls, ranks) for _ in range(repeats + 1)]
    return statistics.median(seconds[1:])  # the first one warms up


def window(
    run: Callable[[], Any], where: torch.device, calls: int, ranks: int | None = None, length: float = WINDOW
) -> float:
    """Returns the seconds of a call in one window."""
    dist.barrier()
    if ranks is not None and dist.get_rank() >= ranks:
        return 0.0
    start, count = time.perf_counter(), 0
    while (took := time.perf_counter() - start) < length:
        for _ in range(calls):
            run()
        settle(where)
        count += calls
    return took / count


def settle(where: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def memory_of(where: torch.device, per_node: int) -> float:
    """Returns the bytes of one device; on CPUs a rank's share of the machine's."""
    if where.type == "cuda":
        return float(torch.cuda.get_device_properties(where).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node)
