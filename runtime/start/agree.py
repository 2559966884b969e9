"""Check at the start that all ranks run the same plan with the same versions, on nodes that the mesh describes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from sbpc.errors import MeshError, PlanError
from sbpc.mesh.mesh import Mesh
from sbpc.plans import plan_file
from sbpc.plans.plan import Plan
from sbpc.plans.rank_programs import Programs
from sbpc.runtime.start import process_groups


def agree(plan: Plan | Programs) -> None:
    """Compares by digest what the ranks are about to run. Every rank must call this at the same point.

    Raises PlanError that says which ranks differ in what, MeshError if the nodes do not hold the ranks as the mesh
    needs it.
    """
    everywhere = process_groups.from_all_ranks({"node": process_groups.node(), **identity(plan)})
    compare(everywhere)
    check_nodes(plan.mesh, [each["node"] for each in everywhere])


def identity(plan: Plan | Programs) -> dict[str, str]:
    """Returns what must be the same on all ranks: versions, mesh, and digests of what is run and of what its order
    depends on, by name."""
    same = {"torch": torch.__version__, "sbpc": installed(), "mesh": str(plan.mesh)}
    if isinstance(plan, Programs):
        return same | {"file": plan.digest}
    content = plan_file.encode(plan)
    parts = content["chunks"]
    for item in (item for part in parts for item in part["graph"]):
        item.pop("stack_trace", None)  # where the source lies may differ from node to node
    options = {key: value for key, value in content["options"].items() if key != "guards"}
    asked = options, content["loop"] and [content["loop"][key] for key in ("count", "in_loop")]
    return same | {
        "model": digest([[part["graph"], part["constants"]] for part in parts]),
        "layouts": digest([[part["choices"], part["aliases"], part["outputs"]] for part in parts]),
        "cluster": f"{plan.mesh.cluster.name}, {digest(content['cluster'])}",
        "options": digest(asked),
    }


def installed() -> str:
    """Returns the version of sbpc, if it is installed."""
    try:
        return version("sbpc")
    except PackageNotFoundError:
        return "not installed"


def digest(value: Any) -> str:
    """Returns the start of the SHA-256 of JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def compare(everywhere: Sequence[dict[str, str]]) -> None:
    """Raises PlanError unless the ranks agree in everything but the node."""
    first = everywhere[0]
    for key in ("torch", "sbpc", "mesh", "file", "model", "layouts", "cluster", "options"):
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
    """Raises MeshError unless every node holds neighbouring ranks, and every axis lies inside a node or crosses
    whole ones.

    nodes: by rank, the name of its node. Costs assume that the groups of inner axes have the fastest links.
    """
    firsts = [rank for rank in range(len(nodes)) if rank == 0 or nodes[rank] != nodes[rank - 1]]
    if len(firsts) != len(set(nodes)):
        again = next(rank for rank in firsts if nodes[rank] in nodes[: max(rank - 1, 0)])
        raise MeshError(
            f"the ranks of node {nodes[again]} are not neighbours: "
            f"{[r for r, n in enumerate(nodes) if n == nodes[again]]}\n"
            "  Start ranks 0 to k-1 on the first node, the next k on the second, as torchrun does."
        )
    sizes = [end - start for start, end in zip(firsts, [*firsts[1:], len(nodes)])]
    if len(firsts) == 1:
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
