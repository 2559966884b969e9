"""A chunk of a model with a layout for every value: the whole model, where it is not cut into stages."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sbpc.graph.no_gc import uncollected
from sbpc.graph.operands import operands, value_of
from sbpc.graph.ports import INPUT, PARAMETER, TANGENT, Port, Ports, outputs, placeholders, results
from sbpc.graph.rewrite import rebuild
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import B, Names
from sbpc.plans.measure import lacks_rule, replicated
from sbpc.plans.staged.schedules import FORWARD, INPUTS
from sbpc.plans.staged.stage_parts import Parts, parts_of
from sbpc.plans.stored_order import Numbers
from sbpc.rules.choices import Choice

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """What `assign` decides.

    choices: by name of a node of the annotated graph. aliases: by value (node name, output number), the layout that a
    value is boxed to before it goes to its readers. outputs: the layout of every output, None for an absent one.
    """

    choices: dict[str, Choice]
    aliases: dict[tuple[str, int], Layout]
    outputs: tuple[Layout | None, ...]

    def made(self, value: Node, axes: Names) -> Layout:
        """Returns the layout in which a value is made."""
        producer, index = value_of(value)
        return self.choices[producer.name].output(index, axes)

    def read(self, value: Node, axes: Names) -> list[Layout]:
        """Returns the layouts in which calls read a value."""
        readers = [(self.choices[user.name], user) for user in value.users if user.name in self.choices]
        return [at.input(slot, axes) for at, user in readers for slot, x in enumerate(operands(user)) if x is value]


@dataclass(frozen=True)
class Rewriter:
    """The functions that a plan calls on first use and does not import; the pipeline hands them in."""

    box: Callable[[GraphModule, Assignment, Mesh], GraphModule]
    schedule: Callable[..., GraphModule]
    tried: Callable[[GraphModule, Mesh], Any]
    localize: Callable[[GraphModule, Mesh, tuple[int, ...]], GraphModule]
    verify: Callable[..., int]
    save: Callable[[Any, Path], None]
    export: Callable[..., None]
    text: Callable[[Any], str]
    html: Callable[[Any], str]
    explain: Callable[[Any, str], Any]
    diff: Callable[[Any, Any], Any]
    page: Callable[..., str]


@dataclass
class Chunk:
    """One chunk of a model, laid out on the mesh of a stage, and what its ports stand for.

    bare: the graph at global shapes. assignment: its layouts. ready: annotates and checks the graph when it is first
    asked for, as of equal chunks most never are; None where that is done. arguments: by input, the name of the
    body's input. results: by output, the number of the body's output. receives, sends: by port, the name of the
    value that crosses between chunks. orders: by parts of a step the order of the program that runs them, where it was
    found before, see `sbpc.plans.stored_order`.
    """

    mesh: Mesh
    bare: GraphModule
    assignment: Assignment
    rewriter: Rewriter
    ready: Callable[[GraphModule, Assignment], GraphModule] | None = None
    arguments: dict[Port, str] = field(default_factory=dict)
    results: dict[Port, int] = field(default_factory=dict)
    receives: dict[Port, str] = field(default_factory=dict)
    sends: dict[Port, str] = field(default_factory=dict)
    orders: dict[Parts, Numbers] = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def annotated(self) -> GraphModule:
        """The annotated graph, which plans in other layouts may share."""
        with uncollected():
            return self.bare if self.ready is None else self.ready(self.bare, self.assignment)

    @functools.cached_property
    def graph(self) -> GraphModule:
        """The annotated graph with the layout of every value as `meta["sbp"]`."""
        gm, layouts = rebuild(self.annotated), layouts_in(self.annotated, self.assignment, self.mesh)
        for node in gm.graph.nodes:
            if node.name in layouts:
                node.meta["sbp"] = layouts[node.name]
        return gm

    @property
    def ports(self) -> Ports:
        """What goes into and comes out of the chunk."""
        return self.bare.meta["ports"]

    @functools.cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of every value by its name in the graph, and the home of every parameter by its qualified name."""
        layouts = layouts_in(self.annotated, self.assignment, self.mesh)
        for port, node in placeholders(self.annotated).items():
            layouts[port.name if port.kind != INPUT else node.name] = layouts[node.name]
        return layouts | {name: layouts[first] for name, first in self.ports.tied.items()}

    @functools.cached_property
    def shapes(self) -> dict[Port, Tensor]:
        """By port of a placeholder: a tensor without data of the shape and dtype that was planned."""
        return {port: node.meta["val"] for port, node in placeholders(self.annotated).items()}

    @functools.cached_property
    def given(self) -> dict[Port, Layout]:
        """By port of a placeholder: the layout in which it is stored or comes in."""
        return {port: self.layouts[node.name] for port, node in placeholders(self.annotated).items()}

    @property
    def left(self) -> dict[Port, Layout | None]:
        """By port of an output: the layout in which it is left, None for an absent one."""
        return dict(zip(self.ports.outputs, self.assignment.outputs))

    @property
    def parameters(self) -> dict[str, Layout]:
        """The home of every parameter by its qualified name."""
        return {port.name: self.layouts[port.name] for port in self.ports.inputs if port.kind == PARAMETER}

    @functools.cached_property
    def unscheduled(self) -> GraphModule:
        """The boxed graph in the order of capture, where every collective is waited for at once."""
        with uncollected():
            return self.rewriter.box(self.annotated, self.assignment, self.mesh)

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """Loud lines about rules without a proof, and about ops that run whole on every rank, with what that costs."""
        replicates = any(map(lacks_rule, self.annotated.graph.nodes))
        return (*self.annotated.meta["notes"], *(replicated(self.unscheduled, self.mesh) if replicates else ()))

    def shape_class(self, rank: int) -> tuple[Any, ...]:
        """Returns what distinguishes the program of one rank from another's: the local shapes of everything that is
        cut."""
        coordinates = self.mesh.coordinates(rank)
        return tuple(layout.local_shape(shape, self.mesh.sizes, coordinates) for layout, shape in self.cut_shapes)

    @functools.cached_property
    def cut_shapes(self) -> list[tuple[Layout, tuple[int, ...]]]:
        """Every layout on whose local shapes the programs depend, with its global shape: those in which tensors are
        held, what else `Step.layouts` has, and those before the last cuts of a dim, where they tell at which place the
        part of a rank begins: of 5 rows over 2 and 2 ranks, one begins at 3 + 1 and one at 0 + 2."""
        pairs: dict[tuple[Layout, tuple[int, ...]], None] = {}  # each once, in order
        for node in self.unscheduled.graph.nodes:
            sbp, value = node.meta.get("sbp"), node.meta.get("val")
            if "step" in node.meta:
                pairs |= {(layout, tuple(value.shape)): None for layout in node.meta["step"].layouts}
                continue
            for layout, tensor in zip(sbp, value) if isinstance(sbp, tuple) else [(sbp, value)]:
                if isinstance(layout, Layout) and hasattr(tensor, "shape"):
                    pairs[layout, tuple(tensor.shape)] = None
        sizes = self.mesh.sizes
        for layout, shape in list(pairs):
            for dim, axes in layout.cuts.items():
                if shape[dim] % math.prod(sizes[axis] for axis in axes):
                    later = (axes[at:] for at in range(1, len(axes)))
                    pairs |= {(layout.replace(dict.fromkeys(cuts, B)), shape): None for cuts in later}
        return list(pairs)

    @functools.cached_property
    def parts(self) -> dict[Node, str]:
        """By node of the graph its part of a step."""
        return parts_of(self.bare)

    @functools.cached_property
    def sends_late(self) -> frozenset[Port]:
        """The ports of what the backward sends."""
        return frozenset(port for port, node in outputs(self.bare) if port in self.sends and self.parts[node] == INPUTS)

    def arriving(self, which: Parts) -> list[Port]:
        """Returns the ports that a micro-batch fills before the program of some parts runs: inputs for the forward,
        and what later stages send back for the backward of inputs."""
        kinds = {INPUT: FORWARD in which, TANGENT: INPUTS in which}
        return [port for port in self.ports.inputs if kinds.get(port.kind)]

    def value(self, port: Port) -> Tensor:
        """Returns a tensor without data like an output."""
        node = results(self.bare)[self.ports.outputs.index(port)]
        assert node is not None
        value: Tensor = node.meta["val"]
        return value

    def joined(self, port: Port, count: int, how: Any) -> Tensor:
        """Returns a tensor of the shape of an output, joined over `count` micro-batches as `how` says."""
        value = self.value(port)
        shape = [size * count if at == how and how != "same" else size for at, size in enumerate(value.shape)]
        return torch.empty(shape, dtype=value.dtype)


def layouts_in(gm: GraphModule, assignment: Assignment, mesh: Mesh) -> dict[str, Layout]:
    """Returns the layout of every value of a graph by its name."""
    layouts: dict[str, Layout] = {}
    for node in gm.graph.nodes:
        producer, index = value_of(node)
        choice = assignment.choices.get(producer.name)
        if choice is not None and (node is not producer or len(choice.signatures[0].outputs) == 1):
            layouts[node.name] = choice.output(index, mesh.axes)
    return layouts


class OnUse(Sequence[T]):
    """So many items, each made when it is first asked for."""

    def __init__(self, count: int, make: Callable[[int], T]) -> None:
        self.size, self.make, self.made = count, make, dict[int, T]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: Any) -> Any:
        place = range(self.size)[at]
        if isinstance(place, range):
            return [self[each] for each in place]
        if place not in self.made:
            self.made[place] = self.make(place)
        return self.made[place]
