"""The user's own lines: which source lines of the model led to an op, and errors that show them."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from types import CodeType, FrameType

import torch

from sbpc import errors
from sbpc.errors import CaptureError

TORCH = os.path.dirname(torch.__file__) + os.sep
SBPC = os.path.dirname(errors.__file__) + os.sep
_KIND: dict[str, str] = {}  # by file name: "torch", "sbpc" or "user"
_TEXT: dict[tuple[int, ...], tuple[str, list[CodeType]]] = {}  # by id of code and instruction; the codes are kept alive


def user_stack() -> str:
    """The user's frames above the caller as a traceback prints them, innermost last; frames of torch are left out.

    The walk ends at the second stretch of frames of sbpc: who called sbpc does not show. Empty outside a forward.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _kind(frame.f_code.co_filename) == "sbpc":
        frame = frame.f_back
    found: list[FrameType] = []
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "user":
            found.append(frame)
        elif kind == "sbpc":
            break
        frame = frame.f_back
    if frame is None:
        return ""
    key: list[int] = []
    for frame in found:
        key += (id(frame.f_code), frame.f_lasti)
    if (known := _TEXT.get(tuple(key))) is None:
        lines = [_line(frame.f_code, frame.f_lineno) for frame in reversed(found)]
        known = _TEXT[tuple(key)] = "\n".join(lines), [frame.f_code for frame in found]
    return known[0]


def traceback_stack(error: BaseException) -> str:
    """The user's frames of an error's traceback, innermost last, below those that called sbpc."""
    frames = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    first = next((at for at, (code, _) in enumerate(frames) if _kind(code.co_filename) == "sbpc"), 0)
    return "\n".join(_line(code, number) for code, number in frames[first:] if _kind(code.co_filename) == "user")


def user_error(what: str, stack: str, todo: str) -> CaptureError:
    """The full message about a line of the model: what and why, where, what to do."""
    return CaptureError("\n".join([what, *stack.splitlines(), f"  {todo}"]))


def _kind(file: str) -> str:
    kind = _KIND.get(file)
    if kind is None:
        hidden = file.startswith(("<", TORCH))  # <frozen importlib>, <string>: no source to show
        kind = _KIND[file] = "torch" if hidden else "sbpc" if file.startswith(SBPC) else "user"
    return kind


def _line(code: CodeType, number: int) -> str:
    """One frame in two lines; the file relative to the working directory where it lies below it."""
    here = os.getcwd() + os.sep
    file = code.co_filename.removeprefix(here)
    source = linecache.getline(code.co_filename, number).strip()
    return f'  File "{file}", line {number}, in {code.co_name}\n    {source}'
