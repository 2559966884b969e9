"""Write what commands print: JSON, tables and files."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sbpc.errors import SbpcError


@contextlib.contextmanager
def quiet(options: argparse.Namespace) -> Iterator[None]:
    """Sends what a target prints to standard error if there is --json."""
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        yield


def print_json(value: Any) -> None:
    """Prints one JSON value. Infinite and undefined numbers become null."""
    print(json.dumps(finite(value), indent=2, allow_nan=False))


def finite(value: Any) -> Any:
    """Returns the value with null for every number that JSON lacks."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_file(file: str | None) -> None:
    """Raises SbpcError for a file that cannot be written, before anything is planned."""
    if not file:
        return
    if Path(file).is_dir():
        raise SbpcError(f"cannot write {file}: it is a folder\n  Name a file in it.")
    if not Path(file).parent.is_dir():
        raise SbpcError(f"cannot write {file}: there is no folder {Path(file).parent}\n  Make it, or name another.")
    if not os.access(file if Path(file).exists() else Path(file).parent, os.W_OK):
        raise SbpcError(f"cannot write {file}: that is not allowed\n  Name a file that may be written to.")


def write(file: str, save: Any) -> None:
    """Writes a file. Raises SbpcError if that is not possible."""
    try:
        save(file)
    except OSError as error:
        raise SbpcError(f"cannot write {file}: {error.strerror}\n  Name a file that may be written to.") from error
