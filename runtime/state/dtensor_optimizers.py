"""Make torch.optim and torch.amp.GradScaler right for DTensors, which torch 2.13 gets wrong in three ways, and
refuse a fourth.

It refuses `_fused_sgd_` and `_fused_adagrad_` of DTensors. Its ops on lists of DTensors (foreach, fused) do not
raise `_version`, so nobody would see that a parameter was written between a forward and its backward. GradScaler
looks for infinities over the ranks that split the first gradient and over no others: if that one is whole and
another is split, some ranks skip the step and some do not, and their weights differ from then on. The stages of a
pipeline skip a step together, too, if all of them have gradients of the same dtypes, as torch looks for infinities
dtype by dtype. `torch.nn.utils.clip_grad_norm_` takes the norm of the gradients that a rank has, which are those of
its stages alone. It could not be made right: it knows no names of parameters that two stages count, and a stage
without gradients does not take part.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook

from sbpc._compat import as_torch_does, detached, local_of, on_dtensors, tree_map
from sbpc.errors import PlanError
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.lost_ranks import watched

aten = torch.ops.aten
FUSED = [getattr(op, name) for op in (aten._fused_adagrad_, aten._fused_sgd_) for name in ("default", "tensor_lr")]


@functools.lru_cache(maxsize=1)
def install() -> None:
    """Has torch call the functions below. Once in a process: torch keeps every hook that it is given."""
    for op in FUSED:
        on_dtensors(op, on_shards)
    on_dtensors(aten._amp_foreach_non_finite_check_and_unscale_.default, unscale)
    on_dtensors(aten.detach.default, detached)
    on_dtensors(aten.stack.default, stack)
    register_optimizer_step_post_hook(count_writes)


def on_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs a pointwise op in place on this rank's shards in lists of parameters, gradients and momenta."""
    for of_one_parameter in zip(*(tensors for tensors in args if tensors)):
        layouts = {each.placements for each in of_one_parameter if isinstance(each, DTensor)}
        if len(layouts) > 1:
            raise PlanError(
                f"{op.name()} of a parameter, its gradient or its state in different layouts: {layouts}\n"
                "  Leave gradients and the optimizer's state in their parameter's layout."
            )
    op(*tree_map(local_of, args), **tree_map(local_of, kwargs))


def count_writes(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Counts a step as a write of every DTensor parameter that has a gradient."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    increment_version([each for each in stepped if isinstance(each, DTensor) and each.grad is not None])


def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscales the gradients in place and maximises `infinite` over every axis that splits any of them, and over
    pipeline stages."""
    gradients, infinite, scale = args
    op([gradient.to_local() for gradient in gradients], infinite, scale)
    with watched("GradScaler"):
        for mesh in dict.fromkeys(gradient.device_mesh for gradient in gradients):
            layouts = [gradient.placements for gradient in gradients if gradient.device_mesh == mesh]
            whole = [all(isinstance(state, Replicate) for state in states) for states in zip(*layouts)]
            over: list[Placement] = [Replicate() if each else Partial("max") for each in whole]
            infinite.copy_(DTensor.from_local(infinite, mesh, over, run_check=False).full_tensor())
        if any(process_groups.is_part(gradient.device_mesh) for gradient in gradients):
            dist.all_reduce(infinite, dist.ReduceOp.MAX)


def stack(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stacks DTensors. Raises PlanError for numbers of the tensors of one stage, as norms of which a total is made."""
    numbers = [each for each in args[0] if isinstance(each, DTensor) and not each.dim()]
    if any(process_groups.is_part(each.device_mesh) for each in numbers):
        raise PlanError(
            "numbers of the parameters of one pipeline stage are put together, as torch.nn.utils.clip_grad_norm_ does "
            "with norms of gradients: those of the other stages are missing\n"
            "  Call module.clip_grad_norm_(max_norm), which knows all stages; to look at one stage, take each "
            "number's .item()."
        )
    return as_torch_does(op, args, kwargs)
