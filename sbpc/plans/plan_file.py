"""Writes a plan to a file and reads it: JSON with a checksum. Reading runs no code: ops are found by name in fixed
namespaces."""

from __future__ import annotations

import functools
import keyword
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

from sbpc._compat import LazyGraphModule, OpOverload
from sbpc.errors import PlanError, SbpcError, check_kinds, printable
from sbpc.graph.about import ORIGIN, PANEL_OF, about
from sbpc.graph.ports import Port, Ports
from sbpc.graph.pytree import harmless
from sbpc.graph.rewrite import put
from sbpc.mesh.cluster import Cluster
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.file_graph import Bounds, check_graph, may_call
from sbpc.plans.file_schema import DTYPES, NAMES_OF_DTYPES
from sbpc.plans.options import Options
from sbpc.plans.plan_bytes import NAMESPACES, read
from sbpc.plans.staged.loop import Loop, Source
from sbpc.rules.choices import Candidates, Choice
from sbpc.rules.registry import TABLE

if TYPE_CHECKING:
    from sbpc.plans.chunk import Chunk
    from sbpc.plans.plan import Plan

WAIT = "_c10d_functional.wait_tensor.default"
STARTED = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor")
COLLECTIVES = (WAIT, *(f"_c10d_functional.{name}.default" for name in STARTED))
TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
SAVED_META = *ORIGIN, PANEL_OF
NAMED = ("arguments", "results", "receives", "sends")  # what a chunk says of its ports


def encode(plan: Plan) -> dict[str, Any]:
    """Returns a plan as JSON values."""
    return {
        "torch": torch.__version__,
        "mesh": list(zip(plan.mesh.axes, plan.mesh.sizes)),
        "cluster": plan.mesh.cluster.figures(),
        "ports": asdict(plan.ports),
        "options": encode_options(plan.options),
        "lower_bound": plan.cost.lower_bound,
        "serial_bound": min(plan.serial_bound, plan.cost.serial_bound),
        "chunks": [
            encode_chunk(chunk) | {"orders": cost.programs.orders(plan.tally(at))}
            for at, (chunk, cost) in enumerate(zip(plan.chunks, plan.chunk_costs))
        ],
        "loop": None if plan.loop is None else encode_loop(plan.loop, plan.in_loop),
    }


def encode_chunk(chunk: Chunk) -> dict[str, Any]:
    """Returns a chunk as JSON values: its graph, its layouts, and lists of ports with what they stand for."""
    assignment = chunk.assignment
    return {
        **encode_graph(chunk.annotated),
        "ports": asdict(chunk.ports),
        "choices": {
            name: [[s.text, s.factor] for s in c.signatures] + [list(c.order)] for name, c in assignment.choices.items()
        },
        "aliases": [[name, index, str(layout)] for (name, index), layout in assignment.aliases.items()],
        "outputs": encode_layouts(assignment.outputs),
        **{key: [[*astuple(port), what] for port, what in getattr(chunk, key).items()] for key in NAMED},
    }


def encode_loop(loop: Loop, in_loop: Iterable[Port]) -> dict[str, Any]:
    """Returns as JSON values what is done around the micro-batches. in_loop: see `Plan`."""
    return {
        "count": loop.count,
        "in_loop": sorted(map(list, map(astuple, in_loop))),
        "before": encode_graph(loop.before),
        "after": encode_graph(loop.after),
        "inputs": {name: list(astuple(source)) for name, source in loop.inputs.items()},
        "joins": list(loop.joins),
        "shapes": [[*astuple(port), encode_value(value)] for port, value in loop.shapes.items()],
    }


def encode_options(options: Options) -> dict[str, Any]:
    """Returns options as JSON values; those that are None are left out, and what is computed again, which is in the
    graph."""
    found = {
        name: value
        for name, value in vars(options).items()
        if (value is not None or name == "optimizer") and name != "forms"
    }
    if options.dynamic is not None:  # of patterns that overlap the last one counts, and a file sorts keys
        found["dynamic"] = [list(item) for item in options.dynamic.items()]
    return found


def encode_layouts(layouts: Iterable[Layout | None]) -> list[str | None]:
    """Returns layouts as texts, None for that of an absent value."""
    return [None if layout is None else str(layout) for layout in layouts]


