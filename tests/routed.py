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


class Layer(nn.Module):
    """A layer, and experts behind it, of which every token goes to `chosen`; besides, how evenly they do."""

    def __init__(self, width: int = 8, hidden: int = 12, experts: int = 5, chosen: int = 2) -> None:
        super().__init__()
        self.chosen = chosen
        self.first, self.router = nn.Linear(width, width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ParameterDict(
            {"up": torch.randn(experts, hidden, width), "down": torch.randn(experts, width, hidden)}
        )

    def forward(self, x: Tensor, favour: Tensor) -> tuple[Tensor, Tensor]:
        x = x + F.gelu(self.first(x))
        rows = x.flatten(0, 1)
        share = torch.softmax(self.router(rows) + favour, -1)
        weights, ids = share.topk(self.chosen)
        order = torch.argsort(ids.flatten(), stable=True)
        count = torch.histc(ids.flatten()[order].to(torch.float32), len(favour), 0, len(favour) - 1)
        ends = torch.cumsum(count, 0, dtype=torch.int32)
        up, down = self.experts["up"], self.experts["down"]
        made = product(self.gated(product(rows[order // self.chosen], up.mT, ends)), down.mT, ends)
        made = self.sorted_rows(made * weights.flatten()[order].unsqueeze(-1))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        mixed = made[back].view(*weights.shape, -1).sum(1)
        balance = (share.mean(0) * (count / count.sum())).sum()
        return (rows + mixed).view_as(x), balance

    def gated(self, rows: Tensor) -> Tensor:
        """What is done to rows between the products."""
        return F.silu(rows)

    def sorted_rows(self, rows: Tensor) -> Tensor:
        """What is done to rows as they are sorted."""
        return rows


class Routed(Layer):
    """One such layer, with a loss that balances the experts."""

    def forward(self, x: Tensor, favour: Tensor) -> Tensor:  # type: ignore[override]
        made, balance = super().forward(x, favour)
        return made.square().sum() + balance


class Gated(Routed):
    """Gates and what they are for are two halves of what one weight gives, as in the mixtures of `transformers`."""

    def __init__(self) -> None:
        super().__init__(hidden=24)
        self.experts["down"] = torch.randn(5, 8, 12)

    def gated(self, rows: Tensor) -> Tensor:
        gate, up = rows.chunk(2, -1)
        return F.silu(gate) * up


class Layers(nn.Module):
    """Several, without a loss that balances them: a micro-batch alone cannot tell how evenly the batch goes."""

    def __init__(self, layers: int = 2, experts: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(experts=experts) for _ in range(layers))

    def forward(self, x: Tensor, favour: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, favour)[0])
        return x.square().mean()


class Evened(Layers):
    """Several, each with a loss that balances its experts over the whole batch."""

    def forward(self, x: Tensor, favour: Tensor) -> Tensor:
        uneven = x.new_zeros(())
        for layer in self.layers:
            made, balance = layer(x, favour)
            x, uneven = torch.tanh(made), uneven + balance
        return x.square().mean() + 0.1 * uneven


def batch(routing: str = "as it comes", rows: int = 6, experts: int = 5) -> tuple[Tensor, Tensor]:
    """Eight sequences, and what is added to the logits; further experts are as the last of five."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, rows, 8, dtype=torch.float64, generator=generator)
    favour = ROUTINGS[routing] + ROUTINGS[routing][-1:] * (experts - 5)
    return x, torch.tensor(favour, dtype=torch.float64)
