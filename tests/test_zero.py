"""Under falling memory limits a loop over micro-batches goes from plain data parallelism through the three stages of ZeRO."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.graph.ports import GRADIENT, PARAMETER, Port, placeholders
from sbpc.mesh.pins import Wish
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import placeholder_wishes
from sbpc.passes.stages import plan_stages
from sbpc.passes.stages.zero import groups_of, with_best, within_levels
from sbpc.plans.chunk import Assignment
from sbpc.plans.plan import Plan
from sbpc.plans.staged.stage_parts import parts_of
from sbpc.solver import total
from tests import models
from tests.random_plans import draw

MESH = Mesh(pipe=1, data=8, cluster=models.RINGS)
LIMITS = None, 0.72, 0.5, 0.3089
SENT = "all_gather", "all_reduce", "reduce_scatter"


@pytest.fixture(autouse=True)
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One micro-batch goes all the way before the next, whatever is faster: else bytes are those of all of them."""
    monkeypatch.setattr(plan_stages, "CHUNKS", ())


@functools.cache
def planned(limit: float | None = None) -> Plan:
    """A wide transformer in 4 micro-batches, whose parameters take more than its activations. limit: of the free plan's bytes."""
    torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        model, args = models.gpt2(batch=128, seq=512, vocab=512, width=4096, heads=4, layers=1)
    memory = None if limit is None else limit * planned().cost.memory["total"]
    return sbpc.plan(model, args, MESH, stages="pipe", microbatches=4, memory=memory)


def row(limit: float | None) -> str:
    """What a plan takes, and its collectives of more than a megabyte by the part of the step in which they run."""
    plan, sent = planned(limit), Counter[str]()
    boxed = plan.chunks[0].unscheduled
    for node, part in parts_of(boxed, plan.in_loop).items():
        if "step" in node.meta and node.meta["step"].collective in SENT and node.meta["val"].nbytes > 1e6:
            sent[f"{part} {node.meta['step'].collective}"] += 1
    inside = Counter(port.kind for port in plan.in_loop)
    cost = plan.cost
    figures = f"{cost.seconds * 1e3:5.1f} ms {cost.memory['total'] / 1e9:4.2f} GB, {inside[GRADIENT]:2} {inside[PARAMETER]:2} in the loop"
    return f"{limit or 1:5} {figures}: {', '.join(f'{count} {name}' for name, count in sorted(sent.items()))}\n"


def test_each_stage_of_zero_is_the_fastest_that_fits_under_some_limit() -> None:
    """before: parameters are gathered once. after: gradients are sent home once. free: gathered in each forward and each backward."""
    assert_expected_inline(
        "".join(map(row, LIMITS)),
        """\
    1  17.6 ms 5.01 GB,  0  0 in the loop: 6 after all_reduce
 0.72  17.1 ms 3.21 GB,  0  0 in the loop: 6 after reduce_scatter, 6 before all_gather
  0.5  18.6 ms 2.46 GB,  4  0 in the loop: 4 W reduce_scatter, 2 after reduce_scatter, 6 before all_gather
0.3089  34.8 ms 1.55 GB,  6  4 in the loop: 6 W reduce_scatter, 2 before all_gather, 4 free all_gather
""",
    )
    free, first, second, third = map(planned, LIMITS)
    assert first.cost.seconds <= 1.001 * free.cost.seconds  # a scatter and a gather, both hidden, for each all-reduce
    assert first.cost.seconds < second.cost.seconds < third.cost.seconds
    assert all(planned(limit).cost.memory["total"] <= limit * free.cost.memory["total"] for limit in LIMITS[1:])


@functools.cache
def alike(limit: float | None = None) -> Plan:
    """Two wide layers of four equal matrices and a large batch, so that cutting activations instead would send more."""
    torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        model, args = models.mlp(batch=1 << 18, width=4096, hidden=1 << 14, layers=2, bias=False)
    memory = None if limit is None else limit * alike().cost.memory["total"]
    return sbpc.plan(model, args, Mesh(data=8, cluster="h100"), microbatches=4, memory=memory)


