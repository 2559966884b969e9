"""What every parallel module has besides its programs: the place among random numbers, clipping, deep copies, no pickling."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import PlanError
from sbpc.runtime.state.gradient_norm import CLIP, clip

WEIGHTS, STAGED, RANDOM = "_sbpc_weights", "_sbpc_stages", "_sbpc_random"


def members_of(
    cls: type[nn.Module], forward: Callable[..., Any], step: Callable[..., Any], elsewhere: Container[str] = ()
) -> dict[str, Any]:
    """Returns the members of the subclass of a model's class that runs programs. A deep copy runs them on its own weights.

    elsewhere: names of parameters that another stage of a pipeline counts.
    """

    def clip_grad_norm_(self: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        return clip(self, elsewhere, max_norm, norm_type, error_if_nonfinite)

    def pickled(self: nn.Module, protocol: Any) -> Any:
        raise PlanError(
            f"a parallel {cls.__name__} cannot be pickled: it is one rank's part of a running program\n"
            "  Save its state_dict() with torch.distributed.checkpoint, and the plan with plan.save()."
        )

    clip_grad_norm_.__doc__ = CLIP
    return {
        "forward": torch.compiler.disable(forward, reason="sbpc has compiled it"),
        "step": torch.compiler.disable(step, reason="sbpc has compiled it"),
        "clip_grad_norm_": clip_grad_norm_,
        "random_state": lambda self: dict(self.__dict__[RANDOM]),
        "set_random_state": set_random_state,
        "__deepcopy__": deep_copy,
        "__reduce_ex__": pickled,
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }


def deep_copy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copies a parallel module with its weights."""
    made = memo[id(self)] = self.__class__.__new__(self.__class__)
    own = {key: value for key, value in self.__dict__.items() if key not in (WEIGHTS, STAGED)}
    made.__dict__.update((key, copy.deepcopy(value, memo)) for key, value in own.items())
    return made


def set_random_state(self: nn.Module, state: dict[str, int]) -> None:
    """Makes the module draw on from a `random_state`. Raises PlanError if it is none."""
    known = isinstance(state, dict) and list(state) == ["seed", "step"]
    if not known or not all(type(number) is int for number in state.values()):
        raise PlanError(f"{state!r} is no random state\n  Give what module.random_state() gave.")
    self.__dict__[RANDOM] = dict(state)
