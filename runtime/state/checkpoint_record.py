"""What `state.json` of a checkpoint says: the step, the tensors, the optimizer's settings and the place among random numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import CheckpointError
from sbpc.graph.pytree import flatten
from sbpc.runtime.state.blocks import TensorBlock, groups_of, merged_groups, states_of
from sbpc.runtime.state.weight_files import weights_of

FORMAT, VERSION, MARKER = "sbpc checkpoint", 1, "state.json"


def describe(
    step: int, blocks: Mapping[str, TensorBlock], model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any
) -> dict[str, Any]:
    """Returns what this rank knows of what `state.json` says of a checkpoint."""
    tensors = {name: dtype_and_shape(block) for name, block in blocks.items()}
    groups: list[dict[str, Any]] = []
    of_group = [] if optimizer is None else zip(groups_of(model, optimizer), optimizer.param_groups)
    for names, group in of_group:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        leaves, structure = flatten(settings, "the optimizer's settings")
        values = [leaf.item() for leaf in leaves]
        groups.append({"names": names, "settings": structure, "values": values})
    plain = {
        name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for name, state in states_of(model, optimizer)
    }
    leaves, structure = flatten(extra, "extra")
    if leaves:
        raise CheckpointError("extra holds tensors\n  Keep them as buffers of the model, or as numbers.")
    random, weights = getattr(model, "random_state", lambda: None)(), weights_of(model)
    return {
        "format": FORMAT, "version": VERSION, "step": step, "torch": torch.__version__, "tensors": tensors,
        "optimizer": {"class": type(optimizer).__name__, "groups": groups, "plain": plain}, "extra": structure,
        "random": random, "tied": weights.tied, "left_out": list(weights.left_out),
    }  # fmt: skip


def merged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what `state.json` says, of what each rank knows: of pipeline stages every rank has the parameters of its own alone."""
    known: list[list[dict[str, Any]]] = [record["optimizer"]["groups"] for record in records]
    names = merged_groups([[group["names"] for group in groups] for groups in known])
    longest = max(known, key=lambda groups: len(groups))
    groups = [group | {"names": whole} for group, whole in zip(longest, names)]
    plain = joined(record["optimizer"]["plain"] for record in records)
    whole = {key: joined(record[key] for record in records) for key in ("tensors", "tied")}
    return {**records[0], **whole, "optimizer": {**records[0]["optimizer"], "groups": groups, "plain": plain}}


def joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what is in any of several mappings."""
    return {key: value for part in parts for key, value in part.items()}


def dtype_and_shape(block: TensorBlock) -> list[Any]:
    """Returns the dtype of a tensor as text and its whole shape, as `state.json` has them."""
    return [str(block.local.dtype).removeprefix("torch."), list(block.shape)]


def tensors_of_state(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns dtype and shape of the tensors of an optimizer's state in a checkpoint, by parameter and key."""
    tensors: dict[str, dict[str, Any]] = {}
    for full, dtype_and_shape in record["tensors"].items():
        kind, _, name_and_key = full.partition("/")
        if kind == "optimizer":
            name, _, key = name_and_key.rpartition("/")
            tensors.setdefault(name, {})[key] = dtype_and_shape
    return tensors


def digest(record: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of what `state.json` says."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_marker(folder: Path) -> dict[str, Any]:
    """Returns what `state.json` says of a checkpoint. Raises CheckpointError if the folder holds none."""
    try:
        record = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint: {error}\n  Name one that sbpc wrote.") from error
    if not isinstance(record, dict) or (record.get("format"), record.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(f"{folder} is no checkpoint of version {VERSION}\n  Name one that this sbpc wrote.")
    written = record.pop("sha256", None)
    if written not in (None, digest(record)):  # early versions wrote no digest
        raise CheckpointError(f"{folder / MARKER} is damaged\n  Remove {folder}: an earlier checkpoint is loaded then.")
    return record
