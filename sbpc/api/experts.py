"""What `capacity`, `overflow` and `routing` of `sbpc.plan` make of a step and its mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch.fx import GraphModule

from sbpc.errors import PlanError
from sbpc.graph.expert_rows import MESSAGE
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import chunk_sizes
from sbpc.passes.annotate import annotate
from sbpc.passes.canonicalize.capacity import chosen, within_capacity
from sbpc.passes.pipeline import Stages
from sbpc.plans.options import DROP, Options


def routed(gm: GraphModule, mesh: Mesh, asked: Options, stages: Stages) -> tuple[GraphModule, Mesh, Options]:
    """Returns the annotated step, with rows beyond the capacity dropped if that is asked for, and the mesh and options
    that say how uneven the shares of experts' rows are. Raises PlanError where that is said of a step without any."""
    made, mesh_of = routed_on(gm, asked, stages)
    on, options = mesh_of(mesh)
    return made, on, options


def routed_on(
    gm: GraphModule, asked: Options, stages: Stages
) -> tuple[GraphModule, Callable[[Mesh], tuple[Mesh, Options]]]:
    """Returns the same for many meshes: the step, and by mesh the other two."""
    given = [name for name, unsaid in (("capacity", None), ("routing", 1.0)) if getattr(asked, name) != unsaid]
    if given and not any(node.target in MESSAGE for node in gm.graph.nodes):
        what = f"{given[0]}={getattr(asked, given[0]):g} of a step in which no rows of experts were found"
        todo = "Rows are sorted by their expert, and torch._grouped_mm multiplies them, as transformers does it."
        raise PlanError(f"{what}\n  Leave it out. {todo}")
    drops, made = asked.capacity if asked.overflow == DROP else None, gm
    if drops is not None:
        with stages.timed("capacity"):
            made = annotate(within_capacity(gm, drops))
        stages.passed("capacity", made)

    def on(mesh: Mesh) -> tuple[Mesh, Options]:
        options = replace(asked, most=asked.capacity if drops is None else most_of_experts(gm, mesh, drops))
        return mesh.routed(options.routed), options

    return made, on


def most_of_experts(gm: GraphModule, mesh: Mesh, capacity: float) -> float:
    """Returns the rows of the rank with most experts, as a multiple of the mean, where each expert takes no more than
    its part: the largest of all axes that may share them out."""
    ranks = {math.prod(mesh.sizes[axis] for axis in axes) for axes in mesh.runs()}
    return max(
        each.most(capacity) * chunk_sizes(len(each.ends.meta["val"]), p)[0] * p / each.sort.meta["val"][0].numel()
        for each in chosen(gm)
        for p in ranks
    )
