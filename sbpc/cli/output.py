"""What commands write: JSON on standard output, and files."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sbpc.errors import SbpcError


@contextlib.contextmanager
def quiet(options: argparse.Namespace) -> Iterator[None]:
    """With --json: what a target prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        yield


def print_json(value: Any) -> None:
    """One JSON value on standard output; infinite and undefined numbers are null."""
    print(json.dumps(finite(value), indent=2, allow_nan=False))


def finite(value: Any) -> Any:
    """The value with null for every number that JSON does not know."""
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_file(file: str | None) -> None:
    """Refuse a file that cannot be written, before anything is planned."""
    if file and Path(file).is_dir():
        raise SbpcError(f"cannot write {file}: it is a folder\n  Name a file in it.")
    if file and not Path(file).parent.is_dir():
        raise SbpcError(f"cannot write {file}: there is no folder {Path(file).parent}\n  Make it, or name another.")


def write(file: str, save: Any) -> None:
    """Write a file. Raises SbpcError if that is not possible."""
    try:
        save(file)
    except OSError as error:
        raise SbpcError(f"cannot write {file}: {error.strerror}\n  Name a file that may be written to.") from error
