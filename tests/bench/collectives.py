"""Predicted against published bus bandwidths of collectives: `python -m tests.bench.collectives`.

collectives.json holds the tables with their sources: bytes of a message (of an all_gather what it makes, of a
reduce_scatter what it reads) and GB/s as nccl-tests counts them. From tables with `used` a figure of the named clusters
was taken; the others are held against the model alone. Messages below 1 MiB are shown but not counted: their tables
hold what it took a process to start them.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from sbpc import Mesh
from sbpc.mesh.cluster import named_cluster
from sbpc.mesh.collectives import WIRE, seconds_on

COUNTED = 1 << 20


def predicted(table: dict[str, Any], size: int) -> float:
    """The bus bandwidth that the model gives a message, in GB/s."""
    cluster = named_cluster(table["cluster"])
    cluster = replace(cluster, inter_bandwidth=table.get("inter_bandwidth", cluster.inter_bandwidth))
    if not table.get("nvls", True):
        cluster = replace(cluster, ways=tuple(way for way in cluster.ways if "nvls" not in way.algorithm))
    kind, ranks = table["collective"], table["ranks"]
    lines, _ = Mesh(x=ranks, cluster=cluster).lines((0,), kind)
    block = size if kind == "all_reduce" else size / ranks
    return WIRE[kind](ranks, block)[1] / seconds_on(lines, block) / 1e9


def main() -> None:
    """Prints every table, and how far the predictions are off."""
    off: dict[bool, list[float]] = {True: [], False: []}
    for table in json.loads(Path(__file__).with_suffix(".json").read_text()):
        held = "used" not in table
        print(
            f"{table['cluster']}, {table['collective']} over {table['ranks']} ranks on {table['nodes']} nodes", end=""
        )
        print(f"{'' if held else ' (used: ' + table['used'] + ')'}: {table['source']}, {table['date']}")
        for size, published in table["busbw"]:
            found = predicted(table, size)
            if size >= COUNTED:
                off[held].append(math.log(found / published))
            print(f"  {size:14,} bytes {published:8.2f} GB/s, predicted {found:8.2f} ({found / published - 1:+.0%})")
    for held, name in ((False, "tables that were used"), (True, "other tables")):
        errors = sorted(abs(math.exp(each) - 1) for each in off[held])
        print(
            f"{name}: {len(errors)} rows from 1 MiB on, off by {sum(errors) / len(errors):.0%} on average,",
            f"{errors[len(errors) // 2]:.0%} in the median, {errors[-1]:.0%} at most",
        )


if __name__ == "__main__":
    main()
