"""Define `sbpc export`: write the programs of all ranks to one file, which runs without planning and without the
source."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbpc.api.planning import plan
from sbpc.cli.options import add_file, add_planning, plan_of
from sbpc.cli.output import check_file, print_json, quiet
from sbpc.cli.progress import progress
from sbpc.cli.target import Target
from sbpc.errors import SbpcError
from sbpc.graph.pytree import flatten
from sbpc.plans.plan import Plan
from sbpc.runtime.exported import inputs_beside, weights_beside
from sbpc.runtime.state.weight_files import Weights, save_weights, weights_of

NAME = "export"
HELP = "write the programs of all ranks, for training and for inference, to one file that `sbpc run` runs"


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("target", metavar="TARGET", help="file.py:function")
    add_planning(parser)
    add_file(parser, "-o", "--output", required=True, help="the file (*.sbpc)")
    no_weights = "write neither weights (*.safetensors) nor arguments beside it"
    parser.add_argument("--no-weights", action="store_true", help=no_weights)


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc export`."""
    check_file(options.output)
    check_beside(Path(options.output))
    with quiet(options):
        planned, target = plan_of(options, options.target)
        plans = {"train" if planned.options.train else "inference": planned}
        if planned.options.train and planned.loop is None:
            plans["inference"] = plan_inference(planned, target, options)
        edges = sum(each.verify() for each in plans.values())
        planned.export(options.output, plans.get("inference") if planned.options.train else None)
        beside = [] if options.no_weights else write_beside(Path(options.output), target)
    files = [options.output, *map(str, beside)]
    programs = {
        name: each.stages if each.loop is not None else len(each.programs[0].local) for name, each in plans.items()
    }
    if options.json:
        print_json({"files": files, "ranks": planned.mesh.ranks, "programs": programs, "verified_edges": edges})
        return 0
    for name, count in programs.items():
        print(f"{name:10}{count} program{'s' * (count > 1)} for {planned.mesh.ranks} ranks")
    print(f"verified  {edges:,} edges")
    for file in files:
        print(f"written   {file}")
    return 0


def check_beside(file: Path) -> None:
    """Raises SbpcError for a name that the weights or the arguments would have: they would overwrite the programs."""
    if file in (weights_beside(file), inputs_beside(file)):
        raise SbpcError(f"{file} is where the weights would lie\n  Name a file *.sbpc: they are written beside it.")


def plan_inference(trained: Plan, target: Target, options: argparse.Namespace) -> Plan:
    """Plans the forward alone, of the model in eval mode, with the homes of the plan for training."""
    modes = {module: module.training for module in target.model.modules()}
    try:
        asked = {"dtype": target.dtype, "memory": options.memory, "pin": trained.options.pin}
        with progress():
            return plan(target.model.eval(), target.args, trained.mesh, kwargs=target.kwargs, train=False, **asked)
    finally:
        for module, mode in modes.items():
            module.training = mode


def write_beside(file: Path, target: Target) -> list[Path]:
    """Writes the weights and the arguments of the target beside the file, unless they are on the meta device."""
    leaves, _ = flatten((target.args, target.kwargs), "the arguments")
    written: list[Path] = []
    inputs = Weights({str(number): leaf for number, leaf in enumerate(leaves)})
    for path, weights in ((weights_beside(file), weights_of(target.model)), (inputs_beside(file), inputs)):
        if weights.tensors and not any(tensor.is_meta for tensor in weights.tensors.values()):
            save_weights(weights, path)
            written.append(path)
    return written
