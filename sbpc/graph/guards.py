"""What a plan takes for granted of a model besides its tensors: the numbers, texts and the like that its forward reads.

Such a value is a constant of the plan, and so is the code of the model's own forwards. A guard is the path of an attribute, such as
"drop.p" or "config.rope_theta", or of a global, such as "global train:CFG.beta", with the text of the value that stood there when the
model was captured; and of the one that the first forward leaves there, if nothing depends on it.

Not seen are globals that the code of an installed package reads, or that are found by a computed name, or read by a function that
is neither named by the code that calls it nor kept where that reads it, such as the method of an object; attributes of a loss, as
no parallel module has it; what hooks read; attributes of functions; and numbers inside objects of the standard library and of
extensions, but for containers and numpy arrays.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import operator
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial, reduce
from numbers import Number
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sbpc._compat import CHILDREN, TENSORS
from sbpc.errors import PlanError

COMPUTED = "a tensor"  # or what is computed when it is read: what it is computed from is guarded
GUARDS = "guards"  # in the meta of a captured graph, and among the options of a plan: by path, texts of values that may stand there
GLOBAL = "global "  # what the path of a global begins with
CODE = re.compile(r"\(code ([\w-]+) [0-9a-f]+\)")  # in the text of a function: which Python compiled it
PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.layout, torch.memory_format, torch.Size)
RECORDS = (SimpleNamespace, argparse.Namespace)  # objects whose reads cannot be watched, or that are little else than a dict
LISTS = (list, tuple, deque)
CONTAINERS = (*LISTS, dict, set, frozenset, np.ndarray, FunctionType, *RECORDS)  # a function holds what its free variables are
BRACKETS: dict[type, tuple[str, str]] = {tuple: ("(", ")"), list: ("[", "]"), dict: ("{", "}")}
MOST, DEEPEST, LONGEST = 100_000, 4, 160  # entries of a container that are compared, levels that are looked at; characters of a text
ABSENT, OTHER = "not there", object()


def text_of(value: Any) -> str:
    """Type and value of what is plain as a text, and of anything else what kind of thing it is: two values are alike if their texts are.

    >>> print(text_of((1, True, 1.0, torch.float32, {"a": None})), text_of(torch.relu), text_of(nn.ReLU()))
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
        return f"(code {sys.implementation.cache_tag} {digest(text_of((value.co_code, value.co_names, value.co_consts)).encode())})"
    if isinstance(value, FunctionType):
        own = is_own(value.__globals__)
        what = f"{value.__name__} {text_of(value.__code__)}" if own else value.__name__
        free = {**table_of(value), **({"defaults": value.__defaults__} if own and value.__defaults__ else {})}
        return f"{what} with {text_of(free)}" if free and is_small(free) else what
    if isinstance(value, np.ndarray):
        few = value.size <= 100 or value.dtype.hasobject
        return f"{kind.__name__}({text_of(value.tolist()) if few else digest(value.tobytes())}, {value.shape}, {value.dtype})"
    if isinstance(value, (Number, str, bytes, np.generic)):
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
    if isinstance(container, np.ndarray):  # the same object for the same numbers, while somebody holds it
        return [sys.intern(container.tobytes().decode("latin1"))]
    container = table_of(container)
    if not isinstance(container, dict):
        return list(container)
    return [*container, *container.values()] if keys else list(container.values())


def table_of(container: Any) -> Any:
    """A container; of a record the dict of its attributes, of a function that of its free variables."""
    if isinstance(container, FunctionType):
        cells = zip(container.__code__.co_freevars, container.__closure__ or ())
        return {name: cell.cell_contents for name, cell in cells if is_full(cell) and cell.cell_contents is not container}
    return vars(container) if isinstance(container, RECORDS) else container


def is_full(cell: Any) -> bool:
    """Whether a free variable has a value, other than the class that `super` needs."""
    try:
        return not isinstance(cell.cell_contents, (type, ModuleType))
    except ValueError:
        return False


def is_foreign(module: Any) -> bool:
    """Whether a module of this name is neither Python's nor torch's nor sbpc's."""
    return isinstance(module, str) and module.partition(".")[0] not in sys.stdlib_module_names | {"torch", "sbpc", "numpy"}


def is_own(table: Mapping[str, Any]) -> bool:
    """Whether these are the globals of a module of somebody's own, not of an installed package."""
    return is_foreign(table.get("__name__")) and "-packages" not in (table.get("__file__") or "")


def prefix_of(table: Mapping[str, Any]) -> str:
    """What the paths of a module's globals begin with. A file that is run has the name that it has when it is imported."""
    name, file = str(getattr(table.get("__spec__"), "name", table.get("__name__"))), Path(table.get("__file__") or "__init__.py")
    return f"{GLOBAL}{name if '.' in name or file.stem == '__init__' else file.stem}:"


