"""Finds the user's own lines: which source lines of the model led to an op, and errors that show them."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import traceback
from types import FrameType
from typing import Any

import torch

from sbpc import errors
from sbpc.errors import CaptureError

TORCH = os.path.dirname(torch.__file__) + os.sep
SBPC = os.path.dirname(errors.__file__) + os.sep
# which run in the place of torch's own
INSTEAD = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("attention.py", "flex.py"))
SourceLine = tuple[str, int, str]  # file, number, function


def user_stack(known: dict[Any, str] | None = None) -> str:
    """Returns the user's frames above the caller as a traceback prints them, innermost last, without frames of torch.

    The walk ends at the second stretch of frames of sbpc: who called sbpc does not show. Empty outside a forward.
    known: texts of one capture, which many ops share; none goes on to the next, see `lines_text`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _owner(frame.f_code.co_filename) == "sbpc":
        frame = frame.f_back
    lines: list[SourceLine] = []
    while frame is not None:
        owner = _owner(frame.f_code.co_filename)
        if owner == "sbpc":
            key, known = tuple(lines), {} if known is None else known
            if key not in known:
                known[key] = lines_text(*reversed(lines))
            return known[key]
        if owner == "user":
            lines.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return ""


def traceback_stack(error: BaseException) -> str:
    """Returns the user's frames of an error's traceback, innermost last, below those that called sbpc."""
    lines = [(f.f_code.co_filename, number, f.f_code.co_name) for f, number in traceback.walk_tb(error.__traceback__)]
    first = next((at for at, (file, *_) in enumerate(lines) if _owner(file) == "sbpc"), 0)
    return lines_text(*(line for line in lines[first:] if _owner(line[0]) == "user"))


def user_error(what: str, stack: str, todo: str) -> CaptureError:
    """Returns the full message about a line of the model: what and why, where, what to do."""
    return CaptureError("\n".join([what, *stack.splitlines(), f"  {todo}"]))


@functools.lru_cache(maxsize=1 << 12)
def _owner(file: str) -> str:
    """Returns whose file it is: "torch" (with what has no source to show, such as <string>), "sbpc" or "user"."""
    if file.startswith(("<", TORCH)) or file in INSTEAD:
        return "torch"
    return "sbpc" if file.startswith(SBPC) else "user"


def lines_text(*lines: SourceLine) -> str:
    """Returns two lines of text for each, with files relative to the working directory where they lie below it."""
    # not remembered from one capture to the next: a file may have been edited and loaded anew, a cell of a notebook run
    # again
    here = os.getcwd() + os.sep
    return "\n".join(
        f'  File "{file.removeprefix(here)}", line {number}, in {function}\n    '
        f"{linecache.getline(file, number).strip()}"
        for file, number, function in lines
    )
