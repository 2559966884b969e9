"""Take the weights of a module out of its ranks, whole: as a state dict, or as a folder of `save_pretrained`."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sbpc._compat import HOOKS, TENSORS
from sbpc.errors import CheckpointError
from sbpc.graph.guards import FORWARD
from sbpc.runtime import bind
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.lost_ranks import watched
from sbpc.runtime.state.blocks import TensorBlock, block_of
from sbpc.runtime.state.weight_files import weights_of

WEIGHTS, RANDOM, RUNNERS = "_sbpc_weights", "_sbpc_random", "_sbpc_runners"
"""Where a parallel module has the places of its weights, its place among random numbers and, in its class, what runs
its plans."""
Place = tuple[tuple[int, ...], tuple[int, ...]]  # where a block begins in its tensor, and its shape


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Returns on rank 0 the `state_dict` that the model has on one device, on the CPU; {} on the other ranks.

    It has whole tensors, those of all stages of a pipeline, and a tied one under all its names: plain `torch.load`,
    `model.load_state_dict` and `save_file` of safetensors take it. Every rank calls this at the same point. Rank 0
    needs memory for all weights, and gets one tensor at a time. Raises CheckpointError if the ranks have not all of
    a tensor, LostRankError if one does not answer.

        state = sbpc.full_state_dict(module)  # on all ranks
        if torch.distributed.get_rank() == 0:
            torch.save(state, "weights.pt")
    """
    model = on_one_device(module)
    return {} if model is None else model.state_dict()


def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Saves the whole model as its class does on one device, with what that takes. Every rank calls this at the same
    point, and rank 0 writes; with `state_dict=`, which has whole tensors, rank 0 may call it alone."""
    whole, several = kwargs.get("state_dict"), dist.is_initialized()
    model: Any = on_one_device(self) if whole is None else twin_of(self, whole)  # the library reads its type of it
    result = said = None
    try:
        if model is not None and not (several and dist.get_rank()):
            result = model.save_pretrained(*args, **kwargs)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise
    finally:
        of_ranks = process_groups.from_all_ranks(said) if several and whole is None else [None]
    if of_ranks[0] is not None:
        raise CheckpointError(f"rank 0 could not save the model: {of_ranks[0]}\n  Mend the cause, and save again.")
    return result


def on_one_device(module: nn.Module) -> nn.Module | None:
    """Returns on rank 0 a copy of a module with whole weights on the CPU, None on the other ranks.

    Each block comes from the first rank that holds it, by gloo.
    """
    bind.check_module(module)
    weights, masters = weights_of(module), masters_of(module)
    blocks = {name: block_of(tensor) for name, tensor in weights.tensors.items()}
    mine = {
        name: (block.local.dtype, block.shape, (block.start, tuple(block.local.shape)))
        for name, block in blocks.items()
    }
    several = dist.is_initialized()
    of_ranks = process_groups.from_all_ranks((mine, weights.tied)) if several else [(mine, weights.tied)]
    group = process_groups.everyone() if several else None
    about = {name: (dtype, shape) for held, _ in of_ranks for name, (dtype, shape, _) in held.items()}
    whole: dict[str, Tensor] = {}
    for name, (dtype, shape) in about.items():
        places: dict[Place, int] = {}
        for rank, (held, _) in enumerate(of_ranks):
            if name in held and math.prod(held[name][2][1]):
                places.setdefault(held[name][2], rank)
        if sum(math.prod(size) for _, size in places) != math.prod(shape):
            raise CheckpointError(
                f"the ranks have only a part of {name}\n  Give the module that sbpc.parallelize made."
            )
        with watched("full_state_dict"):
            tensor = gathered(blocks.get(name), dtype, shape, places, group)
        if tensor is not None:
            whole[name] = tensor.to(getattr(torch, masters[name])) if name in masters else tensor
    if several and dist.get_rank():
        return None
    tied = {name: first for _, names in of_ranks for name, first in names.items()}
    return twin_of(module, whole | {name: whole[first] for name, first in tied.items()})


def gathered(
    block: TensorBlock | None, dtype: torch.dtype, shape: tuple[int, ...], places: Mapping[Place, int], group: Any
) -> Tensor | None:
    """Returns on rank 0 a tensor of blocks from several ranks, None on the others. block: this rank's."""
    me = 0 if group is None else dist.get_rank()
    whole = torch.empty(shape if me == 0 else (), dtype=dtype, device="cpu")
    for (start, size), rank in places.items():
        if me not in (0, rank):
            continue
        if me == rank:
            assert block is not None
            part = block.local.to("cpu").contiguous()
        else:
            part = torch.empty(size, dtype=dtype, device="cpu")
        if me or rank:  # as bytes: gloo knows not all dtypes
            data = part.view(-1).view(torch.uint8)
            dist.send(data, 0, group) if me else dist.recv(data, rank, group)
        if me == 0:
            whole[tuple(slice(at, at + length) for at, length in zip(start, size))].copy_(part)
    return whole if me == 0 else None


def masters_of(module: nn.Module) -> dict[str, str]:
    """Returns by name of a parameter with a float32 master the type in which the model has it; none of a module that is
    not parallel."""
    return dict(getattr(type(module), RUNNERS)[0].plan.ports.masters) if hasattr(type(module), RUNNERS) else {}


def twin_of(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy of a module, of the class that the model had, with other tensors by name; others are shared."""
    twin = skeleton(module)
    if RANDOM in vars(module):
        twin.__class__ = type(module).__base__  # type: ignore[assignment]
    for own in (WEIGHTS, RANDOM, FORWARD):
        vars(twin).pop(own, None)
    made: dict[int, nn.Parameter] = {}
    for path, owner in twin.named_modules(remove_duplicate=False):
        for table in TENSORS:
            for key, old in vars(owner)[table].items():
                tensor = tensors.get(f"{path}.{key}" if path else key)
                if tensor is not None and table == TENSORS[0]:
                    asks = tensor.is_floating_point() if old is None else old.requires_grad
                    tensor = made.setdefault(id(tensor), nn.Parameter(tensor, asks))
                if tensor is not None:
                    vars(owner)[table][key] = tensor
    return twin


def skeleton(module: nn.Module, hooks: bool = False) -> nn.Module:
    """Copies the tree of modules. The copy shares no table with it and has no hooks, as the plan holds what they do,
    unless `hooks`."""
    copies: dict[int, nn.Module] = {}

    def copied(old: nn.Module) -> nn.Module:
        if id(old) not in copies:
            new = copies[id(old)] = old.__class__.__new__(old.__class__)  # parametrized modules refuse copy.copy
            for key, value in vars(old).items():
                new.__dict__[key] = copy.copy(value) if isinstance(value, dict) else value
            for kind in () if hooks else HOOKS:
                new.__dict__[kind].clear()
            children = new.__dict__["_modules"]
            children.update((name, None if child is None else copied(child)) for name, child in list(children.items()))
        return copies[id(old)]

    return copied(module)
