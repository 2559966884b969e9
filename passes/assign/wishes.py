"""What layouts must be like: what the user asks of inputs, outputs, parameters and values, as wishes for nodes and outputs.

A wish leaves a node the signatures whose first output is as wished, see `sbpc.mesh.pins.Wish`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch.fx import GraphModule

from sbpc.errors import PinError, PlanError
from sbpc.graph.ports import BUFFER, INPUT, OUTPUT, PARAMETER, TANGENT, placeholders
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish, both, exactly, parse_layout, resolve_pins
from sbpc.passes.assign.expert_schemes import EXPERTS, expert_wishes
from sbpc.passes.assign.expert_structure import Model

Layouts = Sequence[str | Layout | None] | None  # one layout per tensor, None for whole


@dataclass(frozen=True)
class Requests:
    """What the user asks of layouts, as `sbpc.plan` takes it. baseline: the expert whose scheme is followed."""

    pins: Mapping[str, str]
    inputs: Layouts = None
    outputs: Layouts = None
    spread: bool = False
    baseline: str | None = None


@dataclass(frozen=True)
class Wishes:
    """Wishes by name of a node, and for outputs by place in the output list."""

    nodes: dict[str, Wish]
    outputs: dict[int, Wish]


def wishes(gm: GraphModule, mesh: Mesh, requests: Requests) -> Wishes:
    """Returns the wishes that requests state.

    Raises PinError if one names nothing, or two contradict each other, and PlanError if the baseline does not fit.
    """
    stored = placeholder_wishes(gm, mesh, requests.inputs, requests.outputs, requests.spread)
    nodes = both(stored, pin_wishes(gm, mesh, requests.pins, stored), mesh)
    if requests.baseline is not None:
        nodes = both(nodes, expert_wishes(Model(gm), mesh, requests.baseline), mesh)
    return Wishes(nodes, output_wishes(gm, mesh, requests.outputs, requests.spread))


def expert_alternatives(gm: GraphModule, mesh: Mesh, asked: Mapping[str, Wish]) -> Iterator[dict[str, Wish]]:
    """Yields what was asked together with the scheme of each expert that fits the model, the mesh and what was asked."""
    model = Model(gm)
    for name in EXPERTS:
        with suppress(PinError, PlanError):
            yield both(asked, expert_wishes(model, mesh, name), mesh)


def placeholder_wishes(
    gm: GraphModule, mesh: Mesh, inputs: Layouts, outputs: Layouts, spread: bool
) -> dict[str, Wish]:
    """Returns how inputs, tangents, buffers and, with `spread`, parameters are stored."""
    ports = gm.meta["ports"]
    count = sum(port.kind == INPUT for port in ports.inputs)
    results = sum(port.kind == OUTPUT for port in ports.outputs)
    for name, given, there in (("inputs", inputs, count), ("outputs", outputs, results)):
        if given is not None and len(given) != there:
            raise PinError(
                f"{name}= has {len(given)} layouts for {there} tensors\n  Give one per tensor, None for whole."
            )
    layouts = {INPUT: inputs, TANGENT: outputs, BUFFER: None}
    stored: dict[str, Wish] = {}
    for port, node in placeholders(gm).items():
        reason = f"{port.kind} {port.name}"
        if spread and port.kind in (PARAMETER, INPUT):
            stored[node.name] = stored_once(mesh, reason)
        elif port.kind in layouts:
            given = layouts[port.kind]
            text = None if given is None else given[int(port.name)]
            stored[node.name] = exactly(parse_layout(text, mesh, reason), reason)
    return stored


def output_wishes(gm: GraphModule, mesh: Mesh, outputs: Layouts, spread: bool) -> dict[int, Wish]:
    """Returns how results are left, by place in the output list."""
    left = {}
    for at, port in enumerate(gm.meta["ports"].outputs):
        reason = f"output {port.name}"
        if port.kind == OUTPUT and outputs is not None and outputs[int(port.name)] is not None:
            left[at] = exactly(parse_layout(outputs[int(port.name)], mesh, reason), reason)
        elif port.kind == OUTPUT and spread:
            left[at] = stored_once(mesh, reason)
    return left


def stored_once(mesh: Mesh, reason: str) -> Wish:
    """Returns the wish of `spread=True`: every axis of more than one rank splits the tensor."""
    wide = tuple(axis for axis, size in enumerate(mesh.sizes) if size > 1)
    return Wish(spread=wide, reason=f"{reason} stored once (spread=True)")


def pin_wishes(gm: GraphModule, mesh: Mesh, pins: Mapping[str, str], stored: Mapping[str, Wish]) -> dict[str, Wish]:
    """Returns pins by node. A pattern is matched with parameters, and with values only where it matches no parameter.

    stored: the wishes for what is laid out otherwise. Raises PinError if a pin names such a node.
    """
    ports = gm.meta["ports"]
    parameters: dict[str, list[str]] = {}
    for port, node in placeholders(gm).items():
        if port.kind == PARAMETER:
            parameters[node.name] = [port.name, *(name for name, first in ports.tied.items() if first == port.name)]
    values = {
        node.name: [node.name] for node in gm.graph.nodes if "candidates" in node.meta and node.name not in parameters
    }
    known = [name for names in parameters.values() for name in names]
    of_parameters = {pattern: text for pattern, text in pins.items() if fnmatch.filter(known, pattern)}
    others = {pattern: text for pattern, text in pins.items() if pattern not in of_parameters}
    pinned = resolve_pins(of_parameters, parameters, mesh) | resolve_pins(others, parameters | values, mesh)
    for name, wish in pinned.items():
        if name in stored and stored[name].states:
            raise PinError(
                f"{wish.reason} pins an input or a buffer\n  Lay out inputs with inputs=; buffers are whole."
            )
    return pinned
