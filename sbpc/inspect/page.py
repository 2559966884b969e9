"""Writes a plan as one HTML page that loads nothing: figures, the map of the model, collectives, charts, the graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from markupsafe import Markup
from sympy.printing.mathml import mathml
from torch.fx import GraphModule, Node

from sbpc.boxing.steps import step_cost, wire
from sbpc.graph.about import FLOAT32
from sbpc.graph.operands import value_of
from sbpc.inspect.explain import Alternative
from sbpc.inspect.graph_rows import ValueRow, graph_rows
from sbpc.inspect.model_map import model_map
from sbpc.inspect.page_charts import curves, memory, schedule, timeline
from sbpc.inspect.page_graph import TITLES, Folded, fold, origins
from sbpc.inspect.picture import hue_of, meaning, states_in, template
from sbpc.inspect.report import (
    bytes_of,
    chips_of,
    chunks_json,
    collective_of,
    collectives,
    least,
    numberless,
    spans,
    transfers,
)
from sbpc.inspect.tables import quantity
from sbpc.mesh.collectives import EIGHT_BITS
from sbpc.plans.cost import Transfer
from sbpc.plans.options import BYTES, NONE
from sbpc.plans.plan import Plan
from sbpc.plans.timeline import Event

FORMULAS = 6  # collectives whose bytes are typeset, those that send most
WRITTEN = 160  # characters of a call that a row shows
ABOUT = {
    "forward": "what the model computes",
    "backward": "gradients of all parameters",
    "stored": "what is there before the step",
    "output": "what the step leaves",
}


def page_html(
    plan: Plan,
    alternatives: Mapping[str, Sequence[Alternative]],
    losses: Mapping[str, Sequence[float]] | None = None,
    measured: Sequence[Event] = (),
) -> str:
    """Returns the page of a plan: its model, time, memory and graph; of a loop also the schedule and the chunks.

    alternatives: by name of a parameter. losses: by name of a run, the loss of every step. measured: the events of a
    step that ran.
    """
    about, mesh = about_plan(plan, measured), plan.inner
    titles = [*(["Losses"] if losses else []), *about["titles"]]
    page = {
        "plan": plan,
        "model": plan.options.model,
        "mesh": str(plan.mesh),
        "axes": list(zip(mesh.axes, mesh.sizes)),
        "asked": asked(plan),
        "alternatives": alternatives,
        "ideal": mesh.cluster.name == "ideal",
        "cards": cards(plan, about["curve"]["held"]),
        "losses": curves(losses) if losses else None,
        "traffic": traffic(plan),
        "links": list(links(plan)),
        "chip": hue_of,
        "chips_of": chips_of,
        "meaning": meaning,
        "bytes_of": bytes_of,
        "written": WRITTEN,
        "seconds": quantity(plan.cost.seconds, "s"),
        "sections": [(title.lower(), title) for title in titles],
        **about,
    }
    return template("page.html.j2").render(page)


def about_plan(plan: Plan, measured: Sequence[Event]) -> dict[str, Any]:
    """Returns what the template draws below the figures."""
    cost, looped = plan.cost, plan.loop is not None
    graphs = drawn(plan)
    rows = [row for graph in graphs for row in graph.rows]
    folded = fold(rows)
    curve = memory(plan.memory_curve(), plan.mesh.cluster.memory)
    places = {key: folded.shown[row] for graph in graphs for key, row in graph.places.items()}
    for moment in curve["moments"]:
        moment.append(places.get(moment[2] if looped else f"0 {moment[2]}"))
    titles = [
        "Model",
        *(["Schedule", "Chunks"] if looped else []),
        "Collectives",
        *([] if looped else ["Time"]),
        "Memory",
        "Graph",
        "Cost",
    ]
    return {
        "titles": titles,
        "schedule": schedule(plan, measured) if looped else None,
        # in a loop they take as long as the plan; see plan.cost.bytes_expr
        "formulas": [] if looped else formulas(plan),
        "map": model_map(plan),
        "curve": curve,
        "timeline": None
        if looped
        else timeline(plan.timeline(), {key.split()[1]: row for key, row in places.items()}, measured),
        "folded": folded,
        "titled": {row.at: graph.title for graph in graphs for row in graph.rows},
        "of_section": TITLES,
        "about": ABOUT,
        "values": len(rows),
        "shown": sum(len(group.rows) for group in folded.groups),
        "data": embedded(page_data(plan, graphs, folded, curve)),
        "legend": states_in(rows),
        "overlaps": cost.exposed_seconds < cost.comm_seconds,
        "memory": [plan.memory_of(stage) for stage in range(plan.stages)],
        "chunks": chunks_json(plan) if looped else [],
        "bubble": f"{100 * cost.bubble_seconds / cost.seconds:.1f} %" if cost.seconds else "0 %",
    }


@dataclass(frozen=True)
class Drawn:
    """A graph on the page: that of a chunk, and of those that cost the same. title: says which, empty where there is
    but one. places: by chunk and name of a node, the number of its row."""

    title: str
    gm: GraphModule
    rows: Sequence[ValueRow]
    places: dict[str, int]


def drawn(plan: Plan) -> list[Drawn]:
    """Returns the boxed graphs of a plan; chunks that are alike have one."""
    alike: dict[int, list[int]] = {}
    for at, part in enumerate(plan.chunk_costs):
        alike.setdefault(id(part.known), []).append(at)  # which those that cost the same share
    found, start = list[Drawn](), 0
    for first, *others in alike.values():
        gm = plan.boxed if plan.loop is None else plan.chunks[first].unscheduled
        rows = graph_rows(gm, plan.inner, start)
        title = f"Chunk {first}{f', and {spans(others)} alike' if others else ''}" if len(plan.chunks) > 1 else ""
        names = [(node.name, row.at) for node, row in zip(gm.graph.nodes, rows)]
        found.append(Drawn(title, gm, rows, {f"{at} {name}": row for at in (first, *others) for name, row in names}))
        start += len(rows)
    return found


def asked(plan: Plan) -> list[str]:
    """Returns what was asked of the plan, as short texts."""
    options = plan.options
    texts = [
        f"{plan.mesh.ranks} ranks",
        f"cluster {plan.mesh.cluster.name}",
        "training" if options.train else "forward alone",
    ]
    texts += [plan.way] if plan.way else []
    texts += [
        f"{name} {getattr(options, name)}" for name in ("dtype", "optimizer", "baseline") if getattr(options, name)
    ]
    texts += [f"recompute {options.recompute}"] if options.recompute != NONE else []
    sent = "sent in" if options.reduce in EIGHT_BITS else "summed"
    texts += [f"gradients {sent} {options.reduce}"] if options.reduce != FLOAT32 else []
    texts += [f"parameters sent in {options.gather}"] if options.gather in EIGHT_BITS else []
    texts += ["float32 masters"] if options.masters else []
    texts += [f"at most {quantity(options.memory, 'B')} a rank"] if options.memory is not None else []
    return [*texts, *(f"pin {name} = {layout}" for name, layout in options.pin.items())]


def cards(plan: Plan, held: Mapping[str, float]) -> list[dict[str, Any]]:
    """Returns the figures: a title, a number, what it means, and its parts. held: bytes at the peak by group."""
    cost, mesh = plan.cost, plan.mesh
    unit, device, total = "B" if cost.objective == BYTES else "s", mesh.cluster.memory, cost.memory["total"]
    hidden = cost.comm_seconds - cost.exposed_seconds
    about = [f"{quantity(hidden, 's')} of moving data are hidden"] if hidden > 0 else []
    about += [f"and {quantity(cost.optimizer_seconds, 's')} of the optimizer"] if cost.optimizer_seconds else []
    about += [str(plan.usage)] if plan.usage is not None else []
    again = cost.recompute_seconds
    times = {
        "computing": cost.compute_seconds - again,
        "computing again": again,
        "communicating": cost.exposed_seconds,
        "bubble": cost.bubble_seconds,
    }
    share = 100 * cost.flops / cost.flops_one_device if cost.flops_one_device else 0.0
    proof = [
        (0, "bound", quantity(cost.lower_bound, unit), 100 * (1 - cost.gap)),
        (1, "gap", f"{100 * cost.gap:.2f} %", 100 * cost.gap),
    ]
    part = 100 * total / device
    rounded = f"{part:.{0 if part >= 10 else 2}f}" if part >= 0.01 else "under 0.01"
    of_device = f"{rounded} % of a device's {quantity(device, 'B')}" if device < 1e15 else ""
    figures = [
        ("a step", quantity(cost.seconds, "s"), "; ".join(about), parts(times, "s")),
        ("sent by a rank", quantity(sum(cost.bytes_sent.values()), "B"), "", parts(cost.bytes_sent, "B")),
        ("peak memory of a rank", quantity(total, "B"), of_device, parts(held, "B")),
        ("gap to the bound", f"{100 * cost.gap:.2f} %", f"no {least(plan)}", proof),
        (
            "flops of a rank",
            quantity(cost.flops, ""),
            f"{share:.1f} % of one device's; 1/{mesh.ranks} is {100 / mesh.ranks:.1f} %",
            [],
        ),
    ]
    return [dict(zip(("title", "number", "about", "parts"), each)) for each in figures]


def parts(sizes: Mapping[str, float], unit: str) -> list[tuple[int, str, str, float]]:
    """Returns parts of a whole: numbers of colours, names, texts and percents. What is nothing is left out."""
    whole = sum(sizes.values())
    named = [(hue, name, size) for hue, (name, size) in enumerate(sizes.items()) if size]
    return [(hue, name, quantity(size, unit), 100 * size / whole) for hue, name, size in named]


def traffic(plan: Plan) -> list[tuple[tuple[str, ...], list[float]]]:
    """Returns by module, phase, kind and axis of collectives how many there are, the bytes that a rank sends, and the
    seconds that they take, those that take longest first."""
    found, mesh = dict[tuple[str, ...], list[float]](), plan.inner
    for node, moved, times in transfers(plan):
        taken, sent = step_cost(moved.step, moved.shape, moved.itemsize, mesh)
        what = collective_of(node, moved), mesh.key(moved.step.axes)
        key = numberless(module_of(node)), node.meta.get("phase", "forward"), *what
        found[key] = [a + b * times for a, b in zip(found.get(key, [0.0, 0.0, 0.0]), (1, sent, taken))]
    return sorted(found.items(), key=lambda item: (-item[1][2], -item[1][1], item[0]))


def module_of(node: Node) -> str:
    """Returns the module of a node."""
    return str(value_of(node)[0].meta.get("module", node.meta.get("module", "")))


def links(plan: Plan) -> list[tuple[str, float, float]]:
    """Returns, by axis over which anything is sent, how long a message takes at least, and the bandwidth."""
    found, mesh = {}, plan.inner
    for step in (moved.step for _, moved, _ in transfers(plan)):
        if all(mesh.sizes[axis] == 1 for axis in step.axes):
            continue
        latency, bandwidth, _ = mesh.link(step.axes, step.collective)
        found[mesh.key(step.axes)] = latency, bandwidth
    return [(axis, *figures) for axis, figures in found.items()]


def formulas(plan: Plan) -> list[tuple[float, Transfer, float, Markup]]:
    """Returns the collectives that send most: how many, what they move, and the bytes of one, also as a typeset formula
    in the sizes of the axes."""
    cost, mesh, found = plan.cost, plan.mesh, []
    for transfer, count in cost.transfers:
        _, sent = wire(transfer.step, transfer.shape, transfer.itemsize, mesh.sizes)
        found.append((count * float(sent), count, transfer))
    found.sort(key=lambda item: -item[0])
    return [
        (count, t, whole / count, Markup(mathml(sympy.factor(cost.sent_expr(t)), printer="presentation")))
        for whole, count, t in found[:FORMULAS]
    ]


def page_data(plan: Plan, graphs: Sequence[Drawn], folded: Folded, curve: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the page holds as JSON: the figures of the plan, and what its script shows of a value."""
    about = [origin for graph in graphs for origin in origins(graph.gm)]
    lines = {line: at for at, line in enumerate(dict.fromkeys(line for line, _ in about))}
    rules = {rule: at for at, rule in enumerate(dict.fromkeys(rule for _, rule in about))}
    shown = [row for group in folded.groups for row in group.rows]
    cost = plan.cost
    return {
        "mesh": dict(zip(plan.mesh.axes, plan.mesh.sizes)),
        "seconds": cost.seconds,
        "memory": cost.memory,
        "bytes_sent": cost.bytes_sent,
        "parameters": {name: str(home) for name, home in plan.parameters.items()},
        "collectives": [[axis, kind, count, sent] for (axis, kind), (count, sent) in collectives(plan).items()],
        "rows": {row.at: [row.layout, row.note, lines[about[row.at][0]], rules[about[row.at][1]]] for row in shown},
        "lines": list(lines),
        "rules": list(rules),
        "moments": curve["moments"],
    }


def embedded(data: Mapping[str, Any]) -> Markup:
    """Returns JSON that no HTML can end."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
