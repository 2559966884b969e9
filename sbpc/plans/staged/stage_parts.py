"""Which part of a stage's step each node belongs to: what is done once before all micro-batches, in them, and once after them.

It reads a boxed graph or the program of a rank, so that what is predicted, simulated and run is cut in the same way.
"""

from __future__ import annotations

from collections.abc import Container

from torch.fx import GraphModule, Node

from sbpc.graph.operands import ancestors, value_of
from sbpc.graph.ports import BUFFER, GRADIENT, OUTPUT, PARAMETER, SEED, TANGENT, placeholders, results
from sbpc.plans.staged.schedules import FORWARD, INPUTS, WEIGHTS

BEFORE, AFTER, FREE = "before", "after", "free"  # FREE: neither of a micro-batch nor of a parameter, computed wherever it is read


def parts_of(gm: GraphModule, once: Container[str] = ()) -> dict[Node, str]:
    """Returns the part of every node but the output: BEFORE, FORWARD, INPUTS, WEIGHTS, AFTER or FREE.

    BEFORE: what depends on parameters and buffers alone, their boxings among it. FORWARD. INPUTS: the backward of what the stage
    received. WEIGHTS: the rest of the backward. AFTER: the boxings of gradients on their way home; gradients add up before these.
    once: PARAMETER, GRADIENT, both or none; what it lacks is boxed for every micro-batch, and then no node is BEFORE or AFTER.
    """
    parts: dict[Node, str] = {}
    kinds = {node: port.kind for port, node in placeholders(gm).items()}
    late: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        given = {parts[used] for used in node.all_input_nodes}
        if node.op == "placeholder":
            kind = kinds.get(node)  # None: a rank's position
            fixed = BEFORE if kind in (PARAMETER, BUFFER) else FREE
            parts[node] = fixed if kind in (PARAMETER, BUFFER, SEED, None) else FORWARD
        elif given <= {FREE}:
            parts[node] = FREE
        elif given <= {FREE, BEFORE} and PARAMETER in once:
            parts[node] = BEFORE
        else:
            parts[node] = FORWARD
        if kinds.get(node) == TANGENT or (parts[node] == FORWARD and is_late(node, late)):
            late.add(node)
    sent = [node for port, node in zip(gm.meta["ports"].outputs, results(gm)) if port.kind == OUTPUT and node in late]
    needed = ancestors(sent)
    for node in gm.graph.nodes:
        if node in late:
            own = INPUTS if node in needed or node.op == "placeholder" else WEIGHTS
            parts[node] = parts[value_of(node)[0]] if value_of(node)[0] is not node else own
    return parts | {node: AFTER for node in boxings_home(gm, parts) if GRADIENT in once}


def is_late(node: Node, late: set[Node]) -> bool:
    """Returns whether a node of a micro-batch is of the backward."""
    return node.meta.get("phase") == "backward" or any(used in late for used in node.all_input_nodes)


def boxings_home(gm: GraphModule, parts: dict[Node, str]) -> set[Node]:
    """Returns the nodes of boxings that end in a gradient and that nothing else reads."""
    end, found = gm.graph.output_node(), set[Node]()
    for port, node in zip(gm.meta["ports"].outputs, results(gm)):
        if port.kind != GRADIENT or node is None:
            continue
        readers = {end}
        while is_boxing(node) and set(node.users) <= readers:
            given = [used for used in node.all_input_nodes if parts[used] not in (FREE, BEFORE)]
            if len(given) != 1:
                break
            found.add(node)
            readers = {node}
            (node,) = given
    return found


def is_boxing(node: Node) -> bool:
    """Returns whether a node of a boxed graph or of a program is a boxing, or a part of one."""
    return "step" in node.meta or "awaits" in node.meta or "boxing" in node.meta
