"""Rows for what plans hold at their peaks: no plan takes less than a row counts, of the plan that it is made for or another."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.api import placeholder_wishes
from sbpc.cost import OPTIMIZER_STATE
from sbpc.passes.annotate import annotate
from sbpc.passes.held import rows
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.passes.prices import PricedSpace
from sbpc.passes.store import store
from tests import models
from tests.random_plans import draw

COPIES = 1 + OPTIMIZER_STATE["adamw"]
LIMIT = 1e3  # bytes: so few that every row says something


class Space:
    """A model's problem with stored values, plans of it, and rows that plans are held against."""

    def __init__(self, model: nn.Module, args: tuple, mesh: Mesh, **options) -> None:
        free = sbpc.plan(model, args, mesh, **options)
        self.gm, self.mesh = annotate(store(free.graph)), mesh
        self.priced = PricedSpace(self.gm, mesh, {}, {})
        self.free = self.priced.labels(free.assignment)
        self.wishes = placeholder_wishes(self.gm, mesh, None, None, False)
        self.calls = [n for n in self.gm.graph.nodes if n.op == "call_function" and "candidates" in n.meta]

    def plan(self, labels: list[int]) -> sbpc.Plan:
        assignment = self.priced.assignment(labels)
        return make_plan(self.gm, self.mesh, assignment, 0.0, {"optimizer": "adamw"}, Stages())

    def drawn(self, seed: int) -> list[int]:
        """Labels of a random plan, or of the one that was planned."""
        if seed % 2:
            return self.free
        return self.priced.labels(draw(self.gm, self.mesh, self.wishes, random.Random(seed)))

    def changed(self, labels: list[int], draws: random.Random) -> list[int]:
        """Labels of which some are others; a boxing that is needed may be impossible."""
        found = list(labels)
        for at in draws.sample(range(len(found)), draws.choice((1, 1, 2, 3, 5))):
            found[at] = draws.randrange(len(self.priced.variables[at].costs))
        return found


def counted(space: Space, seeds: int, others: int) -> tuple[float, float, int]:
    """The most that rows count, as a part of what the plan takes: of other plans, and of those for which they are made; and
    how many other plans there were."""
    most = own = 0.0
    tried = 0
    for seed in range(seeds):
        draws, labels = random.Random(seed), space.drawn(seed)
        plan = space.plan(labels)
        found = rows(space.priced, plan, space.calls, COPIES, LIMIT)
        for number in range(1 + others):
            changed = space.changed(labels, draws) if number else labels
            if not math.isfinite(space.priced.seconds(space.priced.assignment(changed))):
                continue
            takes = (space.plan(changed) if number else plan).cost.memory["total"]
            for row in found.values():
                counts = sum(float(w[changed[at]]) for at, w in row.weights.items()) - (row.most - LIMIT)
                most, own = max(most, counts / takes), own if number else max(own, counts / takes)
            tried += number > 0
    return most, own, tried


@pytest.mark.parametrize("name", ["mlp", "lora", "batch_norm", "vgg"])
@pytest.mark.parametrize("mesh", [Mesh(x=4), Mesh(x=2, y=2)], ids=str)
def test_no_plan_takes_less_than_a_row_counts(name: str, mesh: Mesh) -> None:
    torch.manual_seed(0)
    most, own, tried = counted(Space(*models.MODELS[name](), mesh), 4, 8)
    assert most <= 1 and own >= 0.99 and tried >= 10


@pytest.mark.prove
@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("mesh", [Mesh(x=3), Mesh(x=4), Mesh(x=2, y=2)], ids=str)
def test_no_plan_takes_less_than_any_row_counts(name: str, mesh: Mesh) -> None:
    torch.manual_seed(0)
    most, own, tried = counted(Space(*models.MODELS[name](), mesh), 40, 20)
    assert most <= 1 and own >= 0.95 and tried >= 100


def test_what_a_boxing_needs_on_the_way_is_counted_where_it_is_boxed_alike() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x).cos()

    x = torch.randn(24, 24)
    plan = sbpc.plan(Twice(), (x,), Mesh(x=4), train=False, inputs=["S(0)"], pin={"cos": "S(0)"})
    space = PricedSpace(plan.graph, plan.mesh, {}, {})
    call = next(node for node in plan.graph.graph.nodes if node.op == "call_function")
    labels = space.labels(plan.assignment)
    (row,) = rows(space, plan, [call], 0, LIMIT).values()
    whole, shard = 4 * 24 * 24, 6 * 4 * 24
    assert sum(float(w[labels[at]]) for at, w in row.weights.items()) - (row.most - LIMIT) >= whole + shard
    named = {space.nodes[at].name for at in row.weights}
    assert {"x", call.name} <= named


def test_a_plan_whose_copies_do_not_fit_is_not_taken_for_one_that_does() -> None:
    """Of two products on eight devices the cheapest plans that are sure to fit hold copies that do not: the best plan is
    found where rows count these."""
    with torch.device("meta"):
        model = models.mlp(batch=65_536, width=4_096, hidden=16_384, layers=2)
    mesh = Mesh(x=8, cluster="h100")
    free = sbpc.plan(*model, mesh)
    plan = sbpc.plan(*model, mesh, memory=0.9375 * free.cost.memory["total"])
    assert plan.cost.memory["total"] <= 0.9375 * free.cost.memory["total"]
    assert plan.cost.gap <= 1e-5 and plan.cost.seconds <= 1.03 * free.cost.seconds
