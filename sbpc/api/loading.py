"""Read a plan, or a module that runs without its source, from a file, and plan its graph again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.fx import GraphModule

from sbpc.api.task import Task
from sbpc.errors import PlanError
from sbpc.graph.no_gc import uncollected
from sbpc.graph.ports import INPUT, OUTPUT, Port
from sbpc.graph.pytree import unflatten
from sbpc.graph.rewrite import rebuild
from sbpc.mesh.mesh import Mesh
from sbpc.passes.annotate import annotate
from sbpc.passes.pipeline import Stages, rewriter_of
from sbpc.passes.verify import (
    verify_annotated,
    verify_assigned,
    verify_boxed,
    verify_captured,
    verify_sent,
    verify_sums,
)
from sbpc.plans.chunk import Assignment, Chunk
from sbpc.plans.options import AS_COMPUTED, Options
from sbpc.plans.plan import Plan
from sbpc.plans.plan_file import NAMED, Decoder, decode
from sbpc.plans.rank_programs import Programs
from sbpc.plans.staged.loop_checks import mistakes
from sbpc.plans.symbolic_sizes import name_dims
from sbpc.runtime.exported import load_programs, module_of, weights_beside

ROUNDING = 1e-9  # fraction by which sums of the same numbers may differ
TRAIN = "train"  # the step that a file of stages holds
ABOUT = ("train", "model", "dtype", "eval", "left_out", "guards", "loss")  # what the options of a plan say of its step


@uncollected()
def load(path: str | Path) -> Any:
    """Returns the plan that `Plan.save` wrote. Reading it runs no code of the file's, and what it holds is checked:
    it may be a stranger's.

    Its graph calls only ops that have a rule, and a few others that check their operands (`sbpc.plans.file_graph`).
    If it has ops of your own, register them and their rules first.

    It can be printed, verified, simulated and given to `sbpc.parallelize`; `certify` and `check_bound` need a plan
    that was made here. A plan with stages comes back as one. Raises PlanError if the file is no plan, is damaged, or
    does not fit this version of sbpc or torch.
    """
    decoder = decode(path)
    with decoder.reading():
        return plan_in(decoder)


def load_module(
    path: str | Path,
    step: str | None = None,
    *,
    weights: str | Path | None = None,
    executor: str = "auto",
    device: str | None = None,
) -> nn.Module:
    """Returns the module that an exported file holds, as each rank runs it under torchrun, with DTensor parameters.

    Neither planning nor the model's source is needed; see `Plan.export` and examples/04_export_and_run.py. step,
    executor and device: as for `load_programs` and `sbpc.parallelize`. weights: a safetensors file, by default the one
    beside, with the same name and .safetensors at its end; "zeros" for none, where a checkpoint is loaded afterwards.

    Files of weights that sbpc writes hold the SHA-256 of each tensor, and each that is read is held to it (0.9 s for
    a GiB). Other weights of the same shapes will do too, such as those of a converted checkpoint or of a stranger's
    file. A parameter that nothing which the model returns depends on is not in the module, as no program reads it.

    Raises PlanError as `load_programs` does, and if the weights are not those of the programs.
    """
    return module_of(load_exported(path, step), weights_beside(path) if weights is None else weights, executor, device)


def load_exported(path: str | Path, step: str | None = None) -> Programs | Plan:
    """Returns what a rank runs of an exported file: the programs of one step, or the plan of a loop, which writes
    those of its chunks."""
    if decode(path).body["loop"] is None:
        return load_programs(path, step)
    if step not in (None, TRAIN):
        raise PlanError(
            f"{path} holds stages of a pipeline, which train\n  Export a plan without stages for the forward alone."
        )
    plan: Plan = load(path)
    return plan


def plan_in(decoder: Decoder, known: bool = False) -> Plan:
    """Returns the plan in what a file holds, checked. known: by this sbpc, so that what it makes of the file is not
    looked at, too."""
    mesh, options, loop, body = decoder.mesh(), decoder.options(), decoder.loop(), decoder.body
    inner = mesh if loop is None else mesh.without(options.stages)
    dynamic = options.dynamic if loop is None else None
    chunks = [chunk_in(each, inner, options, dynamic, known) for each in decoder.chunks(inner.axes)]
    in_loop = frozenset(Port(*each) for each in body["loop"]["in_loop"]) if loop is not None else frozenset[Port]()
    plan = Plan(mesh, chunks, options, float(body["lower_bound"]), loop, in_loop, float(body["serial_bound"]))
    if loop is None:
        if len(chunks) != 1 or any(getattr(chunks[0], key) for key in NAMED) or chunks[0].ports != decoder.ports():
            raise decoder.fail("a step of one program that is not one chunk")
        plan.again = partial(again, plan)
    else:
        for mistake in mistakes(plan, loop):
            raise decoder.fail(mistake)
    if not known:
        verify_boxed(plan.boxed, mesh) if loop is None else plan.verify()
        for mistake in (*wrong_orders(plan, body), *wrong_bounds(plan)):
            raise decoder.fail(mistake)
        str(plan)
    return plan


def wrong_orders(plan: Plan, body: Mapping[str, Any]) -> Iterator[str]:
    """Yields which chunks have not the orders of their programs, or others. body: of the file."""
    for at, (chunk, programs) in enumerate(zip(body["chunks"], plan.programs)):
        said = chunk.get("orders")  # None of an earlier version
        if said not in (None, [[list(which), numbers] for which, numbers in programs.orders(plan.tally(at))]):
            yield f"chunk {at} has orders of other programs than it runs"


def wrong_bounds(plan: Plan) -> Iterator[str]:
    """Yields bounds that the plan itself is below."""
    cost, most = plan.cost, 1 + ROUNDING
    for bound, paid in ((plan.lower_bound, cost.paid), (plan.serial_bound, cost.compute_seconds + cost.comm_seconds)):
        if bound > most * paid:
            yield f"no plan is to cost less than {bound:.6g}, and this one costs {paid:.6g}"


def chunk_in(decoder: Decoder, mesh: Mesh, options: Options, dynamic: Mapping[str, Any] | None, known: bool) -> Chunk:
    """Returns a chunk in what a file holds, checked. mesh: of a stage. options: of the plan. dynamic: names of dims.
    known: as of `plan_in`."""
    gm = annotate(decoder.graph(decoder.body))
    assignment = Assignment(*decoder.assignment(gm))
    if dynamic is not None:
        name_dims(gm, mesh, dynamic)
    verify_captured(gm)
    verify_annotated(gm)
    verify_assigned(gm, assignment, mesh)
    ports = gm.meta["ports"]
    names = [port.name for port in ports.inputs if port.kind == INPUT]
    if names != [str(number) for number in range(len(names))]:
        raise PlanError(f"inputs named {names}\n  Plan anew.")
    unflatten(ports.results, [None] * sum(port.kind == OUTPUT for port in ports.outputs))
    unflatten(ports.arguments, [None] * len(names))
    named: dict[str, Any] = decoder.named()
    orders = {tuple(which): numbers for which, numbers in decoder.body.get("orders", ())}
    rewriter = rewriter_of(options)
    rewriter = replace(rewriter, box=partial(box_and_verify, rewriter.box, options))
    chunk = Chunk(mesh, gm, assignment, rewriter, orders=orders, **named)
    if not known:
        verify_boxed(chunk.unscheduled, mesh)
    return chunk


def box_and_verify(
    box: Callable[..., GraphModule], options: Options, gm: GraphModule, assignment: Assignment, mesh: Mesh
) -> GraphModule:
    """Returns a boxed graph of a file, checked against what its options say of how gradients are sent and summed."""
    boxed = box(gm, assignment, mesh)
    verify_sent(gm, boxed, options)
    if options.reduce != AS_COMPUTED:
        verify_sums(boxed)
    return boxed


def again(plan: Plan, **other: Any) -> Plan:
    """Plans the graph of a loaded plan again, in which is already what is computed again. other: options."""
    asked = replace(plan.options, **{"microbatches": None, "panels": None, "forms": {}, **other})
    about = {name: getattr(plan.options, name) for name in ABOUT}
    return Task(rebuild(plan.annotated), Stages(), about).plan(plan.mesh, asked)
