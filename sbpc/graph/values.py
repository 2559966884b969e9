"""Texts of numbers, functions, containers and the like, by which a plan knows in another process whether they are
what they were."""

from __future__ import annotations

import abc
import hashlib
import sys
from collections import deque
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache, partial
from numbers import Number
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sbpc._compat import writes_of

PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Size,
)


class Masks(abc.ABC):  # noqa: B024
    """The BlockMask of FlexAttention, known by its name: to import it takes seconds. It runs somebody's function,
    in blocks from which others may follow than from that."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        names = {(each.__module__, each.__qualname__) for each in kind.__mro__}
        return ("torch.nn.attention.flex_attention", "BlockMask") in names


RECORDS = (SimpleNamespace,)  # objects whose reads cannot be watched
LISTS = (list, tuple, deque)
CACHED = type(lru_cache(len))
# they hold what they are called with besides their arguments, see `table_of`
CALLS = (FunctionType, MethodType, partial, CACHED, Masks)
CONTAINERS = (*LISTS, dict, set, frozenset, np.ndarray, *CALLS, *RECORDS)
BRACKETS: dict[type, tuple[str, str]] = {tuple: ("(", ")"), list: ("[", "]"), dict: ("{", "}")}
# entries of a container that are compared, levels that are looked at; characters of a text
MOST, DEEPEST, LONGEST = 100_000, 4, 160


def text_of(value: Any) -> str:
    """Type and value of what is plain as a text, and of anything else what kind of thing it is: two values are alike
    if their texts are.

    >>> print(text_of((1, True, 1.0, torch.float32, {"a": None})), text_of(torch.relu), text_of(torch.nn.ReLU()))
    (1, True, 1.0, torch.float32, {'a': None}) relu a ReLU
    """
    text = whole_text(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({digest(text.encode())})"


def digest(content: bytes) -> str:
    """A short text that tells contents apart."""
    return hashlib.sha256(content).hexdigest()[:16]


def whole_text(value: Any) -> str:
    """The text however long it is."""
    kind = type(value)
    if isinstance(value, Enum):
        return f"{kind.__name__}({whole_text(value.value)})"
    if kind is int and value.bit_length() > 1024:  # Python does not print any
        return hex(value)
    if kind in PLAIN:
        return repr(value)
    if kind is partial:
        return f"partial({', '.join(map(text_of, (value.func, value.args, value.keywords)))})"
    if isinstance(value, CodeType):
        return (
            f"(code {sys.implementation.cache_tag} "
            f"{digest(text_of((value.co_code, value.co_names, value.co_consts)).encode())})"
        )
    if isinstance(value, MethodType):
        return text_of(value.__func__)
    if isinstance(value, CACHED):
        return text_of(value.__wrapped__)
    if isinstance(value, FunctionType):
        what = f"{value.__name__} {text_of(value.__code__)}" if is_own(value.__globals__) else value.__name__
        free = table_of(value)
        return f"{what} with {text_of(free)}" if free and is_small(free) else what
    if isinstance(value, np.ndarray):
        few = value.size <= 100 or value.dtype.hasobject
        return (
            f"{kind.__name__}({text_of(value.tolist()) if few else digest(value.tobytes())}, {value.shape}, "
            f"{value.dtype})"
        )
    if isinstance(value, (Number, str, bytes, np.generic)):
        text = str(value)
        return f"{kind.__name__}({text if text.isprintable() else repr(text)})"
    if isinstance(value, Masks):
        listed = [x.tolist() if type(x) is Tensor and not x.is_meta else None for x in blocks_of(value)]
        mask = text_of(table_of(value)["mask_mod"])
        return f"{kind.__name__}({mask}, blocks {digest(str(listed).encode())})"
    if isinstance(value, CONTAINERS) and is_small(value):
        texts = [*map(text_of, items_of(value))]
        if isinstance(value, (set, frozenset)):
            texts.sort()
        if isinstance(value, (dict, *RECORDS)):
            keys = items_of(value, keys=True)[: len(texts)]
            texts = [f"{text_of(key)}: {text}" for key, text in zip(keys, texts)]
        left, right = BRACKETS.get(kind, (f"{kind.__name__}(", ")"))
        return f"{left}{', '.join(texts)}{right}"
    if isinstance(value, Tensor):
        return "a tensor"
    name = getattr(value, "__name__", None) if callable(value) else None
    return name if isinstance(name, str) else f"a {kind.__name__}"


def is_small(container: Any) -> bool:
    """Whether a container holds few things, with those in the containers in it."""
    count, left = 0, [container]
    while left:
        if isinstance(value := left.pop(), CONTAINERS):
            count += len(items := items_of(value))
            if count > MOST:
                return False
            left += items
    return True


def items_of(container: Any, keys: bool = False) -> list[Any]:
    """What a container holds, of a dict the values. keys: and those of a dict."""
    if isinstance(container, np.ndarray):  # the same object for the same numbers, while somebody holds it
        return [sys.intern(container.tobytes().decode("latin1"))]
    container = table_of(container)
    if not isinstance(container, dict):
        return list(container)
    return [*container, *container.values()] if keys else list(container.values())


def table_of(container: Any) -> Any:
    """A container; of a record the dict of its attributes, of what can be called that of what it is called with: of
    a function its free variables, and if it is somebody's own its defaults and attributes.
    """
    if isinstance(container, FunctionType):
        cells = zip(container.__code__.co_freevars, container.__closure__ or ())
        free = {name: cell.cell_contents for name, cell in cells if name != "__class__" and is_full(cell, container)}
        own = ("__defaults__", "__kwdefaults__", "__dict__") if is_own(container.__globals__) else ()
        return free | {name: value for name in own if (value := getattr(container, name))}
    if isinstance(container, MethodType):
        return {"__self__": container.__self__, "__func__": container.__func__}
    if isinstance(container, CACHED):
        return {"__wrapped__": container.__wrapped__}
    if isinstance(container, partial):
        return {"func": container.func, "args": container.args, "keywords": container.keywords}
    if isinstance(container, Masks):
        mask: Any = getattr(container, "mask_mod")  # noqa: B009
        blocks = dict(enumerate(blocks_of(container)))
        written = {f"written {at}": writes_of(x) for at, x in blocks.items()}
        return {"mask_mod": getattr(mask, "fn", mask)} | blocks | written
    return vars(container) if isinstance(container, RECORDS) else container


def blocks_of(mask: Any) -> list[Tensor]:
    """The tensors that list the blocks of a mask."""
    names = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
    return [value for name in names if isinstance(value := getattr(mask, name, None), Tensor)]


def is_full(cell: Any, function: FunctionType) -> bool:
    """Whether a free variable of a function has a value, other than the function."""
    try:
        return cell.cell_contents is not function
    except ValueError:
        return False


@lru_cache
def is_foreign(module: Any) -> bool:
    """Whether a module of this name is neither Python's nor torch's nor sbpc's."""
    return isinstance(module, str) and module.partition(".")[0] not in sys.stdlib_module_names | {
        "torch",
        "sbpc",
        "numpy",
    }


def is_own(table: Mapping[str, Any]) -> bool:
    """Whether these are the globals of a module of somebody's own, not of an installed package."""
    return is_foreign(table.get("__name__")) and "-packages" not in (table.get("__file__") or "")


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is a number, a text, None or the like, or a container of nothing else."""
    if isinstance(value, CONTAINERS):
        return depth < DEEPEST and all(is_plain(item, depth + 1) for item in items_of(value))
    return type(value) in PLAIN or isinstance(value, (Enum, Number, str, bytes, np.generic))
