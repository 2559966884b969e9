"""Random nets: each is drawn from a number and written as Python text that can be pasted. Its layers map [B, T, C] to [B, T, C]."""

from __future__ import annotations

import linecache
import random
import re
from dataclasses import dataclass
from typing import Any

SIZES = (1, 2, 3, 5, 7, 12)
ACT = "<x.relu()|F.gelu(x)|x.tanh()|F.silu(x)|x.sigmoid()|F.softplus(x)|F.leaky_relu(x, 0.1)|F.relu(x.mul(2), inplace=True)>"
KEYS = "x.detach() + torch.arange(<B * T * C).view(B, T, C)|T * C).view(T, C)|C * T * B).view(C, T, B).permute(2, 1, 0)> * 0.01"

# name -> what __init__ makes ;; what forward does with x. <a|b> is one of a and b, drawn. B, T, C: sizes of x. W:
# another one. H: a
# number of heads that divides C, D = C // H. more: other inputs.
LAYERS = {
    "linear": f"self.up, self.down = nn.Linear(C, W, bias=<True|False>), nn.Linear(W, C) ;; y = x; x = self.up(x); x = {ACT}; x = <y + |>self.down(x)",
    "gated": "self.a, self.b = nn.Linear(C, 2 * W), nn.Linear(W, C) ;; u, v = self.a(x).<chunk(2, -1)|split(W, 2)|unflatten(-1, (2, W)).unbind(2)>; x = x + self.b(u * F.silu(v))",
    "split": "self.a = nn.Linear(C, W + 3) ;; u, v, w = self.a(x).split([W, 1, 2], <-1|2>); x = x * v + (u.sum(-1, keepdim=True) * w).mean(<-1|2>, True)",
    "tied": "self.a, self.b = nn.Linear(C, W), nn.Linear(<C, W|C, W, bias=False>); self.b.weight = self.a.weight ;; x = x + <self.b(x).tanh() @ self.a.weight|F.linear(self.a(x).tanh() * self.b(x), self.a.weight.<t()|mT>)>",
    "turns": f"self.a = nn.<Linear(C, C)|Sequential(nn.Linear(C, W), nn.Tanh(), nn.Linear(W, C))> ;; for _ in range(<2|3>): y = x; x = self.a(x); x = y + {ACT}",
    "attention": "self.qkv, self.out = nn.Linear(C, 3 * C<|, bias=False>), nn.Linear(C, C) ;; q, k, v = (y.<view|reshape>(B, T, H, D).transpose(1, 2) for y in self.qkv(x).<chunk(3, -1)|split(C, dim=2)>); y = F.scaled_dot_product_attention(q, k, v<|, is_causal=True|, attn_mask=more['mask'][:, None, None]|, attn_mask=more['bias'], scale=0.5>); x = x + self.out(y.<transpose(1, 2).reshape(B, T, C)|transpose(1, 2).contiguous().view(B, T, C)|permute(0, 2, 1, 3).flatten(2)>)",
    "written attention": "self.qkv = nn.Linear(C, 3 * C) ;; q, k, v = self.qkv(x).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)<|.unbind(0)>; s = q @ k.<mT|transpose(-2, -1)> / D**0.5; s = s<| + more['bias']|.masked_fill(~more['mask'][:, None, None], -1e9)|.masked_fill(torch.ones(T, T).tril() == 0, float('-inf'))>; x = x + (s.softmax(-1) @ v).transpose(1, 2).flatten(-2)",
    "grouped attention": "self.q, self.kv = nn.Linear(C, C), nn.Linear(C, 2 * D) ;; q = self.q(x).view(B, T, H, D).transpose(1, 2); k, v = self.kv(x).view(B, T, 2, 1, D).transpose(1, 3).<unbind(2)|chunk(2, 2)>; k, v = (y.<expand(B, H, T, D)|repeat_interleave(H, 1)|repeat(1, H, 1, 1)> for y in (k.reshape(B, 1, T, D), v.reshape(B, 1, T, D))); x = x + F.scaled_dot_product_attention(q, k, v, is_causal=<True|False>).transpose(1, 2).reshape(B, T, C)",
    "norm": "self.n = nn.<LayerNorm(C)|LayerNorm((T, C))|RMSNorm(C)|LayerNorm(C, bias=False)|LayerNorm(C, elementwise_affine=False)> ;; x = <x + |>self.n(x * 2)",
    "group norm": "self.n = nn.GroupNorm(H, C<|, affine=False>) ;; x = <self.n(x.mT).mT|x + self.n(x.mT.unsqueeze(-1)).squeeze(-1).mT|self.n(x.flatten(0, 1)).view(B, T, C)>",
    "batch norm": "self.n = nn.BatchNorm1d(C<|, affine=False|, track_running_stats=False>) ;; x = x + <self.n(x.mT).mT|self.n(x.flatten(0, 1)).view(B, T, C)>",
    "conv1d": "self.a = nn.Conv1d(C, <C, 3, padding=1|C, 3, padding=1, groups=H|C, 1|C, 3, padding=2, dilation=2|C, 3, padding=1, padding_mode='circular'>) ;; x = x + self.a(x.<mT|transpose(1, 2).contiguous()>).tanh().<mT|transpose(1, 2)>",
    "strided conv": "self.a = nn.Conv1d(C, C, <1|2|3>, stride=<2|3>, padding=1, bias=<True|False>) ;; x = x + self.a(x.mT).<mean|amax>(-1)[:, None]",
    "conv2d": "self.a, self.b = nn.Conv2d(1, <2|3>, 3, padding=1), nn.Conv2d(<2|3>, 1, <1|(3, 1), padding=(1, 0)>) ;; y = x.unsqueeze(1); y = y<|.contiguous(memory_format=torch.channels_last)>; y = self.a(y); y = F.relu(<y|torch.cat([y, y], 1)>)[:, :self.b.in_channels]; y = y if y.shape[1] == self.b.in_channels else y.expand(B, self.b.in_channels, T, C) if y.shape[1] == 1 else torch.cat([y, y], 1)[:, :self.b.in_channels]; x = x + self.b(y).squeeze(1)",
    "pixels": "self.a = nn.Conv2d(C, C, <1|3, padding=1|3, padding=1, groups=H>); <self.a = self.a.to(memory_format=torch.channels_last)|pass> ;; y = x.<mT.unsqueeze(-1)|mT.reshape(B, C, T, 1)|unsqueeze(2).permute(0, 3, 1, 2)>; x = x + self.a(y<|.to(memory_format=torch.channels_last)>).squeeze(-1).mT",
    "pool": "pass ;; x = x + <F.avg_pool1d(x.mT, 3, 1, 1).mT|F.max_pool1d(x.mT, 3, 1, 1).mT|F.avg_pool2d(x.unsqueeze(1), 3, 1, 1, count_include_pad=False).squeeze(1)|F.max_pool2d(x[:, None], 3, 1, 1)[:, 0]|F.adaptive_avg_pool1d(x.mT, 1).mT|F.adaptive_avg_pool2d(x.mT[..., None], 1).squeeze(-1).mT>",
    "upsample": "pass ;; y = F.interpolate(x.mT, scale_factor=2<|, mode='linear'>).mT; x = x + y[:, ::2]",
    "in place": "self.w = nn.Parameter(torch.randn(C)) ;; y = x<.clone()| * 1|.exp().log()>; y<.add_(self.w)|.mul_(self.w)|.relu_()|.tanh_()|.masked_fill_(more['mask'][..., None], 0.5)|.div_(2).sub_(self.w)|.clamp_(-1, 1)|.addcmul_(x, self.w)|.zero_().add_(self.w)|.copy_(x * self.w)|.lerp_(x * self.w, 0.3)>; x = <y|x + y>",
    "write": "self.w = nn.Parameter(torch.randn(C)) ;; y = x * 1; y<[:, ::2] += self.w|[..., 0] = 0|[:, 0] = self.w|[..., ::2].mul_(2)|[:, -1:] = x[:, :1] * 2|[:, :, -1].add_(x[..., 0])|[B // 2] = self.w|[::2, :, :1] *= 3|[more['mask']] = 0.5|.select(1, T // 2).copy_(self.w.tanh())|.narrow(2, 0, 1).zero_()|.transpose(0, 2)[0].mul_(2)|.view(B * T, C)[::2].add_(self.w)|.diagonal(0, 1, 2).add_(1)>; x = <y|x + y>",
    "put": "self.w = nn.Parameter(torch.randn(<B, T|1, T>, C)) ;; y = x * 1; i = more['tokens'] % T; y<.index_put_((torch.arange(B)[:, None], i), self.w.expand(B, T, C), accumulate=True)|[:, i[0]] += 1|.index_add_(1, i[0], self.w.expand(B, T, C))|.scatter_add_(1, i[..., None].expand(B, T, C), self.w.expand(B, T, C))|.index_fill_(1, i[0], 0.5)|.scatter_(2, (more['tokens'] % C)[..., None], 0.5)|.index_copy_(1, torch.arange(T).flip(0), self.w.expand(B, T, C))>; x = x + y",
    "views": "self.w = nn.Parameter(torch.randn(C)) ;; x = x + self.w * <x.flatten(1).view(B, C, T).mT|x.permute(2, 0, 1).reshape(C, -1).view(C, B, T).permute(1, 2, 0)|x.reshape(T, B, C).transpose(0, 1)|x.unflatten(2, (H, D)).transpose(2, 3).flatten(2)|x.unflatten(-1, (H, D)).flip(2).flatten(2)|x.mT.flatten().view(B, T, C)|x.view(-1).unflatten(0, (C, T, B)).permute(2, 1, 0)|x.swapaxes(0, 2).swapdims(0, 2).movedim(0, 1).movedim(1, 0)>",
    "pieces": "self.w = nn.Parameter(torch.randn(T, C)) ;; x = self.w + <torch.cat([x[:, ::2], x[:, 1::2]], 1)|torch.stack([x, -x], 2).sum(2)|torch.stack(x.unbind(1)[::-1], 1)|torch.cat(x.chunk(3, 2)[::-1], 2)|torch.stack([x, x * 2], -1).flatten(2)[..., ::2]|torch.cat([x, x], 1)[:, T // 2:T // 2 + T]|torch.cat([x[:1] * 2, x[1:]])|torch.hstack([x[:, -1:], x[:, :-1]])|x.tile(1, 2, 1)[:, ::2]|torch.cat([y * (k + 1) for k, y in enumerate(x.split(2, 0))])>",
    "slices": "pass ;; x = x + <x[:, T // 2:T // 2 + 1]|x[..., C // 2, None]|x[:, :1].expand_as(x)|x[:1]|x[-1]|x.narrow(2, C - 1, 1)|F.pad(x[:, 1:], (0, 0, 1, 0))|F.pad(x[:, :-1], (0, 0, 0, 1), value=1.0)|x[:, ::2].mean(1, True)|x[::2, :, ::3].sum((0, 2), keepdim=True)|x.select(0, B - 1)|x.roll(1, <0|1|2>)|x.flip(<0|1|2>)|x.roll((1, 2), (1, 2))>",
    "gather": "self.w = nn.Parameter(torch.randn(5, C)) ;; i = more['tokens']; x = x + <x.gather(1, (i % T)[..., None].expand(B, T, C))|x.gather(2, (i % C)[..., None])|x.index_select(1, i[0] % T)|x[:, i[0] % T]|x[torch.arange(B)[:, None], i % T]|self.w[i % 5]|self.w.index_select(0, i.flatten() % 5).view(B, T, C)|x.take_along_dim((i % T)[..., None], 1)|F.one_hot(i % 5, 5).to(x.dtype) @ self.w|self.w[i[:, 0] % 5][:, None]>",
    "sort": f"pass ;; i = ({KEYS}).<argsort(1)|sort(1).indices|argsort(2, descending=True)|topk(1, 1).indices|topk((C + 1) // 2, -1).indices|argmax(2, keepdim=True)>; x = x + x.gather(<1|2>, i % min(T, C)).<mean(2, True)|sum(1, True)|amax((1, 2), True)>",
    "sorted": "self.w = nn.Parameter(torch.randn(T, C)) ;; y = x + torch.arange(T * C).view(T, C) * 0.01; x = x + self.w * <y.sort(<1|2>).values|y.topk((C + 1) // 2, 2).values.mean(2, True)|y.max(<0|1|2>, True).values|y.amax(<0|1|2>, keepdim=True)|y.min(1, keepdim=True)[0]|y.kthvalue(1, 1, True).values|y.cummax(1).values|y.median(2, True).values>",
    "along": "pass ;; x = x + <x.cumsum(<0|1|2>) / B|x.softmax(<0|1|2>)|x.log_softmax(<0|1|2>)|x.logsumexp(<0|1|2>, True)|x.std(<0|1|2>, keepdim=True, correction=0)|x.var((0, 2), keepdim=True, unbiased=False)|x.norm(dim=<0|1|2>, keepdim=True)|x.tanh().cumprod(1)|x.tanh().prod(<1|2>, True)|F.normalize(x, dim=<0|1|2>)|x.mean()|x.sum() / 100|x.abs().amax().detach()|x.diff(dim=1, prepend=x[:, :1])|x.logcumsumexp(1)>",
    "where": "self.w = nn.Parameter(torch.randn(C)) ;; m = <more['mask'][..., None]|x.gt(0)|torch.ones(T, C).tril().bool()|more['tokens'][..., None] % 2 == 0|torch.arange(T)[:, None].ge(more['tokens'][:, :1, None] % T)>; x = <torch.where(m, x, self.w)|torch.where(m, x, 0.5)|x.masked_fill(m, 0.0) + self.w|x * m + self.w|x * m.to(x.dtype) * self.w|(x * self.w).tril()|torch.where(m, x * self.w, x).triu(1)>",
    "weight norm": "self.v, self.g = nn.Parameter(torch.randn(C, C)), nn.Parameter(torch.ones(C, 1)); self.m = nn.utils.parametrizations.weight_norm(nn.Linear(C, C)<|, dim=1>) ;; x = x + <self.m(x)|F.linear(x, self.g * self.v / self.v.norm(dim=1, keepdim=True))|x @ (self.v / self.v.norm())|x @ F.normalize(self.v, dim=<0|1>)|x @ torch._weight_norm(self.v, self.g, 0)|x @ (self.v / self.v.square().sum().add(1).sqrt())>",
    "moe": "self.gate, self.up, self.down = nn.Linear(C, 3), nn.Parameter(torch.randn(3, C, W)), nn.Parameter(torch.randn(3, W, C) / 9) ;; g = self.gate(x).softmax(-1); y = <torch.einsum('btc,ecw→btew', x, self.up)|(x[:, :, None, None] @ self.up).squeeze(3)>.relu(); x = x + <torch.einsum('btew,ewc,bte→btc', y, self.down, g)|((y[..., None, :] @ self.down).squeeze(-2) * g[..., None]).sum(2)>",
    "top-k": "self.gate, self.experts = nn.Linear(C, 4), nn.ModuleList(nn.Linear(C, C) for _ in range(4)) ;; g, i = self.gate(x).softmax(-1).topk(2, -1); g = g / g.sum(-1, keepdim=True); y = [(<(g * (i == e)).sum(-1, keepdim=True)|torch.where(i == e, g, 0.0).sum(-1)[..., None]>) * expert(x).tanh() for e, expert in enumerate(self.experts)]; x = x + <sum(y)|torch.stack(y).sum(0)>",
    "cell": "self.a, self.b = nn.<Linear(C, C)|Linear(C, C, bias=False)>, nn.Linear(C, C) ;; h = x.new_zeros(B, C); y = []; [y.append(h := torch.tanh(self.a(z) + self.b(h))) for z in x.unbind(1)]; x = x + torch.stack(y, 1)",
    "recurrent": "self.a = nn.<GRU(C, C, batch_first=True)|LSTM(C, C, batch_first=True)|RNN(C, C, batch_first=True)|GRU(C, C, 2, batch_first=True)> ;; x = x + self.a(x)[0]",
    "cells": "self.a = nn.GRUCell(C, C) ;; h = x[:, 0]; y = []; [y.append(h := self.a(z, h)) for z in x.unbind(1)]; x = torch.stack(y, 1)",
    "einsum": "self.w, self.v = nn.Parameter(torch.randn(C, W)), nn.Parameter(torch.randn(T, T)) ;; x = x + <torch.einsum('btc,cw,dw→btd', x, self.w, self.w)|torch.einsum('bsc,ts→btc', x, self.v)|torch.einsum('btc,bsc,bsd→btd', x, x, x) / 9|torch.einsum('...c,cw→...w', x, self.w).sum(-1, keepdim=True)|torch.einsum('btc,bdc→btd', x, x).mean(2, True)|torch.tensordot(x, self.w, 1) @ self.w.T|torch.bmm(self.v.expand(B, T, T), x)|torch.baddbmm(x, self.v.expand(B, T, T), x)|(self.v @ x)|torch.matmul(x, torch.mm(self.w, self.w.t()))|torch.outer(self.w[:, 0], self.w[0, :1].expand(C))[0]>",
    "embedding": "self.e = nn.Embedding(9, C<|, padding_idx=0>) ;; x = x + self.e(more['tokens'] % 9)<| * more['mask'][..., None]|.relu()>",
    "positions": "self.e = nn.Embedding(T, C); self.register_buffer('where', torch.arange(T)<|[None]>) ;; x = x + self.e(<self.where|torch.arange(T)>)<|.flip(-1)>",
    "rotary": "self.register_buffer('angle', torch.randn(T, C)<|, persistent=False>) ;; y = x.roll(1, -1); x = x * self.angle.cos() + y * self.angle.sin()",
    "counter": "self.register_buffer('seen', torch.zeros(())); self.register_buffer('mean', torch.zeros(C)) ;; self.seen<.add_(1)| += 1|.copy_(self.seen + x.detach().mean())>; self.mean<.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)|.lerp_(x.detach().sum((0, 1)), 0.1)|[0] = 1>; x = x <+ self.mean|* self.seen.cos()|>",
    "dropout": "self.d = nn.<Dropout(0.3)|Dropout1d(0.3)|AlphaDropout(0.2)|Dropout(0.5, inplace=False)> ;; x = x + self.d(x * 2)",
    "checkpoint": "self.a, self.b = nn.Linear(C, W), nn.Linear(W, C) ;; x = x + torch.utils.checkpoint.checkpoint(lambda y: self.b(<self.a(y).tanh()|F.gelu(self.a(y))>), x, use_reentrant=False)",
    "scale": "self.s = nn.Parameter(torch.<ones(())|ones(1)|ones(T, 1)|ones(B, 1, 1)|randn(C)>) ;; x = <x * self.s|x / (self.s.square() + 1)|x + self.s * <more['scale']|x.mean((0, 1))>|self.s - x|x ** 2 * self.s|torch.addcmul(x, x, self.s)|torch.lerp(x, -x, self.s * 0.1)>",
    "transformer": "self.a = nn.TransformerEncoderLayer(C, H, W, <0.0, batch_first=True|0.0, F.gelu, batch_first=True, norm_first=True>) ;; x = self.a(x<|, src_key_padding_mask=~more['mask']>)",
    "multihead": "self.a = nn.MultiheadAttention(C, H, batch_first=True) ;; x = x + self.a(x, x, x, need_weights=<True|False>)[0]",
    "traps": "self.a, self.w = nn.Linear(C, C), nn.Parameter(torch.ones(C)) ;; y = self.a(x) + 1.0; y = y * y + 2 * y; y = (y.sum(<0|1|2>, True) + 3.0) * self.w; x = x + (y - y.mean()).square().sum().add(1).sqrt()",
    "bilinear": "self.a = nn.Bilinear(C, C, <C|1>) ;; x = x + self.a(x<|.flip(1)>, x).tanh()",
}  # fmt: skip

