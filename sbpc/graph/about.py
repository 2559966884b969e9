"""What a node says of itself besides its value: where in the model and in the step it is, and what it is a part of.

A call that computes a value again for the backward reads what is there since the forward. Its operands alone would
let it run at once, and what it makes would live as long as if it had never been dropped. So it waits for the
gradient that meets its value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.fx import GraphModule, Node

from sbpc.graph.loss import chosen
from sbpc.graph.operands import is_late
from sbpc.graph.ports import OUTPUT, TANGENT, outputs, placeholders

# Keys in the meta of a call.
RECOMPUTES = "recomputes"  # the name of the call whose value it computes again
PANEL_OF = "panel_of"  # of the product of a panel: the name of the product that is cut
SLICE = "slice"  # of a call of the head: the number of the part of the positions on which it works
PLACE = "phase", "stack_trace", "module"  # forward or backward, the user's lines, the path of the module
FLOAT32, EXCHANGE = "float32", "exchange"
REDUCE = (
    "reduce"  # one of these; of casts between which partial sums are taken: the option of that name, see `sum_types`
)
SENDS = "sends"  # of what makes a gradient: "int8" or "float8", in which it may cross links, see `sent_in`
# and the op that was taken apart: what stands for a node says these as it does
ORIGIN = *PLACE, "decomposed", RECOMPUTES, REDUCE, SENDS, SLICE


def about(node: Node, keys: tuple[str, ...] = PLACE) -> dict[str, Any]:
    """Returns what goes along when something is written for a node."""
    return {key: node.meta[key] for key in keys if key in node.meta}


def panel_remarks(nodes: Iterable[Node]) -> list[str]:
    """Returns a line that names the products in panels, with their numbers of panels; none without any."""
    panels = Counter(node.meta[PANEL_OF] for node in nodes if PANEL_OF in node.meta)
    return [f"in panels: {', '.join(f'%{name} ({count})' for name, count in panels.items())}"] if panels else []


def is_recomputed(node: Node) -> bool:
    """Returns whether a node is a call that computes a value again. Boxings of what such a call reads are not."""
    return node.op == "call_function" and RECOMPUTES in node.meta and not is_boxing(node)


def is_boxing(node: Node) -> bool:
    """Returns whether a node is a boxing step or the end of one."""
    return "step" in node.meta or "awaits" in node.meta


def must_wait(gm: GraphModule) -> dict[Node, list[Node]]:
    """Returns, by call that must wait, the calls that must run before it: an order, not operands. All stand before
    the call in the graph, so that its order still works.

    A call that computes a value again waits for the gradients with which the value, or what is made of it, first
    meets in the backward; the head on one part of the positions for all of the part before, its backward as well.
    Where no result is a loss, the caller makes one of them: the backward begins once all results are there.
    """
    nodes, waiting, ends = list(gm.graph.nodes), dict[Node, list[Node]](), dict[int, list[Node]]()
    for node in nodes:
        if (at := node.meta.get(SLICE)) is None:
            continue
        begins = all(used.meta.get(SLICE) != at for used in node.all_input_nodes)
        if begins and node.meta.get("phase") != "backward" and at - 1 in ends:
            waiting[node] = list(ends[at - 1])
        if all(user.meta.get(SLICE) != at for user in node.users):
            ends.setdefault(at, []).append(node)
    for more in (awaited_gradients(nodes, gm), awaited_results(nodes, gm)):
        for node, earlier in more.items():
            waiting.setdefault(node, []).extend(earlier)
    return waiting


def awaited_results(nodes: list[Node], gm: GraphModule) -> dict[Node, list[Node]]:
    """Returns for what the backward begins with what `must_wait` does."""
    given = placeholders(gm, TANGENT).items()
    tangents = {port: node for port, node in given if port.name.isdecimal()}  # others are sums of gradients, in a loop
    scalars = [int(port.name) for port, node in tangents.items() if node.meta["val"].numel() == 1]
    if not tangents or chosen(gm.meta["ports"].results, scalars) is not None:
        return {}
    ends = [node for _, node in outputs(gm, OUTPUT) if node.op == "call_function" and not is_late(node)]
    place = {node: at for at, node in enumerate(nodes)}
    first = (node for node in nodes if is_late(node) and not any(map(is_late, node.all_input_nodes)))
    return {node: [end for end in dict.fromkeys(ends) if place[end] < place[node]] for node in first}


def awaited_gradients(nodes: list[Node], gm: GraphModule) -> dict[Node, list[Node]]:
    """Returns for what computes values again what `must_wait` does."""
    if not any(map(is_recomputed, nodes)):
        return {}
    driven = set(placeholders(gm, TANGENT).values())  # by a gradient
    ahead = set[Node]()  # of it: values computed again, and what is made of them alone
    for node in nodes:
        if any(used in driven for used in node.all_input_nodes):
            driven.add(node)
        elif is_recomputed(node) or any(used in ahead for used in node.all_input_nodes):
            ahead.add(node)
    place = {node: at for at, node in enumerate(nodes)}
    meets: dict[Node, Node] = {}  # by node of `ahead`, the first node of `driven` that depends on it
    for node in reversed(nodes):
        if node in ahead:
            found = [user if user in driven else meets[user] for user in node.users if user in driven or user in meets]
            if found:
                meets[node] = min(found, key=place.__getitem__)
    awaited: dict[Node, list[Node]] = {}
    for node, reader in meets.items():
        if is_recomputed(node):
            makers = [maker_of(used) for used in reader.all_input_nodes if used in driven]
            awaited[node] = [maker for maker in makers if maker.op == "call_function" and place[maker] < place[node]]
    return awaited


def maker_of(node: Node) -> Node:
    """Returns the call that makes a value, in whatever layout: while it is boxed, something may be computed again."""
    while is_boxing(node):
        node = node.all_input_nodes[0]
    return node
