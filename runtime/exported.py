"""Load exported files: the programs of every rank, which run without planning and without the model's source.

The file is a plan's file (JSON with a checksum, see `plan_file`) to which the programs are added. Opening it runs no
code and unpickles nothing. Weights lie beside it as safetensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from sbpc.errors import PlanError
from sbpc.graph.ports import INPUT, OUTPUT, PARAMETER
from sbpc.graph.pytree import unflatten
from sbpc.plans import plan_file, rank_programs
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs
from sbpc.runtime import bind
from sbpc.runtime.module import parallelize
from sbpc.runtime.state.weight_files import reader, tree


def load_programs(path: str | Path, step: str | None = None) -> Programs:
    """Returns the programs of one step of an exported file: "train" or "inference", by default the first that it holds.

    They take the place of a plan in `sbpc.parallelize` and `sbpc.simulate`. Reading runs nothing of the file. They are
    checked: every value has the shape that its layout gives it, and the ranks of every group run the same collectives.

    Raises PlanError if the file is no exported one, is damaged, or does not fit this sbpc and torch.
    """
    decoder = plan_file.decode(path)
    with decoder.reading():
        bodies = steps_of(decoder.body)
        if step is None:
            step = next(iter(bodies), "train")
        if step not in bodies:
            alone = "a plan alone: export it, or run it by sbpc run TARGET --plan FILE"
            raise PlanError(f"{path} holds no step {step!r}\n  It holds {', '.join(bodies) or alone}.")
        decoder.body = bodies[step]
        programs = rank_programs.decode(decoder)
        check_structures(programs)
    return programs


def steps_of(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the steps of a file by name, none for the file of a plan alone."""
    if "programs" not in body:
        return {}
    steps = {name_of(body): body}
    for name, other in body["steps"].items():
        if name in steps or name != name_of(other):
            raise PlanError(f"a step is called {name!r}\n  Export anew.")
        steps[name] = other
    return steps


def name_of(body: dict[str, Any]) -> str:
    """Returns the name of a step."""
    return "train" if body["options"]["train"] else "inference"


def check_structures(programs: Programs) -> None:
    """Raises PlanError unless arguments and results have numbers and a structure."""
    for kind, structure in ((INPUT, programs.ports.arguments), (OUTPUT, programs.ports.results)):
        ports = programs.ports.inputs if kind == INPUT else programs.ports.outputs
        count = sum(port.kind == kind for port in ports)
        if [port.name for port in ports if port.kind == kind] != [str(at) for at in range(count)]:
            raise PlanError(f"the {kind}s are not numbered\n  Export anew.")
        if kind == OUTPUT:
            unflatten(structure, [None] * count)


def weights_beside(path: str | Path) -> Path:
    """Returns where the weights of an exported file lie."""
    return Path(path).with_suffix(".safetensors")


def inputs_beside(path: str | Path) -> Path:
    """Returns where the arguments lie with which a file was exported."""
    return Path(path).with_suffix(".inputs.safetensors")


def module_of(
    programs: Plan | Programs, file: str | Path, executor: str = "auto", device: str | None = None
) -> nn.Module:
    """Returns the parallel module of programs with the weights in a file, or zeros."""
    values, masters = bind.weights(programs), programs.ports.masters
    read = (
        (lambda name: torch.zeros_like(values[name], device="cpu"))
        if file == "zeros"
        else reader(file, values, masters)
    )
    names = [port.name for port in programs.shapes if port.kind == PARAMETER]
    module = tree(values, programs.ports.tied, names, programs.ports.frozen, programs.options.left_out)
    for name, each in module.named_modules():
        each.training = name not in programs.options.eval
    return parallelize(module, programs, weights=read, executor=executor, device=device)
