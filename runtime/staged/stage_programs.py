"""The programs of one chunk on one rank, as they run."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from sbpc.graph.rewrite import copied
from sbpc.plans.staged.chunk_programs import ChunkPrograms
from sbpc.plans.staged.stage_parts import Parts
from sbpc.runtime.partition import is_scheduled, late_waits


def program_at(programs: ChunkPrograms, which: Parts, adding: bool, rank: int) -> GraphModule:
    """Returns the program of some parts on a rank. Where nothing is scheduled, collectives are waited for as late as can be."""
    gm = programs.local_at(which, adding, rank)
    if is_scheduled(gm):
        return gm
    graph, copies = Graph(), dict[Node, Node]()
    for node in late_waits(list(gm.graph.nodes)):
        copies[node] = copied(graph, node, copies.__getitem__)
    result = GraphModule(gm, graph)
    result.meta.update(gm.meta)
    return result
