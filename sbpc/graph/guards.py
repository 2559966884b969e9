"""What a plan takes for granted of a model besides its tensors: the numbers, texts and the like that its forward reads.

Such a value is a constant of the plan, and so is the code of the model's own forwards. A guard is the path of an
attribute, such as "drop.p" or "config.rope_theta", or of a global, such as "global train:CFG.beta", with the text of
the value that stood there when the model was captured; and of the one that the first forward leaves there, if
nothing depends on it. Paths as "the loss.label_smoothing" and "hook 0 of layers/1.scale" begin at what no parallel
module has: a plan knows it in the process that made it, not from a file.

Not seen are globals that the code of an installed package reads, or that are found by a computed name, or read by a
function that is neither named by the code that calls it nor kept where that reads it; and numbers inside objects of
the standard library and of extensions, but for containers and numpy arrays. Dicts are compared whole, and a
SimpleNamespace unless it is a global read as `NS.beta`.
"""

from __future__ import annotations

import inspect
import operator
import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sbpc._compat import CHILDREN, GLOBAL_HOOKS, HOOKS, TENSORS
from sbpc.errors import PlanError
from sbpc.graph.values import CALLS, CONTAINERS, LISTS, PLAIN, is_own, is_small, items_of, table_of, text_of

COMPUTED = "a tensor"  # or what is computed when it is read: what it is computed from is guarded
# in the meta of a captured graph, and among the options of a plan: by path, texts of values that may stand there
GUARDS = "guards"
GLOBAL, LOSS, HOOK = "global ", "the loss", "hook "  # what the paths of globals, of a loss and of hooks begin with
MODES = {
    f"torch.{name}()": getattr(torch, name)
    for name in ("is_grad_enabled", "is_inference_mode_enabled", "get_default_dtype")
}
CODE = re.compile(r"\(code ([\w-]+) [0-9a-f]+\)")  # in the text of a function: which Python compiled it
EVERY = "every module", torch.nn.modules.module
ABSENT, OTHER = "not there", object()
FORWARD = "_sbpc_forward"  # where a parallel module keeps the forward that was put on the instance and planned


class ChangedValue(PlanError):
    """A value that a plan takes for granted is another one: the model may be planned with it, too."""


class Planned(dict[str, list[str]]):
    """Guards as a process has them that made the plan. roots: what their paths begin with besides the module, by
    name."""

    def __init__(self, guards: Mapping[str, list[str]], roots: Mapping[str, Any]) -> None:
        super().__init__(guards)
        self.roots = dict(roots)

    def __deepcopy__(self, memo: Any) -> Planned:
        return Planned({path: [*texts] for path, texts in self.items()}, self.roots)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # in another process there are others


def hooks_of(path: str, module: Any) -> Iterator[tuple[str, Any]]:
    """The hooks of somebody's own that a call of a module runs besides its forward, by name; of EVERY those that all
    calls run."""
    hooks = [
        hook
        for kind in (*HOOKS, *GLOBAL_HOOKS)
        for hook in (vars(module).get(kind) or {}).values()
        if is_own_hook(hook)
    ]
    return ((f"{HOOK}{at} of {path.replace('.', '/') or 'the model'}", hook) for at, hook in enumerate(hooks))


def is_own_hook(hook: Any) -> bool:
    """Whether a hook is of somebody's own code, not of an installed package."""
    while isinstance(hook, (MethodType, partial)):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    return is_own(
        hook.__globals__ if isinstance(hook, FunctionType) else vars(sys.modules.get(type(hook).__module__, sys))
    )


def prefix_of(table: Mapping[str, Any]) -> str:
    """What the paths of a module's globals begin with. A file that is run has the name that it has when it is
    imported."""
    name, file = (
        str(getattr(table.get("__spec__"), "name", table.get("__name__"))),
        Path(table.get("__file__") or "__init__.py"),
    )
    return f"{GLOBAL}{name if '.' in name or file.stem == '__init__' else file.stem}:"


def globals_of(path: str) -> dict[str, Any] | None:
    """The globals of the module that a path of a global names, None if no such module has been imported."""
    prefix, colon, _ = path.partition(":")
    name = prefix.removeprefix(GLOBAL)
    found = (vars(sys.modules[each]) for each in (name, "__main__", f"target_{name}") if each in sys.modules)
    return next((table for table in found if prefix_of(table) == prefix + colon), None)


