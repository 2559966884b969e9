"""Nets of plain torch as vision uses them, small: a ResNet, a ConvNeXt, a U-Net; every function returns (module, args).

Sizes are multiples of 12 where they can be, so that meshes of 2, 3 and 4 ranks per axis divide them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Model = tuple[nn.Module, tuple[Any, ...]]


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with batch norms, beside a shortcut that is projected where shapes differ."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        inner = outs // 2
        self.conv1, self.norm1 = nn.Conv2d(ins, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv3, self.norm3 = nn.Conv2d(inner, outs, 1, bias=False), nn.BatchNorm2d(outs)
        self.shortcut = nn.Sequential(nn.Conv2d(ins, outs, 1, stride=stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y))
        y += self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layers = nn.Sequential(Bottleneck(channels, 2 * channels, 1), Bottleneck(2 * channels, 2 * channels, 2))
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.layers(self.pool(F.relu(self.norm(self.stem(images)))))
        return F.cross_entropy(self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)), labels)


def resnet(batch: int = 12, channels: int = 12, size: int = 16, classes: int = 12) -> Model:
    """He et al. 2015, with bottlenecks and batch norm in training."""
    args = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))
    return ResNet(channels, classes), args


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of an image that has them first."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, a norm and two linear layers with the channels last, and a scale per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 4, stride=4), LayerNorm2d(channels))
        self.first = ConvNeXtBlock(channels)
        self.shrink = nn.Sequential(LayerNorm2d(channels), nn.Conv2d(channels, 2 * channels, 2, stride=2))
        self.second = ConvNeXtBlock(2 * channels)
        self.norm, self.head = nn.LayerNorm(2 * channels), nn.Linear(2 * channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.second(self.shrink(self.first(self.stem(images))))
        return F.cross_entropy(self.head(self.norm(x.mean([-2, -1]))), labels)


def convnext(batch: int = 12, channels: int = 12, size: int = 16, classes: int = 12) -> Model:
    """Liu et al. 2022."""
    args = torch.randn(batch, 3, size, size), torch.randint(0, classes, (batch,))
    return ConvNeXt(channels, classes), args


class UNetBlock(nn.Module):
    """Two convolutions with group norm and SiLU, beside a shortcut."""

    def __init__(self, ins: int, outs: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, ins), nn.Conv2d(ins, outs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, outs), nn.Conv2d(outs, outs, 3, padding=1)
        self.shortcut = nn.Conv2d(ins, outs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class PixelAttention(nn.Module):
    """Attention of all pixels to all."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(groups, channels)
        self.qkv, self.proj = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, 3, self.heads, channels // self.heads, height * width)
        q, k, v = (part.transpose(-1, -2) for part in parts.unbind(1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2)
        return x + self.proj(out.reshape(batch, channels, height, width))


class UNet(nn.Module):
    """One level of shrinking by a strided convolution and one by pooling; back by ConvTranspose2d and by upsampling."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        c = channels
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.down1, self.shrink = UNetBlock(c, c, groups), nn.Conv2d(c, c, 3, stride=2, padding=1)
        self.down2 = UNetBlock(c, 2 * c, groups)
        self.middle, self.attention = UNetBlock(2 * c, 2 * c, groups), PixelAttention(2 * c, heads, groups)
        self.up2 = UNetBlock(4 * c, c, groups)
        self.grow, self.up1 = nn.ConvTranspose2d(c, c, 2, stride=2), UNetBlock(2 * c, c, groups)
        self.norm, self.head = nn.GroupNorm(groups, c), nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, images: Tensor, noise: Tensor) -> Tensor:
        first = self.down1(self.stem(images))
        second = self.down2(self.shrink(first))
        x = self.attention(self.middle(F.avg_pool2d(second, 2)))
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2, mode="nearest"), second], 1))
        x = self.up1(torch.cat([self.grow(x), first], 1))
        return F.mse_loss(self.head(F.silu(self.norm(x))), noise)


def unet(batch: int = 12, channels: int = 24, size: int = 8, heads: int = 12, groups: int = 12) -> Model:
    """Ronneberger et al. 2015, as diffusion models have it (Ho et al. 2020)."""
    return UNet(channels, heads, groups), (torch.randn(batch, 3, size, size), torch.randn(batch, 3, size, size))
