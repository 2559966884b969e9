"""The dims of operands as rule strings write them, for rules that are written from the shapes of a call."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sbpc.mesh.states import Numbers
from sbpc.rules.match import Write


def joined(names: Iterable[str]) -> str:
    """The dims of an operand; () for none."""
    return " ".join(names) or "()"


def numbered(ndim: int, cut: Numbers, mark: str) -> list[str]:
    """The names of so many dims: d0, d1, ..., with `mark` in the place of the d for those that are cut."""
    return [f"{mark}{at}" if at in cut else f"d{at}" for at in range(ndim)]


def fix(*names: str) -> str:
    """The clause for factors that are not split, empty for none."""
    return f" ; fix {' '.join(names)}" if names else ""


def moved(sign: str, ndim: int, cut: Numbers, clause: str = "lin(0)") -> str:
    """A rule whose operands have so many dims, of which those that are cut are fixed.

    sign: a letter, or a name, for each operand: x for dims of which the cut ones are called so, - for the others alone.

    >>> moved("x, - -> x", 2, [0])
    'x0 d1, d1 -> x0 d1 ; lin(0) ; fix x0'
    """

    def dims(mark: str) -> str:
        return joined(name for name in numbered(ndim, cut, mark) if mark != "-" or name[0] == "d")

    marks = dict.fromkeys(re.findall(r"\w+", sign))
    fixed = fix(*(f"{mark}{at}" for mark in marks for at in cut))
    text = re.sub(r"-(?!>)|\w+", lambda found: dims(found[0]), sign)
    return f"{text} ; {clause}{fixed}" if clause else text + fixed


def along(sign: str) -> Write:
    """The rule of an op whose output is cut along argument `dim`: see `moved`."""
    return lambda given, outputs: moved(sign, outputs.dim(), [given["dim"] % outputs.dim()])


def aligned(value: Any, shape: torch.Size) -> str:
    """The dims of an operand of a broadcast to `shape`: d0 d1.. from the right, "1" where it is broadcast."""
    if not isinstance(value, Tensor):
        return "_"
    skipped = len(shape) - value.dim()
    return joined(f"d{at + skipped}" if size == shape[at + skipped] else "1" for at, size in enumerate(value.shape))
