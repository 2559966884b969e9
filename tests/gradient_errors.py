"""How far the gradients of a step of 16 bits are from those in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import sbpc
from sbpc import Plan

HALF = torch.bfloat16


def of_half(make: Callable[[], tuple[nn.Module, Any]], held: bool) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model, its arguments, and options of a plan. held: the model is of bfloat16, and has no masters; else it runs
    under autocast."""
    torch.manual_seed(0)
    model, args = make()
    if held:
        return (
            model.to(HALF),
            tuple(each.to(HALF) if each.is_floating_point() else each for each in args),
            {"masters": False},
        )
    return model, args, {"dtype": HALF}


def error(plan: Plan, model: nn.Module, args: Any) -> float:
    """The error of the gradients of a simulated step."""
    return relative(sbpc.simulate(plan, model, args).gradients, model, args)


def relative(found: Mapping[str, Tensor | None], model: nn.Module, args: Any) -> float:
    """How far gradients are from those in float64, relative to these, all together."""
    exact = copy.deepcopy(model).double()
    exact(*(each.double() if each.is_floating_point() else each for each in args)).backward()
    wanted = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    off = sum(float((found[name].double() - each).square().sum()) for name, each in wanted.items())  # type: ignore[union-attr]
    return (off / sum(float(each.square().sum()) for each in wanted.values())) ** 0.5
