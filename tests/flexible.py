"""A small transformer with FlexAttention, and functions of all sorts for its scores and masks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

Mods = tuple[Callable[..., Tensor] | None, Callable[..., Tensor] | None]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


class Block(nn.Module):
    """Attention whose functions are those of a name in MODS, and a layer behind it."""

    def __init__(self, kind: str, width: int, heads: int, groups: int, length: int) -> None:
        super().__init__()
        self.kind, self.heads, self.groups = kind, heads, groups
        self.norm, self.q, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width * groups // heads)
        self.table = nn.Parameter(torch.randn(heads, 2 * length - 1))
        self.sinks = nn.Parameter(torch.randn(heads))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2 * self.groups, -1)).transpose(1, 2).chunk(2, 1)
        score, mask = MODS[self.kind](self, documents)
        block = None
        if mask is not None:
            batch = len(x) if self.kind in ("documents", "table") else None
            block = flex.create_block_mask(mask, batch, None, x.shape[1], x.shape[1], x.device, BLOCK_SIZE=4)
        y = flex.flex_attention(q, k, v, score, block, enable_gqa=self.heads != self.groups)
        return x + self.out(y.transpose(1, 2).flatten(2)).sin()


def documents(block: Block, ids: Tensor) -> Mods:
    """Tokens of one document see each other, those before."""

    def same(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (ids[b, q] == ids[b][kv]) & (q >= kv)

    return None, same


def window(block: Block, ids: Tensor) -> Mods:
    return None, flex.and_masks(causal, lambda b, h, q, kv: q - kv <= 3)


def alibi(block: Block, ids: Tensor) -> Mods:
    """Press, Smith and Lewis (2022)."""
    return lambda score, b, h, q, kv: score + block.slopes[h] * (kv - q), causal


def capped(block: Block, ids: Tensor) -> Mods:
    """As Gemma 2 has it."""
    return lambda score, b, h, q, kv: 2.0 * torch.tanh(score / 2.0), causal


def table(block: Block, ids: Tensor) -> Mods:
    """A learned bias by head and distance, as T5 has it; one head and one sequence see no later tokens."""
    half = block.table.shape[1] // 2
    hidden = torch.tensor(-float("inf"))

    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        score = score * block.sinks.sigmoid()[h] + block.table[h, q - kv + half]
        return torch.where((h == 1) & (q < kv), hidden, score)

    return biased, lambda b, h, q, kv: (b != 1) | (q >= kv)


def chunked(block: Block, ids: Tensor) -> Mods:
    """Chunks of three tokens see each other; scores fall with the distance in steps of two, as numbers of float32."""

    def far(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        steps = torch.div(q - kv, 2, rounding_mode="floor").float()
        return score - steps.abs() * block.slopes[h]

    return far, lambda b, h, q, kv: q // 3 == kv // 3


MODS: dict[str, Callable[[Block, Tensor], Mods]] = {
    "plain": lambda *_: (None, None),
    "causal": lambda *_: (None, causal),
    "window": window,
    "documents": documents,
    "alibi": alibi,
    "capped": capped,
    "chunked": chunked,
    "table": table,
}


class Net(nn.Module):
    """Blocks, and the mean of squares as the loss."""

    def __init__(self, *kinds: str, width: int = 16, heads: int = 4, groups: int = 4, length: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind, width, heads, groups, length) for kind in kinds)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, documents)
        return x.square().mean()


def batch(rows: int = 4, length: int = 8, width: int = 16) -> tuple[Tensor, Tensor]:
    """Sequences, and the number of the document of each token."""
    ids = torch.randint(0, 2, (rows, length), generator=torch.Generator().manual_seed(3)).cumsum(1)
    return torch.randn(rows, length, width), ids


@contextlib.contextmanager
def trained_on_cpus() -> Iterator[None]:
    """Lets torch give the gradients of FlexAttention on CPUs: its own formulas do, only Inductor has no kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_validate_device", lambda *_: None)
        yield


def eager_step(model: nn.Module, args: Any) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The loss and the gradients that torch gives."""

    torch.compiler.reset()
    with trained_on_cpus():
        loss = model(*args)
        names = [name for name, _ in model.named_parameters()]
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [loss.detach()], dict(zip(names, found))
