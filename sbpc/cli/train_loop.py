"""Train a module for some steps: what `sbpc run` and the demo do, on every rank of a mesh and in one process alike."""

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
    """A stock optimizer over the parameters that are trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise SbpcError("the model has no parameter that is trained\n  Give one requires_grad=True.")
    return OPTIMIZERS[name](trained, lr=lr)


def train(
    model: nn.Module,
    batches: Iterable[tuple[tuple[Any, ...], dict[str, Any]]],
    optimizer: torch.optim.Optimizer,
    tell: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """One step per batch `(args, kwargs)`; the losses. `tell` is called after every step with its number and loss."""
    losses: list[float] = []
    for args, kwargs in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tell(len(losses), losses[-1])
    return losses


def loss_of(result: Any) -> Tensor:
    """The loss among what a model returns: the scalar itself, or what is called `loss`, or the first of several.

    Raises SbpcError if there is none.
    """
    named = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    for found in (named, first):
        if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
            return found.reshape(())
    raise SbpcError(
        "the model returns no loss to train with\n  Return a scalar: alone, as the field `loss`, or first of several."
    )
