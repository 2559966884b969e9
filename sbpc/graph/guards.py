"""What a plan takes for granted of a model besides its tensors: the numbers, texts and the like that its forward reads from attributes.

Such a value is a constant of the plan. A guard is the path of an attribute, such as "drop.p" or "config.rope_theta", with the text of
the value that stood there when the model was captured; and of the one that the first forward leaves there, if nothing depends on it.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial, reduce
from numbers import Number
from types import MemberDescriptorType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sbpc._compat import CHILDREN, TENSORS
from sbpc.errors import PlanError

COMPUTED = "a tensor"  # or what is computed when it is read: what it is computed from is guarded
GUARDS = "guards"  # in the meta of a captured graph, and among the options of a plan: by path, texts of values that may stand there
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format, torch.Size)
RECORDS = (SimpleNamespace, argparse.Namespace)  # objects whose reads cannot be watched, or that are little else than a dict
CONTAINERS = (tuple, list, dict, set, frozenset, *RECORDS)
BRACKETS: dict[type, tuple[str, str]] = {tuple: ("(", ")"), list: ("[", "]"), dict: ("{", "}")}
MOST, DEEPEST, LONGEST = 1000, 4, 160  # entries of a container that are compared, levels that are looked at; characters of a text
ABSENT, OTHER = "not there", object()


def text_of(value: Any) -> str:
    """Type and value of what is plain as a text, and of anything else what kind of thing it is: two values are alike if their texts are.

    >>> print(text_of((1, True, 1.0, torch.float32, {"a": None})), text_of(torch.relu), text_of(nn.ReLU()))
    (1, True, 1.0, torch.float32, {'a': None}) relu a ReLU
    """
    text = whole_text(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


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
    if isinstance(value, (Number, str, bytes)):
        text = str(value)
        return f"{kind.__name__}({text if text.isprintable() else repr(text)})"
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
    container = vars(container) if isinstance(container, RECORDS) else container
    if not isinstance(container, dict):
        return list(container)
    return [*container, *container.values()] if keys else list(container.values())


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is a number, a text, None or the like, or a container of nothing else."""
    if isinstance(value, CONTAINERS):
        return depth < DEEPEST and all(is_plain(item, depth + 1) for item in items_of(value))
    return type(value) in PLAIN or isinstance(value, (Enum, Number, str, bytes))


def held(owner: Any, name: str) -> Any:
    """What an owner has as its attribute: of the instance, or of its class. ABSENT if none, OTHER for a tensor and for what is computed."""
    table = getattr(owner, "__dict__", {})
    if name in table:
        return OTHER if isinstance(table[name], Tensor) else table[name]
    if isinstance(owner, nn.Module):
        if name in table[CHILDREN]:
            return table[CHILDREN][name]
        if any(name in table[kind] for kind in TENSORS):
            return OTHER
    of_class = inspect.getattr_static(type(owner), name, ABSENT)
    if hasattr(type(of_class), "__get__") and not isinstance(of_class, MemberDescriptorType):
        return OTHER
    try:
        value = getattr(owner, name)
    except AttributeError:
        return ABSENT
    return OTHER if isinstance(value, Tensor) else value


def guard_text(owner: Any, name: str) -> str | None:
    """The text of an owner's attribute, None for what is not guarded."""
    value = held(owner, name)
    return None if value is OTHER else ABSENT if value is ABSENT else text_of(value)


