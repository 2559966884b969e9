"""Plans against reality: real processes over links of known speed. `python -m tests.bench.testbed [--only steps gpt ...]` (root).

On four hosts of 200 Mbit/s `sbpc profile` writes a cluster file. With it:

- collectives: of ten plans of a small GPT predicted and measured seconds of communication (every collective by itself, between
  barriers), and the bytes through the interfaces.
- steps: predicted and measured seconds of the steps of these plans, in which collectives run beside computing.
- draws: the same of plans drawn at random, and Spearman's correlation.
- gpt, gpt2, vgg: what sbpc takes for a step of training, and what PyTorch's own strategies take; see `VERSUS`. Of sbpc's best plan also
  the share of what can be hidden that is hidden.
- loop: the same in micro-batches, gradients communicated once a step.
- experts: what sbpc takes for a step of a GPT with experts, with and without sharing out their rows (the state R), and what PyTorch's
  expert parallelism takes.
- eight: what sbpc takes for a step of training with gradients sent in float32, and in 8 bits (reduce="int8").

Steps are measured in turns in one run; a figure is a median over rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

import sbpc
from sbpc import Cluster, Mesh, Plan
from sbpc.cli.commands.profile import print_cluster
from sbpc.graph.about import FLOAT32
from sbpc.mesh.collectives import INT8
from sbpc.passes import annotate
from sbpc.plans.timeline import COMPUTE, timeline
from sbpc.runtime.executors import EXECUTORS
from sbpc.runtime.start import process_groups as groups
from tests.bench import by_hand, experts_by_hand  # noqa: F401 - which adds a net and a strategy
from tests.bench.bed import Bed, missing
from tests.bench.plans_to_measure import build, random_plans, ten_plans
from tests.bench.ranks import everyone, in_turns, sent

HOSTS = 4
PREDICTED: dict[str, Callable[[Cluster, int], dict[str, Plan]]] = {
    "collectives": ten_plans,
    "steps": ten_plans,
    "draws": random_plans,
}
LOOP, PIPELINE, STAGED, EIGHT, EXPERTS = "loop", "pipeline", "sbpc, stages", "eight", "experts"
WITHOUT = ", without R"
# net, its sizes, strategies with their micro-batches
VERSUS: dict[str, tuple[str, dict[str, int], list[tuple[str, int]]]] = {
    LOOP: ("gpt", {"batch": 64}, [("ddp", 4), ("zero2", 4), ("tp x dp", 4)]),
    "gpt": ("gpt", {}, [("ddp", 1), ("zero2", 1), ("tp x dp", 1), (PIPELINE, 4)]),
    "gpt2": ("gpt", {"batch": 32, "layers": 2}, [("ddp", 1), ("zero2", 1), ("tp x dp", 1)]),
    "vgg": ("vgg", {}, [("ddp", 1), ("zero2", 1), ("hybrid", 1)]),
    EIGHT: ("gpt", {}, []),
    EXPERTS: ("experts", {}, [("ep", 1)]),
}
PARTS = *PREDICTED, *VERSUS
# in 4 micro-batches
STAGES = {LOOP: {"pipe": 2, "d": HOSTS // 2}, "gpt": {"pipe": HOSTS}, "gpt2": {"pipe": 2, "d": HOSTS // 2}}
IN_ORDER, SERIAL = "sbpc, the better one in order", "sbpc, objective=serial"


# --- what runs on a host ----------------------------------------------------------------------------------------------
class Timed(torch.fx.Interpreter):
    """Runs a program, every collective by itself, from when all ranks stand at it until all are through; its seconds are
    noted. A rank that went on to compute would take the core of one that is not through, which hosts do not share."""

    noted: list[float] = []  # noqa: RUF012

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "_c10d_functional" not in str(target) or "wait_tensor" in str(target):
            return super().call_function(target, args, kwargs)
        dist.barrier()
        start = time.perf_counter()
        found = torch.ops._c10d_functional.wait_tensor(super().call_function(target, args, kwargs))
        self.noted.append(time.perf_counter() - start)
        dist.barrier()
        return found


def timed(gm: torch.fx.GraphModule) -> Callable[[list[torch.Tensor]], Any]:
    """The executor that runs programs in this way."""

    def run(given: list[torch.Tensor]) -> Any:
        taken = given.copy()
        given.clear()
        return Timed(gm).run(*taken)

    return run


EXECUTORS["timed"] = timed


def local_args(plan: Plan, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """This rank's shards of the inputs."""
    at = plan.mesh.coordinates(dist.get_rank())
    given = [layout for port, layout in plan.given.items() if port.kind == "input"]
    return tuple(layout.shard(x, plan.mesh.sizes, at) for layout, x in zip(given, args))


