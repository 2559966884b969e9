"""Weights as a safetensors file, the form for strangers' files: names and numbers, no code, on one device or on many.

A file that sbpc writes says the SHA-256 of each of its tensors, with name, dtype and shape, in its metadata: whatever is
read is held to that. It tells of damage and of mix-ups; who changes a file on purpose can write other digests. A
stranger's file says none, and is read as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sbpc._compat import left_out_of
from sbpc.errors import PlanError

RECORD, SEAL = "sbpc", "sbpc.sha256"
"""Keys of the metadata: what sbpc says of the tensors, as JSON; the digest of that text."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a model by first name.

    tied: every further name of one -> its first. left_out: names that `state_dict` leaves out (buffers that are not
    persistent).
    """

    tensors: dict[str, Tensor]
    tied: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Tensor]:
        """What `state_dict` of the model on one device gives: tied tensors under all their names, one tensor."""
        found = self.tensors | {name: self.tensors[first] for name, first in self.tied.items()}
        return {name: tensor for name, tensor in found.items() if name not in self.left_out}


def weights_of(model: nn.Module) -> Weights:
    """The parameters and buffers of a module, also what `state_dict` leaves out."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) == name:
                tensors[name] = tensor
            else:
                tied[name] = first[id(tensor)]
    return Weights(tensors, tied, left_out_of(model))


def save_weights(weights: Weights, path: str | Path) -> None:
    """Write whole tensors, tied ones once; the file is moved into place, so that a reader never sees half of it."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    owned = {name: plain(tensor) for name, tensor in weights.tensors.items()}
    digests = {name: digest(name, tensor) for name, tensor in owned.items()}
    text = json.dumps({"sha256": digests, "tied": weights.tied, "left_out": weights.left_out})
    try:
        save_file(owned, part, {"format": "pt", RECORD: text, SEAL: sealed(text)})
        part.replace(path)
    except KeyError as error:
        raise PlanError(
            f"{path} cannot be written: safetensors has no {error}\n  Keep such tensors in a checkpoint: sbpc run --checkpoint."
        ) from error
    except (OSError, SafetensorError) as error:
        raise PlanError(f"{path} cannot be written: {error}\n  Name a file in a folder that exists.") from error


def save_tensors(tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Write whole tensors by name."""
    save_weights(Weights(dict(tensors)), path)


def plain(tensor: Tensor) -> Tensor:
    """A copy of a tensor whose memory holds its numbers in order."""
    return tensor.detach().cpu().contiguous().clone()


def digest(name: str, tensor: Tensor) -> str:
    """The SHA-256 of a contiguous tensor on the CPU, with its name, dtype and shape."""
    found = hashlib.sha256(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
    found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def sealed(text: str) -> str:
    """The SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class TensorFile:
    """An open safetensors file. digests: by name, none in a stranger's. tied, left_out: as in `Weights`."""

    path: Path
    file: Any
    names: tuple[str, ...]
    digests: dict[str, str]
    tied: dict[str, str]
    left_out: tuple[str, ...]

    def shape(self, name: str) -> list[int]:
        """The shape of a tensor, which is not read."""
        return list(self.file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """A tensor. Raises PlanError if it is not the one that was written."""
        found: Tensor = self.file.get_tensor(name)
        wanted = self.digests.get(name)
        if wanted is not None and digest(name, found) != wanted:
            raise PlanError(
                f"{name} in {self.path} is not what sbpc wrote there: its sha256 is {digest(name, found)[:16]}, not {wanted[:16]}\n"
                "  The file is damaged, or was changed: copy it or write it anew; without the metadata "
                f"{RECORD!r} it is read as it is."
            )
        return found


def opened(path: str | Path) -> TensorFile:
    """A safetensors file. Raises PlanError if it is none, or if what sbpc wrote of its tensors is damaged."""
    try:
        file: Any = safe_open(path, framework="pt")
        names, about = tuple(file.keys()), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise PlanError(f"{path} holds no tensors: {error}\n  Name a safetensors file.") from error
    if RECORD not in about and SEAL not in about:
        tied = {name: first for name, first in about.items() if first in names and name not in names}  # by save_model
        return TensorFile(Path(path), file, names, {}, tied, ())
    text = about.get(RECORD, "")
    if sealed(text) != about.get(SEAL):
        raise damaged(path, "its metadata is not what sbpc wrote")
    try:
        record = json.loads(text)
        digests, tied, left_out = dict(record["sha256"]), dict(record["tied"]), tuple(record["left_out"])
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"its metadata cannot be read: {error}") from error
    if not all(isinstance(item, str) for item in (*digests.values(), *tied.values(), *left_out)):
        raise damaged(path, "its metadata holds what are no texts")
    others = sorted(digests.keys() ^ set(names))
    if others or not digests.keys() >= set(tied.values()):
        raise damaged(path, f"its metadata is of other tensors: {', '.join(others[:3])}")
    return TensorFile(Path(path), file, names, digests, tied, left_out)


def damaged(path: str | Path, why: str) -> PlanError:
    """What is said of a file whose metadata is not to be trusted."""
    return PlanError(f"{path} is damaged: {why}\n  Copy it or write it anew.")


def read_weights(path: str | Path) -> Weights:
    """All that a safetensors file holds. Raises PlanError if it is none, or is damaged."""
    file = opened(path)
    return Weights({name: file.read(name) for name in file.names}, file.tied, file.left_out)


def read_tensors(path: str | Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or those of some names. Raises PlanError as `opened` does, or if it lacks one."""
    file = opened(path)
    wanted = file.names if names is None else list(names)
    missing = [name for name in wanted if name not in file.names]
    if missing:
        raise PlanError(f"{path} lacks {', '.join(missing[:3])}\n  It holds {', '.join(file.names[:5])}.")
    return {name: file.read(name) for name in wanted}


def reader(path: str | Path, wanted: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    """What reads one tensor of a safetensors file at a time. Raises PlanError if one is absent or not like that wanted."""
    file = opened(path)
    there = {**{name: name for name in file.names}, **file.tied}
    missing = [name for name in wanted if name not in there]
    if missing:
        raise PlanError(f"{path} lacks {', '.join(missing[:3])}\n  Give the weights of the model that was exported.")
    for name, value in wanted.items():
        shape = file.shape(there[name])
        if shape != list(value.shape):
            raise PlanError(
                f"{name} is {shape} in {path}, and {list(value.shape)} in the programs\n"
                "  Give the weights of the model that was exported."
            )

    def read(name: str) -> Tensor:
        found = file.read(there[name])
        if found.dtype != wanted[name].dtype:
            raise PlanError(f"{name} is {found.dtype} in {path}, not {wanted[name].dtype}\n  Give it in that type.")
        return found

    return read


def tree(
    tensors: Mapping[str, Any],
    tied: Mapping[str, str],
    parameters: Iterable[str] = (),
    frozen: Iterable[str] = (),
    left_out: Iterable[str] = (),
) -> nn.Module:
    """A module of plain modules that holds tensors under qualified names; those of `parameters` as parameters."""
    root = nn.Module()
    trained, fixed, unsaved = set(parameters), set(frozen), set(left_out)
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
        if first in trained:
            parent.register_parameter(leaf, made[first])
        else:
            parent.register_buffer(leaf, made[first], persistent=name not in unsaved)
    return root
