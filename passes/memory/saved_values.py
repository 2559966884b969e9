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
from sbpc.graph.operands import is_late
from sbpc.graph.rewrite import copied
from sbpc.passes.memory.live_bytes import STORED


def store(gm: GraphModule) -> GraphModule:
    """The graph with stored values.

    Before: a joint graph at global shapes. After: every value with dims that is there in the forward and read in the
    backward is read in the backward through an `alias`, which stands behind its last reader in the forward.
    """
    order = {node: at for at, node in enumerate(gm.graph.nodes)}
    behind: dict[Node, list[Node]] = {}
    for node in order:
        early = [reader for reader in node.users if reader.op != "output" and not is_late(reader)]
        if keeps(node) and not is_late(node) and any(map(is_late, node.users)) and (early or node.op != "placeholder"):
            behind.setdefault(max(early, key=order.__getitem__, default=node), []).append(node)
    graph = Graph()
    copies: dict[Node, Node] = {}
    kept: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        read: MutableMapping[Node, Node] = ChainMap(kept, copies) if is_late(node) else copies
        copies[node] = copied(graph, node, read.__getitem__)
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


def keeps(node: Node) -> bool:
    """Whether a node is one value with dims."""
    value = node.meta.get("val")
    return node.op in ("placeholder", "call_function") and isinstance(value, torch.Tensor) and value.dim() > 0
