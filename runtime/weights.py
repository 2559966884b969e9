"""Weights as a safetensors file, the form for strangers' files: names and numbers, no code, on one device or on many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sbpc.errors import PlanError


def save_tensors(tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Write whole tensors by name; the file is moved into place, so that a reader never sees half of it."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    owned = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        save_file(owned, part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise PlanError(f"{path} cannot be written: {error}\n  Name a file in a folder that exists.") from error


def read_tensors(path: str | Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or those of some names. Raises PlanError if it is none, or lacks one."""
    try:
        with safe_open(path, framework="pt") as file:
            there = list(file.keys())
            wanted = there if names is None else list(names)
            missing = [name for name in wanted if name not in there]
            if missing:
                raise PlanError(f"{path} lacks {', '.join(missing[:3])}\n  It holds {', '.join(there[:5])}.")
            return {name: file.get_tensor(name) for name in wanted}
    except (OSError, SafetensorError) as error:
        raise PlanError(f"{path} holds no tensors: {error}\n  Name a safetensors file.") from error


def reader(path: str | Path, wanted: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """What reads one tensor of a safetensors file at a time. Raises PlanError if one is absent or not like that wanted."""
    names = list(wanted)
    try:
        with safe_open(path, framework="pt") as file:
            there = set(file.keys())
            missing = [name for name in names if name not in there]
            shapes = {name: list(file.get_slice(name).get_shape()) for name in names if name in there}
    except (OSError, SafetensorError) as error:
        raise PlanError(f"{path} holds no tensors: {error}\n  Name a safetensors file.") from error
    if missing:
        raise PlanError(f"{path} lacks {', '.join(missing[:3])}\n  Give the weights of the model that was exported.")
    for name in names:
        if shapes[name] != list(wanted[name].shape):
            raise PlanError(
                f"{name} is {shapes[name]} in {path}, and {list(wanted[name].shape)} in the programs\n"
                "  Give the weights of the model that was exported."
            )

    def read(name: str) -> Tensor:
        found = read_tensors(path, [name])[name]
        if found.dtype != wanted[name].dtype:
            raise PlanError(f"{name} is {found.dtype} in {path}, not {wanted[name].dtype}\n  Give it in that type.")
        return found

    return read


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name, tied ones once, also what `state_dict` leaves out."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def tree(tensors: Mapping[str, Any], tied: Mapping[str, str], parameters: Iterable[str], frozen: Iterable[str]) -> nn.Module:
    """A module of plain modules that holds tensors under qualified names; those of `parameters` as parameters."""
    root = nn.Module()
    trained, fixed = set(parameters), set(frozen)
    made = {
        name: nn.Parameter(tensor, name not in fixed) if name in trained else tensor for name, tensor in tensors.items()
    }
    for name, first in [*((name, name) for name in made), *tied.items()]:
        *path, leaf = name.split(".")
        parent = root
        for part in path:
            if part not in dict(parent.named_children()):
                parent.register_module(part, nn.Module())
            parent = parent.get_submodule(part)
        (parent.register_parameter if first in trained else parent.register_buffer)(leaf, made[first])
    return root
