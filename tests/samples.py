"""Data for proofs: integer-valued where an op is linear, so that equality can be asked for; never zero by chance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sbpc.rules.proof.prove import Case

CLOSE = 1e-10


def case(op: Any, *args: Any, **kwargs: Any) -> Case:
    """A case of an exact op."""
    return Case(op, args, kwargs)


def whole_numbers(*shape: int, low: int = -3, high: int = 4, seed: int = 0) -> Tensor:
    """Integers from `low` to `high` - 1 as float64, none of them zero."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    found = torch.randint(low, high, shape, generator=generator).double()
    return torch.where(found == 0, torch.tensor(high, dtype=torch.float64), found)


def indices(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Indices below `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed + high))


def close(op: Any, *args: Any, **kwargs: Any) -> Case:
    """A case of an op with rounding."""
    return Case(op, args, kwargs, tolerance=CLOSE)


def smooth(*shape: int, seed: int = 0) -> Tensor:
    """Real numbers, for ops that are not linear."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


x, y, f = whole_numbers, indices, smooth
