"""Running captured programs on real tensors, beside the module itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter

from sbpc.graph.ports import BUFFER, GRADIENT, INPUT, INPUT_GRADIENT, MUTATION, OUTPUT, PARAMETER, TANGENT, Port
from sbpc.graph.pytree import flatten

Values = dict[Port, Tensor]


def double(value: Any) -> Any:
    """The same arguments with float64 in the place of float32; who asked for a gradient still does."""
    if isinstance(value, Tensor):
        return value.detach().double().requires_grad_(value.requires_grad) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: double(item) for key, item in value.items()}
    return type(value)(map(double, value)) if isinstance(value, (tuple, list)) else value


def eager(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    train: bool = True,
    dtype: torch.dtype | None = None,
) -> tuple[Values, Values]:
    """What goes into a captured program and what must come out of it, by running a copy of the module."""
    module = copy.deepcopy(module)
    given: Values = {Port(PARAMETER, name): value for name, value in module.named_parameters()}
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    given.update({Port(BUFFER, name): value for name, value in buffers.items()})
    leaves = flatten(((*args, *targets), dict(kwargs or {})))[0]
    given.update({Port(INPUT, str(at)): value for at, value in enumerate(leaves)})
    with torch.set_grad_enabled(train), torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
        result = module(*args, **(kwargs or {}))
        result = result if loss is None else loss(result, *targets)
    outputs = flatten(result)[0]
    found = {Port(OUTPUT, str(at)): value.detach() for at, value in enumerate(outputs)}
    found.update({Port(MUTATION, n): v for n, v in module.named_buffers() if not torch.equal(v, buffers[n])})
    generator = torch.Generator().manual_seed(0)
    tangents = {}
    for at, value in enumerate(outputs):
        if value.requires_grad:
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            tangents[Port(TANGENT, str(at))] = noise.to(value.dtype)
    wanted = [port for port, value in given.items() if value.requires_grad] if tangents else []
    roots = [value for value in outputs if value.requires_grad]
    gradients: Sequence[Tensor | None] = ()
    if wanted:
        sources = [given[port] for port in wanted]
        gradients = torch.autograd.grad(roots, sources, list(tangents.values()), allow_unused=True)
    kinds = {PARAMETER: GRADIENT, INPUT: INPUT_GRADIENT}
    found.update({Port(kinds[p.kind], p.name): g for p, g in zip(wanted, gradients) if g is not None})
    return {port: value.detach() for port, value in {**given, **tangents}.items()}, found


def run(gm: GraphModule, given: Values) -> Values:
    """What the program gives, by port."""
    ports = gm.meta["ports"]
    with torch.no_grad():
        results = Interpreter(gm).run(*[given[port] for port in ports.inputs])
    return dict(zip(ports.outputs, results))


def assert_equal(gm: GraphModule, given: Values, expected: Values, tolerance: float = 0.0) -> None:
    """The program takes exactly what is given, gives exactly the expected ports, and the values agree."""
    assert sorted(map(str, gm.meta["ports"].inputs)) == sorted(map(str, given))
    found = run(gm, given)
    assert sorted(map(str, found)) == sorted(map(str, expected))
    for (port, value), node in zip(found.items(), gm.graph.output_node().args[0]):  # type: ignore[arg-type]
        assert node.meta["val"].shape == value.shape, port  # type: ignore[union-attr]
        assert node.meta["val"].dtype == value.dtype, port  # type: ignore[union-attr]
        torch.testing.assert_close(
            value, expected[port], rtol=tolerance, atol=tolerance, msg=lambda m, p=port: f"{p}: {m}"
        )
