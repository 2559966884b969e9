"""Views and what moves elements about: each rule is generated from the shapes of the call."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from sbpc._compat import OpOverload
from sbpc.rules.binding import flat_outputs
from sbpc.rules.match import FREE, WRITTEN, Arguments, Shard, Text, Write
from sbpc.rules.registry import rule

aten = torch.ops.aten
FIRST_STRIDE = 10_000
CUT_BY_SIZE = (
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unfold.default,
)  # a size of the whole dim is no local one


# --- reshapes ---------------------------------------------------------------------------------------------------------
def reshape(given: Arguments, outputs: Any) -> tuple[str, dict[str, int]]:
    """The common refinement of both shapes: factors that the dims of either side are products of.

    >>> reshape({"self": torch.ones(6, 4)}, torch.ones(2, 3, 4))[0]
    '(f0 f1) f2, [f0 f1 f2] -> f0 f1 f2 ; lin(0)'
    """
    before, after = tuple(given["self"].shape), tuple(outputs.shape)
    sizes: dict[str, int] = {}
    fixed: list[str] = []
    left, right = [""] * len(before), [""] * len(after)
    for ins, outs in _blocks(before, after):
        _refine(before, after, ins, outs, left, right, sizes, fixed)
    left = [dim or "1" for dim in left]
    right = [dim or "1" for dim in right]
    clauses = ["lin(0)", *([f"fix {' '.join(fixed)}"] if fixed else [])]
    return f"{' '.join(left) or '()'}, [{' '.join(right)}] -> {' '.join(right) or '()'} ; {' ; '.join(clauses)}", sizes


def _blocks(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims (of size other than 1) of both shapes with equal products."""
    ins, outs = ([at for at, size in enumerate(shape) if size != 1] for shape in (before, after))
    if 0 in before:
        return [(ins, outs)]
    found: list[tuple[list[int], list[int]]] = []
    while ins or outs:
        a, b = [ins.pop(0)], [outs.pop(0)]
        while (m := math.prod(before[at] for at in a)) != (n := math.prod(after[at] for at in b)):
            (a.append(ins.pop(0)) if m < n else b.append(outs.pop(0)))
        found.append((a, b))
    return found


