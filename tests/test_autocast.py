"""What torch computes in float32 under autocast is computed in float32 on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh

HALF = torch.bfloat16


class Mixed(nn.Module):
    """Ops that autocast has in float32 of what a product left in bfloat16, and some that keep the type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 16, bias=False), nn.LayerNorm(16)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        low = self.linear(x)  # exact in bfloat16: small whole numbers
        return {
            "product": low,
            "softmax": torch.softmax(low, 1),
            "softmax over what is split": torch.log_softmax(low, 0),
            "layer norm": self.norm(low),
            "cross entropy": F.cross_entropy(low, labels),
            "mean of squares": F.mse_loss(low, low.flip(1)),
            "norm": torch.linalg.vector_norm(low.float(), dim=0),
            "sum": torch.sum(low, dim=0, dtype=torch.float32),
            "cumulative sum": low.cumsum(1),
            "exp": low.exp(),
            "power": low.pow(3),
            "log": low.abs().add(1).log(),
            "cosine": F.cosine_similarity(low, low.flip(1), dim=1),
        }


@pytest.mark.parametrize("axes", [{"d": 2, "t": 2}, {"d": 3}])
def test_what_autocast_has_in_float32_is_so_on_every_mesh(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, dice = Mixed(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.linear.weight.copy_(torch.randint(-1, 2, (16, 32), generator=dice))
    x, labels = torch.randint(-1, 2, (48, 32), generator=dice).float(), torch.randint(16, (48,), generator=dice)
    with torch.autocast("cpu", HALF), torch.no_grad():
        wanted = model(x, labels)
    for inputs in (None, ["S(0)@d", "S(0)@d"], ["S(1)@d", None]):
        plan = sbpc.plan(model, (x, labels), Mesh(**axes), dtype=HALF, inputs=inputs)
        found: Any = sbpc.simulate(plan, model, (x, labels)).outputs
        assert {name: each.dtype for name, each in found.items()} == {name: each.dtype for name, each in wanted.items()}
        for name, each in wanted.items():
            rtol = 1e-5 if each.dtype == torch.float32 else 1e-2
            torch.testing.assert_close(found[name], each, rtol=rtol, atol=rtol * float(each.abs().max()), msg=name)
