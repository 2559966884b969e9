"""store: what the backward reads of the forward goes through a node of its own, so that what is kept is a choice.

The layout of that node is what a rank holds of the value between forward and backward: as it was made, as the forward
read it, or split further. A gathered parameter is kept in this way, or stored in its home and gathered again.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping

import torch
from torch.fx import Graph, GraphModule, Node

from sbpc._compat import LazyGraphModule
from sbpc.choices import operands, value_of
from sbpc.ports import GRADIENT, PARAMETER, placeholders

STORED = "stored"  # the key in the meta of such a node


def store(gm: GraphModule) -> GraphModule:
    """The graph with stored values.

    Before: a joint graph at global shapes. After: every value with dims that is there in the forward and read in the
    backward is read in the backward through an `alias`, which stands behind its last reader in the forward.
    """
    order = {node: at for at, node in enumerate(gm.graph.nodes)}
    behind: dict[Node, list[Node]] = {}
    for node in order:
        early = [reader for reader in node.users if reader.op != "output" and not late(reader)]
        if keeps(node) and not late(node) and any(map(late, node.users)) and (early or node.op != "placeholder"):
            behind.setdefault(max(early, key=order.__getitem__, default=node), []).append(node)
    graph = Graph()
    copies: dict[Node, Node] = {}
    kept: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        read: MutableMapping[Node, Node] = ChainMap(kept, copies) if late(node) else copies
        copies[node] = graph.node_copy(node, read.__getitem__)
        for value in behind.get(node, ()):
            kept[value] = graph.create_node(
                "call_function", torch.ops.aten.alias.default, (copies[value],), name=f"{value.name}_stored"
            )
            about = node.meta if value.op == "placeholder" else value.meta
            kept[value].meta = {key: about[key] for key in ("module", "stack_trace") if key in about}
            kept[value].meta |= {"val": value.meta["val"], "phase": "forward", STORED: value.name}
    result = LazyGraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result


def late(node: Node) -> bool:
    """Whether a node belongs to the backward; the output node does not."""
    return node.op == "call_function" and node.meta.get("phase") == "backward"


def keeps(node: Node) -> bool:
    """Whether a node is one value with dims."""
    value = node.meta.get("val")
    return node.op in ("placeholder", "call_function") and isinstance(value, torch.Tensor) and value.dim() > 0


def counted(gm: GraphModule, copies: int) -> dict[str, float]:
    """By node, how many times its bytes count while plans are looked for: a parameter with `copies` more tensors if it is
    trained, every stored value once."""
    found = {name: 1.0 + more for name, more in homes(gm, copies).items()}
    return found | {node.name: 1.0 for node in gm.graph.nodes if STORED in node.meta}


def cuts(gm: GraphModule, copies: int) -> tuple[dict[str, float], ...]:
    """By node, how many times its bytes count at two moments of the step, never more than are alive there.

    At the optimizer's step: every parameter, its gradient and the optimizer's state. Between forward and backward: the
    parameters, the state and the stored values; of values in one storage only the first. A parameter that is stored in
    its home is there once, else twice: half of either is no more than that.
    """
    stored: dict[tuple[Node, int], Node] = {}  # by root
    for node in gm.graph.nodes:
        if STORED in node.meta:
            stored.setdefault(root(operands(node)[0]), node)
    step = homes(gm, copies)
    between = {name: float(max(0, more - 1)) for name, more in step.items()}
    for (source, _), node in stored.items():
        share = 0.5 if source.name in step else 1.0
        between[node.name] = share
        if source.name in step:
            between[source.name] += 1.0 - share
    return {name: 1.0 + more for name, more in step.items()}, between


def homes(gm: GraphModule, copies: int) -> dict[str, int]:
    """By node of a parameter: how many more tensors of its size there are, its gradient among them."""
    trained = {port.name for port in gm.meta["ports"].outputs if port.kind == GRADIENT}
    found = [(port, node) for port, node in placeholders(gm).items() if port.kind == PARAMETER]
    return {node.name: copies if port.name in trained else 0 for port, node in found}


def root(node: Node) -> tuple[Node, int]:
    """The node, and which output of it, in whose storage a value lies if no boxing comes between."""
    while True:
        producer, index = value_of(node)
        match = producer.meta.get("match")
        if producer.op != "call_function" or match is None or not match.view:
            return producer, index
        node = operands(producer)[0]
