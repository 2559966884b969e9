"""Errors that say where, what, why and what to do; every message about a node is made by `at_node`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from torch import nn
from torch.fx import Node


class SbpcError(Exception):
    """Any error that is the caller's to mend: the message says where, what, why and what to do. Our own mistakes are assertions."""


class CaptureError(SbpcError):
    """The model cannot be captured as one graph."""


class CheckpointError(SbpcError):
    """A checkpoint cannot be written or read, or does not fit the model or the optimizer."""


class LayoutError(SbpcError):
    """A layout is malformed, or a tensor cannot have it."""


class MemoryLimitError(SbpcError):
    """No plan was found that stays under the memory limit. nearest: of the plans that were made the one that takes least."""

    def __init__(self, message: str, nearest: Any = None) -> None:
        super().__init__(message)
        self.nearest = nearest


class MeshError(SbpcError):
    """A mesh or a cluster is malformed, or does not fit the ranks that there are."""


class NanError(SbpcError):
    """A step computes NaN, and was asked to look for it."""


class PinError(SbpcError):
    """A pin names nothing, contradicts another pin, or cannot be met."""


class PlanError(SbpcError):
    """A plan does not fit the model, the inputs, the ranks or the file it is used with."""


class LoopError(PlanError):
    """A step is no loop over micro-batches: a micro-batch cannot run without what others computed, or there is no loss."""


class RuleError(SbpcError):
    """A rule string is malformed, or does not fit the op it is given for."""


class VerifyError(SbpcError):
    """A rewritten graph breaks an invariant."""


def where(node: Node) -> str:
    """The node as the graph prints it with its shape and module path, then the user's own line.

    >>> from torch import fx
    >>> print(where(fx.Graph().placeholder("x")))
      %x : placeholder
    """
    value = node.meta.get("val")
    shape = ""
    if value is not None and hasattr(value, "shape"):
        shape = f" : {dtype_text(value.dtype)}[{', '.join(map(str, value.shape))}]"
    call = "placeholder" if node.op == "placeholder" else f"{node.target}({', '.join(str(a) for a in node.args)})"
    sign = "=" if shape else ":"
    module = node.meta.get("module", "")
    lines = [f"  %{node.name}{shape} {sign} {call}" + (f"    {module}" if module else "")]
    lines += ["  " + line for line in node.meta.get("stack_trace", "").strip().splitlines()]
    return "\n".join(lines)


def at_node(what: str, node: Node, todo: str) -> str:
    """The full message about a node: what and why, where, what to do."""
    return f"{what}\n{where(node)}\n  {todo}"


def dtype_text(dtype: object) -> str:
    """The short name of a torch dtype.

    >>> import torch
    >>> dtype_text(torch.float32), dtype_text(torch.bfloat16), dtype_text(torch.int64), dtype_text(torch.bool)
    ('f32', 'bf16', 'i64', 'bool')
    """
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def closest(pattern: str, names: list[str]) -> list[str]:
    """The three names that look most like the pattern."""
    import difflib

    return difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)


KINDS: dict[str, Callable[[Any], bool]] = {  # what an argument may be, in the words of messages
    "None": lambda value: value is None,
    "True or False": lambda value: isinstance(value, bool),
    "a function": callable,
    "a list": lambda value: isinstance(value, (tuple, list)),
    "a mapping whose keys are texts": lambda value: (
        isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    ),
    "a number of seconds": lambda value: is_number(value, Real) and (0 <= value < 1e18 or value == math.inf),
    "a path": lambda value: isinstance(value, (str, os.PathLike)),
    "a text": lambda value: isinstance(value, str),
    "an integer": lambda value: is_number(value, Integral),
    "an nn.Module": lambda value: isinstance(value, nn.Module),
}


def check_kinds(error: type[SbpcError] = SbpcError, /, **given: tuple[Any, str] | tuple[Any, str, str]) -> None:
    """Refuse arguments that are of none of their kinds: by name, the value and what it may be.

    >>> check_kinds(path=("plan.sbpc", "a path"), loss=(3, "a function", "None"))
    Traceback (most recent call last):
    sbpc.errors.SbpcError: loss is 3
      Give a function or None.
    """
    for name, (value, *kinds) in given.items():
        if not any(KINDS[kind](value) for kind in kinds):
            raise error(f"{name} is {shown(value)}\n  Give {' or '.join(kinds)}.")


def is_number(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether a value is a number of a kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """The start of a value's text, as messages show it; of an integer of very many digits, which Python does not print, its length."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.80}".partition("\n")[0]
