"""Plans that have the layouts of one plan in some blocks and those of another in the rest."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.passes.memory import search as memory
from sbpc.passes.memory.mix_blocks import blocks, spliced
from tests import models


def test_blocks_are_told_by_the_modules_of_nodes_forward_and_backward() -> None:
    plan = sbpc.plan(*models.gpt2(layers=3), Mesh(x=2))
    nodes = list(plan.graph.graph.nodes)
    along = dict(zip((node.name for node in nodes), blocks(plan.graph, [node.name for node in nodes])))
    phases = {(node.meta["phase"], along[node.name]) for node in nodes if node.op == "call_function" and not np.isnan(along[node.name])}
    assert phases == {(phase, (at + 0.5) / 3) for phase in ("forward", "backward") for at in range(3)}
    for at in range(3):
        assert {along[node.name] for node in nodes if node.name.startswith(f"blocks_{at}_")} == {(at + 0.5) / 3}
    assert all(np.isnan(along[node.name]) for node in nodes if node.name in ("tokens_weight", "norm_weight", "output"))


def test_blocks_of_a_sequence_are_told_by_their_numbers_too() -> None:
    class Squared(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().sum()

    plan = sbpc.plan(Squared(nn.Linear(4, 4), nn.Linear(4, 4)), (torch.randn(4, 4),), Mesh(x=2))
    names = [node.name for node in plan.graph.graph.nodes if node.name in ("_0_weight", "_1_weight")]
    assert blocks(plan.graph, names).tolist() == [0.25, 0.75]


def test_spliced_labels_are_of_both() -> None:
    along = np.array([np.nan, 0.25, 0.75, 0.25])
    assert spliced([1] * 4, [0] * 4, along, 0.5, last=True) == [0, 0, 1, 0]
    assert spliced([1] * 4, [0] * 4, along, 0.5, last=False) == [0, 1, 0, 1]


@pytest.mark.parametrize(("held", "fit"), [([1.0] * 12, 7), ([3.0] * 2 + [0.9] * 10, 7), ([0.1] * 11 + [11.0], 0), ([0.0] * 6 + [2.0] * 6, 3)])
def test_as_many_blocks_as_there_is_room_for_are_of_the_faster_plan(held: list[float], fit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve blocks: a faster plan takes more bytes in each, and there is room for so many of the last ones."""
    monkeypatch.setattr(memory, "blocks", lambda gm, names: (np.arange(12) + 0.5) / 12)

    def found(labels: list[int]) -> SimpleNamespace:
        taken = sum(held[at] for at in range(12) if labels[at])
        return SimpleNamespace(labels=labels, seconds=seconds(labels), bytes=10 + taken)

    def seconds(labels: list[int]) -> float:
        """The last blocks go first: where they meet the others from the front it costs more."""
        return 12.0 - sum(labels) + (0.5 if 0 < sum(labels) < 12 else 0.0) + (0.1 if labels[0] and not labels[-1] else 0.0)

    kept = []
    search = SimpleNamespace(
        gm=None, limit=17.0, plans=[found([1] * 12), found([0] * 12)], fits=lambda each: each.bytes <= 17.0, seconds=seconds,
        space=SimpleNamespace(variables=[SimpleNamespace(name="")] * 12),
        keep=lambda labels: kept.append(found(labels)) or kept[-1],
    )  # fmt: skip
    memory.Search.splice(search, search.plans[1])
    fitting = [sum(each.labels) for each in kept if search.fits(each)]
    assert max(fitting, default=0) == fit and len(kept) <= 8
