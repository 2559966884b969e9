"""Make a short copy of a model: of every run of equal blocks in a list the first two, so that a search need not capture
all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import nn

KEPT = 2  # blocks of a run


def short_model(model: nn.Module) -> tuple[nn.Module, dict[str, int]]:
    """Returns a copy of the tree of modules with the first KEPT blocks of each run of equal ones in a list, and by run
    how many there were.

    A run is called as its list, or as its first block where others stand before it: "layers.3" is that of the experts
    behind three dense blocks. Parameters and hooks are shared with the model. Blocks are equal if they are of one class
    with parameters of equal names, shapes and dtypes. Lists inside of blocks stay as they are.
    """
    lengths = dict(runs_of(model, ""))
    return copied(model, "", lengths), lengths


def runs_of(module: nn.Module, path: str) -> Iterator[tuple[str, int]]:
    """Yields the name and the length of every run of more than KEPT equal blocks of a list that is in no other such
    list."""
    if long := [run for run in equal_ones(module) if len(run) > KEPT]:
        yield from ((name_of(path, run[0]), len(run)) for run in long)
        return
    for name, child in vars(module)["_modules"].items():
        if child is not None:
            yield from runs_of(child, f"{path}.{name}".lstrip("."))


def equal_ones(module: nn.Module) -> list[list[str]]:
    """Returns the names of the blocks of a list by run of equal ones, in order; none where a module is no list."""
    blocks = vars(module)["_modules"].items() if isinstance(module, (nn.ModuleList, nn.Sequential)) else ()
    return [[name for name, _ in run] for _, run in itertools.groupby(blocks, lambda block: kind(block[1]))]


def name_of(path: str, first: str) -> str:
    """Returns what a run of blocks is called. path: of its list; first: the name of its first block there.

    >>> name_of("model.layers", "0"), name_of("model.layers", "3")
    ('model.layers', 'model.layers.3')
    """
    return path if first == "0" else f"{path}.{first}".lstrip(".")


def kind(module: nn.Module | None) -> object:
    """Returns what equal blocks have in common."""
    if module is None:
        return None
    return type(module), tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters())


def copied(module: nn.Module, path: str, lengths: dict[str, int]) -> nn.Module:
    """Copies the tree of modules down to the lists."""
    new = module.__class__.__new__(module.__class__)  # parametrized modules refuse copy.copy
    for key, value in vars(module).items():
        new.__dict__[key] = dict(value) if type(value) is dict else value
    runs = [(run, KEPT if name_of(path, run[0]) in lengths else len(run)) for run in equal_ones(module)]
    kept = {name for run, count in runs for name in run[:count]}
    whole = all(len(run) == count for run, count in runs)  # no list, or one without such runs
    new.__dict__["_modules"] = {
        name: child if child is None or not whole else copied(child, f"{path}.{name}".lstrip("."), lengths)
        for name, child in vars(module)["_modules"].items()
        if whole or name in kept
    }
    return new
