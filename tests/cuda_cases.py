"""Cases of ops that have kernels on CUDA alone; on a CPU the formulas below stand in for them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sbpc.rules.proof.prove import STAND_INS, Case
from tests.samples import close, f, x

aten = torch.ops.aten
FLASH, CUDNN, EFFICIENT = (
    getattr(aten, f"_scaled_dot_product_{name}_attention") for name in ("flash", "cudnn", "efficient")
)
FLASH_BACK, CUDNN_BACK, EFFICIENT_BACK = (
    getattr(aten, f"_scaled_dot_product_{name}_attention_backward") for name in ("flash", "cudnn", "efficient")
)
SEED = torch.tensor(7)


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + bias) v, scale 1 / sqrt(d) unless given, and the logarithm of the sum in the softmax."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    scores = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    scores = scores if bias is None else scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def gradients(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Any,
    causal: bool,
    scale: float | None = None,
) -> list[Tensor]:
    """Those of q, k, v and of the bias, from the saved output and logsumexp, as Dao et al. (2022) have it."""
    r, scale = q.shape[1] // k.shape[1], scale or 1 / math.sqrt(q.shape[-1])
    keys, values = (part.repeat_interleave(r, 1) for part in (k, v))
    scores = q @ keys.mT * scale + (0 if bias is None else bias)
    p = (scores - lse.unsqueeze(-1)).exp()
    if causal:
        p = p.tril()
    ds = p * (g @ values.mT - (g * out).sum(-1, keepdim=True))
    groups = [part.unflatten(1, (-1, r)).sum(2) for part in (ds.mT @ q * scale, p.mT @ g)]
    return [ds @ keys * scale, *groups, ds if bias is None else ds.sum_to_size(bias.shape)]


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    out, lse = attention(q, k, v, None, causal, scale)
    return out, lse, None, None, q.shape[2], k.shape[2], torch.ones(2), SEED, torch.zeros(0)


def flash_back(
    g: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    a: Any,
    b: Any,
    m: int,
    n: int,
    p: float,
    causal: bool,
    *seeds: Any,
    scale: float | None = None,
) -> Any:
    assert (m, n) == (q.shape[2], k.shape[2])
    return tuple(gradients(g, q, k, v, out, lse, None, causal, scale)[:3])


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, lse: bool, p: float = 0.0, causal: bool = False, debug: bool = False
) -> Any:
    out, sums = attention(q, k, v, bias, causal)
    return out, sums.unsqueeze(-1), None, None, q.shape[2], k.shape[2], SEED, SEED, None


def cudnn_back(
    g: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    s: Any,
    o: Any,
    bias: Any,
    a: Any,
    b: Any,
    m: int,
    n: int,
    p: float,
    causal: bool,
) -> Any:
    assert (m, n) == (q.shape[2], k.shape[2])
    return tuple(gradients(g, q, k, v, out, lse.squeeze(-1), bias, causal)[:3])


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Any, lse: bool, p: float = 0.0, causal: bool = False) -> Any:
    out, sums = attention(q, k, v, bias, causal)
    padded = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % 32), value=math.inf)
    return out, padded if lse else sums[..., :0], SEED, SEED


def efficient_back(
    g: Any,
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    out: Any,
    lse: Any,
    s: Any,
    o: Any,
    p: float,
    mask: Any,
    causal: bool = False,
) -> Any:
    found = gradients(g, q, k, v, out, lse[..., : q.shape[2]], bias, causal)
    return *found[:3], found[3] if mask[3] else None


def rms_norm_back(g: Tensor, z: Tensor, shape: list[int], rstd: Tensor, weight: Tensor, mask: list[bool]) -> Any:
    with torch.enable_grad():
        leaf, scale = z.detach().requires_grad_(), weight.detach().requires_grad_()
        out = leaf * (leaf.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale
        return tuple(torch.autograd.grad(out, (leaf, scale), g))


STAND_INS |= {
    CUDNN.default: cudnn, CUDNN_BACK.default: cudnn_back, EFFICIENT.default: efficient,
    EFFICIENT_BACK.default: efficient_back, FLASH.default: flash, FLASH_BACK.default: flash_back,
    aten._fused_rms_norm_backward.default: rms_norm_back,
}  # fmt: skip


def cuda() -> list[Case]:
    found = []
    for r, causal in ((1, False), (1, True), (2, False), (2, True)):
        t = 6 if causal else 7
        q, k, v, g = f(2, 4 * r, 6, 5), f(2, 4, t, 5, seed=1), f(2, 4, t, 3, seed=2), f(2, 4 * r, 6, 3, seed=3)
        out, lse, *_ = flash(q, k, k, 0.0, causal)
        found.append(close(FLASH.default, q, k, k, 0.0, causal, False))
        seeds = (None, None, 6, t, 0.0, causal, torch.ones(2), SEED)
        found.append(close(FLASH_BACK.default, q.sin(), q, k, k, out, lse, *seeds))
        for bias in (None, f(2, 4 * r, 6, t), f(1, 1, 6, t)):
            out, lse, *_ = cudnn(q, k, v, bias, True, 0.0, causal)
            found.append(close(CUDNN.default, q, k, v, bias, True, 0.0, causal, False))
            seeds = (SEED, SEED, bias, None, None, 6, t, 0.0, causal)
            found.append(close(CUDNN_BACK.default, g, q, k, v, out, lse, *seeds))
            if r == 1:  # this one knows no groups of heads
                out, lse, *_ = efficient(q, k, v, bias, True, 0.0, causal)
                found += [close(EFFICIENT.default, q, k, v, bias, asked, 0.0, causal) for asked in (True, False)]
                asked = [True, True, True, bias is not None]
                found.append(close(EFFICIENT_BACK.default, g, q, k, v, bias, out, lse, SEED, SEED, 0.0, asked, causal))
    z, w = f(3, 4, 6), f(6)
    found.append(close(aten._fused_rms_norm.default, z, [6], w, 1e-6))
    rstd = aten._fused_rms_norm.default(z, [6], w, 1e-6)[1]
    found.append(close(aten._fused_rms_norm_backward.default, x(3, 4, 6), z, [6], rstd, w, [True, True]))
    return found
