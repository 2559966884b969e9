"""Run forward and backward of a step as one program, whose collectives overlap across both: `module.step(*args)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sbpc.errors import PlanError
from sbpc.runtime.accumulate import Sums
from sbpc.runtime.module_weights import Call, ModuleWeights
from sbpc.runtime.step import Runner

STEP = """Runs forward and backward, and returns what the forward returns, detached. Gradients are added to `.grad`.

It is `loss = module(*args); loss.backward()`, as one program, or in a loop over micro-batches: work and collectives of
the two overlap, so it takes as long as `plan.cost.seconds` predicts. The loss is a tensor of one element with a
gradient: what is called `loss` in what the forward returns, else the result itself or the first of several, else the
only one; or what the plan's `loss` names. Other results get no gradient. Gradients are those of the loss as it is: for
`torch.amp.GradScaler`, which divides them by its scale, call `scaler.scale(module(*args)).backward()`, or have the
model multiply its loss by an argument that holds that scale. Raises PlanError if there is no loss."""


class AtOnce:
    """Runs forward and backward of a step at once. handles: tensors whose backward hands out the gradients."""

    how = "forward and backward"

    def __init__(self) -> None:
        self.handles: list[Tensor] = []

    def run(
        self, runner: Runner, sums: Sums, values: list[Tensor], parameters: list[Tensor], leaves: list[Tensor]
    ) -> list[Tensor]:
        """Returns the results."""
        del parameters
        with torch.no_grad():
            results, gradients = runner.joint(values, sums)
        pairs = [(each, leaf) for each, leaf in zip(runner.for_leaves(leaves, gradients), leaves) if each is not None]
        if any(leaf.requires_grad for _, leaf in pairs):  # hooks of others are not called, as those within `no_sync`
            given, those = zip(*pairs)
            self.handles.append(Handed.apply(given, *those))
        return results


def joint_step(runner: Runner, weights: ModuleWeights, call: Call, random: dict[str, int]) -> Any:
    """Runs forward and backward, leaves the gradients in `.grad`, and returns the results of the forward."""
    if not runner.trains or not torch.is_grad_enabled():
        raise PlanError(
            "the step has no backward here: the plan is for the forward alone, or gradients are turned off\n"
            "  Call the module itself, or step outside of torch.no_grad()."
        )
    way = AtOnce()
    results = weights.step(runner, random, call, way)
    for handle in way.handles:
        handle.backward()
    return results


class Handed(Function):
    """A scalar whose backward hands out gradients that are there already, once."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *leaves: Tensor) -> Tensor:
        """Returns the scalar."""
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Returns the gradients."""
        gradients, ctx.gradients = ctx.gradients, None
        return None, *gradients
