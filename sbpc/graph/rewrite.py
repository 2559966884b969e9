"""Writing a rewritten graph: every op of the old one is copied, or replaced by what its rewrite writes.

A rewrite takes the writer and the arguments of the call, and gives a node, or a tuple of nodes for several results;
None leaves the op as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sbpc._compat import FakeTensorMode, LazyGraphModule
from sbpc.graph.operands import hashable, named_arguments

aten = torch.ops.aten


class Writer:
    """The new graph being written, at the place of the node `about` of the old graph."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.graph = Graph()
        self.about: Any = None
        self.known: dict[Any, Any] = {}  # what an op gives, by the op and its arguments, tensors by their metadata

    @property
    def target(self) -> Any:
        """The op that is being rewritten."""
        return self.about.target

    @property
    def value(self) -> Tensor:
        """What that op gave."""
        found: Tensor = self.about.meta["val"]
        return found

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of that op by name, defaults included."""
        return named_arguments(self.target, args, kwargs)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """A node of `op` with its value recomputed; calls that are alike share one fake tensor."""
        node = called(self.graph, op, args, kwargs, str(op._schema.name).split("::")[1])
        key = op, hashable((args, kwargs), _metadata)
        if key not in self.known:
            given, named = map_arg((args, kwargs), lambda operand: operand.meta["val"])
            with self.mode, torch.no_grad():
                self.known[key] = op(*given, **named)
        return self._described(node, self.known[key])

    def part(self, source: Node, at: int) -> Node:
        """One of the results of an op that gives several."""
        node = called(self.graph, operator.getitem, (source, at), {})
        return self._described(node, source.meta["val"][at])

    def _described(self, node: Node, value: Any) -> Node:
        put(node, "meta", {**self.about.meta, "val": value})
        return node


def rewrite(gm: GraphModule, rewrites: Mapping[Any, Callable[..., Any]]) -> GraphModule:
    """The graph with the ops that `rewrites` names rewritten and dead code removed; `gm` stays as it was."""
    new: dict[Node, Any] = {}
    writer = Writer(mode_of(gm))
    for node in gm.graph.nodes:
        write = rewrites.get(node.target)
        if write is not None:
            writer.about = node
            args, kwargs = map_arg((node.args, node.kwargs), new.__getitem__)
            new[node] = write(writer, *args, **kwargs)
        if new.get(node) is None:
            new[node] = copied(writer.graph, node, new.__getitem__)
    _erase_dead(writer.graph)
    result = LazyGraphModule(gm, writer.graph)  # nobody runs it
    result.meta.update(gm.meta)
    return result


def _metadata(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device


def _erase_dead(graph: Graph) -> None:
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def mode_of(gm: GraphModule) -> FakeTensorMode:
    return next(node.meta["val"].fake_mode for node in gm.graph.nodes if isinstance(node.meta.get("val"), Tensor))


def permute(write: Writer, x: Node, dims: Sequence[int]) -> Node:
    """Permutations of permutations become one; the identity goes."""
    order = [dim % len(dims) for dim in dims]
    if x.target is aten.permute.default:
        inner: Any = x.args[1]
        x, order = x.args[0], [inner[dim] for dim in order]  # type: ignore[assignment]
    return x if order == sorted(order) else write.call(aten.permute.default, x, order)


def view(write: Writer, x: Node, size: Sequence[int]) -> Node:
    """Sizes without -1."""
    return shaped(write, x, write.value.shape)


def shaped(write: Writer, x: Node, size: Sequence[int]) -> Node:
    """x viewed as `size`: an earlier value of that shape, or else one view, not a view of a view."""
    source: Any = x
    while list(source.meta["val"].shape) != list(size):
        if source.target is not aten.view.default:
            return write.call(aten.view.default, source, list(size))
        source = source.args[0]
    return source


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
