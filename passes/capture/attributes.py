"""Watches the attributes of a model while its forward runs, and the globals that its code names: which are read,
which change.

A program computes with the values that were read, and writes buffers alone: what is read becomes a guard of the
plan, and a number that the forward changes, or a tensor that it keeps, is refused. All are put back afterwards.
"""

from __future__ import annotations

import builtins
import io
import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from types import BuiltinMethodType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from sbpc._compat import CHILDREN, TENSORS
from sbpc.errors import CaptureError
from sbpc.graph.guards import ABSENT, EVERY, MODES, containers_in, globals_of, guard_text, held, hooks_of, prefix_of
from sbpc.graph.values import CONTAINERS, RECORDS, is_foreign, is_own, is_plain, is_small, items_of, table_of, text_of
from sbpc.passes.capture.code_reads import chains, function_in, line_of, names_in
from sbpc.passes.capture.contents import (
    GENERATORS,
    First,
    copied,
    is_object,
    parts_of,
    put_back,
    raw,
    refill,
    same,
    state_of,
    tensors_in,
)
from sbpc.passes.capture.source_lines import SBPC, TORCH, user_error, user_stack

INTERNAL = frozenset(vars(nn.Module()))  # what torch keeps on every module; modes are checked apart
TORCH_OWN = (nn.Module.__call__.__code__.co_filename, SBPC)  # reads of code in these files are not the model's
HOOKS = sorted(name for name in INTERNAL if "_hooks" in name)  # the tables of a module's hooks
BY_IDENTITY: Any = object.__hash__
IN_SET = "Keep them in a list or a dict by name, so that what they hold can be found again."
DRAWN = "Draw them by torch, such as torch.rand(()), or outside of the forward and pass them as arguments."
KEPT = (
    "Return it from the forward, or reset the attribute before the forward ends; make a constant in __init__, by "
    "register_buffer."
)
CHANGING = (list, deque, dict, set, np.ndarray, FunctionType, *RECORDS)


