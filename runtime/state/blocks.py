"""Find which block of every tensor of a module and its optimizer this rank holds, in any layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sbpc._compat import StridedShard
from sbpc.errors import CheckpointError
from sbpc.mesh.layout import Layout, broadcast, chunk
from sbpc.mesh.states import Split


@dataclass(frozen=True)
class TensorBlock:
    """The block `local` of a whole tensor of `shape`, which begins at the indices `start`.

    master: what takes the values of the block once they are read, where that is of another type.
    """

    local: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    master: Tensor | None = None


def block_of(tensor: Tensor) -> TensorBlock:
    """Returns the block of a tensor that this rank holds: the whole of a tensor that is no DTensor."""
    if not isinstance(tensor, DTensor):
        return TensorBlock(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim())
    layout, sizes = layout_of(tensor), tuple(map(int, tensor.device_mesh.shape))
    coordinates = tensor.device_mesh.get_coordinate()
    if coordinates is None:
        raise CheckpointError("a tensor lies on a mesh without this rank\n  Save the tensors of one mesh on its ranks.")
    start = [0] * tensor.dim()
    for dim, axes in layout.cuts.items():
        start[dim], _ = chunk(tensor.shape[dim], axes, sizes, coordinates)
    return TensorBlock(tensor.to_local().detach(), tuple(tensor.shape), tuple(start))


def layout_of(tensor: DTensor) -> Layout:
    """Returns the layout of a DTensor. A strided shard says how many ranks cut before it, which tells the order of
    the cuts."""
    names = tensor.device_mesh.mesh_dim_names or tuple(f"axis{at}" for at in range(tensor.device_mesh.ndim))
    sizes, states = tuple(tensor.device_mesh.shape), list(broadcast(names).states)
    factors: dict[int, int] = {}
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise CheckpointError("a tensor holds partial results\n  Redistribute it before it is saved.")
        if not placement.is_replicate():
            states[axis] = Split(placement.dim)  # type: ignore[attr-defined]
            factors[axis] = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
    for order in itertools.permutations(factors):
        if all(factor == cut_before(axis, order, states, sizes) for axis, factor in factors.items()):
            return Layout(names, tuple(states), order)
    raise CheckpointError(f"the placements {tensor.placements} are those of no layout\n  Redistribute the tensor.")


def cut_before(axis: int, order: Sequence[int], states: Sequence[Any], sizes: Sequence[int]) -> int:
    """Returns among how many ranks of inner axes a dim is cut before `axis` cuts it."""
    before = order[: order.index(axis)]
    return math.prod(sizes[other] for other in before if other > axis and states[other] == states[axis])


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """Returns the first name of every parameter."""
    return {parameter: name for name, parameter in model.named_parameters()}


def blocks_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, TensorBlock]:
    """Returns this rank's blocks: `model/NAME` of parameters and buffers, `optimizer/NAME/KEY` of the optimizer's
    state."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    blocks = {f"model/{name}": block_of(tensor) for name, tensor in tensors.items()}
    for name, state in states_of(model, optimizer):
        blocks |= {f"optimizer/{name}/{key}": block_of(v) for key, v in state.items() if isinstance(v, Tensor)}
    return blocks


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str | None]]:
    """Returns by group of an optimizer the names of its parameters, None for one that the model has not."""
    names = names_of(model)
    return [[names.get(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def merged_groups(of_ranks: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Returns by group the names of its parameters on all ranks, each once: of pipeline stages every rank has those
    of its own."""
    by_group = itertools.zip_longest(*of_ranks, fillvalue=())
    return [list(dict.fromkeys(name for names in of_one_group for name in names)) for of_one_group in by_group]


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[tuple[str, dict[str, Any]]]:
    """Returns the name and the optimizer's state of every parameter that the optimizer steps."""
    if optimizer is None:
        return []
    names, states = names_of(model), []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    "the optimizer holds a parameter of another model, which the model has not\n"
                    "  Make the optimizer from the parameters of the parallel module."
                )
            states.append((names[parameter], optimizer.state.get(parameter, {})))
    return states
