"""The calls of a model as small calls on real values, which brute force can take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import map_aggregate

from sbpc.graph.operands import leaves
from sbpc.mesh.states import Names, Numbers

LARGE, MOST = 12, 1 << 18  # a dim that is scaled down; elements that brute force takes
SMALL = (6, 8, 10, 14, 15, 16, 18, 20, 21, 22)  # what large dims become, in their order


@dataclass(frozen=True)
class SmallCall:
    """The arguments of a call. remarks: what a reader of the entry must know of them."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    remarks: Names = ()


def small_calls(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[SmallCall]:
    """Calls to be tried in turn in the place of one on fake tensors, each with other sizes.

    Large sizes become small ones that differ; or all are divided by one number, for ops that ask for ratios;
    integers of one of these sizes go with it, or stay. Integer tensors hold numbers below the least size, so that
    they may be indices.
    """
    given = leaves((args, kwargs), Tensor)
    dims = sorted({int(size) for value in given for size in value.shape})
    integers = {item for item in leaves((args, kwargs), int) if type(item) is int}
    found: dict[tuple[Any, ...], SmallCall] = {}
    for scale in scales(dims):
        for ints in (scale, {}):
            if max((math.prod(scale.get(int(n), int(n)) for n in value.shape) for value in given), default=0) > MOST:
                continue
            new = Drawn(scale, ints, min((scale.get(size, size) for size in dims if size > 1), default=2))
            told = [f"{before} as {after}" for before, after in scale.items()]
            told += [f"the argument {before} as {ints[before]}" for before in sorted(integers & ints.keys())]
            key = tuple(scale.items()), tuple(sorted(integers & ints.keys()))
            remarks = (f"scaled down: {', '.join(told)}",) if told else ()
            found.setdefault(key, SmallCall(*map_aggregate((tuple(args), dict(kwargs)), new), remarks))
    return list(found.values())


def scales(dims: Numbers) -> Iterator[dict[int, int]]:
    """Large sizes by what they become.

    >>> list(scales([3, 8, 64, 256]))
    [{64: 6, 256: 10}, {64: 4, 256: 16}, {}]
    """
    large = [size for size in dims if size > LARGE]
    free = [size for size in SMALL if size not in dims]
    if large and len(large) <= len(free):
        yield dict(zip(large, free))
    common = math.gcd(*large) if large else 1
    divisor = max((d for d in (common // 4, common // 6) if d > 1 and common % d == 0), default=1)
    if divisor > 1:
        yield {size: size // divisor for size in large}
    yield {}


@dataclass
class Drawn:
    """Makes an argument real. sizes, ints: what becomes of dims and of integers. below: what integer tensors stay
    below."""

    sizes: Mapping[int, int]
    ints: Mapping[int, int]
    below: int
    seed: int = 0

    def __call__(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.seed += 1
            generator = torch.Generator().manual_seed(self.seed)
            shape = [self.sizes.get(int(size), int(size)) for size in value.shape]
            if value.is_floating_point() or value.is_complex():
                return torch.randn(shape, generator=generator, dtype=torch.float64).to(value.dtype)
            below = 2 if value.dtype == torch.bool else self.below
            return torch.randint(0, below, shape, generator=generator).to(value.dtype)
        return self.ints.get(value, value) if type(value) is int else value
