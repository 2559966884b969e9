"""Traces with AOTAutograd what the light tracer refuses: it functionalizes every write, buffers included."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from sbpc._compat import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    OpOverload,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    aot_export_joint_with_descriptors,
    compiling,
)
from sbpc.errors import CaptureError
from sbpc.graph import ports
from sbpc.graph.ports import SEED_PORT, Port
from sbpc.graph.rewrite import Copies, put
from sbpc.passes.capture.fake_model import FakeModel, finish, placeholder
from sbpc.passes.capture.light_tracer import Watch
from sbpc.passes.capture.random_ops import is_random, restart
from sbpc.passes.capture.source_lines import user_error

ORDER = (ports.OUTPUT, ports.MUTATION, ports.GRADIENT, ports.INPUT_GRADIENT)
WRITE = "Write into a clone: arguments and parameters stay as they are."


class Flat(nn.Module):
    """The model as a module of its distinct parameters and buffers, so that a tied one is not made two."""

    def __init__(self, source: FakeModel) -> None:
        super().__init__()
        self.source = [source]  # in a list, or its module would become a submodule
        self.watch = Watch(source)
        self.results: Any = None
        self.ports: list[Port] = []  # of what forward returns
        self.differentiable: list[str] = []
        for at, value in enumerate(source.parameters.values()):
            self.register_parameter(f"parameter_{at}", value)  # type: ignore[arg-type]
        for at, value in enumerate(source.buffers.values()):
            self.register_buffer(f"buffer_{at}", value)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Returns the leaves of the result, then the buffers that were replaced.

        All are clones: AOTAutograd leaves the gradient of an output that is a view of another to its own runtime.
        """
        source = self.source[0]
        restart()  # AOTAutograd runs this more than once
        parameters = dict(zip(source.parameters, self.parameters()))
        buffers = dict(zip(source.buffers, self.buffers()))
        *inputs, self.watch.given_seed = given
        values = [*parameters.values(), *buffers.values(), *inputs]
        with source.substituted(parameters, buffers) as replaced, compiling(), self.watch, self.watch.watching(values):
            outputs, self.results = source(inputs)
            written = replaced()
            clones = [value.clone() for value in (*outputs, *(value.detach() for value in written.values()))]
        self.ports = [Port(ports.OUTPUT, str(at)) for at in range(len(outputs))]
        self.ports += [Port(ports.MUTATION, name) for name in written]
        self.differentiable = [str(at) for at, o in enumerate(outputs) if o.requires_grad]
        return tuple(clones)

    def port(self, desc: Any) -> Port:
        """Returns the port of a placeholder or an output that AOTAutograd describes so."""
        source = self.source[0]
        match desc:
            case ParamAOTInput(target):
                return Port(ports.PARAMETER, list(source.parameters)[int(target.rpartition("_")[2])])
            case BufferAOTInput(target):
                return Port(ports.BUFFER, list(source.buffers)[int(target.rpartition("_")[2])])
            case PlainAOTInput(number) if number == len(source.inputs):
                return SEED_PORT
            case PlainAOTInput(number):
                return Port(ports.INPUT, str(number))
            case TangentAOTInput(PlainAOTOutput(number)):
                return Port(ports.TANGENT, self.ports[number].name)
            case PlainAOTOutput(number):
                return self.ports[number]
            case InputMutationAOTOutput(BufferAOTInput() as buffer):
                return Port(ports.MUTATION, self.port(buffer).name)
            case GradAOTOutput(ParamAOTInput() as parameter):
                return Port(ports.GRADIENT, self.port(parameter).name)
            case GradAOTOutput(PlainAOTInput(number)):
                return Port(ports.INPUT_GRADIENT, str(number))
        raise CaptureError(f"AOTAutograd made {desc.expr()}, for which there is no port\n  Report this with the model.")


def joint(source: FakeModel, train: bool) -> GraphModule:
    """Returns the graph of a model by AOTAutograd, with a mutation for every buffer that is written."""
    flat = Flat(source)
    source.mode.allow_non_fake_inputs = True  # Watch has refused those that are not known
    with contextlib.ExitStack() as stack:
        for context in (source.mode, torch.fx.traceback.preserve_node_meta()):
            stack.enter_context(context)
        traced = aot_export_joint_with_descriptors(stack, flat, (*source.inputs, source.seed())).graph_module
    return _ported(source, traced, flat, train)


def _ported(source: FakeModel, traced: GraphModule, flat: Flat, train: bool) -> GraphModule:
    """Returns the same graph with our ports, names and meta."""
    end = traced.graph.output_node()
    values: Any = end.args[0]
    results = [(desc, node) for desc, node in zip(end.meta["desc"], values) if node is not None]
    _refuse_writes(source, flat, results)
    new = Copies()
    constants: dict[str, Tensor] = {}
    inputs: list[Port] = []
    place = ("", "")  # of the op before: what adds up gradients has none of its own
    labels = {port: label for port, label, _ in source.placeholders()} | {SEED_PORT: SEED_PORT.name}
    for node in traced.graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            port = flat.port(node.meta["desc"])
            if port == SEED_PORT and not node.users:
                continue
            inputs.append(port)
            new[node] = placeholder(new.graph, labels.get(port, f"tangent_{port.name}"))
        elif node.op == "get_attr":
            name = f"constant_{len(constants)}"
            constants[name] = getattr(traced, str(node.target))
            new[node] = new.graph.create_node("get_attr", name, name=name)
        else:
            new.keep(node)
            _refuse_draws(node, place[1])
        path, stack = place = _place(node) if node.op == "placeholder" or any(_place(node)) else place
        phase = "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"
        put(new[node], "meta", {"module": path, "stack_trace": stack, "phase": phase})
    tangents = [port.name for port in inputs if port.kind == ports.TANGENT]
    assert tangents == (flat.differentiable if train else []), "a tangent is missing"
    values = {copy: node.meta.get("val") for node, copy in new.items()}  # none of an assertion, which nothing reads
    outputs = {flat.port(desc): new[_inside(node)] for desc, node in results}
    ordered = sorted(outputs.items(), key=lambda item: ORDER.index(item[0].kind))
    return finish(source, new.graph, constants, inputs, ordered, flat.results, values, train)


def _refuse_writes(source: FakeModel, flat: Flat, results: Sequence[tuple[Any, Node]]) -> None:
    """Raises CaptureError if the forward writes into a parameter or an argument."""
    for desc, node in results:
        if isinstance(desc, InputMutationAOTOutput) and not isinstance(desc.mutated_input, BufferAOTInput):
            name = flat.port(desc.mutated_input).name
            name = name if name in source.parameters else source.labels[int(name)]
            raise user_error(f"the forward writes into {name!r}", _place(node)[1], WRITE)


def _refuse_draws(node: Node, stack: str) -> None:
    """Raises CaptureError for an op that draws random numbers. stack: the lines of the op before."""
    if isinstance(node.target, OpOverload) and is_random(node.target, node.args, node.kwargs):
        what = f"{node.target} is computed anew in the backward, and AOTAutograd does not tell what it drew before"
        raise user_error(what, stack, "Leave out the writes for which the light tracer gave up: see the log.")


def _inside(node: Node) -> Node:
    """Returns what an output is a clone of."""
    return node.args[0] if node.target is torch.ops.aten.clone.default else node  # type: ignore[return-value]


def _place(node: Node) -> tuple[str, str]:
    """Returns the module path and the user's frames of a node, as Watch has noted them."""
    place: tuple[str, str] = ("", "") if node.op == "placeholder" else node.meta.get("custom", {}).get("sbpc", ("", ""))
    return place
