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
from sbpc.graph.pytree import flatten
from sbpc.passes.assign.wishes import placeholder_wishes
from sbpc.passes.loop.body import loop_of
from sbpc.passes.loop.micro_batches import micro_batches
from sbpc.passes.loop.recompute import FULL, NONE, SELECTIVE, blocks_of, recompute
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.passes.stages.balance import cuts_of, places_of
from sbpc.passes.stages.cut import cut
from sbpc.passes.stages.plan_stages import chunks_of, mesh_of_stage
from sbpc.plans.plan import Plan
from sbpc.plans.staged.schedules import chunks_in
from sbpc.plans.staged.staged_plan import StagedPlan
from tests import models
from tests.compare import eager, error_of
from tests.random_plans import draw
from tests.test_recompute import Layers

MESHES = {"data": 2}, {"data": 2, "tensor": 2}, {"data": 3}
OPTIONS: dict[str, Any] = {"optimizer": None, "memory": None, "objective": "serial", "pin": {}}


class Blocks(nn.Module):
    """Two blocks with dropout, and a mean over targets of which the parts of the batch have unequal numbers that count."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.LayerNorm(6), nn.Dropout(0.3)) for _ in range(2))
        self.layers = nn.Sequential(*blocks)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), target, ignore_index=-1)


def blocks() -> models.Model:
    return Blocks(), (torch.randn(12, 6), torch.tensor([-1, -1, -1, -1, -1, -1, 2, 0, 1, 2, 3, -1]))


def transformer() -> models.Model:
    return Layers(width=4, layers=2), (torch.randn(12, 3, 4),)


class WithLogits(nn.Module):
    """A loss, and beside it logits that have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.head(x)
        return {"loss": logits.logsumexp(1).sum(), "logits": logits.detach()}


def with_logits() -> models.Model:
    return WithLogits(), (torch.randn(12, 6),)


NETS: dict[str, Callable[[], models.Model]] = {  # of 12 samples
    "blocks": blocks,
    "transformer": transformer,
    "mlp": functools.partial(models.mlp, batch=12, width=6, hidden=12, layers=2),
    "gpt2": functools.partial(models.gpt2, seq=4, vocab=12, width=12, heads=3, layers=2),
    "vgg": functools.partial(models.vgg, channels=4, size=4, hidden=12),
    "resnet": functools.partial(models.resnet, channels=4, size=4),
    "batch_norm": functools.partial(models.batch_norm, channels=4, bias=False),  # a bias would have no gradient but rounding
    "with_logits": with_logits,
    "unused_parameter": functools.partial(models.unused_parameter, batch=12, width=6),
    "lora": functools.partial(models.lora, batch=12, width=6, hidden=12, rank=4),
    "ignore_index_loss": functools.partial(models.ignore_index_loss, batch=12, width=6, classes=4),
    "scalar_traps": functools.partial(models.scalar_traps, batch=12, width=6),
}
STAGED = "blocks", "transformer", "mlp", "gpt2", "resnet"  # which have enough places to be cut into four chunks
IN_PARTS = "blocks", "transformer", "gpt2", "batch_norm", "scalar_traps"  # the last two are no loops


