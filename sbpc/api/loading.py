"""Read a plan, or a module that runs without its source, from a file, and plan its graph again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from sbpc.api.planning import Task
from sbpc.errors import PlanError
from sbpc.graph.ports import INPUT, OUTPUT
from sbpc.graph.pytree import unflatten
from sbpc.passes.annotate import annotate, duplicate
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.passes.verify import verify_annotated, verify_assigned, verify_boxed, verify_captured
from sbpc.plans.plan import Assignment, Plan
from sbpc.plans.plan_file import Decoder, decode
from sbpc.plans.rank_programs import Programs
from sbpc.plans.staged import staged_file
from sbpc.plans.staged.staged_plan import StagedPlan
from sbpc.plans.symbolic_sizes import name_dims
from sbpc.runtime.exported import load_programs, module_of, weights_beside

TRAIN = "train"  # the step that a file of stages holds
ABOUT = ("train", "model", "dtype", "eval", "left_out", "guards")  # what the options of a plan say of its step


def load(path: str | Path) -> Any:
    """Returns the plan that `Plan.save` wrote. Reading it runs no code of the file's, and what it holds is checked: it may be a stranger's.

    Its graph calls only ops that have a rule, and a few others that check their operands (`sbpc.plans.file_graph`). If it has ops of
    your own, register them and their rules first.

    It can be printed, verified, simulated and given to `sbpc.parallelize`; `certify` and `check_bound` need a plan that was made
    here. A plan with stages comes back as one. Raises PlanError if the file is no plan, is damaged, or does not fit this version of
    sbpc or torch.
    """
    decoder = decode(path)
    with decoder.reading():
        return staged_file.decode(decoder, plan_in) if staged_file.STAGES in decoder.body else plan_in(decoder)


def load_module(
    path: str | Path,
    step: str | None = None,
    *,
    weights: str | Path | None = None,
    executor: str = "code",
    device: str | None = None,
) -> nn.Module:
    """Returns the module that an exported file holds, as each rank runs it under torchrun, with DTensor parameters.

    Neither planning nor the model's source is needed; see `Plan.export` and examples/04_export_and_run.py. step, executor and device:
    as for `load_programs` and `sbpc.parallelize`. weights: a safetensors file, by default the one beside, with the same name and
    .safetensors at its end; "zeros" for none, where a checkpoint is loaded afterwards.

    Files of weights that sbpc writes hold the SHA-256 of each tensor, and each that is read is held to it (0.9 s for a GiB). Other
    weights of the same shapes will do too, such as those of a converted checkpoint or of a stranger's file. A parameter that nothing
    which the model returns depends on is not in the module, as no program reads it.

    Raises PlanError as `load_programs` does, and if the weights are not those of the programs.
    """
    return module_of(load_exported(path, step), weights_beside(path) if weights is None else weights, executor, device)


def load_exported(path: str | Path, step: str | None = None) -> Programs | StagedPlan:
    """Returns what a rank runs of an exported file: the programs of one step, or a plan with stages, which writes those of its chunks."""
    if staged_file.STAGES not in decode(path).body:
        return load_programs(path, step)
    if step not in (None, TRAIN):
        raise PlanError(f"{path} holds stages of a pipeline, which train\n  Export a plan without stages for the forward alone.")
    plan: StagedPlan = load(path)
    return plan


def plan_in(decoder: Decoder) -> Plan:
    """Returns the plan in what a file holds, checked."""
    mesh = decoder.mesh()
    gm = annotate(decoder.graph(decoder.body))
    choices, aliases, outputs = decoder.assignment(gm, mesh.axes)
    body = decoder.body
    options = decoder.options()
    if options.dynamic is not None:
        name_dims(gm, mesh, options.dynamic)
    assignment = Assignment(choices, aliases, tuple(outputs))
    plan = make_plan(gm, mesh, assignment, float(body["lower_bound"]), options, Stages())
    plan.serial_bound = float(body["serial_bound"])
    check_loaded(plan)
    plan.again = partial(again, plan)
    return plan


def again(plan: Plan, **other: Any) -> Plan:
    """Plans the graph of a loaded plan again, in which is already what is computed again. other: options."""
    asked = replace(plan.options, **{"microbatches": None, "panels": None, "forms": {}, **other})
    about = {name: getattr(plan.options, name) for name in ABOUT}
    return Task(duplicate(plan.graph), Stages(), about).plan(plan.mesh, asked)


def check_loaded(plan: Plan) -> None:
    """Checks a plan that came from a file as far as its boxed graph, and what its report reads."""
    verify_captured(plan.graph)
    verify_annotated(plan.graph)
    verify_assigned(plan.graph, plan.assignment, plan.mesh)
    names = [port.name for port in plan.ports.inputs if port.kind == INPUT]
    if names != [str(number) for number in range(len(names))]:
        raise PlanError(f"inputs named {names}\n  Plan anew.")
    leaves = [None] * sum(port.kind == OUTPUT for port in plan.ports.outputs)
    unflatten(plan.ports.results, leaves)
    unflatten(plan.ports.arguments, [None] * len(names))
    verify_boxed(plan.boxed, plan.mesh)
    str(plan)
