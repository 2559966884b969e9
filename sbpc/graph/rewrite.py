"""Writing a graph anew: every node of the old one is copied, or replaced by what stands for it.

A rewrite of an op takes the writer and the arguments of the call, and gives a node, or a tuple of nodes for several
results; None leaves the op as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sbpc._compat import FakeTensorMode, LazyGraphModule
from sbpc.graph.about import ORIGIN, about
from sbpc.graph.operands import ancestors, hashable, named_arguments

aten = torch.ops.aten


class Copies(dict[Node, Any]):
    """A graph that is being written: by node of another one, what stands for it here."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()

    def keep(self, node: Node, read: Callable[[Node], Any] | None = None) -> Node:
        """Copies a node. read: what stands for each of its operands, where that is not what stands here for all
        readers."""
        self[node] = made = copied(self.graph, node, read or self.__getitem__)
        return made

    def given(self, name: str, meta: Mapping[str, Any]) -> Node:
        """Writes a placeholder."""
        node = self.graph.placeholder(name)
        put(node, "meta", dict(meta))
        return node

    def left(self, outputs: Iterable[Node | None], meta: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Writes what is returned: what stands for these nodes."""
        self.graph.output(tuple(None if node is None else self[node] for node in outputs)).meta.update(meta)

    def module(self, gm: GraphModule, meta: Mapping[str, Any] | None = None) -> GraphModule:
        """Returns the module of this graph, with the constants of another one, and its meta by default. Its code is
        made when it is run."""
        result = LazyGraphModule(gm, self.graph)
        result.meta.update(gm.meta if meta is None else meta)
        return result

    def extracted(self, gm: GraphModule, nodes: Iterable[Node], outputs: Sequence[Node | None]) -> GraphModule:
        """Returns the program that computes `outputs` from what stands here, by those of `nodes` that they need, in
        this order."""
        needed = ancestors([node for node in outputs if node is not None], self)
        for node in nodes:
            if node in needed and node not in self:
                self.keep(node)
        self.left(outputs)
        return self.module(gm, {})


def rebuild(
    gm: GraphModule,
    write: Callable[[Copies, Node], Any] = lambda copies, node: None,
    order: Iterable[Node] | None = None,
) -> GraphModule:
    """Returns the graph written anew; `gm` stays as it was.

    write: writes what stands for a node and returns it, None for a copy. order: of the nodes; the output is always
    last.
    """
    copies = Copies()
    for node in gm.graph.nodes if order is None else order:
        if node.op != "output":
            copies[node] = write(copies, node) or copied(copies.graph, node, copies.__getitem__)
    copies.keep(gm.graph.output_node())
    return copies.module(gm)


class Writer(Copies):
    """A graph of which ops are rewritten, at the place of the node `about` of the old graph."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.about: Any = None
        self.known: dict[Any, Any] = {}  # what an op gives, by the op and its arguments, tensors by their metadata

    def turn_to(self, node: Node) -> None:
        """Makes a node the one that is being rewritten, where what is known of its layouts does not go along."""
        self.about = SimpleNamespace(target=node.target, name=node.name, meta=about(node, ("val", *ORIGIN)))

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
        return self.made(op, args, kwargs, str(op._schema.name).split("::")[1])

    def made(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Node:
        """A call of this name."""
        key = op, hashable((args, kwargs), _metadata)
        if key not in self.known:
            given, named = map_arg((args, kwargs), lambda operand: operand.meta["val"])
            with self.mode, torch.no_grad():
                self.known[key] = op(*given, **named)
        return called(self.graph, op, args, kwargs, name, self.about.meta | {"val": self.known[key]})

    def part(self, source: Node, at: int) -> Node:
        """One of the results of an op that gives several."""
        return called(
            self.graph, operator.getitem, (source, at), {}, meta=self.about.meta | {"val": source.meta["val"][at]}
        )


def rewrite(gm: GraphModule, rewrites: Mapping[Any, Callable[..., Any]]) -> GraphModule:
    """The graph with the ops that `rewrites` names rewritten and dead code removed; `gm` stays as it was."""
    writer = Writer(mode_of(gm))
    for node in gm.graph.nodes:
        if (write := rewrites.get(node.target)) is not None:
            writer.about = node
            args, kwargs = map_arg((node.args, node.kwargs), writer.__getitem__)
            writer[node] = write(writer, *args, **kwargs)
        if writer.get(node) is None:
            writer.keep(node)
    drop_unused(writer.graph)
    return writer.module(gm)


def drop_unused(graph: Graph) -> None:
    """Removes the calls and constants that nothing reads."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _metadata(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device


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
            try:
                return write.call(aten.view.default, source, list(size))
            except (RuntimeError, ValueError):  # its elements do not lie so that a view could read them
                return write.call(
                    aten.view.default, write.call(aten.clone.default, source, memory_format=CONTIGUOUS), list(size)
                )
        source = source.args[0]
    return source


CONTIGUOUS = torch.contiguous_format
put = object.__setattr__  # of `args`, `kwargs` or `meta` of a node


def called(
    graph: Graph,
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    name: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Node:
    """A call of `op` at the end of the graph."""
    node = graph.create_node("call_function", op, name=name)
    put(node, "args", tuple(args))
    if kwargs:
        put(node, "kwargs", dict(kwargs))
    if meta is not None:
        put(node, "meta", dict(meta))
    return node


def copied(graph: Graph, node: Node, read: Callable[[Node], Any]) -> Node:
    """A copy of a node of another graph; read: what stands for each of its operands here."""
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    put(copy, "args", map_arg(node.args, read))
    if node.kwargs:
        put(copy, "kwargs", map_arg(node.kwargs, read))
    put(copy, "meta", dict(node.meta))
    return copy
