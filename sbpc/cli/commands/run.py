"""`sbpc run`: train a model or run an exported file, as a rank where a launcher has set RANK, else as the launcher.

It repeats the target's arguments at every step: that shows that a plan trains, and is no training script. With an exported
file, `--inputs FILE.safetensors` holds one batch after another.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sbpc.api.planning import load
from sbpc.cli.commands.job import Job, job_of
from sbpc.cli.options import add_planning, file_name, is_plan, plan_of, rate, register, seconds, without_planning
from sbpc.cli.output import check_file, print_json, quiet
from sbpc.cli.train_loop import OPTIMIZERS, optimizer_of, train
from sbpc.errors import SbpcError
from sbpc.graph.pytree import flatten
from sbpc.inspect.report import print_plan
from sbpc.runtime.exported import load_programs
from sbpc.runtime.start import process_groups as groups
from sbpc.runtime.start.launch import as_rank, launch
from sbpc.runtime.state.checkpoint import Checkpoints
from sbpc.runtime.state.weight_files import save_tensors

NAME = "run"
HELP = "train a model, or run an exported file: under torchrun as its rank, else on ranks started on this machine"
OF_FILES = ("infer", "weights", "inputs", "output")
PASSED = ("steps", "lr", "optimizer", "dtype", *OF_FILES, "checkpoint", "every", "timeout", "check_nans", "json", "verbose")


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "target", metavar="TARGET_OR_FILE", help="file.py:function, or a file that `sbpc export` wrote (*.sbpc)"
    )
    add_planning(parser)
    parser.add_argument("--plan", type=file_name, metavar="FILE", help="run this plan instead of planning")
    parser.add_argument(
        "--steps", type=int, default=10, help="how many steps in all, on the arguments of the target (default: 10)"
    )
    parser.add_argument("--lr", type=rate, default=1e-3, help="learning rate (default: 0.001)")
    parser.add_argument(
        "--checkpoint", type=file_name, metavar="DIR", help="go on from the last checkpoint in this folder, and save there"
    )
    parser.add_argument("--every", type=int, metavar="N", default=100, help="save after every N steps (default: 100)")
    parser.add_argument(
        "--timeout", type=seconds, metavar="S", help=f"end when a rank waits longer for another (default: {groups.TIMEOUT:g})"
    )
    parser.add_argument(
        "--check-nans", action="store_true", help="end at the first op that makes NaN, and say where it is; slow"
    )
    of_files = parser.add_argument_group("of exported files")
    of_files.add_argument("--infer", action="store_true", help="run the forward alone on every batch, instead of training")
    of_files.add_argument(
        "--weights", type=file_name, metavar="FILE", help="safetensors (default: the file beside, *.safetensors)"
    )
    of_files.add_argument(
        "--inputs",
        type=file_name,
        metavar="FILE",
        help="safetensors of the arguments, named 0, 1, ...; a further first dim holds one batch after another "
        "(default: the file beside, *.inputs.safetensors)",
    )
    of_files.add_argument(
        "--output", type=file_name, metavar="FILE", help="with --infer: write the results, named 0, 1, ..., as safetensors"
    )


def run(options: argparse.Namespace) -> int:
    """`sbpc run`: as a rank where a launcher has set RANK, else as the launcher."""
    check(options)
    if "RANK" in os.environ:
        with as_rank():
            return run_rank(options)
    if is_plan(options.target):
        ranks = load_programs(options.target, "inference" if options.infer else "train").mesh.ranks
        launch(arguments(options), ranks)
        return 0
    with quiet(options):
        if options.plan:
            register(options, options.target)
        found = load(options.plan) if options.plan else plan_of(options, options.target)[0]
        if not options.json:
            print_plan(found, Console())
            sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="sbpc-run-") as folder:
        file = Path(folder, "plan.sbpc")
        found.save(file)
        launch([*arguments(options), "--plan", str(file)], found.mesh.ranks)
    return 0


def check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before anything is started."""
    for name in ("steps", "every"):
        if getattr(options, name) < 1:
            raise SbpcError(f"--{name} {getattr(options, name)}\n  Give 1 at least.")
    if options.optimizer not in OPTIMIZERS:
        raise SbpcError(f"cannot train with {options.optimizer!r}\n  Known are {', '.join(OPTIMIZERS)}.")
    if is_plan(options.target):
        without_planning(options, options.target, "plan", "dtype", "rules")
        check_file(options.output)
        return
    given = [f"--{name}" for name in OF_FILES if getattr(options, name)]
    if given:
        raise SbpcError(f"{', '.join(given)} is of use with exported files alone\n  Export the target first.")
    if options.no_train:
        raise SbpcError("--no-train plans the forward alone, and `sbpc run` trains\n  Remove it.")
    if options.plan:
        without_planning(options, options.plan)


def arguments(options: argparse.Namespace) -> list[str]:
    """The arguments of a rank, which gets no options of planning."""
    found = ["-m", "sbpc", "run", options.target]
    for name in PASSED:
        value = getattr(options, name)
        if value is not None and value is not False:
            found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return found + [part for file in options.rules for part in ("--rules", file)]


def run_rank(options: argparse.Namespace) -> int:
    """Train or infer as one rank of those that torchrun or `launch` has started."""
    with quiet(options):
        groups.start(timeout=options.timeout)
        job = job_of(options)
        first = os.environ["RANK"] == "0"
        start = time.perf_counter()
        found = infer(job, options, first) if options.infer else train_job(job, options, first)
        found["seconds"] = time.perf_counter() - start
        groups.stop()
    done = len(found["losses"]) if "losses" in found else job.batches
    found["mesh"], found["seconds_per_step"] = dict(zip(job.mesh.axes, job.mesh.sizes)), found["seconds"] / max(done, 1)
    if first and options.json:
        print_json(found)
    elif first:
        print(f"{done} steps in {found['seconds']:.1f} s on {job.mesh.ranks} ranks")
    return 0


def train_job(job: Job, options: argparse.Namespace, first: bool) -> dict[str, Any]:
    """Train from the last checkpoint to the last step; the losses, and the step from which they are."""
    optimizer = optimizer_of(options.optimizer, job.module, options.lr)
    checkpoints = Checkpoints(options.checkpoint) if options.checkpoint else None
    start = checkpoints.load(job.module, optimizer) if checkpoints else 0

    def tell(count: int, loss: float) -> None:
        step = start + count
        if first and not options.json:
            print(f"step {step:4d}  loss {loss:.6f}", flush=True)
        if checkpoints and (step % options.every == 0 or step == options.steps):
            checkpoints.save(step, job.module, optimizer)

    losses = train(job.module, map(job.batch, range(start, options.steps)), optimizer, tell)
    if checkpoints:
        checkpoints.wait()
    return {"losses": losses, "start": start}


def infer(job: Job, options: argparse.Namespace, first: bool) -> dict[str, Any]:
    """Run the forward on every batch; the shapes of the results, one batch after another along a first dim."""
    rows: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for step in range(job.batches):
            args, kwargs = job.batch(step)
            rows.append([leaf.clone() for leaf in flatten(job.module(*args, **kwargs), "the results")[0]])
    results = {str(number): torch.stack(leaves) for number, leaves in enumerate(zip(*rows))}
    if first and options.output:
        save_tensors(results, options.output)
    for name, tensor in results.items():
        if first and not options.json:
            print(f"result {name}  {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
    return {"results": {name: list(tensor.shape) for name, tensor in results.items()}, "output": options.output}
