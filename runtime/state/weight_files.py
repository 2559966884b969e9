"""Read and write weights as safetensors files, which hold names and numbers and no code.

sbpc writes into the metadata the SHA-256 of each tensor with its name, dtype and shape, and checks it on reading. That
detects damage and mix-ups, not intent: whoever changes a file on purpose can write other digests. A file that another
program wrote has no digests and is read without this check.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sbpc._compat import left_out_of
from sbpc.errors import PlanError, is_name, read_json

RECORD, SEAL = "sbpc", "sbpc.sha256"
"""Keys of the metadata: the record of the tensors as JSON, and the digest of that text."""
Names = dict[str, str]


@dataclass(frozen=True)
class Weights:
    """The tensors of a model by first name.

    tied: every further name of a tensor -> its first. left_out: the buffers that `state_dict` leaves out.
    """

    tensors: dict[str, Tensor]
    tied: Names = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the `state_dict` of the model on one device, in which a tied tensor has all its names."""
        named = self.tensors | {name: self.tensors[first] for name, first in self.tied.items()}
        return {name: tensor for name, tensor in named.items() if name not in self.left_out}


def weights_of(model: nn.Module) -> Weights:
    """Returns the parameters and buffers of a module, including those that `state_dict` leaves out."""
    tensors: dict[str, Tensor] = {}
    tied: Names = {}
    first: dict[int, str] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) == name:
                tensors[name] = tensor
            else:
                tied[name] = first[id(tensor)]
    return Weights(tensors, tied, left_out_of(model))


def save_weights(weights: Weights, path: str | Path) -> None:
    """Writes whole tensors, tied ones once. The file is moved into place, so that a reader never sees half of it."""
    path = Path(path)
    unfinished = path.with_name(path.name + ".part")
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.tensors.items()}
    digests = {name: digest(name, tensor) for name, tensor in copies.items()}
    text = json.dumps({"sha256": digests, "tied": weights.tied, "left_out": weights.left_out})
    try:
        save_file(copies, unfinished, {"format": "pt", RECORD: text, SEAL: sealed(text)})
        unfinished.replace(path)
    except KeyError as error:
        raise PlanError(
            f"{path} cannot be written: safetensors has no {error}\n  Keep such tensors in a checkpoint: sbpc run "
            "--checkpoint."
        ) from error
    except (OSError, SafetensorError) as error:
        raise PlanError(f"{path} cannot be written: {error}\n  Name a file in a folder that exists.") from error


