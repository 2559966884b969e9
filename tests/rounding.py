"""Rounding: eager torch in which each result is rounded otherwise, to tell what numbers are worth (Monte Carlo arithmetic, Parker 1997)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map


class RoundedOtherwise(TorchDispatchMode):
    """Moves what each call computes by a unit in the last place, up or down, as another order of its sums may.

    Equal numbers are moved alike, so that what ties without rounding still does. number: of the way to round.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if any(value.alias_info is not None for value in func._schema.returns):
            return made  # a view, or written in place
        return tree_map(self.moved, made)

    def moved(self, value: Any) -> Any:
        """A value, moved."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        way = torch.sin(value.double() * 12345.678 + self.number).sign()
        return (value.double() * (1 + torch.finfo(value.dtype).eps * way)).to(value.dtype)
