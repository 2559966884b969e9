"""Make torch.amp.GradScaler right for DTensor gradients of several layouts: all ranks skip a step or none does.

torch 2.13 looks for infinities over the ranks that split the first gradient, and over no others. If that one is whole and
another is split, some ranks skip the step and some do not, and their weights differ from then on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from sbpc._compat import on_dtensors

op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def unscale(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscales the gradients in place and maximises `infinite` over every axis that splits any of them."""
    gradients, infinite, scale = args
    call([gradient.to_local() for gradient in gradients], infinite, scale)
    for mesh in dict.fromkeys(gradient.device_mesh for gradient in gradients):
        layouts = [gradient.placements for gradient in gradients if gradient.device_mesh == mesh]
        whole = [all(isinstance(state, Replicate) for state in states) for states in zip(*layouts)]
        over: list[Placement] = [Replicate() if each else Partial("max") for each in whole]
        infinite.copy_(DTensor.from_local(infinite, mesh, over, run_check=False).full_tensor())


def install() -> None:
    """Has torch call `unscale` for DTensors."""
    on_dtensors(op, unscale)
