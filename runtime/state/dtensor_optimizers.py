"""torch.optim over DTensors: fused steps that torch has for plain tensors alone, and writes that it does not count.

Found in 2.13: `_fused_sgd_` and `_fused_adagrad_` of DTensors are refused, and ops on lists of DTensors (foreach, fused)
leave `_version` as it is, so that nobody sees that a parameter was written between a forward and its backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from sbpc._compat import local_of, on_dtensors, tree_map
from sbpc.errors import PlanError

aten = torch.ops.aten
FUSED = (
    aten._fused_adagrad_.default,
    aten._fused_adagrad_.tensor_lr,
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
)


def on_parts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A pointwise op in place on lists, as of parameters, gradients and momenta: each rank steps what it holds of them."""
    for of_one in zip(*(given for given in args if given)):
        layouts = {each.placements for each in of_one if isinstance(each, DTensor)}
        if len(layouts) > 1:
            raise PlanError(
                f"{op.name()} of a parameter, its gradient or its state in different layouts: {layouts}\n"
                "  Leave gradients and the optimizer's state in their parameter's layout."
            )
    op(*tree_map(local_of, args), **tree_map(local_of, kwargs))


def count_writes(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Count a step as a write of every DTensor parameter that has a gradient."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    increment_version([each for each in stepped if isinstance(each, DTensor) and each.grad is not None])


@functools.lru_cache(maxsize=1)
def mend() -> None:
    """Have torch call both."""
    for op in FUSED:
        on_dtensors(op, on_parts)
    register_optimizer_step_post_hook(count_writes)
