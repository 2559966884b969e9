"""Reports a plan to people: layouts by parameter, collectives by axis, chunks, seconds, memory, how good it is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.fx import Node

from sbpc.boxing.steps import wire
from sbpc.inspect.tables import Report, Table, quantity
from sbpc.mesh.layout import Layout
from sbpc.plans.chunk import Chunk
from sbpc.plans.cost import Cost, Transfer
from sbpc.plans.measure import transfers_of
from sbpc.plans.options import BYTES, DROP, Options
from sbpc.plans.plan import Plan
from sbpc.plans.staged.loop_formula import calls_of
from sbpc.plans.staged.pipeline_cost import RUNS
from sbpc.plans.staged.schedules import BACKWARD, FORWARD
from sbpc.rules.sum_types import dtype_of, narrower

IDEAL = (
    "cluster   'ideal': a byte costs as much as a flop. It predicts no real machine; name one (h100, or a file),\n"
    "          or measure yours with `sbpc profile`"
)
FIGURES = (
    "seconds",
    "compute_seconds",
    "comm_seconds",
    "exposed_seconds",
    "bubble_seconds",
    "recompute_seconds",
    "optimizer_seconds",
    "lower_bound",
    "gap",
    "serial_gap",
    "flops",
    "flops_one_device",
    "bytes_sent",
    "memory",
)


def report(plan: Plan) -> Report:
    """Returns what is told of a plan."""
    tables = [parameter_table(plan), collective_table(plan), *([chunk_table(plan)] if plan.loop is not None else [])]
    told = [
        *figure_lines(plan),
        *(f"LOUD      {note}" for note in plan.notes),
        *(f"note      {remark}" for remark in plan.remarks),
    ]
    way = [f"{plan.mesh.ranks} ranks", *([plan.way] if plan.way else [])]
    return Report(f"{plan.options.model} on {plan.mesh}: {', '.join(way)}", (), tables, told)


def figure_lines(plan: Plan) -> list[str]:
    """Returns lines about seconds, bound, flops, bytes and memory."""
    cost, mesh = plan.cost, plan.mesh
    share = 100 * cost.flops / cost.flops_one_device if cost.flops_one_device else 0.0
    whole = f"one device's {quantity(cost.flops_one_device, '')} (1/{mesh.ranks} is {100 / mesh.ranks:.1f} %)"
    exposed = "" if cost.makespan is None else f", {cost.exposed_seconds:.3g} of them exposed"
    share_of_bubble = cost.bubble_seconds / cost.seconds if cost.seconds else 0.0
    waits = (
        f", {cost.bubble_seconds:.3g} ({share_of_bubble:.1%}) waiting for other stages" if cost.bubble_seconds else ""
    )
    serial = "" if cost.makespan is None else f", {100 * cost.serial_gap:.2f} % where nothing overlaps"
    sent = ", ".join(f"{quantity(size, 'B')} over {axis}" for axis, size in cost.bytes_sent.items() if size)
    lines = [
        f"seconds   {cost.seconds:.3g} a step: {cost.compute_seconds:.3g} computing, {cost.comm_seconds:.3g} "
        f"communicating{exposed}{waits}",
        *recompute_lines(cost),
        *update_lines(plan),
        f"proof     no {least(plan)}: the gap is {100 * cost.gap:.2f} %{serial}",
        f"flops     {quantity(cost.flops, '')} a rank, {share:.1f} % of {whole}",
        *([f"sent      {sent or 'nothing'} by the busiest rank"] if plan.loop is not None else []),
        memory_line(cost),
    ]
    lines += row_lines(plan.options)
    if cost.memory["total"] > mesh.cluster.memory:
        device = f"a device of {mesh.cluster.name!r} has {quantity(mesh.cluster.memory, 'B')}"
        lines.append(f"          {device}: ask for a plan that fits with memory={mesh.cluster.memory:g}")
    if plan.cached is not None:
        lines.append(f"made      before, and read from {plan.cached} (SBPC_CACHE=0 plans anew)")
    return lines + ([IDEAL] if mesh.cluster.name == "ideal" else [])


def memory_line(cost: Cost) -> str:
    """Returns a line about the most bytes of each kind, and those at the peak, where not all of these are alive."""
    kinds = {kind: size for kind, size in cost.memory.items() if kind != "total"}
    beside = ", less than their sum" if sum(kinds.values()) > cost.memory["total"] else ""
    told = ", ".join(f"{quantity(size, 'B')} {kind}" for kind, size in kinds.items())
    return f"memory    {told}; {quantity(cost.memory['total'], 'B')} at the peak{beside}"


def row_lines(asked: Options) -> list[str]:
    """Returns a line about rows of experts, none if nothing was asked of them."""
    then = "each takes its first rows, and drops others" if asked.overflow == DROP else "others stop every rank"
    capacity = (
        ""
        if asked.capacity is None
        else f"at most {asked.capacity:g} times the mean of the rows is a rank's where they are shared out: {then}"
    )
    expected = "" if asked.routing == 1 else f"the busiest rank is expected to have {asked.routing:g} times the mean"
    told = "; ".join(filter(None, (capacity, expected)))
    return [f"experts   {told}"] if told else []


def update_lines(plan: Plan) -> list[str]:
    """Returns lines about the optimizer's update, which `module.step` leaves to it, and what both make of devices."""
    update = plan.cost.optimizer_seconds
    lines = [f"update    {update:.3g} seconds of the optimizer, beside those of the step"] if update else []
    return lines + ([f"usage     {plan.usage}"] if plan.usage is not None else [])


