"""How long a search of whole strategies takes, and what it finds: `python -m tests.bench.sweeps [names]`.

Large models on many H100 of 80 GB, with stages, micro-batches and recompute as needed. Printed are the CPU seconds of the search and of
the plan of its best row, the peak bytes of the process, the best rows, and the bound. Each model is searched in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import sbpc
from tests.bench.experts import Loss, deepseek, qwen3
from tests.bench.zoo import LLAMA_405B, Case, gpt3, llama_loss

MEMORY, SHOWN = 80e9, 5
MODELS: dict[str, tuple[Callable[[], Case], int, dict[str, Any]]] = {
    "gpt3": (lambda: gpt3(96, 1536), 1024, {}),
    "llama-405b": (lambda: llama_loss(126, 2048, 8192, LLAMA_405B), 16_384, {}),
    "qwen3-30b-a3b": (lambda: of_experts(qwen3, 48, 64), 64, {"capacity": 1.25, "seconds": 100.0}),
    "deepseek-v3": (lambda: of_experts(deepseek, 61, 256), 256, {"capacity": 1.25, "seconds": 100.0}),
}


def of_experts(make: Callable[[int], nn.Module], layers: int, batch: int) -> Case:
    """A model of experts with so many sequences of 4096 tokens."""
    with torch.device("meta"):
        return Loss(make(layers)).bfloat16(), (torch.zeros(batch, 4096, dtype=torch.int64),), {}


def show(name: str) -> None:
    """Prints the search of a model."""
    make, devices, more = MODELS[name]
    model, args, _ = make()
    options = {
        "devices": devices,
        "cluster": "h100",
        "memory": MEMORY,
        "recompute": "auto",
        "stages": True,
        "microbatches": True,
        **more,
    }
    start = time.process_time()
    rows = sbpc.sweep(model, args, **options)
    took = time.process_time() - start
    print(
        f"{name} on {devices:,} H100: {took:.0f} CPU s, {len(rows)} rows, no strategy takes less than {rows[0].lower_bound:.2f} s"
    )
    for row in rows[:SHOWN]:
        sizes = " ".join(f"{axis} {size}" for axis, size in zip(row.mesh.axes, row.mesh.sizes))
        parts = f"compute {row.compute_seconds:.2f} exposed {row.exposed_seconds:.2f} bubble {row.bubble_seconds:.2f}"
        about = f"m {row.microbatches} {row.schedule} recompute {row.recompute} {row.memory['total'] / 1e9:.0f} GB"
        print(f"  {row.cost:6.2f} s  {sizes} {about}: {parts}")
    start = time.process_time()
    plan = rows[0].plan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    told = f"{plan.cost.seconds:.2f} s, {plan.cost.memory['total'] / 1e9:.0f} GB a rank"
    print(
        f"  plan of the best row: {told}, {time.process_time() - start:.0f} CPU s; the process took {peak:.1f} GB",
        flush=True,
    )


def main() -> None:
    """Prints the models, each from a process of its own."""
    for name in sys.argv[1:] or MODELS:
        process = multiprocessing.get_context("spawn").Process(target=show, args=(name,))
        process.start()
        process.join()


if __name__ == "__main__":
    main()
