"""Which part of a step each node belongs to: what is done once before all micro-batches, in them, and once after them.

What is predicted, simulated and run is cut in the same way: the boxed graph, before anything is scheduled.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch.fx import GraphModule, Node

from sbpc.graph.about import FLOAT32, REDUCE, is_boxing
from sbpc.graph.operands import ancestors, is_late, just_in_time, made_of, operands, value_of
from sbpc.graph.ports import (
    BUFFER,
    GRADIENT,
    INPUT_GRADIENT,
    MUTATION,
    OUTPUT,
    PARAMETER,
    SEED,
    TANGENT,
    Port,
    outputs,
    placeholders,
    results,
)
from sbpc.mesh.collectives import WIRE
from sbpc.mesh.states import B, P, Partial
from sbpc.plans.staged.schedules import FORWARD, INPUTS, WEIGHTS
from sbpc.rules.sum_types import begins_sums, ends_sums

# FREE: the same for all micro-batches, and computed wherever it is read
BEFORE, AFTER, FREE = "before", "after", "free"
PARTS = (BEFORE, FORWARD, INPUTS, WEIGHTS, AFTER)
Parts = tuple[str, ...]  # those that one program runs
# the programs of a loop that are measured for its cost and its report, whether they run so or not
MEASURED: tuple[Parts, ...] = (BEFORE,), (FORWARD,), (INPUTS,), (AFTER,), (INPUTS, WEIGHTS)


def parts_of(gm: GraphModule, in_loop: Container[Port] | None = ()) -> dict[Node, str]:
    """Returns the part of every node but the output: BEFORE, FORWARD, INPUTS, WEIGHTS, AFTER or FREE.

    BEFORE: what depends on parameters and buffers alone, their boxings among it. FORWARD. INPUTS: the backward of
    what the stage received. WEIGHTS: the rest of the backward. AFTER: the boxings of gradients on their way home;
    gradients add up before these. in_loop: parameters that are boxed wherever a micro-batch reads them, forward and
    backward, and gradients that are boxed in every micro-batch and then add up. None for a step that is no loop: as
    nothing in it is done once for several, nothing is BEFORE or FREE.
    """
    parts: dict[Node, str] = {}
    whole = in_loop is None
    ports = {node: port for port, node in placeholders(gm).items()}
    late: set[Node] = set()
    # and what is made of them alone
    loose = {node for node, port in ports.items() if in_loop is not None and port in in_loop}
    ends = set(results(gm))
    # Where parts of the batch go all the way one after the other, the forward of the next reads boxings of the backward
    # of one.
    early = ancestors(node for _, node in outputs(gm, OUTPUT, MUTATION)) if whole else ()
    for node in gm.graph.nodes:
        if node.op == "output":
            break
        kind = ports[node].kind if node in ports else None  # None of a placeholder: a rank's position
        given = {parts[used] for used in node.all_input_nodes}
        if whole:
            parts[node] = FORWARD
        elif node.op == "placeholder":
            fixed = BEFORE if kind in (PARAMETER, BUFFER) else FREE
            parts[node] = fixed if kind in (PARAMETER, BUFFER, SEED, None) else FORWARD
        elif given <= {FREE, BEFORE}:
            reads_loose = bool(loose.intersection(node.all_input_nodes))
            loose |= {node} if reads_loose and node not in ends else set()
            parts[node] = FREE if node in loose else BEFORE if reads_loose or BEFORE in given else FREE
        else:
            parts[node] = FORWARD
        follows = value_of(node)[0] is not node or "awaits" in node.meta  # it is where what it reads is
        marked = is_late(node) and not follows and node not in early
        if kind == TANGENT or (
            parts[node] == FORWARD and (marked or any(used in late for used in node.all_input_nodes))
        ):
            late.add(node)
    needed = ancestors(node for _, node in outputs(gm, OUTPUT, INPUT_GRADIENT) if node in late)
    for node in gm.graph.nodes:
        if node in late:
            own = INPUTS if node in needed or node.op == "placeholder" else WEIGHTS
            parts[node] = parts[value_of(node)[0]] if value_of(node)[0] is not node else own
    for port, node in outputs(gm, GRADIENT, OUTPUT):
        if port.kind == GRADIENT and parts[node] in (FREE, BEFORE):  # the same in all micro-batches, and added up
            parts[node] = WEIGHTS
        elif port.kind == OUTPUT and parts[node] == FREE:  # a constant
            parts[node] = BEFORE
    home = ways_home(gm) if in_loop is None else boxings_home(gm, parts, in_loop)
    return parts | dict.fromkeys(home, AFTER)


def calls_in(parts: Mapping[Node, str], which: Container[str]) -> list[Node]:
    """Returns the calls that some parts run together, in order: those that are FREE right in front of the first that
    reads them."""
    calls = [node for node in parts if node.op != "placeholder"]
    return just_in_time(
        (node for node in calls if parts[node] in which), {node for node in calls if parts[node] == FREE}
    )


def boxings_home(gm: GraphModule, parts: Mapping[Node, str], in_loop: Container[Port]) -> set[Node]:
    """Returns the nodes of boxings that end in a gradient which is not `in_loop`, and that nothing else reads."""
    found = set[Node]()
    for port, node in outputs(gm, GRADIENT):
        if port in in_loop:
            continue
        mine = {gm.graph.output_node()}
        while "step" in node.meta and set(node.users) <= mine and parts[node.all_input_nodes[0]] not in (FREE, BEFORE):
            mine.add(node)
            (node,) = node.all_input_nodes
        found |= mine
    return found - {gm.graph.output_node()}


def ways_home(gm: GraphModule) -> set[Node]:
    """Returns the last calls before the gradients, from the first collective on, or from a cast behind sums, that
    nothing else reads and that are linear.

    Linear means L(a) + L(b) = L(a + b). So the sum over several steps may be taken before them.
    """
    kept = {node for port, node in outputs(gm) if port.kind != GRADIENT}
    ends = {node for _, node in outputs(gm, GRADIENT)}
    fixed, tail, found = constants(gm), set[Node](), set[Node]()
    for node in reversed(gm.graph.nodes):
        users = [user for user in node.users if user.op != "output"]
        if node not in kept and (users or node in ends) and tail.issuperset(users) and is_linear(node, fixed):
            tail.add(node)
    for node in gm.graph.nodes:
        sends = "step" in node.meta and node.meta["step"].collective in WIRE
        if node in tail and (sends or ends_sums(node) or not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def constants(gm: GraphModule) -> set[Node]:
    """Returns the nodes whose values are the same in every step."""
    return made_of(
        gm, [node for node in gm.graph.nodes if node.op in ("call_function", "get_attr") and not node.all_input_nodes]
    )


def is_linear(node: Node, fixed: Container[Node]) -> bool:
    """Returns whether a call is jointly linear in all that it reads but what is fixed: it takes partial sums of
    these to partial sums. A cast to float32 is none of them if the sum is to be taken of what it makes."""
    if begins_sums(node) and node.meta[REDUCE] == FLOAT32:
        return False
    if is_boxing(node):
        step = node.meta["step"] if "step" in node.meta else node.meta["awaits"]
        return node not in fixed and all(state == P for state in step.before.states if isinstance(state, Partial))
    states = [B if operand in fixed else P for operand in operands(node)]
    signatures = node.meta["match"].signatures if "match" in node.meta and P in states else ()
    return any([*signature.inputs] == states and {*signature.outputs} == {P} for signature in signatures)


def summand(node: Node, parts: Mapping[Node, str]) -> Node:
    """Returns what goes into the boxings of a gradient on its way home."""
    while parts[node] == AFTER:
        (node,) = node.all_input_nodes
    return node
