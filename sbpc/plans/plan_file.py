"""Writes a plan to a file and reads it: JSON with a checksum. Reading runs no code: ops are found by name in fixed namespaces."""

from __future__ import annotations

import functools
import hashlib
import json
import keyword
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, GraphModule, Node

from sbpc._compat import OpOverload
from sbpc.errors import PlanError, SbpcError, check_kinds, printable, read_json, shown
from sbpc.graph.about import ORIGIN, PANEL_OF, about
from sbpc.graph.ports import Port, Ports
from sbpc.graph.pytree import harmless
from sbpc.mesh.cluster import Cluster
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.plans.file_graph import Bounds, check_graph, may_call
from sbpc.plans.file_schema import DTYPES, misfit
from sbpc.plans.options import Options
from sbpc.rules.choices import Candidates, Choice
from sbpc.rules.registry import TABLE

if TYPE_CHECKING:
    from sbpc.plans.plan import Plan

FORMAT = "sbpc plan"
VERSION = 2
NAMESPACES = ("aten", "prims", "sbpc")
WAIT = "_c10d_functional.wait_tensor.default"
STARTED = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor")
COLLECTIVES = (WAIT, *(f"_c10d_functional.{name}.default" for name in STARTED))
TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
SAVED_META = *ORIGIN, PANEL_OF


def save(plan: Plan, path: Path) -> None:
    """Writes a plan to a file that `decode` reads."""
    write(encode(plan), path)


def write(content: dict[str, Any], path: Path) -> None:
    """Writes a file's content. A temporary file is moved into place, so that a reader never sees half a plan.

    Raises PlanError for what `read` would refuse, such as a parameter with a line end in its name, or an op that it may not call.
    """
    for call in calls_in(content):
        space, *names = call["target"].split(".")
        if space in NAMESPACES and not may_call(functools.reduce(getattr, names, getattr(torch.ops, space))):
            what = f"a file may not call {call['target']}, as %{call['name']} does in {call.get('module') or 'the model'}"
            raise PlanError(f"{what}\n  Give the op a rule by sbpc.rule, there where the file is read, too.")
    body = json.dumps(content, separators=(",", ":"), sort_keys=True)
    try:
        wrong = misfit(read_json(body))
    except ValueError as error:
        wrong = str(error)
    if wrong is not None:
        raise PlanError(f"the plan cannot be written: {wrong.removeprefix('.')}\n  Give what bears this name another one.")
    digest = hashlib.sha256(body.encode()).hexdigest()
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory")
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(json.dumps({"format": FORMAT, "version": VERSION, "sha256": digest}) + "\n" + body + "\n")
        temporary.replace(path)
    except OSError as error:
        raise PlanError(f"the plan cannot be written: {error}\n  Name a file in a folder that exists.") from error


def calls_in(content: Any) -> Iterator[dict[str, Any]]:
    """Yields the calls of all graphs in a file's content."""
    if isinstance(content, dict) and content.get("op") == "call_function":
        yield content
    elif isinstance(content, (dict, list)):
        for item in content.values() if isinstance(content, dict) else content:
            yield from calls_in(item)


