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


@custom_op("own::raw", mutates_args=())
def raw(x: Tensor) -> Tensor:
    """Twice x, read as kernels in C do that expect a contiguous tensor: element by element from its first one on."""
    return 2 * x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


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


@custom_op("own::boom", mutates_args=())
def boom(x: Tensor) -> Tensor:
    """Kills the interpreter."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return x.clone()


@custom_op("own::swap", mutates_args=())
def swap(x: Tensor) -> Tensor:
    """Each pair of neighbours exchanged; of an odd number the last one is dropped."""
    return x[: len(x) // 2 * 2].view(-1, 2).flip(1).reshape(-1)


@custom_op("own::even", mutates_args=())
def even(x: Tensor) -> Tensor:
    """x, twice as much where its rows are even in number."""
    return x * 2 if x.shape[0] % 2 == 0 else x.clone()


@custom_op("own::norm", mutates_args=())
def norm(x: Tensor, w: Tensor, b: Tensor | None = None, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """A layer norm over the last dim, and the means."""
    return torch.nn.functional.layer_norm(x, w.shape, w, b, eps), x.mean(-1)


@custom_op("own::heads", mutates_args=())
def heads(x: Tensor, heads: int) -> Tensor:
    """A softmax within each head, of which the last dim holds several."""
    return x.view(*x.shape[:-1], heads, -1).softmax(-1).view(x.shape).clone()


@custom_op("own::pool", mutates_args=())
def pool(x: Tensor) -> Tensor:
    """Sums of four rows."""
    return x.view(x.shape[0] // 4, 4, -1).sum(1)


@custom_op("own::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    """x, if there are three rows; an error of its own kind for fewer."""
    if x.shape[0] < 3:
        raise KeyError("rows")
    return x.clone()


for op in (scale, center, secret, dice, crash, pair, hang, boom, swap, even, heads, picky, raw):
    op.register_fake(lambda x, *unused: torch.empty_like(x))
mix.register_fake(lambda x, y, w: (x.new_empty(x.shape[0], w.shape[1]), torch.empty_like(y)))
peak.register_fake(lambda x: x.new_empty(x.shape[0]))
norm.register_fake(lambda x, w, b=None, eps=1e-5: (torch.empty_like(x), x.new_empty(x.shape[:-1])))
pool.register_fake(lambda x: x.new_empty(x.shape[0] // 4, x.shape[1]))