def test_equal_layers_are_all_at_one_stage_of_zero_at_the_bytes_of_that_stage() -> None:
    for limit, most in [
        (None, {"after all_reduce": 4}),
        (0.728, {"after reduce_scatter": 4, "before all_gather": 4}),  # ZeRO-1
        # ZeRO-2: gradients are scattered in every micro-batch
        (0.616, {"W reduce_scatter": 4, "before all_gather": 4}),
    ]:
        plan, sent = alike(limit), Counter[str]()
        for node, part in parts_of(plan.chunks[0].unscheduled, plan.in_loop).items():
            if "step" in node.meta and node.meta["step"].collective in SENT and node.meta["val"].nbytes > 1e6:
                sent[f"{part} {node.meta['step'].collective}"] += 1
        assert sent == most
        assert plan.cost.memory["total"] <= (limit or 1) * alike().cost.memory["total"]


class Odd(nn.Module):
    """A parameter that nothing reads, one that is taken apart, and one with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.unused = nn.Parameter(torch.empty(2048, 1024)), nn.Linear(8, 8)
        self.names, self.head = nn.Embedding(4096, 1024), nn.Linear(1024, 4096, bias=False)
        self.head.weight = self.names.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = self.both.chunk(2)
        x = self.names(x)
        return F.cross_entropy(self.head(F.linear(x, one) * F.linear(x, other)), y)


def test_parameters_unused_taken_apart_and_with_two_names_are_cut_where_no_pin_says_otherwise() -> None:
    with torch.device("meta"):
        model, args = Odd(), (torch.empty(8192, dtype=torch.int64), torch.empty(8192, dtype=torch.int64))
    for pins in ({}, {"head.weight": "B"}, {"names.weight": "B"}):
        free = sbpc.plan(model, args, Mesh(data=4, cluster="h100"), microbatches=4, pin=pins)
        limited = sbpc.plan(model, args, free.mesh, microbatches=4, pin=pins, memory=0.9 * free.memory["total"])
        assert limited.memory["total"] <= 0.9 * free.memory["total"]
        assert (str(limited.layout("head.weight")) == str(limited.layout("names.weight")) == "[B]") == bool(pins)


def test_levels_stop_where_they_are_no_faster_than_what_fits() -> None:
    free = planned()
    assert free.body is not None
    # in seconds of the plan without moves; every other one takes 1.5 and never fits
    for best, builds in ((inf, 2), (1.2, 1), (0.9, 0)):
        tried: list[Any] = []

        def build(assignment: Assignment, in_loop: frozenset[Port], tried: list[Any] = tried) -> Any:
            seconds = SimpleNamespace(seconds=1.5 * free.cost.seconds)
            tried.append(SimpleNamespace(stages=1, cost=seconds, memory_of=lambda stage: free.cost.memory))
            return tried[-1]

        found = within_levels(free, free.body, 0.5 * free.cost.memory["total"], build, best * free.cost.seconds)
        assert found is (tried[-1] if tried else free)
        assert len(tried) >= builds if best == inf else len(tried) == builds


def test_what_is_cut_is_laid_out_as_is_best_with_all_else_as_it_is() -> None:
    """All else as a random plan has it, so that equal blocks differ."""
    model, args = models.gpt2(batch=4, layers=3)
    gm, mesh = (
        sbpc.plan(model, args, Mesh(x=2, y=2, cluster="h100"), objective="serial").graph,
        Mesh(x=2, y=2, cluster="h100"),
    )
    assignment = draw(gm, mesh, placeholder_wishes(gm, mesh, None, None, False), random.Random(0))
    cut = {node.name: Wish(spread=(0, 1)) for port, node in placeholders(gm).items() if port.kind == PARAMETER}
    space, groups = Space(gm, mesh, cut, {}), groups_of(gm)
    known = space.known_labels(assignment)
    labels = with_best(space, known, [group.nodes for group in groups])
    ours = {node for group in groups for node in group.nodes}
    assert [labels[at] for at, node in enumerate(space.nodes) if node not in ours] == [
        known[at] or 0 for at, node in enumerate(space.nodes) if node not in ours
    ]
    tried = 0
    for group in groups:
        free = [space.number[node] for node in group.nodes]
        for others in itertools.islice(itertools.product(*(range(len(space.tables[at])) for at in free)), 200):
            other = list(labels)
            for at, label in zip(free, others):
                other[at] = label
            assert total(space.problem, labels) <= total(space.problem, other) * (1 + 1e-9), group.names
            tried += other != labels
    assert tried > 50