def recompute_lines(cost: Cost) -> list[str]:
    """Returns a line about what is computed again, none if nothing is."""
    share = 100 * cost.recompute_seconds / cost.compute_seconds if cost.compute_seconds else 0.0
    again = (
        f"recompute {cost.recompute_seconds:.3g} seconds of computing, {share:.1f} % of it, make values of the "
        "forward again"
    )
    return [again] if cost.recompute_seconds else []


def least(plan: Plan) -> str:
    """Returns what no plan does, by the bound."""
    bound = plan.cost.lower_bound
    if plan.loop is not None:
        return f"layouts of {'these stages' if plan.axis else 'this loop'} take less than {bound:.3g} s"
    does = (
        f"sends less than {bound:,.0f} bytes a rank"
        if plan.cost.objective == BYTES
        else f"takes less than {bound:.3g} s"
    )
    return f"plan{' with these pins' if plan.options.pin else ''} {does}"


def parameter_table(plan: Plan) -> Table:
    """Returns parameters with their shapes and homes. Those that differ only in numbers of layers are one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    alike: Counter[str] = Counter()
    shapes = {port.name: value for port, value in plan.shapes.items()}
    for name, layout in plan.parameters.items():
        pattern = numberless(name)
        shape = ", ".join(map(str, shapes[name].shape))
        rows.setdefault((pattern, f"[{shape}]", str(layout)), []).append(name)
        alike[pattern] += 1
    texts = [
        (pattern if len(names) == alike[pattern] > 1 else some(names), shape, home, str(len(names)))
        for (pattern, shape, home), names in rows.items()
    ]
    return Table("parameters", ("name", "shape", "home layout", "count"), texts, ("name", "shape", "home layout"))


def numberless(name: str) -> str:
    """Returns a qualified name with * in place of its numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def some(names: Sequence[str]) -> str:
    """Returns names that differ only in their numbers as one.

    >>> some(["blocks.0.up.weight", "blocks.1.up.weight", "blocks.2.up.weight", "blocks.5.up.weight"])
    'blocks.{0-2,5}.up.weight'
    """
    columns = [list(dict.fromkeys(column)) for column in zip(*(name.split(".") for name in names))]
    if math.prod(map(len, columns)) != len(names):
        return f"{names[0]}, ..., {names[-1]}"
    return ".".join(column[0] if len(column) == 1 else "{" + spans(map(int, column)) + "}" for column in columns)