def held(owner: Any, name: str) -> Any:
    """What an owner has as its attribute: of the instance, or of its class. ABSENT if none, OTHER for a tensor and
    for what is computed. Of a dict, as that of globals, what is in it.
    """
    if isinstance(owner, type):
        value = inspect.getattr_static(owner, name, ABSENT)
        return OTHER if isinstance(value, Tensor) or hasattr(type(value), "__get__") else value
    table = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    if name == "__dict__":
        return table
    if name in table or table is owner:
        value = table.get(name, ABSENT)
        return OTHER if isinstance(value, Tensor) else value
    if isinstance(owner, nn.Module):
        if name in table[CHILDREN]:
            return table[CHILDREN][name]
        if any(name in table[kind] for kind in TENSORS):
            return OTHER
    of_class = attribute_of(type(owner), name, ABSENT)
    of_class = of_class.__func__ if isinstance(of_class, (staticmethod, classmethod)) else of_class
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
    """The guards of a plan on one module, which must keep its submodules, too. To look at all values takes longer
    than a small model's step, so one is looked at again only when it is another object. hooks: whether the module is
    to have the hooks that were planned.
    """

    def __init__(self, module: nn.Module, planned: Mapping[str, Sequence[str]], hooks: bool = False) -> None:
        self.module, self.roots = module, dict(getattr(planned, "roots", {}))
        if FORWARD in vars(module):
            self.roots["forward"] = vars(module)[FORWARD]
        if hooks:
            found = dict(each for path, part in (EVERY, *module.named_modules()) for each in hooks_of(path, part))
            self.roots |= {path: ABSENT for path in planned if path.startswith(HOOK) and "." not in path} | found
            planned = {**{name: [ABSENT] for name in found}, **planned}
        self.planned = {path: texts for path, texts in planned.items() if is_comparable(path, texts, self.roots)}
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
        return [part for _, table in self.tables for part in table.values()] + [
            table.get("forward") for table in self.own
        ]

    def now(self) -> list[Any]:
        """The objects on which the texts depend: those at the places, then what containers hold."""
        now = [get(key) for _, get, key in self.places]
        for container in self.containers:
            now += items_of(container, keys=True)
        return now

    def owner(self, path: str) -> tuple[Any, str]:
        """What has the attribute at the end of a path, None if nothing has, and its name."""
        first, _, rest = path.partition(":" if path.startswith(GLOBAL) else ".")
        root: Any = self.roots if first in self.roots else self.module
        if path.startswith(GLOBAL):
            root, path = self.roots.get(first, globals_of(path)), rest
        *before, name = path.split(".")
        try:
            return reduce(step, before, root), name
        except (AttributeError, LookupError, ValueError):
            return None, name

    def text(self, path: str) -> str:
        """The text of what is now at a path."""
        if path in MODES:
            return text_of(MODES[path]())
        owner, name = self.owner(path)
        return ABSENT if owner is None else guard_text(owner, name) or COMPUTED

    def place(self, path: str) -> None:
        """Remembers where the value at a path is looked up."""
        if path in MODES:
            self.places.append((path, lambda _: MODES[path](), path))
            return
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
        name = next(
            (name for name, one, other in zip(names, again.parts, self.parts) if one is not other), "a submodule"
        )
        kind = "function" if name in again.owners else "module"
        return PlanError(
            f"{name} is another {kind} than before: a plan is for those that there were\n  Plan and parallelize anew."
        )


def is_comparable(path: str, texts: Sequence[str], roots: Container[str]) -> bool:
    """Whether what stands at a path can be compared here: its beginning is there, the same Python compiled
    functions."""
    first = path.partition(":" if path.startswith(GLOBAL) else ".")[0]
    if first.startswith((GLOBAL, LOSS, HOOK)) and first not in roots and globals_of(path) is None:
        return False
    return {sys.implementation.cache_tag}.issuperset(CODE.findall(" ".join(texts)))


def attribute_of(kind: type, name: str, default: Any = None) -> Any:
    """What a class has under a name, besides what a parallel module has in its place."""
    found = (vars(each)[name] for each in kind.__mro__ if name in vars(each))
    return next(
        (value for value in found if not str(getattr(value, "__module__", "")).startswith("sbpc.runtime.")), default
    )


def step(owner: Any, name: str) -> Any:
    """What an owner has under a name in a path."""
    if name.startswith("["):  # a place, see `parts_of`
        return list(table_of(owner).values())[int(name[1:-1])]
    if isinstance(owner, MethodType) and name not in table_of(owner):  # of a class, whose functions are guarded
        owner = owner.__func__
    if isinstance(owner, (dict, *CALLS)):
        owner = table_of(owner)
        return owner[name] if name in owner else owner[int(name)]
    return owner[int(name)] if isinstance(owner, LISTS) else getattr(owner, name)


def other_value(path: str, now: str, planned: str) -> ChangedValue:
    """The error about a value at a path."""
    return ChangedValue(
        f"{path} is {now}, and was {planned} when the model was planned: what a forward reads besides tensors is "
        "constant in its plan\n"
        "  Plan anew; or once for each value, with pin=plan.parameters, and give the plans as parallelize(..., "
        "also=[...]), which also='auto' does.\n"
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
            if not isinstance(value, (tuple, frozenset, MethodType)) and (
                not isinstance(value, FunctionType) or table_of(value)
            ):
                yield value
