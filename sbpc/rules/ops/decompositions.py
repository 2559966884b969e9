"""What runs where a reduced dim is split: each function gives what the fused op gives, in ATen calls.

Sums and maxima over a split dim come out partial and are reduced among the ranks; all else is pointwise. The maximum of
a softmax is the global one, a variance is the mean of squares about the global mean, counts are global.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sbpc.rules.two_phase import decomposition


# --- softmax ----------------------------------------------------------------------------------------------------------
def softmax(x: Tensor, dim: int, *_: Any) -> Tensor:
    e = torch.exp(x - x.amax(dim, True))
    return e / e.sum(dim, True)


def safe_softmax(x: Tensor, dim: int, *_: Any) -> Tensor:
    """Zeros where all of a row is -inf."""
    return softmax(x, dim).masked_fill(x.amax(dim, True) == -math.inf, 0.0)


def softmax_backward(grad: Tensor, y: Tensor, dim: int, *_: Any) -> Tensor:
    weighted = grad * y
    return weighted - y * weighted.sum(dim, True)


def log_softmax(x: Tensor, dim: int, *_: Any) -> Tensor:
    shifted = x - x.amax(dim, True)
    return shifted - torch.exp(shifted).sum(dim, True).log()


def log_softmax_backward(grad: Tensor, y: Tensor, dim: int, *_: Any) -> Tensor:
    return grad - torch.exp(y) * grad.sum(dim, True)


def logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    """A maximum of inf or -inf is not subtracted: it is the result."""
    top = x.amax(dim, True)
    top = top.masked_fill(top.abs() == math.inf, 0.0)
    found = torch.exp(x - top).sum(dim, True).log() + top
    return found if keepdim else found.squeeze(dim)


# --- variances and norms, any and all ---------------------------------------------------------------------------------
def reduced(x: Tensor, dim: int | list[int] | None) -> list[int]:
    """The dims that a reduction over `dim` takes: all of them for none."""
    return [dim] if isinstance(dim, int) else list(dim or range(x.dim()))


def any_of(x: Tensor, dim: int | list[int] | None = None, keepdim: bool = False) -> Tensor:
    return (x != 0).to(torch.uint8).amax(reduced(x, dim), keepdim)


def all_of(x: Tensor, dim: int | list[int] | None = None, keepdim: bool = False) -> Tensor:
    return (x != 0).to(torch.uint8).amin(reduced(x, dim), keepdim)


def variance(x: Tensor, dim: list[int] | None, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """With the mean."""
    dims = reduced(x, dim)
    count = math.prod(x.shape[at] for at in dims)
    mean = x.mean(dims, True)
    squares = (x - mean).square().sum(dims, keepdim)
    found = squares / max(count - (1 if correction is None else correction), 0)
    return found, mean if keepdim else mean.squeeze(dims)


def deviation(x: Tensor, dim: list[int] | None, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    found, mean = variance(x, dim, correction, keepdim)
    return found.sqrt(), mean


def vector_norm(x: Tensor, order: float | None, dim: list[int] | None = None, keepdim: bool = False, *_: Any) -> Tensor:
    dims, size, order = reduced(x, dim), x.abs(), 2 if order is None else order
    if math.isinf(order):
        return size.amax(dims, keepdim) if order > 0 else size.amin(dims, keepdim)
    if order == 0:
        return (size != 0).to(x.dtype).sum(dims, keepdim)
    if order == 2:
        return size.square().sum(dims, keepdim).sqrt()
    return size.pow(order).sum(dims, keepdim).pow(1 / order)


def but(x: Tensor, dim: int) -> list[int]:
    """All dims but one."""
    return [at for at in range(x.dim()) if at != dim % x.dim()]


def weight_norm(v: Tensor, g: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    size = vector_norm(v, 2, but(v, dim), True)
    return v * (g / size), size


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, size: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    along = (grad * v).sum(but(v, dim), True) / size
    return (grad - v * (along / size)) * (g / size), along


# --- normalisations ---------------------------------------------------------------------------------------------------
def normal(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x less its mean over its deviation; the mean, one over the deviation, and the variance, with `dims` kept."""
    mean = x.mean(dims, True)
    rest = x - mean
    square = rest.square().mean(dims, True)
    inverse = torch.rsqrt(square + eps)
    return rest * inverse, mean, inverse, square


