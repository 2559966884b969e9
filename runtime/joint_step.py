"""Run forward and backward of a step as one program, whose collectives overlap across both: `module.step(*args)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sbpc.errors import PlanError
from sbpc.graph.loss import number_of_loss
from sbpc.graph.ports import TANGENT
from sbpc.graph.pytree import flatten, unflatten
from sbpc.plans.step_programs import JOINT, UNSENT_JOINT
from sbpc.runtime.accumulate import Sums
from sbpc.runtime.module_weights import ModuleWeights
from sbpc.runtime.step import Runner

STEP = """Runs the whole step, forward and backward, and returns what the forward returns, detached. Gradients are added to `.grad`.

It is `loss = module(*args); loss.backward()`, as one program: work and collectives of the two overlap, so it takes as long as
`plan.cost.seconds` predicts. The loss is a tensor of one element with a gradient: what is called `loss` in what the forward
returns, else the result itself, else the first of several. Other results get no gradient. Raises PlanError if there is no loss."""


def joint_step(runner: Runner, weights: ModuleWeights, random: dict[str, int], args: Sequence[Any], kwargs: Any) -> Any:
    """Runs forward and backward, leaves the gradients in `.grad`, and returns the results of the forward."""
    if not runner.trains or not torch.is_grad_enabled():
        raise PlanError(
            "the step has no backward here: the plan is for the forward alone, or gradients are turned off\n"
            "  Call the module itself."
        )
    loss = number_of_loss(runner.plan.ports, runner.shapes)
    results, structure = flatten(weights.step(runner, random, args, kwargs, JointFunction), "the results")
    results[loss].backward()
    return unflatten(structure, [result.detach() for result in results])


def gradients_of_results(runner: Runner) -> list[Tensor]:
    """Returns this rank's part of the gradient of every result that has one: 1 for the loss, 0 for the others."""
    loss, found = str(number_of_loss(runner.plan.ports, runner.shapes)), []
    for port, value in runner.shapes.items():
        if port.kind == TANGENT:
            shape = runner.layouts[port].local_shape(value.shape, runner.plan.mesh.sizes, runner.coordinates)
            found.append(torch.full(shape, float(port.name == loss), dtype=value.dtype, device=runner.where))
    return found


class JointFunction(Function):
    """One step of a plan as an autograd function whose forward computes the gradients, too; see `StepFunction`."""

    @staticmethod
    def forward(
        ctx: Any, runner: Runner, sums: Sums, values: list[Tensor], others: list[Tensor], parameters: list[Tensor], *leaves: Tensor
    ) -> Any:
        """Runs the program of the whole step for a gradient of one."""
        for at, gradient in zip(runner.tangents, gradients_of_results(runner)):
            values.insert(at, gradient)
        program, first = runner.function(UNSENT_JOINT if sums.on else JOINT), len(runner.results)
        outputs = program(values)
        results, computed = outputs[:first], outputs[first:]
        ctx.gradients = runner.for_leaves(leaves, runner.gradients_of(sums, computed) if sums.on else computed)
        others += [value for at, value in enumerate(results) if at not in runner.differentiable]
        return tuple(results[at] for at in runner.differentiable)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Hands out the gradients, once."""
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, None, None, None, *gradients
