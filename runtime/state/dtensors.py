"""Make DTensors that hold this rank's shard of a tensor in a layout."""

from __future__ import annotations

import copyreg
import math
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from sbpc._compat import StridedShard, local_of
from sbpc.errors import CheckpointError
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Split
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.lost_ranks import watched


def of_rank_zero(tensor: Tensor, where: torch.device) -> Tensor:
    """Returns a copy of rank 0's tensor: shards of weights that every rank drew for itself would be of no one model."""
    copy = tensor.detach().to(where, copy=True).contiguous()
    with watched():
        dist.broadcast(copy, 0)
    return copy


def sharded(
    whole: Tensor, layout: Layout, mesh: Mesh, where: torch.device, dtype: torch.dtype | None = None
) -> DTensor:
    """Returns the DTensor of a tensor that every rank holds whole. The shard shares no memory with it. dtype: its type,
    if that is another."""
    local = layout.shard(whole.detach(), mesh.sizes, process_groups.place(mesh))
    return DTensor.from_local(
        local.to(where, dtype or whole.dtype).clone(memory_format=torch.contiguous_format),
        process_groups.device_mesh(mesh, where.type),
        placements(layout, mesh.sizes),
        shape=whole.shape,
        stride=torch.empty(whole.shape, device="meta").stride(),
    )


def placements(layout: Layout, sizes: Sequence[int]) -> list[Placement]:
    """Returns the DTensor placements of a layout. An axis that cuts a dim after inner axes have is a strided shard."""
    placed: list[Placement] = []
    for axis, state in enumerate(layout.states):
        if not isinstance(state, Split):
            placed.append(Replicate())
            continue
        cuts = layout.cuts[state.dim]
        before = [sizes[other] for other in cuts[: cuts.index(axis)] if other > axis]
        placed.append(StridedShard(state.dim, split_factor=math.prod(before)) if before else Shard(state.dim))
    return placed


def refuse_parts() -> None:
    """Refuses to write part of a tensor to a file, as torch.save on one rank would without a word; to other processes
    of a rank it may go. safetensors, and accelerate with it, ask for a storage before they write."""
    copyreg.pickle(DTensor, pickled)  # type: ignore[arg-type]
    ForkingPickler.register(DTensor, reduced)
    DTensor.storage = storage  # type: ignore[method-assign, assignment]


def is_planned(tensor: object) -> bool:
    """Returns whether a tensor lies on a plan's mesh."""
    return isinstance(tensor, DTensor) and tensor.device_mesh in process_groups.meshes.values()


def pickled(tensor: DTensor) -> Any:
    """Returns how a DTensor is pickled. Raises CheckpointError for one on a plan's mesh of which this rank holds a
    part."""
    mesh = tensor.device_mesh
    split = any(size > 1 and not state.is_replicate() for size, state in zip(mesh.shape, tensor.placements))
    if is_planned(tensor) and (split or process_groups.is_part(mesh)):
        raise only_a_part(tensor, "is pickled, as torch.save does with a state_dict")
    return reduced(tensor)


def storage(tensor: DTensor) -> Any:
    """Returns the storage of a DTensor. Raises CheckpointError for one on a plan's mesh."""
    if is_planned(tensor):
        raise only_a_part(tensor, "is asked for its storage, as safetensors and Accelerator.save_state do")
    return Tensor.storage(tensor)


def only_a_part(tensor: DTensor, what: str) -> CheckpointError:
    """Returns the error about a file that would have this rank's part alone."""
    return CheckpointError(
        f"this rank's part {tuple(local_of(tensor).shape)} of a tensor {tuple(tensor.shape)} {what}: the file would "
        "lack what other ranks hold\n"
        "  Have all ranks call sbpc.full_state_dict(module), and save what it returns on rank 0; to train on from "
        "it on any mesh, save by sbpc.Checkpoints."
    )


def reduced(tensor: DTensor) -> Any:
    """Returns how torch pickles a DTensor."""
    return tensor.__reduce_ex__(2)


def take_state(
    module: nn.Module, homes: Mapping[str, Layout], masters: Mapping[str, torch.dtype], mesh: Mesh, where: torch.device
) -> None:
    """Lets `load_state_dict` of a module take DTensors of any layout, and whole tensors that are the same on every
    rank, and has `state_dict` give masters in the types of the model, but for `keep_vars=True`.

    homes, masters: by the module's own name of a parameter, the second in the type of the model. Every rank must load
    at the same point.
    """

    def convert(owner: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, home in homes.items():
            given = state.get(prefix + name)
            if isinstance(given, Tensor) and given.shape == owner.get_parameter(name).shape:
                there = at_home(given, home, mesh, where)
                state[prefix + name] = in_type(there, torch.float32) if name in masters else there

    def copied(owner: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, dtype in masters.items():
            if not isinstance(state.get(prefix + name), nn.Parameter | None):
                state[prefix + name] = in_type(state[prefix + name], dtype)

    module.register_load_state_dict_pre_hook(convert)
    if masters:
        module.register_state_dict_post_hook(copied)


def in_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a DTensor in another type, itself if it is of that."""
    if tensor.dtype == dtype or not isinstance(tensor, DTensor):
        return tensor.to(dtype)
    local, about = local_of(tensor).to(dtype), (tensor.device_mesh, tensor.placements)
    return DTensor.from_local(local, *about, shape=tensor.shape, stride=tensor.stride())


def at_home(given: Tensor, home: Layout, mesh: Mesh, where: torch.device) -> Tensor:
    """Returns a tensor in its home layout, by way of the whole tensor unless it is there already."""
    if isinstance(given, DTensor):
        there = process_groups.device_mesh(mesh, where.type), tuple(placements(home, mesh.sizes))
        if (given.device_mesh, given.placements) == there:
            return given
        given = given.full_tensor()
    return sharded(given, home, mesh, where)
