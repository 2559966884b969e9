"""Annotates: gives every node its candidate signatures, one axis at a time, with the conditions for using them."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule, Node

from sbpc.errors import SbpcError, at_node
from sbpc.graph.about import panel_remarks
from sbpc.graph.operands import operands, outputs_of
from sbpc.graph.rewrite import rebuild
from sbpc.mesh.states import P
from sbpc.rules.choices import Candidates, of_match, of_replicated, of_stored
from sbpc.rules.local_rows import Owned, own_rows, owned_rows, sent_apart
from sbpc.rules.proof.user_rules import UNPROVED
from sbpc.rules.registry import match_of
from sbpc.rules.shared_rows import grouped_rows, shared
from sbpc.rules.sum_types import ends_sums


def annotate(gm: GraphModule) -> GraphModule:
    """Returns the graph with candidates on every node.

    Before: a joint graph at global shapes. After: `meta["candidates"]` and `meta["signatures"]` on every placeholder
    and call, `meta["match"]` on every call that has a rule; `meta["notes"]` and `meta["remarks"]` of the module say
    loudly and quietly which rules are not sbpc's own.
    """
    result = rebuild(gm)
    known: dict[Any, Candidates] = {}
    for node in result.graph.nodes:
        if node.op == "placeholder":
            set_candidates(node, of_stored(tuple(node.meta["val"].shape)))
        elif node.op == "get_attr":
            set_candidates(node, of_stored(()))  # a constant is whole on every rank
        elif node.op == "call_function" and node.target is not operator.getitem:
            annotate_call(node, known)
        elif node.op not in ("output", "call_function"):
            raise SbpcError(at_node(f"{node.op} nodes cannot be planned", node, "Capture the model anew."))
    share_rows(result, known)
    result.meta["notes"], result.meta["remarks"] = lines_about_rules(result)
    return result


def share_rows(gm: GraphModule, known: dict[Any, Candidates]) -> None:
    """Adds the signatures of rows that ranks share out by their groups, or have of their own. known: see
    `annotate_call`."""
    matches = {node: node.meta["match"] for node in gm.graph.nodes if "match" in node.meta}
    rows = grouped_rows(matches)
    owned = owned_rows(matches) if rows else Owned()
    for node, matched in matches.items() if rows else ():
        among, own = shared(node, matched, rows), own_rows(node, matched, owned)
        if more := (*among, *own, *sent_apart(node, among, own)):
            found = node.meta["candidates"]
            key = id(found), more
            if key not in known:
                known[key] = replace(found, signatures=(*found.signatures, *more))
            set_candidates(node, known[key])


def unshared(gm: GraphModule) -> GraphModule:
    """Returns an annotated graph without the signatures of rows that ranks share out by their groups, or have of their
    own."""
    result = rebuild(gm)
    for node in result.graph.nodes:
        if any(signature.ordered for signature in node.meta.get("signatures", ())):
            found = node.meta["candidates"]
            set_candidates(node, replace(found, signatures=tuple(s for s in found.signatures if not s.ordered)))
    return result


def lines_about_rules(gm: GraphModule) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns a line for each rule without a proof, and one for each other rule of the user's and each op that was
    taken apart."""
    matched = [node for node in gm.graph.nodes if "match" in node.meta]
    rules = dict.fromkeys(node.meta["match"].entry for node in matched if node.meta["match"].entry.source)
    parts: dict[str, dict[str, None]] = {}
    for node in matched:
        if "decomposed" in node.meta:
            parts.setdefault(node.meta["decomposed"], {})[str(node.target)] = None
    notes = [
        f"unproved rule for {r.op}: it was registered without example inputs" for r in rules if r.source == UNPROVED
    ]
    remarks = [f"{r.source} rule for {r.op}" for r in rules if r.source != UNPROVED]
    remarks += [
        f"no rule for {op}, which is planned as what it is made of: {', '.join(ops)}" for op, ops in parts.items()
    ]
    return tuple(notes), (*remarks, *panel_remarks(matched))


def set_candidates(node: Node, candidates: Candidates) -> None:
    """Records the candidates on the node, for passes and for readers."""
    node.meta["candidates"] = candidates
    node.meta["signatures"] = candidates.signatures


def annotate_call(node: Node, known: dict[Any, Candidates]) -> None:
    """Matches one call with its rule. A call without one is replicated, and the plan's notes say what that costs.

    known: candidates by id of their match, and whether sums end there: calls that are alike share them. So equal
    blocks have equal tables, and are found.
    """
    matched = match_of(node)
    if matched is None:
        require_dense(node)
        return set_candidates(node, of_replicated(len(operands(node)), outputs_of(node)))
    node.meta["match"] = matched
    key = id(matched), ends_sums(node)
    if key not in known:
        found = of_match(matched)
        kept = tuple(each for each in found.signatures if P not in each.inputs)
        known[key] = replace(found, signatures=kept) if ends_sums(node) else found
    return set_candidates(node, known[key])


def require_dense(node: Node) -> None:
    """Refuses an op that reads memory by strides of its own where a rank's copy of its operand may have others.

    A rank's copy is contiguous where the captured operand is: `localize` sees to that for every op without a rule.
    """
    if "as_strided" not in str(node.target):
        return
    first = operands(node)[0].meta["val"]
    if not first.is_contiguous() or first.storage_offset() != 0:
        what = f"{node.target} reads the memory of a tensor that is not contiguous, which no rank has"
        todo = "Write it with permute, unfold or indexing, or make its operand contiguous."
        raise SbpcError(at_node(what, node, todo))
