"""The cases of `tests.bench.study`: nets small enough that all their layouts can be gone through."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpc.mesh.cluster import CLUSTERS as NAMED
from sbpc.mesh.cluster import Cluster
from tests.bench.ablation import ETHERNET, SLOW
from tests.models import Model

# two ranks a node, so that meshes of two axes have both links
CLUSTERS: dict[str, Cluster] = {
    "h100": NAMED["h100"],
    "ethernet": dataclasses.replace(ETHERNET, ranks_per_node=2),
    "slow": SLOW,
}


class Layers(nn.Module):
    """Products with activations between them, and the sum of what comes out as the loss."""

    def __init__(self, widths: tuple[int, ...], bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=bias) for pair in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x).sum()


class Squares(nn.Module):
    """One product, and the sum of the squares: calls beside which a gradient may be sent."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum()


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x)), as Llama has it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.gate(x)) * self.up(x)).sum()


class Residual(nn.Module):
    """x + down(relu(up(x)))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(F.relu(self.up(x)))).sum()


class Attention(nn.Module):
    """One product for queries, keys and values of all heads, attention, one product behind it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.heads, self.out = heads, nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, kv = (each(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2) for each in (self.q, self.kv))
        out = F.scaled_dot_product_attention(q, kv, kv)
        return self.out(out.transpose(1, 2).reshape(x.shape)).sum()


class Tied(nn.Module):
    """Tokens and head share one weight."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.tokens(tokens) @ self.tokens.weight.t()).sum()


class Experts(nn.Module):
    """Every expert works on every row; a gate weighs what they give."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        each = torch.relu(x @ self.up) @ self.down
        return (each * self.gate(x).t().unsqueeze(2)).sum()


def net(module: Callable[..., nn.Module], shape: tuple[int, ...], *sizes: object) -> Callable[[], Model]:
    """Returns what makes a net without data, and its input; integers for tokens."""

    def make() -> Model:
        with torch.device("meta"):
            x = torch.zeros(shape, dtype=torch.int64) if module is Tied else torch.zeros(shape)
            return module(*sizes), (x,)

    return make


NETS: dict[str, Callable[[], Model]] = {
    "one layer": net(Layers, (4096, 1024), (1024, 1024)),
    "squares": net(Squares, (4096, 1024), 1024, 1024),
    "mlp wide batch": net(Layers, (16384, 512), (512, 2048, 512)),
    "mlp small batch": net(Layers, (256, 2048), (2048, 4096, 2048)),
    "mlp with bias": net(Layers, (2048, 1024), (1024, 2048, 1024), True),
    "three layers": net(Layers, (2048, 1024), (1024, 2048, 1024, 512)),
    "gated": net(Gated, (2048, 1024), 1024, 2048),
    "residual": net(Residual, (4096, 1024), 1024, 4096),
    "attention": net(Attention, (16, 512, 512), 512, 8),
    "tied": net(Tied, (16, 256), 4096, 512),
    "experts": net(Experts, (1024, 512), 4, 512, 1024),
}
CASES: dict[str, tuple[Callable[[], Model], str, tuple[int, ...]]] = {
    f"{name}, {cluster} {sizes}": (make, cluster, sizes)
    for name, make in NETS.items()
    for cluster in CLUSTERS
    for sizes in ((2,), (4,), (2, 2))
}
