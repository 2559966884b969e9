"""What layouts a user wishes: of inputs, outputs and pinned values, as sets of allowed signatures of nodes."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule

from sbpc.errors import PinError
from sbpc.graph.ports import BUFFER, INPUT, OUTPUT, PARAMETER, TANGENT, placeholders
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.pins import Wish, exactly, parse_layout, resolve_pins


def placeholder_wishes(gm: GraphModule, mesh: Mesh, inputs: Any, outputs: Any, spread: bool) -> dict[str, Wish]:
    """How inputs, tangents, buffers and, with `spread`, parameters are stored."""
    ports = gm.meta["ports"]
    count = sum(port.kind == INPUT for port in ports.inputs)
    results = sum(port.kind == OUTPUT for port in ports.outputs)
    for name, given, there in (("inputs", inputs, count), ("outputs", outputs, results)):
        if given is not None and len(given) != there:
            raise PinError(
                f"{name}= has {len(given)} layouts for {there} tensors\n  Give one per tensor, None for whole."
            )
    wishes: dict[str, Wish] = {}
    for port, node in placeholders(gm).items():
        reason = f"{port.kind} {port.name}"
        if spread and port.kind in (PARAMETER, INPUT):
            wishes[node.name] = Wish(spread=wide_axes(mesh), reason=f"{reason} stored once (spread=True)")
        elif port.kind in (INPUT, TANGENT):
            given = inputs if port.kind == INPUT else outputs
            text = None if given is None else given[int(port.name)]
            wishes[node.name] = exactly(parse_layout(text, mesh, reason), reason)
        elif port.kind == BUFFER:
            wishes[node.name] = exactly(parse_layout(None, mesh, reason), reason)
    return wishes


def wide_axes(mesh: Mesh) -> tuple[int, ...]:
    """The axes of more than one rank."""
    return tuple(axis for axis, size in enumerate(mesh.sizes) if size > 1)


def output_wishes(gm: GraphModule, mesh: Mesh, outputs: Any, spread: bool) -> dict[int, Wish]:
    """How results are left, by place in the output list."""
    wishes = {}
    for at, port in enumerate(gm.meta["ports"].outputs):
        reason = f"output {port.name}"
        if port.kind == OUTPUT and outputs is not None and outputs[int(port.name)] is not None:
            wishes[at] = exactly(parse_layout(outputs[int(port.name)], mesh, reason), reason)
        elif port.kind == OUTPUT and spread:
            wishes[at] = Wish(spread=wide_axes(mesh), reason=f"{reason} stored once (spread=True)")
    return wishes


def pin_wishes(gm: GraphModule, mesh: Mesh, pins: Mapping[str, str], stored: Mapping[str, Wish]) -> dict[str, Wish]:
    """Pins by node: a pattern is matched with parameters, and with values only where it matches no parameter.

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
    meant = {pattern: bool(fnmatch.filter(known, pattern)) for pattern in pins}
    names = parameters | ({} if all(meta for meta in meant.values()) else values)
    found = resolve_pins({pattern: text for pattern, text in pins.items() if meant[pattern]}, parameters, mesh)
    found |= resolve_pins({pattern: text for pattern, text in pins.items() if not meant[pattern]}, names, mesh)
    for name, wish in found.items():
        if name in stored and stored[name].states:
            raise PinError(
                f"{wish.reason} pins an input or a buffer\n  Lay out inputs with inputs=; buffers are whole."
            )
    return found
