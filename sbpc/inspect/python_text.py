"""Writes a graph as Python that runs: one line a value, with its type, its layout, its module and the model's own
line beside it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sbpc._compat import OpOverload
from sbpc.graph.operands import value_of
from sbpc.inspect.graph_text import layout_text, note, port_names, type_text
from sbpc.inspect.page_graph import origins
from sbpc.mesh.mesh import Mesh

HEADER = '''"""{title}

Rows say what is made, its type and its layout. It runs as it is: call `forward` with the tensors that it names.
"""

import torch

import sbpc  # for the ops of sbpc
'''


def python_text(gm: GraphModule, mesh: Mesh, title: str) -> str:
    """Returns a module of Python with one function, `forward`, that computes what the graph computes.

    title: a sentence for its docstring. A boxing of a graph at global shapes changes nothing, as there.
    """
    names, lines = port_names(gm), ["", ""]
    constants = [node for node in gm.graph.nodes if node.op == "get_attr"]
    lines += [f"{node.name} = {constant_text(getattr(gm, str(node.target)))}" for node in constants]
    lines += ["", ""] if constants else []
    lines += ["def forward("]
    for node in gm.graph.find_nodes(op="placeholder"):
        lines.append(f"    {node.name},  # {one_line(described(node) + (f'  {names[node]}' if node in names else ''))}")
    lines.append("):")
    place = ""
    for node, (origin, _) in zip(gm.graph.nodes, origins(gm)):
        if node.op == "output":
            lines.append(f"    return {argument(node.args[0])}")
        elif node.op == "call_function":
            module = str(value_of(node)[0].meta.get("module", ""))
            heading = "  ".join(part for part in (node.meta.get("phase", ""), module, origin) if part)
            if heading and heading != place:
                lines.append(f"    # {one_line(heading)}")
            place = heading or place
            about = described(node) + (f"  {note(node, mesh)}" if "step" in node.meta else "")
            lines.append(f"    {node.name} = {call(node)}  # {one_line(about)}")
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function" and value_of(node)[0] is node]
    own = dict.fromkeys((f.__module__, f.__name__) for f in targets if callable(f) and not isinstance(f, OpOverload))
    imports = "".join(f"from {module} import {name}\n" for module, name in own)
    return HEADER.format(title=one_line(title)) + imports + "\n".join(lines) + "\n"


def described(node: Node) -> str:
    """Returns type and layout of a value."""
    return "  ".join(part for part in (type_text(node), layout_text(node)) if part)


def call(node: Node) -> str:
    """Returns the expression that makes a value."""
    producer, index = value_of(node)
    if producer is not node:
        return f"{producer.name}[{index}]"
    arguments = [argument(item) for item in node.args]
    arguments += [f"{name}={argument(item)}" for name, item in node.kwargs.items()]
    target: Any = node.target
    function = f"torch.ops.{target}" if isinstance(target, OpOverload) else target.__name__
    return f"{function}({', '.join(arguments)})"


def argument(value: Any) -> str:
    """Returns an argument of a call as an expression."""
    if isinstance(value, Node):
        return value.name
    if isinstance(value, tuple):
        return "(" + "".join(f"{argument(item)}, " for item in value).rstrip() + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(argument, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, torch.device):
        return f"torch.{value!r}"
    return repr(value)


def constant_text(value: torch.Tensor) -> str:
    """Returns a constant tensor as an expression."""
    flat = ", ".join(argument(item) for item in value.flatten().tolist())
    return f"torch.tensor([{flat}], dtype={value.dtype}).reshape({list(value.shape)})"


def one_line(text: str) -> str:
    """Returns the text on one line, without what would end a comment or a docstring."""
    return "".join(c if c.isprintable() and c not in '"\\\\' else "'" if c == '"' else "?" for c in text)
