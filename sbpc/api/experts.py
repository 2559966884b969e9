"""What `capacity`, `overflow` and `routing` of `sbpc.plan` make of a step and its mesh."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule

from sbpc.errors import PlanError
from sbpc.graph.expert_rows import MESSAGE
from sbpc.mesh.mesh import Mesh
from sbpc.plans.options import Options


def routed(gm: GraphModule, mesh: Mesh, asked: Options) -> tuple[Mesh, Options]:
    """Returns the mesh, and options, that say how uneven the shares of experts' rows are in a step. Raises PlanError
    where that is said of a step without any."""
    given = [name for name, unsaid in (("capacity", None), ("routing", 1.0)) if getattr(asked, name) != unsaid]
    if given and not any(node.target in MESSAGE for node in gm.graph.nodes):
        what = f"{given[0]}={getattr(asked, given[0]):g} of a step in which no rows of experts were found"
        todo = "Rows are sorted by their expert, and torch._grouped_mm multiplies them, as transformers does it."
        raise PlanError(f"{what}\n  Leave it out. {todo}")
    options = replace(asked, most=asked.capacity)
    return mesh.like(mesh.cluster, options.routed), options
