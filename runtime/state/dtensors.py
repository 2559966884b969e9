"""Weights: parameters as DTensors that hold this rank's shards in their home layouts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from sbpc._compat import StridedShard
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Split
from sbpc.runtime.start import process_groups as groups


def distribute(tensor: Tensor, layout: Layout, mesh: Mesh, where: torch.device) -> nn.Parameter:
    """A parameter of which this rank holds its shard of rank 0's values."""
    held = sharded(of_rank_zero(tensor, where), layout, mesh, where)
    return nn.Parameter(held, requires_grad=tensor.requires_grad)


def of_rank_zero(tensor: Tensor, where: torch.device) -> Tensor:
    """A copy of rank 0's tensor: ranks that drew other weights would train a model that is neither's."""
    found = tensor.detach().to(where, copy=True).contiguous()
    dist.broadcast(found, 0)
    return found


def sharded(whole: Tensor, layout: Layout, mesh: Mesh, where: torch.device) -> DTensor:
    """The DTensor of a tensor that every rank holds whole; the shard shares no memory with it."""
    local = layout.shard(whole.detach(), mesh.sizes, mesh.coordinates(dist.get_rank()))
    return DTensor.from_local(
        local.to(where).clone(memory_format=torch.contiguous_format),
        groups.device_mesh(mesh, where.type),
        placements(layout, mesh.sizes),
        shape=whole.shape,
        stride=contiguous_stride(whole.shape),
    )


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense row-major tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def placements(layout: Layout, sizes: Sequence[int]) -> list[Placement]:
    """The layout in DTensor's words; an axis that cuts after inner ones have is a strided shard."""
    found: list[Placement] = []
    for axis, state in enumerate(layout.states):
        if not isinstance(state, Split):
            found.append(Replicate())
            continue
        cuts = layout.cuts[state.dim]
        before = [sizes[other] for other in cuts[: cuts.index(axis)] if other > axis]
        found.append(StridedShard(state.dim, split_factor=math.prod(before)) if before else Shard(state.dim))
    return found


def take_state(module: nn.Module, homes: Mapping[str, Layout], mesh: Mesh, where: torch.device) -> None:
    """Let `load_state_dict` take tensors in any layout: whole ones, the same on every rank, and DTensors.

    homes: by the module's own name of a parameter. Every rank must load at the same point.
    """

    def convert(owner: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, home in homes.items():
            given = state.get(prefix + name)
            if isinstance(given, Tensor) and given.shape == owner.get_parameter(name).shape:
                state[prefix + name] = at_home(given, home, mesh, where)

    module.register_load_state_dict_pre_hook(convert)


def at_home(given: Tensor, home: Layout, mesh: Mesh, where: torch.device) -> Tensor:
    """A tensor in its home layout: as it is where it is there already, else by way of the whole tensor."""
    if isinstance(given, DTensor):
        there = groups.device_mesh(mesh, where.type), tuple(placements(home, mesh.sizes))
        if (given.device_mesh, given.placements) == there:
            return given
        given = given.full_tensor()
    return sharded(given, home, mesh, where)


@functools.lru_cache(maxsize=1 << 12)
def placements_of(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """`placements`, found once for each layout."""
    return tuple(placements(layout, mesh.sizes))
