"""Errors that say where, what, why and what to do; every message about a node is made by `at_node`."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.fx import Node


class SbpcError(Exception):
    """Any error that is the caller's to mend: the message says where, what, why and what to do. Our own mistakes are
    assertions."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it may quote a stranger's file


class CaptureError(SbpcError):
    """The model cannot be captured as one graph."""


class CheckpointError(SbpcError):
    """A checkpoint cannot be written or read, or does not fit the model or the optimizer."""


class LayoutError(SbpcError):
    """A layout is malformed, or a tensor cannot have it."""


class LostRankError(SbpcError):
    """A collective has failed. ranks: those that do not answer any more, as far as it is known; none where all live
    but do not meet."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class MemoryLimitError(SbpcError):
    """No plan was found that stays under the memory limit. nearest: of the plans that were made the one that takes
    least."""

    def __init__(self, message: str, nearest: Any = None) -> None:
        super().__init__(message)
        self.nearest = nearest


def least_of(errors: Sequence[MemoryLimitError]) -> MemoryLimitError:
    """The error whose nearest plan takes least."""
    return min(errors, key=lambda error: error.nearest.memory["total"])


def lacking(memory: Mapping[str, int], limit: float) -> tuple[str, str]:
    """Returns how much the plan that takes least takes beyond the limit, and of what. memory: its bytes by kind, and
    in all."""
    parts = ", ".join(f"{kind} {size:,}" for kind, size in memory.items() if kind != "total")
    over = f"{memory['total'] - int(limit):,} more than the limit of {int(limit):,}"
    return f"no plan was found that takes less than {memory['total']:,} bytes a rank, {over}", f"of which {parts}"


class MeshError(SbpcError):
    """A mesh or a cluster is malformed, or does not fit the ranks that there are."""


class NanError(SbpcError):
    """A step computes NaN, and was asked to look for it."""


class PinError(SbpcError):
    """A pin names nothing, contradicts another pin, or cannot be met."""


class PlanError(SbpcError):
    """A plan does not fit the model, the inputs, the ranks or the file it is used with."""


class LoopError(PlanError):
    """A step is no loop over micro-batches: a micro-batch cannot run without what others computed, or there is no
    loss."""


class RoutingError(SbpcError):
    """Experts are chosen so that a rank gets more of their rows than its plan has memory for."""


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


def printable(text: str) -> str:
    """The text with the escape of every character that a terminal may not print as itself; line ends stay.

    >>> print(printable("a\x1b[2Jb"))
    a\\x1b[2Jb
    """
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


MOST_NAME = 1000  # characters of a name in a file
DEEPEST = 100  # lists and objects in each other in a file


def is_name(text: Any, most: int = MOST_NAME) -> bool:
    """Whether a value is a text of one line that can be printed as it is, and not very long."""
    return isinstance(text, str) and text.isprintable() and len(text) <= most


def read_json(text: str) -> Any:
    """The value of a stranger's JSON. Raises ValueError for what is none, and for what no file of sbpc's holds:
    control characters but line ends, integers of more than 64 bits, and lists and objects deep in each other.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [value]
    for _ in range(DEEPEST):
        texts, numbers = [x for x in level if type(x) is str], [x for x in level if type(x) is int]
        if not (
            fits_json("".join(texts)) and fits_json(min(numbers, default=0)) and fits_json(max(numbers, default=0))
        ):
            wrong = next(item for item in level if not fits_json(item))
            raise ValueError(f"it holds {shown(wrong)}")
        parts = [x if type(x) is list else itertools.chain(x, x.values()) for x in level if type(x) in (list, dict)]
        level = list(itertools.chain.from_iterable(parts))
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def fits_json(item: Any) -> bool:
    """Whether a text or an integer is one that a file may hold."""
    if type(item) is str:
        return item.isprintable() or item.replace("\n", "").isprintable()
    return type(item) is not int or -(1 << 63) <= item < 1 << 63


def closest(pattern: str, names: list[str]) -> list[str]:
    """The three names that look most like the pattern."""
    import difflib

    return difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)


KINDS: dict[str, Callable[[Any], bool]] = {  # what an argument may be, in the words of messages
    "None": lambda value: value is None,
    "True or False": lambda value: isinstance(value, bool),
    "a function": callable,
    "a list": lambda value: isinstance(value, (tuple, list)),
    "a list of texts": lambda value: isinstance(value, (tuple, list)) and all(isinstance(each, str) for each in value),
    "a mapping whose keys are texts": lambda value: (
        isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    ),
    "a number of seconds": lambda value: is_number(value, Real) and (0 <= value < 1e18 or value == math.inf),
    "a path": lambda value: isinstance(value, (str, os.PathLike)) and may_name(os.fspath(value)),
    "a torch.dtype": lambda value: isinstance(value, torch.dtype),
    "a text": lambda value: isinstance(value, str),
    "an integer": lambda value: is_number(value, Integral),
    "an nn.Module": lambda value: isinstance(value, nn.Module),
}


def check_kinds(
    error: type[SbpcError] = SbpcError,
    /,
    **given: tuple[Any, str] | tuple[Any, str, str] | tuple[Any, str, str, str],
) -> None:
    """Refuse arguments that are of none of their kinds: by name, the value and what it may be.

    >>> check_kinds(path=("plan.sbpc", "a path"), loss=(3, "a function", "None"))
    Traceback (most recent call last):
    sbpc.errors.SbpcError: loss is 3
      Give a function or None.
    """
    for name, (value, *kinds) in given.items():
        if not any(KINDS[kind](value) for kind in kinds):
            raise error(f"{name} is {shown(value)}\n  Give {' or '.join(kinds)}.")


def may_name(path: Any) -> bool:
    """Whether a text may be the path of a file: the system has a name for it."""
    try:
        return isinstance(path, str) and path != "" and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def is_number(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether a value is a number of a kind; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """The start of a value's text, as messages show it; of an integer of very many digits, which Python does not
    print, its length; of what has no text, its type."""
    if isinstance(value, int) and value.bit_length() > 1024:
        return f"an integer of {value.bit_length()} bits"
    try:
        return f"{value!r:.80}".partition("\n")[0]
    except Exception:  # of a stranger's __repr__
        return f"a {type(value).__name__}"