def encode_graph(gm: GraphModule) -> dict[str, Any]:
    """Returns the nodes of a graph and its constants."""
    nodes = list(gm.graph.nodes)
    return {
        "graph": [encode_node(node) for node in nodes],
        "constants": {node.target: encode_constant(gm, node) for node in nodes if node.op == "get_attr"},
    }


def encode_node(node: Node) -> dict[str, Any]:
    """Returns one node; its value as dtype, shape and strides."""
    args = node.args[0] if node.op == "output" else node.args
    meta = node.meta
    item = {
        "name": node.name,
        "op": node.op,
        "target": target_name(node.target),
        "val": encode_value(meta.get("val")),
        "args": encode_argument(args),
        "kwargs": encode_argument(dict(node.kwargs)),
    }
    if "whole_shape" in meta:  # a value of a rank's program: what it is a part of
        item["part"] = [str(meta["sbp"]), list(meta["whole_shape"])]
    item |= about(node, SAVED_META)
    if "stack_trace" in item:  # of a source line with tabs, or a path of whatever a file system allows
        item["stack_trace"] = lines_of(str(item["stack_trace"] or ""))
    return item


@functools.lru_cache(maxsize=1 << 12)
def target_name(target: Any) -> str:
    """Returns the name by which a file calls a target."""
    return "getitem" if target is operator.getitem else str(target)


@functools.lru_cache(maxsize=1 << 12)
def lines_of(trace: str) -> str:
    """Returns lines of the source as a file may hold them; many nodes share them."""
    return printable(trace.expandtabs())


def encode_value(value: Any) -> Any:
    """Returns dtype, shape and strides of a tensor, or of several; None for anything else."""
    if isinstance(value, torch.Tensor):
        return [NAMES_OF_DTYPES[value.dtype], list(value.shape), list(value.stride())]
    if isinstance(value, (tuple, list)):
        return {"several": [encode_value(item) for item in value]}
    return None


def encode_argument(value: Any) -> Any:
    """Returns an argument of a call: a plain value as it is, anything else as a dict of one entry that says what it
    is."""
    if type(value) is Node:
        return {"node": value.name}
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, (tuple, list)):
        return [encode_argument(item) for item in value]
    if isinstance(value, dict):
        return {"dict": {key: encode_argument(item) for key, item in value.items()}}
    if isinstance(value, TORCH_CONSTANTS):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise PlanError(f"an argument of type {type(value).__name__} cannot be saved\n  Report the op that takes it.")


def encode_constant(gm: GraphModule, node: Node) -> Any:
    """Returns dtype, shape and elements of a tensor constant of the graph."""
    value = getattr(gm, str(node.target))
    return [*encode_value(value)[:2], [encode_argument(item) for item in value.flatten().tolist()]]


