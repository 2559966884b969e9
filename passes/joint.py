"""AOTAutograd's joint graph, for what the light tracer refuses: it functionalizes every write, buffers included."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from sbpc import ports
from sbpc._compat import (
    BufferAOTInput,
    FakeTensor,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    aot_export_joint_with_descriptors,
)
from sbpc.errors import CaptureError
from sbpc.passes.tracer import Watch, refuse_random
from sbpc.ports import Port
from sbpc.program import Program, finish


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
    print(traced.graph)
    for n in traced.graph.nodes: print(n, n.meta.get('desc'), n.meta.get('custom'), n.meta.get('seq_nr'), n.meta.get('partitioner_tag'))
