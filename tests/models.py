"""Small models for the tests: every function returns (module, args); the caller seeds.

Sizes are multiples of 12 where they can be, so that meshes of 2, 3 and 4 ranks per axis divide them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sbpc.mesh.cluster import CLUSTERS, Cluster

Model = tuple[nn.Module, tuple[Any, ...]]


def bare(name: str) -> Cluster:
    """A named cluster of which nothing but the data sheet is known, for cases that hang on a balance of its figures."""
    return replace(CLUSTERS[name], ways=(), device=None, kernels_beside=1.0)


RINGS = bare("h100")  # every collective runs as a ring, as papers of parallelism count


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, layers: int, bias: bool) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(width, hidden, bias=bias) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(hidden, width, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs):
            x = x + down(F.gelu(up(x)))
        return x.square().mean()


def mlp(batch: int = 96, width: int = 24, hidden: int = 48, layers: int = 1, bias: bool = True) -> Model:
    """x + down(gelu(up(x))), and the mean of the squares as the loss."""
    return MLP(width, hidden, layers, bias), (torch.randn(batch, width),)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (part.view(batch, seq, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).contiguous().view(batch, seq, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT2(nn.Module):
    def __init__(self, vocab: int, seq: int, width: int, heads: int, layers: int, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def gpt2(
    batch: int = 12,
    seq: int = 12,
    vocab: int = 96,
    width: int = 48,
    heads: int = 12,
    layers: int = 2,
    tied: bool = True,
) -> Model:
    """GPT-2 (Radford et al. 2019) with causal attention and learned positions; (tokens, targets) -> cross-entropy."""
    tokens, targets = torch.randint(0, vocab, (2, batch, seq))
    return GPT2(vocab, seq, width, heads, layers, tied), (tokens, targets)


class VGG(nn.Module):
    def __init__(self, channels: int, size: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(2 * channels * (size // 4) ** 2, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes)
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(torch.flatten(self.features(images), 1)), labels)


def vgg(batch: int = 12, channels: int = 12, size: int = 8, hidden: int = 48, classes: int = 12) -> Model:
    """A short VGG (Simonyan and Zisserman 2014): convolutions, in-place relu, max-pool, two linear layers."""
    args = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))
    return VGG(channels, size, hidden, classes), args


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


class ResNet(nn.Module):
    def __init__(self, channels: int, classes: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1, stride=2)
        self.layers = nn.Sequential(*(Residual(channels) for _ in range(layers)))
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.stem(images)).mean(dim=(2, 3))), labels)


def resnet(batch: int = 12, channels: int = 12, size: int = 8, classes: int = 12, layers: int = 2) -> Model:
    """Residual convolutions (He et al. 2015) without batch norm, mean-pool, linear."""
    args = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))
    return ResNet(channels, classes, layers), args


class BatchNormNet(nn.Module):
    def __init__(self, channels: int, classes: int, bias: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.norm(self.conv(images))).mean(dim=(2, 3))), labels)


def batch_norm(batch: int = 12, channels: int = 12, size: int = 4, classes: int = 12, bias: bool = True) -> Model:
    """A convolution and a batch norm, whose running statistics are mutated buffers."""
    args = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))
    return BatchNormNet(channels, classes, bias), args


class TwoOutputs(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        left = self.left(x)
        return left, self.right(left.tanh()), left.argmax(dim=1), x.shape[0]


def two_outputs(batch: int = 48, width: int = 24) -> Model:
    """Two outputs that take a tangent, one of integers, and a number."""
    return TwoOutputs(width), (torch.randn(batch, width, requires_grad=True),)


class DictOutput(TwoOutputs):
    def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
        left = self.left(x)
        return {"left": left, "nothing": None, "rest": [self.right(left), "text"]}


def dict_output(batch: int = 48, width: int = 24) -> Model:
    """A dict with tensors, None, a list and a text."""
    return DictOutput(width), (torch.randn(batch, width),)


@dataclass
class Result:
    loss: Tensor
    logits: Tensor | None = None
    extra: tuple[Tensor, ...] | None = None


class DataclassOutput(TwoOutputs):
    def forward(self, x: Tensor) -> Result:  # type: ignore[override]
        left = self.left(x)
        return Result(loss=left.square().sum(), logits=left)


def dataclass_output(batch: int = 48, width: int = 24) -> Model:
    """A dataclass as the libraries return them, with an empty field."""
    return DataclassOutput(width), (torch.randn(batch, width),)


class KwargsModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0, pair: dict[str, Tensor] | None = None
    ) -> Tensor:
        y = self.linear(x) * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return y if pair is None else y + pair["left"] * pair["right"]


def kwargs_model(batch: int = 48, width: int = 24) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Keyword arguments: a tensor, a number and a dict of tensors. Returns (module, args, kwargs)."""
    pair = {"left": torch.randn(batch, width), "right": torch.randn(width)}
    kwargs = {"mask": torch.rand(batch, width) < 0.3, "scale": 0.5, "pair": pair}
    return KwargsModel(width), (torch.randn(batch, width),), kwargs


class UnusedParameter(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.used = nn.Linear(width, width)
        self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).square().sum()


def unused_parameter(batch: int = 48, width: int = 24) -> Model:
    """A layer that no output depends on."""
    return UnusedParameter(width), (torch.randn(batch, width),)


class LoRA(nn.Module):
    def __init__(self, width: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, hidden).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(x) + self.up(self.down(x))).square().mean()


def lora(batch: int = 96, width: int = 24, hidden: int = 48, rank: int = 12) -> Model:
    """A frozen layer and a trainable low-rank update (Hu et al. 2021)."""
    return LoRA(width, hidden, rank), (torch.randn(batch, width),)


class IgnoreIndexLoss(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x), labels, ignore_index=-1)


def ignore_index_loss(batch: int = 48, width: int = 24, classes: int = 12) -> Model:
    """A mean over the labels that count; they are spread unevenly over the batch."""
    labels = torch.randint(0, classes, (batch,))
    labels[: batch // 3] = -1
    labels[-1] = -1
    return IgnoreIndexLoss(width, classes), (torch.randn(batch, width), labels)


class ScalarTraps(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + 1.0  # a partial sum plus a number
        y = y * y + 2 * y  # a product of two partial sums
        y = (y.sum(dim=0) + 3.0) * self.scale  # the same after a reduction
        return (y - y.mean()).square().sum().sqrt()


def scalar_traps(batch: int = 48, width: int = 24) -> Model:
    """P + number, P * P and a bias: what a partial sum may not go through."""
    return ScalarTraps(width), (torch.randn(batch, width),)


MODELS = {
    "mlp": mlp,
    "gpt2": gpt2,
    "vgg": vgg,
    "resnet": resnet,
    "batch_norm": batch_norm,
    "two_outputs": two_outputs,
    "dict_output": dict_output,
    "dataclass_output": dataclass_output,
    "unused_parameter": unused_parameter,
    "lora": lora,
    "ignore_index_loss": ignore_index_loss,
    "scalar_traps": scalar_traps,
}


class Nasty(nn.Module):
    """Modules whose names are markup."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("</title><script>alert(1)</script>", nn.Linear(8, 8))
        self.add_module("a\x00b&<[bold]", nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x.sum()
