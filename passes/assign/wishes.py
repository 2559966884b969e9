"""What layouts must be like: what the user asks of inputs, outputs, parameters and values, as wishes for nodes and
outputs.

A wish leaves a node the signatures whose first output is as wished, see `sbpc.mesh.pins.Wish`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from torch.fx import GraphModule, Node

from sbpc.errors import PinError, PlanError, at_node
from sbpc.graph.about import RECOMPUTES
from sbpc.graph.operands import shape_of
from sbpc.graph.ports import BUFFER, INPUT, OUTPUT, PARAMETER, TANGENT, placeholders, results
from sbpc.mesh.layout_codes import decode
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish, both, exactly, layout_of_rows, leaves_with_rows, parse_layout, resolve_pins
from sbpc.mesh.states import Axes, Split, State
from sbpc.passes.assign.expert_schemes import EXPERTS, expert_wishes
from sbpc.passes.assign.expert_structure import Model
from sbpc.plans.options import Layouts, Options
from sbpc.rules.choices import may_cut


@dataclass(frozen=True)
class Wishes:
    """Wishes by name of a node, and for outputs by place in the output list."""

    nodes: dict[str, Wish]
    outputs: dict[int, Wish]


def wishes(gm: GraphModule, mesh: Mesh, options: Options, whole: GraphModule | None = None) -> Wishes:
    """Returns the wishes that options state: pins, layouts of inputs and outputs, spread, a baseline's scheme.

    whole: the step in one piece, if `gm` is the same in micro-batches.

    Raises PinError if one names nothing, or two contradict each other, and PlanError if the baseline does not fit.
    """
    inputs, outputs = end_layouts(gm, mesh, options)
    stored = placeholder_wishes(gm, mesh, inputs, outputs, options.spread)
    nodes = both(stored, pin_wishes(gm, mesh, options.pin, stored), mesh)
    if options.baseline is not None:
        nodes = both(nodes, scheme_of(gm, mesh, options.baseline, Model(whole or gm), whole is not None), mesh)
    nodes = with_recomputed(gm, nodes)
    return Wishes(nodes, output_wishes(gm, mesh, outputs, options.spread))


def end_layouts(gm: GraphModule, mesh: Mesh, options: Options) -> tuple[Layouts, Layouts]:
    """Layouts of inputs and outputs: those that are asked for, or where `inputs` names axes, the rows of the batch
    split over these. They stay whole where they cannot be cut so; a rank's rows are then gathered before the step."""
    if not isinstance(options.inputs, str):
        return options.inputs, options.outputs  # type: ignore[return-value]
    ports, rows = gm.meta["ports"], layout_of_rows(options.inputs, mesh)
    given = [node.meta["val"].shape for port, node in placeholders(gm).items() if port.kind == INPUT]
    made = [node for port, node in zip(ports.outputs, results(gm)) if port.kind == OUTPUT]
    left = [() if node is None else node.meta["val"].shape for node in made]
    cut = leaves_with_rows([*given, *left])
    count = next((shape[0] for shape in given if shape), 0)
    axes = rows.cuts.get(0, ())
    even = axes != tuple(sorted(axes))  # what `of_stored` allows
    fits = may_cut(count, tuple(mesh.sizes[axis] for axis in axes), even, True)
    own = [rows if has and fits else None for has in cut]
    outputs = own[len(given) :] if options.outputs in (None, options.inputs) else options.outputs
    return own[: len(given)], outputs  # type: ignore[return-value]


def expert_alternatives(
    gm: GraphModule, mesh: Mesh, asked: Mapping[str, Wish], whole: GraphModule | None = None
) -> Iterator[dict[str, Wish]]:
    """Yields what was asked together with the scheme of each expert that fits the model, the mesh and what was
    asked."""
    model = Model(whole or gm)
    for name in EXPERTS:
        with suppress(PinError, PlanError):
            yield with_recomputed(gm, both(asked, scheme_of(gm, mesh, name, model, whole is not None), mesh))
    yield from row_alternatives(gm, mesh, asked)


def row_alternatives(gm: GraphModule, mesh: Mesh, asked: Mapping[str, Wish]) -> Iterator[dict[str, Wish]]:
    """Yields what was asked together with each way to share out rows of experts by their groups, or to leave them with
    their tokens, on some axes."""
    every = tuple(range(len(mesh.axes)))
    for axes in (*mesh.runs(), ()):
        for own in dict.fromkeys([(), tuple(axis for axis in every if axis not in axes)]):
            with suppress(PinError):
                if found := sharing(gm, axes, own):
                    yield both(asked, found, mesh)


def sharing(gm: GraphModule, axes: Axes, own: Axes) -> dict[str, Wish]:
    """Returns the wishes that axes share out rows by their groups wherever these are known, and that on others each
    rank has rows of its own: it pays if all do."""
    found: dict[str, Wish] = {}
    for node in gm.graph.nodes:
        wished: dict[int, State] = {}
        for s in node.meta.get("signatures", ()):
            among = axes if s.ragged is not None else own if s.own is not None else ()
            wished |= dict.fromkeys(among, s.outputs[0])
        if wished:
            found[node.name] = Wish(tuple(sorted(wished.items())), reason="rows in the order of their groups")
    return found


