"""The two ways of a step that trains: the forward and, when autograd asks for it, the backward, or both at once as one
program, whose collectives overlap across both: `module.step(*args)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from sbpc._compat import keeps_graph, writes_of
from sbpc.errors import PlanError
from sbpc.plans.step_programs import BACKWARD, FORWARD, UNSENT
from sbpc.runtime.accumulate import Sums
from sbpc.runtime.module_weights import Call, ModuleWeights
from sbpc.runtime.step import Runner, no_autocast

STEP = """Runs forward and backward, and returns what the forward returns, detached. Gradients are added to `.grad`.

It is `loss = module(*args); loss.backward()`, as one program, or in a loop over micro-batches: work and collectives of
the two overlap, so it takes as long as `plan.cost.seconds` predicts. The loss is a tensor of one element with a
gradient: what is called `loss` in what the forward returns, else the result itself or the first of several, else the
only one; or what the plan's `loss` names. Other results get no gradient. Gradients are those of the loss as it is: for
`torch.amp.GradScaler`, which divides them by its scale, call `scaler.scale(module(*args)).backward()`, or have the
model multiply its loss by an argument that holds that scale. Raises PlanError if there is no loss."""


class Apart:
    """Runs the forward of a step, and the backward when autograd asks for it."""

    how = "forward"

    @staticmethod
    def run(
        runner: Runner, sums: Sums, values: list[Tensor], parameters: list[Tensor], leaves: list[Tensor]
    ) -> list[Tensor]:
        """Returns the results."""
        others: list[Tensor] = []
        differentiable = StepFunction.apply(runner, sums, values, others, parameters, *leaves)
        return merge(differentiable, others, runner.differentiable)


def merge(differentiable: Sequence[Tensor], others: list[Tensor], places: list[int]) -> list[Tensor]:
    """Returns the results in order: the differentiable ones at `places`, the others around them."""
    rest, placed = iter(others), dict(zip(places, differentiable))
    return [placed[at] if at in placed else next(rest) for at in range(len(differentiable) + len(others))]


class StepFunction(Function):
    """One step of a plan as an autograd function of what gets gradients: DTensor parameters, and arguments."""

    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(
        ctx: Any,
        runner: Runner,
        sums: Sums,
        values: list[Tensor],
        others: list[Tensor],
        parameters: list[Tensor],
        *leaves: Tensor,
    ) -> Any:
        """Runs the forward program on `values` and saves what the backward program reads.

        others: a list to which the results without gradient are added.
        """
        outputs = runner.function(FORWARD)(values)
        results, saved = outputs[: len(runner.results)], outputs[len(runner.results) :]
        ctx.save_for_backward(*saved)
        ctx.runner, ctx.sums, ctx.leaves, ctx.retained = runner, sums, leaves, None
        ctx.lease, runner.saved.latest = runner.saved.latest, None
        ctx.writes = runner.writes(parameters, saved)
        others += [value for at, value in enumerate(results) if at not in runner.differentiable]
        return tuple(results[at] for at in runner.differentiable)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Runs the backward program. Values saved for it die at their last use, unless the graph is retained."""
        with torch.no_grad(), ctx.runner.same.together(f"a backward of plan {ctx.runner.same.number}"):
            gradients = StepFunction.gradients(ctx, [whole(grad).detach() for grad in grads])
        if torch.is_grad_enabled():  # create_graph=True
            gradients = NoSecondGradient.apply(*(each if each is None else each.requires_grad_() for each in gradients))
        return None, None, None, None, None, *gradients

    @staticmethod
    def gradients(ctx: Any, grads: list[Tensor]) -> list[Tensor | None]:
        """Returns what the backward program computes, in the order of the leaves. None is for what `no_sync` keeps."""
        runner: Runner = ctx.runner
        for name, parameter, writes in ctx.writes:
            if writes_of(parameter) != writes:
                raise PlanError(
                    f"parameter {name} was written between a forward and its backward, which reads it\n"
                    "  Call backward before optimizer.step(), or run the forward again."
                )
        values = list(ctx.saved_tensors) if ctx.retained is None else ctx.retained
        ctx.retained = values.copy() if keeps_graph() else None
        values += [grad.contiguous() for grad in grads]
        values += runner.positions
        with no_autocast(runner.where):
            computed = runner.function(UNSENT if ctx.sums.on else BACKWARD)(values)
            gradients = runner.gradients_of(ctx.sums, computed) if ctx.sums.on else computed
        if ctx.lease is not None and ctx.retained is None:
            ctx.lease.over = True
        return runner.for_leaves(ctx.leaves, gradients)


def whole(gradient: Tensor) -> Tensor:
    """Returns the gradient of a result, which is a DTensor where a number of parameters was added to a loss."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class NoSecondGradient(Function):
    """Gradients that were asked for with create_graph=True. No program computes theirs, so they refuse a backward."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor) -> Any:
        """Returns the same gradients, as results that ask for a gradient."""
        return tuple(None if gradient is None else gradient.detach() for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Raises PlanError."""
        raise PlanError(
            "a gradient of a gradient is asked for, and a plan has a forward and a backward alone\n"
            "  Leave out create_graph=True, or compute such a term, as a gradient penalty, by a model on one device."
        )


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
