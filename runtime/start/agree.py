"""At start: all ranks run the same plan with the same versions, and their nodes lie as the mesh has it."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from sbpc.errors import MeshError, PlanError
from sbpc.mesh.mesh import Mesh
from sbpc.plans import plan_file as codec
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs


def agree(plan: Plan | Programs) -> None:
    """Compare what every rank is about to run, by digest. Every rank must call this at the same point.

    Raises PlanError that says which ranks differ in what, MeshError if the nodes do not lie as the mesh has it.
    """
    here = {"node": node(), **identity(plan)}
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    compare(everywhere)
    check_nodes(plan.mesh, [each["node"] for each in everywhere])


def identity(plan: Plan | Programs) -> dict[str, str]:
    """What must be the same on all ranks: versions, mesh, and digests of what is run, by name."""
    found = {"torch": torch.__version__, "sbpc": installed(), "mesh": str(plan.mesh)}
    if isinstance(plan, Programs):
        return found | {"file": plan.digest}
    graph = codec.encode_graph(plan.graph)
    for item in graph["graph"]:
        item.pop("stack_trace", None)  # where the source lies may differ from node to node
    choices = {name: str(choice) for name, choice in plan.assignment.choices.items()}
    layouts = [choices, [[*key, str(layout)] for key, layout in plan.assignment.aliases.items()]]
    return found | {"model": digest(graph), "layouts": digest([layouts, list(map(str, plan.assignment.outputs))])}


def installed() -> str:
    """The version of sbpc, if it is installed."""
    try:
        return version("sbpc")
    except PackageNotFoundError:
        return "not installed"


def digest(value: Any) -> str:
    """A digest of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def node() -> str:
    """The name of this rank's node: its number among those of torchrun, else the name of the machine."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def compare(everywhere: Sequence[dict[str, str]]) -> None:
    """Raise PlanError unless all ranks have the same of everything but the node."""
    first = everywhere[0]
    for key in ("torch", "sbpc", "mesh", "file", "model", "layouts"):
        others = [rank for rank, each in enumerate(everywhere) if each.get(key) != first.get(key)]
        if others:
            there = everywhere[others[0]].get(key, "none")
            raise PlanError(
                f"the ranks do not run the same: rank {others[0]} has another {key} than rank 0\n"
                f"  rank 0: {first.get(key, 'none')}\n  rank {others[0]}: {there}\n"
                f"  {len(others)} of {len(everywhere)} ranks differ from rank 0: start all with the same "
                "torch, model, options and file, or give all of them one plan: sbpc plan -o FILE."
            )


def check_nodes(mesh: Mesh, nodes: Sequence[str]) -> None:
    """Raise MeshError unless every node holds neighbouring ranks, and every axis lies inside a node or crosses whole ones.

    nodes: the name of its node by rank. The inner axes of a mesh are those for whose groups the links are fastest.
    """
    runs = [rank for rank in range(len(nodes)) if rank == 0 or nodes[rank] != nodes[rank - 1]]
    if len(runs) != len(set(nodes)):
        again = next(rank for rank in runs if nodes[rank] in nodes[: max(rank - 1, 0)])
        raise MeshError(
            f"the ranks of node {nodes[again]} are not neighbours: {[r for r, n in enumerate(nodes) if n == nodes[again]]}\n"
            "  Start ranks 0 to k-1 on the first node, the next k on the second, as torchrun does."
        )
    sizes = [end - start for start, end in zip(runs, [*runs[1:], len(nodes)])]
    if len(runs) == 1:
        return
    if len(set(sizes)) != 1:
        raise MeshError(f"the nodes hold {sizes} ranks\n  Start as many on every node.")
    inner = 1
    for name, size in zip(reversed(mesh.axes), reversed(mesh.sizes)):
        inner *= size
        if sizes[0] % inner and inner % sizes[0]:
            raise MeshError(
                f"axis {name!r} of {mesh} is cut by the nodes: its groups span {inner} ranks, a node has {sizes[0]}\n"
                "  Order and size the axes so that the inner ones fill a node."
            )
