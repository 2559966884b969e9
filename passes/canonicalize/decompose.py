"""Decomposes: an op without a rule becomes the calls that torch says it is made of, if all of them have rules."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from sbpc._compat import OpOverload, TorchDispatchMode, decompositions, tree_leaves
from sbpc.graph.operands import nodes_in
from sbpc.graph.rewrite import Writer, called, rewrite
from sbpc.passes.canonicalize.normalize import result_of
from sbpc.rules import match
from sbpc.rules.binding import flat_outputs

Table = Mapping[Any, Callable[..., Any]]  # of decompositions, by op
# torch 2.13 takes it apart wrongly, also while it captures: with targets that end at a -1, those behind count, too
WRONG = torch.ops.aten.multilabel_margin_loss_forward.default
WRONG.py_kernels.clear()


def decompose(gm: GraphModule) -> GraphModule:
    """Returns the graph with ops that have no rule taken apart; `meta["decomposed"]` of a call says of which op it
    is a part.

    Before: a canonical graph. After: an op without a rule is one that torch has no decomposition of, or one with a part
    that has no rule. The parts have the module and the line of the op.
    """
    unmatched = dict.fromkeys(node.target for node in gm.graph.nodes if has_no_rule(node))
    table = decompositions() if unmatched else {}
    table, drawing = {op: parts for op, parts in table.items() if op is not WRONG}, torch.Tag.nondeterministic_seeded
    rewrites = {op: partial(apart, table) for op in unmatched if op in table and drawing not in op.tags}
    return rewrite(gm, {**rewrites, operator.getitem: result_of}) if rewrites else gm


def has_no_rule(node: Node) -> bool:
    """Returns whether a call has no rule."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return match(node.target, args, kwargs, node.meta["val"]) is None


class NoRule(Exception):
    """A part has neither a rule nor a decomposition."""


def apart(table: Table, write: Writer, *args: Any, **kwargs: Any) -> Any:
    """Writes the parts of a call, and returns the nodes of the results; None if a part has no rule."""
    if not has_no_rule(write.about):
        return None
    values = {node: node.meta["val"] for node in nodes_in((args, kwargs))}
    with write.mode:  # nodes whose values are alike may share a fake tensor
        fresh = {
            node: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for node, x in values.items()
        }
    given, named = map_arg((args, kwargs), fresh.__getitem__)
    trace = Trace(table, {id(value): node for node, value in fresh.items()})
    try:
        with write.mode, torch.no_grad(), trace:
            made = table[write.target](*given, **named)
    except Exception:  # whatever a decomposition runs into, the op itself is still there
        return None
    before, several = write.about.meta["val"], isinstance(made, (tuple, list))
    if several != isinstance(before, (tuple, list)):
        return None
    pairs = list(zip(flat_outputs(made), flat_outputs(before)))
    if not all(trace.gives(value, wanted) for value, wanted in pairs):
        return None
    nodes = trace.written(write)
    results = tuple(nodes[id(value)] if isinstance(value, Tensor) else None for value, _ in pairs)
    return results if several else results[0]


class Trace(TorchDispatchMode):  # type: ignore[misc]
    """Records the calls that have rules, and takes the others apart in turn.

    known: the nodes of the operands by the id of their values.
    """

    def __init__(self, table: Table, known: dict[int, Node]) -> None:
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
                result = parts(*args, **kwargs)
            if result is NotImplemented:
                raise NoRule(str(func))
            return result
        read = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not all(id(value) in self.seen for value in read):
            raise NoRule(f"{func} of a tensor that no call made")
        self.calls.append((func, args, kwargs, made))
        self.seen.update(dict.fromkeys(map(id, flat_outputs(made))))
        return made

    def gives(self, value: Any, wanted: Any) -> bool:
        """Returns whether a value is an operand or made by a call, and of the right shape and type; or no tensor, as
        is wanted."""
        if not isinstance(value, Tensor) or not isinstance(wanted, Tensor):
            return isinstance(value, Tensor) == isinstance(wanted, Tensor)
        return id(value) in self.seen and value.shape == wanted.shape and value.dtype == wanted.dtype

    def written(self, write: Writer) -> dict[int, Node]:
        """Writes the calls as nodes at the place of the op, and returns every node by the id of its value."""
        nodes = dict(self.known)
        about = {**write.about.meta, "decomposed": str(write.target)}
        for func, args, kwargs, made in self.calls:
            placed, named = map_aggregate((args, kwargs), lambda x: nodes[id(x)] if isinstance(x, Tensor) else x)
            several = isinstance(made, (tuple, list))
            meta = about | {"val": tuple(made) if several else made}
            node = called(write.graph, func, placed, named, str(func._schema.name).split("::")[1], meta)
            nodes[id(made)] = node
            for at, value in enumerate(made if several else ()):
                nodes[id(value)] = called(write.graph, operator.getitem, (node, at), {}, meta=about | {"val": value})
        return nodes
