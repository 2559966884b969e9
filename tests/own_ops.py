"""Ops of a library of their own, for tests of rules that a user registers or that are probed."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("own::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor:
    """x of any number of dims, times w along the last one."""
    return x * w


@custom_op("own::center", mutates_args=())
def center(x: Tensor, dim: int) -> Tensor:
    """x less its mean along a dim."""
    return x - x.mean(dim, keepdim=True)


@custom_op("own::mix", mutates_args=())
def mix(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A product over k of x [b, k] with w [k, n], and y [b] as it is, squared."""
    return x @ w, y * y


@custom_op("own::peak", mutates_args=())
def peak(x: Tensor) -> Tensor:
    """The largest element of each row; fails on no rows."""
    if x.shape[0] == 0:
        raise RuntimeError("no rows")
    return x.amax(1)


@custom_op("own::into", mutates_args=("out",))
def into(x: Tensor, out: Tensor) -> None:
    out.copy_(x)


@custom_op("own::secret", mutates_args=())
def secret(x: Tensor) -> Tensor:
    """Writes into x, which its schema does not say."""
    x.add_(1)
    return x * 2


@custom_op("own::dice", mutates_args=())
def dice(x: Tensor) -> Tensor:
    """Draws random numbers, which no tag says."""
    return x + torch.rand_like(x)


@custom_op("own::crash", mutates_args=())
def crash(x: Tensor) -> Tensor:
    """Kills the interpreter where there are no rows."""
    if x.shape[0] == 0:
        os.kill(os.getpid(), signal.SIGFPE)
    return x.cumsum(1)


@custom_op("own::pair", mutates_args=())
def pair(x: Tensor, y: Tensor) -> Tensor:
    """x * y; kills the interpreter where their rows differ."""
    if x.shape[0] != y.shape[0]:
        os.kill(os.getpid(), signal.SIGFPE)
    return x * y


@custom_op("own::hang", mutates_args=())
def hang(x: Tensor) -> Tensor:
    """Takes a minute where the columns are fewer than four."""
    if x.shape[1] < 4:
        time.sleep(60)
    return x.cumsum(0)


for op in (scale, center, secret, dice, crash, pair, hang):
    op.register_fake(lambda x, *unused: torch.empty_like(x))
mix.register_fake(lambda x, y, w: (x.new_empty(x.shape[0], w.shape[1]), torch.empty_like(y)))
peak.register_fake(lambda x: x.new_empty(x.shape[0]))
