"""A formula for attention over packed sequences, of which torch has kernels on GPUs alone, and a model that has it.

Importing this gives `torch.nn.attention.varlen` that formula on CPUs.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen

FORWARD, BACKWARD = torch.ops.torch_attn._varlen_attn.default, torch.ops.torch_attn._varlen_attn_backward.default


def scores(
    q: Tensor, k: Tensor, causal: bool, scale: float | None, window: Any, used: Tensor | None, at: int
) -> Tensor:
    """What the softmax takes of one sequence, [h, s, t]: the last query stands at the last key."""
    found = torch.einsum("shd,thd->hst", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    length = len(k) if used is None else int(used[at])
    place = torch.arange(len(k)) - torch.arange(len(q)).unsqueeze(1) - (length - len(q))
    left, right = window or (-1, -1)
    right = 0 if causal else right
    hidden = torch.arange(len(k)).expand_as(place) >= length
    hidden = hidden | (place < -left) if left >= 0 else hidden
    return found.masked_fill(hidden | (place > right) if right >= 0 else hidden, -math.inf)


def pieces(cu_q: Tensor, cu_k: Tensor, *rest: int) -> Any:
    """By sequence the slices of its queries and of its keys; none is longer than `rest` says."""
    for at, ends in enumerate(zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()))):
        assert all(end - start <= most for (start, end), most in zip(ends, rest))
        yield at, *(slice(*each) for each in ends)


@varlen._varlen_attn.register_kernel("cpu")
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    grouped: bool = False,
    used: Tensor | None = None,
    table: Tensor | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(scale q k^T) v of each sequence, and the logarithm of the sum in the softmax."""
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
    keys, values = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    for at, s, t in pieces(cu_q, cu_k, max_q, max_k):
        logits = scores(q[s], keys[t], causal, scale, window, used, at)
        out[s] = torch.einsum("hst,thd->shd", logits.softmax(-1), values[t])
        lse[:, s] = logits.logsumexp(-1)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


@varlen._varlen_attn_backward.register_kernel("cpu")
def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    rng: Tensor,
    scale: float | None = None,
    window: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from the saved output and logsumexp, as Dao et al. (2022) have it."""
    groups, factor = q.shape[1] // k.shape[1], scale or 1 / math.sqrt(q.shape[-1])
    keys, values = (part.repeat_interleave(groups, 1) for part in (k, v))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    for at, s, t in pieces(cu_q, cu_k, max_q, max_k):
        p = (scores(q[s], keys[t], causal, scale, window, None, at) - lse[:, s].unsqueeze(-1)).exp()
        dp = torch.einsum("shd,thd->hst", g[s], values[t]) - (g[s] * out[s]).sum(-1).t().unsqueeze(-1)
        ds = p * dp * factor
        dq[s], dk[t] = torch.einsum("hst,thd->shd", ds, keys[t]), torch.einsum("hst,shd->thd", ds, q[s])
        dv[t] = torch.einsum("hst,shd->thd", p, g[s])
    return dq, *(part.unflatten(1, (-1, groups)).sum(2) for part in (dk, dv))


class Packed(nn.Module):
    """A block of a transformer over packed sequences; its loss is the mean of squares."""

    def __init__(self, width: int, heads: int, groups: int, longest: int, window: tuple[int, int] = (-1, 0)) -> None:
        super().__init__()
        self.heads, self.groups, self.longest, self.window = heads, groups, longest, window
        head = width // heads
        self.norm, self.q, self.kv = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 2 * groups * head)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        y = self.norm(x)
        q, (k, v) = self.q(y).unflatten(1, (self.heads, -1)), self.kv(y).unflatten(1, (2 * self.groups, -1)).chunk(2, 1)
        grouped = {"window_size": self.window, "enable_gqa": self.heads != self.groups}
        y = varlen.varlen_attn(q, k, v, ends, ends, self.longest, self.longest, **grouped)
        x = x + self.out(y.flatten(1))
        return (x + self.down(torch.relu(self.up(x)))).square().mean()
