"""decompose: an op without a rule becomes the calls that torch says it is made of, if all of them have rules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from sbpc._compat import OpOverload, TorchDispatchMode, decompositions, tree_leaves
from sbpc.graph.operands import nodes_in
from sbpc.graph.rewrite import Writer, rewrite
from sbpc.rules import match
from sbpc.rules.binding import flat_outputs


def decompose(gm: GraphModule) -> GraphModule:
    """The graph with the ops taken apart that have no rule; `meta["decomposed"]` of the calls says of which op they are.

    Before: a canonical graph. After: an op without a rule is one that torch has no decomposition of, or one with a part
    that has no rule. The parts have the module and the line of the op.
    """
    lacking = dict.fromkeys(node.target for node in gm.graph.nodes if lacks_rule(node))
    table = decompositions() if lacking else {}
    found = {op: Apart(table) for op in lacking if op in table and torch.Tag.nondeterministic_seeded not in op.tags}
    return rewrite(gm, {**found, operator.getitem: part}) if found else gm


def lacks_rule(node: Node) -> bool:
    """Whether a call has no rule."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return match(node.target, args, kwargs, node.meta["val"]) is None


def part(_: Writer, x: Any, at: int) -> Any:
    """A result of an op that was taken apart."""
    return x[at] if isinstance(x, tuple) else None


class NoRule(Exception):
    """A part has neither a rule nor a decomposition."""


class Apart:
    """Writes the parts of a call. table: decompositions by op."""

    def __init__(self, table: Mapping[Any, Callable[..., Any]]) -> None:
        self.table = table

    def __call__(self, write: Writer, *args: Any, **kwargs: Any) -> Any:
        """The nodes of the results, None if a part has no rule."""
        if not lacks_rule(write.about):
            return None
        with write.mode:  # nodes whose values are alike may share a fake tensor
            fresh = {node: like(node.meta["val"]) for node in nodes_in((args, kwargs))}
        given, named = map_arg((args, kwargs), fresh.__getitem__)
        trace = Trace(self.table, {id(value): node for node, value in fresh.items()})
        try:
            with write.mode, torch.no_grad(), trace:
                made = self.table[write.target](*given, **named)
        except Exception:  # whatever a decomposition runs into, the op itself is still there
            return None
        several = isinstance(made, (tuple, list))
        pairs = list(zip(made, write.about.meta["val"])) if several else [(made, write.about.meta["val"])]
        if any(isinstance(value, Tensor) != isinstance(wanted, Tensor) for value, wanted in pairs):
            return None
        if any(isinstance(value, Tensor) and not trace.gives(value, wanted) for value, wanted in pairs):
            return None
        nodes = trace.written(write)
        results = tuple(nodes[id(value)] if isinstance(value, Tensor) else None for value, _ in pairs)
        return results if several else results[0]


def like(value: Tensor) -> Tensor:
    """A tensor of the same metadata."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


class Trace(TorchDispatchMode):  # type: ignore[misc]
    """Records the calls that have rules, and takes the others apart in turn.

    known: the nodes of the operands by the id of their values.
    """

    def __init__(self, table: Mapping[Any, Callable[..., Any]], known: dict[int, Node]) -> None:
        super().__init__()
        self.table, self.known = table, known
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.seen = dict.fromkeys(known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            raise NoRule(str(func))
        made = None if func.namespace == "prims" else func(*args, **kwargs)
        if made is not None and not any(isinstance(value, Tensor) for value in flat_outputs(made)):
            return made  # a question about a tensor, such as its device
        if made is None or match(func, args, kwargs, made) is None:
            parts = getattr(func, "impl_aten", None) or self.table.get(func, func.decompose)
            with self:
                found = parts(*args, **kwargs)
            if found is NotImplemented:
                raise NoRule(str(func))
            return found
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not all(id(value) in self.seen for value in read):
            raise NoRule(f"{func} of a tensor that no call made")
        self.calls.append((func, args, kwargs, made))
        self.seen.update(dict.fromkeys(map(id, flat_outputs(made))))
        return made

    def gives(self, value: Tensor, wanted: Tensor) -> bool:
        """Whether this value was made by a call, or is an operand, and is of the right shape and type."""
        return id(value) in self.seen and value.shape == wanted.shape and value.dtype == wanted.dtype

    def written(self, write: Writer) -> dict[int, Node]:
        """The calls as nodes at the place of the op; every node by the id of its value."""
        nodes = dict(self.known)
        about = {**write.about.meta, "decomposed": str(write.target)}
        for func, args, kwargs, made in self.calls:
            placed, named = map_aggregate((args, kwargs), lambda x: nodes[id(x)] if isinstance(x, Tensor) else x)
            name = str(func._schema.name).split("::")[1]
            node = write.graph.create_node("call_function", func, placed, named, name=name)
            node.meta = {**about, "val": made}
            if isinstance(made, (tuple, list)):
                node.meta["val"] = tuple(made)
                for at, value in enumerate(made):
                    nodes[id(value)] = write.graph.create_node("call_function", operator.getitem, (node, at))
                    nodes[id(value)].meta = {**about, "val": value}
            else:
                nodes[id(made)] = node
        return nodes
