"""What a node reads and makes: its operands, its arguments by name, the producer of a value, shapes and sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from sbpc._compat import OpOverload

T = TypeVar("T")


def operands(node: Node) -> tuple[Node, ...]:
    """The tensor operands of a call in schema order, lists flattened; a node used twice stands twice."""
    return tuple(nodes_in((node.args, node.kwargs)))


def nodes_in(value: Any) -> list[Node]:
    """All nodes inside nested arguments, in order."""
    found: list[Node] = []
    map_arg(value, found.append)
    return found


def leaves(value: Any, kind: type[T] | tuple[type[T], ...]) -> list[T]:
    """What of a kind, or of some, is inside nested arguments, in order."""
    found: list[T] = []
    map_aggregate(value, lambda item: found.append(item) if isinstance(item, kind) else None)
    return found


def named_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, in the order of the op's schema, defaults included."""
    schema = op._schema.arguments
    given = {**dict(zip((argument.name for argument in schema), args)), **kwargs}
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


def with_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], changed: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with other values for some of them, by name."""
    names = [argument.name for argument in op._schema.arguments][: len(args)] if changed else []
    placed = [changed.get(name, value) for name, value in zip(names, args)] if changed else list(args)
    return placed, {**kwargs, **{name: value for name, value in changed.items() if name not in names}}


PLAIN = frozenset((bool, float, int, str, type(None)))


def hashable(value: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """A hashable picture of nested arguments: tensors as `of_tensor` says, nodes as the tensors that they stand for."""
    kind = type(value)
    if kind in PLAIN:
        return kind, value
    if kind is Node:
        value = value.meta["val"]
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, (tuple, list)):
        return (list, *[hashable(item, of_tensor) for item in value])
    if isinstance(value, Mapping):
        return (dict, *[(name, hashable(item, of_tensor)) for name, item in value.items()])
    return type(value), value


def value_of(node: Node) -> tuple[Node, int]:
    """The node that produces what `node` stands for, and which of its outputs it is."""
    if node.op == "call_function" and node.target is operator.getitem:
        producer, index = node.args[0], node.args[1]
        assert isinstance(producer, Node) and isinstance(index, int)
        return producer, index
    return node, 0


def tensors_of(node: Node) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Bytes per element and global shape of every operand and output; an output that is not a tensor has no
    elements."""
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
    return (tuple(value.shape), value.element_size()) if isinstance(value, Tensor) else ((0,), 0)


ADD = torch.ops.aten.add_.Tensor


def is_sum(node: Node) -> bool:
    """Returns whether a node adds to a sum in place, which no op of a captured graph does: a gradient of a
    micro-batch."""
    return node.target is ADD


def reached(nodes: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Nodes and all to which one comes from them."""
    found, todo = set[Node](), list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += onward(node)
    return found


def ancestors(nodes: Iterable[Node], stop: Container[Node] = ()) -> set[Node]:
    """Nodes and all that they depend on, no further than `stop`."""
    return reached(nodes, lambda node: () if node in stop else node.all_input_nodes)


def depending_on(nodes: Iterable[Node]) -> set[Node]:
    """Nodes and all that depends on them."""
    return reached(nodes, lambda node: node.users)


def made_of(gm: GraphModule, given: Iterable[Node]) -> set[Node]:
    """Returns the given nodes and the calls that read these and nothing else."""
    made = set(given)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
    return made


def is_late(node: Node) -> bool:
    """Returns whether a node is a call or a constant of the backward; one of several results is where its producer
    is."""
    return node.op in ("call_function", "get_attr") and value_of(node)[0].meta.get("phase") == "backward"


def just_in_time(nodes: Iterable[Node], free: Container[Node]) -> list[Node]:
    """Returns nodes in order, those of `free` right in front of the first that reads them, and not at all if nothing
    does."""
    placed: dict[Node, None] = {}

    def place(node: Node) -> None:
        for used in node.all_input_nodes:
            if used in free and used not in placed:
                place(used)
        placed[node] = None

    for node in nodes:
        if node not in free and node not in placed:
            place(node)
    return list(placed)


def functional_form(func: Any) -> Any:
    """Returns the op that returns what the in-place op `func` writes, or None: it takes the same arguments. Its
    overload may have another name: pow_.Scalar is pow.Tensor_Scalar, and pow.Scalar the power of a number."""
    space, name = func._schema.name.split("::")
    packet: Any = getattr(getattr(torch.ops, space), name[:-1], None) if name.endswith("_") else None
    names = [] if packet is None else sorted(packet.overloads(), key=lambda each: each != func._overloadname)
    ops = (getattr(packet, each) for each in names)
    return next((op for op in ops if not op._schema.is_mutable and takes(op) == takes(func)), None)


def takes(op: Any) -> list[tuple[str, str]]:
    """Returns the names and types of the arguments of an op."""
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]
