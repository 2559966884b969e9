"""annotate: give every node its candidate signatures, one axis at a time, with the conditions for using them."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sbpc._compat import LazyGraphModule, OpOverload
from sbpc.errors import SbpcError, at_node
from sbpc.graph.operands import nodes_in
from sbpc.graph.rewrite import copied
from sbpc.rules import match
from sbpc.rules.choices import Candidates, of_match, of_replicated, of_stored
from sbpc.rules.proof.user_rules import UNPROVED


def annotate(gm: GraphModule) -> GraphModule:
    """Put candidates on every node.

    Before: a joint graph at global shapes. After: `meta["candidates"]` and `meta["signatures"]` on every placeholder and
    call, `meta["match"]` on every call that has a rule; `meta["notes"]` and `meta["remarks"]` of the module say loudly
    and quietly which rules are not sbpc's own.
    """
    result = duplicate(gm)
    known: dict[int, Candidates] = {}
    for node in result.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            whole_only = node.op == "get_attr"
            shape = () if whole_only else tuple(node.meta["val"].shape)
            set_candidates(node, of_stored(shape))
        elif node.op == "call_function" and node.target is not operator.getitem:
            annotate_call(node, known)
        elif node.op not in ("output", "call_function"):
            raise SbpcError(at_node(f"{node.op} nodes cannot be planned", node, "Capture the model anew."))
    matched = [node.meta["match"].entry for node in result.graph.nodes if "match" in node.meta]
    rules = dict.fromkeys(made for made in matched if made.source)
    unproved = [made for made in rules if made.source == UNPROVED]
    result.meta["notes"] = tuple(f"unproved rule for {r.op}: it was registered without example inputs" for r in unproved)
    parts: dict[str, dict[str, None]] = {}
    for node in result.graph.nodes:
        if "decomposed" in node.meta and "match" in node.meta:
            parts.setdefault(node.meta["decomposed"], {})[str(node.target)] = None
    result.meta["remarks"] = (
        *(f"{made.source} rule for {made.op}" for made in rules if made not in unproved),
        *(f"no rule for {op}, which is planned as what it is made of: {', '.join(made)}" for op, made in parts.items()),
    )
    return result


def duplicate(gm: GraphModule) -> GraphModule:
    """A copy of the module whose nodes have metas of their own."""
    graph, copies = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        copies[node] = copied(graph, node, copies.__getitem__)
    result = LazyGraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result


def set_candidates(node: Node, candidates: Candidates) -> None:
    """Record the candidates on the node, for passes and for readers."""
    node.meta["candidates"] = candidates
    node.meta["signatures"] = candidates.signatures


def annotate_call(node: Node, known: dict[int, Candidates]) -> None:
    """Match one call with its rule; without one it is replicated, and the plan's notes say what that costs. Calls that
    are alike share their match and their candidates, those in `known`."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    inputs = [n.meta["val"] for n in nodes_in((node.args, node.kwargs))]
    value = node.meta["val"]
    outputs = list(value) if isinstance(value, (tuple, list)) else [value]
    found = match(node.target, args, dict(kwargs), value) if isinstance(node.target, OpOverload) else None
    if found is None:
        require_dense(node, inputs)
        return set_candidates(node, of_replicated(len(inputs), len(outputs)))
    node.meta["match"] = found
    if id(found) not in known:
        known[id(found)] = of_match(found)
    return set_candidates(node, known[id(found)])


def require_dense(node: Node, inputs: list[Any]) -> None:
    """Refuse an op that reads memory by strides of its own where a rank's copy of its operand may have others.

    A rank's copy is contiguous where the captured operand is: `localize` sees to that for every op without a rule.
    """
    if "as_strided" not in str(node.target):
        return
    first = inputs[0]
    if not first.is_contiguous() or first.storage_offset() != 0:
        what = f"{node.target} reads the memory of a tensor that is not contiguous, which no rank has"
        raise SbpcError(
            at_node(what, node, "Write it with permute, unfold or indexing, or make its operand contiguous.")
        )
