"""Copies what containers and generators of random numbers hold, and puts it back."""

from __future__ import annotations

import argparse
import inspect
import operator
import random
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from sbpc.graph.guards import ABSENT
from sbpc.graph.values import CONTAINERS, DEEPEST, LISTS, is_foreign, is_own, is_plain, items_of, table_of

First = tuple[str, dict[str, Any], str, Any, str]  # see `Attributes.first`
MUTABLE = 0b10  # of the two flags of a class: made by a class statement, and not immutable
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in a value, in containers and in the attributes of an object."""
    if isinstance(value, Tensor):
        yield value
    elif depth < DEEPEST and (isinstance(value, CONTAINERS) or is_object(value)):
        for item in items_of(value if isinstance(value, CONTAINERS) else getattr(value, "__dict__", {})):
            yield from tensors_in(item, depth + 1)


def parts_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a container that a path can name, with what names them."""
    table = table_of(container)
    pairs: Iterable[tuple[Any, Any]] = (
        table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, LISTS) else ()
    )
    for place, (key, item) in enumerate(pairs):
        named = type(key) is int or (isinstance(key, str) and "." not in key and not key.startswith("["))
        yield key if named else f"[{place}]", item


def copied(container: Any) -> Any:
    """What a container holds, to be put back by `refill`."""
    if isinstance(container, (deque, np.ndarray)):
        return container.copy()
    container = table_of(container)
    return dict(container) if isinstance(container, dict) else list(container)


def refill(container: Any, items: Any) -> None:
    """Puts back what `copied` gave."""
    if isinstance(container, np.ndarray):
        container[...] = items
    elif isinstance(container, FunctionType):
        if is_own(container.__globals__):
            container.__defaults__, container.__kwdefaults__ = items.get("__defaults__"), items.get("__kwdefaults__")
            container.__dict__ = items.get("__dict__", {})
        for name, cell in zip(container.__code__.co_freevars, container.__closure__ or ()):
            if name in items:
                cell.cell_contents = items[name]
    else:
        table = table_of(container)
        table.clear()
        table.extend(items) if isinstance(table, (list, deque)) else table.update(items)


def same(copy: Any, container: Any) -> bool:
    """Whether a container still holds the same objects as its copy."""
    one, other = items_of(copy, keys=True), items_of(container, keys=True)
    return len(one) == len(other) and all(map(operator.is_, one, other))


def state_of(generator: Any) -> str:
    """A text of where a generator of random numbers stands."""
    if isinstance(generator, random.SystemRandom):
        return ""
    read = getattr(generator, "getstate" if isinstance(generator, random.Random) else "get_state", None)
    return repr(read() if read else generator.bit_generator.state)


def raw(owner: Any, name: str) -> Any:
    """What globals or a class have under a name."""
    return owner.get(name, ABSENT) if isinstance(owner, dict) else inspect.getattr_static(owner, name, ABSENT)


def put_back(owner: Any, name: str, value: Any) -> None:
    """Makes a value what globals or a class have under a name again, or takes away what was not there."""
    if value is ABSENT:
        operator.delitem(owner, name) if isinstance(owner, dict) else delattr(owner, name)
    elif isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


@contextmanager
def settled(first: Iterable[First]) -> Iterator[None]:
    """Sets what a first forward has set while this lasts."""
    before = [(table, name, table.get(name, ABSENT)) for _, table, name, *_ in first]
    for _, table, name, value, _ in first:
        table[name] = value
    try:
        yield
    finally:
        for table, name, value in before:
            if value is not ABSENT or name in table:
                put_back(table, name, value)


def is_object(value: Any) -> bool:
    """Whether a value is an object of a class of somebody's own, such as a configuration: not of Python's, of
    torch's or of sbpc's."""
    kind = type(value)
    if (
        isinstance(value, (Tensor, type, FunctionType, ModuleType))
        or is_plain(value)
        or kind.__flags__ >> 8 & 3 != MUTABLE
    ):
        return False
    return kind is argparse.Namespace or is_foreign(kind.__module__)
