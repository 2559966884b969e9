"""A graph as text, one value a line: name, type and shape, layout, how it is made. Annotated, boxed and local graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from sbpc.boxing.steps import wire
from sbpc.errors import dtype_text
from sbpc.graph.operands import value_of
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh


def graph_text(gm: GraphModule, mesh: Mesh | None = None) -> str:
    """The graph as aligned columns; with a mesh, what each boxing sends."""
    names = port_names(gm)
    rows = [
        (names.get(node, node.name), type_text(node), layout_text(node), call_text(node, names), note(node, mesh))
        for node in gm.graph.nodes
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths) if width]
        lines.append(("  ".join(cells) + ("  # " + row[4] if row[4] else "")).rstrip())
    return "\n".join(lines) + "\n"


def port_names(gm: GraphModule) -> dict[Node, str]:
    """Parameters and buffers under their qualified names."""
    ports = gm.meta["ports"].inputs
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return {node: port.name for node, port in zip(placeholders, ports) if port.kind in ("parameter", "buffer")}


def type_text(node: Node) -> str:
    """`f32[6, 16]`, or several of them in parentheses."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return tensor_text(value)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(tensor_text(v) if isinstance(v, torch.Tensor) else "-" for v in value) + ")"
    return ""


def tensor_text(value: torch.Tensor) -> str:
    """The type and shape of a tensor."""
    return f"{dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"


def layout_text(node: Node) -> str:
    """The layout without brackets on a mesh of one axis; several in parentheses."""
    sbp = node.meta.get("sbp")
    if isinstance(sbp, tuple):
        return "(" + ", ".join(map(short, sbp)) + ")"
    return short(sbp) if isinstance(sbp, Layout) else ""


def short(layout: Layout) -> str:
    """`S(0)` on one axis, `[B, S(0)]` on several."""
    return str(layout.states[0]) if len(layout.states) == 1 else str(layout)


def call_text(node: Node, names: dict[Node, str]) -> str:
    """How the value is made."""
    if node.op == "placeholder":
        return "input" if node not in names else "parameter"
    if node.op == "output":
        return "output(" + ", ".join(argument_text(item, names) for item in node.args[0]) + ")"  # type: ignore[union-attr]
    step = node.meta.get("step")
    if step is not None:
        return f"{step.collective}({argument_text(node.args[0], names)})"
    producer, index = value_of(node)
    if producer is not node:
        return f"{names.get(producer, producer.name)}[{index}]"
    arguments = [argument_text(item, names) for item in node.args]
    arguments += [f"{key}={argument_text(item, names)}" for key, item in node.kwargs.items()]
    return f"{target_text(node.target)}({', '.join(arguments)})"


def target_text(target: Any) -> str:
    """`aten.mm`, with the overload where it is not the default one."""
    return str(target).removesuffix(".default")


def argument_text(value: Any, names: dict[Node, str]) -> str:
    """One argument of a call."""
    if isinstance(value, Node):
        return names.get(value, value.name)
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(argument_text(item, names) for item in value) + "]"
    return str(value).removeprefix("torch.")


def note(node: Node, mesh: Mesh | None) -> str:
    """Of a boxing: from which layout to which, over what, and the bytes that a rank sends."""
    step = node.meta.get("step")
    if step is None:
        return ""
    before, after = ("".join(short(layout)) for layout in (step.before, step.after))
    axes = "+".join(step.before.axes[at] for at in step.axes)
    text = f"{before} -> {after} over {axes}"
    if mesh is None:
        return text
    value = node.meta["val"]
    sent = wire(step, tuple(value.shape), value.element_size(), mesh.sizes)[1]
    return f"{text}, {float(sent):,.0f} bytes"
