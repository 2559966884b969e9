"""What a call that is written in Python holds while it runs, besides what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sbpc._compat import TorchDispatchMode
from sbpc.graph.operands import leaves


class Held(TorchDispatchMode):
    """Counts the bytes of the storages that ops make while this lasts. peak: the most that are alive at once."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.known = {StorageWeakRef(x.untyped_storage()).cdata for x in leaves(given, Tensor)}
        self.alive: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive = [each for each in self.alive if not each[0].expired()]
        known = self.known | {storage.cdata for storage, _ in self.alive}
        for x in leaves(out, Tensor):
            storage = StorageWeakRef(x.untyped_storage())
            if storage.cdata not in known:
                known.add(storage.cdata)
                self.alive.append((storage, x.untyped_storage().nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self.alive))
        return out


def held_bytes(function: Callable[..., Any], args: Any) -> tuple[Any, int]:
    """What a call gives, and the most bytes that it holds besides its arguments, results included."""
    with Held(args) as held:
        return function(*args), held.peak
