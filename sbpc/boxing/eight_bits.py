"""Packs numbers of float32 into 8 bits for slow links: up to 256 neighbours in a row of a tensor share a scale.

As ZeRO++ (Wang et al. 2023) sends gradients: an all-to-all of packed pieces, which are added up in float32, each
rounded once, and if they are to be whole a gather of packed sums. Adam divides gradients by their size, so that small
ones count as much as large ones: a grid of even steps, which leaves noise of them or nothing, put updates of a small
GPT off by 3 to 6 %, this one by 1 to 2 %. So an int8 n stands for n * |n| times the scale: what is 1/1000 of the
largest number of a row is right to a quarter of itself, and what is above a 64000th is not 0. What is left of a number
is within a 127th of the largest one; of float8 within a sixteenth of itself, or of a 1024th of a scale.
"""

from __future__ import annotations

import math

import torch

from sbpc.boxing.local_values import Local, concatenate
from sbpc.mesh.collectives import FLOAT8, INT8, SCALE, groups_of, rows_of
from sbpc.mesh.states import Shape

aten = torch.ops.aten
TYPES = {INT8: torch.int8, FLOAT8: torch.float8_e4m3fn}
LARGEST = {INT8: 127.0**2, FLOAT8: 448.0}  # number of these
LEAST = torch.finfo(torch.float32).tiny  # scale


def packed_in(kind: str, x: Local, block: Shape) -> Local:
    """Packs equal blocks that lie one after the other along dim 0: rows of numbers in 8 bits, each with its scale, one
    float32, behind them.

    A row of zeros has the least scale; one with a number that is not finite has such a scale, and no number is finite
    that is made of it.
    """
    _, length = rows_of(block)
    groups, size = groups_of(length)
    rows = math.prod(x.shape) // length
    whole = x.contiguous().view((rows, length)).pad(1, groups * size).view((rows * groups, size))
    column = (rows * groups, 1)
    most = whole.then(aten.linalg_vector_norm.default, column, math.inf, [1], True)
    scale = most.then(aten.div.Scalar, column, LARGEST[kind]).then(aten.clamp_min.default, column, LEAST)
    scaled = whole.then(aten.div.Tensor, whole.shape, scale.x)
    if kind == INT8:
        roots = scaled.then(aten.abs.default, whole.shape).then(aten.sqrt.default, whole.shape)
        scaled = roots.then(aten.copysign.Tensor, whole.shape, scaled.x).then(aten.round.default, whole.shape)
    numbers = scaled.then(aten._to_copy.default, whole.shape, dtype=TYPES[kind])
    if kind != INT8:
        numbers = numbers.then(aten.view.dtype, whole.shape, torch.int8)
    return concatenate([numbers, scale.then(aten.view.dtype, (rows * groups, SCALE), torch.int8)], 1)


def unpacked(kind: str, x: Local, block: Shape) -> Local:
    """What `packed_in` packed of blocks of this shape, in float32: rows of numbers."""
    _, length = rows_of(block)
    groups, size = groups_of(length)
    rows = x.shape[0]
    numbers = x.slice(1, 0, size)
    scale = x.slice(1, size, size + SCALE).then(aten.view.dtype, (rows, 1), torch.float32)
    if kind != INT8:
        numbers = numbers.then(aten.view.dtype, numbers.shape, TYPES[kind])
    numbers = numbers.then(aten._to_copy.default, numbers.shape, dtype=torch.float32)
    if kind == INT8:
        numbers = numbers.then(aten.mul.Tensor, numbers.shape, numbers.then(aten.abs.default, numbers.shape).x)
    made = numbers.then(aten.mul.Tensor, numbers.shape, scale.x)
    return made.view((rows // groups, groups * size)).slice(1, 0, length).contiguous()
