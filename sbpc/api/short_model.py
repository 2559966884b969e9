"""Make a short copy of a model: of every list of equal blocks the first two, so that a search need not capture all
of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

KEPT = 2  # blocks of a list


def short_model(model: nn.Module) -> tuple[nn.Module, dict[str, int]]:
    """Returns a copy of the tree of modules with the first KEPT blocks of each list of equal ones, and by list how
    many there were.

    Parameters and hooks are shared with the model. Blocks are equal if they are of one class with parameters of
    equal names, shapes and dtypes. Lists inside of blocks stay as they are.
    """
    lengths = dict(lists_of(model, ""))
    return copied(model, "", lengths), lengths


def lists_of(module: nn.Module, path: str) -> Iterator[tuple[str, int]]:
    """Yields the path and the length of every list of more than KEPT equal blocks that is in no other one."""
    children = list(vars(module)["_modules"].items())
    kinds = {kind(child) for _, child in children}
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(kinds) == 1 and len(children) > KEPT:
        yield path, len(children)
        return
    for name, child in children:
        if child is not None:
            yield from lists_of(child, f"{path}.{name}".lstrip("."))


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
    kept = list(vars(module)["_modules"].items())[: KEPT if path in lengths else None]
    below = {
        name: None if child is None else copied(child, f"{path}.{name}".lstrip("."), lengths) for name, child in kept
    }
    new.__dict__["_modules"] = below if path not in lengths else dict(kept)
    return new
