"""What a node reads and makes: its tensor operands in schema order, the producer of a value, shapes and sizes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node


def operands(node: Node) -> tuple[Node, ...]:
    """The tensor operands of a call in schema order, lists flattened; a node used twice stands twice."""
    found: list[Node] = []
    gather(node.args, found)
    if node.kwargs:
        gather(node.kwargs.values(), found)
    return tuple(found)


def nodes_in(value: Any) -> list[Node]:
    """All nodes inside nested arguments, in order."""
    found: list[Node] = []
    gather((value,), found)
    return found


def gather(values: Iterable[Any], found: list[Node]) -> None:
    """Add all nodes inside nested arguments, in order; most arguments are nodes or numbers."""
    for value in values:
        if isinstance(value, Node):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            gather(value, found)
        elif isinstance(value, dict):
            gather(value.values(), found)


def with_operands(value: Any, replaced: Iterator[Any]) -> Any:
    """The nested arguments with each node, in the order of `operands`, taken from `replaced`."""
    if isinstance(value, Node):
        return next(replaced)
    if isinstance(value, Mapping):
        return {key: with_operands(item, replaced) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(with_operands(item, replaced) for item in value)
    return value


def value_of(node: Node) -> tuple[Node, int]:
    """The node that produces what `node` stands for, and which of its outputs it is."""
    if node.op == "call_function" and node.target is operator.getitem:
        producer, index = node.args[0], node.args[1]
        assert isinstance(producer, Node) and isinstance(index, int)
        return producer, index
    return node, 0


def tensors_of(node: Node) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Bytes per element and global shape of every operand and output; an output that is not a tensor has no elements."""
    places = [value_of(operand) for operand in operands(node)]
    return tuple(shape_of(*place)[::-1] for place in (*places, *((node, index) for index in range(outputs_of(node)))))


def outputs_of(node: Node) -> int:
    """How many outputs a node has."""
    value = node.meta.get("val")
    return len(value) if isinstance(value, (tuple, list)) else 1


def shape_of(node: Node, index: int) -> tuple[tuple[int, ...], int]:
    """Global shape and bytes per element of an output of a node."""
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        value = value[index]
    return (tuple(value.shape), value.element_size()) if isinstance(value, torch.Tensor) else ((0,), 0)
