"""Predicted against published seconds of a step, A100 clusters: `python -m tests.bench.published FILE`.

FILE holds the tables as JSON: Megatron-LM SC21 table 1 (arXiv 2104.04473), Korthikanti et al. table 5 (arXiv 2205.05198), MT-NLG
(arXiv 2201.11990). Layouts are the expert's inside a stage, stages and micro-batches those of the row. Two constants, how many times as
long computing and communicating take as the cluster's figures say, are fitted on every third row and shown on the others.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sbpc import Mesh
from sbpc.api.planning import prepare
from sbpc.api.recompute import forms_of
from sbpc.api.staging import units_of
from sbpc.api.strategies import Candidate, Search
from sbpc.graph.ports import GRADIENT, PARAMETER
from sbpc.passes.loop.recompute import recompute
from sbpc.plans.staged.estimate import Estimate, Unit
from tests.bench.zoo import Decoder, tokens

SEQ, VOCAB = 2048, 51_200
ONCE = (PARAMETER, GRADIENT)


def rows_of(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """The published rows, each with the seconds of a step."""
    rows = []
    for row in tables["megatron_sc21_table1"]["rows"]:
        h, layers, batch = row["h"], row["L"], row["gbs"]
        flops = 96 * batch * SEQ * layers * h**2 * (1 + SEQ / (6 * h) + VOCAB / (16 * layers * h))
        chunks = layers // (row["pp"] * row["layers_per_virtual_stage"]) if row["layers_per_virtual_stage"] else 1
        rows.append({**row, "seconds": flops / (row["tflops_per_gpu"] * 1e12 * row["gpus"]), "form": "full", "chunks": chunks})
    for row in tables["korthikanti_table5"]["rows"]:
        row = {**row, "chunks": row["interleave"]}
        rows.append({**row, "seconds": row["full_recompute_s"], "form": "full"})
        rows.append({**row, "seconds": row["seqpar_selective_s"], "form": "selective", "sp": True})
    about = tables["mtnlg_530B_iteration"]
    for row in about["rows"]:
        dp = row["gpus"] // (about["tp"] * about["pp"])
        model = {**about["model"], "model": "MT-NLG", "tp": about["tp"], "pp": about["pp"], "dp": dp, "gbs": about["gbs"], "mbs": 1}
        rows.append({**model, "gpus": row["gpus"], "seconds": row["iter_s"], "form": "full", "chunks": 1})
    return rows


def units(row: dict[str, Any]) -> list[Unit]:
    """The units of a row's model on the mesh of a stage."""
    with torch.device("meta"):
        model = Decoder(VOCAB, SEQ, row["h"], row["a"], 2).to(torch.bfloat16)
    count = row["gbs"] // (row["dp"] * row["mbs"])
    task = prepare(model, (tokens(row["gbs"], SEQ, VOCAB), tokens(row["gbs"], SEQ, VOCAB)))
    gm = recompute(task.gm, forms_of(task.gm, row["form"]))
    mesh = Mesh(cluster="a100", pipe=row["pp"], data=row["dp"], tensor=row["tp"])
    inner = Mesh(cluster="a100", **{axis: row[key] for axis, key in (("data", "dp"), ("tensor", "tp")) if row[key] > 1})
    search = Search(lambda: task, task, {"blocks": row["L"]}, "adamw", None, "none", 0.0)
    candidate = Candidate(mesh, "1f1b", count, 0.0, 0.0, 0.0)
    baseline = "data" if row["tp"] == 1 else "megatron+sp" if row.get("sp") else "megatron"
    key = mesh.sizes[1:], count, "none", False
    search.chunks[key] = units_of(gm, task.stages, task.about, inner, count, False, ONCE, baseline)
    return search.measured(candidate, "none", False, ONCE)


def predicted(row: dict[str, Any], parts: list[Unit], computing: float, communicating: float) -> float:
    """The seconds of a row's step, with computing and communicating so many times as slow as the cluster's figures say."""
    scaled = [
        replace(unit, cost=replace(
            unit.cost, compute={key: computing * each for key, each in unit.cost.compute.items()},
            comm={key: communicating * each for key, each in unit.cost.comm.items()},
        ))
        for unit in parts
    ]  # fmt: skip
    mesh = Mesh(cluster="a100", pipe=row["pp"], data=row["dp"], tensor=row["tp"])
    count = row["gbs"] // (row["dp"] * row["mbs"])
    schedule = f"interleaved:{row['chunks']}" if row["chunks"] > 1 else "1f1b"
    return Estimate(mesh, "pipe", scaled, schedule, count).cost.seconds


def main() -> None:
    """Prints the rows with their errors."""
    rows = rows_of(json.loads(Path(sys.argv[1]).read_text()))
    start = time.process_time()
    parts = [units(row) for row in rows]
    fitted = rows[::3]

    def error(x: float, y: float) -> float:
        return sum(abs(predicted(r, p, x, y) / r["seconds"] - 1) for r, p in zip(fitted, parts[::3]))

    grid = itertools.product([1 + 0.05 * at for at in range(17)], [0.0, 0.5, 1.0, 1.5, 2.0])
    x, y = min(grid, key=lambda pair: error(*pair))
    errors = []
    for at, (row, part) in enumerate(zip(rows, parts)):
        found = predicted(row, part, x, y)
        off = found / row["seconds"] - 1
        errors += [abs(off)] if at % 3 else []
        kind = "fitted" if at % 3 == 0 else ""
        print(f"{row['model']:>8} {row['gpus']:5} GPUs {row['form']:>9}: {row['seconds']:8.2f} s, predicted {found:8.2f} ({off:+.1%}) {kind}")
    print(f"computing x {x:.2f}, communicating x {y:.2f}; other rows {sum(errors) / len(errors):.1%} on average, {max(errors):.1%} at most")
    print(f"{time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    main()
