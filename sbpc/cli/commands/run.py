"""`sbpc run`: train a model or run an exported file, as a rank where a launcher has set RANK, else as the launcher.

It repeats the target's arguments at every step: that shows that a plan trains, and is no training script. With an
exported file, `--inputs FILE.safetensors` holds one batch after another.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sbpc.api.loading import load, load_exported
from sbpc.cli.options import (
    add_file,
    add_planning,
    is_plan,
    plan_of,
    rate,
    register,
    seconds,
    target_of,
    without_planning,
)
from sbpc.cli.output import check_file, print_json, quiet
from sbpc.cli.traced_run import TracedSteps, check_steps
from sbpc.cli.train_loop import OPTIMIZERS, optimizer_of, train
from sbpc.errors import PlanError, SbpcError
from sbpc.graph.loss import number_of_loss
from sbpc.graph.ports import INPUT, Port
from sbpc.graph.pytree import flatten, unflatten
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs
from sbpc.plans.usage import Usage
from sbpc.runtime.exported import inputs_beside, module_of, weights_beside
from sbpc.runtime.module import parallelize
from sbpc.runtime.own_rows import own_of
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.launch import as_rank, launch
from sbpc.runtime.state.checkpoint import Checkpoints, whole_steps
from sbpc.runtime.state.weight_files import read_tensors, save_tensors

NAME = "run"
HELP = "train a model, or run an exported file: under torchrun as its rank, else on ranks started on this machine"
Batch = tuple[tuple[Any, ...], dict[str, Any]]  # args, kwargs
OF_FILES = ("infer", "weights", "inputs", "output")
FLAGS = ("check_nans", "json", "verbose")
# on to the ranks
PASSED = ("steps", "lr", "optimizer", "dtype", "executor", "trace", *OF_FILES, "checkpoint", "every", "timeout", *FLAGS)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    target = "file.py:function, or a file that `sbpc export` wrote (*.sbpc)"
    parser.add_argument("target", metavar="TARGET_OR_FILE", help=target)
    add_planning(parser)
    add_file(parser, "--plan", help="run this plan instead of planning")
    steps = "how many steps in all, on the arguments of the target (default: 10)"
    parser.add_argument("--steps", type=int, default=10, help=steps)
    parser.add_argument("--lr", type=rate, default=1e-3, help="learning rate (default: 0.001)")
    checkpoint = "go on from the last checkpoint in this folder, and save there"
    add_file(parser, "--checkpoint", metavar="DIR", help=checkpoint)
    parser.add_argument("--every", type=int, metavar="N", default=100, help="save after every N steps (default: 100)")
    timeout = f"end when a rank waits longer for another (default: {process_groups.TIMEOUT:g})"
    parser.add_argument("--timeout", type=seconds, metavar="S", help=timeout)
    executor = (
        "what runs the programs: generated code, Inductor's kernels, what is faster of both as one CUDA graph, or "
        "fx's interpreter (default: the fastest that the device has)"
    )
    parser.add_argument("--executor", choices=("code", "graph", "inductor", "interpreter"), help=executor)
    trace = "measure the last steps: write what ran when, predicted and measured, for Perfetto, and print a comparison"
    add_file(parser, "--trace", help=trace)
    check_nans = "end at the first op that makes NaN, and say where it is; slow"
    parser.add_argument("--check-nans", action="store_true", help=check_nans)
    add_of_files(parser.add_argument_group("of exported files"))


def add_of_files(group: Any) -> None:
    """Adds the options that are for exported files."""
    group.add_argument("--infer", action="store_true", help="run the forward alone on every batch, instead of training")
    add_file(group, "--weights", help="safetensors (default: the file beside, *.safetensors)")
    inputs = (
        "safetensors of the arguments, named 0, 1, ...; a further first dim holds one batch after another "
        "(default: the file beside, *.inputs.safetensors)"
    )
    add_file(group, "--inputs", help=inputs)
    add_file(group, "--output", help="with --infer: write the results, named 0, 1, ..., as safetensors")


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc run`: as a rank where a launcher has set RANK, else as the launcher."""
    check(options)
    if "RANK" in os.environ:
        with as_rank():
            return run_rank(options)
    if is_plan(options.target):
        exported = load_exported(options.target, "inference" if options.infer else "train")
        launch(arguments(options), exported.mesh.ranks)
        return 0
    with quiet(options):
        if options.plan:
            register(options, options.target)
        plan = load(options.plan) if options.plan else plan_of(options, options.target)[0]
        if plan.loop is None:
            number_of_loss(plan.ports, plan.shapes)  # before ranks are started
        if not options.json:
            print(plan)
            sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="sbpc-run-") as folder:
        file = Path(folder, "plan.sbpc")
        plan.save(file)
        launch([*arguments(options), "--plan", str(file)], plan.mesh.ranks)
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises SbpcError for options that contradict each other, before anything is started."""
    for name in ("steps", "every"):
        if getattr(options, name) < 1:
            raise SbpcError(f"--{name} {getattr(options, name)}\n  Give 1 at least.")
    if options.optimizer not in OPTIMIZERS:
        raise SbpcError(f"cannot train with {options.optimizer!r}\n  Known are {', '.join(OPTIMIZERS)}.")
    if options.check_nans and options.executor:
        raise SbpcError(
            f"--executor {options.executor} with --check-nans, which has an executor of its own\n  Remove one of them."
        )
    if options.trace:
        check_file(options.trace)
        check_steps(options.steps)
    other = [name for name in ("infer", "check_nans", "executor") if getattr(options, name)] if options.trace else []
    if other:
        what = f"--trace with --{other[0].replace('_', '-')}: it measures steps of training, run by generated code"
        raise SbpcError(f"{what}\n  Remove one of them.")
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
    """Returns the arguments of a rank, which gets no options of planning."""
    texts = ["-m", "sbpc", "run", options.target]
    for name in PASSED:
        value = getattr(options, name)
        if value is not None and value is not False:
            texts += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return texts + [text for file in options.rules for text in ("--rules", file)]


def run_rank(options: argparse.Namespace) -> int:
    """Trains or infers as one rank of those that torchrun or `launch` has started."""
    with quiet(options):
        process_groups.start(timeout=options.timeout)
        job = job_of(options)
        first = os.environ["RANK"] == "0"
        start = time.perf_counter()
        figures = infer(job, options, first) if options.infer else train_job(job, options, first)
        figures["seconds"] = time.perf_counter() - start
        process_groups.stop()
    steps = len(figures["losses"]) if "losses" in figures else job.batches
    figures["mesh"] = dict(zip(job.plan.mesh.axes, job.plan.mesh.sizes))
    figures["seconds_per_step"] = figures["seconds"] / max(steps, 1)
    if first and options.json:
        print_json(figures)
    elif first:
        print(f"{steps} steps in {figures['seconds']:.1f} s on {job.plan.mesh.ranks} ranks")
        for line in speed_lines(job.plan, figures.get("step_seconds")):
            print(line)
    return 0


def speed_lines(plan: Plan | Programs, seconds: float | None) -> list[str]:
    """Returns lines about the speed of a step of training as measured, and, of a plan, as predicted."""
    if seconds is None:
        return []
    measured = f"measured  {seconds:.3g} s a step, the median after the first"
    if not isinstance(plan, Plan):
        return [measured]
    predicted = f"predicted {plan.cost.step_seconds:.3g} s a step"
    both = (measured, Usage.of(plan.cost, plan.mesh, plan.shapes, seconds)), (predicted, plan.usage)
    return [line if usage is None else f"{line}: {usage}" for line, usage in both]


def train_job(job: Job, options: argparse.Namespace, first: bool) -> dict[str, Any]:
    """Trains from the last checkpoint to the last step. Returns the losses and the step at which they start."""
    optimizer = optimizer_of(options.optimizer, job.module, options.lr)
    checkpoints = Checkpoints(options.checkpoint) if options.checkpoint else None
    start = checkpoints.load(job.module, optimizer) if checkpoints else 0

    stamps: list[float] = []

    def tell(count: int, loss: float) -> None:
        step = start + count
        stamps.append(time.perf_counter())
        if first and not options.json:
            print(f"step {step:4d}  loss {loss:.6f}", flush=True)
        if checkpoints and (step % options.every == 0 or step == options.steps):
            checkpoints.save(step, job.module, optimizer)

    traced = None
    if options.trace:
        assert isinstance(job.plan, Plan)
        traced = TracedSteps(job.module, job.plan, options.steps - start)
    run: Any = traced or job.module.step
    number = job.plan.options.loss
    figures: dict[str, Any] = {"start": start}
    figures["losses"] = train(job.module, map(job.batch, range(start, options.steps)), optimizer, tell, run, number)
    if len(stamps) > 1:
        figures["step_seconds"] = statistics.median(later - earlier for earlier, later in itertools.pairwise(stamps))
    if checkpoints:
        checkpoints.wait()
    if traced and first:
        figures["trace"], report = traced.finish(options.trace)
        if not options.json:
            print(report.text())
    return figures


def infer(job: Job, options: argparse.Namespace, first: bool) -> dict[str, Any]:
    """Runs the forward on every batch. Returns the shapes of the results, in which a first dim counts the batches."""
    by_batch: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for step in range(job.batches):
            args, kwargs = job.batch(step)
            by_batch.append([leaf.clone() for leaf in flatten(job.module(*args, **kwargs), "the results")[0]])
    results = {str(number): torch.stack(leaves) for number, leaves in enumerate(zip(*by_batch))}
    if first and options.output:
        save_tensors(results, options.output)
    shapes = {name: list(tensor.shape) for name, tensor in results.items()}
    for name, tensor in results.items():
        if first and not options.json:
            print(f"result {name}  {str(tensor.dtype).removeprefix('torch.')} {shapes[name]}")
    return {"results": shapes, "output": options.output}


# --- what a rank runs -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Job:
    """What a rank runs. module: as this rank runs it. batch: the arguments of a step by its number. batches: how
    many differ."""

    module: nn.Module
    plan: Plan | Programs
    batch: Callable[[int], Batch]
    batches: int = 1


def job_of(options: argparse.Namespace) -> Job:
    """Returns the job of this rank that the options ask for."""
    executor = "nans" if options.check_nans else options.executor or "auto"
    if is_plan(options.target):
        return job_of_file(options, executor)
    if options.plan:
        target = target_of(options, options.target)  # first: a plan may hold ops that the target registers
        plan = load(options.plan)
    else:
        plan, target = plan_of(options, options.target)
    if not plan.options.train:
        raise SbpcError("the plan is for the forward alone\n  Plan without --no-train.")
    module = parallelize(target.model, plan, executor=executor)
    leaves, structure = flatten((target.args, target.kwargs), "the arguments")
    return Job(module, plan, lambda step: unflatten(structure, own_of(plan, leaves)))


def job_of_file(options: argparse.Namespace, executor: str) -> Job:
    """Returns the job of an exported file. To be compared with its prediction, it runs the programs of the plan that
    the file holds."""
    programs = (
        load(options.target)
        if options.trace
        else load_exported(options.target, "inference" if options.infer else "train")
    )
    resumed = options.checkpoint and whole_steps(Path(options.checkpoint))
    weights = options.weights or weights_beside(options.target)
    module = module_of(programs, "zeros" if resumed and not Path(weights).exists() else weights, executor)
    tensors = read_tensors(options.inputs or inputs_beside(options.target))
    return Job(module, programs, *batches_of(programs, tensors))


def batches_of(programs: Plan | Programs, tensors: dict[str, torch.Tensor]) -> tuple[Callable[[int], Batch], int]:
    """Returns the arguments of every step, and how many steps differ, from tensors named "0", "1", ...

    A tensor with a further first dim holds one batch after another. Raises PlanError if they do not fit the programs.
    """
    ports = [port for port in programs.ports.inputs if port.kind == INPUT]
    missing = [port.name for port in ports if port.name not in tensors]
    if missing:
        raise PlanError(
            f"the inputs lack {', '.join(missing)}\n  Name the tensors of the arguments 0, 1, ... in order."
        )
    given = {port: tensors[port.name] for port in ports}
    batched = {port: is_batched(port, tensor, programs.shapes[port]) for port, tensor in given.items()}
    counts = [given[port].shape[0] for port in ports if batched[port]]
    if len(set(counts)) > 1 or 0 in counts:
        raise PlanError(f"the inputs hold {counts} batches\n  Give as many of each, one at least.")
    batches = counts[0] if counts else 1
    sizes, coordinates = programs.mesh.sizes, programs.mesh.coordinates(dist.get_rank())

    def batch(step: int) -> Batch:
        whole = [tensor[step % batches] if batched[port] else tensor for port, tensor in given.items()]
        if programs.loop is not None or programs.options.own_rows is not None:
            alone = not programs.options.train  # rank 0 gets all results
            return unflatten(programs.ports.arguments, own_of(programs, whole, alone))
        shards = [programs.given[port].shard(tensor, sizes, coordinates) for port, tensor in zip(ports, whole)]
        return unflatten(programs.ports.arguments, shards)

    return batch, batches


def is_batched(port: Port, given: torch.Tensor, planned: torch.Tensor) -> bool:
    """Returns whether an input has a further first dim. Raises PlanError if it does not fit the programs otherwise."""
    batched = given.dim() == planned.dim() + 1
    if given.shape[batched:] != planned.shape or given.dtype != planned.dtype:
        raise PlanError(
            f"input {port.name} is {given.dtype} {tuple(given.shape)}, the programs are for {planned.dtype} "
            f"{tuple(planned.shape)}\n  Give that, or several of them along a further first dim."
        )
    return batched
