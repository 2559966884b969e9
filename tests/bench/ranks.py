"""What the ranks of a bed do together: give each other values, count bytes, and take steps in turns."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist


def everyone(mine: Any) -> list[Any]:
    """What every rank gives."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def sent() -> int:
    """Bytes that this host has sent."""
    dist.barrier()
    time.sleep(0.05)
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def in_turns(steps: Mapping[str, Callable[[], Any]], rounds: int, warm: int = 1) -> dict[str, dict[str, float]]:
    """Medians over rounds of what a step takes and sends on its busiest rank. The steps take turns, so that all meet the same machine.

    warm: rounds before those that count.
    """
    found = {name: {"seconds": list[float](), "bytes": list[float]()} for name in steps}
    for turn in range(warm + rounds):
        for name, step in steps.items():
            before = sent()
            dist.barrier()
            start = time.perf_counter()
            step()
            took = time.perf_counter() - start
            after = sent()
            if turn >= warm:
                ranks = everyone((took, after - before))
                found[name]["seconds"].append(max(seconds for seconds, _ in ranks))
                found[name]["bytes"].append(max(count for _, count in ranks))
    return {name: {key: statistics.median(values) for key, values in each.items()} for name, each in found.items()}
