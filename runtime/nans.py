"""Find the first node of a rank's program that makes NaN out of numbers."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.fx import Interpreter, Node

from sbpc.choices import nodes_in
from sbpc.errors import NanError, at_node

WITHOUT_VALUES = ("aten.empty", "aten.new_empty")  # their memory holds whatever was there


class NanCheck(Interpreter):
    """Runs a program node by node; the first value with a NaN ends it with an error that names its node and this rank."""

    def run_node(self, n: Node) -> Any:
        """One node, its value looked at."""
        value = super().run_node(n)
        if n.op == "output" or str(n.target).startswith(WITHOUT_VALUES) or not has_nan(value):
            return value
        rank = os.environ.get("RANK", "0")
        if n.op == "placeholder":
            what = f"rank {rank}: %{n.name} holds NaN before the program begins"
            raise NanError(at_node(what, n, "Look at the data, or at what the last step of the optimizer did."))
        half = n.meta.get("phase", "forward")
        if str(n.target).startswith("_c10d_functional."):
            what, todo = "is the first to hold NaN, which came from another rank", "See what the other ranks say."
        else:
            what, todo = "is the first to make NaN", "Its operands hold none; they are:\n    " + operands(self, n)
        raise NanError(at_node(f"rank {rank}: %{n.name} in the {half} {what}", n, todo))


def operands(run: Interpreter, n: Node) -> str:
    """The operands of a node with the range of their values."""
    lines = []
    for used in dict.fromkeys(nodes_in((n.args, n.kwargs))):
        value = run.env.get(used)
        if isinstance(value, torch.Tensor) and value.numel():
            low, high = value.min().item(), value.max().item()
            lines.append(f"%{used.name} {tuple(value.shape)} from {low:.3g} to {high:.3g}")
    return "\n    ".join(lines) or "none"


def has_nan(value: Any) -> bool:
    """Whether a value is a tensor with a NaN, or holds one."""
    if isinstance(value, (tuple, list)):
        return any(map(has_nan, value))
    floating = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return floating and bool(torch.isnan(value).any())
