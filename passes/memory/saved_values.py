"""store: what the backward reads of the forward goes through a node of its own, so that what is kept is a choice.

The layout of that node is what a rank holds of the value between forward and backward: as it was made, as the forward
read it, or split further. A gathered parameter is kept in this way, or stored in its home and gathered again.
"""

from __future__ import annotations

from collections import ChainMap

import torch
from torch.fx import GraphModule, Node

from sbpc.graph.about import about
from sbpc.graph.operands import is_late
from sbpc.graph.rewrite import Copies, called, rebuild
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
    kept: dict[Node, Node] = {}

    def write(copies: Copies, node: Node) -> Node:
        copy = copies.keep(node, (ChainMap(kept, copies) if is_late(node) else copies).__getitem__)
        for value in behind.get(node, ()):
            meta = about(node if value.op == "placeholder" else value)
            meta |= {"val": value.meta["val"], "phase": "forward", STORED: value.name}
            kept[value] = called(copies.graph, torch.ops.aten.alias.default, (copies[value],), {}, f"{value.name}_stored", meta)
        return copy

    return rebuild(gm, write)


def keeps(node: Node) -> bool:
    """Whether a node is one value with dims."""
    value = node.meta.get("val")
    return node.op in ("placeholder", "call_function") and isinstance(value, torch.Tensor) and value.dim() > 0