def globals_of(path: str) -> dict[str, Any] | None:
    """The globals of the module that a path of a global names, None if no such module has been imported."""
    prefix, colon, _ = path.partition(":")
    name = prefix.removeprefix(GLOBAL)
    found = (vars(sys.modules[each]) for each in (name, "__main__", f"target_{name}") if each in sys.modules)
    return next((table for table in found if prefix_of(table) == prefix + colon), None)


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is a number, a text, None or the like, or a container of nothing else."""
    if isinstance(value, CONTAINERS):
        return depth < DEEPEST and all(is_plain(item, depth + 1) for item in items_of(value))
    return type(value) in PLAIN or isinstance(value, (Enum, Number, str, bytes, np.generic))


def held(owner: Any, name: str) -> Any:
    """What an owner has as its attribute: of the instance, or of its class. ABSENT if none, OTHER for a tensor and for what is computed.
    Of a dict, as that of globals, what is in it.
    """
    if isinstance(owner, type):
        value = inspect.getattr_static(owner, name, ABSENT)
        return OTHER if isinstance(value, Tensor) or hasattr(type(value), "__get__") else value
    table = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    if name in table or table is owner:
        value = table.get(name, ABSENT)
        return OTHER if isinstance(value, Tensor) else value
    if isinstance(owner, nn.Module):
        if name in table[CHILDREN]:
            return table[CHILDREN][name]
        if any(name in table[kind] for kind in TENSORS):
            return OTHER
    of_class = attribute_of(type(owner), name, ABSENT)
    if isinstance(of_class, FunctionType) and is_own(of_class.__globals__):
        return of_class
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
        self.module, self.planned = module, {path: texts for path, texts in planned.items() if is_comparable(path, texts)}
        self.tables = [(path, vars(part)[CHILDREN]) for path, part in module.named_modules() if vars(part)[CHILDREN]]
        self.owners = {f"{path}.forward".lstrip("."): vars(part) for path, part in module.named_modules()}
        self.own = list(self.owners.values())
        for path, table in self.owners.items():
            if "forward" in table and path not in planned:
                self.planned[path] = ["that of its class"]
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
        """All submodules, as often as they stand somewhere, and what each has as a forward of its own."""
        return [part for _, table in self.tables for part in table.values()] + [table.get("forward") for table in self.own]

    def now(self) -> list[Any]:
        """The objects on which the texts depend: those at the places, then what containers hold."""
        now = [get(key) for _, get, key in self.places]
        for container in self.containers:
            now += items_of(container, keys=True)
        return now

    def owner(self, path: str) -> tuple[Any, str]:
        """What has the attribute at the end of a path, None if nothing has, and its name."""
        table = globals_of(path) if path.startswith(GLOBAL) else None
        *before, name = (path if table is None else path.partition(":")[2]).split(".")
        try:
            return reduce(step, before, self.module if table is None else table), name
        except (AttributeError, LookupError, ValueError):
            return None, name

    def text(self, path: str) -> str:
        """The text of what is now at a path."""
        owner, name = self.owner(path)
        return ABSENT if owner is None else guard_text(owner, name) or COMPUTED

    def place(self, path: str) -> None:
        """Remembers where the value at a path is looked up."""
        owner, name = self.owner(path)
        table, value = owner if isinstance(owner, dict) else getattr(owner, "__dict__", None), held(owner, name)
        virtual = name not in (table or ()) and value is not ABSENT  # such as one of another name in the table
        if isinstance(owner, type) or (virtual and isinstance(value, FunctionType)):
            self.places.append((path, partial(attribute_of, owner if isinstance(owner, type) else type(owner)), name))
        elif isinstance(owner, (dict, ModuleType)):
            self.places.append((path, vars(owner).get if isinstance(owner, ModuleType) else owner.get, name))
        elif table is None or (virtual and not isinstance(owner, nn.Module)):
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
        names += again.owners
        name = next((name for name, one, other in zip(names, again.parts, self.parts) if one is not other), "a submodule")
        kind = "function" if name in again.owners else "module"
        return PlanError(f"{name} is another {kind} than before: a plan is for those that there were\n  Plan and parallelize anew.")


def is_comparable(path: str, texts: Sequence[str]) -> bool:
    """Whether what stands at a path can be compared here: the module of a global has been imported, the same Python compiled functions."""
    if path.startswith(GLOBAL) and globals_of(path) is None:
        return False
    return {sys.implementation.cache_tag}.issuperset(CODE.findall(" ".join(texts)))


def attribute_of(kind: type, name: str, default: Any = None) -> Any:
    """What a class has under a name, besides what a parallel module has in its place."""
    found = (vars(each)[name] for each in kind.__mro__ if name in vars(each))
    return next((value for value in found if not str(getattr(value, "__module__", "")).startswith("sbpc.runtime.")), default)


def step(owner: Any, name: str) -> Any:
    """What an owner has under a name in a path."""
    if name.startswith("["):  # a place, see `parts_of`
        return list(table_of(owner).values())[int(name[1:-1])]
    if isinstance(owner, (dict, FunctionType)):
        owner = table_of(owner)
        return owner[name] if name in owner else owner[int(name)]
    return owner[int(name)] if isinstance(owner, LISTS) else getattr(owner, name)


def other_value(path: str, now: str, planned: str) -> PlanError:
    """The error about a value at a path."""
    return PlanError(
        f"{path} is {now}, and was {planned} when the model was planned: what a forward reads besides tensors is constant in its plan\n"
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
            if not isinstance(value, (tuple, frozenset)) and (not isinstance(value, FunctionType) or table_of(value)):
                yield value