def save_tensors(tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Writes whole tensors by name."""
    save_weights(Weights(dict(tensors)), path)


def digest(name: str, tensor: Tensor) -> str:
    """Returns the SHA-256 of a contiguous tensor on the CPU, with its name, dtype and shape."""
    sha = hashlib.sha256(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
    sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def sealed(text: str) -> str:
    """Returns the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class TensorFile:
    """An open safetensors file. digests: by name, none unless sbpc wrote the file. tied, left_out: as in `Weights`."""

    path: Path
    file: Any
    names: tuple[str, ...]
    digests: Names
    tied: Names
    left_out: tuple[str, ...]

    def shape(self, name: str) -> list[int]:
        """Returns the shape of a tensor without reading it."""
        return list(self.file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Returns a tensor. Raises PlanError if it is not the one that was written."""
        tensor: Tensor = self.file.get_tensor(name)
        wanted = self.digests.get(name)
        if wanted is not None and digest(name, tensor) != wanted:
            raise PlanError(
                f"{name} in {self.path} is not what sbpc wrote there: its sha256 is {digest(name, tensor)[:16]}, not "
                f"{wanted[:16]}\n"
                "  The file is damaged, or was changed: copy it or write it anew; without the metadata "
                f"{RECORD!r} it is read as it is."
            )
        return tensor


def opened(path: str | Path) -> TensorFile:
    """Opens a safetensors file. Raises PlanError if it is none, or if its metadata is damaged."""
    try:
        file: Any = safe_open(path, framework="pt")
        names, about = tuple(file.keys()), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        # whose text quotes the file
        raise PlanError(f"{path} holds no tensors: {error}\n  Name a safetensors file.") from None
    if not all(map(is_name, names)):
        raise damaged(path, "a tensor has a name that cannot be printed, or is very long")
    if RECORD not in about and SEAL not in about:
        tied = {name: first for name, first in about.items() if first in names and name not in names}  # by save_model
        return TensorFile(Path(path), file, names, {}, tied, ())
    return TensorFile(Path(path), file, names, *record_of(path, names, about))


def record_of(
    path: str | Path, names: tuple[str, ...], about: Mapping[str, str]
) -> tuple[Names, Names, tuple[str, ...]]:
    """Returns digests, tied names and what is left out, as sbpc wrote them into a file's metadata. Raises PlanError
    if it is damaged."""
    text = about.get(RECORD, "")
    if sealed(text) != about.get(SEAL):
        raise damaged(path, "its metadata is not what sbpc wrote")
    try:
        record = read_json(text)
        digests, tied, left_out = dict(record["sha256"]), dict(record["tied"]), tuple(record["left_out"])
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"its metadata cannot be read: {error}") from error
    if not all(isinstance(item, str) for item in (*digests.values(), *tied.values(), *left_out)):
        raise damaged(path, "its metadata holds what are no texts")
    others = sorted(digests.keys() ^ set(names))
    if others or not digests.keys() >= set(tied.values()):
        raise damaged(path, f"its metadata is of other tensors: {', '.join(others[:3])}")
    return digests, tied, left_out


def damaged(path: str | Path, why: str) -> PlanError:
    """Returns the error about a file whose metadata is not to be trusted."""
    return PlanError(f"{path} is damaged: {why}\n  Copy it or write it anew.")


def read_weights(path: str | Path) -> Weights:
    """Reads a safetensors file. Raises PlanError if it is none, or is damaged."""
    file = opened(path)
    return Weights({name: file.read(name) for name in file.names}, file.tied, file.left_out)


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file. Raises PlanError as `opened` does."""
    return read_weights(path).tensors


def reader(path: str | Path, wanted: Mapping[str, Tensor], masters: Container[str] = ()) -> Callable[[str], Tensor]:
    """Returns a function that reads one tensor of a safetensors file. Raises PlanError if one is absent or unlike
    the wanted one. masters: those that may be in float32 in the file."""
    file = opened(path)
    stored = {**{name: name for name in file.names}, **file.tied}
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise PlanError(f"{path} lacks {', '.join(missing[:3])}\n  Give the weights of the model that was exported.")
    for name, value in wanted.items():
        shape = file.shape(stored[name])
        if shape != list(value.shape):
            raise PlanError(
                f"{name} is {shape} in {path}, and {list(value.shape)} in the programs\n"
                "  Give the weights of the model that was exported."
            )

    def read(name: str) -> Tensor:
        tensor = file.read(stored[name])
        if tensor.dtype != wanted[name].dtype and not (name in masters and tensor.dtype == torch.float32):
            raise PlanError(f"{name} is {tensor.dtype} in {path}, not {wanted[name].dtype}\n  Give it in that type.")
        return tensor

    return read


def tree(
    tensors: Mapping[str, Any],
    tied: Mapping[str, str],
    parameters: Iterable[str] = (),
    frozen: Iterable[str] = (),
    left_out: Iterable[str] = (),
) -> nn.Module:
    """Returns a module of plain modules that holds tensors under qualified names, those of `parameters` as
    parameters."""
    root = nn.Module()
    trained, fixed, unsaved = set(parameters), set(frozen), set(left_out)
    made = {name: nn.Parameter(x, name not in fixed) if name in trained else x for name, x in tensors.items()}
    for name, first in {**dict(zip(made, made)), **tied}.items():
        place_tensor(root, name, made[first], persistent=name not in unsaved)
    return root


def place_tensor(root: nn.Module, name: str, tensor: Tensor, persistent: bool = True) -> None:
    """Registers a parameter or a buffer under a qualified name, and makes the modules on the way to it."""
    *path, leaf = name.split(".")
    owner = root
    for child in path:
        if child not in dict(owner.named_children()):
            owner.register_module(child, nn.Module())
        owner = owner.get_submodule(child)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor, persistent=persistent)
