"""Indexing, sorting and scans: untouched dims are free; a gather over a split dim is masked as an embedding is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sbpc.rules.match import FREE, WRITTEN, Arguments, Shard, Write
from sbpc.rules.ops.embedding import Found, addressed
from sbpc.rules.registry import rule

aten = torch.ops.aten


def _sides(shape: Sequence[int], other: Sequence[int], at: int) -> tuple[list[str], list[str], list[str]]:
    """Dims of a tensor and of its index: equal ones are shared, dim `at` is v and i, unequal ones (third) are fixed."""
    left = ["v" if d == at else f"d{d}" if size == other[d] else f"x{d}" for d, size in enumerate(shape)]
    right = ["i" if d == at else f"d{d}" if size == shape[d] else f"y{d}" for d, size in enumerate(other)]
    return left, right, [name for name in (*left, *right) if name[0] in "xy"]


def _fix(*names: str) -> str:
    return f" ; fix {' '.join(names)}" if names else ""


def gather(given: Arguments, outputs: Any) -> str | None:
    x, index = given["self"], given["index"]
    if x.dim() == 0 or index.dim() != x.dim():
        return None
    left, right, fixed = _sides(x.shape, index.shape, given["dim"] % x.dim())
    return f"{' '.join(left)}, _, {' '.join(right)} -> {' '.join(right)} ; +v ; idx v @ 2 ; lin(0){_fix(*fixed)}"


def gather_local(shard: Shard, found: Found) -> Any:
    return shard.call(aten.masked_fill.Scalar, shard.plain(index=found.nearest), found.outside, 0)


def scatter(given: Arguments, outputs: Any) -> str | None:
    """What is written last counts, so the index stays whole."""
    x, index, source = given["self"], given["index"], given.get("src")
    if x.dim() == 0 or (source is not None and source.shape != index.shape):
        return None
    left, right, fixed = _sides(x.shape, index.shape, given["dim"] % x.dim())
    if source is None:
        return f"{' '.join(left)}, _, {' '.join(right)} -> {' '.join(left)}{_fix('v', 'i', *fixed)}" + (
            " ; lin(0)" if given["value"] == 0 else ""
        )
    sign = f"{' '.join(left)}, _, {' '.join(right)}, {' '.join(right)} -> {' '.join(left)}"
    return f"{sign} ; lin(0,3){_fix('v', 'i', *fixed)}"


def scatter_add(given: Arguments, outputs: Any) -> str | None:
    x, index, source = given["self"], given["index"], given["src"]
    if x.dim() == 0 or source.shape != index.shape:
        return None
    left, right, fixed = _sides(x.shape, index.shape, given["dim"] % x.dim())
    return (
        f"{' '.join(left)}, _, {' '.join(right)}, {' '.join(right)} -> {' '.join(left)}"
        f" ; +i ; add(0) ; idx v @ 2 ; lin(0,3){_fix(*fixed)}"
    )  # fmt: skip


def scatter_add_local(shard: Shard, found: Found) -> Any:
    source = shard.call(aten.masked_fill.Scalar, shard.given["src"], found.outside, 0)
    return shard.plain(index=found.nearest, src=source)


def _indexed(given: Arguments) -> tuple[list[str], list[str], list[str], list[str]] | None:
    """Dims of self, operands of the indices, dims of the result, names of the index dims; None for boolean indices.

    Neighbouring indices put their (broadcast) dims in the place of those they index, others in front.
    """
    x, given_indices = given["self"], list(given["indices"])
    tensors = [index for index in given_indices if index is not None]
    if not tensors or any(index.dtype in (torch.bool, torch.uint8) for index in tensors):
        return None
    shape = torch.broadcast_shapes(*(index.shape for index in tensors))
    names = [f"i{at}" for at in range(len(shape))]
    operands = []
    for index in given_indices:
        skipped = len(shape) - (index.dim() if index is not None else 0)
        dims = (
            [names[at + skipped] if size == shape[at + skipped] else "1" for at, size in enumerate(index.shape)]
            if index is not None
            else ["_"]
        )
        operands.append(" ".join(dims) or "()")
    places = [at for at, index in enumerate(given_indices) if index is not None]
    left = [f"v{at}" if at in places else f"d{at}" for at in range(x.dim())]
    kept = [name for name in left if name[0] == "d"]
    before = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    return left, operands, [*kept[:before], *names, *kept[before:]], names


def index(given: Arguments, outputs: Any) -> str | None:
    found = _indexed(given)
    if found is None:
        return None
    left, operands, right, _ = found
    fixed = _fix(*(name for name in left if name[0] == "v"))
    return f"{' '.join(left)}, {', '.join(operands)} -> {' '.join(right) or '()'} ; lin(0){fixed}"


def index_put(given: Arguments, outputs: Any) -> str | None:
    """With accumulate, a shard of the indices adds its own values; without, the last one written counts."""
    found = _indexed(given)
    if found is None:
        return None
    left, operands, right, names = found
    values = given["values"]
    mine = " ".join(right[len(right) - values.dim() :]) or "()"
    free = f" ; +{' '.join(names)} ; add(0)" if given["accumulate"] and names else _fix(*names)
    fixed = _fix(*(v for v in left if v[0] == "v"))
    return (
        f"{' '.join(left)}, {', '.join(operands)}, {mine} -> {' '.join(left)} ; lin(0,{1 + len(operands)}){free}{fixed}"
    )


def index_add(given: Arguments, outputs: Any) -> str | None:
    x = given["self"]
    if given["index"].dim() != 1 or x.dim() == 0:
        return None
    left, right, _ = _sides(x.shape, x.shape, given["dim"] % x.dim())
    return f"{' '.join(left)}, _, i, {' '.join(right)} -> {' '.join(left)} ; +i ; add(0) ; fix v ; lin(0,3)"


def index_select(given: Arguments, outputs: Any) -> str | None:
    x = given["self"]
    if given["index"].dim() != 1 or x.dim() == 0:
        return None
    left, right, _ = _sides(x.shape, x.shape, given["dim"] % x.dim())
    return f"{' '.join(left)}, _, i -> {' '.join(right)} ; fix v ; lin(0)"


def scan(*clauses: str) -> Write:
    """The rule of an op along `dim` whose outputs may have another size there: that dim is fixed."""

    def write(given: Arguments, outputs: Any) -> str:
        x = given["self"]
        at = given["dim"] % x.dim() if x.dim() else -1
        flat = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        left = [f"x{d}" if d == at else f"d{d}" for d in range(x.dim())]
        right = [f"y{d}" if d == at else f"d{d}" for d in range(x.dim())]
        kept = [name for name in right if name[0] == "d" or flat[0].dim() == x.dim()]
        fixed = [name for name in dict.fromkeys((*left, *kept)) if name[0] in "xy"]
        sign = f"{' '.join(left) or '()'} -> {', '.join([' '.join(kept) or '()'] * len(flat))}"
        return " ; ".join([sign, *clauses]) + _fix(*fixed)

    return write


def glu_backward(given: Arguments, outputs: Any) -> str:
    ndim = outputs.dim()
    at = given["dim"] % ndim
    left = " ".join(f"x{d}" if d == at else f"d{d}" for d in range(ndim))
    right = " ".join(f"y{d}" if d == at else f"d{d}" for d in range(ndim))
    return f"{left}, {right} -> {right} ; lin(0) ; fix x{at} y{at}"


for op in (aten._unsafe_index.Tensor, aten.index.Tensor):
    rule(op, index, flops=FREE)
for op in (aten._unsafe_index_put.default, aten.index_put.default):
    rule(op, index_put, flops=WRITTEN)
for op in (aten.cummax.default, aten.cummin.default, aten.cumprod.default, aten.logcumsumexp.default):
    rule(op, scan(), flops=WRITTEN)
for op in (
    aten.kthvalue.default, aten.median.dim, aten.mode.default, aten.sort.default, aten.sort.stable,
    aten.topk.default,
):  # fmt: skip
    rule(op, scan())
rule(aten.bucketize.Tensor, "*a, b -> *a ; +b", flops="1 *a")  # each counts the boundaries below it
rule(aten.cumsum.default, scan("lin(0)"), flops=WRITTEN)
rule(aten.gather.default, gather, local=addressed("v", "index", gather_local), flops=FREE)
rule(aten.glu.default, scan(), flops=WRITTEN)
rule(aten.glu_backward.default, glu_backward, flops=WRITTEN)
rule(aten.histc.default, "*a -> y ; +a ; fix y ; when(min < max)", flops="1 *a")
rule(aten.index_add.default, index_add, flops=WRITTEN)
rule(aten.index_select.default, index_select, flops=FREE)
rule(aten.scatter.src, scatter, flops=WRITTEN)
rule(aten.scatter.value, scatter, flops=WRITTEN)
rule(aten.scatter_add.default, scatter_add, local=addressed("v", "index", scatter_add_local), flops=WRITTEN)
