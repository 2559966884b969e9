"""Capture a module as one joint forward and backward graph of ATen ops, at global shapes, on fake tensors.

The light tracer comes first; what it refuses (writes into buffers, views or arguments) goes to AOTAutograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from sbpc import ports
from sbpc._compat import enable_python_dispatcher
from sbpc.errors import CaptureError
from sbpc.passes.joint import joint
from sbpc.passes.tracer import Light, NeedsAot
from sbpc.ports import Port
from sbpc.program import Program, finish, program, unchanged


def capture(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    train: bool = True,
    dtype: torch.dtype | None = None,
    method: str = "light",
) -> GraphModule:
    """The graph of `loss(module(*args, **kwargs), *targets)` and, with `train`, of its gradients.

    Before: a module and its arguments, real, meta or fake. After: `gm.meta["ports"]` says what goes in and comes out;
    every node has `val`, `module`, `stack_trace` and `phase` in its meta. The module is left as it was.

    method: "light" (AOTAutograd where that gives up) or "aot". Raises CaptureError with the user's line.
    """
    if method not in ("light", "aot"):
        raise CaptureError(f"method is {method!r}\n  It is 'light' or 'aot'.")
    if method == "light":
        with contextlib.suppress(NeedsAot), unchanged(module):
            return _light(program(module, args, kwargs or {}, loss, targets, dtype), train)
    with unchanged(module):
        return joint(program(module, args, kwargs or {}, loss, targets, dtype), train)


def _light(source: Program, train: bool) -> GraphModule:
    light = Light(source)
    for port, label, value in source.placeholders():
        light.placeholder(port, label, value)
    with _recording(source, light, train), light.module_paths():
        outputs, results = source(source.parameters, source.buffers, source.inputs)
    light.phase = "backward"
    differentiable = [at for at, value in enumerate(outputs) if train and value.requires_grad and value.is_floating_point()]
    with source.mode:  # contiguous, whatever the strides of the output
        tangents = [torch.empty(outputs[at].shape, dtype=outputs[at].dtype, device=outputs[at].device) for at in differentiable]
    for at, value in zip(differentiable, tangents):
        light.placeholder(Port(ports.TANGENT, str(at)), f"tangent_{at}", value)
    wanted = source.wanted(train)
    gradients: Sequence[Tensor | None] = [None] * len(wanted)
    if wanted and tangents:
        with _recording(source, light, train):
            roots = [outputs[at] for at in differentiable]
            gradients = torch.autograd.grad(roots, [value for _, value in wanted], tangents, allow_unused=True)
    found = [(Port(ports.OUTPUT, str(at)), light.node_of(value)) for at, value in enumerate(outputs)]
    found += [(port, light.node_of(value)) for (port, _), value in zip(wanted, gradients) if value is not None]
    values = {node: value for node, value in light.kept}
    return finish(source, light.graph, light.constants, light.ports, found, results, values, train)


@contextlib.contextmanager
def _recording(source: Program, light: Light, train: bool):
    with torch.inference_mode(False), torch.set_grad_enabled(train), source.mode, light, enable_python_dispatcher():
        yield
