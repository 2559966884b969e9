"""Embedding bags are planned by the rules of what they are made of: numbers are those of one device in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from tests.compare import largest_error
from tests.random_plans import random_plan

OFFSETS = torch.tensor([0, 3, 3, 9])  # one bag is empty


class Bags(nn.Module):
    """A table, its bags, and a loss."""

    def __init__(self, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 6, **options)
        self.weights = nn.Parameter(torch.randn(16)) if weighted else None

    def forward(self, indices: Tensor, offsets: Tensor | None = None) -> Tensor:
        weights = None if self.weights is None else self.weights.view(indices.shape)
        return self.bag(indices, offsets, per_sample_weights=weights).square().sum()


CASES: dict[str, dict[str, Any]] = {
    "sum": {"mode": "sum"},
    "mean": {"mode": "mean"},
    "mean without padding": {"mode": "mean", "padding_idx": 3},
    "weighted": {"mode": "sum", "weighted": True},
    "weighted without padding": {"mode": "sum", "weighted": True, "padding_idx": 3},
    "with the last offset": {"mode": "sum", "include_last_offset": True},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ragged", [True, False])
def test_bags_equal_those_of_one_device(float64: None, name: str, ragged: bool) -> None:
    torch.manual_seed(0)
    indices, offsets = torch.randint(12, (16,)), OFFSETS
    if CASES[name].get("include_last_offset"):
        offsets = torch.cat([OFFSETS, torch.tensor([16])])
    model, args = Bags(**CASES[name]), (indices, offsets) if ragged else (indices.view(4, 4),)
    plan = sbpc.plan(model, args, Mesh(x=2))
    assert not plan.notes
    for each in (plan, *(random_plan(plan, seed) for seed in range(4))):
        assert largest_error(each, model, args) <= 1e-12


def test_bags_of_one_length_are_split_without_a_collective_in_the_forward() -> None:
    model, indices = Bags(mode="sum").bag, torch.randint(12, (64, 4))
    plan = sbpc.plan(model, (indices,), Mesh(x=2), train=False, pin={"weight": "B"}, outputs=["S(0)"], inputs=["S(0)"])
    assert not plan.notes and plan.cost.bytes_sent == {"x": 0}


def test_a_maximum_over_bags_is_planned_whole_and_the_plan_says_so() -> None:
    plan = sbpc.plan(Bags(mode="max"), (torch.randint(12, (4, 4)),), Mesh(x=2))
    assert any("no rule for aten._embedding_bag.default" in note for note in plan.notes)


def test_sums_of_half_precision_are_taken_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.EmbeddingBag(12, 6, mode="sum").bfloat16()
    args = (torch.randint(12, (640,)), torch.tensor([0, 300]))
    found = sbpc.simulate(sbpc.plan(model, args, Mesh(x=2)), model, args)
    wide = nn.EmbeddingBag.from_pretrained(model.weight.detach().double(), mode="sum")(*args)
    torch.testing.assert_close(found.outputs.double(), wide, rtol=2**-8, atol=0.0)