# name -> what __init__ makes ;; what forward returns. y: [B, T] numbers of classes below 5, -1 in places. z: [B, T, C].
ENDS = {
    "cross entropy": "self.head = nn.Linear(C, 5) ;; return F.cross_entropy(self.head(x).<flatten(0, 1)|view(B * T, 5)>, y.<flatten()|view(-1)|reshape(B * T)>, ignore_index=-1<|, label_smoothing=0.1|, reduction='sum'>)",
    "cross entropy of rows": "self.head = nn.Linear(C, 5) ;; return F.cross_entropy(self.head(x).mT, y, ignore_index=-1)",
    "weighted": "self.head = nn.Linear(C, 5); self.register_buffer('weight', torch.rand(5) + 0.1) ;; return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), self.weight, ignore_index=-1)",
    "nll": "self.head = nn.Linear(C, 5) ;; return F.nll_loss(self.head(x).log_softmax(-1).flatten(0, 1), y.flatten(), ignore_index=-1)",
    "mse": "pass ;; return F.<mse_loss|smooth_l1_loss|huber_loss|l1_loss>(x, z<|, reduction='sum'>)",
    "bce": "self.head = nn.Linear(C, 1) ;; return F.<binary_cross_entropy_with_logits(|binary_cross_entropy(torch.sigmoid>(self.head(x).squeeze(-1)<|>), (y > 1).to(x.dtype))",
    "square": "pass ;; return x.square().<mean()|sum()|mean((0, 1)).sum()|sum(-1).mean()>",
    "contrastive": "self.t = nn.Parameter(torch.ones(())) ;; a = F.normalize(x.flatten(1), dim=-1); b = F.normalize(z.flatten(1), dim=-1); s = a @ b.T * self.t.exp(); i = torch.arange(B); return (F.cross_entropy(s, i) + F.cross_entropy(s.T, i)) / 2",
    "next": "self.head = nn.Linear(C, 5, bias=False) ;; s = self.head(x)[:, :-1].reshape(-1, 5) if T > 1 else self.head(x)[:, 0]; return F.cross_entropy(s, y[:, 1:].clamp(min=0).reshape(-1) if T > 1 else y[:, 0].clamp(min=0))",
    "masked": "self.head = nn.Linear(C, 1) ;; e = (self.head(x) - z).square() * more['mask'][..., None]; return e.sum() / more['mask'].sum().clamp(min=1)",
    "auxiliary": "self.w = nn.Parameter(torch.randn(C)) ;; return (x * self.w).square().mean() + 0.1 * <self.w.square().sum()|sum(p.square().sum() for p in self.parameters())|self.w.norm()|torch.stack([p.abs().mean() for p in self.parameters()]).sum()>",
    "kl": "self.head = nn.Linear(C, 5) ;; return F.kl_div(self.head(x).log_softmax(-1), torch.ones(5) / 5, reduction='batchmean')",
    "dict": "self.head = nn.Linear(C, 5) ;; s = self.head(x); return {'loss': F.cross_entropy(s.flatten(0, 1), y.flatten(), ignore_index=-1), 'logits': s.detach()}",
    "outputs": "self.head = nn.Linear(C, 5) ;; return <x|x, self.head(x)|{'a': x.mean(1), 'b': [self.head(x), x.argmax(-1), None, 3]}|x.mT|x[0]|x.sum((1, 2))>",
    "loss apart": "self.head = nn.Linear(C, 5) ;; return self.head(x).flatten(0, 1)",
}  # fmt: skip
APART = "loss apart"

