"""Whole strategies, predicted against measured: `python -m tests.bench.strategies [--hosts 4 8] [--mbit 200]` (root).

On a bed of hosts with slow links `sbpc profile` writes a cluster file. With it ten strategies of a GPT of eight layers are planned,
and what `sbpc.sweep` takes to be the best one. All of them take turns in one run, two steps each, of which the second counts. Printed
are predicted and measured seconds of a step (medians, of the slowest rank), the errors, Spearman's correlation, and how far the
search's choice is from the best that was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

import sbpc
from sbpc import Cluster, Mesh
from sbpc.cli.commands.profile import print_cluster
from sbpc.runtime.start import process_groups as groups
from tests import models
from tests.bench.bed import Bed, missing
from tests.bench.ranks import everyone

GPT = {"batch": 32, "seq": 64, "vocab": 2048, "width": 256, "heads": 8, "layers": 8, "tied": False}
CHOICE = "the search's choice"
Strategy = tuple[dict[str, int], dict[str, Any]]


def staged(pipe: int, microbatches: int, schedule: str = "1f1b", **inside: int) -> Strategy:
    """A strategy of stages; `inside` are the axes of a stage."""
    return {"pipe": pipe, **inside}, {"stages": "pipe", "microbatches": microbatches, "schedule": schedule}


STRATEGIES: dict[int, list[Strategy]] = {
    4: [
        ({"x": 4}, {"microbatches": 1}), ({"x": 2, "y": 2}, {"microbatches": 1}), ({"x": 2, "y": 2}, {"microbatches": 2}),
        staged(1, 4, x=2, y=2), staged(2, 4, x=2), staged(2, 16, x=2), staged(4, 4), staged(4, 16), staged(4, 8, "gpipe"),
        staged(4, 8, "zbv"),
    ],
    8: [
        ({"x": 8}, {"microbatches": 1}), ({"x": 4, "y": 2}, {"microbatches": 1}), ({"x": 4, "y": 2}, {"microbatches": 2}),
        staged(2, 4, x=4), staged(2, 8, x=2, y=2), staged(4, 4, x=2), staged(4, 16, x=2), staged(8, 8), staged(8, 16),
        staged(4, 8, "zbv", x=2),
    ],
}  # fmt: skip


def build() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """The model and its batch, the same on every rank."""
    torch.manual_seed(0)
    return models.gpt2(**GPT)  # type: ignore[arg-type]


def title(axes: dict[str, int], options: dict[str, Any]) -> str:
    """A strategy in words."""
    mesh = " x ".join(f"{name} {size}" for name, size in axes.items())
    return f"{mesh}, {options.get('schedule', 'no stages')}, m = {options['microbatches']}"


def worker(folder: Path, rounds: int) -> None:
    """One rank: trains by every plan in the folder in turns; rank 0 writes the seconds."""
    torch.set_num_threads(1)
    groups.start("cpu")
    _, args = build()
    steps, seconds = {}, dict[str, list[float]]()
    for file in sorted(folder.glob("*.sbpc")):
        module: Any = sbpc.parallelize(build()[0], sbpc.load(file), device="cpu")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, foreach=False)
        steps[file.stem], seconds[file.stem] = (module, optimizer), []
    for turn in range(rounds + 1):
        for name, (module, optimizer) in steps.items():
            for _ in range(2):  # the first one warms memory and caches, which another strategy had
                dist.barrier()
                start = time.perf_counter()
                module.step(*args)
                dist.barrier()
                took = time.perf_counter() - start
                optimizer.step()
                optimizer.zero_grad()
            if turn:
                seconds[name].append(max(everyone(took)))
    if dist.get_rank() == 0:
        (folder / "seconds.json").write_text(
            json.dumps({name: statistics.median(each) for name, each in seconds.items()})
        )
    dist.barrier()
    groups.stop()


def bench(hosts: int, mbit: float, rounds: int) -> None:
    """All strategies of so many hosts."""
    model, args = build()
    with tempfile.TemporaryDirectory() as name, Bed(hosts, mbit) as bed:
        folder = Path(name)
        bed.run([sys.executable, "-m", "sbpc", "profile", "--repeats", "7", "-o", str(folder / "cluster.json")])
        cluster = Cluster.load(folder / "cluster.json")
        plans: dict[str, Any] = {}
        for axes, options in STRATEGIES[hosts]:
            plans[title(axes, options)] = sbpc.plan(
                model, args, Mesh(cluster=cluster, **axes), optimizer="momentum", **options
            )
        best = sbpc.sweep(
            model, args, devices=hosts, cluster=cluster, stages=True, microbatches=True, optimizer="momentum"
        )[0]
        plans[CHOICE] = best.plan
        for at, plan in enumerate(plans.values()):
            plan.save(folder / f"{at:02}.sbpc")
        bed.run([sys.executable, "-m", "tests.bench.strategies", "--worker", name, "--rounds", str(rounds)])
        found = json.loads((folder / "seconds.json").read_text())
    rows = [(name, plan.cost.seconds, found[f"{at:02}"]) for at, (name, plan) in enumerate(plans.items())]
    print_cluster(cluster, Console(width=150))
    print(f"\n{hosts} hosts, {mbit:g} Mbit/s; the search chose {best.mesh}, {best.schedule}, m = {best.microbatches}")
    for name, predicted, measured in rows:
        print(f"  {name:36} predicted {predicted:7.3f} s  measured {measured:7.3f} s  {predicted / measured - 1:+7.1%}")
    guess, real = (np.array([row[at] for row in rows]) for at in (1, 2))
    errors, order = abs(guess / real - 1), [values.argsort().argsort() for values in (guess, real)]
    print(
        f"  error {errors.mean():.1%} on average, {errors.max():.1%} at most; Spearman {np.corrcoef(*order)[0, 1]:.2f}; "
        f"the search's choice takes {real[-1] / real.min():.2f} x the best measured",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="*", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--mbit", type=float, default=200.0, help="speed of a host's link each way")
    parser.add_argument("--rounds", type=int, default=5, help="measured steps of each strategy")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.rounds)
    elif why := missing():
        sys.exit(why)
    else:
        for hosts in options.hosts:
            bench(hosts, options.mbit, options.rounds)


if __name__ == "__main__":
    main()
