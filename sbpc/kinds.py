"""Arguments of the wrong kind: refused by name, with the value that is given and what to give."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from torch import nn

from sbpc.errors import SbpcError

KINDS: dict[str, Callable[[Any], bool]] = {  # what an argument may be, in the words of messages
    "None": lambda value: value is None,
    "True or False": lambda value: isinstance(value, bool),
    "a function": callable,
    "a list": lambda value: isinstance(value, (tuple, list)),
    "a mapping whose keys are texts": lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
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
