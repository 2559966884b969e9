"""Have what a script writes into weights and gradients reach them, or refuse it, where torch 2.13 drops it in silence.

`parameter.data = x` leaves a DTensor as it is. A view that torch cannot make of a rank's part, such as `parameter[3]`
where rows are split, is a copy, so that `parameter[3].zero_()` changes the copy alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from sbpc._compat import as_torch_does, hold, local_of, loses_writes, on_dtensors, op_names
from sbpc.errors import PlanError
from sbpc.runtime.start.lost_ranks import watched
from sbpc.runtime.state.dtensors import is_planned

aten = torch.ops.aten
DATA: Any = Tensor.data  # a descriptor


@functools.lru_cache(maxsize=1)
def install() -> None:
    """Has torch call the functions below in this process from now on."""
    DTensor.data = property(DATA.__get__, set_data)  # type: ignore[assignment, misc]
    for name in op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        in_place = packet.endswith("_") and (not packet.startswith("_") or packet.startswith("_foreach_"))
        if name.startswith("aten::") and (in_place or "out" in overload.split("_")):
            on_dtensors(getattr(getattr(aten, packet), overload or "default"), write)


@torch.no_grad()
def set_data(tensor: DTensor, given: Any) -> None:
    """Has a DTensor hold the numbers of another one of any layout, or of a whole tensor that is the same on every rank,
    and share its memory if that lies alike. Raises PlanError for another shape or type."""
    if not is_planned(tensor):
        DATA.__set__(tensor, given)
        return
    if not isinstance(given, Tensor) or (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
        is_now = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise PlanError(
            f"the .data of a tensor {tensor.dtype} {tuple(tensor.shape)} is to be {is_now}, of which ranks hold parts\n"
            "  Give a tensor of that shape and type, or plan and parallelize the model as it is to be."
        )
    if not isinstance(given, DTensor):
        whole = [Replicate()] * tensor.device_mesh.ndim
        given = DTensor.from_local(given.to(local_of(tensor).device), tensor.device_mesh, whole, run_check=False)
    if (given.device_mesh, given.placements) != (tensor.device_mesh, tensor.placements):
        with watched(".data"):
            given = torch.empty_like(tensor).copy_(given)
    hold(tensor, local_of(given).detach().contiguous())


def write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an op in place, on one tensor or several, or with `out=`. Raises PlanError where it would write into a
    copy."""
    first: Any = kwargs.get("out", args[0] if args else None)
    for each in first if isinstance(first, (list, tuple)) else [first]:
        if not is_planned(each) or not loses_writes(each):
            continue
        raise PlanError(
            f"{op.name()} writes into part {tuple(each.shape)} of a tensor that is split over ranks, which is a "
            "copy of it: the write would be lost\n"
            "  Write into a whole copy and give that back: x = p.full_tensor(), then x[3] = 0, then p.data = x."
        )
    if op is aten.fill_.Tensor:  # as of `parameter[3] = 0`; torch has it for numbers alone
        op, args = aten.fill_.Scalar, (args[0], args[1].item())
    return as_torch_does(op, args, kwargs)
