"""Lifts: matrix products over flattened dims become products over the dims themselves, so that each can be split.

A linear layer on [b, s, k] is captured as view, mm, view, and only the leading dim of a flattened one can be split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from sbpc.graph.rewrite import Writer, permute, rewrite, shaped, view

aten = torch.ops.aten
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def lift(gm: GraphModule) -> GraphModule:
    """Returns the graph with its matrix products over flattened dims lifted.

    Before: a canonical graph. After: no product reads a view that flattens dims which the product could have alone:
    linear layers are aten.linear or einsums, the products of attention and the gradients of weights are einsums.
    """
    return rewrite(gm, LIFTS)


@dataclass(frozen=True)
class Unflattened:
    """An operand of a product as a permuted view of `source`.

    sizes: for each dim of the operand, the sizes of the dims of `source` that make it up. places: where these are.
    """

    source: Node
    sizes: tuple[tuple[int, ...], ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def flattened(self) -> bool:
        return any(sum(size > 1 for size in group) > 1 for group in self.sizes)


def unflattened(x: Any) -> Unflattened:
    """Returns x as a permutation of a view of its source, whichever of the two there is."""
    rank = x.meta["val"].dim()
    order: Any = range(rank)
    if x.target is aten.permute.default:
        x, order = x.args
    groups = merged(x) if x.target is aten.view.default else None
    if groups is not None:
        x = x.args[0]
    places = groups or [(dim,) for dim in range(rank)]
    shape = x.meta["val"].shape
    ordered = tuple(places[dim] for dim in order)
    return Unflattened(x, tuple(tuple(shape[at] for at in group) for group in ordered), ordered)


def merged(x: Any) -> list[tuple[int, ...]] | None:
    """Returns for each dim of a view the dims of its source whose product it is; None if it is another kind of view."""
    before, after = list(x.args[0].meta["val"].shape), list(x.meta["val"].shape)
    if len(before) <= len(after) or 0 in before:
        return None
    groups, at = [], 0
    for number, size in enumerate(after):
        start = at
        while at < len(before) and (at == start or math.prod(before[start:at]) < size):
            at += 1
        while before[at : at + 1] == [1] and len(before) - at > len(after) - number - 1:
            at += 1
        if math.prod(before[start:at]) != size:
            return None
        groups.append(tuple(range(start, at)))
    return groups if at == len(before) else None


def product(write: Writer, x: Node, y: Node) -> Node | None:
    """Writes [m, k] @ [k, n] or [b, m, k] @ [b, k, n] with each dim as the dims that were flattened into it."""
    left, right = unflattened(x), unflattened(y)
    if not left.flattened and not right.flattened:
        return None
    batch = [finer(left.sizes[0], right.sizes[0])] if len(left.sizes) == 3 else []
    inner = left.sizes[-1] if left.sizes[-1] == right.sizes[-2] else (math.prod(left.sizes[-1]),)
    rows, columns = left.sizes[-2], right.sizes[-1]
    if all(len(group) == 1 for group in (*batch, inner, rows, columns)):
        return None
    names = iter(LETTERS)
    b, m, n, k = ("".join(itertools.islice(names, len(g))) for g in (*(batch or [()]), rows, columns, inner))
    terms, sources = [], []
    for flat, given, sizes, letters in (
        (x, left, [*batch, rows, inner], [b, m, k]),
        (y, right, [*batch, inner, columns], [b, k, n]),
    ):
        source, term = read(write, flat, given, sizes, letters[-len(sizes) :])
        sources.append(source)
        terms.append(term)
    return shaped(write, write.call(aten.einsum.default, f"{','.join(terms)}->{b}{m}{n}", sources), write.value.shape)


def finer(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dims of a batch dim: those of both operands, or of the one that has several."""
    if len(right) == 1 or left == right:
        return left
    return right if len(left) == 1 else (math.prod(left),)


def read(
    write: Writer, x: Node, given: Unflattened, sizes: Sequence[tuple[int, ...]], letters: Sequence[str]
) -> tuple[Node, str]:
    """Returns what to read, and the letters of its dims, for an operand whose dims are to be made up of these sizes."""
    if tuple(sizes) == given.sizes:
        named = {at: letter for group, text in zip(given.places, letters) for at, letter in zip(group, text)}
        return given.source, "".join(named[at] for at in sorted(named))
    return shaped(write, x, [size for group in sizes for size in group]), "".join(letters)


def affine(write: Writer, bias: Node, x: Node, y: Node, **scales: Any) -> Node | None:
    """Writes bias + [m, k] @ [k, n] as a linear layer over the dims that were flattened into m."""
    left = unflattened(x)
    if scales or bias.meta["val"].dim() != 1 or sum(size > 1 for size in left.sizes[0]) < 2:
        return None
    rows = [*left.sizes[0], math.prod(left.sizes[1])]
    lifted = write.call(aten.linear.default, shaped(write, x, rows), permute(write, y, [1, 0]), bias)
    return shaped(write, lifted, write.value.shape)


def sum_of_rows(write: Writer, x: Any, dims: Sequence[int], keepdim: bool = False, **options: Any) -> Node | None:
    """Writes the gradient of a bias as the sum over the dims that were flattened into one."""
    flat = unflattened(x)
    if x.target is not aten.view.default or not flat.flattened:
        return None
    places = [at for dim in dims for at in flat.places[dim]]
    summed = [dim % len(flat.sizes) for dim in dims]
    if any(len(group) > 1 for dim, group in enumerate(flat.sizes) if dim not in summed):
        return None
    total = write.call(aten.sum.dim_IntList, flat.source, places, **options)
    return shaped(write, total, write.value.shape)


LIFTS: dict[Any, Any] = {
    aten.addmm.default: affine,
    aten.bmm.default: product,
    aten.mm.default: product,
    aten.sum.dim_IntList: sum_of_rows,
    aten.view.default: view,
}