def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def normal_backward(grad: Tensor, unit: Tensor, inverse: Tensor, dims: list[int], centre: bool = True) -> Tensor:
    """The gradient of x, where unit = (x - mean) * inverse and `grad` is that of unit."""
    rest = grad - unit * (grad * unit).mean(dims, True)
    return (rest - grad.mean(dims, True) if centre else rest) * inverse


def last(shape: list[int]) -> list[int]:
    return list(range(-len(shape), 0))


def lead(x: Tensor, shape: list[int]) -> Tensor:
    """The sum over all but the last dims."""
    dims = list(range(x.dim() - len(shape)))
    return x.sum(dims) if dims else x


def layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    unit, mean, inverse, _ = normal(x, last(shape), eps)
    return scaled(unit, weight, bias), mean, inverse


def layer_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, inverse: Tensor, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    unit = (x - mean) * inverse
    found = normal_backward(scaled(grad, weight), unit, inverse, last(shape))
    return found, lead(grad * unit, shape), lead(grad, shape)


def rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    inverse = torch.rsqrt(x.square().mean(last(shape), True) + eps)
    return scaled(x * inverse, weight), inverse


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], inverse: Tensor, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    unit = x * inverse
    found = normal_backward(scaled(grad, weight), unit, inverse, last(shape), centre=False)
    return found, lead(grad * unit, shape)


def by_channel(x: Tensor, value: Tensor | None) -> Tensor | None:
    """Values by channel, to go with the dims of x: dim 1 and those behind it."""
    return None if value is None else value.view([-1] + [1] * (x.dim() - 2))


def grouped(x: Tensor, groups: int) -> tuple[Tensor, list[int]]:
    """The channels as groups and channels in a group, and the dims that a group is."""
    shape = [x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]]
    return x.view(shape), list(range(2, len(shape)))


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, size: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    each, dims = grouped(x, groups)
    unit, mean, inverse, _ = normal(each, dims, eps)
    found = scaled(unit.view(x.shape), by_channel(x, weight), by_channel(x, bias))
    return found, mean.view([n, groups]), inverse.view([n, groups])


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    size: int,
    groups: int,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    each, dims = grouped(x, groups)
    mean, inverse = (value.view([n, groups] + [1] * len(dims)) for value in (mean, inverse))
    unit = (each - mean) * inverse
    found = normal_backward(grouped(scaled(grad, by_channel(x, weight)), groups)[0], unit, inverse, dims)
    rest = [0, *range(2, x.dim())]
    return found.view(x.shape), (grad * unit.view(x.shape)).sum(rest), grad.sum(rest)


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *more: Any) -> tuple[Tensor, ...]:
    """more: running mean and variance where there are any, whether in training, momentum, eps."""
    *running, _, momentum, eps = more
    dims = [0, *range(2, x.dim())]
    unit, mean, inverse, square = normal(x, dims, eps)
    found = scaled(unit, by_channel(x, weight), by_channel(x, bias))
    mean, inverse, square = (value.squeeze(dims) for value in (mean, inverse, square))
    if not running or running[0] is None:
        return found, mean, inverse
    count = math.prod(x.shape[at] for at in dims)
    news = mean, square * (count / max(count - 1, 1))
    return found, mean, inverse, *(old * (1 - momentum) + new * momentum for old, new in zip(running, news))


def batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Any,
    running_var: Any,
    mean: Tensor,
    inverse: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The sums over all ranks are the gradients of weight and bias, and tell the means that the gradient of x takes."""
    dims = [0, *range(2, x.dim())]
    mean, inverse = by_channel(x, mean), by_channel(x, inverse)  # type: ignore[assignment]
    unit, count = (x - mean) * inverse, math.prod(x.shape[at] for at in dims)
    weights, biases = (grad * unit).sum(dims), grad.sum(dims)
    rest = grad - (by_channel(x, biases) + unit * by_channel(x, weights)) / count  # type: ignore[operator]
    return scaled(rest * inverse, by_channel(x, weight)), weights, biases


for function in (
    all_of,
    any_of,
    batch_norm,
    batch_norm_backward,
    deviation,
    group_norm,
    group_norm_backward,
    layer_norm,
    layer_norm_backward,
    log_softmax,
    log_softmax_backward,
    logsumexp,
    rms_norm,
    rms_norm_backward,
    safe_softmax,
    softmax,
    softmax_backward,
    variance,
    vector_norm,
    weight_norm,
    weight_norm_backward,
):
    decomposition(function)
