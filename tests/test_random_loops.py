"""Random steps in micro-batches: number of parts, what blocks compute again, layouts, and what is boxed once are drawn at random."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import sbpc
from sbpc import Mesh
from sbpc.api.planning import Task, prepare
from sbpc.graph.ports import GRADIENT, PARAMETER
from sbpc.passes.assign.wishes import placeholder_wishes
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.micro_batches import micro_batches
from sbpc.passes.loop.recompute import FULL, NONE, SELECTIVE, blocks_of, recompute
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.passes.stages.balance import cuts_of, places_of
from sbpc.passes.stages.cut import cut
from sbpc.passes.stages.plan_stages import chunks_of, mesh_of_stage
from sbpc.plans.staged.schedules import chunks_in
from sbpc.plans.staged.staged_plan import StagedPlan
from tests import models
from tests.compare import relative_error
from tests.random_plans import draw
from tests.test_recompute import Layers

MESHES = {"pipe": 1, "data": 2}, {"pipe": 2, "data": 2}, {"pipe": 1, "data": 3}, {"pipe": 1, "data": 2, "tensor": 2}
OPTIONS: dict[str, Any] = {"optimizer": "adamw", "memory": None, "objective": "serial", "pin": {}}


class Blocks(nn.Module):
    """Two blocks with dropout, and a mean over targets of which the parts of the batch have unequal numbers that count."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Dropout(0.3)) for _ in range(2))
        self.layers = nn.Sequential(*blocks)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), target, ignore_index=-1)


def blocks() -> models.Model:
    return Blocks(), (torch.randn(8, 6), torch.tensor([-1, -1, -1, 2, 0, 1, 2, 3]))


def transformer() -> models.Model:
    return Layers(width=4, layers=2), (torch.randn(4, 3, 4),)


@functools.cache
def step(net: Callable[[], models.Model]) -> tuple[models.Model, Task, dict[str, Any]]:
    """A model, its captured step, and what that gives on one device."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = net()
    run = sbpc.simulate(sbpc.plan(model, args, Mesh(x=1), microbatches=1, objective="serial"), model, args, seed=3)
    return (model, args), prepare(model, args), {**run.gradients, "": run.outputs}


def random_forms(gm: Any, generator: random.Random) -> dict[str, str]:
    """What each block computes again."""
    return {name: generator.choice((NONE, SELECTIVE, FULL)) for name in dict.fromkeys(blocks_of(gm).values())}


def random_loop(gm: GraphModule, generator: random.Random, count: int) -> StagedPlan:
    """A step as a loop, with one stage or two."""
    mesh, schedule = Mesh(**generator.choice(MESHES)), generator.choice(("gpipe", "1f1b", "zbv"))
    loop, inner = loop_of(gm, count), mesh_of_stage(mesh, "pipe")
    assignment = draw(loop.body, inner, placeholder_wishes(loop.body, inner, None, None, False), generator)
    whole = make_plan(loop.body, inner, assignment, 0.0, OPTIONS, Stages())
    places = places_of(whole.graph)
    pieces = cut(whole.graph, places, cuts_of(whole.graph, places, mesh.sizes[0] * chunks_in(schedule), inner))
    chunks = chunks_of(whole, pieces, lambda piece, layouts: make_plan(piece, inner, layouts, 0.0, OPTIONS, Stages()))
    ports = [port for each in (loop.body.meta["ports"].inputs, loop.body.meta["ports"].outputs) for port in each]
    in_loop = {port for port in ports if port.kind in (PARAMETER, GRADIENT) and generator.random() < 0.5}
    options = OPTIONS | {"objective": generator.choice(("seconds", "serial"))}
    return StagedPlan(mesh, "pipe", loop, chunks, schedule, 0.0, frozenset(in_loop), options)


def random_parts(gm: GraphModule, generator: random.Random, count: int) -> sbpc.Plan:
    """A step whose calls stand in the graph once for each part of the batch."""
    mesh = Mesh(data=2)
    gm = micro_batches(gm, count, mesh.cluster)
    return make_plan(gm, mesh, draw(gm, mesh, placeholder_wishes(gm, mesh, None, None, False), generator), 0.0, OPTIONS, Stages())


def check(seed: int) -> None:
    """A random plan has the numbers of one device, and sends what is predicted."""
    generator = random.Random(seed)
    (model, args), task, expected = step(transformer if seed % 4 == 3 else blocks)
    gm = recompute(task.again().gm, random_forms(task.gm, generator))
    plan = (random_parts if seed % 4 == 2 else random_loop)(gm, generator, generator.choice((2, 4)))
    plan.verify()
    run = sbpc.simulate(plan, model, args, seed=3)
    for name, value in {**run.gradients, "": run.outputs}.items():
        assert isinstance(value, Tensor) and relative_error(value, expected[name], 1e-6) <= 1e-10, (seed, name)
    sent = {axis: size for axis, size in plan.cost.bytes_sent.items() if size}
    assert {axis: size for axis, size in run.bytes_sent.items() if size} == pytest.approx(sent, rel=1e-3), seed


@pytest.mark.parametrize("seed", [*range(4), 53])
def test_random_loops_have_the_numbers_of_one_device(seed: int) -> None:
    check(seed)


@pytest.mark.prove
def test_hundreds_of_random_loops_have_the_numbers_of_one_device() -> None:
    for seed in range(4, 504):
        check(seed)