class Guards:
    """The guards of a plan on one module, which must keep its submodules, too. To look at all values takes longer than a small model's
    step, so one is looked at again only when it is another object.
    """

    def __init__(self, module: nn.Module, planned: Mapping[str, Sequence[str]]) -> None:
        self.module, self.planned = module, planned
        self.tables = [(path, vars(part)[CHILDREN]) for path, part in module.named_modules() if vars(part)[CHILDREN]]
        self.parts = self.parts_now()
        self.places: list[tuple[str, Callable[[str], Any], str]] = []  # path, where it is looked up, and its key there
        self.containers: list[Any] = []
        self.accepted: list[Any] | None = None

    def broken(self) -> PlanError | None:
        """The error about what is not as it was planned, None if all is."""
        if not identical(self.parts_now(), self.parts):
            return self.other_module()
        now, before, count = self.now(), self.accepted, len(self.places)
        if before is not None and identical(now, before):
            return None
        paths = None  # all, unless nothing has changed but numbers in plain sight
        if before is not None and identical(now[count:], before[count:]):
            other = [at for at in range(count) if now[at] is not before[at]]
            paths = [self.places[at][0] for at in other] if all(type(now[at]) in PLAIN for at in other) else None
        for path in self.planned if paths is None else paths:
            if (text := self.text(path)) not in self.planned[path]:
                return other_value(path, text, self.planned[path][0])
        if paths is None:
            self.places, self.containers = [], []
            for path in self.planned:
                self.place(path)
            now = self.now()
        self.accepted = now
        return None

    def parts_now(self) -> list[Any]:
        """All submodules, as often as they stand somewhere."""
        return [part for _, table in self.tables for part in table.values()]

    def now(self) -> list[Any]:
        """The objects on which the texts depend: those at the places, then what containers hold."""
        now = [get(key) for _, get, key in self.places]
        for container in self.containers:
            now += items_of(container, keys=True)
        return now

    def owner(self, path: str) -> tuple[Any, str]:
        """What has the attribute at the end of a path, None if nothing has, and its name."""
        *before, name = path.split(".")
        try:
            return reduce(step, before, self.module), name
        except (AttributeError, LookupError, ValueError):
            return None, name

    def text(self, path: str) -> str:
        """The text of what is now at a path."""
        owner, name = self.owner(path)
        return ABSENT if owner is None else guard_text(owner, name) or COMPUTED

    def place(self, path: str) -> None:
        """Remembers where the value at a path is looked up."""
        owner, name = self.owner(path)
        table, value = getattr(owner, "__dict__", None), held(owner, name)
        virtual = name not in (table or ()) and value is not ABSENT  # such as one of another name in the table
        if table is None or (virtual and not isinstance(owner, nn.Module)):
            self.places.append((path, lambda key: getattr(owner, key, None), name))
        elif not isinstance(owner, nn.Module):
            self.containers += [] if any(table is each for each in self.containers) else [table]
        elif not isinstance(value, nn.Module):
            self.places.append((path, table.get, name))
            if name not in table:
                self.places += [(path, table[CHILDREN].get, name), (path, partial(attribute_of, type(owner)), name)]
        self.containers += containers_in(value)

    def other_module(self) -> PlanError:
        """The error about a submodule that is another one."""
        again = Guards(self.module, {})
        names = [f"{path}.{name}".lstrip(".") for path, table in again.tables for name in table]
        name = next((name for name, one, other in zip(names, again.parts, self.parts) if one is not other), "a submodule")
        return PlanError(f"{name} is another module than before: a plan is for those that there were\n  Plan and parallelize anew.")


def attribute_of(kind: type, name: str) -> Any:
    """What a class has as an attribute, None if nothing."""
    return getattr(kind, name, None)


def step(owner: Any, name: str) -> Any:
    """What an owner has under a name in a path."""
    if isinstance(owner, dict):
        return owner[name] if name in owner else owner[int(name)]
    return owner[int(name)] if isinstance(owner, (list, tuple)) else getattr(owner, name)


def other_value(path: str, now: str, planned: str) -> PlanError:
    """The error about a value at a path."""
    return PlanError(
        f"{path} is {now}, and was {planned} when the model was planned: what a forward reads from attributes is constant in its plan\n"
        "  Plan anew; or once for each value, with pin=plan.parameters, and give the plans as parallelize(..., also=[...]).\n"
        "  What changes from step to step is a buffer or an argument."
    )


def identical(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def containers_in(value: Any) -> Iterator[Any]:
    """The containers that may change without becoming another object, in a value of which the text tells all."""
    left = [value] if isinstance(value, CONTAINERS) and is_small(value) else []
    while left:
        if isinstance(value := left.pop(), CONTAINERS):
            left += items_of(value)
            if not isinstance(value, (tuple, frozenset)):
                yield value