class Attributes:
    """The attributes of some modules, and of the plain objects and containers in them, while a forward runs.

    guards: by path, the text of every value that was read before it was written. before: by id of an owner, its
    attributes. contents: by id of a container, its path, itself, what it held, and the id of the attribute's value
    in which it is. first: what the forward has set that was None or not there: path, table of attributes, name,
    value and lines. lines: of the last write, by id of the owner and name, and of the last read before it changed,
    by id of the container; None for code of torch. outside: by path, what is looked up in globals, modules and
    classes: where, under which name, and what stood there. functions: those that may run. roots: by name, what paths
    begin with besides the module: a loss, hooks, and the globals of modules that are not among those imported.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.guards: dict[str, str] = {}
        self.seen: set[tuple[int, str]] = set()
        self.owners: dict[int, tuple[str, Any]] = {}  # with what stands before the names of its attributes in a path
        self.before: dict[int, dict[str, Any]] = {}
        self.tables: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = []
        self.hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self.contents: dict[int, tuple[str, Any, Any, int]] = {}
        self.first: list[First] = []
        self.lines: dict[Any, str | None] = {}
        self.outside: dict[str, tuple[Any, str, Any]] = {}
        self.functions: dict[FunctionType, None] = {}
        self.roots: dict[str, Any] = {}
        self.generators: dict[int, tuple[str, Any, str]] = {}  # of random numbers, and where they stood
        self.keep("random", getattr(random.random, "__self__"))  # noqa: B009
        self.keep("numpy.random", getattr(np.random.rand, "__self__"))  # noqa: B009
        # functions that remember what they gave, and how often they were run
        self.caches: dict[int, tuple[Any, int]] = {}
        self.waiting = deque[tuple[Any, FunctionType]]()  # to be visited; the first one is
        self.classes, self.reading = ExitStack(), False
        self.watched: set[type] = set()
        for path, part in modules:
            if id(part) not in self.owners:
                self.adopt_owner(path, part)
        for name, hook in hooks_of(*EVERY):
            self.begin(name, hook)
        for prefix, owner in [*self.owners.values()]:
            if isinstance(owner, nn.Module):
                self.read_module(prefix[:-1], owner)

    def read_module(self, path: str, module: nn.Module) -> None:
        """Notes that the model calls a module: its forward, and its hooks."""
        self.read(module, "forward")
        for name, hook in hooks_of(path, module):
            self.begin(name, hook)

    def begin(self, name: str, value: Any) -> None:
        """Guards what paths begin with besides the module."""
        self.roots[name] = value
        self.follow(self.roots, "", [name], frozenset())
        self.guards[name] = text_of(value)

    def adopt_owner(self, path: str, owner: Any) -> None:
        """Watches the attributes of a module or of an object at a path."""
        prefix, attributes = path and f"{path}.", dict(getattr(owner, "__dict__", {}))
        self.owners[id(owner)], self.before[id(owner)] = (prefix, owner), attributes
        if isinstance(owner, nn.Module):
            self.tables += [(path, table, attributes[table], dict(attributes[table])) for table in (*TENSORS, CHILDREN)]
            # a forward may put hooks on modules, and note that it has, which is put back
            self.hooks += [(attributes[name], dict(attributes[name])) for name in HOOKS if name in attributes]
        else:
            self.visit_class(type(owner))
        kind = type(owner)
        if isinstance(owner, nn.Module):  # for all of them at once, but for classes that look attributes up themselves
            kind = next(each for each in kind.__mro__ if each is nn.Module or "__getattribute__" in vars(each))
        if kind not in self.watched:
            self.watched.add(kind)
            self.classes.enter_context(watched(kind, self))
        for name, value in attributes.items():
            if name not in INTERNAL:
                self.keep(prefix + name, value)

    def keep(self, path: str, value: Any) -> None:
        """Remembers what is in the containers in a value."""
        for each in (value, *containers_in(value)):
            if isinstance(each, CHANGING):
                self.contents.setdefault(id(each), (path, each, copied(each), id(value)))
            elif isinstance(each, GENERATORS):
                self.generators.setdefault(id(each), (path, each, state_of(each)))

    def adopt(self, path: str, value: Any, used: Set[str] = frozenset()) -> None:
        """Watches the objects in a value that has been read. used: names in the code of what may read it."""
        self.keep(path, value)
        self.visit(value)
        if isinstance(value, CONTAINERS) and is_small(value):
            used = names_in(function.__code__) if (function := function_in(value)) else used
            for key, item in parts_of(value):
                self.adopt(f"{path}.{key}", item, used)
            self.refuse_hidden(path, value)
        elif isinstance(value, (type, ModuleType)):
            if is_foreign(getattr(value, "__module__", value.__name__)):
                self.fields(value, f"{path}.", used)
        elif isinstance(value, nn.Module):
            parts = [(name, part) for name, part in value.named_modules(prefix=path) if id(part) not in self.owners]
            for name, part in parts:
                self.adopt_owner(name, part)
            for name, part in parts:
                self.read_module(name, part)
        elif id(value) not in self.owners and is_object(value):
            self.adopt_owner(path, value)
        elif isinstance(value, BuiltinMethodType):  # such as `random.Random().random`
            self.keep(path, value.__self__)

    def refuse_hidden(self, path: str, container: Any) -> None:
        """Raises CaptureError for objects that can only be found by running through a set, or through the keys of a
        dict."""
        for each in container if isinstance(container, (set, frozenset, dict)) else ():
            hidden = isinstance(each, nn.Module) or is_object(each)
            if hidden and id(each) not in self.owners and type(each).__hash__ is BY_IDENTITY:
                what = f"the forward reads {path!r}, a {type(container).__name__} of objects"
                raise user_error(what, user_stack(), IN_SET)

    def visit_class(self, kind: type) -> None:
        """Guards the globals that the methods of a class of somebody's own name."""
        for each in [each for each in kind.__mro__ if is_foreign(each.__module__)]:
            for method in vars(each).values():
                self.visit(method)

    def visit(self, value: Any) -> None:
        """Guards the globals that a function names, and those of the functions that these are."""
        function = function_in(value)
        if hasattr(value, "cache_info"):
            self.caches.setdefault(id(value), (value, value.cache_info().misses))
        if function is None or function in self.functions:
            return
        self.functions[function] = None
        self.waiting.append((value, function))
        if len(self.waiting) == 1:  # else further down the stack, which a long chain of functions would fill
            while self.waiting:
                self.visit_globals(*self.waiting[0])
                self.waiting.popleft()

    def visit_globals(self, value: Any, function: FunctionType) -> None:
        """Guards the globals that a function names."""
        for item in items_of(function):  # such as what a decorator decorates
            self.visit(item)
        table, used = function.__globals__, names_in(function.__code__)
        if not is_own(table):
            return
        modes = [path for path in MODES if path.removeprefix("torch.").removesuffix("()") in used]
        self.guards |= {path: text_of(MODES[path]()) for path in modes}
        for names in chains(function.__code__):
            self.follow(table, self.prefix(table), names, used)
        if isinstance(value, classmethod) or used & {"type", "__class__"}:
            for kind, path in {type(owner): path for path, owner in reversed(self.owners.values())}.items():
                self.fields(kind, f"{path}__class__.", used)

    def prefix(self, table: dict[str, Any]) -> str:
        """What the paths of globals begin with."""
        if globals_of(prefix := prefix_of(table)) is not table:
            self.roots[prefix[:-1]] = table
        return prefix

    def fields(self, owner: Any, path: str, names: Set[str]) -> None:
        """Guards what a class or a module has under some names, of which a forward may read any."""
        classes = [kind for kind in getattr(owner, "__mro__", ()) if is_foreign(kind.__module__)]
        owner = vars(owner) if isinstance(owner, ModuleType) else owner
        tables = [owner] if isinstance(owner, dict) else map(vars, classes)
        for name in sorted({name for table in tables for name in table if not name.startswith("__")} & set(names)):
            self.follow(owner, path, [name], frozenset())

    def follow(self, owner: Any, path: str, names: Sequence[str], used: Set[str]) -> None:
        """Guards what globals or a class have under the first of some names, or what that has under the next one.

        used: the names of attributes of a class that may be read if there is no next one.
        """
        name, *rest = names
        value = raw(owner, name)
        if isinstance(value, ModuleType) and is_foreign(value.__name__):
            if rest:
                self.follow(vars(value), self.prefix(vars(value)), rest, used)
        elif isinstance(value, type) and is_foreign(value.__module__):
            if not issubclass(value, nn.Module):  # whose methods are those of some module
                self.visit_class(value)
            self.follow(value, f"{path}{name}.", rest, used) if rest else self.fields(value, f"{path}{name}.", used)
        elif isinstance(value, RECORDS) and rest:
            self.follow(value, f"{path}{name}.", rest, used)
        elif isinstance(owner, type) and hasattr(type(value), "__get__"):
            self.visit(value)
        elif f"{path}{name}" not in self.outside:
            refuse_iterator(f"{path}{name}", value)
            self.outside[f"{path}{name}"] = owner, name, value
            if value is ABSENT:
                self.guards |= {} if hasattr(builtins, name) else {f"{path}{name}": ABSENT}
            elif is_plain(value) or isinstance(value, (*CONTAINERS, nn.Module)) or is_object(value):
                self.guards[f"{path}{name}"] = text_of(value)
                self.adopt(f"{path}{name}", value)
            else:
                self.adopt(f"{path}{name}", value)

    def read(self, owner: Any, name: str, code: CodeType | None = None) -> None:
        """Notes that the model reads an attribute. code: of what reads it."""
        if name == "__dict__":
            found = [each for each in vars(owner) if each not in INTERNAL]
            for each in [each for each in found if code and each in names_in(code)] or found:
                self.read(owner, each, code)
            if isinstance(owner, Namespace):  # it may ask whether something is in it
                self.guards[f"{self.owners[id(owner)][0]}__dict__"] = text_of(vars(owner))
            return
        value, key = getattr(owner, "__dict__", {}).get(name), (id(owner), name)
        if id(value) in self.contents and same(self.contents[id(value)][2], value):
            self.lines[id(value)] = user_stack()
        if key in self.seen or key in self.lines:
            return
        self.seen.add(key)
        text, path = guard_text(owner, name), self.owners[id(owner)][0] + name
        for kind in type(owner).__mro__:
            self.visit(vars(kind).get(name))
        if text is not None and "." not in name:
            value = held(owner, name)
            refuse_iterator(path, value)
            self.guards[path] = text
            self.adopt(path, value, names_in(code) if code else frozenset())

    def check(self, own: Iterable[Tensor]) -> None:
        """Raises CaptureError if a number is other than it was, or if there is a tensor that was not. own:
        parameters and buffers."""
        fine = set(map(id, own))
        for key, (prefix, owner) in self.owners.items():
            before, now = self.before[key], getattr(owner, "__dict__", {})
            for name in [name for name in {**before, **now} if name not in INTERNAL or name == "training"]:
                old, new, lines = before.get(name, ABSENT), now.get(name, ABSENT), self.lines.get((key, name), "")
                if old is new:
                    continue
                # A number that was not read before it was written made no difference.
                read = name == "training" or new is ABSENT or (key, name) in self.seen
                if lines is not None and compare(prefix + name, old, new, lines, fine, read):
                    self.first.append((prefix + name, now, name, new, lines))
        for path, (owner, name, old) in self.outside.items():
            if (new := raw(owner, name)) is not old:
                lines = line_of(self.functions, name)
                if compare(path, old, new, lines, fine) and isinstance(owner, dict):
                    self.first.append((path, owner, name, new, lines))
        for path, value, old, read in self.contents.values():
            if not same(old, value):
                free = old if isinstance(value, FunctionType) else ()
                lines = self.lines.get(read) or line_of(self.functions, *free, path.partition(":")[2].partition(".")[0])
                if isinstance(value, dict) and all(value.get(key, ABSENT) is item for key, item in old.items()):
                    for key, item in value.items():
                        if key not in old and compare(path, ABSENT, item, lines, fine):
                            self.first.append((path, value, key, item, lines))
                else:
                    compare(path, old, table_of(value), lines, fine)
        for now, before in self.hooks:
            self.first += [("hooks", now, key, hook, "") for key, hook in now.items() if key not in before]
        for path, value, old in self.generators.values():
            if state_of(value) != old:
                what = f"the forward draws random numbers by {path!r}, a {type(value).__name__}"
                lines = line_of(self.functions, *path.replace(":", ".").split("."))
                raise user_error(f"{what}, and its program would have the same ones in every step", lines, DRAWN)
        for path, table, now, before in self.tables:
            for name in {**before, **now}:
                old, new = before.get(name), now.get(name)
                if (old is None) != (new is None) or (table == CHILDREN and old is not new):
                    what = f"the forward makes, replaces or deletes {f'{path}.{name}'.lstrip('.')!r}"
                    todo = "Make it in __init__: a program has the modules, parameters and buffers that there are."
                    raise CaptureError(f"{what}\n  {todo}")

    def restore(self) -> None:
        """Puts all back as it was: a forward may keep fake tensors or count its calls."""
        self.classes.close()
        for key, (_, owner) in self.owners.items():
            if hasattr(owner, "__dict__") and not same(self.before[key], vars(owner)):
                refill(vars(owner), self.before[key])
        for now, before in [*(each[2:] for each in self.tables), *self.hooks]:
            refill(now, before)
        for owner, name, old in self.outside.values():
            if raw(owner, name) is not old:
                put_back(owner, name, old)
        for _, value, old, _ in self.contents.values():
            if not same(old, value):
                refill(value, old)
        for value, misses in self.caches.values():
            if value.cache_info().misses != misses:
                value.cache_clear()  # it may hold fake tensors


