"""Predicted against published seconds: `python -m tests.bench.published [FILE] [serial | seconds]`.

First kernels (kernels.json beside this file), then steps on H100 (h100.json), then those on A100 of FILE: Megatron-LM SC21 table 1
(arXiv 2104.04473), Korthikanti et al. table 5 (arXiv 2205.05198), MT-NLG (arXiv 2201.11990). Nothing is fitted: figures are those of the
named clusters. Layouts are the expert's inside a stage; stages, chunks on each and micro-batches those of the row. MT-NLG's rows are told
apart: the stages of a 530B model took 0.22 s for each micro-batch on its engine, 0.17 to 0.19 s on Megatron-LM. So are H100 rows with
stages, whose chunks nobody tells. On A100 nothing overlaps ("serial") unless "seconds" is asked for: Megatron-LM of those days waited
for each all-reduce inside a block, and reduced gradients behind the last backward. On H100 it does not.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpc import Mesh
from sbpc.api.candidates import block_times
from sbpc.api.recompute import forms_of
from sbpc.api.staging import short_plans
from sbpc.api.task import prepare
from sbpc.mesh.cluster import Cluster, named_cluster
from sbpc.mesh.kernels import Attention, Product
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.recompute import recompute
from sbpc.plans.staged.estimate import repeated
from tests.bench.zoo import tokens

HERE = Path(__file__).parent
SEQ, VOCAB = 2048, 51_200
APART = "MT-NLG"


class Block(nn.Module):
    """A block as Megatron-LM computes it: attention written out, as it was then (scale, mask and softmax were one kernel, here the
    softmax), or by one kernel with a causal mask."""

    def __init__(self, width: int, heads: int, flash: bool) -> None:
        super().__init__()
        self.heads, self.flash = heads, flash
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        if self.flash:
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        pairs = self.dropped(torch.softmax(q @ k.transpose(-1, -2), -1))
        return self.out((pairs @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropped(self.attention(self.norm1(x)))
        return x + self.dropped(self.down(F.gelu(self.up(self.norm2(x)))))

    def dropped(self, x: Tensor) -> Tensor:
        """What stands for a dropout, which was one kernel there: forward and backward together move as many bytes."""
        return x if self.flash else F.relu(x)


class Decoder(nn.Module):
    """Learned positions and blocks, the head tied to the embedding; (tokens, targets) -> cross-entropy."""

    def __init__(
        self, width: int, heads: int, layers: int, seq: int = SEQ, vocab: int = VOCAB, flash: bool = False
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*(Block(width, heads, flash) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
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


def h100_rows() -> list[dict[str, Any]]:
    """The rows of h100.json, each with the seconds of a step."""
    rows = []
    for about in json.loads((HERE / "h100.json").read_text()).values():
        s, vocab = about["s"], about["V"]
        for row in about["rows"]:
            h, layers = row["h"], row["L"]
            flops = 72 * row["gbs"] * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
            took = flops / (row["tflops_per_gpu"] * 1e12 * row["gpus"])
            rows.append({**row, "s": s, "V": vocab, "seconds": took, "form": "none", "chunks": 1, "sp": True})
    return rows


def predicted(row: dict[str, Any], cluster: Cluster, objective: str) -> float:
    """The seconds of a row's training step: its model with two blocks is planned, each a stage, and they are put in a row."""
    seq, vocab = row.get("s", SEQ), row.get("V", VOCAB)
    with torch.device("meta"):
        model = Decoder(row["h"], row["a"], 2, seq, vocab, row["form"] == "none").to(torch.bfloat16)
    task = prepare(model, (tokens(row["gbs"], seq, vocab), tokens(row["gbs"], seq, vocab)))
    count = row["gbs"] // (row["dp"] * row["mbs"])
    loop = loop_of(recompute(task.gm, forms_of(task.gm, row["form"])), count)
    baseline = "data" if row["tp"] == 1 else "megatron+sp" if row.get("sp") else "megatron"
    mesh = Mesh(cluster=cluster, pipe=row["pp"], data=row["dp"], tensor=row["tp"])
    inner = {axis: size for axis, size in zip(mesh.axes[1:], mesh.sizes[1:]) if size > 1}
    blocks, plan_at = short_plans(
        loop, task.stages, task.about, Mesh(cluster=cluster, **inner), "pipe", "adamw", baseline
    )
    times = [block_times({"blocks": row["L"]}, block) for block in blocks]
    plan = plan_at(0)
    plan = replace(plan, options=replace(plan.options, objective=objective))
    schedule = f"interleaved:{row['chunks']}" if row["chunks"] > 1 else "1f1b"
    return repeated(plan, times, mesh, "pipe", schedule, count).cost.step_seconds


