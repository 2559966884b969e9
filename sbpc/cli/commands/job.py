"""What a rank of `sbpc run` runs: the module of a target or of an exported file, and the arguments of every step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sbpc.api.planning import load
from sbpc.cli.options import is_plan, plan_of, target_of
from sbpc.errors import PlanError, SbpcError
from sbpc.graph.ports import INPUT
from sbpc.graph.pytree import unflatten
from sbpc.mesh.mesh import Mesh
from sbpc.plans.rank_programs import Programs
from sbpc.runtime.exported import inputs_beside, load_programs, module_of, weights_beside
from sbpc.runtime.module import parallelize
from sbpc.runtime.state.checkpoint import whole_steps
from sbpc.runtime.state.weight_files import read_tensors


@dataclass(frozen=True)
class Job:
    """module: as this rank runs it. batch: the `(args, kwargs)` of a step by its number. batches: how many differ."""

    module: nn.Module
    mesh: Mesh
    batch: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    batches: int = 1


def job_of(options: argparse.Namespace) -> Job:
    """What the options ask for, on this rank."""
    executor = "nans" if options.check_nans else "code"
    if is_plan(options.target):
        return job_of_file(options, executor)
    if options.plan:
        target = target_of(options, options.target)  # first: a plan may hold ops that the target registers
        found = load(options.plan)
    else:
        found, target = plan_of(options, options.target)
    if not found.options["train"]:
        raise SbpcError("the plan is for the forward alone\n  Plan without --no-train.")
    module = parallelize(target.model, found, executor=executor)
    return Job(module, found.mesh, lambda step: (target.args, target.kwargs))


def job_of_file(options: argparse.Namespace, executor: str) -> Job:
    """The job of an exported file."""
    found = load_programs(options.target, "inference" if options.infer else "train")
    resumed = options.checkpoint and whole_steps(Path(options.checkpoint))
    weights = options.weights or weights_beside(options.target)
    module = module_of(found, "zeros" if resumed and not Path(weights).exists() else weights, executor)
    tensors = read_tensors(options.inputs or inputs_beside(options.target))
    return Job(module, found.mesh, *batches_of(found, tensors))


def batches_of(found: Programs, tensors: dict[str, torch.Tensor]) -> tuple[Callable[[int], Any], int]:
    """The arguments of every step out of tensors named "0", "1", ...; a further first dim holds one batch after another.

    Raises PlanError if they are not those of the programs.
    """
    ports = [port for port in found.ports.inputs if port.kind == INPUT]
    missing = [port.name for port in ports if port.name not in tensors]
    if missing:
        raise PlanError(f"the inputs lack {', '.join(missing)}\n  Name the tensors of the arguments 0, 1, ... in order.")
    counts = {}
    for port in ports:
        given, planned = tensors[port.name], found.shapes[port]
        many = given.dim() == planned.dim() + 1
        if tuple(given.shape[many:]) != tuple(planned.shape) or given.dtype != planned.dtype:
            raise PlanError(
                f"input {port.name} is {given.dtype} {tuple(given.shape)}, the programs are for {planned.dtype} "
                f"{tuple(planned.shape)}\n  Give that, or several of them along a further first dim."
            )
        counts[port] = given.shape[0] if many else None
    there = [count for count in counts.values() if count is not None]
    if len(set(there)) > 1 or 0 in there:
        raise PlanError(f"the inputs hold {there} batches\n  Give as many of each, one at least.")
    batches = there[0] if there else 1
    coordinates = found.mesh.coordinates(dist.get_rank())

    def batch(step: int) -> Any:
        leaves = []
        for port in ports:
            tensor = tensors[port.name] if counts[port] is None else tensors[port.name][step % batches]
            leaves.append(found.given[port].shard(tensor, found.mesh.sizes, coordinates))
        return unflatten(found.ports.arguments, leaves)

    return batch, batches
