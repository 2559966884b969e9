"""Bounds of loops and stages: no layouts beat them, and they are near where computing, with its starts, is most of a step."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.mesh.cluster import Cluster
from tests import models

LATE = Cluster("late", 1e10, 1e10, 2e-6, 1, 5e-6, 1e9, 5e-6, 1e9)  # collectives have latencies, kernels starts


class Chain(nn.Module):
    """Blocks of one product each; the mean of the squares as the loss."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().mean()


LONG = [pytest.param({"schedule": schedule}, marks=pytest.mark.prove) for schedule in ("gpipe", "zbv")]


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b", "stages": None}, *LONG], ids=str)
def test_no_layouts_of_two_products_take_less_than_the_bound(options: dict[str, str]) -> None:
    """All homes of both weights are tried, with the layouts that are best for each."""
    model, args = Chain(16, 2), (torch.randn(64, 16),)
    mesh = Mesh(pipe=2, x=2, cluster=LATE) if options.get("stages", "") is not None else Mesh(x=2, cluster=LATE)
    asked = {"stages": "pipe", "microbatches": 4, **options}
    if options.get("schedule") == "zbv":  # which has two chunks on each stage
        model.blocks.extend(nn.Linear(16, 16, bias=False) for _ in range(2))
    free = sbpc.plan(model, args, mesh, **asked)
    names = [f"blocks.{at}.weight" for at in range(2)]
    pinned = [
        sbpc.plan(model, args, mesh, pin=dict(zip(names, states)), **asked).cost.seconds
        for states in itertools.product(("B", "S(0)", "S(1)"), repeat=2)
    ]
    assert 0.2 * min(pinned) < free.cost.lower_bound <= min(pinned)
    assert 0 <= free.cost.serial_gap < 1 and free.cost.serial_bound > 0


def test_the_bounds_of_a_gpt_count_the_starts_of_its_kernels() -> None:
    model, args = models.gpt2(batch=32, layers=4)
    model = model.to(torch.bfloat16)  # for which the figures of this cluster are
    loop = sbpc.plan(model, args, Mesh(x=2, y=4, cluster="h100"), microbatches=4)
    assert loop.cost.gap < 0.05
    staged = sbpc.plan(model, args, Mesh(pipe=4, x=2, cluster="h100"), stages="pipe", microbatches=8)
    assert staged.cost.gap < 0.2


def test_layouts_of_a_loop_know_that_gradients_add_up() -> None:
    """Where weights are whole on every rank, so are their gradients, and each micro-batch adds to all of them. Unknown, the gap is 0.40."""
    with torch.device("meta"):
        model, args = Chain(4096, 4).to(torch.bfloat16), (torch.empty(16384, 4096, dtype=torch.bfloat16),)
    plan = sbpc.plan(model, args, Mesh(x=8, cluster="a100"), microbatches=16)
    assert plan.cost.serial_gap < 0.1
