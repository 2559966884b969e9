"""The torch.compile backend: `torch.compile(model, backend="sbpc", options={"mesh": mesh})`, under torchrun.

Each graph that dynamo hands over is planned by itself. Its parameters are plain and whole on every rank, so the backend
spreads the work but saves no memory. A module from `sbpc.parallelize` keeps its shards: dynamo leaves it as it is.
"""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sbpc._compat import FakeTensorMode, compile_id, compiled_enough, outside_dynamo, source_of
from sbpc.api.planning import plan
from sbpc.errors import PlanError, SbpcError
from sbpc.graph.operands import leaves
from sbpc.graph.ports import BUFFER, INPUT, PARAMETER, Port
from sbpc.mesh.mesh import Mesh
from sbpc.plans.plan import Plan
from sbpc.runtime.executors import Executor, executor_of
from sbpc.runtime.further_plans import MOST, RELAID, serving
from sbpc.runtime.module import agreed_seed
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.same_calls import check_weights
from sbpc.runtime.state.weight_files import place_tensor
from sbpc.runtime.step import Runner
from sbpc.runtime.step_function import Apart

log = logging.getLogger("sbpc")
OPTIONS = {
    "mesh": "sbpc.Mesh(data=2), or a DeviceMesh; needed",
    "memory": "bytes per rank",
    "objective": '"seconds" or "bytes"',
    "executor": '"auto", "code", "graph", "interpreter" or "inductor"',
    "plans": "how many a graph of symbolic sizes may have, 8",
}
WHOLE = (
    "torch.compile hands over whole parameters: the work is spread over %s, but every rank holds all of them.\n"
    "  sbpc.parallelize(model, plan) stores them in parts."
)
LAST = (
    "graph %d is planned for the %d. time, and dynamo compiles a function no more often. It would run what comes next "
    "as it is written, whole on every rank and with random numbers of its own on each. So that is an error from now "
    "on: torch._dynamo.config.fail_on_recompile_limit_hit is set.\n"
    "  Compile with dynamic=True, or pad batches to few lengths, see sbpc.buckets; or allow more: "
    "torch._dynamo.config.recompile_limit = %d."
)
warned: set[Mesh] = set()
"""Meshes about which this process has warned: dynamo calls the backend for every graph, and one warning is enough."""