@functools.cache
def step(name: str) -> tuple[models.Model, Task, list[Tensor], dict[str, Any]]:
    """A model, its captured step, and the results and gradients of the whole batch on one device."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = NETS[name]()
    if name in ("blocks", "transformer"):  # dropout: eager torch draws other random numbers
        run = sbpc.simulate(sbpc.plan(model, args, Mesh(x=1), microbatches=1, objective="serial"), model, args, seed=3)
        return (model, args), prepare(model, args), flatten(run.outputs, "outputs")[0], run.gradients
    return (model, args), prepare(model, args), *eager(model, args)


def random_forms(gm: Any, generator: random.Random) -> dict[str, str]:
    """What each block computes again."""
    return {name: generator.choice((NONE, SELECTIVE, FULL)) for name in dict.fromkeys(blocks_of(gm).values())}


def random_loop(gm: GraphModule, generator: random.Random, count: int, stages: int) -> StagedPlan:
    """A step as a loop, all ranks one stage or on stages along an axis of their own."""
    sizes = generator.choice(MESHES)
    axis, mesh = ("pipe", Mesh(pipe=stages, **sizes)) if stages else (None, Mesh(**sizes))
    schedule = generator.choice(("gpipe", "1f1b", "zbv")) if stages else "1f1b"
    loop, inner = loop_of(gm, count), mesh_of_stage(mesh, axis)
    assignment = draw(loop.body, inner, placeholder_wishes(loop.body, inner, None, None, False), generator)
    whole = make_plan(loop.body, inner, assignment, 0.0, OPTIONS, Stages())
    places = places_of(whole.graph)
    pieces = cut(whole.graph, places, cuts_of(whole.graph, places, max(stages, 1) * chunks_in(schedule), inner))
    chunks = chunks_of(whole, pieces, lambda piece, layouts: make_plan(piece, inner, layouts, 0.0, OPTIONS, Stages()))
    ports = [port for each in (loop.body.meta["ports"].inputs, loop.body.meta["ports"].outputs) for port in each]
    in_loop = {port for port in ports if port.kind in (PARAMETER, GRADIENT) and generator.random() < 0.5}
    options = OPTIONS | {"objective": generator.choice(("seconds", "serial"))}
    return StagedPlan(mesh, axis, loop, chunks, schedule, 0.0, frozenset(in_loop), options)


def random_parts(gm: GraphModule, generator: random.Random, count: int) -> Plan:
    """A step whose calls stand in the graph once for each part of the batch."""
    mesh = Mesh(**generator.choice(MESHES))
    gm = micro_batches(gm, count, mesh.cluster)
    return make_plan(gm, mesh, draw(gm, mesh, placeholder_wishes(gm, mesh, None, None, False), generator), 0.0, OPTIONS, Stages())


def check(name: str, seed: int) -> None:
    """A random plan has the numbers of one device, sends what is predicted, and holds so within 5 %."""
    generator = random.Random(seed)
    (model, args), task, results, gradients = step(name)
    count = generator.randint(1, 4)
    gm = recompute(task.again().gm, random_forms(task.gm, generator))
    if name in IN_PARTS and (name not in STAGED or generator.random() < 0.25):
        plan: Plan | StagedPlan = random_parts(gm, generator, count)
    else:
        plan = random_loop(gm, generator, count, generator.choice((0, 0, 1, 2)) if name in STAGED else 0)
    plan.verify()
    run = sbpc.simulate(plan, model, args, seed=3)
    assert error_of(run, results, gradients) <= 1e-10, (name, seed)
    sent = {axis: size for axis, size in plan.cost.bytes_sent.items() if size}
    least = 2 * count  # of a scalar's sum over three ranks 4/3 bytes are predicted that no ring sends, as it cannot be cut
    assert {axis: size for axis, size in run.bytes_sent.items() if size} == pytest.approx(sent, rel=1e-3, abs=least), (name, seed)
    assert plan.cost.memory["total"] == pytest.approx(run.peak_memory, rel=0.05), (name, seed)


@pytest.mark.parametrize(("name", "seed"), [("blocks", 104), ("mlp", 128), ("with_logits", 103), ("lora", 141), ("ignore_index_loss", 102), ("scalar_traps", 11)])
def test_random_loops_have_the_numbers_of_one_device(name: str, seed: int) -> None:
    check(name, seed)


@pytest.mark.prove
@pytest.mark.parametrize("name", NETS)
def test_hundreds_of_random_loops_have_the_numbers_of_one_device(name: str) -> None:
    """42 draws for each of the twelve models."""
    for seed in range(100, 142):
        check(name, seed)
