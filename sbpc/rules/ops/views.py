"""Views and what moves elements about: each rule is generated from the shapes of the call."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from sbpc._compat import OpOverload
from sbpc.mesh.states import Numbers
from sbpc.rules.binding import flat_outputs
from sbpc.rules.match import FREE, WRITTEN, Arguments, Shard, Text, Write, overloads
from sbpc.rules.ops.dims import along, fix, joined, moved, numbered
from sbpc.rules.registry import rule

FIRST_STRIDE = 10_000
# A size of the whole dim is no local one.
CUT_BY_SIZE = overloads("split.Tensor split_with_sizes unfold")


# --- reshapes ---------------------------------------------------------------------------------------------------------
def reshape(given: Arguments, outputs: Any) -> tuple[str, dict[str, int]]:
    """The common refinement of both shapes: factors that the dims of either side are products of.

    >>> reshape({"self": torch.ones(6, 4)}, torch.ones(2, 3, 4))[0]
    '(f0 f1) f2, [f0 f1 f2] -> f0 f1 f2 ; lin(0)'
    """
    before, after = tuple(given["self"].shape), tuple(outputs.shape)
    factors = Factors((before, after), (["1"] * len(before), ["1"] * len(after)))
    for block in _blocks(before, after):
        factors.add(block)
    left, right = factors.texts
    return f"{joined(left)}, [{' '.join(right)}] -> {joined(right)} ; lin(0){fix(*factors.fixed)}", factors.sizes


def _blocks(before: Numbers, after: Numbers) -> list[tuple[list[int], list[int]]]:
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


@dataclass
class Factors:
    """The factors of a reshape, named block by block. texts: what each dim of both shapes is made of."""

    shapes: tuple[Numbers, Numbers]
    texts: tuple[list[str], list[str]]
    sizes: dict[str, int] = field(default_factory=dict)
    fixed: list[str] = field(default_factory=list)

    def add(self, block: tuple[list[int], list[int]]) -> None:
        """Name the factors of one block; where the borders of both sides interleave, only a common leading one is
        free."""
        edges = [_borders(shape, dims) for shape, dims in zip(self.shapes, block)]
        cuts = sorted({*edges[0], *edges[1]}, reverse=True)
        if 0 in cuts:
            return self.interleave(block, 1)
        if any(a % b for a, b in itertools.pairwise(cuts)):
            return self.interleave(block, math.gcd(*(shape[dims[0]] for shape, dims in zip(self.shapes, block))))
        names = {(a, b): self.new(a // b) for a, b in itertools.pairwise(cuts)}
        for dims, ends, texts in zip(block, edges, self.texts):
            for dim, major, minor in zip(dims, ends, ends[1:]):
                inside = [name for (a, b), name in names.items() if a <= major and b >= minor]
                texts[dim] = inside[0] if len(inside) == 1 else f"({' '.join(inside)})"

    def interleave(self, block: tuple[list[int], list[int]], common: int) -> None:
        """Name a leading factor that both sides have in common, and fix the rest of each dim."""
        lead = self.new(common) if common > 1 else ""
        for shape, dims, texts in zip(self.shapes, block, self.texts):
            for dim in dims:
                leads = dim == dims[0] and lead != ""
                self.fixed.append(self.new(shape[dim] // common if leads else shape[dim]))
                texts[dim] = f"({lead} {self.fixed[-1]})" if leads else self.fixed[-1]

    def new(self, size: int) -> str:
        """The name of a further factor."""
        self.sizes[f"f{len(self.sizes)}"] = size
        return f"f{len(self.sizes) - 1}"


def _borders(shape: Numbers, dims: Numbers) -> list[int]:
    return [math.prod(shape[dim] for dim in dims[at:]) for at in range(len(dims) + 1)]


def reshaped(shard: Shard) -> Any:
    """A reshape, which copies where strides forbid a view: what a collective returns has strides of its own."""
    return shard.aten("reshape", shard.args[0], shard.shape())


# --- dims in another order or number ----------------------------------------------------------------------------------
def strided(op: OpOverload, given: Arguments, outputs: Any) -> str:
    """The rule of a view, read off the strides that it gives to a tensor whose every dim has a stride of its own.

    An output dim of the stride and size of an input dim is that dim; one of stride 0 is new; all others are cut.

    >>> x = torch.ones(2, 3, 1)
    >>> strided(torch.ops.aten.permute.default, {"self": x, "dims": [2, 0, 1]}, x.permute(2, 0, 1))
    'd0 d1 d2 -> d2 d0 d1 ; lin(0)'
    """
    x = given["self"]
    cut = given.get("dim", given.get("dimension")) % x.dim() if op in CUT_BY_SIZE else None
    probe = torch.empty_strided(x.shape, [FIRST_STRIDE + at for at in range(x.dim())], device="meta")

    def dim(output: int, at: int, size: int, stride: int) -> str:
        source = stride - FIRST_STRIDE  # no multiple and no sum of the strides is one of them
        if source in range(x.dim()) and source != cut and size == x.shape[source]:
            return f"d{source}"
        return "1" if size == 1 else f"e{at}" if stride == 0 else f"y{output}_{at}"

    made = flat_outputs(op(**{**given, "self": probe}))
    sides = [[dim(n, at, *place) for at, place in enumerate(zip(y.shape, y.stride()))] for n, y in enumerate(made)]
    lost = [at for at in range(x.dim()) if not all(f"d{at}" in side for side in sides)]
    mine = numbered(x.dim(), lost, "x")
    before = ["1" if name[0] == "x" and size == 1 else name for name, size in zip(mine, x.shape)]
    fixed = [name for side in (*sides, before) for name in side if name[0] in "xy"]
    sizes = f", [{' '.join(sides[0])}]" if "size" in given and op not in CUT_BY_SIZE else ""
    return f"{joined(before)}{sizes} -> {', '.join(map(joined, sides))} ; lin(0){fix(*fixed)}"


def squeeze_dims(shard: Shard) -> Any:
    """Removes the dims of GLOBAL size 1; a shard may have a single element as well."""
    dims = shard.match.bound.inputs[0].dims or ()
    return shard.aten("squeeze.dims", shard.args[0], [at for at, dim in enumerate(dims) if not dim.factors])


# --- some dims are cut, all others are free ---------------------------------------------------------------------------
def cutting(dims: str, *, sizes: bool = False) -> Write:
    """Input and output of equally many dims: those named by argument `dims` are fixed where the op does something.

    sizes: the first integer argument holds the sizes of the output.
    """

    def write(given: Arguments, outputs: Any) -> str:
        source = given.get("self", given.get("grad_output"))
        ndim, value = source.dim(), given[dims]
        asked = [value] if isinstance(value, int) else value
        whole = dims == "dim" and source.shape == outputs.shape and given.get("step", 1) == 1
        cut = [] if whole else sorted({dim % ndim for dim in asked}) if ndim else []
        return moved("x, [y] -> y" if sizes else "x -> y", ndim, cut)

    return write


def cat(given: Arguments, outputs: Any) -> str | None:
    marks = [f"x{number}_" for number in range(len(given["tensors"]))]
    # an old exception: cat skips empty 1-d tensors
    if any(tensor.dim() != outputs.dim() for tensor in given["tensors"]):
        return None
    return moved(f"{', '.join(marks)} -> y", outputs.dim(), [given["dim"] % outputs.dim()], "lin(all)")


def stack(given: Arguments, outputs: Any) -> str:
    sign = ", ".join("-" * len(given["tensors"])) + " -> y"
    return moved(sign, outputs.dim(), [given["dim"] % outputs.dim()], "lin(all)")


def pad(given: Arguments, outputs: Any) -> str:
    """constant_pad_nd; linear only where it pads with zeros. A dim that is padded by nothing on both ends is free."""
    ndim, amounts = given["self"].dim(), given["pad"]
    cut = sorted(ndim - 1 - at // 2 for at in range(0, len(amounts), 2) if any(amounts[at : at + 2]))
    return moved("x -> y", ndim, cut, "lin(0)" if given["value"] == 0 else "")


def repeat(given: Arguments, outputs: Any) -> str:
    ndim, x = outputs.dim(), given["self"]
    new = ndim - x.dim()
    cut = [at for at in range(ndim) if given["repeats"][at] != 1 or at < new]
    mine = numbered(ndim, cut, "x")[new:]
    fixed = [name for name in mine if name[0] == "x"] + [f"y{at}" for at in cut]
    return f"{joined(mine)} -> {joined(numbered(ndim, cut, 'y'))} ; lin(0){fix(*fixed)}"


def embed(given: Arguments, outputs: Any) -> str:
    """slice_scatter and select_scatter: src written into self, jointly linear."""
    sliced = given["src"].dim() == outputs.dim()
    return moved("x, y -> x" if sliced else "x, - -> x", outputs.dim(), [given["dim"] % outputs.dim()], "lin(0,1)")


def triangle(given: Arguments, outputs: Any) -> str:
    ndim = outputs.dim()
    return moved("x -> x", ndim, [ndim - 2, ndim - 1])


def roll(given: Arguments, outputs: Any) -> Text:
    """Without dims, roll works on the flattened tensor."""
    return cutting("dims")({**given, "dims": given["dims"] or list(range(given["self"].dim()))}, outputs)


for op in overloads(
    "diagonal expand permute select.int slice.Tensor split.Tensor split_with_sizes t transpose.int unbind.int unfold "
    "unsqueeze"
):
    rule(op, functools.partial(strided, op), view=True)
for op in overloads("squeeze squeeze.dim squeeze.dims"):
    rule(op, functools.partial(strided, op), local=squeeze_dims, view=True)
rule("_unsafe_view reshape view", reshape, local=reshaped, view=True)
rule("slice_scatter select_scatter", embed, flops=WRITTEN)
rule("tril triu", triangle, flops=WRITTEN)
rule("cat", cat, flops=FREE)
rule("constant_pad_nd", pad, flops=FREE)
rule("flip", cutting("dims"), flops=FREE)
rule("repeat", repeat, flops=FREE)
rule("roll", roll, flops=FREE)
rule("select_backward", along("-, [x] -> x"), flops=FREE)
rule("slice_backward", cutting("dim", sizes=True), flops=FREE)
rule("stack", stack, flops=FREE)
rule("view_as_complex", "*a 2 -> *a ; lin(0)", view=True)
rule("view_as_real", "*a -> *a 2 ; lin(0)", view=True)
