"""The programs of all ranks for one step, written into the file of a plan and read from it: what running a plan needs.

A step of an exported file is the body of a plan's file (`codec.encode`) and besides: `programs`, one graph for every
class of ranks with equal local shapes; `ranks`, the number of its program by rank; `given` and `left`, the layouts of
inputs and outputs; `inputs` and `outputs`, their global shapes. The further steps of a file stand under `steps`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sbpc.errors import PlanError
from sbpc.graph.ports import BUFFER, HOMES, PARAMETER, Port, Ports
from sbpc.graph.pytree import plain
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import REDUCE
from sbpc.plans import plan_file as codec
from sbpc.plans.plan_file import Decoder

if TYPE_CHECKING:
    from sbpc.plans.plan import Plan

SIZED = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 2}
"""Where among its arguments a collective names the size of its group."""


@dataclass(frozen=True)
class Programs:
    """What a rank needs to run one step of a plan; takes a plan's place in `parallelize` and `simulate`.

    shapes, given, left: as those of a plan. kinds: the programs; ranks: the number of its program by rank. digest: of the
    file.
    """

    mesh: Mesh
    ports: Ports
    shapes: dict[Port, Tensor]
    given: dict[Port, Layout]
    left: dict[Port, Layout | None]
    options: dict[str, Any]
    kinds: tuple[GraphModule, ...]
    ranks: tuple[int, ...]
    digest: str

    def local_at(self, rank: int) -> GraphModule:
        """The program of `rank`. Raises PlanError if there is no such rank."""
        if not 0 <= rank < self.mesh.ranks:
            raise PlanError(f"rank {rank} of a mesh of {self.mesh.ranks} ranks\n  Name one that there is.")
        return self.kinds[self.ranks[rank]]


def save(plan: Plan, path: Path, inference: Plan | None = None) -> None:
    """Write a plan with its programs, and besides those of a plan for inference."""
    if inference is not None and (inference.options["train"] or not plan.options["train"]):
        raise PlanError("a file holds one plan for training and one for inference\n  Plan the second with train=False.")
    codec.write(encode(plan) | {"steps": {} if inference is None else {"inference": encode(inference)}}, path)


def encode(plan: Plan) -> dict[str, Any]:
    """A plan with the programs of all its ranks as JSON values."""
    classes: dict[Any, int] = {}
    kinds: list[GraphModule] = []
    ranks: list[int] = []
    for rank in range(plan.mesh.ranks):
        key = plan.shape_class(rank)
        if key not in classes:
            classes[key] = len(kinds)
            kinds.append(plan.local_at(rank))
        ranks.append(classes[key])
    output = plan.graph.graph.output_node().args[0]
    values = [None if node is None else codec.encode_value(node.meta["val"]) for node in output]  # type: ignore[union-attr]
    return codec.encode(plan) | {
        "programs": [codec.encode_graph(gm) for gm in kinds],
        "ranks": ranks,
        "given": [str(layout) for layout in plan.given.values()],
        "left": [None if layout is None else str(layout) for layout in plan.left.values()],
        "inputs": [codec.encode_value(value) for value in plan.shapes.values()],
        "outputs": values,
    }


def decode(decoder: Decoder) -> Programs:
    """The programs of a step. Raises PlanError if the file has none, or if they do not fit its mesh and its ports."""
    body, mesh, ports = decoder.body, decoder.mesh(), decoder.ports()
    ports = replace(ports, results=plain(ports.results))
    kinds = tuple(decoder.program(program) for program in body["programs"])
    given = [Layout.parse(text, mesh.axes) for text in body["given"]]
    left = [None if text is None else Layout.parse(text, mesh.axes) for text in body["left"]]
    shapes = [decoder.value(value) for value in body["inputs"]]
    outputs = [decoder.value(value) for value in body["outputs"]]
    if any(layout is not None and layout.partial for layout in (*given, *left)):
        raise decoder.fail("an input or an output holds partial results")
    for what, there, wanted in (
        ("ranks", len(body["ranks"]), mesh.ranks),
        ("layouts of inputs", len(given), len(ports.inputs)),
        ("layouts of outputs", len(left), len(ports.outputs)),
        ("shapes of inputs", len(shapes), len(ports.inputs)),
        ("shapes of outputs", len(outputs), len(ports.outputs)),
        ("programs that are used", len(set(body["ranks"])), len(kinds)),
    ):
        if there != wanted:
            raise decoder.fail(f"{there} {what}, not {wanted}")
    found = Programs(
        mesh,
        ports,
        dict(zip(ports.inputs, shapes)),
        dict(zip(ports.inputs, given)),
        dict(zip(ports.outputs, left)),
        dict(body["options"]),
        kinds,
        tuple(body["ranks"]),
        hashlib.sha256(decoder.path.read_bytes()).hexdigest()[:16],
    )
    for wrong in (*wrong_homes(found), *wrong_shapes(found, outputs), *wrong_collectives(found)):
        raise decoder.fail(wrong)
    return found


def wrong_homes(programs: Programs) -> Iterator[str]:
    """Gradients and new buffers that are not left where their parameter or buffer is stored."""
    for port, layout in programs.left.items():
        home = HOMES.get(port.kind)
        if home is None or layout is None:
            continue
        stored = programs.given.get(Port(home, port.name))
        if stored != layout:
            yield f"the {port.kind} of {port.name} is left in {layout}, the {home} is in {stored}"


def wrong_shapes(programs: Programs, outputs: list[Any]) -> Iterator[str]:
    """Inputs and outputs of a program that have not the shape that their layout gives them on a rank."""
    mesh, axes = programs.mesh, len(programs.mesh.axes)
    values = [programs.shapes[port] for port in programs.ports.inputs]
    inputs = list(zip(programs.ports.inputs, values, programs.given.values()))
    results = list(zip(programs.ports.outputs, outputs, programs.left.values()))
    held: dict[Any, Any] = {}
    for rank, kind in enumerate(programs.ranks):
        nodes = programs.kinds[kind].graph
        if kind not in held:
            placeholders = [node for node in nodes.nodes if node.op == "placeholder"]
            ended = list(nodes.output_node().args[0])  # type: ignore[arg-type]
            if len(placeholders) != len(inputs) + axes or len(ended) != len(results):
                yield f"program {kind} has {len(placeholders)} inputs and {len(ended)} outputs"
                return
            for node, (port, *_) in zip(placeholders, inputs):
                if port.kind in (PARAMETER, BUFFER) and not called(node, port):
                    yield f"program {kind}: %{node.name} is not {port.kind} {port.name}"
            held[kind] = [(node, *about) for node, about in zip(placeholders, inputs)]
            held[kind] += [(node, *about) for node, about in zip(ended, results)]
            held[kind] += parts(nodes)
        coordinates = mesh.coordinates(rank)
        for node, port, value, layout in held[kind]:
            if (node is None) != (layout is None) or (node is None) != (value is None):
                yield f"program {kind}: {port.kind} {port.name} is absent in one place and there in another"
            elif node is not None and not fits(node, value, layout, mesh, coordinates):
                yield f"program {kind}: {port.kind} {port.name} is not what rank {rank} holds of it in {layout}"


def parts(graph: Graph) -> list[tuple[Node, Port, Tensor, Layout]]:
    """One value of a local program for every layout, whole shape and local shape that occur in it."""
    found: dict[Any, tuple[Node, Port, Tensor, Layout]] = {}
    for node in graph.nodes:
        if "whole_shape" in node.meta:
            local, whole, layout = node.meta["val"], node.meta["whole_shape"], node.meta["sbp"]
            value = torch.empty(whole, dtype=local.dtype, device="meta")
            found.setdefault((layout, whole, tuple(local.shape)), (node, Port("value", node.name), value, layout))
    return list(found.values())


def called(node: Node, port: Port) -> bool:
    """Whether a placeholder has the name that capture gives to the one of a port."""
    return re.fullmatch(rf"_?{re.escape(port.name.replace('.', '_'))}(_\d+)?", node.name) is not None


def fits(node: Node, value: Tensor, layout: Layout, mesh: Mesh, coordinates: tuple[int, ...]) -> bool:
    """Whether a node of a local program is what a rank holds of a tensor in a layout."""
    local = node.meta.get("val")
    if any(dim >= value.dim() for dim in layout.cuts) or not isinstance(local, Tensor):
        return False
    shape = layout.local_shape(value.shape, mesh.sizes, coordinates)
    return tuple(local.shape) == shape and local.dtype == value.dtype


def wrong_collectives(programs: Programs) -> Iterator[str]:
    """Collectives over groups that the mesh has not, and those on which the ranks of a group do not agree."""
    mesh, runs = programs.mesh, programs.mesh.runs()
    sizes = {mesh.group_name(axes): len(mesh.groups(axes)[0]) for axes in runs}
    sequences: list[dict[str, list[Any]]] = []
    for kind, gm in enumerate(programs.kinds):
        by_group: dict[str, list[Any]] = {}
        for node in gm.graph.nodes:
            name = collective(node)
            if name is None:
                continue
            group = node.args[-1] if node.args else None
            if group not in sizes or not sized(name, node.args, sizes[group]):
                yield f"program {kind}: %{node.name} is over a group that {mesh} has not"
                return
            by_group.setdefault(group, []).append((name, *(a for a in node.args if not isinstance(a, Node))))
        sequences.append(by_group)
    seen = set()
    for axes in runs:
        group = mesh.group_name(axes)
        for ranks in mesh.groups(axes):
            members = tuple(dict.fromkeys(programs.ranks[rank] for rank in ranks))
            if (group, members) in seen:
                continue
            seen.add((group, members))
            first, *others = (sequences[kind].get(group, []) for kind in members)
            if any(other != first for other in others):
                yield f"the ranks {ranks} do not run the same collectives over {mesh.key(axes)}"


def collective(node: Node) -> str | None:
    """The name of the collective that a node starts, None for any other node."""
    name = str(node.target)
    return name.split(".")[1] if name in codec.COLLECTIVES and name != codec.WAIT else None


def sized(name: str, args: tuple[Any, ...], ranks: int) -> bool:
    """Whether what a collective says of its group, besides the name, is right."""
    if name == "all_to_all_single":
        return all(isinstance(splits, (tuple, list)) and len(splits) == ranks for splits in args[1:3])
    if name in ("all_reduce", "reduce_scatter_tensor") and args[1] not in REDUCE:
        return False
    return name not in SIZED or args[SIZED[name]] == ranks
