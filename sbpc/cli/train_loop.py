"""Train a module for some steps, on every rank of a mesh or in one process: `sbpc run` and the demo do this."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import SbpcError

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
) -> list[float]:
    """Takes one step per batch `(args, kwargs)` and returns the losses. `tell` is called with the number and loss of
    every step.

    step: runs forward and backward and returns what the forward returns, as `step` of a parallel module does. By
    default the model is called, and then backward on its loss.
    """
    losses: list[float] = []
    for args, kwargs in batches:
        optimizer.zero_grad(set_to_none=True)
        if step is None:
            loss = loss_of(model(*args, **kwargs))
            loss.backward()
        else:
            loss = loss_of(step(*args, **kwargs), with_gradient=False)
        optimizer.step()
        losses.append(loss.item())
        tell(len(losses), losses[-1])
    return losses


def loss_of(result: Any, with_gradient: bool = True) -> Tensor:
    """Returns the loss among a model's results: the one called `loss`, else the scalar itself, else the first of
    several.

    Raises SbpcError if there is none.
    """
    named = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    for loss in (named, first):
        if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not with_gradient):
            return loss.reshape(())
    raise SbpcError(
        "the model returns no loss to train with\n  Return a scalar: alone, as the field `loss`, or first of several."
    )
