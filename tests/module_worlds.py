"""One training script in two worlds: one process with the plain module, and ranks with the parallel one."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

import sbpc
from sbpc.runtime.start import process_groups
from sbpc.runtime.state.dtensors import placements

MESH = {"a": 2, "b": 2}
UNEVEN = {  # another order of cuts; 3 rows in 2 parts
    "up.weight": "[S(0), S(0)] S(0)@b>a",
    "up.bias": "[S(0), S(0)]",
    "down.weight": "[S(1), S(0)]",
    "down.bias": "[S(0), B]",
    "twin": "[B, S(0)]",
}


class Net(nn.Module):
    """Sizes that 2 and 4 do not divide; two biases with one gradient; a buffer; a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 3)
        self.twin = nn.Parameter(torch.randn(3))
        self.fixed = nn.Parameter(torch.randn(3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.out(x), y)

    def out(self, x: Tensor) -> Tensor:
        return (self.down(F.gelu(self.norm(self.up(x)))) + self.twin + self.fixed) * self.scale


def batch(seed: int = 1, rows: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)


def seeded(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


class Alone:
    """One process: the module itself."""

    def parallel(self, model: nn.Module, args: Any, evaluate: bool = False, **options: Any) -> nn.Module:
        return model

    def uneven(self) -> nn.Module:
        """A Net cut unevenly."""
        return self.parallel(seeded(), batch(), pin=UNEVEN)

    def built(self, kind: Callable[[], nn.Module], args: Any, **options: Any) -> tuple[nn.Module, int]:
        """A module of weights drawn anew, and by how much memory its making went over shards and largest tensor."""
        return kind(), 0

    def part(self, tensor: Tensor, layout: str) -> Tensor:
        return tensor

    def placed(self, tensor: Tensor, layout: str) -> Tensor:
        return tensor

    def whole(self, tensor: Any, layout: str = "") -> Tensor:
        return tensor.detach().clone()


class Ranks(Alone):
    """A rank: the module is planned and parallelized."""

    def __init__(self, folder: Path) -> None:
        self.mesh = sbpc.Mesh(**MESH)
        self.files = (folder / f"plan{at}" for at in itertools.count())

    def plan(self, model: nn.Module, args: Any, **options: Any) -> sbpc.Plan:
        """Made by rank 0 and read by all: a tenth of the work."""
        file = next(self.files)
        if dist.get_rank() == 0:
            sbpc.plan(model, args, self.mesh, **options).save(file)
        dist.barrier()
        return sbpc.load(file)

    def parallel(self, model: nn.Module, args: Any, evaluate: bool = False, **options: Any) -> nn.Module:
        plan = self.plan(model, args, **options)
        second = None
        if evaluate:
            second = self.plan(model.eval(), args, train=False, **options | {"pin": plan.parameters})
            model.train()
        return sbpc.parallelize(model, plan, evaluate=second)

    def uneven(self) -> nn.Module:
        return sbpc.parallelize(seeded(), self.uneven_plan)

    @functools.cached_property
    def uneven_plan(self) -> sbpc.Plan:
        """Planned once for all modules."""
        return self.plan(seeded(), batch(), pin=UNEVEN)

    def built(self, kind: Callable[[], nn.Module], args: Any, **options: Any) -> tuple[nn.Module, int]:
        torch.manual_seed(torch.initial_seed() + dist.get_rank())  # rank 0's counts
        with torch.device("meta"):
            model = kind()
        plan = self.plan(model, args, **options)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            module = sbpc.parallelize(model, plan, init=kind)
            # the profiler must not end while gloo's thread still allocates: that crashed, once in five runs
            time.sleep(0.5)
        events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        peak = max(itertools.accumulate(size for _, size in changes))
        shards = sum(p.to_local().nbytes for p in module.parameters())  # type: ignore[attr-defined]
        largest = max(p.nbytes for p in model.parameters())
        return module, max(0, peak - shards - largest - 200_000)  # 22 states of the generator, 5 kB each, and biases

    def part(self, tensor: Tensor, layout: str) -> Tensor:
        found = sbpc.Layout.parse(layout, self.mesh.axes)
        part = found.shard(tensor.detach(), self.mesh.sizes, self.mesh.coordinates(dist.get_rank())).clone()
        return part.requires_grad_(tensor.requires_grad)

    def placed(self, tensor: Tensor, layout: str) -> Tensor:
        found = sbpc.Layout.parse(layout, self.mesh.axes)
        there = placements(found, self.mesh.sizes)
        mesh, part = process_groups.device_mesh(self.mesh, "cpu"), self.part(tensor, layout)
        local = DTensor.from_local(part, mesh, there, shape=tensor.shape, stride=tensor.stride())
        return local.detach().requires_grad_(tensor.requires_grad)

    def whole(self, tensor: Any, layout: str = "") -> Tensor:
        if layout:
            parts: list[Any] = [None] * self.mesh.ranks
            dist.all_gather_object(parts, tensor.detach())
            tensor = sbpc.Layout.parse(layout, self.mesh.axes).whole(parts, self.mesh.sizes)
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
