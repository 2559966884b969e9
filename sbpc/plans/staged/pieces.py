"""The pieces of a program: what comes early or late, and may run apart from the others, see `Program`."""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch.fx import GraphModule, Node

from sbpc.graph.ports import results
from sbpc.graph.rewrite import Copies


def pieces_in(gm: GraphModule) -> dict[Node, int]:
    """Returns by node of a program that comes early or late the number of its piece, see `piece_of`."""
    found, begins = dict[Node, int](), gm.meta.get("pieces", {})
    piece = min(begins.values(), default=1) - 1
    for node in gm.graph.nodes if begins else ():
        piece = begins.get(node.name, piece)
        if piece and node.op != "output":
            found[node] = piece
    return found


def parted(gm: GraphModule, made_in: Sequence[int], come: Container[int]) -> dict[int, GraphModule]:
    """Returns the pieces of the program of a rank by number, see `Program`. made_in: by result its piece. come: the
    numbers of the inputs that a piece which comes early is not given."""
    nodes, ends, piece_at = list(gm.graph.nodes)[:-1], results(gm), pieces_in(gm)
    given = [node for node in nodes if node.op == "placeholder"]
    calls = {node: piece_at.get(node, 0) for node in nodes[len(given) :]}
    # what a collective reads is alive until something waits for it
    read = [(piece, used) for node, piece in calls.items() for used in (*node.all_input_nodes, *awaited(node))]
    read += [(piece, node) for node, piece in zip(ends, made_in) if node is not None]
    last = dict[Node, int]()
    for piece, used in read:
        last[used] = max(piece, last.get(used, piece))
    found, crossing = dict[int, GraphModule](), list[Node]()
    for piece in sorted({0, *calls.values()}):
        copies = Copies()
        for node in crossing:
            copies[node] = copies.given(node.name, node.meta)
        here = {-1: [node for at, node in enumerate(given) if at not in come], 0: given}.get(piece, [])
        for node in [*here, *(node for node, each in calls.items() if each == piece)]:
            copies.keep(node)
        kept = (node for node in nodes if node in copies and last.get(node, piece) > piece)
        crossing = [node for node in kept if piece >= 0 or node.op != "placeholder"]  # else it is given again
        copies.left([*(node for node, each in zip(ends, made_in) if each == piece), *crossing])
        found[piece] = copies.module(gm)
    return found


def awaited(node: Node) -> list[Node]:
    """Returns what the collective reads that a node of a rank's program waits for."""
    return node.all_input_nodes[0].all_input_nodes if "wait_tensor" in str(node.target) else []