def compare(path: str, old: Any, new: Any, lines: str, own: Container[int], read: bool = True) -> bool:
    """Raises CaptureError if a value at a path holds tensors that it did not hold, or is another number. own: ids of
    weights.

    read: whether the forward has read it as it was. Returns whether it is a number where none was, that has been read.
    """
    had = {id(tensor) for tensor in tensors_in(old)}
    kept = [tensor for tensor in tensors_in(new) if id(tensor) not in had and id(tensor) not in own]
    if kept:
        what = f"the forward keeps a tensor {list(kept[0].shape)} as {path!r}, where no program puts one"
        raise user_error(what, lines, KEPT)
    before, now = (ABSENT if value is ABSENT else text_of(value) for value in (old, new))
    if before == now or not read:
        return False
    number = is_plain(new) or (is_plain(old) and not isinstance(old, CONTAINERS))
    if number and old is not ABSENT and old is not None:
        what = f"the forward changes {path!r} from {before} to {now}"
        todo = "Keep it in a buffer, pass it as an argument, or change it outside of the forward."
        todo += " If it stays as the first call leaves it, run the model once before."
        raise user_error(f"{what}, and a program always computes as if it were {before}", lines, todo)
    return is_plain(new) and new is not None and new is not ABSENT


def refuse_iterator(path: str, value: Any) -> None:
    """Raises CaptureError for an iterator, of which a program would have the same item for ever."""
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase) and not is_object(value):
        what = f"the forward reads {path!r}, a {type(value).__name__}"
        todo = "Take the item outside of the forward, and pass it as an argument."
        raise user_error(f"{what}, and its program would have the same item in every step", user_stack(), todo)


