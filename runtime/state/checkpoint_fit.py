"""Make a module and its optimizer ready for what a checkpoint holds, and refuse what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import CheckpointError
from sbpc.runtime.state.blocks import TensorBlock, names_of
from sbpc.runtime.state.checkpoint_record import Record, dtype_and_shape, restored, tensors_of_state
from sbpc.runtime.state.weight_files import weights_of


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: list[list[str | None]],
    record: Record,
    folder: Path,
    masters: Mapping[str, str],
) -> None:
    """Gives an optimizer the settings in a checkpoint and, for every tensor of state there, one to be filled.

    groups: by group of the optimizer the names of its parameters on all ranks. masters: by name the type of the model.
    Raises CheckpointError if they are not those saved.
    """
    saved, names = record["optimizer"], names_of(model)
    if not saved["groups"]:
        raise CheckpointError(
            f"{folder} holds weights alone, nothing of an optimizer\n"
            "  Load the model alone, before its optimizer is made; sbpc run takes weights by --weights "
            "FILE.safetensors."
        )
    # stages have them in another order
    same = [set(group["names"]) for group in saved["groups"]] == [set(group) for group in groups]
    if saved["class"] != type(optimizer).__name__ or not same:
        raise CheckpointError(
            f"{folder} was saved with {saved['class']} over {[len(g['names']) for g in saved['groups']]} parameters, "
            f"this is {type(optimizer).__name__} over {[len(group) for group in groups]}\n"
            "  Make the optimizer that was saved, or load the model alone."
        )
    what, tensors = "the optimizer's state", tensors_of_state(record)
    short = [name for name, kind in masters.items() for dtype, _ in tensors.get(name, {}).values() if dtype == kind]
    if short:
        raise CheckpointError(
            f"{folder} was saved without float32 masters: {what} of {short[0]} there is in {masters[short[0]]}\n"
            "  Go on by a plan with masters=False, or load the model alone."
        )
    leaves = [[torch.tensor(value) for value in old["values"]] for old in saved["groups"]]
    settings = [restored(old["settings"], there, what, folder) for old, there in zip(saved["groups"], leaves)]
    plain = {
        name: {key: restored(each, (), what, folder) for key, each in state.items()}
        for name, state in saved["plain"].items()
    }
    for group, those in zip(optimizer.param_groups, settings):
        group.update(those)
        on_device = group.get("fused") or group.get("capturable")  # these count steps on the parameter's device
        for parameter in group["params"]:
            name = names[parameter]
            state = plain.get(name or "", {}) | zeros(
                parameter, tensors.get(name, {}), parameter.device if on_device else None
            )
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state


def zeros(
    parameter: nn.Parameter, tensors: Mapping[str, tuple[str, Any]], device: torch.device | None
) -> dict[str, Tensor]:
    """Returns the tensors of a parameter's state, to be filled. tensors: by key, dtype and shape. device: of those
    of other shapes."""
    state = {}
    for key, (dtype, shape) in tensors.items():
        kind = getattr(torch, dtype)
        alone = not shape or key == "step"
        state[key] = torch.zeros(shape, dtype=kind, device=device) if alone else like(parameter, shape, kind)
    return state


def like(parameter: nn.Parameter, shape: Any, dtype: torch.dtype) -> Tensor:
    """Returns zeros that are cut as a parameter is, as far as its dims have their sizes."""
    same = tuple(shape) == tuple(parameter.shape)
    return torch.zeros_like(parameter, dtype=dtype) if same else parameter.detach().new_zeros(shape, dtype=dtype)


def as_saved(
    blocks: Mapping[str, TensorBlock], model: nn.Module, record: Record, masters: Mapping[str, str]
) -> dict[str, TensorBlock]:
    """Returns blocks by the names that a checkpoint has for them, and masters in the type of the model if it has them
    so.

    masters: by name the type of the model. A checkpoint may have a tied tensor under another of its names. It may lack
    buffers that state_dict leaves out, as weights from elsewhere do: the model's constructor has made them, and they
    stay as they are.
    """
    weights, saved, tied = weights_of(model), record["tensors"], record["tied"]
    renamed: dict[str, TensorBlock] = {}
    for full, block in blocks.items():
        name = full.removeprefix("model/")
        if full not in saved and name in weights.tensors:
            names = [name, *(other for other, first in weights.tied.items() if first == name)]
            others = [f"model/{tied.get(other, other)}" for other in names]
            if not any(other in saved for other in others) and name in weights.left_out:
                continue
            full = next((other for other in others if other in saved and other not in blocks), full)
        if [masters.get(name), list(block.shape)] == saved.get(full):
            local = torch.empty_like(block.local, dtype=getattr(torch, masters[name]))
            block = replace(block, local=local, master=block.local)
        renamed[full] = block
    return renamed


def mistake_in(blocks: Mapping[str, TensorBlock], tensors: Record, folder: Path) -> str | None:
    """Returns what is wrong if a checkpoint does not hold what is asked for."""
    for name, block in blocks.items():
        saved, here = tensors.get(name), dtype_and_shape(block)
        if saved != here:
            what = "lacks it" if saved is None else f"has {saved[0]} {saved[1]}"
            return (
                f"{name.partition('/')[2]} is {here[0]} {here[1]}, {folder} {what}\n  Load what was saved from this "
                "model."
            )
    return None
