"""Layers whose products are of float8 matrices, as torchao's float8 training makes them: each operand is cast with one
scale, or with one for each row, by the largest number that there is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AHEAD, BACK = torch.float8_e4m3fn, torch.float8_e5m2


def cast(x: Tensor, kind: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """x in a type of 8 bits, and by what that is to be multiplied; dim: along which numbers share a scale, None: all."""
    most = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    end = torch.finfo(kind).max
    scale = (end / most.double().clamp(min=1e-12)).float()
    return (x.float() * scale).clamp(-end, end).to(kind), scale.reciprocal()


def product(a: Tensor, b: Tensor, rows: bool, kind: torch.dtype = AHEAD) -> Tensor:
    """a times b, cast; kind: of a."""
    (left, of_rows), (right, of_columns) = cast(a, kind, -1 if rows else None), cast(b, AHEAD, 0 if rows else None)
    left, of_rows = left.reshape(-1, a.shape[-1]), of_rows.reshape(-1, 1) if rows else of_rows
    right = right.t().contiguous().t()  # columns without gaps
    made = torch._scaled_mm(left, right, of_rows, of_columns, out_dtype=a.dtype, use_fast_accum=kind == AHEAD)
    return made.view(*a.shape[:-1], -1)


class Product(torch.autograd.Function):
    """x times the transpose of a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        return product(x, weight.t(), rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        kind = AHEAD if ctx.rows else BACK
        flat = gradient.reshape(-1, gradient.shape[-1])
        of_weight = product(flat.t(), x.reshape(-1, x.shape[-1]), ctx.rows, kind)
        return product(gradient, weight, ctx.rows, kind), of_weight, None


class Linear(nn.Linear):
    """A linear layer. rows: whether every row has a scale."""

    rows = False

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Product.apply(x, self.weight, self.rows)  # type: ignore[no-untyped-call]
        return made if self.bias is None else made + self.bias


class Net(nn.Module):
    """Two layers behind a norm, beside what goes around them, and a loss."""

    def __init__(self, rows: bool, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), Linear(width, 4 * width), Linear(4 * width, width)
        self.up.rows = self.down.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x.float().square().mean()


def made(rows: bool, dtype: torch.dtype = torch.float32, batch: int = 8) -> tuple[Net, tuple[Tensor]]:
    """The model and a batch of sequences."""
    torch.manual_seed(0)
    return Net(rows).to(dtype), (torch.randn(batch, 32, 32).to(dtype),)