def sbpc(gm: GraphModule, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Returns what runs one graph of dynamo on this rank, for `torch.compile(model, backend="sbpc", options={"mesh":
    mesh})`.

    Start the script once per rank with torchrun; it stays the script of one device, and every rank gives the same
    weights and batches: both are compared, see `sbpc.parallelize`. examples/03_torch_compile.py is one. options:
    "mesh", a `sbpc.Mesh` or a DeviceMesh, is needed. "memory" and "objective" are as for `sbpc.plan`, "executor" is
    as for `sbpc.parallelize`. Other shapes, modes or numbers are planned anew; the logger "sbpc" says why, at INFO.

    A graph of symbolic sizes, as dynamo makes it of a second shape, with `dynamic=True` or of what `mark_dynamic`
    names, is planned for each size with which it is called, as `sbpc.parallelize(..., also="auto")` does it: where the
    layouts of a plan are legal they serve, and that counts as none of the "plans" that a graph may have, by default 8.
    What dynamo would no longer compile, since it has compiled a function as often as its `recompile_limit` allows, is
    an error, see the warning before.

    Raises SbpcError for unknown options. What it returns raises what `sbpc.plan` raises, and PlanError where the ranks
    differ or there would be too many plans.
    """
    mesh, options = checked(options or {})
    where = process_groups.start()
    process_groups.check_ranks(mesh)
    process_groups.bind(mesh)
    if mesh not in warned:
        warned.add(mesh)
        log.warning(WHOLE, mesh)
    if not gives_tensors(gm):
        return gm
    graph = PlannedGraph(gm, mesh, executor_of(options.pop("executor", "auto")), where, options)
    random = {"seed": agreed_seed(where), "step": 0}
    # later, ops that add up in no fixed order may have left other bits in the weights of each rank
    fresh = compile_id()[1] == 0

    def run(*values: Any) -> Any:
        nonlocal fresh
        runner, ports = graph.of_sizes(values)
        given = {port: value for port, value in zip(ports, values) if port is not None}
        if fresh:
            check_weights(
                {port.name.removeprefix("weights."): each for port, each in given.items() if port.kind != INPUT}
            )
            fresh = False
        return runner.run(given, random, runner.trains and torch.is_grad_enabled(), Apart)

    return run


def gives_tensors(gm: GraphModule) -> bool:
    """Whether there is something to divide: a graph that dynamo cuts off behind sizes gives numbers alone."""
    ends = leaves(gm.graph.output_node().args, Node)
    return any(isinstance(node.meta.get("example_value"), (Tensor, type(None))) for node in ends)


def checked(options: Mapping[str, Any]) -> tuple[Mesh, dict[str, Any]]:
    """Returns the mesh and the other options. Raises SbpcError for an unknown option, and without a mesh."""
    known = "\n".join(f"    {name}: {about}" for name, about in OPTIONS.items())
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise SbpcError(f"the backend has no option {unknown[0]!r}\n  It has\n{known}")
    mesh = options.get("mesh")
    mesh = Mesh.from_device_mesh(mesh) if isinstance(mesh, DeviceMesh) else mesh
    if not isinstance(mesh, Mesh):
        raise SbpcError(
            f"the option mesh is {mesh!r}\n  Give options={{'mesh': sbpc.Mesh(data=2)}}. Options are\n{known}"
        )
    plans = options.get("plans", MOST)
    if type(plans) is not int or plans < 1:
        raise SbpcError(f"the option plans is {plans!r}\n  Give a number of plans, 1 or more.")
    return mesh, {key: value for key, value in options.items() if key != "mesh"}


class PlannedGraph:
    """The plans of one graph of dynamo, by the sizes and numbers with which it is called."""

    def __init__(
        self, gm: GraphModule, mesh: Mesh, executor: Executor, where: torch.device, options: dict[str, Any]
    ) -> None:
        self.mesh, self.executor, self.where, self.options = mesh, executor, where, options
        self.most, self.train = options.pop("plans", MOST), torch.is_grad_enabled()
        self.sources = [source_of(each) for each in gm.graph.find_nodes(op="placeholder")]
        self.gm, self.id = with_floats(gm), compile_id()
        self.planned: list[Plan] = []  # but for those in the layouts of others, of which the last few are kept
        self.relaid: list[Any] = []
        self.runners: dict[Any, tuple[Runner, list[Port | None]]] = {}

    def of_sizes(self, values: Sequence[Any]) -> tuple[Runner, list[Port | None]]:
        """Returns what runs the plan for values of these sizes, and their ports."""
        key = tuple((each.shape, each.stride()) if isinstance(each, Tensor) else each for each in values)
        if key not in self.runners:
            with outside_dynamo():
                lifted = LiftedGraph(self.gm, self.sources, values)
                runner = Runner(made := self.plan(lifted), self.executor, self.where)
            runner.same.names, runner.same.axis = lambda: lifted.names, None
            self.runners[key] = runner, lifted.ports
            self.relaid += [] if made is self.planned[-1] else [key]
            if len(self.relaid) > RELAID:
                del self.runners[self.relaid.pop(0)]
        return self.runners[key]

    def plan(self, lifted: LiftedGraph) -> Plan:
        """Returns a plan for the sizes of a graph. Raises PlanError if it would be one too many."""
        pin = lifted.whole(self.mesh)  # parameters are the user's, as they are
        if not self.planned:
            made = plan(lifted, lifted.inputs, self.mesh, train=self.train, pin=pin, masters=False, **self.options)
        else:
            alike = self.planned[0].alike
            step = alike.captured(lifted, lifted.inputs, {}, self.train)
            if (served := serving(alike, step, self.planned, [each.shape for each in lifted.inputs])) is not None:
                return served
            if len(self.planned) >= self.most:
                raise PlanError(
                    f"graph {self.id[0]} has {self.most} plans, of which none serves {lifted.sizes}\n"
                    "  Pad batches to few lengths, see sbpc.buckets, or allow more: "
                    f"options={{'mesh': mesh, 'plans': {2 * self.most}}}."
                )
            made = alike.planned(step, lifted.inputs, pin, [], False)
        self.planned.append(made)
        self.log(lifted, made)
        return made

    def log(self, lifted: LiftedGraph, made: Plan) -> None:
        """Logs which graph was planned, and why it is a further one."""
        (frame, time), again = self.id, len(self.planned) - 1
        calls = sum(node.op not in ("placeholder", "output") for node in self.gm.graph.nodes)
        log.info("graph %d: %d calls on %s, %d parameters", frame, calls, lifted.sizes, len(made.parameters))
        if frame and not again:
            apart = "a graph break lies between them, or it is another function"
            log.info("graph %d is apart from the first: %s", frame, apart)
        if time or again:
            number = time + again + 1
            log.info("graph %d is planned anew, for the %d. time: for other shapes, modes or values", frame, number)
        if not again and compiled_enough(time + 1):
            log.warning(LAST, frame, time + 1, 2 * (time + 1))


class LiftedGraph(nn.Module):
    """A graph of dynamo as a module that has the parameters and buffers among the graph's inputs under their names.

    inputs, names: fakes of the other tensors, and what the user calls them. ports: by input of the graph, None for a
    number. numbers: by input, None for a tensor. A number is a constant of the plan, and to ask for its value makes
    dynamo guard it.
    """

    def __init__(self, gm: GraphModule, sources: Sequence[str], values: Sequence[Any]) -> None:
        super().__init__()
        self.graph_module = gm
        self.weights = nn.Module()
        self.inputs: list[Tensor] = []
        self.names: list[str] = []
        self.ports: list[Port | None] = []
        self.numbers: list[Any] = []
        mode = FakeTensorMode()
        for source, example in zip(sources, values, strict=True):
            number = None
            if not isinstance(example, Tensor):
                port, number = None, example
            else:
                fake = faked(example, mode)
                if isinstance(example, nn.Parameter) or "_buffers[" in source:
                    name, kind = self.named(source), BUFFER
                    if isinstance(example, nn.Parameter):
                        fake, kind = nn.Parameter(fake, example.requires_grad), PARAMETER
                    place_tensor(self.weights, name, fake)
                    port = Port(kind, f"weights.{name}")
                else:
                    port = Port(INPUT, str(len(self.inputs)))
                    self.names.append(re.sub(r"^L\['(\w+)'\]", r"\1", source))
                    self.inputs.append(fake.requires_grad_(example.requires_grad))
            self.ports.append(port)
            self.numbers.append(number)

    @property
    def sizes(self) -> str:
        """The sizes of the inputs."""
        return ", ".join(str(list(value.shape)) for value in self.inputs)

    def named(self, source: str) -> str:
        """Returns the name in L['self']._modules['up']._parameters['weight'], followed by a number if it is taken."""
        name = ".".join(re.findall(r"\['([^']+)'\]", source)[1:]) or "weight"
        taken = {port.name for port in self.ports if port is not None}
        return name if f"weights.{name}" not in taken else f"{name}_{len(self.ports)}"

    def whole(self, mesh: Mesh) -> dict[str, str]:
        """Returns pins that keep every parameter whole on every rank, as dynamo hands it over."""
        layout = "[" + ", ".join("B" for _ in mesh.axes) + "]"
        return {port.name: layout for port in self.ports if port is not None and port.kind == PARAMETER}

    def forward(self, *inputs: Tensor) -> Any:
        """Runs the graph."""

        def value(port: Port) -> Any:
            return inputs[int(port.name)] if port.kind == INPUT else operator.attrgetter(port.name)(self)

        pairs = zip(self.ports, self.numbers)
        return self.graph_module(*(number if port is None else value(port) for port, number in pairs))


def with_floats(gm: GraphModule) -> GraphModule:
    """Returns a graph of dynamo in which Python's floats are constants.

    Dynamo hands over a float that has changed between calls as a tensor, of which the graph takes `item()`. To ask for
    its value makes dynamo guard it: another value is then another graph.
    """
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.find_nodes(op="call_method", target="item"):
        number = node.meta.get("example_value")
        if node.args[0].op == "placeholder" and isinstance(number, torch.SymFloat):
            replace_by_number(node, float(number))
            graph.erase_node(node)
    return GraphModule(gm, graph)


def replace_by_number(node: Node, number: float) -> None:
    """Replaces a node by a number in everything that reads it."""
    for user in list(node.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda arg: number if arg is node else arg)


def faked(example: Tensor, mode: FakeTensorMode) -> Tensor:
    """Returns a fake tensor of the same sizes, strides, dtype and device."""
    with mode:
        return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
