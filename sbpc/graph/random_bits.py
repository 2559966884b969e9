"""Random numbers that depend on a seed and on where an element stands in the whole tensor, never on the rank.

`bits` is counter-based: element i of stream s is a mix of (seed, s, i) and of nothing else, so that a rank draws its
shard of what one device draws. The mix is SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
generators", with the constants of Stafford's variant 13): a full-avalanche permutation of 64 bits, in wrapping int64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sbpc._compat import autograd_node
from sbpc.errors import PlanError

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio, odd: the step from one element to the next
DIGITS = 53  # as many random bits as a float64 has digits

LIBRARY = torch.library.Library("sbpc", "DEF")
LIBRARY.define("bits(Tensor seed, SymInt[] size, int stream, SymInt[] strides=[], Tensor? start=None) -> Tensor")


def bits(
    seed: Tensor, size: Sequence[int], stream: int, strides: Sequence[int] = (), start: Tensor | None = None
) -> Tensor:
    """Integers of [0, 2**53), int64, for the elements of a tensor of `size`, or of the part of one that a rank holds.

    seed: 0-dim int64. stream: one number for each place of a program that draws. strides: how far apart neighbours on
    each dim stand in the whole tensor, row-major; start (0-dim int64): where the first element stands there.

    >>> bits(torch.tensor(1), [2, 2], 0).tolist()
    [[3017795105040390, 8849651055939528], [3056013423334189, 4249795720843817]]
    >>> bits(torch.tensor(1), [2, 1], 0, [2, 1], torch.tensor(1)).tolist()  # the second column
    [[8849651055939528], [4249795720843817]]
    """
    value = mix(mix(seed.clone()).add_(wrap((stream + 1) * GOLDEN))).add_(wrap(GOLDEN))
    if start is not None:
        value = value + start * wrap(GOLDEN)
    for dim, stride in enumerate(strides or row_major(size)):
        step = torch.arange(size[dim], device=seed.device).mul_(wrap(stride * GOLDEN))
        value = value.unsqueeze(-1) + step
    return shift(mix(value), 64 - DIGITS)


def mix(z: Tensor) -> Tensor:
    """SplitMix64's permutation of 64 bits, in place."""
    z.bitwise_xor_(shift(z, 30)).mul_(wrap(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(shift(z, 27)).mul_(wrap(0x94D049BB133111EB))
    return z.bitwise_xor_(shift(z, 31))


def shift(z: Tensor, by: int) -> Tensor:
    """Shifted to the right, zeros coming in; torch's own shift repeats the sign."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def wrap(number: int) -> int:
    """A number modulo 2**64 as an int64."""
    return (int(number) + 2**63) % 2**64 - 2**63


def row_major(size: Sequence[int]) -> list[int]:
    """How far apart neighbours on each dim stand.

    >>> row_major([2, 3, 4])
    [12, 4, 1]
    """
    return [math.prod(size[dim + 1 :]) for dim in range(len(size))]


def seed_of_step(seed: int, step: int) -> int:
    """The seed that a parallel module with the base seed `seed` gives its program in its forward number `step`, from
    0."""
    return int(mix(torch.tensor(wrap(seed)).add_(wrap(step * GOLDEN))))


def next_seed(random: dict[str, int]) -> int:
    """The seed of the next forward, which it counts. random: "seed", and "step", the forwards that have drawn.

    Raises PlanError within a backward, where torch.utils.checkpoint computes a forward again: the program would draw
    other numbers than those of which the loss was computed.
    """
    if autograd_node() is not None:
        raise PlanError(
            "a forward that draws random numbers is computed again in a backward, and would draw others\n  Leave out "
            "torch.utils.checkpoint around the parallel module: sbpc.plan(..., recompute=...) keeps less, too."
        )
    seed = seed_of_step(**random)
    random["step"] += 1
    return seed


def shape_of_bits(seed: Tensor, size: Sequence[int], *_: object, **__: object) -> Tensor:
    """What `bits` gives, without values."""
    return seed.new_empty(size)


LIBRARY.impl("bits", bits, "CompositeExplicitAutograd")
torch.library.register_fake("sbpc::bits", shape_of_bits, lib=LIBRARY)
BITS = torch.ops.sbpc.bits.default
