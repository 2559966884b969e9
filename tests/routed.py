"""A small mixture of experts, whose routing the caller decides, as `transformers` computes it: sorted rows, products
of groups, rows taken back and added up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 - it defines the op that stands for a product of groups in any type
from torch import Tensor, nn

product = torch.ops.transformers.grouped_mm_fallback
ROUTINGS = {  # by expert of five, what is added to its logits
    "as it comes": (0, 0, 0, 0, 0),
    "all to one": (0, 99, 0, 0, 0),
    "one idle": (0, 0, 0, -99, 0),
    "the last ones idle": (0, 0, -99, -99, -99),
    "the first ones idle": (-99, -99, -99, 0, 0),
}


class Routed(nn.Module):
    """A layer, and experts behind it, of which every token goes to `chosen`; with a loss that balances them."""

    def __init__(self, width: int = 8, hidden: int = 12, experts: int = 5, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.first, self.router = nn.Linear(width, width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ParameterDict(
            {"up": torch.randn(experts, hidden, width), "down": torch.randn(experts, width, hidden)}
        )

    def forward(self, x: Tensor, favour: Tensor) -> Tensor:
        x = x + F.gelu(self.first(x))
        rows = x.flatten(0, 1)
        share = torch.softmax(self.router(rows) + favour, -1)
        weights, ids = share.topk(self.chosen)
        order = torch.argsort(ids.flatten(), stable=True)
        count = torch.histc(ids.flatten()[order].to(torch.float32), len(favour), 0, len(favour) - 1)
        ends = torch.cumsum(count, 0, dtype=torch.int32)
        up, down = self.experts["up"], self.experts["down"]
        made = product(F.silu(product(rows[order // self.chosen], up.mT, ends)), down.mT, ends)
        made = made * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        mixed = made[back].view(*weights.shape, -1).sum(1)
        balance = (share.mean(0) * (count / count.sum())).sum()
        return (rows + mixed).square().sum() + balance


def batch(routing: str = "as it comes", rows: int = 6) -> tuple[Tensor, Tensor]:
    """Eight sequences, and what is added to the logits."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, rows, 8, dtype=torch.float64, generator=generator)
    return x, torch.tensor(ROUTINGS[routing], dtype=torch.float64)