STARTS = {
    "x": "x = x",
    "tokens": "x = self.first(more['tokens'])",
    "tied": "x = self.first(more['tokens']) + x",
}
INPUTS = (
    "torch.randn(B, T, C)", "torch.randn(B, T, C)", "torch.randn(B, C, T).mT", "torch.randn(T, C, B).permute(2, 0, 1)",
    "torch.randn(2 * B, T, C)[::2]", "torch.randn(B, T + 2, C)[:, 1:-1]", "torch.randn(T, C).expand(B, T, C)", "torch.randn(B, 1, C).expand(B, T, C)",
    "torch.randn(B, T, C).requires_grad_()", "torch.randn(C, T, B).permute(2, 1, 0).requires_grad_()",
)  # fmt: skip
EVERY = {  # what may be done to the whole model
    "turn": "model.layers[0].requires_grad_(False)",
    "last": "next(model.parameters()).requires_grad_(False)",
    "unused": "model.unused = nn.Linear(C, 3)",
    "eval": "model.eval()",
    "strides": "for p in model.parameters(): p.data = p.data.mT.contiguous().mT if p.dim() > 1 else p.data",
    "channels last": "model.to(memory_format=torch.channels_last)",
}


@dataclass(frozen=True)
class Layer:
    """A layer, drawn from a number of its own; equal ones are one module that is called again."""

    kind: str
    seed: int