def _refine(
    before: Sequence[int], after: Sequence[int], ins: list[int], outs: list[int],
    left: list[str], right: list[str], sizes: dict[str, int], fixed: list[str],
) -> None:  # fmt: skip
    """Name the factors of one block; where the borders of both sides interleave, only a common leading one is free."""

    def new(size: int) -> str:
        sizes[f"f{len(sizes)}"] = size
        return f"f{len(sizes) - 1}"

    def borders(shape: Sequence[int], dims: list[int]) -> list[int]:
        return [math.prod(shape[dim] for dim in dims[at:]) for at in range(len(dims) + 1)]

    if 0 in before:
        for shape, dims, side in ((before, ins, left), (after, outs, right)):
            for dim in dims:
                side[dim] = new(shape[dim])
                fixed.append(side[dim])
        return
    cuts = sorted({*borders(before, ins), *borders(after, outs)}, reverse=True)
    if all(a % b == 0 for a, b in itertools.pairwise(cuts)):
        names = {(a, b): new(a // b) for a, b in itertools.pairwise(cuts)}
        for shape, dims, side in ((before, ins, left), (after, outs, right)):
            edges = borders(shape, dims)
            for dim, major, minor in zip(dims, edges, edges[1:]):
                inside = [name for (a, b), name in names.items() if a <= major and b >= minor]
                side[dim] = inside[0] if len(inside) == 1 else f"({' '.join(inside)})"
        return
    common = math.gcd(before[ins[0]], after[outs[0]])
    lead = new(common) if common > 1 else ""
    for shape, dims, side in ((before, ins, left), (after, outs, right)):
        for dim in dims:
            leads = dim == dims[0] and lead != ""
            rest = new(shape[dim] // common if leads else shape[dim])
            side[dim] = f"({lead} {rest})" if leads else rest
            fixed.append(rest)


def reshaped(shard: Shard) -> Any:
    """A reshape, which copies where strides forbid a view: what a collective returns has strides of its own."""
    return shard.call(aten.reshape.default, shard.args[0], shard.shape())


# --- dims in another order or number ----------------------------------------------------------------------------------
def strided(op: OpOverload, given: Arguments, outputs: Any) -> str:
    """The rule of a view, read off the strides that it gives to a tensor whose every dim has a stride of its own.

    An output dim of the stride and size of an input dim is that dim; one of stride 0 is new; all others are cut.

    >>> x = torch.ones(2, 3, 1)
    >>> strided(aten.permute.default, {"self": x, "dims": [2, 0, 1]}, x.permute(2, 0, 1))
    'd0 d1 d2 -> d2 d0 d1 ; lin(0)'
    """
    x = given["self"]
    marks = {FIRST_STRIDE + at: f"d{at}" for at in range(x.dim())}  # no multiple and no sum of these is one of them
    if op in CUT_BY_SIZE:
        marks.pop(FIRST_STRIDE + given.get("dim", given.get("dimension")) % x.dim(), None)
    probe = torch.empty_strided(x.shape, [FIRST_STRIDE + at for at in range(x.dim())], device="meta")
    fixed = []

    def dim(number: int, at: int, size: int, stride: int) -> str:
        name = marks.get(stride, "")
        if name and size == x.shape[stride - FIRST_STRIDE]:
            return name
        if size == 1 or stride == 0:
            return "1" if size == 1 else f"e{at}"
        fixed.append(f"y{number}_{at}")
        return fixed[-1]

    made = flat_outputs(op(**{**given, "self": probe}))
    sides = [[dim(n, at, *place) for at, place in enumerate(zip(y.shape, y.stride()))] for n, y in enumerate(made)]
    before = []
    for at, size in enumerate(x.shape):
        cut = not all(f"d{at}" in side for side in sides)
        before.append("1" if cut and size == 1 else f"x{at}" if cut else f"d{at}")
        fixed += [before[-1]] if cut and size != 1 else []
    texts = [" ".join(side) or "()" for side in (before, *sides)]
    sizes = f", [{' '.join(sides[0])}]" if "size" in given and op not in CUT_BY_SIZE else ""
    return f"{texts[0]}{sizes} -> {', '.join(texts[1:])} ; lin(0)" + (f" ; fix {' '.join(fixed)}" if fixed else "")


def squeeze_dims(shard: Shard) -> Any:
    """Removes the dims of GLOBAL size 1; a shard may have a single element as well."""
    dims = shard.match.bound.inputs[0].dims or ()
    return shard.call(aten.squeeze.dims, shard.args[0], [at for at, dim in enumerate(dims) if not dim.factors])


# --- some dims are cut, all others are free ---------------------------------------------------------------------------
def _side(ndim: int, cut: Sequence[int], mark: str) -> str:
    return " ".join(f"{mark}{at}" if at in cut else f"d{at}" for at in range(ndim)) or "()"


def _fixes(cut: Sequence[int], *marks: str) -> str:
    names = [f"{mark}{at}" for mark in marks for at in cut]
    return f" ; fix {' '.join(names)}" if names else ""


def cutting(dims: str, *, sizes: bool = False, linear: str = "lin(0)") -> Write:
    """Input and output of equally many dims: those named by argument `dims` are fixed where the op does something.

    sizes: the first integer argument holds the sizes of the output.
    """

    def write(given: Arguments, outputs: Any) -> str:
        source = given.get("self", given.get("grad_output"))
        ndim, value = source.dim(), given[dims]
        asked = [value] if isinstance(value, int) else value
        whole = dims == "dim" and source.shape == outputs.shape and given.get("step", 1) == 1
        cut = [] if whole else sorted({dim % ndim for dim in asked}) if ndim else []
        middle = f", [{_side(ndim, cut, 'y')}]" if sizes else ""
        return f"{_side(ndim, cut, 'x')}{middle} -> {_side(ndim, cut, 'y')} ; {linear}{_fixes(cut, 'x', 'y')}"

    return write


def unselect(given: Arguments, outputs: Any) -> str:
    """select_backward."""
    ndim, at = outputs.dim(), given["dim"] % outputs.dim()
    kept = [f"d{dim}" for dim in range(ndim) if dim != at]
    whole = _side(ndim, [at], "x")
    return f"{' '.join(kept) or '()'}, [{whole}] -> {whole} ; lin(0){_fixes([at], 'x')}"


def cat(given: Arguments, outputs: Any) -> str | None:
    ndim, tensors = outputs.dim(), given["tensors"]
    if any(tensor.dim() != ndim for tensor in tensors):  # an old exception: cat skips empty 1-d tensors
        return None
    at = given["dim"] % ndim
    marks = [f"x{number}_" for number in range(len(tensors))]
    parts = ", ".join(_side(ndim, [at], mark) for mark in marks)
    return f"{parts} -> {_side(ndim, [at], 'y')} ; lin(all){_fixes([at], *marks, 'y')}"


def stack(given: Arguments, outputs: Any) -> str:
    ndim = outputs.dim()
    at = given["dim"] % ndim
    part = " ".join(f"d{dim}" for dim in range(ndim) if dim != at) or "()"
    return f"{', '.join([part] * len(given['tensors']))} -> {_side(ndim, [at], 'y')} ; lin(all){_fixes([at], 'y')}"


def pad(given: Arguments, outputs: Any) -> str:
    """constant_pad_nd; linear only where it pads with zeros. A dim that is padded by nothing on both ends is free."""
    ndim, amounts = given["self"].dim(), given["pad"]
    cut = sorted(ndim - 1 - at // 2 for at in range(0, len(amounts), 2) if any(amounts[at : at + 2]))
    text = f"{_side(ndim, cut, 'x')} -> {_side(ndim, cut, 'y')}{_fixes(cut, 'x', 'y')}"
    return text + (" ; lin(0)" if given["value"] == 0 else "")


def repeat(given: Arguments, outputs: Any) -> str:
    ndim, x = outputs.dim(), given["self"]
    new = ndim - x.dim()
    cut = [at for at in range(ndim) if given["repeats"][at] != 1 or at < new]
    mine = " ".join(f"x{at}" if at in cut else f"d{at}" for at in range(new, ndim)) or "()"
    fixed = [f"x{at}" for at in cut if at >= new] + [f"y{at}" for at in cut]
    return f"{mine} -> {_side(ndim, cut, 'y')} ; lin(0)" + (f" ; fix {' '.join(fixed)}" if fixed else "")


def embed(given: Arguments, outputs: Any) -> str:
    """slice_scatter and select_scatter: src written into self, jointly linear."""
    ndim = outputs.dim()
    at = given["dim"] % ndim
    part = (
        " ".join(
            f"y{dim}" if dim == at else f"d{dim}" for dim in range(ndim) if dim != at or given["src"].dim() == ndim
        )
        or "()"
    )
    fixed = "x y" if given["src"].dim() == ndim else "x"
    whole = _side(ndim, [at], "x")
    return f"{whole}, {part} -> {whole} ; lin(0,1){_fixes([at], *fixed.split())}"


def triangle(given: Arguments, outputs: Any) -> str:
    ndim = given["self"].dim()
    cut = [ndim - 2, ndim - 1]
    return f"{_side(ndim, cut, 'x')} -> {_side(ndim, cut, 'x')} ; lin(0){_fixes(cut, 'x')}"


def roll(given: Arguments, outputs: Any) -> Text:
    """Without dims, roll works on the flattened tensor."""
    return cutting("dims")({**given, "dims": given["dims"] or list(range(given["self"].dim()))}, outputs)


for op in (
    aten.diagonal.default, aten.expand.default, aten.permute.default, aten.select.int, aten.slice.Tensor,
    aten.split.Tensor, aten.split_with_sizes.default, aten.t.default, aten.transpose.int, aten.unbind.int,
    aten.unfold.default, aten.unsqueeze.default,
):  # fmt: skip
    rule(op, functools.partial(strided, op), view=True)
for op in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
    rule(op, functools.partial(strided, op), local=squeeze_dims, view=True)
for op in (aten._unsafe_view.default, aten.reshape.default, aten.view.default):
    rule(op, reshape, local=reshaped, view=True)
for op in (aten.slice_scatter.default, aten.select_scatter.default):
    rule(op, embed, flops=WRITTEN)
for op in (aten.tril.default, aten.triu.default):
    rule(op, triangle, flops=WRITTEN)
rule(aten.cat.default, cat, flops=FREE)
rule(aten.constant_pad_nd.default, pad, flops=FREE)
rule(aten.flip.default, cutting("dims"), flops=FREE)
rule(aten.repeat.default, repeat, flops=FREE)
rule(aten.roll.default, roll, flops=FREE)
rule(aten.select_backward.default, unselect, flops=FREE)
rule(aten.slice_backward.default, cutting("dim", sizes=True), flops=FREE)
rule(aten.stack.default, stack, flops=FREE)
rule(aten.view_as_complex.default, "*a 2 -> *a ; lin(0)", view=True)
rule(aten.view_as_real.default, "*a -> *a 2 ; lin(0)", view=True)
