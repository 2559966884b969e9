"""Capture a module as one joint forward and backward graph of ATen ops, at global shapes, on fake tensors.

The light tracer comes first; what it refuses (writes into buffers, views or arguments) goes to AOTAutograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from sbpc.program import Program, environment, finish, program


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
    with environment(train):  # fresh fakes for each method: the first may have written into its own
        if method == "light":
            with contextlib.suppress(NeedsAot):
                return _light(program(module, args, kwargs or {}, loss, targets, dtype), train)
        return joint(program(module, args, kwargs or {}, loss, targets, dtype), train)


def _light(source: Program, train: bool) -> GraphModule:
    light = Light(source)
    for port, label, value in source.placeholders():
        light.placeholder(port, label, value)
    wanted = source.wanted(train)
    values = [value for _, _, value in source.placeholders()]
    with source.substituted(source.parameters, source.buffers) as replaced, light.watching(values):
        with _recording(source, light):
            outputs, results = source(source.inputs)
        written = replaced()
        light.phase = "backward"
        tangents = _tangents(source, light, outputs) if train else {}
        gradients: Sequence[Tensor | None] = [None] * len(wanted)
        if wanted and tangents:
            with _recording(source, light):
                roots, leaves = [outputs[at] for at in tangents], [value for _, value in wanted]
                gradients = torch.autograd.grad(roots, leaves, list(tangents.values()), allow_unused=True)
    found = [(Port(ports.OUTPUT, str(at)), light.node_of(value)) for at, value in enumerate(outputs)]
    found += [(Port(ports.MUTATION, name), light.node_of(value)) for name, value in written.items()]
    found += [(port, light.node_of(value)) for (port, _), value in zip(wanted, gradients) if value is not None]
    return finish(source, light.graph, light.constants, light.ports, found, results, dict(light.kept), train)


def _tangents(source: Program, light: Light, outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """A tangent for every output that has a gradient, contiguous whatever the strides of the output."""
    with source.mode:
        tangents = {
            at: torch.empty(value.shape, dtype=value.dtype, device=value.device)
            for at, value in enumerate(outputs)
            if value.requires_grad and value.is_floating_point()
        }
    for at, value in tangents.items():
        light.placeholder(Port(ports.TANGENT, str(at)), f"tangent_{at}", value)
    return tangents


@contextlib.contextmanager
def _recording(source: Program, light: Light) -> Iterator[None]:
    with source.mode, light, enable_python_dispatcher():
        yield