def kernel_errors() -> Iterator[tuple[str, list[float]]]:
    """Yields names of tables of kernels, and by row how far predictions are off."""
    tables = json.loads((HERE / "kernels.json").read_text())
    about = tables["products"]
    cluster = named_cluster(about["device"])
    assert cluster.device is not None
    warm = replace(cluster, device=replace(cluster.device, product=about["part of the peak"]))
    found = []
    for b, m, n, k, tflops in about["rows"]:
        moved = 2 * b * (m * k + k * n + m * n)
        took = float(warm.kernel_seconds("aten.bmm", 2.0 * b * m * n * k, moved, Product(b, m, n, k)))
        found.append(took * tflops * 1e12 / (2 * b * m * n * k) - 1)
    yield "products on h100, short runs", found
    for row in tables["attention"]["rows"]:
        errors = []
        for length, tflops in zip(tables["attention"]["lengths"], row["tflops"]):
            pairs = 16_384 // length * (2048 // row["width"]) * length**2
            flops, causal = (4 * pairs * row["width"], 10 * pairs * row["width"]), int(row["causal"])
            shapes = [Attention(pairs, length, causal, backward) for backward in (False, True)]
            took = sum(
                float(named_cluster(row["device"]).kernel_seconds("attention", each, 0.0, shape))
                for each, shape in zip(flops, shapes)
            )
            if tflops:
                errors.append(took * tflops * 1e12 / (sum(flops) * (1 - causal / 2)) - 1)
        yield f"attention on {row['device']}, heads of {row['width']}{', causal' * row['causal']}", errors


def told(name: str, errors: list[float]) -> str:
    """A line about errors."""
    sizes = [abs(each) for each in errors]
    return f"{name}: {sum(sizes) / len(sizes):.1%} on average, {max(sizes):.1%} at most"


def compare(rows: list[dict[str, Any]], name: str, objective: str) -> None:
    """Prints rows with their errors, and by kind how large these are."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        seconds = predicted(row, named_cluster(name), objective)
        off = seconds / row["seconds"] - 1
        apart = APART if row["model"] == APART else "with stages" if "s" in row and row["pp"] > 1 else "rows"
        errors.setdefault(f"{name}, {apart}", []).append(off)
        what = f"{row['model']:>8} {row['gpus']:5} GPUs {row['chunks']} x {row['pp']:2} chunks {row['form']:>9}"
        print(f"{what}: {row['seconds']:8.2f} s, predicted {seconds:8.2f} ({off:+.1%})", flush=True)
    for kind, found in errors.items():
        print(told(kind, found), flush=True)


def main() -> None:
    """Prints kernels and rows with their errors."""
    start = time.process_time()
    for name, errors in kernel_errors():
        print(told(name, errors))
    compare(h100_rows(), "h100", "seconds")
    if len(sys.argv) > 1:
        rows = rows_of(json.loads(Path(sys.argv[1]).read_text()))
        compare(rows, "a100", sys.argv[2] if len(sys.argv) > 2 else "serial")
    print(f"{time.process_time() - start:.0f} CPU s")


if __name__ == "__main__":
    main()
