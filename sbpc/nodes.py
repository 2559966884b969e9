"""Nodes made and copied without `create_node`'s walk through all arguments in search of symbols, which takes longer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg


def called(graph: Graph, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None = None) -> Node:
    """A call of `op` at the end of the graph."""
    node = graph.create_node("call_function", op, name=name)
    node.args = tuple(args)
    if kwargs:
        node.kwargs = dict(kwargs)
    return node


def copied(graph: Graph, node: Node, read: Callable[[Node], Any]) -> Node:
    """A copy of a node of another graph; read: what stands for each of its operands here."""
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    copy.args = map_arg(node.args, read)
    if node.kwargs:
        copy.kwargs = map_arg(node.kwargs, read)
    copy.meta = dict(node.meta)
    return copy
