"""The cost model against reality: real processes over links of known speed. `python -m tests.bench.testbed` (root).

On four hosts of 200 and of 400 Mbit/s `sbpc profile` writes a cluster file. With it, ten plans of a small GPT are held
against what is measured: seconds of communication (every collective by itself, between barriers: the median over steps,
summed), and bytes through the interfaces. Then a VGG-like net trains by the solver's plan, by DistributedDataParallel
and by a hand-written hybrid (data-parallel convolutions, tensor-parallel classifier), in turns in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Cluster, Mesh, Plan
from sbpc.runtime.executors import EXECUTORS
from sbpc.runtime.start import process_groups as groups
from tests import models
from tests.bench.bed import Bed, missing

HOSTS = 4
GPT = {"batch": 32, "seq": 64, "vocab": 1024, "width": 256, "heads": 8, "layers": 2, "tied": False}


# --- models and plans -------------------------------------------------------------------------------------------------
class VGG(nn.Module):
    """Most parameters in the classifier, most flops in the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, pool in ((64, True), (128, True), (256, False), (256, True), (512, True)):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else [])]
            channels = width
        self.features = nn.Sequential(*layers, nn.Flatten())
        linear = nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 100)
        self.classifier = nn.Sequential(*linear)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.features(x)), labels)


def build(name: str, batch: int = 128) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model and its batch, the same on every rank."""
    torch.manual_seed(0)
    if name == "gpt":
        return models.gpt2(**GPT)  # type: ignore[arg-type]
    return VGG(), (torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,)))


ROWS = {"*qkv.weight": "S(0)", "*up.weight": "S(0)", "*proj.weight": "S(1)", "*down.weight": "S(1)"}
HIDDEN = "gelu", "gelu_1"  # the hidden values of the two blocks: dims batch, sequence, width
EVERY = "*.weight", "*.bias"


def ten_plans(cluster: Cluster) -> dict[str, Plan]:
    """Plans of the GPT that differ: by experts' pins, by random pins, by the solver alone."""
    model, args = build("gpt")
    one, two = Mesh(t=HOSTS, cluster=cluster), Mesh(d=2, t=2, cluster=cluster)

    def pinned(mesh: Mesh, hidden: str, homes: dict[str, str], inputs: str | None = None) -> Plan:
        pins = {**homes, **dict.fromkeys(HIDDEN, hidden)}
        return sbpc.plan(model, args, mesh, pin=pins, inputs=inputs and [inputs, inputs])

    def drawn(mesh: Mesh, seed: int) -> Plan:
        draw = random.Random(seed)
        matrices = [name for name, parameter in model.named_parameters() if parameter.dim() == 2]
        homes = {name: f"{draw.choice(['S(0)', 'S(1)', 'B'])}@{draw.choice(mesh.axes)}" for name in matrices}
        hidden = {name: f"S({draw.randrange(3)})@{draw.choice(mesh.axes)}" for name in HIDDEN}
        return sbpc.plan(model, args, mesh, pin={**homes, **hidden})

    half = sbpc.plan(model, args, Mesh(t=1)).cost.memory["total"] / 2
    rows = {name: f"{state}@t" for name, state in ROWS.items()}
    both = {name: f"{state}@t,S({1 - int(state[2])})@d" for name, state in ROWS.items()}
    return {
        "data": pinned(one, "S(0)@t", dict.fromkeys(EVERY, "B@t"), "S(0)@t"),
        "fsdp": pinned(one, "S(0)@t", dict.fromkeys(EVERY, "S(0)@t"), "S(0)@t"),
        "tensor": pinned(one, "S(2)@t", rows),
        "sequence": pinned(one, "S(1)@t", {}),
        "data x tensor": pinned(two, "S(0)@d,S(2)@t", {name: f"{text},B@d" for name, text in rows.items()}, "S(0)@d"),
        "fsdp x tensor": pinned(two, "S(0)@d,S(2)@t", both, "S(0)@d"),
        "random, one axis": drawn(one, 1),
        "random, two axes": drawn(two, 2),
        "solver, one axis": sbpc.plan(model, args, one, memory=half),
        "solver, two axes": sbpc.plan(model, args, two, memory=half),
    }


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


