"""Predicted against published seconds of a step, A100 clusters: `python -m tests.bench.published FILE [serial | seconds]`.

FILE holds the tables as JSON: Megatron-LM SC21 table 1 (arXiv 2104.04473), Korthikanti et al. table 5 (arXiv 2205.05198), MT-NLG
(arXiv 2201.11990). Layouts are the expert's inside a stage; stages, chunks on each and micro-batches those of the row. Three constants,
how many times as long products, memory traffic and links take as the data sheet's figures say, are fitted on every third row and shown
on the others. MT-NLG's rows are told apart and not fitted: the stages of a 530B model took 0.22 s for each micro-batch on its engine,
0.17 to 0.19 s on Megatron-LM. Nothing overlaps ("serial") unless "seconds" is asked for: Megatron-LM of those days waited for each
all-reduce inside a block, and reduced gradients behind the last backward.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpc import Mesh
from sbpc.api.candidates import block_times
from sbpc.api.planning import prepare
from sbpc.api.recompute import forms_of
from sbpc.api.staging import short_plans
from sbpc.mesh.cluster import Cluster, named_cluster
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.recompute import recompute
from sbpc.plans.plan import Plan
from sbpc.plans.staged.chunk_cost import ProgramCost
from sbpc.plans.staged.chunk_programs import ChunkPrograms
from sbpc.plans.staged.estimate import repeated
from tests.bench.zoo import tokens

SEQ, VOCAB = 2048, 51_200
APART = "MT-NLG"
OBJECTIVES = {False: "serial", True: "seconds"}  # by whether collectives run beside computing
# products, memory traffic, links: how many times as long they take as the data sheet says
Rates = tuple[float, float, float]


class Block(nn.Module):
    """A block as Megatron-LM computed it then: attention written out. Its scale, mask and softmax were one kernel, here the softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        return self.out((torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Learned positions and blocks, the head tied to the embedding; (tokens, targets) -> cross-entropy."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(SEQ, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens) + self.positions(torch.arange(SEQ, device=tokens.device)))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def rows_of(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """The published rows, each with the seconds of a step."""
    rows = []
    for row in tables["megatron_sc21_table1"]["rows"]:
        h, layers, batch = row["h"], row["L"], row["gbs"]
        flops = 96 * batch * SEQ * layers * h**2 * (1 + SEQ / (6 * h) + VOCAB / (16 * layers * h))
        chunks = layers // (row["pp"] * row["layers_per_virtual_stage"]) if row["layers_per_virtual_stage"] else 1
        rows.append(
            {**row, "seconds": flops / (row["tflops_per_gpu"] * 1e12 * row["gpus"]), "form": "full", "chunks": chunks}
        )
    for row in tables["korthikanti_table5"]["rows"]:
        row = {**row, "chunks": row["interleave"]}
        rows.append({**row, "seconds": row["full_recompute_s"], "form": "full"})
        rows.append({**row, "seconds": row["seqpar_selective_s"], "form": "selective", "sp": True})
    about = tables["mtnlg_530B_iteration"]
    for row in about["rows"]:
        dp = row["gpus"] // (about["tp"] * about["pp"])
        model = {
            **about["model"],
            "model": APART,
            "tp": about["tp"],
            "pp": about["pp"],
            "dp": dp,
            "gbs": about["gbs"],
            "mbs": 1,
        }
        rows.append({**model, "gpus": row["gpus"], "seconds": row["iter_s"], "form": "full", "chunks": 1})
    return rows


@dataclass
class Measured:
    """The plan of a row's model with two blocks, each a stage, how often each stands in a row, and their programs."""

    plan: Plan
    times: list[int]
    programs: list[ChunkPrograms]


def measured(row: dict[str, Any], objective: str) -> Measured:
    """The plan of a row's model."""
    with torch.device("meta"):
        model = Decoder(row["h"], row["a"], 2).to(torch.bfloat16)
    task = prepare(model, (tokens(row["gbs"], SEQ, VOCAB), tokens(row["gbs"], SEQ, VOCAB)))
    loop = loop_of(recompute(task.gm, forms_of(task.gm, row["form"])), row["gbs"] // (row["dp"] * row["mbs"]))
    baseline = "data" if row["tp"] == 1 else "megatron+sp" if row.get("sp") else "megatron"
    mesh = inner(mesh_of(row, named_cluster("a100")))
    blocks, plan_at = short_plans(loop, task.stages, task.about, mesh, "pipe", "adamw", baseline)
    times = [block_times({"blocks": row["L"]}, block) for block in blocks]
    return Measured(
        plan_at(0), times, [ChunkPrograms(chunk, (), objective == "seconds") for chunk in plan_at(0).chunks]
    )


def mesh_of(row: dict[str, Any], cluster: Cluster) -> Mesh:
    """The mesh of a row."""
    return Mesh(cluster=cluster, pipe=row["pp"], data=row["dp"], tensor=row["tp"])


def inner(mesh: Mesh) -> Mesh:
    """The mesh of a stage, without axes of one rank."""
    return Mesh(cluster=mesh.cluster, **{axis: size for axis, size in zip(mesh.axes[1:], mesh.sizes[1:]) if size > 1})


def predicted(row: dict[str, Any], found: Measured, rates: Rates) -> float:
    """The seconds of a row's step at these rates."""
    sheet = named_cluster("a100")
    cluster = replace(
        sheet, peak=sheet.peak / rates[0], memory_bandwidth=sheet.memory_bandwidth / rates[1],
        intra_bandwidth=sheet.intra_bandwidth / rates[2], inter_bandwidth=sheet.inter_bandwidth / rates[2],
    )  # fmt: skip
    mesh = mesh_of(row, cluster)
    plan = replace(found.plan, options=replace(found.plan.options, objective=OBJECTIVES[found.programs[0].overlaps]))
    parts = []
    for part, programs in zip(plan.chunk_costs, found.programs):
        programs.plan.mesh = inner(mesh)  # what was scheduled stays in its order
        program = functools.cache(lambda which, programs=programs: ProgramCost.of(programs, programs.of(which)))
        parts.append(replace(part, program=program))
    plan.chunk_costs = parts
    schedule = f"interleaved:{row['chunks']}" if row["chunks"] > 1 else "1f1b"
    return repeated(plan, found.times, mesh, "pipe", schedule, row["gbs"] // (row["dp"] * row["mbs"])).cost.seconds


def fit(rows: list[dict[str, Any]], found: list[Measured]) -> Rates:
    """The rates with the least squares of relative errors, by Gauss and Newton: seconds are nearly linear in them."""

    def ratios(rates: np.ndarray) -> np.ndarray:
        return np.array([predicted(row, each, tuple(rates)) / row["seconds"] for row, each in zip(rows, found)])

    rates = np.full(3, 1.5)
    for _ in range(4):
        here = ratios(rates)
        slopes = np.array([(ratios(rates + step) - here) / 0.1 for step in 0.1 * np.eye(3)]).T
        rates = np.maximum(1.0, rates + np.linalg.lstsq(slopes, 1 - here, rcond=None)[0])
    return tuple(rates.round(2))


def main() -> None:
    """Prints the rows with their errors."""
    rows = rows_of(json.loads(Path(sys.argv[1]).read_text()))
    start = time.process_time()
    objective = sys.argv[2] if len(sys.argv) > 2 else OBJECTIVES[False]
    found = [measured(row, objective) for row in rows]
    fitted = [at for at in range(0, len(rows), 3) if rows[at]["model"] != APART]
    rates = fit([rows[at] for at in fitted], [found[at] for at in fitted])
    errors: dict[bool, list[float]] = {True: [], False: []}
    for at, (row, each) in enumerate(zip(rows, found)):
        seconds = predicted(row, each, rates)
        off = seconds / row["seconds"] - 1
        if at not in fitted:
            errors[row["model"] == APART].append(abs(off))
        kind = "fitted" if at in fitted else ""
        what = f"{row['model']:>8} {row['gpus']:5} GPUs {row['chunks']} x {row['pp']:2} chunks {row['form']:>9}"
        print(f"{what}: {row['seconds']:8.2f} s, predicted {seconds:8.2f} ({off:+.1%}) {kind}")
    print("products x {:.2f}, memory traffic x {:.2f}, links x {:.2f}".format(*rates))
    for apart, name in ((False, "other rows"), (True, APART)):
        print(f"{name}: {sum(errors[apart]) / len(errors[apart]):.1%} on average, {max(errors[apart]):.1%} at most")
    print(f"{time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    main()