@contextmanager
def watched(kind: type, attributes: Attributes) -> Iterator[None]:
    """Has the instances of a class that `attributes` knows tell of reads and writes, while this lasts."""
    get: Any = kind.__getattribute__
    put: Any = kind.__setattr__
    own = {name: vars(kind).get(name) for name in ("__getattribute__", "__setattr__")}
    known = attributes.owners

    def read(self: Any, name: str) -> Any:
        ours = id(self) in known and name not in INTERNAL and (name == "__dict__" or not name.startswith("__"))
        if ours and not attributes.reading and not (code := sys._getframe(1).f_code).co_filename.startswith(TORCH_OWN):
            attributes.reading = True  # a class may look up one attribute by another
            try:
                attributes.read(self, name, code)
            finally:
                attributes.reading = False
        return get(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        if id(self) in known and (name not in INTERNAL or name == "training"):
            by_torch = name != "training" and sys._getframe(1).f_code.co_filename.startswith(TORCH)
            attributes.lines[id(self), name] = None if by_torch else user_stack()
        put(self, name, value)

    type.__setattr__(kind, "__getattribute__", read)  # whatever its metaclass does
    type.__setattr__(kind, "__setattr__", write)
    try:
        yield
    finally:
        for name, method in own.items():
            if method is None:
                type.__delattr__(kind, name)
            else:
                type.__setattr__(kind, name, method)