def timed(gm: torch.fx.GraphModule) -> Callable[[list[Tensor]], Any]:
    """The executor that runs programs in this way."""

    def run(given: list[Tensor]) -> Any:
        taken = given.copy()
        given.clear()
        return Timed(gm).run(*taken)

    return run


EXECUTORS["timed"] = timed


def sent() -> int:
    """Bytes that this host has sent."""
    dist.barrier()
    time.sleep(0.1)
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def everyone(mine: Any) -> list[Any]:
    """What every rank gives."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def local_args(plan: Plan, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """This rank's shards of the inputs."""
    at = plan.mesh.coordinates(dist.get_rank())
    given = [layout for port, layout in plan.given.items() if port.kind == "input"]
    return tuple(layout.shard(x, plan.mesh.sizes, at) for layout, x in zip(given, args))


def measure_plan(file: str, steps: int) -> dict[str, Any]:
    """Seconds and bytes of a plan's communication in a step of the GPT."""
    plan = sbpc.load(file)
    net, args = build("gpt")
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
    after = sent()
    return {
        "seconds": sum(statistics.median(column) for column in zip(*slowest)),
        "bytes": max(everyone((after - before) / steps)),
        "collectives": len(slowest[0]),
    }


def trainers(file: str) -> dict[str, Callable[[], None]]:
    """Ways to do one step of the VGG on the same batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    groups.start("cpu")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    _, (x, labels) = build("vgg")
    mine, target = x.chunk(ranks)[rank], labels.chunk(ranks)[rank]

    def step_of(net: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], None]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, foreach=False)

        def step() -> None:
            optimizer.zero_grad()
            forward().backward()
            optimizer.step()

        return step

    plan = sbpc.load(file)
    solved = sbpc.parallelize(build("vgg")[0], plan, device="cpu")
    given = local_args(plan, (x, labels))
    data = DistributedDataParallel(build("vgg")[0], gradient_as_bucket_view=True)
    hybrid = build("vgg")[0]
    whole = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=None or _replicate(), use_local_output=True
    )
    parallelize_module(
        hybrid, init_device_mesh("cpu", (ranks,)),
        {"classifier": whole, "classifier.0": ColwiseParallel(), "classifier.2": RowwiseParallel()},
    )  # fmt: skip
    features = DistributedDataParallel(hybrid.features, gradient_as_bucket_view=True)

    def hybrid_loss() -> Tensor:
        found = features(mine)
        found.register_hook(lambda g: g * ranks)  # the mean over ranks of shares of one loss is to be their sum
        return F.cross_entropy(hybrid.classifier(found), labels)

    return {
        "solver": step_of(solved, lambda: solved(*given)),
        "ddp": step_of(data, lambda: data(mine, target)),
        "hybrid": step_of(hybrid, hybrid_loss),
    }


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


def measure_training(file: str, rounds: int) -> dict[str, Any]:
    """Seconds of a step and bytes of each way to train, in turns."""
    steps = trainers(file)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    moved: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            before = sent()
            dist.barrier()
            start = time.perf_counter()
            step()
            took = time.perf_counter() - start
            after = sent()
            if turn:
                seconds[name].append(max(everyone(took)))
                moved[name].append(max(everyone(after - before)))
    return {
        name: {"seconds": statistics.median(seconds[name]), "bytes": statistics.median(moved[name])} for name in steps
    }


def worker(options: argparse.Namespace) -> None:
    """One rank: measure what the folder asks for; rank 0 writes the figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = Path(options.folder)
    groups.start("cpu")
    if options.worker == "gpt":
        files = sorted(folder.glob("gpt-*.sbpc"))
        found = {file.stem.removeprefix("gpt-"): measure_plan(str(file), options.steps) for file in files}
    else:
        found = measure_training(str(folder / "vgg.sbpc"), options.steps)
    if dist.get_rank() == 0:
        (folder / f"{options.worker}.json").write_text(json.dumps(found))
    dist.barrier()
    groups.stop()


