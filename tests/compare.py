"""A plan's simulated step against eager torch on one device: outputs and all gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sbpc import Plan, simulate
from sbpc.graph.pytree import flatten


def eager(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Output leaves and gradients of one step, with tangents of ones; the model's own gradients are left alone."""
    names, parameters = zip(*[(n, p) for n, p in model.named_parameters() if p.requires_grad])
    leaves, _ = flatten(model(*args, **dict(kwargs or {})), "outputs")
    differentiable = [leaf for leaf in leaves if leaf.requires_grad]
    gradients = torch.autograd.grad(
        differentiable, parameters, [torch.ones_like(leaf) for leaf in differentiable], allow_unused=True
    )
    return [leaf.detach() for leaf in leaves], dict(zip(names, gradients))


def relative_error(found: Tensor, expected: Tensor, least: float = 1e-30) -> float:
    """The largest difference, relative to the largest expected value, but at least to `least`."""
    assert found.shape == expected.shape and found.dtype == expected.dtype, (found.shape, expected.shape, found.dtype)
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), least)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    return float((found.to(wide) - expected.to(wide)).abs().max()) / scale


def largest_error(plan: Plan, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> float:
    """Simulate a step and compare every output and every gradient with eager torch."""
    outputs, gradients = eager(model, args, kwargs)
    return compare(plan, model, args, outputs, gradients, kwargs)


def compare(
    plan: Plan,
    model: nn.Module,
    args: Sequence[Any],
    outputs: list[Tensor],
    gradients: Mapping[str, Tensor | None],
    kwargs: Any = None,
) -> float:
    """The largest relative error of a simulated step; names and None gradients must agree too."""
    return error_of(simulate(plan, model, args, kwargs), outputs, gradients)


def error_of(run: Any, outputs: list[Tensor], gradients: Mapping[str, Tensor | None]) -> float:
    """The largest relative error of what `simulate` gave."""
    leaves, _ = flatten(run.outputs, "outputs")
    assert len(leaves) == len(outputs)
    assert list(run.gradients) == list(gradients)
    errors = [relative_error(found, expected) for found, expected in zip(leaves, outputs)]
    largest = max((float(value.abs().max()) for value in gradients.values() if value is not None), default=0.0)
    # some are zero but for rounding: of the bias of keys, which softmax ignores
    for name, expected in gradients.items():
        found = run.gradients[name]
        assert (found is None) == (expected is None), name
        if found is not None and expected is not None:
            errors.append(relative_error(found, expected, max(1e-6 * largest, 1e-30)))
    return max(errors)
