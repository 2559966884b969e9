"""Make torch.optim, Adafactor of `transformers` and torch.amp.GradScaler right for DTensors, which torch 2.13 gets
wrong in several ways, and refuse some.

It refuses `_fused_sgd_` and `_fused_adagrad_` of DTensors. Its ops on lists of DTensors (foreach, fused) do not
raise `_version`, so nobody would see that a parameter was written between a forward and its backward. GradScaler
looks for infinities over the ranks that split the first gradient and over no others: if that one is whole and
another is split, some ranks skip the step and some do not, and their weights differ from then on. The stages of a
pipeline skip a step together, too, if all of them have gradients of the same dtypes, as torch looks for infinities
dtype by dtype. `torch.nn.utils.clip_grad_norm_` takes the norm of the gradients that a rank has, which are those of
its stages alone. It could not be made right: it knows no names of parameters that two stages count, and a stage
without gradients does not take part.

`.item()` of a partial sum, such as `grad.norm().item()`, gives each rank its own summand: it is summed first. Ops in
place refuse partial sums, which Adafactor has of the rows and columns of a gradient: norms and means are summed at
once. It makes state for rows and columns by `grad.new_zeros`, which torch makes whole however the gradient is cut, or
by `torch.zeros`, which is no DTensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sbpc._compat import MIXED, StridedShard, as_torch_does, detached, local_of, on_dtensors, on_steps, tree_map
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
    on_dtensors(aten._local_scalar_dense.default, number)
    on_dtensors(aten.new_zeros.default, zeros_beside)
    for reduction in (aten.linalg_vector_norm.default, aten.mean.dim):
        on_dtensors(reduction, summed)
    on_steps(explained)
    register_optimizer_step_pre_hook(begin_state)
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


def number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the number in a DTensor of one element. Where ranks hold summands or parts, every rank calls this."""
    if all(isinstance(state, Replicate) for state in args[0].placements):
        return op(local_of(args[0]))
    with watched("item"):
        return op(args[0].full_tensor())


def summed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduces a DTensor, and makes what comes out as partial sums whole."""
    result = as_torch_does(op, args, kwargs)
    whole = [Replicate() if state.is_partial() else state for state in result.placements]
    if whole == list(result.placements):
        return result
    with watched(str(op)):
        return result.redistribute(placements=whole)


def zeros_beside(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes zeros that are cut as the DTensor beside them along dims of the same size, and whole along others."""
    like, shape = args[0], torch.Size(args[1])
    dims = [dim for dim, size in enumerate(shape) if len(shape) == like.dim() and size == like.shape[dim]]
    cut = [isinstance(state, (Shard, StridedShard)) and state.dim in dims for state in like.placements]
    if shape == like.shape or not any(cut):
        return as_torch_does(op, args, kwargs)
    own = {state.dim for state, keeps in zip(like.placements, cut) if keeps}
    local = op(
        local_of(like), [local_of(like).shape[at] if at in own else shape[at] for at in range(len(shape))], **kwargs
    )
    placements = [state if keeps else Replicate() for state, keeps in zip(like.placements, cut)]
    return DTensor.from_local(
        local, like.device_mesh, placements, shape=shape, stride=torch.empty(shape, device="meta").stride()
    )


def begin_state(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Makes the state of Adafactor of `transformers`, which would make it by torch.zeros, as DTensors."""
    if type(optimizer).__name__ != "Adafactor" or not type(optimizer).__module__.startswith("transformers."):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter.grad, DTensor) and not optimizer.state[parameter]:
                optimizer.state[parameter].update(adafactor_state(group, parameter.grad))


def adafactor_state(group: dict[str, Any], gradient: DTensor) -> dict[str, Any]:
    """Returns what a step of Adafactor of `transformers` begins with."""
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    state: dict[str, Any] = {"step": 0, "RMS": 0}
    if group["beta1"] is not None:
        state["exp_avg"] = torch.zeros_like(wide)
    if wide.dim() > 1:
        return state | {"exp_avg_sq_row": wide.mean(-1).zero_(), "exp_avg_sq_col": wide.mean(-2).zero_()}
    return state | {"exp_avg_sq": torch.zeros_like(wide)}


def explained(step: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a step of an optimizer that may mix parameters with plain tensors. Raises PlanError where it does."""

    @functools.wraps(step)
    def wrapped(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(optimizer, *args, **kwargs)
        except RuntimeError as error:
            if MIXED not in str(error):
                raise
            what = f"{type(optimizer).__name__} mixes parameters, of which this rank holds parts, with plain tensors"
            raise PlanError(
                f"{what}: {str(error).splitlines()[0]}\n"
                "  Have it make its state by torch.zeros_like(p), p.new_zeros(shape) or p.mean(dim), "
                "and not by torch.zeros(p.shape); or take whole tensors by p.full_tensor(), parts by p.to_local()."
            ) from error

    return wrapped
