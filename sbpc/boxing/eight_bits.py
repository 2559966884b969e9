"""Packs numbers of float32 into 8 bits for slow links: 256 after another in a tensor share a scale.

As ZeRO++ (Wang et al. 2023) sends gradients: an all-to-all of packed pieces, which are added up in float32, each
rounded once, and if they are to be whole a gather of packed sums. What is left of a number is within a scale of it, of
float8 within a sixteenth of it or of a 1024th of a scale.
"""

from __future__ import annotations

import math

import torch

from sbpc.boxing.local_values import Local, concatenate
from sbpc.mesh.collectives import FLOAT8, INT8, SCALE, TOGETHER_IN

aten = torch.ops.aten
TYPES = {INT8: torch.int8, FLOAT8: torch.float8_e4m3fn}
LARGEST = {INT8: 127.0, FLOAT8: 448.0}  # number of these
LEAST = torch.finfo(torch.float32).tiny  # scale
HASH = -1640531535  # 2**32 over the golden ratio, odd: its products with numbers that are close to each other are not


def packed_in(kind: str, x: Local, count: int) -> Local:
    """Packs so many equal pieces of dim 0, one after the other: rows of numbers in 8 bits, each with its scale, one
    of float32, behind them.

    A row of zeros has the least scale; one with a number that is not finite has such a scale, and no number is finite
    that is made of it. int8 numbers are rounded up or down at random, so that they are right on average. Chance is the
    bits of the number itself, hashed: the same in every run. What differs by less than 0.0005 from the grid does not
    leave it, so that nothing gets larger than the largest number.
    """
    size = math.prod(x.shape) // count
    rows = -(-size // TOGETHER_IN)
    whole = x.contiguous().view((count, size)).pad(1, rows * TOGETHER_IN).view((count * rows, TOGETHER_IN))
    column, most = (
        (count * rows, 1),
        whole.then(aten.linalg_vector_norm.default, (count * rows, 1), math.inf, [1], True),
    )
    scale = most.then(aten.div.Scalar, column, LARGEST[kind]).then(aten.clamp_min.default, column, LEAST)
    scaled = whole.then(aten.div.Tensor, whole.shape, scale.x)
    if kind == INT8:
        noise = whole.then(aten.view.dtype, whole.shape, torch.int32).then(aten.mul.Scalar, whole.shape, HASH)
        scaled = scaled.then(aten.add.Tensor, whole.shape, noise.x, alpha=0.999 * 2**-32)
        scaled = scaled.then(aten.round.default, whole.shape)
    numbers = scaled.then(aten._to_copy.default, whole.shape, dtype=TYPES[kind])
    if kind != INT8:
        numbers = numbers.then(aten.view.dtype, whole.shape, torch.int8)
    return concatenate([numbers, scale.then(aten.view.dtype, (count * rows, SCALE), torch.int8)], 1)


def unpacked(kind: str, x: Local, count: int) -> Local:
    """What `packed_in` packed, in float32: by piece, and behind it what filled up its last row."""
    rows = x.shape[0]
    numbers = x.slice(1, 0, TOGETHER_IN)
    scale = x.slice(1, TOGETHER_IN, TOGETHER_IN + SCALE).then(aten.view.dtype, (rows, 1), torch.float32)
    if kind != INT8:
        numbers = numbers.then(aten.view.dtype, numbers.shape, TYPES[kind])
        numbers = numbers.then(aten._to_copy.default, numbers.shape, dtype=torch.float32)
    made = numbers.then(aten.mul.Tensor, numbers.shape, scale.x)
    return made.view((count, rows // count * TOGETHER_IN))
