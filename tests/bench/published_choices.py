"""What the search chooses beside what Megatron-LM published: `python -m tests.bench.published_choices FILE [models]`.

FILE holds Megatron-LM SC21 table 1 (arXiv 2104.04473) as `tests.bench.published` reads it: for ten models the ranks of tensor and pipe
that its authors took on so many A100 of 80 GB. Each model is searched with everything recomputed, as there. Printed are the best row, the best one with the published ranks of tensor and pipe, and
how much longer that takes.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sbpc.api.candidates import candidates
from sbpc.api.short_model import short_model
from sbpc.api.strategies import Search, StrategyRow
from sbpc.api.task import prepare
from sbpc.mesh.cluster import Cluster, named_cluster
from sbpc.plans.options import FULL
from tests.bench.published import SEQ, VOCAB, Decoder, rows_of
from tests.bench.zoo import tokens

MEMORY, CLOSE = 80e9, 1.05
SECONDS = 60.0  # of CPU, of a search


def choices(row: dict[str, Any], cluster: Cluster) -> tuple[StrategyRow, StrategyRow]:
    """The search's best row, and the best one with the ranks of tensor and pipe of a published row."""
    with torch.device("meta"):
        model = Decoder(row["h"], row["a"], row["L"]).to(torch.bfloat16)
    args = tokens(row["gbs"], SEQ, VOCAB), tokens(row["gbs"], SEQ, VOCAB)
    short, lengths = short_model(model)
    task = prepare(short, args)
    search = Search(functools.cache(lambda: prepare(model, args)), task, lengths, "adamw", MEMORY, FULL, SECONDS)
    found = candidates(task, lengths, row["gpus"], cluster, True, True, "adamw", MEMORY)
    best = search.rows(found)[0]
    theirs = [each for each in found if (each.mesh.sizes[0], each.mesh.sizes[2]) == (row["pp"], row["tp"])]
    return best, search.rows(theirs)[0]


def told(row: StrategyRow) -> str:
    """A row in words."""
    pipe, data, tensor = row.mesh.sizes
    return f"pipe {pipe:2} data {data:3} tensor {tensor} m {row.microbatches:4} {row.schedule:13} {row.cost:7.2f} s"


def main() -> None:
    """Prints the models."""
    rows, names = rows_of(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2:]
    cluster, close = named_cluster("a100"), []
    table = [row for row in rows if "tflops_per_gpu" in row and (not names or row["model"] in names)]
    for row in table:
        start = time.process_time()
        best, theirs = choices(row, cluster)
        close.append(theirs.cost <= CLOSE * best.cost)
        took = time.process_time() - start
        print(f"{row['model']:>6} {row['gpus']:5} GPUs  search {told(best)}", flush=True)
        print(f"{'':13}published {told(theirs)}  {theirs.cost / best.cost:.3f} x  ({took:.0f} CPU s)", flush=True)
    print(
        f"the published ranks of tensor and pipe are within {CLOSE - 1:.0%} of the best row in {sum(close)} of {len(close)} models"
    )


if __name__ == "__main__":
    main()