def read(path: Path) -> dict[str, Any]:
    """Returns the body of a plan's file. Raises PlanError if it is no plan, is damaged, or is of another version."""
    no_plan, todo = f"{path} is no plan", "\n  Write one with plan.save."
    try:
        first, _, body = path.read_bytes().decode().partition("\n")
        head = read_json(first)
    except (OSError, ValueError) as error:
        raise PlanError(f"{no_plan}: {error}{todo}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise PlanError(no_plan + todo)
    if head.get("version") != VERSION:
        raise PlanError(f"{path} has version {shown(head.get('version'))}, this sbpc reads {VERSION}\n  Plan anew.")
    if not body.endswith("\n") or hashlib.sha256(body[:-1].encode()).hexdigest() != head.get("sha256"):
        raise PlanError(f"{path} is damaged: its checksum does not match\n  Copy it again, or plan anew.")
    try:
        content = read_json(body)
    except ValueError as error:
        raise PlanError(f"{no_plan}: {error}{todo}") from error
    if not isinstance(content, dict):
        raise PlanError(no_plan + todo)
    wrong = misfit(content)
    if wrong is not None:
        raise PlanError(f"{path}: {wrong.removeprefix('.')}\n  Plan anew with this version of sbpc and torch.")
    return content


def encode(plan: Plan) -> dict[str, Any]:
    """Returns a plan as JSON values."""
    assignment = plan.assignment
    return {
        "torch": torch.__version__,
        "mesh": list(zip(plan.mesh.axes, plan.mesh.sizes)),
        "cluster": plan.mesh.cluster.figures(),
        **encode_graph(plan.graph),
        "ports": asdict(plan.ports),
        "choices": {
            name: [[s.text, s.factor] for s in c.signatures] + [list(c.order)]
            for name, c in assignment.choices.items()
        },
        "aliases": [[name, index, str(layout)] for (name, index), layout in assignment.aliases.items()],
        "outputs": encode_layouts(assignment.outputs),
        "lower_bound": plan.lower_bound,
        "serial_bound": plan.serial_bound,
        "options": encode_options(plan.options),
    }


def encode_options(options: Options) -> dict[str, Any]:
    """Returns options as JSON values; those that are None are left out, and what is computed again, which is in the graph."""
    return {name: value for name, value in vars(options).items() if (value is not None or name == "optimizer") and name != "forms"}


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
    item = {
        "name": node.name,
        "op": node.op,
        "target": "getitem" if node.target is operator.getitem else str(node.target),
        "val": encode_value(node.meta.get("val")),
        "args": encode_argument(args),
        "kwargs": encode_argument(dict(node.kwargs)),
    }
    if "whole_shape" in node.meta:  # a value of a rank's program: what it is a part of
        item["part"] = [str(node.meta["sbp"]), list(node.meta["whole_shape"])]
    item |= about(node, SAVED_META)
    if "stack_trace" in item:  # of a source line with tabs, or a path of whatever a file system allows
        item["stack_trace"] = printable(str(item["stack_trace"] or "").expandtabs())
    return item


def encode_value(value: Any) -> Any:
    """Returns dtype, shape and strides of a tensor, or of several; None for anything else."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape), list(value.stride())]
    if isinstance(value, (tuple, list)):
        return {"several": [encode_value(item) for item in value]}
    return None


def encode_argument(value: Any) -> Any:
    """Returns an argument of a call: a plain value as it is, anything else as a dict of one entry that says what it is."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, Node):
        return {"node": value.name}
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

    def __init__(self, body: dict[str, Any], path: Path) -> None:
        self.body, self.path, self.made = body, path, dict[Any, Any]()

    def fail(self, what: str) -> PlanError:
        """Returns the error for a file whose content makes no sense."""
        return PlanError(f"{self.path}: {what}\n  Plan anew with this version of sbpc and torch.")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turns any error into a PlanError that names the file: whatever nonsense it holds, it is the file that is wrong."""
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
        options: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in self.body["options"].items()}
        return Options(**options)

    def graph(self, body: dict[str, Any], collectives: bool = False, given: Bounds = ()) -> GraphModule:
        """Returns the graph that `encode_graph` gave, with the ports of the file. The program of a rank may call `collectives`.

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
        gm = GraphModule(root, graph)
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
            node = graph.create_node(item["op"], target, args, kwargs, name=item["name"])
        node.meta = {key: item[key] for key in SAVED_META if key in item}
        if item["op"] != "output":
            node.meta["val"] = self.value(item["val"])
            if "part" in item:
                layout, whole = item["part"]
                node.meta["sbp"] = Layout.parse(layout, [name for name, _ in self.body["mesh"]])
                node.meta |= {"whole_shape": tuple(whole), "local_shape": tuple(node.meta["val"].shape)}
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
        op = self.op(name, collectives and name in COLLECTIVES)
        if not kwargs.keys() <= {argument.name for argument in op._schema.arguments}:
            raise self.fail(f"{name} has no arguments {sorted(kwargs)}")
        return op

    def op(self, name: str, collective: bool) -> OpOverload:
        """Returns the op of a name. Nothing outside the known namespaces of torch.ops is reached."""
        parts, no_op = name.split("."), f"{name!r} is no op that a plan may call, unless sbpc.rule gives it a rule first"
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
        return torch.empty_strided(shape, stride, dtype=DTYPES[dtype], device="meta")

    def argument(self, value: Any, nodes: Mapping[str, Node]) -> Any:
        """Returns an argument of a call. nodes: those that it may be, by name."""
        if isinstance(value, list):
            return [self.argument(item, nodes) for item in value]
        if not isinstance(value, dict):
            return value
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
        return Mesh(cluster=Cluster.of(self.body["cluster"], "its cluster"), **dict(self.body["mesh"]))

    def layouts(self, key: str) -> list[Layout | None]:
        """Returns the layouts that `encode_layouts` gave."""
        axes = [name for name, _ in self.body["mesh"]]
        return [None if text is None else Layout.parse(text, axes) for text in self.body[key]]

    def choice(self, text: list[Any], candidates: Candidates, name: str) -> Choice:
        """Returns the choice of a node, found again among its candidates."""
        known = {(s.text, s.factor): s for s in candidates.signatures}
        *parts, order = text
        missing = [part for part, factor in parts if (part, factor) not in known]
        if missing:
            raise self.fail(f"%{name} has no signature {missing[0]} here")
        return Choice(tuple(known[part, factor] for part, factor in parts), tuple(order))

    def assignment(
        self, gm: GraphModule, axes: tuple[str, ...]
    ) -> tuple[dict[str, Choice], dict[tuple[str, int], Layout], list[Layout | None]]:
        """Returns choices, aliases and output layouts for an annotated graph."""
        choices = {}
        for node in gm.graph.nodes:
            if "candidates" in node.meta:
                choices[node.name] = self.choice(self.body["choices"][node.name], node.meta["candidates"], node.name)
        aliases = {(name, index): Layout.parse(text, axes) for name, index, text in self.body["aliases"]}
        return choices, aliases, self.layouts("left" if "left" in self.body else "outputs")  # "outputs" of a file with programs are values


def decode(path: str | Path) -> Decoder:
    """Returns a decoder for a plan's file. Raises PlanError as `read` does."""
    check_kinds(PlanError, path=(path, "a path"))
    return Decoder(read(Path(path)), Path(path))
