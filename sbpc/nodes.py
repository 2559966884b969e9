"""Nodes made and copied without what takes longer in fx: `create_node`'s walk through all arguments in search of symbols,
and an assignment's taking the node out of its graph's index and in again, though that knows of op and target alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

put = object.__setattr__  # of `args`, `kwargs` or `meta` of a node


def called(graph: Graph, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None = None) -> Node:
    """A call of `op` at the end of the graph."""
    node = graph.create_node("call_function", op, name=name)
    put(node, "args", tuple(args))
    if kwargs:
        put(node, "kwargs", dict(kwargs))
    return node


def copied(graph: Graph, node: Node, read: Callable[[Node], Any]) -> Node:
    """A copy of a node of another graph; read: what stands for each of its operands here."""
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    put(copy, "args", map_arg(node.args, read))
    if node.kwargs:
        put(copy, "kwargs", map_arg(node.kwargs, read))
    put(copy, "meta", dict(node.meta))
    return copy