# --- the driver -------------------------------------------------------------------------------------------------------
def bench(mbit: float, options: argparse.Namespace) -> dict[str, Any]:
    """Everything at one speed of the links."""
    me = [sys.executable, "-m", "tests.bench.testbed", "--steps", str(options.steps)]
    with tempfile.TemporaryDirectory() as name, Bed(HOSTS, mbit) as bed:
        folder = Path(name)
        file = folder / "cluster.json"
        bed.run(
            [
                sys.executable,
                "-m",
                "sbpc",
                "profile",
                "--repeats",
                str(2 * options.steps + 1),
                "--name",
                f"{mbit:g} Mbit/s",
                "-o",
                str(file),
            ]
        )
        cluster = Cluster.load(file)
        found: dict[str, Any] = {"mbit": mbit, "cluster": cluster.figures(), "gpt": [], "vgg": []}
        show_rates(cluster)
        if "gpt" in options.only:
            plans = ten_plans(cluster)
            for title, plan in plans.items():
                plan.save(folder / f"gpt-{title}.sbpc")
            bed.run([*me, "--worker", "gpt", "--folder", name])
            measured = json.loads((folder / "gpt.json").read_text())
            found["gpt"] = [row(title, plan, measured[title]) for title, plan in plans.items()]
        if "vgg" in options.only:
            net, args = build("vgg")
            plan = sbpc.plan(net, args, Mesh(x=HOSTS, cluster=cluster), optimizer="momentum")
            plan.save(folder / "vgg.sbpc")
            found["vgg"] = vgg_rows(plan, bed, me, name)
    return found


def show_rates(cluster: Cluster) -> None:
    """The measured rates."""
    print(f"\n{cluster.source}\n{cluster.peak / 1e9:.1f} Gflop/s, {cluster.memory_bandwidth / 1e9:.1f} GB/s of memory")
    print(f"{cluster.inter_bandwidth / 1e6:.1f} MB/s, {1e6 * cluster.inter_latency:.0f} us a round")
    for rate in cluster.collectives:
        print(
            f"  {rate.collective:15} {rate.ranks} ranks  {1e6 * (rate.latency or 0):7.0f} us  "
            f"efficiency {rate.efficiency:.3f}  bytes on the wire x {rate.traffic:.3f}  {1e6 * rate.least:7.0f} us at least"
        )


def row(title: str, plan: Plan, measured: dict[str, Any]) -> dict[str, Any]:
    """Predicted against measured, printed."""
    predicted, moved = plan.cost.comm_seconds, sum(plan.cost.bytes_on_wire.values())
    found = {
        "plan": title, "predicted_seconds": predicted, "measured_seconds": measured["seconds"],
        "seconds_error": predicted / measured["seconds"] - 1, "predicted_bytes": moved,
        "measured_bytes": measured["bytes"], "bytes_error": moved / measured["bytes"] - 1,
    }  # fmt: skip
    print(
        f"  {title:22} {measured['collectives']:4} collectives  {predicted:7.3f} s predicted {measured['seconds']:7.3f} s "
        f"measured ({100 * found['seconds_error']:+5.1f} %)  {moved / 1e6:8.3f} MB predicted "
        f"{measured['bytes'] / 1e6:8.3f} MB measured ({100 * found['bytes_error']:+5.2f} %)",
        flush=True,
    )
    return found


def vgg_rows(plan: Plan, bed: Bed, me: list[str], folder: str) -> list[dict[str, Any]]:
    """The three ways to train the VGG, printed."""
    bed.run([*me, "--worker", "vgg", "--folder", folder])
    measured = json.loads(Path(folder, "vgg.json").read_text())
    slow, hand = measured["ddp"]["seconds"], measured["hybrid"]["bytes"]
    for name, found in measured.items():
        print(
            f"  VGG, {name:7} {found['seconds']:6.3f} s a step ({slow / found['seconds']:.2f} x as fast as ddp)  "
            f"{found['bytes'] / 1e6:7.2f} MB a rank ({found['bytes'] / hand:.3f} x the hybrid's)",
            flush=True,
        )
    print(
        f"  predicted: {plan.cost.seconds:.3f} s a step, {plan.cost.comm_seconds:.3f} s of them communicating, "
        f"{sum(plan.cost.bytes_on_wire.values()) / 1e6:.2f} MB"
    )
    return [{"name": name, **found} for name, found in measured.items()]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[200, 400], help="speeds of the links")
    parser.add_argument("--steps", type=int, default=9, help="of each measurement")
    parser.add_argument("--only", nargs="+", choices=("gpt", "vgg"), default=("gpt", "vgg"))
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument("--worker", choices=("gpt", "vgg"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    if why := missing():
        raise SystemExit(f"testbed: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the beds are removed
    found = [bench(mbit, options) for mbit in options.mbit]
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
