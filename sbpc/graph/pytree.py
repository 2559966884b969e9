"""Nested arguments and results as a flat list of tensors and a JSON-able structure.

A structure is made of lists, texts, numbers and null only, so that it can be written into a plan's file and read from a
stranger's: classes stand in it as "module:qualname" and are looked up among the loaded modules, never imported.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sbpc.errors import CaptureError, PlanError

KEYS = (str, int, bool, float, type(None))
SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list, "size": torch.Size}
MAPPINGS: dict[str, Any] = {"dict": dict, "ordered dict": OrderedDict}
CONSTANTS = {"dtype": torch.dtype, "layout": torch.layout, "memory format": torch.memory_format}
TODO = "Give tensors, numbers, texts, None, and tuples, lists, dicts, named tuples or dataclasses of them."


def flatten(value: Any, path: str = "value", drops: bool = False) -> tuple[list[Tensor], Any]:
    """The tensors in `value`, depth first, and the structure around them. A tensor that stands twice is two leaves.

    >>> flatten({"x": (torch.ones(2), None), "scale": 0.5})
    ([tensor([1., 1.])], ['dict', [['x', ['tuple', [['tensor', 0], None]]], ['scale', 0.5]]])

    Raises CaptureError for anything else; `path` is what the message calls `value`. drops: whether a cache of
    `transformers` is left out, in whose place stands None afterwards.
    """
    leaves: list[Tensor] = []
    return leaves, _flatten(value, path, leaves, drops)


def same_structure(one: Any, other: Any) -> bool:
    """Returns whether two structures are the same, also in what compares equal and computes something else: 2 and 2.0,
    1 and True, 0.0 and -0.0.

    >>> same_structure(["tuple", [["tensor", 0], 2]], ["tuple", [["tensor", 0], 2.0]])
    False
    """
    return bool(one == other) and repr(one) == repr(other)


def dropped(structure: Any) -> list[str]:
    """The classes of the caches that were left out of a structure."""
    match structure:
        case ["dropped", name]:
            return [name]
    return [name for item in structure for name in dropped(item)] if isinstance(structure, list) else []


def structures(arguments: int, results: int) -> dict[str, Any]:
    """Returns the structures of so many tensors as arguments, and as results, by the names that `Ports` gives them."""
    given, made = (tuple(torch.empty(0) for _ in range(count)) for count in (arguments, results))
    return {"arguments": flatten((given, {}))[1], "results": flatten(made)[1]}


def unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    """The value of which `flatten` gave `structure`, with `leaves` in the place of its tensors.

    >>> unflatten(["tuple", [["tensor", 1], ["tensor", 0]]], ["a", "b"])
    ('b', 'a')

    Raises PlanError if a class is not loaded or the structure is malformed.
    """
    if isinstance(structure, KEYS):
        return structure
    match structure:
        case ["dropped", _]:
            return None
        case ["tensor", int(number)] if not isinstance(number, bool) and 0 <= number < len(leaves):
            return leaves[number]
        case ["tuple" | "list" | "size" as kind, list(items)]:
            return SEQUENCES[kind](unflatten(item, leaves) for item in items)
        case ["dict" | "ordered dict" as kind, list(pairs)]:
            return MAPPINGS[kind]((unflatten(key, ()), unflatten(item, leaves)) for key, item in pairs)
        case ["named tuple" | "return type" as kind, str(name), list(items)]:
            values = [unflatten(item, leaves) for item in items]
            made = _class(kind, name)
            return made._make(values) if kind == "named tuple" else made(values)
        case ["dataclass", str(name), list(pairs)]:
            return _class("dataclass", name)(**{key: unflatten(item, leaves) for key, item in pairs})
        case ["slice", [start, stop, step]]:
            return slice(*(unflatten(item, leaves) for item in (start, stop, step)))
        case ["float", "inf" | "-inf" | "nan" as text]:
            return float(text)
        case ["dtype" | "layout" | "memory format" as kind, str(name)]:
            return _constant(kind, name)
        case ["device", str(name)]:
            return torch.device(name)
    raise PlanError(f"a structure holds {structure!r:.100}\n  It is not one that sbpc wrote: plan the model again.")


def harmless(structure: Any) -> None:
    """Refuses a stranger's structure with a class that would run code of its own when it is made, by PlanError.

    Those of dicts may, as the outputs of `transformers` do.
    """
    match structure:
        case ["dataclass", str(name), _]:
            found = _class("dataclass", name)
            about = vars(found).get("__dataclass_params__")  # not that of a class from which it inherits
            bare = type(found) is type and about is not None and about.init
            if not issubclass(found, dict) and (
                not bare or hasattr(found, "__post_init__") or found.__new__ is not object.__new__
            ):
                todo = "Give a dataclass without __post_init__, or a dict."
                raise PlanError(
                    f"the dataclass {name} does more than to hold its fields, which a file may not ask for\n  {todo}"
                )
    for item in structure if isinstance(structure, list) else ():
        harmless(item)


def plain(structure: Any) -> Any:
    """The structure with a dict for every dataclass, and a tuple for every named tuple, whose class is not loaded.

    >>> plain(["dataclass", "nowhere:Output", [["loss", ["tensor", 0]], ["cache", None]]])
    ['dict', [['loss', ['tensor', 0]], ['cache', None]]]
    """
    match structure:
        case ["dataclass", str(name), list(pairs)]:
            known = isinstance(_loaded(name), type)
            pairs = [[key, plain(item)] for key, item in pairs]
            return ["dataclass", name, pairs] if known else ["dict", pairs]
        case ["named tuple", str(name), list(items)]:
            items = [plain(item) for item in items]
            return ["named tuple", name, items] if isinstance(_loaded(name), type) else ["tuple", items]
        case ["dict" | "ordered dict" as kind, list(pairs)]:
            return [kind, [[key, plain(item)] for key, item in pairs]]
        case ["tuple" | "list" as kind, list(items)]:
            return [kind, [plain(item) for item in items]]
    return structure


def paths(structure: Any) -> list[tuple[Any, ...]]:
    """The path of keys, numbers and field names to every tensor leaf, by leaf number.

    >>> paths(flatten({"x": (torch.ones(2), None), "y": torch.ones(3)})[1])
    [('x', 0), ('y',)]
    """
    return [path for _, path in sorted(_paths(structure, ()))]


def _flatten(value: Any, path: str, leaves: list[Tensor], drops: bool) -> Any:
    if isinstance(value, Tensor):
        leaves.append(value)
        return ["tensor", len(leaves) - 1]
    if isinstance(value, float) and not math.isfinite(value):
        return ["float", str(float(value))]
    if type(value) in KEYS:
        return value
    for name, kind in CONSTANTS.items():
        if isinstance(value, kind):
            return [name, str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, slice):
        return [
            "slice",
            [_flatten(getattr(value, end), f"{path}.{end}", leaves, drops) for end in ("start", "stop", "step")],
        ]
    if isinstance(value, (tuple, list)):
        return _flatten_sequence(value, path, leaves, drops)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        pairs = [[name, _flatten(getattr(value, name), f"{path}.{name}", leaves, drops)] for name in fields]
        return ["dataclass", _class_name(value, path), pairs]
    if type(value) in (dict, OrderedDict):
        for key in value:
            if type(key) not in KEYS:
                raise CaptureError(f"{path} has the key {key!r:.100}\n  Keys are texts, numbers or None.")
        pairs = [
            [_flatten(key, path, [], drops), _flatten(item, f"{path}[{key!r}]", leaves, drops)]
            for key, item in value.items()
        ]
        return ["dict" if type(value) is dict else "ordered dict", pairs]
    if drops and is_cache(value):
        return ["dropped", f"{type(value).__module__}.{type(value).__qualname__}"]
    raise _unsupported(value, path)


def _flatten_sequence(value: Any, path: str, leaves: list[Tensor], drops: bool) -> Any:
    kind = type(value)
    named = isinstance(value, tuple) and hasattr(kind, "_fields")
    steps = [f".{name}" for name in kind._fields] if named else [f"[{at}]" for at in range(len(value))]
    items = [_flatten(item, path + step, leaves, drops) for step, item in zip(steps, value)]
    if named:
        return ["named tuple", _class_name(value, path), items]
    if kind.__module__ == "torch.return_types":
        return ["return type", kind.__name__, items]
    for name, sequence in SEQUENCES.items():
        if kind is sequence:
            return [name, items]
    raise _unsupported(value, path)


def _paths(structure: Any, path: tuple[Any, ...]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    match structure:
        case ["tensor", number]:
            yield number, path
        case ["dict" | "ordered dict", pairs] | ["dataclass", _, pairs]:
            for key, item in pairs:
                yield from _paths(item, (*path, unflatten(key, ())))
        case ["tuple" | "list" | "slice", items] | ["return type", _, items]:
            for at, item in enumerate(items):
                yield from _paths(item, (*path, at))
        case ["named tuple", name, items]:
            for field, item in zip(getattr(_loaded(name), "_fields", range(len(items))), items):
                yield from _paths(item, (*path, field))


def _class_name(value: Any, path: str) -> str:
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _loaded(name) is not kind:
        what = f"{path} is a {kind.__qualname__}, which {kind.__module__} does not hold under that name"
        raise CaptureError(f"{what}\n  Define the class at the top level of a module.")
    return name


def _loaded(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _class(kind: str, name: str) -> Any:
    """The class that a structure names. Raises PlanError if it is not loaded, or is not of this kind."""
    if kind == "return type":
        kind, name, found = "return type of torch", f"torch.return_types:{name}", vars(torch.return_types).get(name)
    else:
        found = _loaded(name)
    named = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")
    fits = named if kind == "named tuple" else dataclasses.is_dataclass(found) if kind == "dataclass" else True
    if not isinstance(found, type) or not fits:
        todo = f"Import {name.partition(':')[0]} before the plan is used; a plan imports nothing."
        raise PlanError(f"the {kind} {name} is not loaded\n  {todo}")
    return found


def _constant(kind: str, name: str) -> Any:
    found = vars(torch).get(name)
    if not isinstance(found, CONSTANTS[kind]):
        raise PlanError(f"torch has no {kind} {name!r}\n  Plan the model again with this version of torch.")
    return found


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of `transformers`, which keeps keys and values from one token to the next."""
    return any(
        kind.__name__.endswith("Cache") and kind.__module__[:12] == "transformers" for kind in type(value).__mro__
    )


def _unsupported(value: Any, path: str) -> CaptureError:
    kind = type(value)
    todo = "A program takes no cache: leave it out." if is_cache(value) else TODO
    if kind.__name__ == "BlockMask":
        todo = "Keep it on the module; or make it in the forward, by create_block_mask from tensors that are given."
    return CaptureError(f"{path} is a {kind.__module__}.{kind.__qualname__}\n  {todo}")