@dataclass(frozen=True)
class Net:
    """What a net is made of."""

    seed: int
    sizes: dict[str, int]
    layers: tuple[Layer, ...]
    end: Layer
    start: str
    given: str
    done: tuple[str, ...]
    half: bool = False

    def has(self, *kinds: str) -> bool:
        """Whether one of its layers is of one of the kinds."""
        return any(layer.kind in kinds for layer in self.layers)


def draw_net(seed: int) -> Net:
    """Draws the net of a number."""
    r = random.Random(seed)
    sizes = {name: r.choice(SIZES) for name in "BTCW"}
    if r.random() < 0.5:
        sizes |= {"B": r.choice((2, 3, 4, 6, 8)), "C": r.choice((4, 6, 8))}
    sizes["H"] = r.choice([n for n in range(1, sizes["C"] + 1) if sizes["C"] % n == 0])
    layers: list[Layer] = []
    for _ in range(r.choice((1, 1, 1, 2, 2, 2, 3, 3, 4))):
        again = layers and r.random() < 0.15
        layers.append(r.choice(layers) if again else Layer(r.choice(sorted(LAYERS)), r.randrange(1000)))
    done = tuple(name for name in EVERY if r.random() < 0.1)
    end = Layer(r.choice(sorted(ENDS)), r.randrange(1000))
    net = Net(seed, sizes, tuple(layers), end, r.choice(("x", "x", *STARTS)), r.choice(INPUTS), done, r.random() < 0.06)
    if net.has("batch norm", "group norm"):  # torch refuses statistics of one number
        sizes["B"] = max(2, sizes["B"])
    if net.has("recurrent", "cell", "cells"):  # whose graphs grow with every step
        sizes["T"] = min(3, sizes["T"])
    return net