def scheme_of(gm: GraphModule, mesh: Mesh, name: str, model: Model, copied: bool) -> dict[str, Wish]:
    """Returns the scheme of an expert. copied: the model is the step in one piece, of which `gm` has copies in
    micro-batches."""
    wishes = expert_wishes(model, mesh, name)
    if not copied:
        return wishes
    origins = {
        node.name: node.meta.get("origin", node.name if node.op == "placeholder" else "") for node in gm.graph.nodes
    }
    return {name: wishes[origin] for name, origin in origins.items() if origin in wishes}


def with_recomputed(gm: GraphModule, wishes: Mapping[str, Wish]) -> dict[str, Wish]:
    """Returns the wishes, and the same for calls that compute the value of one with a wish again."""
    again = ((node.name, node.meta.get(RECOMPUTES)) for node in gm.graph.nodes)
    return {**{name: wishes[of] for name, of in again if of in wishes}, **wishes}


def placeholder_wishes(gm: GraphModule, mesh: Mesh, inputs: Layouts, outputs: Layouts, spread: bool) -> dict[str, Wish]:
    """Returns, by node, how inputs, tangents, buffers and, with `spread`, parameters are stored."""
    ports = gm.meta["ports"]
    for name, given, kind, among in (
        ("inputs", inputs, INPUT, ports.inputs),
        ("outputs", outputs, OUTPUT, ports.outputs),
    ):
        tensors = sum(port.kind == kind for port in among)
        if given is not None and len(given) != tensors:
            raise PinError(
                f"{name}= has {len(given)} layouts for {tensors} tensors\n  Give one per tensor, None for whole."
            )
    wishes: dict[str, Wish] = {}
    for port, node in placeholders(gm).items():
        reason = f"{OUTPUT if port.kind == TANGENT else port.kind} {port.name}"
        given = {INPUT: inputs, TANGENT: outputs}.get(port.kind)
        if spread and port.kind in (PARAMETER, INPUT):
            wishes[node.name] = stored_once(mesh, reason)
        elif port.kind in (INPUT, TANGENT, BUFFER):
            text = None if given is None else given[int(port.name)]
            wishes[node.name] = exactly(parse_layout(text, mesh, reason), reason)
    return wishes


def stored_once(mesh: Mesh, reason: str) -> Wish:
    """Returns the wish that every axis of more than one rank splits a tensor."""
    axes = tuple(axis for axis, size in enumerate(mesh.sizes) if size > 1)
    return Wish(spread=axes, reason=f"{reason} stored once (spread=True)")


def output_wishes(gm: GraphModule, mesh: Mesh, outputs: Layouts, spread: bool) -> dict[int, Wish]:
    """Returns how outputs are left, by place in the output list."""
    wishes = {}
    for at, port in enumerate(gm.meta["ports"].outputs):
        reason = f"output {port.name}"
        if port.kind == OUTPUT and outputs is not None and outputs[int(port.name)] is not None:
            wishes[at] = exactly(parse_layout(outputs[int(port.name)], mesh, reason), reason)
        elif port.kind == OUTPUT and spread:
            wishes[at] = stored_once(mesh, reason)
    return wishes


def pin_wishes(gm: GraphModule, mesh: Mesh, pins: Mapping[str, str], stored: Mapping[str, Wish]) -> dict[str, Wish]:
    """Returns pins by node: a pattern is matched with parameters, and with values only where it matches no parameter.

    stored: the wishes for what is laid out otherwise. Raises PinError if a pin names such a node.
    """
    tied = gm.meta["ports"].tied
    parameters = {
        node.name: [port.name, *(name for name, first in tied.items() if first == port.name)]
        for port, node in placeholders(gm).items()
        if port.kind == PARAMETER
    }
    known = [name for names in parameters.values() for name in names]
    of_parameters = {pattern: text for pattern, text in pins.items() if fnmatch.filter(known, pattern)}
    of_values = {pattern: text for pattern, text in pins.items() if pattern not in of_parameters}
    wishes = resolve_pins(of_parameters, parameters, mesh)
    if of_values:
        nodes = (node.name for node in gm.graph.nodes if "candidates" in node.meta)
        values = {name: [name] for name in nodes if name not in parameters}
        wishes |= resolve_pins(of_values, parameters | values, mesh)
    for name, wish in wishes.items():
        if name in stored and stored[name].states:
            raise PinError(
                f"{wish.reason} pins an input or a buffer\n  Lay out inputs with inputs=; buffers are whole."
            )
    return wishes


def refusal(node: Node, wish: Wish, codes: np.ndarray, mesh: Mesh) -> str:
    """Returns why no label of a node meets a wish. codes: the layouts in which labels leave it."""
    shape, _ = shape_of(node, 0)
    for axis, state in wish.states:
        if isinstance(state, Split) and state.dim >= len(shape):
            problem = f"{wish.reason}: the tensor has no dim {state.dim}"
            return at_node(problem, node, f"Its dims are 0 to {len(shape) - 1}." if shape else "It has no dims.")
        if isinstance(state, Split) and not may_cut(shape[state.dim], (mesh.sizes[axis],), False, True):
            what = f"dim {state.dim} of {tuple(shape)} cannot be split over axis {mesh.axes[axis]!r}"
            problem = f"{wish.reason}: {what}: {shape[state.dim]} elements, {mesh.sizes[axis]} ranks"
            return at_node(problem, node, "Pin another dim, or pad it to a multiple of the axis.")
    offered = [str(decode(code, mesh.axes)) for code in dict.fromkeys(codes.tolist())]
    more = f" and {len(offered) - 8} more" if len(offered) > 8 else ""
    return at_node(f"{wish.reason} cannot be met", node, f"It can be left in {', '.join(offered[:8])}{more}.")
