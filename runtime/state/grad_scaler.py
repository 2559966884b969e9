"""torch.amp.GradScaler over DTensor gradients of several layouts: an infinity that one rank sees, all ranks see.

torch asks the layout of the first gradient alone over which ranks to ask for infinities (found in 2.13): where that one is
whole and another is split, ranks disagree whether to skip the step, and part for good.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from sbpc._compat import on_dtensors

op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def unscale(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale the gradients in place, and take the maximum of what was found over every axis that splits any of them."""
    gradients, found, scale = args
    call([gradient.to_local() for gradient in gradients], found, scale)
    for mesh in dict.fromkeys(gradient.device_mesh for gradient in gradients):
        layouts = [gradient.placements for gradient in gradients if gradient.device_mesh == mesh]
        whole = [all(isinstance(state, Replicate) for state in states) for states in zip(*layouts)]
        there: list[Placement] = [Replicate() if each else Partial("max") for each in whole]
        found.copy_(DTensor.from_local(found, mesh, there, run_check=False).full_tensor())


def mend() -> None:
    """Have torch call `unscale` for DTensors."""
    on_dtensors(op, unscale)
