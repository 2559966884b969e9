"""Load a target of the command line: `file.py:function`, which returns `(model, args)` or `(model, args, kwargs)`."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sbpc._compat import tree_map
from sbpc.errors import SbpcError, closest

log = logging.getLogger("sbpc")
USAGE = "A target is file.py:function; the function returns (model, args) or (model, args, kwargs)."
TRACE = "Mend the target; the whole traceback is shown with --verbose."
CASTS = {"float32": torch.float32, "float64": torch.float64}
AUTOCASTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPES = (*CASTS, *AUTOCASTS)


class TargetError(SbpcError):
    """A target does not exist, cannot be imported, or returns no model."""


@dataclass(frozen=True)
class Target:
    """The values that a target's function returned. dtype: for autocast, None without."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype | None = None


def load_target(text: str, dtype: str | None = None) -> Target:
    """Calls the function that `text` names, with torch's random numbers seeded.

    dtype: "float32" and "float64" cast the model and its floating-point arguments. "bfloat16" and "float16" leave them
    as they are and autocast the ops.

    Raises TargetError that shows the failing line of the target's file.
    """
    path, name = split_target(text)
    function = getattr(import_file(path), name, None)
    if not callable(function):
        module = vars(sys.modules[module_name(path)[1]])
        near = closest(name, [key for key, value in module.items() if callable(value) and not key.startswith("_")])
        raise TargetError(f"{path} has no function {name!r}\n  " + (f"It has {', '.join(near)}." if near else USAGE))
    torch.manual_seed(0)
    model, args, kwargs = unpack(run(function, path, f"{name}() failed"), text)
    if dtype in CASTS:
        model = model.to(CASTS[dtype])
        args, kwargs = cast(args, CASTS[dtype]), cast(kwargs, CASTS[dtype])
    return Target(model, args, kwargs, AUTOCASTS.get(dtype or ""))


def split_target(text: str) -> tuple[Path, str]:
    """Returns the file and the name of the function."""
    file, colon, name = text.rpartition(":") if ":" in text else (text, "", "")
    path = Path(file)
    if file and path.is_dir():
        raise TargetError(f"{file!r} is a folder\n  {USAGE}")
    if not file or not path.is_file():
        raise TargetError(f"there is no file {file!r}\n  {USAGE}")
    if not colon or not name.isidentifier():
        hint = f"{file}:function" if file.endswith(".py") else "file.py:function"
        raise TargetError(f"{text!r} is not a target, as in {hint}\n  {USAGE}")
    return path.resolve(), name


def module_name(path: Path) -> tuple[Path, str]:
    """Returns the folder to import a file from and its module name there. A file of a package is imported as part of
    it."""
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, parts = root.parent, [root.name, *parts]
    return root, ".".join(parts) if len(parts) > 1 else f"target_{path.stem}"


def import_file(path: Path) -> ModuleType:
    """Imports a file once and returns its module. Its folder comes first on the path, as if the file had been run."""
    root, name = module_name(path)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))

    def imported() -> ModuleType:
        if name in sys.modules:
            return sys.modules[name]
        if "." in name:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError("this is no Python file")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
        return sys.modules[name]

    module: ModuleType = run(imported, path, "cannot be imported")
    if Path(module.__file__ or "").resolve() != path:
        raise TargetError(f"{path} is hidden by {module.__file__}, which is {name} too\n  Rename one of them.")
    return module


def run(function: Callable[[], Any], path: Path, what: str) -> Any:
    """Calls code of the target. Raises TargetError that shows the last line of the target's file on the way to the
    error."""
    try:
        return function()
    except SbpcError:
        raise
    except (Exception, SystemExit) as error:
        log.info("the error of the target", exc_info=error)
        line = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if Path(frame.filename).resolve() == path:
                line = f'\n  File "{path}", line {frame.lineno}, in {frame.name}\n    {frame.line}'
        if isinstance(error, SyntaxError) and error.filename and error.lineno:
            line = f'\n  File "{error.filename}", line {error.lineno}\n    {(error.text or "").strip()}'
        raise TargetError(f"{path.name}: {what}: {type(error).__name__}: {error}{line}\n  {TRACE}") from error


def unpack(returned: Any, text: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Returns the model, its arguments and its keyword arguments."""
    items = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    kwargs = items[2] if items[2:] else {}
    if not 2 <= len(items) <= 3 or not isinstance(items[0], nn.Module) or not isinstance(kwargs, dict):
        what = ", ".join(type(item).__name__ for item in items)
        raise TargetError(f"{text} returns ({what})\n  {USAGE}")
    args = tuple(items[1]) if isinstance(items[1], (tuple, list)) else (items[1],)
    return items[0], args, kwargs


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns nested arguments with their floating-point tensors as `dtype`."""

    def leaf(x: Any) -> Any:
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.detach().to(dtype).requires_grad_(x.requires_grad) if floating else x

    return tree_map(leaf, value)
