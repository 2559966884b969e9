"""What every parallel module has besides its programs: the place among random numbers, clipping, deep copies, no
pickling."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sbpc._compat import local_of
from sbpc.errors import PlanError
from sbpc.graph.guards import FORWARD
from sbpc.runtime.start.lost_ranks import watched
from sbpc.runtime.state.whole import RANDOM, WEIGHTS, save_pretrained
from sbpc.runtime.state.wrappers import TRAINER

PREPARED = "_is_accelerate_prepared"  # which accelerate asks of a model, and sets
CLIP = """Scales the gradients so that their norm is at most `max_norm`, and returns the norm that they had, 0-dim.

It is `torch.nn.utils.clip_grad_norm_` of all parameters of the model, those on other stages of a pipeline, too, each
counted once: the norm is that of one device. Every rank calls it at the same point. norm_type: the p of the norm,
above 0, float("inf") for the largest element. Raises PlanError for another one, and for a norm that is NaN or infinite
if `error_if_nonfinite`."""


def members_of(
    cls: type[nn.Module],
    forward: Callable[..., Any],
    step: Callable[..., Any],
    signature: inspect.Signature,
    elsewhere: Container[str] = (),
) -> dict[str, Any]:
    """Returns the members of the subclass of a model's class that runs programs. A deep copy runs them on its own
    weights.

    signature: that of forward as its callers see it, `self` first. elsewhere: names of parameters that another stage
    of a pipeline counts.
    """

    def clip_grad_norm_(
        self: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        return clip(self, elsewhere, max_norm, norm_type, error_if_nonfinite)

    def pickled(self: nn.Module, protocol: Any) -> Any:
        raise PlanError(
            f"a parallel {cls.__name__} cannot be pickled: it is one rank's part of a running program\n"
            "  Save sbpc.full_state_dict(module), or checkpoints by sbpc.Checkpoints, and the plan by plan.save()."
        )

    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise PlanError(
            f"a parallel {cls.__name__} does not generate: that calls parts of the model, with a cache that grows\n"
            "  Save it by save_pretrained on all ranks, and generate by what from_pretrained reads there."
        )

    clip_grad_norm_.__doc__ = CLIP
    running = torch.compiler.disable(forward, reason="sbpc has compiled it")
    running.__signature__ = signature  # type: ignore[attr-defined]
    own: dict[str, Any] = {"generate": generate} if hasattr(cls, "generate") else {}
    if hasattr(cls, "save_pretrained"):
        own["save_pretrained"] = functools.wraps(cls.save_pretrained)(save_pretrained)
    return own | {
        "forward": running,
        "step": torch.compiler.disable(step, reason="sbpc has compiled it"),
        "_get_name": lambda self: cls.__name__,  # by which libraries choose losses
        PREPARED: property(is_prepared, lambda self, value: None),
        "clip_grad_norm_": clip_grad_norm_,
        "random_state": lambda self: dict(self.__dict__[RANDOM]),
        "set_random_state": set_random_state,
        "__deepcopy__": deep_copy,
        "__reduce_ex__": pickled,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }


def is_prepared(self: nn.Module) -> bool:
    """Whether an Accelerator takes a parallel module as it is: so it does. Raises PlanError if it asks for a Trainer,
    which takes the ranks for replicas: it multiplies losses by their number, and writes parts of weights."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            raise PlanError(f"a transformers.Trainer has a model that sbpc.parallelize made\n  {TRAINER}")
        frame = frame.f_back
    return True


def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copies a parallel module with its weights. Raises PlanError amid an accumulation."""
    refuse_unfinished(self)
    made = memo[id(self)] = self.__class__.__new__(self.__class__)
    own = {key: value for key, value in self.__dict__.items() if key not in (WEIGHTS, FORWARD)}
    made.__dict__.update({FORWARD: vars(self)[FORWARD]} if FORWARD in vars(self) else {})  # of the one-device model
    made.__dict__.update((key, copy.deepcopy(value, memo)) for key, value in own.items())
    return made


def refuse_unfinished(module: nn.Module) -> None:
    """Raises PlanError if a module keeps gradients of backwards within `no_sync`, which no state dict and no copy
    holds."""
    weights = vars(module).get(WEIGHTS)
    if weights is not None and weights.sums.unfinished:
        raise PlanError(
            "the module keeps gradients of backwards within no_sync, which would be lost\n"
            "  Call backward outside of no_sync and optimizer.step() first, or module.zero_grad()."
        )


def set_random_state(self: nn.Module, state: dict[str, int]) -> None:
    """Makes the module draw on from a `random_state`. Raises PlanError if it is none."""
    known = isinstance(state, dict) and list(state) == ["seed", "step"]
    if not known or not all(type(number) is int for number in state.values()):
        raise PlanError(f"{state!r} is no random state\n  Give what module.random_state() gave.")
    self.__dict__[RANDOM] = dict(state)


def clip(
    module: nn.Module,
    elsewhere: Container[str],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Does what CLIP says. elsewhere: names of parameters that are counted on another stage, too."""
    norm_type = float(norm_type)
    if not norm_type > 0:  # the norm of no elements, as some ranks hold, would count in that of all
        raise PlanError(f"norm_type is {norm_type}\n  Clip by a norm above 0, such as 2.0 or float('inf').")
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    first = next(module.parameters(), torch.empty(0))
    norms = [norm(local_of(g), norm_type) for name, g in gradients.items() if name not in elsewhere and counts(g)]
    mine = norm(torch.stack(norms), norm_type) if norms else torch.zeros((), dtype=torch.float64, device=first.device)
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with watched("clip_grad_norm_"):
        dist.all_gather(of_ranks, mine)
    total = norm(torch.stack(of_ranks), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise PlanError(
            f"the norm of the gradients is {total.item()}\n  Lower the learning rate, or find the op: executor='nans'."
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients.values():
        local_of(gradient).mul_(factor)
    return total.to(torch.promote_types(first.dtype, torch.float32))


def norm(values: Tensor, norm_type: float) -> Tensor:
    """Returns the norm of all elements, a 0-dim float64; that of none is 0."""
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    wide = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(values, norm_type, dtype=wide).double()


def counts(gradient: Tensor) -> bool:
    """Returns whether this rank is the one that counts its shard: the first of those that hold the same."""
    if not isinstance(gradient, DTensor):
        return dist.get_rank() == 0
    place = gradient.device_mesh.get_coordinate() or ()
    return all(at == 0 for at, state in zip(place, gradient.placements) if state.is_replicate())
