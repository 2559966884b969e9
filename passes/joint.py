"""AOTAutograd's joint graph, for what the light tracer refuses: it functionalizes every write, buffers included."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from sbpc import ports
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
)
from sbpc.errors import CaptureError
from sbpc.frames import user_error
from sbpc.passes.tracer import Watch, refuse_random
from sbpc.ports import Port
from sbpc.program import Program, finish


ORDER = (ports.OUTPUT, ports.MUTATION, ports.GRADIENT, ports.INPUT_GRADIENT)
WRITE = "Write into a clone: arguments and parameters stay as they are."


class Flat(nn.Module):
    """The program as a module of its distinct parameters and buffers, so that a tied one is not made two."""

    def __init__(self, source: Program) -> None:
        super().__init__()
        self.source = [source]  # in a list, or its module would become a submodule
        self.results: Any = None
        self.watch = Watch(source)
        for at, value in enumerate(source.parameters.values()):
            self.register_parameter(f"parameter_{at}", value)  # type: ignore[arg-type]
        for at, value in enumerate(source.buffers.values()):
            self.register_buffer(f"buffer_{at}", value)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        source = self.source[0]
        parameters = dict(zip(source.parameters, self._parameters.values()))
        buffers = dict(zip(source.buffers, self._buffers.values()))
        with self.watch, self.watch.module_paths():
            outputs, self.results = source(parameters, buffers, inputs)
        return tuple(outputs)


def joint(source: Program, train: bool) -> GraphModule:
    """The graph of a program by AOTAutograd: parameters, buffers, inputs and tangents in, a mutation per written buffer."""
    flat = Flat(source)
    source.mode.allow_non_fake_inputs = True  # Watch has refused those that are not known
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(train))
        stack.enter_context(source.mode)
        stack.enter_context(torch.fx.traceback.preserve_node_meta())
        traced = aot_export_joint_with_descriptors(stack, flat, tuple(source.inputs)).graph_module
    return _ported(source, traced, flat.results, train)


def _ported(source: Program, traced: GraphModule, results: Any, train: bool) -> GraphModule:
    """The same graph with our ports, names and meta."""
    graph = Graph()
    new: dict[Node, Node] = {}
    inputs: list[Port] = []
    values: dict[Node, Any] = {}
    constants: dict[str, Tensor] = {}
    labels = {port: label for port, label, _ in source.placeholders()}
    for node in traced.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder":
            inputs.append(_port(source, node.meta["desc"]))
            copy = graph.placeholder(labels.get(inputs[-1], f"tangent_{inputs[-1].name}"))
        elif node.op == "get_attr":
            name = f"constant_{len(constants)}"
            constants[name] = getattr(traced, node.target)
            copy = graph.create_node("get_attr", name, name=name)
        else:
            copy = graph.node_copy(node, new.__getitem__)
        path, stack = node.meta.get("custom", {}).get("sbpc", ("", "")) if node.op != "placeholder" else ("", "")
        backward = node.meta.get("partitioner_tag") == "is_backward"
        copy.meta = {"module": path, "stack_trace": stack, "phase": "backward" if backward else "forward"}
        new[node], values[copy] = copy, node.meta.get("val")
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            refuse_random(node.target, node.args, node.kwargs, lambda stack=stack: stack)
    end = traced.graph.output_node()
    found = [(_port(source, desc), new[node]) for desc, node in zip(end.meta["desc"], end.args[0]) if node is not None]
    for port, node in found:
        if port.kind == ports.MUTATION and port.name not in source.buffers:
            raise user_error(f"the model writes into {port.name!r}", node.meta["stack_trace"], WRITE)
    found.sort(key=lambda item: ORDER.index(item[0].kind))
    return finish(source, graph, constants, inputs, found, results, values, train)


def _port(source: Program, desc: Any) -> Port:
    match desc:
        case ParamAOTInput(target):
            return Port(ports.PARAMETER, list(source.parameters)[int(target.rpartition("_")[2])])
        case BufferAOTInput(target):
            return Port(ports.BUFFER, list(source.buffers)[int(target.rpartition("_")[2])])
        case PlainAOTInput(number):
            return Port(ports.INPUT, str(number))
        case TangentAOTInput(PlainAOTOutput(number)):
            return Port(ports.TANGENT, str(number))
        case PlainAOTOutput(number):
            return Port(ports.OUTPUT, str(number))
        case InputMutationAOTOutput(BufferAOTInput() as buffer):
            return Port(ports.MUTATION, _port(source, buffer).name)
        case InputMutationAOTOutput(ParamAOTInput() as parameter):
            return Port(ports.MUTATION, _port(source, parameter).name)
        case InputMutationAOTOutput(PlainAOTInput(number)):
            return Port(ports.MUTATION, source.labels[number])
        case GradAOTOutput(ParamAOTInput() as parameter):
            return Port(ports.GRADIENT, _port(source, parameter).name)
        case GradAOTOutput(PlainAOTInput(number)):
            return Port(ports.INPUT_GRADIENT, str(number))
    what = f"AOTAutograd made {desc.expr()}, which sbpc has no port for"
    raise CaptureError(f"{what}\n  Return clones where outputs are views of arguments or of each other.")
