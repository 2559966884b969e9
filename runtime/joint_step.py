"""Run forward and backward of a step as one program, whose collectives overlap across both: `module.step(*args)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sbpc._compat import tree_leaves, tree_map, with_local
from sbpc.errors import PlanError
from sbpc.runtime.step import ModuleWeights, Runner

JOINT = """Runs the whole step, forward and backward, and returns what the forward returns, detached. Gradients are added to `.grad`.

It is `loss = module(*args); loss.backward()`, as one program: work and collectives of the two overlap, so it takes as long as
`plan.cost.seconds` predicts. The model, or the plan's `loss`, returns one scalar with a gradient. Raises PlanError otherwise."""


def joint_step(runner: Runner, weights: ModuleWeights, random: dict[str, int], args: Sequence[Any], kwargs: Any) -> Any:
    """Runs forward and backward, leaves the gradients in `.grad`, and returns the results of the forward."""
    if not runner.trains or not torch.is_grad_enabled():
        raise PlanError(
            "the step has no backward here: the plan is for the forward alone, or gradients are turned off\n"
            "  Call the module itself."
        )
    shapes = [tuple(value.shape) for value in runner.tangents]
    if shapes != [()]:
        raise PlanError(
            f"the forward returns results with gradients of shapes {shapes}, and step asks for one scalar\n"
            "  Plan with loss=, or call the module and then backward on a loss of your own."
        )
    results = runner.step(weights, random, args, kwargs, JointFunction)
    (loss,) = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad]
    loss.backward()
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, results)


class JointFunction(Function):
    """One step of a plan as an autograd function whose forward computes the gradients, too; see `StepFunction`."""

    @staticmethod
    def forward(
        ctx: Any, runner: Runner, values: list[Tensor], others: list[Tensor], parameters: list[Tensor], *leaves: Tensor
    ) -> Any:
        """Runs the program of the whole step for a gradient of one."""
        outputs = runner.joint([*values, torch.ones((), dtype=runner.tangents[0].dtype, device=runner.where)])
        results, gradients = outputs[: len(runner.results)], outputs[len(runner.results) :]
        triples = zip(runner.gradients.values(), leaves, gradients)
        ctx.gradients = [with_local(leaf, value) if is_parameter else value for is_parameter, leaf, value in triples]
        others += [value for at, value in enumerate(results) if at not in runner.differentiable]
        return tuple(results[at] for at in runner.differentiable)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Hands out the gradients, once."""
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, None, None, *gradients