def drawn(text: str, seed: int) -> str:
    """A text with every <a|b> drawn, the innermost ones first."""
    r = random.Random(f"{seed}")
    while found := re.search(r"<([^<>]*\|[^<>]*)>", text):
        text = text[: found.start()] + r.choice(found[1].split("|")) + text[found.end() :]
    return text.replace("→", "->")


def module_text(
    name: str, template: str, seed: int, extra: str = "", arguments: str = "x, more", last: str = "return x"
) -> str:
    """The class of a layer."""
    made, does = drawn(template, seed).split(" ;; ")
    lines = [f"class {name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line}" for line in [*filter(None, extra.split("; ")), *made.split("; ")] if line != "pass"]
    lines += [
        "",
        f"    def forward(self, {arguments}):",
        *(f"        {line}" for line in statements(does)),
        *([f"        {last}"] if last else []),
    ]
    return "\n".join(lines)


def statements(does: str) -> list[str]:
    """Statements by line; those of a loop stay on its line."""
    return [does.rstrip()] if does.startswith("for ") else [line for line in does.split("; ") if line.strip()]


def source(net: Net) -> str:
    """Python that makes `model`, `args` and `kwargs` of a net, and `loss` and `targets` where the net has no loss of its own."""
    kinds = list(dict.fromkeys(net.layers))
    names = {
        layer: f"{''.join(w.title() for w in re.findall('[a-z0-9]+', layer.kind))}{at}"
        for at, layer in enumerate(kinds)
    }
    text = [
        "import torch",
        "import torch.nn.functional as F",
        "import torch.utils.checkpoint",
        "from torch import nn",
        "",
    ]
    text += [f"torch.set_default_dtype(torch.float{32 if net.half else 64})", f"torch.manual_seed({net.seed})"]
    sizes = net.sizes
    text += [f"B, T, C, W, H, D = {', '.join(str(sizes[n]) for n in 'BTCWH')}, {sizes['C'] // sizes['H']}", ""]
    for layer, name in names.items():
        text += ["", module_text(name, LAYERS[layer.kind], layer.seed), ""]
    extra = f"self.layers = nn.ModuleList([{', '.join(f'{name}()' for name in names.values())}])"
    extra += "; self.first = nn.Embedding(5, C)" if net.start != "x" else ""
    made, does = ENDS[net.end.kind].split(" ;; ")
    made += (
        "; self.head.weight = self.first.weight" if net.start == "tied" and "self.head = nn.Linear(C, 5" in made else ""
    )
    calls = [STARTS[net.start], *(f"x = self.layers[{kinds.index(layer)}](x, more)" for layer in net.layers)]
    text += [
        "",
        module_text("Net", f"{made} ;; {'; '.join(calls)}; {does}", net.end.seed, extra, "x, y, z, more", ""),
        "",
        "",
    ]
    text += ["model = Net()", *(EVERY[name] for name in net.done if name not in ("turn",) or net.layers)]
    text += [
        "with torch.no_grad():",
        "    for p in model.parameters():",
        "        p.add_(torch.randn_like(p), alpha=0.1)",
    ]
    text += [f"x = {net.given}", "y, z = torch.randint(-1, 5, (B, T)), torch.randn(B, T, C)", "y[0, 0] = 1"]
    text += [
        "more = {'mask': torch.rand(B, T).lt(0.7), 'tokens': torch.randint(0, 5, (B, T)), 'bias': torch.randn(T, T), 'scale': torch.randn(C)}"
    ]
    text += ["more['mask'][:, 0] = True", "args, kwargs = (x, y), {'z': z, 'more': more}"]
    if net.end.kind == APART:
        text += ["loss, targets = F.cross_entropy, (y.flatten().clamp(min=0),)"]
    return "\n".join(text) + "\n"


def built(text: str) -> dict[str, Any]:
    """What the text of a net makes."""
    found: dict[str, Any] = {"__name__": "drawn_net"}  # a file of this name would have its globals taken for these
    linecache.cache["net.py"] = len(text), None, text.splitlines(True), "net.py"  # for errors that show its lines
    exec(compile(text, "net.py", "exec"), found)
    return found
