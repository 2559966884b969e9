"""What calls of a deep model give again: most are as a call of an earlier layer, and their results on fake tensors are
written down instead of worked out.

torch remembers results of fake tensors, too; three quarters of the time for a call go into its key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbpc._compat import FakeTensor, FakeTensorMode, in_kernel_invocation_manager, storage_of
from sbpc.graph.operands import hashable, leaves

# whose results do not follow from the metadata of their operands alone, or that check the size of a storage
OTHERS = frozenset((torch.ops.aten.as_strided.default, torch.ops.aten.set_.source_Storage_storage_offset))


class Made(NamedTuple):
    """A tensor that a call makes. source: which of its operands shares its memory, None for memory of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    source: int | None


class Repeats:
    """Calls of ops on the fake tensors of a mode. An op of somebody else is run each time, as is one that reads values
    or writes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self.known = mode, dict[Any, Made | tuple[Made, ...] | None]()

    def call(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Returns what `run` does: what a call gives."""
        if func.namespace != "aten" or func._schema.is_mutable or func in OTHERS:
            return run()
        given = leaves((args, kwargs), Tensor)
        if not given or not all(map(is_plain, given)):
            return run()
        try:
            key = func, torch.get_default_dtype(), hashable((args, kwargs), metadata)
            made = self.known.get(key)
        except TypeError:  # an argument without a hash
            return run()
        if made is None:
            out = run()
            self.known[key] = told(out, given)
            return out
        with in_kernel_invocation_manager(self.mode):
            if isinstance(made, Made):
                return self.tensor(made, given)
            return tuple(self.tensor(each, given) for each in made)

    def tensor(self, made: Made, given: list[Tensor]) -> Tensor:
        """Returns a tensor without data."""
        value = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        if made.source is not None:
            value.set_(given[made.source].untyped_storage(), made.offset, made.shape, made.stride)
        return FakeTensor(self.mode, value, made.device)


def is_plain(value: Tensor) -> bool:
    """Returns whether all that a call can depend on of an operand is its metadata."""
    return type(value) is FakeTensor and value.constant is None and not (value.is_neg() or value.is_conj())


def metadata(value: Tensor) -> Any:
    """Returns that."""
    return value.dtype, value.shape, value.stride(), value.storage_offset(), value.device, value.requires_grad


def told(out: Any, given: list[Tensor]) -> Made | tuple[Made, ...] | None:
    """Returns what a call has made; None for anything but dense tensors whose elements it makes, or takes from one
    operand."""
    if type(out) is tuple:
        found = [told(item, given) if isinstance(item, Tensor) else None for item in out]
        fresh = [each for each in found if isinstance(each, Made) and each.source is None]
        apart = len(fresh) == len(out) == len({*map(storage_of, out)})  # none shares memory with another
        return tuple(fresh) if apart else None
    if not isinstance(out, Tensor) or not is_plain(out) or out.layout != torch.strided or out.requires_grad:
        return None
    if any(out is value for value in given):
        return None
    storage = storage_of(out)
    source = next((at for at, value in enumerate(given) if storage_of(value) == storage), None)
    offset = int(out.storage_offset())
    if source is None and offset:
        return None
    if source is not None and len(given) > 1:  # others may share memory now, and not the next time
        return None
    return Made(out.shape, out.stride(), offset, out.dtype, out.device, source)
