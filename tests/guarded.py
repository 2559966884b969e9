"""Models whose forward reads or changes numbers in attributes, for the tests of guards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

METHODS = ("light", "aot")
X = torch.linspace(-1, 1, 32).view(4, 8)


class Kind(Enum):
    MEAN = "mean"
    SUM = "sum"


@dataclass
class Rope:
    factor: float = 2.0


@dataclass
class Config:
    """Somebody's configuration, with one inside, and a number that the forward does not read."""

    width: int = 4
    rope: Rope = field(default_factory=Rope)
    idle: int = 1


class Small(nn.Module):
    def __init__(self, beta: float = 0.0) -> None:
        super().__init__()
        self.layer, self.act, self.beta = nn.Linear(8, 8), nn.LeakyReLU(0.1), beta

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x)).square().mean() + self.beta


class Counts(nn.Module):
    """What is asked for by name happens in the forward."""

    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.does, self.config = nn.Linear(8, 8), does, Config()
        self.calls, self.aux, self.cache, self.seen, self.first = 0, None, {}, [], None
        self.nested: dict[str, list[Any]] = {"features": []}

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        found = self.does(self, h)
        return (h * found if isinstance(found, Tensor) else h).square().mean()
