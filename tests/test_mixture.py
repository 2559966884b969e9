"""Mixtures of experts: where it is cheapest the solver splits the experts, with two all-to-alls each way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.boxing.steps import WIRE
from tests.compare import largest_error


class Mixture(nn.Module):
    """A layer, and experts with gates behind it: every token of a group goes to `chosen` experts, of which each takes at most `room`
    of the group (Lepikhin et al. 2021, "GShard")."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int, room: int) -> None:
        super().__init__()
        self.chosen, self.room = chosen, room
        self.first, self.gate = nn.Linear(width, width), nn.Linear(width, experts, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, width, hidden)),
            nn.Parameter(torch.randn(experts, hidden, width)),
        )

    def forward(self, x: Tensor) -> Tensor:  # group, token, feature
        x = F.gelu(self.first(x))
        weights, experts = torch.softmax(self.gate(x), -1).topk(self.chosen)
        hot = F.one_hot(experts, self.up.shape[0])
        place = hot.flatten(1, 2).cumsum(1).view_as(hot) * hot  # from 1 on; 0 where a token does not go
        slots = F.one_hot(place.clamp(max=self.room + 1), self.room + 2)[..., 1 : self.room + 1].to(x.dtype)
        rows = torch.einsum("gsec,gsd->egcd", slots.sum(2), x)
        made = torch.einsum("egcf,efd->egcd", F.gelu(torch.einsum("egcd,edf->egcf", rows, self.up)), self.down)
        mixed = torch.einsum("gsec,egcd->gsd", (slots * weights[..., None, None]).sum(2), made)
        return (x + mixed).square().sum()


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ((4096, 14_336, 8, 2, 1024), (8, 4096)),
        pytest.param((2048, 1408, 64, 6, 192), (8, 2048), marks=pytest.mark.prove),
    ],
    ids=["Mixtral", "DeepSeek"],
)
def test_the_solver_splits_the_experts_where_it_is_cheapest(sizes: tuple[int, ...], groups: tuple[int, int]) -> None:
    """Nothing is pinned: gradients of whole experts would be far larger than what goes to the ranks of the chosen ones and back."""
    with torch.device("meta"):
        model, x = Mixture(*sizes).bfloat16(), torch.empty(*groups, sizes[0], dtype=torch.bfloat16)
    plan = sbpc.plan(model, (x,), Mesh(ranks=8, cluster="h100"), objective="serial")
    assert [str(plan.layout(name)) for name in ("up", "down", "gate.weight")] == ["[S(0)]", "[S(0)]", "[B]"]
    steps = [node for node in plan.boxed.graph.nodes if "step" in node.meta and node.meta["step"].collective in WIRE]
    moved = [
        (node.meta["phase"], node.meta["val"].numel()) for node in steps if node.meta["step"].collective == "all_to_all"
    ]
    width, _, experts, _, room = sizes
    rows = experts * groups[0] * room * width
    exchanged = [phase for phase, size in moved if size == rows]  # the layer before may be split by rows or by columns
    assert exchanged == ["forward", "forward", "backward", "backward"]
    assert plan.cost.seconds < 0.8 * sbpc.baseline("data", model, (x,), plan.mesh).cost.seconds


def test_split_experts_equal_one_device() -> None:
    torch.manual_seed(0)
    model, x = Mixture(8, 12, 4, 2, 4).double(), torch.randn(4, 6, 8, dtype=torch.float64)
    for axes in ({"a": 2}, {"a": 2, "b": 2}):
        plan = sbpc.plan(model, (x,), Mesh(**axes), pin={"up": "S(0)@a", "down": "S(0)@a"})
        assert plan.verify() > 40 and largest_error(plan, model, (x,)) <= 1e-10
