"""The dims of operands as rule strings write them, for rules that are written from the shapes of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def joined(names: Iterable[str]) -> str:
    """The dims of an operand; () for none."""
    return " ".join(names) or "()"


def numbered(ndim: int, cut: Sequence[int], mark: str) -> list[str]:
    """The names of so many dims: d0, d1, ..., with `mark` in the place of the d for those that are cut."""
    return [f"{mark}{at}" if at in cut else f"d{at}" for at in range(ndim)]


def fix(*names: str) -> str:
    """The clause for factors that are not split, empty for none."""
    return f" ; fix {' '.join(names)}" if names else ""


def aligned(value: Any, shape: torch.Size) -> str:
    """The dims of an operand of a broadcast to `shape`: d0 d1.. from the right, "1" where it is broadcast."""
    if not isinstance(value, Tensor):
        return "_"
    skipped = len(shape) - value.dim()
    return joined(f"d{at + skipped}" if size == shape[at + skipped] else "1" for at, size in enumerate(value.shape))
