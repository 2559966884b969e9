"""`sbpc run`: train a model, as a rank where a launcher has set RANK, else as the launcher."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from sbpc.api import load
from sbpc.commands.options import add_planning, file_name, plan_of, rate, without_planning
from sbpc.commands.output import print_json, quiet
from sbpc.errors import SbpcError
from sbpc.report import print_plan
from sbpc.runtime import groups
from sbpc.runtime.launch import as_rank, launch
from sbpc.runtime.module import parallelize
from sbpc.target import load_target
from sbpc.train import OPTIMIZERS, optimizer_of, train

NAME = "run"
HELP = "train a model: under torchrun as its rank, else on ranks started on this machine"


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("target", metavar="TARGET", help="file.py:function")
    add_planning(parser)
    parser.add_argument("--plan", type=file_name, metavar="FILE", help="run this plan instead of planning")
    parser.add_argument(
        "--steps", type=int, default=10, help="how many steps, all on the arguments of the target (default: 10)"
    )
    parser.add_argument("--lr", type=rate, default=1e-3, help="learning rate (default: 0.001)")


def run(options: argparse.Namespace) -> int:
    """`sbpc run`: as a rank where a launcher has set RANK, else as the launcher."""
    if options.steps < 1:
        raise SbpcError(f"--steps {options.steps}\n  Train one step at least.")
    if options.optimizer not in OPTIMIZERS:
        raise SbpcError(f"cannot train with {options.optimizer!r}\n  Known are {', '.join(OPTIMIZERS)}.")
    if options.no_train:
        raise SbpcError("--no-train plans the forward alone, and `sbpc run` trains\n  Remove it.")
    if options.plan:
        without_planning(options, options.plan)
    if "RANK" in os.environ:
        with as_rank():
            return run_rank(options)
    with quiet(options):
        found = load(options.plan) if options.plan else plan_of(options, options.target)[0]
        if not options.json:
            print_plan(found, Console())
            sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="sbpc-run-") as folder:
        file = Path(folder, "plan.sbpc")
        found.save(file)
        arguments = ["-m", "sbpc", "run", options.target, "--plan", str(file)]
        arguments += ["--steps", str(options.steps), "--lr", str(options.lr)]
        arguments += ["--optimizer", options.optimizer, *(["--dtype", options.dtype] if options.dtype else [])]
        launch(arguments + ["--json"] * options.json + ["--verbose"] * options.verbose, found.mesh.ranks)
    return 0


def run_rank(options: argparse.Namespace) -> int:
    """Train as one rank of those that torchrun or `launch` has started."""
    with quiet(options):
        if options.plan:
            target = load_target(options.target, options.dtype)  # first: it may register ops and rules of its own
            found = load(options.plan)
        else:
            found, target = plan_of(options, options.target)
        if not found.options["train"]:
            raise SbpcError("the plan is for the forward alone\n  Plan without --no-train.")
        model = parallelize(target.model, found)
        first = os.environ["RANK"] == "0"
        start = time.perf_counter()

        def tell(step: int, loss: float) -> None:
            if first and not options.json:
                print(f"step {step:4d}  loss {loss:.6f}", flush=True)

        batches = [(target.args, target.kwargs)] * options.steps
        losses = train(model, batches, optimizer_of(options.optimizer, model, options.lr), tell)
        seconds = time.perf_counter() - start
        groups.stop()
    if first and options.json:
        mesh = dict(zip(found.mesh.axes, found.mesh.sizes))
        print_json({"mesh": mesh, "losses": losses, "seconds": seconds, "seconds_per_step": seconds / options.steps})
    elif first:
        print(f"{options.steps} steps in {seconds:.1f} s on {found.mesh.ranks} ranks")
    return 0