def spans(numbers: Iterable[int]) -> str:
    """Returns numbers as text with their runs: `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def chips_of(layout: Layout) -> list[str]:
    """Returns the states of a layout, then the order of its splits where that is not the order of the mesh."""
    count = len(layout.states)
    return [*map(str, layout.states), " ".join(str(layout).split()[count:])]


def transfers(plan: Plan, stages: Container[int] | None = None) -> Iterator[tuple[Node, Transfer, int]]:
    """Yields the calls of a plan that send, what each sends, and how often it runs in a step; where `stages` are named,
    those of these stages alone."""
    for programs, stage in zip(plan.programs, plan.owners):
        for nodes, times in calls_of(plan, programs, plan.count) if stages is None or stage in stages else ():
            yield from ((node, sent, times) for node in nodes for sent in transfers_of(node, plan.inner))


def collective_of(node: Node, sent: Transfer) -> str:
    """Returns the collective of what a call sends, with the type of the numbers where these have 16 bits or fewer."""
    kind, dtype = str(sent.step.collective), dtype_of(node)
    return f"{kind} {str(dtype).removeprefix('torch.')}" if narrower(dtype, torch.float32) else kind


def collectives(plan: Plan) -> dict[tuple[str, str], tuple[int, float]]:
    """Returns by axis and collective how many there are, and the bytes that a rank sends; with stages, those of the
    busiest one."""
    totals, mesh = dict[tuple[str, str], tuple[int, float]](), plan.inner
    for node, moved, times in transfers(plan, (plan.busiest,)):
        rounds, each = wire(moved.step, moved.shape, moved.itemsize, mesh.sizes)
        if rounds:
            count, sent = totals.get(key := (mesh.key(moved.step.axes), collective_of(node, moved)), (0, 0.0))
            totals[key] = count + times, sent + times * float(each)
    return dict(sorted(totals.items()))


def collective_table(plan: Plan) -> Table:
    """Returns the table of collectives by axis, with how many there are and the bytes that a rank sends."""
    rows = [(*key, str(count), f"{sent:,.0f}") for key, (count, sent) in collectives(plan).items()]
    heads = ("axis", "collective", "count", "bytes sent per rank")
    return Table("collectives", heads, rows or [("none", "", "", "0")], ("axis", "collective"))


def chunk_table(plan: Plan) -> Table:
    """Returns the chunks of the model with what each takes for a micro-batch."""
    rows = [
        (
            str(at),
            str(each["stage"]),
            each["modules"],
            *(quantity(each[f"{name}_seconds"], "s") for name in ("forward", "backward")),
            quantity(bytes_of(plan, at), "B"),
            ", ".join(each["sends"]),
        )
        for at, each in enumerate(chunks_json(plan))
    ]
    return Table(
        "chunks",
        ("chunk", "stage", "modules", "forward", "backward", "parameters", "sends"),
        rows,
        ("modules", "sends"),
    )


def span_of(chunk: Chunk) -> str:
    """Returns the first and the last module of a chunk."""
    nodes = [node for node in chunk.annotated.graph.nodes if node.op == "call_function"]
    named = list(dict.fromkeys(node.meta["module"] for node in nodes if node.meta.get("module")))
    return f"{named[0]} to {named[-1]}" if named else "no module"


def plan_json(plan: Plan) -> dict[str, Any]:
    """Returns the report as JSON values."""
    return {
        "mesh": dict(zip(plan.mesh.axes, plan.mesh.sizes)),
        "cluster": plan.mesh.cluster.name,
        "parameters": {name: str(layout) for name, layout in plan.parameters.items()},
        **{name: getattr(plan.cost, name) for name in FIGURES},
        "usage": None if plan.usage is None else asdict(plan.usage),
        "collectives": [
            {"axis": axis, "collective": name, "count": count, "bytes_sent": sent}
            for (axis, name), (count, sent) in collectives(plan).items()
        ],
        "times": plan.times,
        "notes": list(plan.notes),
        "remarks": list(plan.remarks),
        **(stages_json(plan) if plan.loop is not None else {"formula": str(plan.cost.expr)}),
    }


def stages_json(plan: Plan) -> dict[str, Any]:
    """Returns what the report tells of stages and chunks."""
    return {
        "stages": plan.axis,
        "schedule": plan.schedule,
        "microbatches": plan.count,
        "memory_by_stage": [plan.memory_of(stage) for stage in range(plan.stages)],
        "chunks": chunks_json(plan),
    }


def chunks_json(plan: Plan) -> list[dict[str, Any]]:
    """Returns what is told of each chunk, with the seconds of a micro-batch."""
    return [
        {
            "stage": plan.owners[at],
            "modules": span_of(chunk),
            "forward_seconds": part.program(RUNS[FORWARD]).seconds,
            "backward_seconds": part.program(RUNS[BACKWARD]).seconds,
            "parameters": list(chunk.parameters),
            "receives": list(chunk.receives.values()),
            "sends": list(chunk.sends.values()),
        }
        for at, (chunk, part) in enumerate(zip(plan.chunks, plan.chunk_costs))
    ]


def bytes_of(plan: Plan, at: int) -> int:
    """Returns the bytes of the parameters of a chunk on a rank."""
    return sum(plan.chunk_costs[at].homes.values())
