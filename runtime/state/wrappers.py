"""Refuse torch's own data parallelism of a module that a plan has made parallel: it would sum its gradients twice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from sbpc._compat import fsdp_param
from sbpc.errors import PlanError
from sbpc.runtime.state.dtensors import is_planned

TRAINER = "Give the Trainer the one-device model, then call sbpc.integrations.hf(trainer, mesh=...), which plans it."
TODO = (
    "Leave it out: the plan is the parallelism, and the module sends what must be sent. Lightning and Fabric: "
    f'strategy=ModelParallelStrategy(...) in place of "ddp" or "fsdp". transformers: {TRAINER}'
)


@functools.lru_cache(maxsize=1)
def refuse() -> None:
    """Has the constructors refuse modules with, and parameters that are, DTensors on a plan's mesh: `fully_shard`
    makes an FSDPParam of each."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for cls in (nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel, fsdp_param()):
        cls.__init__ = refusing(cls, cls.__init__)  # type: ignore[misc]


def refusing(cls: type, construct: Callable[..., None]) -> Callable[..., None]:
    """Returns the constructor of a wrapper with a look at what it is given."""
    name = "fully_shard" if cls.__name__ == "FSDPParam" else cls.__name__

    @functools.wraps(construct)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        inner: Any = args[0] if args else kwargs.get("module", kwargs.get("param"))
        parameters: Iterable[Any] = inner.parameters() if isinstance(inner, nn.Module) else [inner]
        if any(map(is_planned, parameters)):
            raise PlanError(f"{name} of a module that sbpc.parallelize made\n  {TODO}")
        construct(self, *args, **kwargs)

    return checked
