"""Indexing, sorting and scans: untouched dims are free; a gather over a split dim is masked as an embedding is."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from sbpc.rules.binding import flat_outputs
from sbpc.rules.match import FREE, WRITTEN, Arguments, Shard, Write
from sbpc.rules.ops.dims import aligned, along, fix, joined, moved, numbered
from sbpc.rules.ops.embedding import Lookup, addressed
from sbpc.rules.registry import rule


def addressing(sign: str, row: bool = False) -> Write:
    """The rule of an op that reads or writes a tensor X along `dim` where an index of dims I says.

    Equal dims are shared, dim `dim` is v and i, unequal ones are fixed. row: an index of one dim, and I those of
    what it selects.
    """

    def write(given: Arguments, outputs: Any) -> str | None:
        x, index, source = given["self"], given["index"], given.get("src")
        shape = x.shape if row else index.shape
        alike = index.dim() == (1 if row else x.dim()) and (source is None or source.shape == shape)
        if x.dim() == 0 or not alike:
            return None
        at = given["dim"] % x.dim()
        left = ["v" if d == at else f"d{d}" if size == shape[d] else f"x{d}" for d, size in enumerate(x.shape)]
        right = ["i" if d == at else f"d{d}" if size == x.shape[d] else f"y{d}" for d, size in enumerate(shape)]
        fixed = fix(*(name for name in (*left, *right) if name[0] in "xy"))
        zero = " ; lin(0)" if given.get("value") == 0 else ""  # what is written
        return sign.replace("X", " ".join(left)).replace("I", " ".join(right)) + zero + fixed

    return write


def gather_local(shard: Shard, lookup: Lookup) -> Any:
    return shard.aten("masked_fill.Scalar", shard.plain(index=lookup.nearest), lookup.outside, 0)


def scatter_add_local(shard: Shard, lookup: Lookup) -> Any:
    source = shard.aten("masked_fill.Scalar", shard.given["src"], lookup.outside, 0)
    return shard.plain(index=lookup.nearest, src=source)


def sorting(given: Arguments, outputs: Any) -> str | None:
    """That of a scan; of one dim a rank's own part may be sorted, see `sbpc.rules.local_rows`."""
    found = scan()(given, outputs)
    assert isinstance(found, str)
    return "a -> a, a ; fix a ; idx a" if given["self"].dim() == 1 else found


def sorted_part(shard: Shard) -> Any:
    """A rank that sorts its own part tells places of the whole."""
    made = shard.plain()
    if shard.part is None:
        return made
    values, places = (shard.call(operator.getitem, made, at) for at in range(2))
    return values, shard.aten("add.Tensor", places, *shard.offsets.values())


class Indexed(NamedTuple):
    """Dims of a tensor, operands of its indices, dims of what they select, and those of them that the indices have."""

    dims: list[str]
    operands: list[str]
    selected: list[str]
    names: list[str]


def _indexed(given: Arguments) -> Indexed | None:
    """What a call of index or index_put reads or writes; None for boolean indices.

    Neighbouring indices put their (broadcast) dims in the place of those they index, others in front.
    """
    indices = list(given["indices"])
    places = [at for at, index in enumerate(indices) if index is not None]
    if not places or any(indices[at].dtype in (torch.bool, torch.uint8) for at in places):
        return None
    shape = torch.broadcast_shapes(*(indices[at].shape for at in places))
    names = numbered(len(shape), range(len(shape)), "i")
    operands = [aligned(index, shape).replace("d", "i") for index in indices]
    dims = numbered(given["self"].dim(), places, "v")
    rest = [name for name in dims if name[0] == "d"]
    before = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    return Indexed(dims, operands, [*rest[:before], *names, *rest[before:]], names)


def index(given: Arguments, outputs: Any) -> str | None:
    indexed = _indexed(given)
    if indexed is None:
        return None
    fixed = fix(*(name for name in indexed.dims if name[0] == "v"))
    return f"{' '.join(indexed.dims)}, {', '.join(indexed.operands)} -> {joined(indexed.selected)} ; lin(0){fixed}"


def index_put(given: Arguments, outputs: Any) -> str | None:
    """With accumulate, a shard of the indices adds its own values; without, the last one written counts."""
    indexed = _indexed(given)
    if indexed is None:
        return None
    values = joined(indexed.selected[len(indexed.selected) - given["values"].dim() :])
    free = f" ; +{' '.join(indexed.names)} ; add(0)" if given["accumulate"] and indexed.names else fix(*indexed.names)
    fixed, dims = fix(*(name for name in indexed.dims if name[0] == "v")), " ".join(indexed.dims)
    linear = f"lin(0,{1 + len(indexed.operands)})"
    return f"{dims}, {', '.join(indexed.operands)}, {values} -> {dims} ; {linear}{free}{fixed}"


def scan(clause: str = "") -> Write:
    """The rule of an op along `dim` whose outputs may have another size there: that dim is fixed."""

    def write(given: Arguments, outputs: Any) -> str:
        ndim, flat = given["self"].dim(), flat_outputs(outputs)
        out = "y" if flat[0].dim() == ndim else "-"
        return moved(f"x -> {', '.join(out * len(flat))}", ndim, [given["dim"] % ndim] if ndim else [], clause)

    return write


rule("_unsafe_index.Tensor index.Tensor", index, flops=FREE)
rule("_unsafe_index_put index_put", index_put, flops=WRITTEN)
rule("cummax cummin cumprod glu logcumsumexp", scan(), flops=WRITTEN)
rule("kthvalue median.dim mode topk", scan(), flops=WRITTEN)
rule("sort sort.stable", sorting, flops=WRITTEN, local=sorted_part)
rule("bucketize.Tensor", "*a, b -> *a ; +b", flops="1 *a")  # each counts the boundaries below it
rule("cumsum", scan("lin(0)"), flops=WRITTEN)
rule(
    "gather",
    addressing("X, _, I -> I ; +v ; idx v @ 2 ; lin(0)"),
    local=addressed("v", "index", gather_local),
    flops=FREE,
)
rule("glu_backward", along("x, y -> y"), flops=WRITTEN)
rule("histc", "*a -> y ; +a ; fix y ; when(min < max)", flops="1 *a")
rule("index_add", addressing("X, _, i, I -> X ; +i ; add(0) ; fix v ; lin(0,3)", row=True), flops=WRITTEN)
rule("index_select", addressing("X, _, i -> I ; fix v ; lin(0)", row=True), flops=FREE)
# What is written last counts, so the index stays whole.
rule("scatter.src", addressing("X, _, I, I -> X ; lin(0,3) ; fix v i"), flops=WRITTEN)
rule("scatter.value", addressing("X, _, I -> X ; fix v i"), flops=WRITTEN)
rule(
    "scatter_add",
    addressing("X, _, I, I -> X ; +i ; add(0) ; idx v @ 2 ; lin(0,3)"),
    local=addressed("v", "index", scatter_add_local),
    flops=WRITTEN,
)
