"""Train a module for some steps, on every rank of a mesh or in one process: `sbpc run` and the demo do this."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import SbpcError
from sbpc.graph.loss import chosen
from sbpc.graph.pytree import flatten

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
    "sgd": torch.optim.SGD,
}


def optimizer_of(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Returns a stock optimizer over the parameters that are trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise SbpcError("the model has no parameter that is trained\n  Give one requires_grad=True.")
    return OPTIMIZERS[name](trained, lr=lr)


def train(
    model: nn.Module,
    batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
    optimizer: torch.optim.Optimizer,
    tell: Callable[[int, float], None] = lambda step, loss: None,
    step: Callable[..., Any] | None = None,
    number: int | None = None,
) -> list[float]:
    """Takes one step per batch `(args, kwargs)` and returns the losses. `tell` is called with the number and loss of
    every step.

    step: runs forward and backward and returns what the forward returns, as `step` of a parallel module does. By
    default the model is called, and then backward on its loss. number: which of the results is the loss, if that is
    known.
    """
    losses: list[float] = []
    for args, kwargs in batches:
        optimizer.zero_grad(set_to_none=True)
        if step is None:
            loss = loss_of(model(*args, **kwargs), number)
            loss.backward()
        else:
            loss = loss_of(step(*args, **kwargs), number)
        optimizer.step()
        losses.append(loss.item())
        tell(len(losses), losses[-1])
    return losses


def loss_of(result: Any, number: int | None = None) -> Tensor:
    """Returns the loss among a model's results, as `sbpc.plan` finds it. Raises SbpcError if there is none."""
    leaves, structure = flatten(result, "the results", drops=True)
    if number is None:
        trained = any(leaf.requires_grad for leaf in leaves)  # else a step has detached them
        scalars = [at for at, leaf in enumerate(leaves) if leaf.numel() == 1 and leaf.is_floating_point()]
        number = chosen(structure, [at for at in scalars if leaves[at].requires_grad or not trained])
    if number is None:
        todo = (
            "Return a scalar: alone, as `loss`, first of several, or as the only one with a gradient; or give --loss."
        )
        raise SbpcError(f"the model returns no loss to train with\n  {todo}")
    return leaves[number].reshape(())
