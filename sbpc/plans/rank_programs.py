"""Writes the programs of all ranks for one step into the file of a plan, and reads them: what running a plan needs.

A step of an exported file is the body of a plan's file (`plan_file.encode`) and besides: `programs`, by the names of
`StepPrograms` one graph for every class of ranks with equal local shapes; `ranks`, the number of its class by rank;
`given` and `left`, the layouts of inputs and outputs; `inputs` and `outputs`, their global shapes. The further steps
of a file stand under `steps`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sbpc.errors import PlanError
from sbpc.graph.expert_rows import COUNTS
from sbpc.graph.ports import BUFFER, HOMES, PARAMETER, Port, Ports, results
from sbpc.graph.pytree import plain
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import REDUCE
from sbpc.plans import plan_bytes, plan_file
from sbpc.plans.options import Options
from sbpc.plans.plan_file import Decoder
from sbpc.plans.step_programs import EARLY, FORWARD, INTERFACES, JOINT, LATE, SAVED, StepPrograms, names_of

if TYPE_CHECKING:
    from sbpc.plans.plan import Plan

GROUP_SIZE_AT = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 2}  # which argument of a collective that is


@dataclass(frozen=True)
class Programs:
    """What a rank needs to run one step of a plan; takes a plan's place in `parallelize` and `simulate`.

    shapes, given, left: as those of a plan. kinds: by name the programs, one for each class of ranks; ranks: the
    number of its class by rank. digest: of the file.
    """

    mesh: Mesh
    ports: Ports
    shapes: dict[Port, Tensor]
    given: dict[Port, Layout]
    left: dict[Port, Layout | None]
    options: Options
    kinds: dict[str, tuple[GraphModule, ...]]
    ranks: tuple[int, ...]
    digest: str
    loop: None = None
    axis: None = None

    @property
    def inner(self) -> Mesh:
        """The mesh, on which all is one stage."""
        return self.mesh

    @property
    def parameters(self) -> dict[str, Layout]:
        """The home of every parameter by its qualified name."""
        return {port.name: layout for port, layout in self.given.items() if port.kind == PARAMETER}

    def program(self, name: str, rank: int) -> GraphModule:
        """Returns a program of `rank`, see `StepPrograms`. Raises PlanError if there is no such rank."""
        if not 0 <= rank < self.mesh.ranks:
            raise PlanError(f"rank {rank} of a mesh of {self.mesh.ranks} ranks\n  Name one that there is.")
        return self.kinds.get(name, self.kinds[JOINT])[self.ranks[rank]]

    def local_at(self, rank: int) -> GraphModule:
        """Returns the program of the whole step of `rank`."""
        return self.program(JOINT, rank)


def save(plan: Plan, path: Path, inference: Plan | None = None) -> None:
    """Writes a plan with its programs, and besides those of a plan for inference."""
    if inference is not None and (inference.options.train or not plan.options.train):
        raise PlanError("a file holds one plan for training and one for inference\n  Plan the second with train=False.")
    plan_bytes.write(encode(plan) | {"steps": {} if inference is None else {"inference": encode(inference)}}, path)


def encode(plan: Plan) -> dict[str, Any]:
    """Returns a plan with the programs of all its ranks as JSON values."""
    made, first = StepPrograms(plan), dict[Any, int]()  # by class, its first rank
    classes = [plan.chunk.shape_class(rank) for rank in range(plan.mesh.ranks)]
    for rank, key in enumerate(classes):
        first.setdefault(key, rank)
    programs = {
        name: [plan_file.encode_graph(made.program(name, rank)) for rank in first.values()]
        for name in names_of(plan.ports)
    }
    return plan_file.encode(plan) | {
        "programs": programs,
        "ranks": [list(first).index(key) for key in classes],
        "given": plan_file.encode_layouts(plan.given.values()),
        "left": plan_file.encode_layouts(plan.left.values()),
        "inputs": [plan_file.encode_value(value) for value in plan.shapes.values()],
        "outputs": [
            None if node is None else plan_file.encode_value(node.meta["val"]) for node in results(plan.annotated)
        ],
    }


def decode(decoder: Decoder) -> Programs:
    """Returns the programs of a step. Raises PlanError if the file has none, or if they do not fit its mesh and its
    ports."""
    body, ports = decoder.body, decoder.ports()
    ports = replace(ports, results=plain(ports.results))
    given, left = decoder.layouts("given"), decoder.layouts("left")
    if any(layout is not None and layout.partial for layout in (*given, *left)):
        raise decoder.fail("an input or an output holds partial results")
    programs = Programs(
        mesh=decoder.mesh(),
        ports=ports,
        shapes=dict(zip(ports.inputs, map(decoder.value, body["inputs"]))),
        given=dict(zip(ports.inputs, given)),  # type: ignore[arg-type]
        left=dict(zip(ports.outputs, left)),
        options=decoder.options(),
        kinds=decode_kinds(decoder, ports),
        ranks=tuple(body["ranks"]),
        digest=hashlib.sha256(decoder.path.read_bytes()).hexdigest()[:16],
    )
    outputs = list(map(decoder.value, body["outputs"]))
    collectives = [wrong_collectives(programs.mesh, kinds, programs.ranks) for kinds in programs.kinds.values()]
    mistakes = wrong_counts(body, programs), wrong_homes(programs), wrong_shapes(programs, outputs), *collectives
    for mistake in chain(*mistakes):
        raise decoder.fail(mistake)
    return programs


def decode_kinds(decoder: Decoder, ports: Ports) -> dict[str, tuple[GraphModule, ...]]:
    """Returns the programs by name. What the backward may do with saved values depends on what the forward has
    computed."""
    early, kinds = sum(port.kind in EARLY for port in ports.outputs), dict[str, tuple[GraphModule, ...]]()
    for name in names_of(ports):
        bodies = decoder.body["programs"].get(name, [])
        saved = (
            [gm.meta["bounds"][early:] for gm in kinds[FORWARD]]
            if INTERFACES[name].reads == SAVED
            else [()] * len(bodies)
        )
        kinds[name] = tuple(decoder.graph(body, True, bounds) for body, bounds in zip(bodies, saved))
    return kinds


def wrong_counts(body: dict[str, Any], programs: Programs) -> Iterator[str]:
    """Yields which lists of the file have not as many entries as the mesh, the ports or the ranks ask for."""
    inputs, outputs = len(programs.ports.inputs), len(programs.ports.outputs)
    late = [port.kind in LATE for port in programs.ports.outputs]
    if late != sorted(late):
        yield "a gradient stands before a result of the forward"
    if body["programs"].keys() != programs.kinds.keys():
        yield f"its programs are {', '.join(body['programs'])}, not {', '.join(programs.kinds)}"
    for what, count, wanted in (
        ("ranks", len(body["ranks"]), programs.mesh.ranks),
        ("layouts of inputs", len(body["given"]), inputs),
        ("layouts of outputs", len(body["left"]), outputs),
        ("shapes of inputs", len(body["inputs"]), inputs),
        ("shapes of outputs", len(body["outputs"]), outputs),
        *(("programs that are used", len(set(body["ranks"])), len(kinds)) for kinds in body["programs"].values()),
    ):
        if count != wanted:
            yield f"{count} {what}, not {wanted}"


def wrong_homes(programs: Programs) -> Iterator[str]:
    """Yields gradients and new buffers that are not left where their parameter or buffer is stored, and masters of
    another type than float32."""
    for port, value in programs.shapes.items():
        if port.kind == PARAMETER and port.name in programs.ports.masters and value.dtype != torch.float32:
            yield f"the master of {port.name} is in {value.dtype}"
    for port, layout in programs.left.items():
        home = HOMES.get(port.kind)
        if home is None or layout is None:
            continue
        stored = programs.given.get(Port(home, port.name))
        if stored != layout:
            yield f"the {port.kind} of {port.name} is left in {layout}, the {home} is in {stored}"


def wrong_shapes(programs: Programs, outputs: list[Any]) -> Iterator[str]:
    """Yields inputs, outputs and inner values of programs that have not the shape that their layout gives them on a
    rank, and values that one program leaves for another which that does not take.

    outputs: whole values of the outputs.
    """
    # by what it is and class: what programs leave for others
    mesh, handed = programs.mesh, dict[tuple[str, int], Any]()
    given = [(port, programs.shapes[port], layout) for port, layout in programs.given.items()]
    ends = [(port, value, layout) for (port, layout), value in zip(programs.left.items(), outputs)]
    for name, kinds in programs.kinds.items():
        # by class: node, port, whole value, layout
        piece, checked = INTERFACES[name], dict[int, list[tuple[Node, Port, Any, Any]]]()
        takes, leaves = (
            [item for item in each if item[0].kind in of] for each, of in ((given, piece.inputs), (ends, piece.outputs))
        )
        for kind, gm in enumerate(kinds):
            stored, left = gm.graph.find_nodes(op="placeholder"), results(gm)
            first = len(stored) - len(mesh.axes) - len(takes)
            for what, nodes in ((piece.reads, stored[: max(first, 0)]), (piece.gives, left[len(leaves) :])):
                held = [None if node is None else plan_file.encode_value(node.meta.get("val")) for node in nodes]
                wanted = [] if what is None else handed.setdefault((what, kind), held)
                if first < 0 or len(left) < len(leaves) or held != wanted or None in held:
                    counts = f"{len(stored)} inputs and {len(left)} outputs"
                    yield f"program {name} {kind} has {counts}, or other {what or 'values'} than are read"
                    return
            for node, (port, *_) in zip(stored[first:], takes):
                if port.kind in (PARAMETER, BUFFER) and not called(node, port):
                    yield f"program {name} {kind}: %{node.name} is not {port.kind} {port.name}"
            pairs = chain(zip(stored[first:], takes), zip(left, leaves))
            checked[kind] = [(node, *about) for node, about in pairs] + inner_values(gm.graph)
        for rank, kind in enumerate(programs.ranks):
            for node, port, value, layout in checked[kind]:
                if (node is None) != (layout is None) or (node is None) != (value is None):
                    yield f"program {name} {kind}: {port.kind} {port.name} is absent in one place and there in another"
                elif node is not None and not fits(node, value, layout, mesh, mesh.coordinates(rank)):
                    yield (
                        f"program {name} {kind}: {port.kind} {port.name} is not what rank {rank} holds of it in "
                        f"{layout}"
                    )


def inner_values(graph: Graph) -> list[tuple[Node, Port, Any, Any]]:
    """Returns one value of a local program for every layout, whole shape and local shape that occur in it."""
    first: dict[Any, tuple[Node, Port, Any, Any]] = {}
    for node in graph.nodes:
        if "whole_shape" in node.meta:
            local, whole, layout = node.meta["val"], node.meta["whole_shape"], node.meta["sbp"]
            value = torch.empty(whole, dtype=local.dtype, device="meta")
            first.setdefault((layout, whole, tuple(local.shape)), (node, Port("value", node.name), value, layout))
    return list(first.values())


def called(node: Node, port: Port) -> bool:
    """Returns whether a placeholder has the name that capture gives to the one of a port, and torch without what is
    not ASCII."""
    name = re.sub("[^0-9a-zA-Z_]+", "_", port.name)
    return re.fullmatch(rf"_?{re.escape(name)}(_\d+)?", node.name) is not None


def fits(node: Node, value: Tensor, layout: Layout, mesh: Mesh, coordinates: tuple[int, ...]) -> bool:
    """Returns whether a node of a local program is what a rank holds of a tensor in a layout."""
    local = node.meta.get("val")
    if any(dim >= value.dim() for dim in layout.cuts) or not isinstance(local, Tensor):
        return False
    shape = layout.local_shape(value.shape, mesh.sizes, coordinates)
    return tuple(local.shape) == shape and local.dtype == value.dtype


def wrong_collectives(mesh: Mesh, kinds: Sequence[GraphModule], ranks: Sequence[int]) -> Iterator[str]:
    """Yields collectives without one wait, over groups that the mesh has not, and those on which the ranks of a
    group do not agree.

    kinds: the programs. ranks: the number of its program by rank.
    """
    sizes = {mesh.group_name(axes): len(mesh.groups(axes)[0]) for axes in mesh.runs()}
    sequences: list[dict[str, list[Any]]] = []
    for kind, gm in enumerate(kinds):
        by_group: dict[str, list[Any]] = {}
        for node in gm.graph.nodes:
            name = collective(node)
            if name is not None and [str(user.target) for user in node.users] != [plan_file.WAIT]:
                yield f"program {kind}: the collective %{node.name} is not read by one wait alone"
            if str(node.target) == plan_file.WAIT and not any(map(collective, node.all_input_nodes)):
                yield f"program {kind}: %{node.name} waits for no collective"
            if name is None:
                continue
            group = node.args[-1] if node.args else None
            if group not in sizes or not sized(name, node.args, sizes[group]):
                yield f"program {kind}: %{node.name} is over a group that {mesh} has not"
                return
            by_group.setdefault(group, []).append((name, *(a for a in node.args if not isinstance(a, Node))))
        sequences.append(by_group)
    yield from disagreements(mesh, sequences, ranks)


def disagreements(mesh: Mesh, sequences: Sequence[Mapping[str, list[Any]]], ranks: Sequence[int]) -> Iterator[str]:
    """Yields the groups whose ranks do not run the same collectives. sequences: by program and group, its
    collectives in order."""
    seen = set()
    for axes in mesh.runs():
        group = mesh.group_name(axes)
        for group_ranks in mesh.groups(axes):
            members = tuple(dict.fromkeys(ranks[rank] for rank in group_ranks))
            if (group, members) in seen:
                continue
            seen.add((group, members))
            first, *others = (sequences[kind].get(group, []) for kind in members)
            if any(other != first for other in others):
                yield f"the ranks {group_ranks} do not run the same collectives over {mesh.key(axes)}"


def collective(node: Node) -> str | None:
    """Returns the name of the collective that a node starts, None for any other node."""
    name = str(node.target)
    return name.split(".")[1] if name in plan_file.COLLECTIVES and name != plan_file.WAIT else None


def counted(splits: Any) -> bool:
    """Returns whether the lengths of parts are counted while a program runs."""
    return isinstance(splits, Node) and splits.target is COUNTS


def sized(name: str, args: tuple[Any, ...], ranks: int) -> bool:
    """Returns whether what a collective says of its group, besides the name, is right."""
    if name == "all_to_all_single":
        return all(
            counted(splits) or (isinstance(splits, (tuple, list)) and len(splits) == ranks) for splits in args[1:3]
        )
    if name in ("all_reduce", "reduce_scatter_tensor") and args[1] not in REDUCE:
        return False
    return name not in GROUP_SIZE_AT or args[GROUP_SIZE_AT[name]] == ranks