class Decoder:
    """Reads the parts of a plan's file. Every mistake in the file is a PlanError."""

    def __init__(
        self, body: dict[str, Any], path: Path, axes: Sequence[str] = (), made: dict[Any, Any] | None = None
    ) -> None:
        self.body, self.path, self.axes = body, path, axes or [name for name, _ in body["mesh"]]
        self.made = {} if made is None else made  # what calls give, see `check_graph`
        self.known: dict[Any, Any] = {}  # what the file names more than once: values, ops, choices

    def chunks(self, axes: Sequence[str]) -> list[Decoder]:
        """Returns what reads the chunks of a plan. axes: of the mesh of a stage."""
        return [Decoder(chunk, self.path, axes, self.made) for chunk in self.body["chunks"]]

    def loop(self) -> Loop | None:
        """Returns the loop of a plan over micro-batches, without the graph that these run; None if it has none."""
        if (body := self.body["loop"]) is None:
            return None
        shapes = {Port(kind, name): self.value(value) for kind, name, value in body["shapes"]}
        inputs = {str(name): Source(*source) for name, source in body["inputs"].items()}
        before, after = self.bare_graph(body["before"]), self.bare_graph(body["after"])
        return Loop(body["count"], None, before, after, inputs, tuple(body["joins"]), self.ports(), shapes)

    def named(self) -> dict[str, dict[Port, Any]]:
        """Returns what a chunk says of its ports."""
        return {key: {Port(kind, name): what for kind, name, what in self.body[key]} for key in NAMED}

    def fail(self, what: str) -> PlanError:
        """Returns the error for a file whose content makes no sense."""
        return PlanError(f"{self.path}: {what}\n  Plan anew with this version of sbpc and torch.")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turns any error into a PlanError that names the file: whatever nonsense it holds, the file is wrong."""
        try:
            yield
        except PlanError:
            raise
        except SbpcError as error:
            raise self.fail(str(error).splitlines()[0]) from error
        except Exception as error:
            raise self.fail(f"its content makes no sense ({type(error).__name__}: {error})") from error

    def options(self) -> Options:
        """Returns the options of the plan."""
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.body["options"].items()
        }
        if "dynamic" in options:
            options["dynamic"] = dict(options["dynamic"])
        return Options(**options)

    def graph(self, body: dict[str, Any], collectives: bool = False, given: Bounds = ()) -> GraphModule:
        """Returns the graph that `encode_graph` gave, with the ports of the file. The program of a rank may call
        `collectives`.

        given: see `check_graph`, whose answer is `meta["bounds"]`.
        """
        gm = self.bare_graph(body, collectives, given)
        gm.meta["ports"] = self.ports()
        return gm

    def bare_graph(self, body: dict[str, Any], collectives: bool = False, given: Bounds = ()) -> GraphModule:
        """Returns the graph that `encode_graph` gave, without ports."""
        graph, root = Graph(), torch.nn.Module()
        for name, (dtype, shape, items) in body["constants"].items():
            data = torch.tensor([self.argument(item, {}) for item in items], dtype=DTYPES[dtype], device="cpu")
            root.register_buffer(name, data.reshape(shape))
        nodes: dict[str, Node] = {}
        for item in body["graph"]:
            node = nodes[item["name"]] = self.node(graph, item, nodes, collectives)
            if node.name != item["name"] and node.op != "output":
                raise self.fail(f"a node is called {item['name']!r}")  # as Python has it, or another node
        if [node.op for node in graph.nodes].index("output") != len(nodes) - 1:
            raise self.fail("a graph that goes on behind its output")
        gm = LazyGraphModule(root, graph)
        gm.meta["bounds"] = check_graph(gm, self.made, collectives, given)
        return gm

    def node(self, graph: Graph, item: dict[str, Any], nodes: Mapping[str, Node], collectives: bool) -> Node:
        """Adds one node to the graph. nodes: the earlier ones by name."""
        args = tuple(self.argument(item["args"], nodes))
        if item["op"] == "output":
            node = graph.output(args)
        else:
            kwargs = self.argument(item["kwargs"], nodes)
            target = self.target(item, kwargs, collectives)
            node = graph.create_node(item["op"], target, name=item["name"])
            put(node, "args", args)
            put(node, "kwargs", kwargs)
        meta = {key: item[key] for key in SAVED_META if key in item}
        if item["op"] != "output":
            meta["val"] = self.value(item["val"])
            if "part" in item:
                layout, whole = item["part"]
                meta["sbp"] = Layout.parse(layout, self.axes)
                meta |= {"whole_shape": tuple(whole), "local_shape": tuple(meta["val"].shape)}
        put(node, "meta", meta)
        return node

    def ports(self) -> Ports:
        """Returns the ports of the program."""
        ports = dict(self.body["ports"])
        for side in ("inputs", "outputs"):
            ports[side] = tuple(Port(**port) for port in ports[side])
            if len(set(ports[side])) != len(ports[side]):
                raise self.fail(f"two {side} are one")
        harmless([ports["arguments"], ports["results"]])
        return Ports(**ports | {"unused": tuple(ports["unused"]), "frozen": tuple(ports["frozen"])})

    def target(self, item: dict[str, Any], kwargs: Mapping[str, Any], collectives: bool) -> Any:
        """Returns what a node's target stands for: a name, getitem, or an op."""
        name = item["target"]
        if item["op"] in ("placeholder", "get_attr"):
            bare = not item["args"] and item["kwargs"] == {"dict": {}}
            if not bare or not name.isidentifier() or keyword.iskeyword(name):
                raise self.fail(f"{name!r} is no name")  # it would stand in the generated code
            return name
        if item["op"] != "call_function":
            raise self.fail(f"a node of kind {item['op']!r}")
        if name == "getitem":
            return operator.getitem
        if (name, collectives) not in self.known:
            op = self.op(name, collectives and name in COLLECTIVES)
            self.known[name, collectives] = op, {argument.name for argument in op._schema.arguments}
        op, names = self.known[name, collectives]
        if not kwargs.keys() <= names:
            raise self.fail(f"{name} has no arguments {sorted(kwargs)}")
        return op

    def op(self, name: str, collective: bool) -> OpOverload:
        """Returns the op of a name. Nothing outside the known namespaces of torch.ops is reached."""
        parts = name.split(".")
        no_op = f"{name!r} is no op that a plan may call, unless sbpc.rule gives it a rule first"
        if not collective and (len(parts) != 3 or (parts[0] not in NAMESPACES and name not in map(str, TABLE))):
            raise self.fail(no_op)
        try:
            op = getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
        except (AttributeError, RuntimeError) as error:
            raise self.fail(f"this torch ({torch.__version__}) has no op {name}") from error
        if not isinstance(op, OpOverload) or not (collective or may_call(op)):
            raise self.fail(no_op)
        return op

    def value(self, text: Any) -> Any:
        """Returns a tensor without data of the recorded dtype, shape and strides, or a tuple of them."""
        if text is None:
            return None
        if isinstance(text, dict):
            return tuple(self.value(item) for item in text["several"])
        dtype, shape, stride = text
        key = dtype, *shape, None, *stride
        if key not in self.known:
            self.known[key] = torch.empty_strided(shape, stride, dtype=DTYPES[dtype], device="meta")
        return self.known[key]

    def argument(self, value: Any, nodes: Mapping[str, Node]) -> Any:
        """Returns an argument of a call. nodes: those that it may be, by name."""
        if type(value) is not dict:
            return [self.argument(item, nodes) for item in value] if type(value) is list else value
        ((kind, inner),) = value.items()
        if kind == "node":
            return nodes[inner]
        if kind == "float":
            return float.fromhex(inner)
        if kind == "dict":
            return {key: self.argument(item, nodes) for key, item in inner.items()}
        if kind == "device":
            return torch.device(inner)
        if kind == "torch" and isinstance(getattr(torch, inner, None), TORCH_CONSTANTS):
            return getattr(torch, inner)
        raise self.fail(f"an argument of kind {kind!r}")

    def mesh(self) -> Mesh:
        """Returns the mesh with its cluster."""
        axes = dict(self.body["mesh"])
        if len(axes) < len(self.body["mesh"]):
            raise self.fail("two axes of its mesh have one name")
        mesh = Mesh(cluster=Cluster.of(self.body["cluster"], "its cluster"), **axes)
        return mesh.routed(self.options().routed)

    def layouts(self, key: str) -> list[Layout | None]:
        """Returns the layouts that `encode_layouts` gave."""
        return [None if text is None else Layout.parse(text, self.axes) for text in self.body[key]]

    def choice(self, text: list[Any], candidates: Candidates, name: str) -> Choice:
        """Returns the choice of a node, found again among its candidates."""
        known = {(s.text, s.factor): s for s in candidates.signatures}
        *parts, order = text
        missing = [part for part, factor in parts if (part, factor) not in known]
        if missing:
            raise self.fail(f"%{name} has no signature {missing[0]} here")
        return Choice(tuple(known[part, factor] for part, factor in parts), tuple(order))

    def assignment(
        self, gm: GraphModule
    ) -> tuple[dict[str, Choice], dict[tuple[str, int], Layout], tuple[Layout | None, ...]]:
        """Returns choices, aliases and output layouts for the annotated graph of a chunk."""
        choices, known = {}, dict[Any, Choice]()  # equal nodes share their choice, as they do their candidates
        for node in gm.graph.nodes:
            if (candidates := node.meta.get("candidates")) is not None:
                text = self.body["choices"][node.name]
                key = id(candidates), str(text)
                if key not in known:
                    known[key] = self.choice(text, candidates, node.name)
                choices[node.name] = known[key]
        aliases = {(name, index): Layout.parse(text, self.axes) for name, index, text in self.body["aliases"]}
        return choices, aliases, tuple(self.layouts("outputs"))


def decode(path: str | Path) -> Decoder:
    """Returns a decoder for a plan's file. Raises PlanError as `read` does."""
    check_kinds(PlanError, path=(path, "a path"))
    return Decoder(read(Path(path)), Path(path))