def measure_collectives(file: Path, steps: int) -> dict[str, float]:
    """Seconds and bytes of a plan's communication in a step of the GPT."""
    plan = sbpc.load(file)
    net, args = build()
    args = local_args(plan, args)
    watched, plain = (sbpc.parallelize(net, plan, executor=how, device="cpu") for how in ("timed", "code"))
    columns: list[list[float]] = []
    for _ in range(steps + 1):
        Timed.noted.clear()
        watched(*args).backward()
        columns.append(list(Timed.noted))
    slowest = [[max(ranks) for ranks in zip(*every)] for every in zip(*everyone(columns[1:]))]
    before = sent()
    for _ in range(steps):
        plain(*args).backward()
    moved = max(everyone((sent() - before) / steps))
    return {"seconds": sum(statistics.median(column) for column in zip(*slowest)), "bytes": moved}


def predicted_step(file: Path, small: bool) -> Callable[[], Any]:
    """A step of the GPT by a plan: forward and backward, which is what plans predict."""
    plan = sbpc.load(file)
    net, args = build(small)
    args, module = local_args(plan, args), sbpc.parallelize(net, plan, device="cpu")

    def step() -> None:
        module.zero_grad()
        module.step(*args)

    return step


def training_step(file: Path, part: str) -> Callable[[], Any]:
    """A step of training by a plan, as `by_hand.strategy` gives one."""
    name, sizes, _ = VERSUS[part]
    net, batch = by_hand.build(name, **sizes)
    module = sbpc.parallelize(net, sbpc.load(file), device="cpu")
    optimizer = by_hand.optimizer_of(module)

    def step() -> None:
        module.step(*batch)
        optimizer.step()
        optimizer.zero_grad()

    return step


def worker(part: str, folder: Path, rounds: int) -> None:
    """One rank: measures the plans of a part, and what they are held against; rank 0 writes the figures."""
    torch.set_num_threads(1)
    groups.start("cpu")
    files = {file.stem: file for file in sorted((folder / part).glob("*.sbpc"))}
    if part == "collectives":
        found = {name: measure_collectives(file, rounds) for name, file in files.items()}
    elif part in PREDICTED:
        found = in_turns({name: predicted_step(file, part == "draws") for name, file in files.items()}, rounds)
    else:
        name, sizes, strategies = VERSUS[part]
        steps = {each: by_hand.strategy(each, *by_hand.build(name, **sizes), many) for each, many in strategies}
        found = in_turns(steps | {name: training_step(file, part) for name, file in files.items()}, rounds, warm=2)
    if dist.get_rank() == 0:
        (folder / f"{part}.json").write_text(json.dumps(found))
    dist.barrier()
    groups.stop()


# --- the driver -------------------------------------------------------------------------------------------------------
def kept(folder: Path, make: Callable[[Cluster], dict[str, Plan]], cluster: Cluster) -> dict[str, Plan]:
    """Plans in a folder, by name; made if there are none."""
    if not folder.exists():
        folder.mkdir()
        for title, plan in make(cluster).items():
            plan.save(folder / f"{title}.sbpc")
    return {file.stem: sbpc.load(file) for file in sorted(folder.glob("*.sbpc"))}  # type: ignore[misc]


