"""Measure what a flop, a byte of memory and a call cost on the device of a rank, while the other ranks do the same."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import conv2d, scaled_dot_product_attention

from sbpc.mesh.kernels import kernel_seconds
from sbpc.runtime.start.process_groups import from_all_ranks

WINDOW = 0.2  # seconds in which all ranks call the same kernel, so that those that share cores share them all the time


def device_figures(where: torch.device, side: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Measures the figures of a device: medians over the ranks."""
    a, b = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
    large = torch.randn(1 << (28 if where.type == "cuda" else 22), device=where)
    out, one = torch.empty_like(large), torch.ones(1, device=where)
    product = timed(lambda: torch.mm(a, b), where, repeats, 1)
    copied = timed(lambda: torch.add(large, 1.0, out=out), where, repeats, 1)
    small = timed(lambda: torch.add(one, 1.0), where, repeats, 1000)
    run, work = layers(where, dtype)
    (attend, attended), (convolve, convolved) = attention(where, dtype), convolution(where, dtype)
    mine = product, copied, small, *(timed(each, where, repeats, 1) for each in (run, attend, convolve))
    product, copied, small, seconds, attending, convolving = map(statistics.median, zip(*from_all_ranks(mine)))
    rates = 2 * side**3 / product, 2 * large.nbytes / copied, small
    most, all_of_them = (sum(kernel_seconds(*each, *rates, hidden) for each in work) for hidden in (1.0, 0.0))
    hidden = min(1.0, max(0.0, (all_of_them - seconds) / (all_of_them - most)))
    return dict(zip(("peak", "memory_bandwidth", "launch"), rates)) | {
        "hidden": hidden,
        "sharing": sharing(lambda: torch.mm(a, b), where, repeats),
        "attention": attending * rates[0] / attended,
        "convolution": convolving * rates[0] / convolved,
    }


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


def layers(where: torch.device, dtype: torch.dtype) -> tuple[Callable[[], None], list[tuple[float, float]]]:
    """Returns a function that multiplies as layers do in a step, operands that no cache holds into new memory, and
    of every product the flops and the bytes. On a GPU the products are large enough to keep it busy, and take about
    as long to move as to multiply.
    """
    rows, width, count = (256, 4096, 4) if where.type == "cuda" else (64, 256, 16)
    x = torch.randn(rows, width, device=where).to(dtype)
    weights = torch.randn(count, width, 4 * width, device=where).to(dtype)

    def run() -> None:
        values = [torch.mm(x, weight) for weight in weights]
        _ = [torch.mm(x.t(), value) for value in values]

    sizes = x.nbytes, weights[0].nbytes, 4 * x.nbytes
    return run, [(8.0 * rows * width * width, float(sum(sizes)))] * (2 * count)


def attention(where: torch.device, dtype: torch.dtype) -> tuple[Callable[[], None], float]:
    """Returns a function that runs causal attention forward and backward, and its flops as rules count them, the
    mask left aside."""
    batch, heads, length, width = (8, 16, 2048, 64) if where.type == "cuda" else (2, 4, 256, 32)
    q, k, v = (torch.randn(batch, heads, length, width, device=where).to(dtype).requires_grad_() for _ in range(3))

    def run() -> None:
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return run, 14.0 * batch * heads * length**2 * width  # 4 in the forward, 10 in the backward


def convolution(where: torch.device, dtype: torch.dtype) -> tuple[Callable[[], None], float]:
    """Returns a function that runs a convolution of 3 x 3 forward and backward, and its flops."""
    batch, channels, side = (32, 256, 32) if where.type == "cuda" else (4, 32, 16)
    sizes = (batch, channels, side, side), (channels, channels, 3, 3)
    images, kernel = (torch.randn(size, device=where).to(dtype).requires_grad_() for size in sizes)

    def run() -> None:
        out = conv2d(images, kernel, padding=1)
        torch.autograd.grad(out, (images, kernel), torch.ones_like(out))

    # 18 for each number of the forward's, twice as many in the backward
    return run, 54.0 * batch * channels**2 * side**2


def timed(run: Callable[[], Any], where: torch.device, repeats: int, calls: int, ranks: int | None = None) -> float:
    """Returns the median seconds of a call where the first `ranks` ranks, by default all, call for a WINDOW at once.

    calls: between two looks at the clock. The other ranks return 0.
    """
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        if ranks is not None and dist.get_rank() >= ranks:
            continue
        start, count = time.perf_counter(), 0
        while (took := time.perf_counter() - start) < WINDOW:
            for _ in range(calls):
                run()
            settle(where)
            count += calls
        seconds.append(took / count)
    return statistics.median(seconds[1:]) if seconds else 0.0  # the first one warms up


def settle(where: torch.device) -> None:
    """Waits until the device has done what it was given."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def memory_of(where: torch.device, per_node: int) -> float:
    """Returns the bytes of one device; on CPUs a rank's share of the machine's."""
    if where.type == "cuda":
        return float(torch.cuda.get_device_properties(where).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node)
