"""Values of the program of a rank while it is written: what a call gives, its shape, and how it lies in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sbpc.mesh.states import Numbers, Shape

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Rows(int):
    """A size that data says as the program runs, as of rows that ranks share out by their groups, or a multiple of it.
    Its number is the most that it may be; calls are told -1, and count it."""

    def __add__(self, other: int) -> Rows:
        return Rows(int(self) + other)

    def __mul__(self, other: int) -> Rows:
        return Rows(int(self) * other)

    def __floordiv__(self, other: int) -> Rows:
        return Rows(int(self) // other)

    __radd__, __rmul__ = __add__, __mul__


@dataclass(frozen=True)
class Local:
    """A value of the program being written: its shape, of which one size may be Rows, and whether it is known to be
    contiguous."""

    call: Callable[..., Any]
    x: Any
    shape: Shape
    solid: bool = False

    def then(self, op: Any, shape: Numbers, *args: Any, solid: bool = True, **kwargs: Any) -> Local:
        """What `op(x, *args, **kwargs)` gives."""
        return Local(self.call, self.call(op, self.x, *args, **kwargs), tuple(shape), solid)

    def contiguous(self) -> Local:
        """The same, contiguous; no copy if it is already."""
        return self if self.solid else self.then(aten.contiguous.default, self.shape)

    def view(self, shape: Numbers) -> Local:
        """The same elements in another shape."""
        same = tuple(shape) == self.shape and told(shape) == told(self.shape)
        return self if same else self.then(aten.view.default, shape, told(shape), solid=self.solid)

    def shuffle(self, apart: Numbers, dims: list[int], shape: Numbers) -> Local:
        """Viewed as `apart`, the dims of that in the order `dims`, viewed as `shape`: one copy at most."""
        if dims == sorted(dims):
            return self.contiguous().view(shape)
        moved = [apart[dim] for dim in dims]
        return self.view(apart).then(aten.permute.default, moved, dims, solid=False).contiguous().view(shape)

    def slice(self, dim: int, start: int, stop: int) -> Local:
        """The elements of a dim from `start` to `stop`."""
        if stop - start == self.shape[dim]:
            return self
        shape = put(self.shape, dim, stop - start)
        return self.then(aten.slice.Tensor, shape, dim, start, stop, solid=False)

    def pad(self, dim: int, size: int, front: int = 0) -> Local:
        """Zeros around a dim until it has `size` elements, `front` of them before it."""
        if size == self.shape[dim]:
            return self
        pads = [0] * (2 * (len(self.shape) - 1 - dim)) + [front, size - front - self.shape[dim]]
        return self.then(aten.constant_pad_nd.default, put(self.shape, dim, size), pads)

    def collective(self, op: Any, shape: Numbers, *args: Any) -> Local:
        """A functional collective, awaited."""
        return self.contiguous().then(op, shape, *args).then(c10d.wait_tensor.default, shape)


def told(shape: Numbers) -> list[int]:
    """The sizes as a call is told them."""
    return [-1 if isinstance(size, Rows) else size for size in shape]


def put(shape: Numbers, dim: int, *sizes: int) -> Shape:
    """The shape with `sizes` in place of one dim.

    >>> put((2, 6, 4), 1, 3, 2)
    (2, 3, 2, 4)
    """
    return (*shape[:dim], *sizes, *shape[dim + 1 :])


def concatenate(parts: Sequence[Local], dim: int) -> Local:
    """The parts one after the other along a dim."""
    call, size = parts[0].call, sum(part.shape[dim] for part in parts)
    return Local(call, call(aten.cat.default, [part.x for part in parts], dim), put(parts[0].shape, dim, size), True)