def measured(part: str, bed: Bed, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds and bytes of a step of everything that a part measures, by name."""
    me = [sys.executable, "-m", "tests.bench.testbed", "--worker", "--only", part]
    bed.run([*me, "--rounds", str(options.rounds), "--folder", str(options.folder)])
    found: dict[str, dict[str, float]] = json.loads((options.folder / f"{part}.json").read_text())
    return found


def predictions(part: str, plans: dict[str, Plan], found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Prints what plans predict beside what is measured, and how far they are apart."""
    rows = []
    for title, plan in plans.items():
        cost, real = plan.cost, found[title]
        seconds, moved = cost.comm_seconds if part == "collectives" else cost.seconds, sum(cost.bytes_on_wire.values())
        row = {"plan": title, "predicted": seconds, "predicted bytes": moved, **real}
        row["error"], row["error of bytes"] = seconds / real["seconds"] - 1, moved / real["bytes"] - 1
        row |= {"microbatches": plan.options.microbatches, "panels": plan.options.panels}
        print(
            f"  {title:22} {seconds:7.3f} s predicted {real['seconds']:7.3f} s measured ({row['error']:+6.1%})  {moved / 1e6:8.3f} MB "
            f"predicted ({row['error of bytes']:+7.2%})  halves {row['microbatches']}  panels {row['panels']}  "
            f"compute {cost.compute_seconds:.3f} s  communication {cost.comm_seconds:.3f} s",
            flush=True,
        )
        rows.append(row)
    ranks = [np.argsort(np.argsort([row[key] for row in rows])) for key in ("predicted", "seconds")]
    errors = sorted(abs(row["error"]) for row in rows)
    print(
        f"  worst {errors[-1]:.1%}, median {statistics.median(errors):.1%}, Spearman {np.corrcoef(ranks)[0, 1]:.3f}",
        flush=True,
    )
    return rows


def hideable(plan: Plan) -> float:
    """Seconds that can be hidden at most: in the forward, and in the backward, of computing and communicating what takes less."""
    busy = {phase: [0.0, 0.0] for phase in ("forward", "backward")}
    for event in timeline(plan.unscheduled, plan.mesh):
        busy[event.phase][event.stream == COMPUTE] += event.end - event.start
    return sum(map(min, busy.values()))


def plans_of(part: str, cluster: Cluster) -> dict[str, Plan]:
    """The plans of sbpc for a net: on one axis, on two, in stages (see `STAGES`), the better one of the first two in order, and the
    best of these where nothing overlaps.
    """
    name, sizes, _ = VERSUS[part]
    net, (inputs, targets) = by_hand.build(name, **sizes)
    about = {"loss": by_hand.loss_of, "targets": (targets,), "optimizer": "momentum"}
    meshes = {"one axis": Mesh(t=HOSTS, cluster=cluster), "two axes": Mesh(d=2, t=HOSTS // 2, cluster=cluster)}
    many = 4 if part == LOOP else 1
    if part == EIGHT:
        return {
            f"sbpc, {title}, {kind}": sbpc.plan(net, (inputs,), mesh, **about, reduce=kind)
            for title, mesh in meshes.items()
            for kind in (FLOAT32, INT8)
        }
    if part == EXPERTS:
        found = {}
        for title, mesh in meshes.items():
            found[f"sbpc, {title}"] = sbpc.plan(net, (inputs,), mesh, **about)
            with mock.patch.object(annotate, "share_rows", lambda *_: None):
                found[f"sbpc, {title}{WITHOUT}"] = sbpc.plan(net, (inputs,), mesh, **about)
        return found
    plans: dict[str, Plan] = {
        f"sbpc, {title}": sbpc.plan(net, (inputs,), mesh, **about, microbatches=many) for title, mesh in meshes.items()
    }
    if part in STAGES:
        staged = Mesh(**STAGES[part], cluster=cluster)
        plans[STAGED] = sbpc.plan(net, (inputs,), staged, **about, stages="pipe", microbatches=4)
    if part == LOOP:
        return plans
    serial = [sbpc.plan(net, (inputs,), mesh, **about, objective="serial") for mesh in meshes.values()]
    best = min((plan for title, plan in plans.items() if title != STAGED), key=lambda plan: plan.cost.seconds)
    in_order = replace(best, options=best.options.in_order)
    return plans | {IN_ORDER: in_order, SERIAL: min(serial, key=lambda plan: plan.cost.seconds)}


def versus(part: str, plans: dict[str, Plan], found: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Prints what a step of training takes by hand and by sbpc, and what of a plan's communication is hidden."""
    rows = []
    for title, real in found.items():
        told = ""
        if title in plans:
            cost, options = plans[title].cost, plans[title].options
            told = f"  {cost.seconds:6.3f} s predicted, compute {cost.compute_seconds:.3f} s, communication {cost.comm_seconds:.3f} s, "
            told += f"micro-batches {options.microbatches}, panels {options.panels}"
        print(f"  {title:30} {real['seconds']:6.3f} s  {real['bytes'] / 1e6:7.2f} MB{told}", flush=True)
        rows.append({"name": title, **real})
    seconds = {row["name"]: row["seconds"] for row in rows}
    if part == EIGHT:
        least = {kind: min(seconds[name] for name in seconds if name.endswith(kind)) for kind in (FLOAT32, INT8)}
        print(f"  float32 / int8: {least[FLOAT32] / least[INT8]:.3f}", flush=True)
        return rows
    if part == EXPERTS:
        chosen = min(
            (title for title in plans if not title.endswith(WITHOUT)), key=lambda each: plans[each].cost.seconds
        )
        ours, without = seconds[chosen], min(seconds[title] for title in plans if title.endswith(WITHOUT))
        print(f"  without R / sbpc: {without / ours:.3f}  by hand / sbpc: {seconds['ep'] / ours:.3f}")
        print(
            f"  {chosen}: predicted / measured - 1: {plans[chosen].cost.step_seconds / ours - 1:+.1%}",
            flush=True,
        )
        return rows
    hand = min(value for title, value in seconds.items() if title not in plans and title != PIPELINE)
    ours = [title for title in plans if title not in (IN_ORDER, SERIAL, STAGED)]
    print(f"  by hand / sbpc: {hand / min(seconds[title] for title in ours):.3f}", flush=True)
    if STAGED in plans:
        print(f"  by hand / sbpc, stages: {hand / seconds[STAGED]:.3f}")
    if PIPELINE in seconds:
        print(f"  pipeline by hand / sbpc, stages: {seconds[PIPELINE] / seconds[STAGED]:.3f}")
    if part == LOOP:
        return rows
    print(f"  by hand / sbpc without overlap: {hand / seconds[SERIAL]:.3f}")
    best = min(ours, key=lambda title: plans[title].cost.seconds)
    most, cost = hideable(plans[best]), plans[best].cost
    told, real = cost.compute_seconds + cost.comm_seconds - cost.seconds, seconds[IN_ORDER] - seconds[best]
    print(
        f"  of {most:.3f} s that can be hidden {told / most:.0%} are in the simulation, {real / most:.0%} as measured",
        flush=True,
    )
    return rows


def bench(options: argparse.Namespace) -> None:
    """Plans and measures the parts that are asked for."""
    with Bed(HOSTS, options.mbit) as bed:
        file = options.folder / "cluster.json"
        if not file.exists():
            bed.run(
                [
                    sys.executable,
                    "-m",
                    "sbpc",
                    "profile",
                    "--repeats",
                    "15",
                    "--name",
                    f"{options.mbit:g} Mbit/s",
                    "-o",
                    str(file),
                ]
            )
        cluster, console = Cluster.load(file), Console(width=150)
        print_cluster(cluster, console)
        for part in options.only:
            console.print(f"{part}, {options.mbit:g} Mbit/s")
            make = partial(PREDICTED[part], hosts=HOSTS) if part in PREDICTED else partial(plans_of, part)
            plans = kept(options.folder / part, make, cluster)
            if not options.plan:
                (predictions if part in PREDICTED else versus)(part, plans, measured(part, bed, options))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", choices=PARTS, default=PARTS, metavar="PART", help=f"some of {', '.join(PARTS)}"
    )
    parser.add_argument("--mbit", type=float, default=200, help="speed of the links")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the cluster file, plans and figures are kept; what is there is not made again",
    )
    parser.add_argument("--plan", action="store_true", help="make the plans and measure none of them")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.only[0], options.folder, options.rounds)
        return
    if why := missing():
        raise SystemExit(f"testbed: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the bed is removed
    with tempfile.TemporaryDirectory() as name:
        options.folder = options.folder or Path(name)
        options.folder.mkdir(exist_ok=True)
        bench(options)


if __name__ == "__main__":
    main()
