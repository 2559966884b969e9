"""Writes an annotated, boxed or local graph as text, one value a line: name, type and shape, layout, how it is made."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from sbpc.boxing.steps import wire
from sbpc.errors import dtype_text
from sbpc.graph.operands import value_of
from sbpc.graph.ports import BUFFER, PARAMETER, placeholders
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.measure import transfers_of


def graph_text(gm: GraphModule, mesh: Mesh | None = None) -> str:
    """Returns the graph as aligned columns; with a mesh, also what each boxing sends."""
    names = port_names(gm)
    rows = [
        (names.get(node, node.name), type_text(node), layout_text(node), call_text(node, names), note(node, mesh))
        for node in gm.graph.nodes
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines = []
    for row in rows:
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths) if width)
        lines.append(f"{cells}  # {row[4]}" if row[4] else cells.rstrip())
    return "\n".join(lines) + "\n"


def port_names(gm: GraphModule) -> dict[Node, str]:
    """Returns the qualified names of parameters and buffers."""
    return {node: port.name for port, node in placeholders(gm).items() if port.kind in (PARAMETER, BUFFER)}


def type_text(node: Node) -> str:
    """Returns `f32[6, 16]`, or several of them in parentheses."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(tensor_text(v) if isinstance(v, torch.Tensor) else "-" for v in value) + ")"
    return ""


def tensor_text(value: torch.Tensor) -> str:
    """Returns type and shape of a tensor."""
    return f"{dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"


def layout_text(node: Node) -> str:
    """Returns the layout of a value, of several in parentheses."""
    sbp = node.meta.get("sbp")
    if isinstance(sbp, tuple):
        return "(" + ", ".join(map(short, sbp)) + ")"
    return short(sbp) if isinstance(sbp, Layout) else ""


def short(layout: Layout) -> str:
    """Returns `S(0)` for a mesh of one axis, `[B, S(0)]` for one of several."""
    return str(layout.states[0]) if len(layout.states) == 1 else str(layout)


def call_text(node: Node, names: dict[Node, str]) -> str:
    """Returns how the value is made."""
    if node.op == "placeholder":
        return "input" if node not in names else "parameter"
    if node.op == "output":
        results: Any = node.args[0]
        return f"output({', '.join(argument_text(item, names) for item in results)})"
    step = node.meta.get("step")
    if step is not None:
        return f"{step.collective}({argument_text(node.args[0], names)})"
    if "awaits" in node.meta:
        return f"wait({argument_text(node.args[0], names)})"
    producer, index = value_of(node)
    if producer is not node:
        return f"{names.get(producer, producer.name)}[{index}]"
    arguments = [argument_text(item, names) for item in node.args]
    arguments += [f"{key}={argument_text(item, names)}" for key, item in node.kwargs.items()]
    return f"{str(node.target).removesuffix('.default')}({', '.join(arguments)})"


def argument_text(value: Any, names: dict[Node, str]) -> str:
    """Returns one argument of a call."""
    if isinstance(value, Node):
        return names.get(value, value.name)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(argument_text(item, names) for item in value) + "]"
    return str(value).removeprefix("torch.")


def note(node: Node, mesh: Mesh | None) -> str:
    """Returns from which layout to which a boxing leads, over what, and the bytes that a rank sends."""
    step = node.meta.get("step")
    if step is None:
        return ""
    axes = "+".join(step.before.axes[at] for at in step.axes)
    text = f"{short(step.before)} -> {short(step.after)} over {axes}"
    return text if mesh is None else f"{text}, {bytes_sent(node, mesh):,.0f} bytes"


def bytes_sent(node: Node, mesh: Mesh) -> float:
    """Returns the bytes that the busiest rank sends for a boxing, or for rows of experts, 0 for any other node."""
    moved = transfers_of(node, mesh) if node.meta.get("val") is not None else []
    return sum(float(wire(each.step, each.shape, each.itemsize, mesh.sizes)[1]) for each in moved)
