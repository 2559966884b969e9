"""A matched call: an op with its rule, its legal signatures and their local arguments, and how it runs in two
phases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from sbpc._compat import OpOverload
from sbpc.graph.expert_rows import COUNT
from sbpc.graph.operands import leaves, named_arguments, with_arguments
from sbpc.mesh.kernels import WIDTHS, Attention, Convolution, Product, Shape
from sbpc.mesh.layout import chunk
from sbpc.mesh.routing import ANY
from sbpc.mesh.states import Ints, Names, State
from sbpc.rules.binding import Bound, Signature, base
from sbpc.rules.grammar import Rule

aten = torch.ops.aten
Call = Callable[..., Any]
Arguments = Mapping[str, Any]
Text = str | tuple[str, dict[str, int]] | None  # a rule string, if need be with sizes that the shapes do not tell
Write = Callable[[Arguments, Any], Text]
FREE = "0"  # flops of views and factories
WRITTEN = "written"  # one flop per element of the outputs


@cache
def overloads(names: str) -> tuple[OpOverload, ...]:
    """The ops of ATen that a text names, as in "topk add.Tensor"."""
    parts = (name.partition(".") for name in names.split())
    return tuple(getattr(getattr(aten, name), overload or "default") for name, _, overload in parts)


PRODUCTS = frozenset(overloads("_grouped_mm _scaled_mm addmm baddbmm bmm einsum linear mm"))


@dataclass(frozen=True)
class ValueNumber:
    """Where value `number` stands among the arguments of a call: the op's operands first, then what each call gives."""

    number: int


def filled(arguments: Any, values: Mapping[int, Any]) -> Any:
    """Nested arguments with values in the places."""
    return map_aggregate(arguments, lambda item: values[item.number] if isinstance(item, ValueNumber) else item)


@dataclass(frozen=True, eq=False)
class SubOp:
    """One call of the small graph: it gives value `number`, of the shape and dtype of `val`, and reads others."""

    number: int
    match: Match
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: Ints
    val: Tensor

    def arguments(self, values: Mapping[int, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with values in the places."""
        return filled((self.args, self.kwargs), values)


@dataclass(frozen=True, eq=False)
class Way:
    """How the small graph runs on one axis: a signature for every part, and by number the state in which it is read."""

    signatures: tuple[Signature, ...]
    states: Mapping[int, State]


@dataclass(frozen=True, eq=False)
class Phases:
    """An op taken apart. factors: those that may be split only so. outputs: numbers of values, None for an absent one.

    ways: by signature of the op; one that is missing cannot stand on one axis while another axis splits these factors.
    """

    factors: frozenset[str]
    parts: tuple[SubOp, ...]
    outputs: tuple[int | None, ...]
    ways: Mapping[Signature, Way]

    def apart(self, chosen: Iterable[Signature]) -> bool:
        """Whether signatures, one per axis, split a factor that only the small graph may split."""
        return any(signature.factor in self.factors for signature in chosen)

    def along(self, chosen: Iterable[Signature]) -> list[Way] | None:
        """The way on each axis, None if some signature has none."""
        found = [self.ways.get(signature) for signature in chosen]
        return None if None in found else found  # type: ignore[return-value]


@dataclass(frozen=True)
class Entry:
    """One row of the table: how the rule of `op` is written, what it costs, how it runs on shards.

    source: "" for a rule of sbpc's own, else "proved", "unproved" or "reviewed, FILE:LINE".
    """

    op: OpOverload
    text: str | Write
    flops: str | Count | None = None
    local: Kernel | None = None
    nonempty: Names = ()
    view: bool = False
    source: str = ""


@dataclass(frozen=True)
class Match:
    """A rule bound to one call at global sizes.

    sizes: factor -> global size. signatures: all-B first. divides: factors that lead a group; every axis that cuts
    one must divide its (local) size. nonempty: factors that may leave no rank an empty shard. view: the outputs
    alias an input. shifts: factors of which `localize` wants the offset where they are split. phases: what runs in
    the place of the op where a factor is split `via` a function.
    """

    op: OpOverload
    rule: Rule
    sizes: dict[str, int]
    signatures: tuple[Signature, ...]
    divides: frozenset[str]
    nonempty: frozenset[str]
    view: bool
    bound: Bound
    entry: Entry
    phases: Phases | None = None

    @cached_property
    def shifts(self) -> frozenset[str]:
        indexed = {name for name, _ in self.rule.idx}
        return frozenset(factor for factor in self.sizes if base(factor) in indexed)

    def flops(self, local: Arguments) -> Any:
        """The flops of the op at these factor sizes (numbers, arrays, sympy): by default `each` per point of its
        space."""
        text = self.entry.flops(self) if callable(self.entry.flops) else self.entry.flops
        if text is None:
            return math.prod((local[factor] for factor in self.points), start=self.each)
        if text == WRITTEN:
            outputs = [value.dims for value in self.bound.outputs if value.dims is not None]
            return sum(math.prod((dim.size(local) for dim in dims), start=1) for dims in outputs)
        number, *names = text.split()
        chosen = [factor for name in names for factor in self.sizes if name in (factor, f"*{base(factor)}")]
        top, _, bottom = number.partition("/")
        found = math.prod((local[factor] for factor in chosen), start=int(top))
        return found / int(bottom) if bottom else found

    def shape(self, local: Arguments, cut: Arguments) -> Shape | None:
        """The shape of the op's work at these factor sizes; None where its time depends on flops and bytes alone.
        cut: factor -> whether it is split, by label or not."""
        if self.causal is not None:
            t, whole = self.keys(local), (1 - cut.get("s", False)) * (1 - cut.get("t", False))
            pairs = math.prod((local[name] for name in "bgrs" if name in local), start=t)
            return Attention(pairs, t, self.causal * whole, "backward" in str(self.op), self.kind)
        if "convolution" in str(self.op):
            return Convolution(self.kind)
        if self.product is None:
            return None
        batch, rows, columns, depth, groups = (
            math.prod((local[name] for name in names), start=1.0) for names in self.product
        )
        return Product(batch * groups, rows / groups, columns, depth, self.kind)

    @property
    def kind(self) -> str:
        """The type of the numbers that the op multiplies, see `Product`, as torch is told to multiply them now;
        convolutions have a setting of their own."""
        if self.number != "float32":
            return self.number
        alone = "convolution" in str(self.op)
        short = torch.backends.cudnn.allow_tf32 if alone else torch.get_float32_matmul_precision() != "highest"
        return "tf32" if short else "float32"

    @cached_property
    def number(self) -> str:
        """The type of its first operand, of WIDTHS; nothing where that is none of them."""
        dtype = next((str(each.dtype) for each in self.bound.inputs if each.dtype and each.dtype.is_floating_point), "")
        name = dtype.removeprefix("torch.").partition("_")[0]  # as float8_e4m3fn
        return "bfloat16" if name == "float16" else name if name in WIDTHS else ""

    @cached_property
    def causal(self) -> bool | None:
        """Whether an attention leaves out pairs, where nothing that it masks is split; None for other ops."""
        attends = {*"grst"} <= self.sizes.keys() and "att" in str(self.op) and self.space > 0
        return bool(self.shifts) if attends else None

    def keys(self, local: Arguments) -> Any:
        """How many keys a query of attention meets: of packed sequences as many as the longest has, or its window."""
        if "m" not in self.sizes:
            return local["t"]
        longest, window = self.sizes["m"], self.sizes.get("w")  # neither is ever split
        return longest if window is None else min(longest, window + 1)

    @cached_property
    def product(self) -> tuple[Names, ...] | None:
        """The factors of batch, rows, columns, depth and groups of a product of two operands; None for other ops.
        Groups share out the rows."""
        held = [{factor for dim in value.dims or () for factor in dim.factors} for value in self.bound.values]
        summed = {factor for factor in self.points if factor not in held[-1]}
        first, *rest = [factors for factors in held[:-1] if summed & factors] or [set()]
        if self.op not in PRODUCTS or len(rest) != 1:
            return None
        places = {(1, 1, 1): 0, (1, 0, 1): 1, (0, 1, 1): 2, (1, 1, 0): 3}
        found: list[list[str]] = [[], [], [], [], []]
        for factor in self.points:
            found[places.get((factor in first, factor in rest[0], factor in held[-1]), 4)].append(factor)
        return tuple(map(tuple, found))

    @cached_property
    def each(self) -> int:
        """Flops per point: 1, or as many as an op has parts of that many points; one kernel does what they would do."""
        parts = self.phases.parts if self.phases is not None else ()
        return sum(not part.match.view and part.match.space == self.space for part in parts) or 1

    @cached_property
    def space(self) -> int:
        """The number of points at global sizes."""
        return math.prod(self.sizes[factor] for factor in self.points)

    @cached_property
    def points(self) -> Names:
        """The factors that some tensor of the call has."""
        of_tensors = {factor for value in self.bound.values for dim in value.dims or () for factor in dim.factors}
        return tuple(factor for factor in self.sizes if factor in of_tensors)

    def localize(
        self,
        call: Call,
        args: Sequence[Any],
        kwargs: Arguments,
        local: Mapping[str, int],
        offsets: Arguments,
        sharing: Sharing | None = None,
        part: Mapping[str, int] | None = None,
    ) -> Any:
        """Run (or emit) the op on shards by `call(op, *args, **kwargs)`, once or more; what it returns, or a tuple.

        args: those of the call with local values for tensors. local: factor -> local size. offsets: factor -> 0-dim
        int64 tensor, the global index of the first local element, for the factors of `shifts` that are split.
        sharing: the ranks that share out rows, where the op has rows in R. part: by factor the size of the part within
        which they do, or of which the rank has its own rows, where the op has rows in L.
        """
        shard = Shard(self, call, args, kwargs, local, offsets, sharing, part)
        return shard.plain() if self.entry.local is None else self.entry.local(shard)


@dataclass(frozen=True)
class Sharing:
    """The ranks that share out rows by their groups, on neighbouring axes of these sizes. rank: of this one among them,
    int64 [1]. group: what they are called. rows: the factor of which each has as many as the data says. most: the
    multiple of the mean that a rank has at most, beyond which it is an error. where: who has these rows. across: by
    axis on which tokens are cut into parts, whose ranks share out their rows, how many, and the group of the ranks.
    apart: each has sorted the rows of its own tokens, and sends them so."""

    sizes: Ints
    rank: Any
    group: str
    rows: str | None = None
    most: float = ANY
    where: str = ""
    across: tuple[tuple[int, str], ...] = ()
    apart: bool = False

    def ends(self, size: int) -> list[int]:
        """Where the chunk of each rank ends of a dim that the axes cut, one after the other."""
        axes = range(len(self.sizes))
        places = (chunk(size, axes, self.sizes, at) for at in itertools.product(*map(range, self.sizes)))
        return [first + length for first, length in places]


@dataclass(frozen=True)
class Shard:
    """One call on the shards of one rank, which a local kernel is to run (or emit); the fields of `Match.localize`."""

    match: Match
    call: Call
    args: Sequence[Any]
    kwargs: Arguments
    local: Mapping[str, int]
    offsets: Arguments
    sharing: Sharing | None = None
    part: Mapping[str, int] | None = None

    @cached_property
    def given(self) -> dict[str, Any]:
        """The arguments by name, defaults included; integer arguments at global sizes."""
        return named_arguments(self.match.op, self.args, self.kwargs)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Those of the part within which ranks share out rows, or have their own; else the global ones."""
        return self.match.sizes if self.part is None else self.part

    @cached_property
    def counted(self) -> Mapping[str, Any]:
        """The local sizes; of rows that ranks share out what a call counts as the program runs."""
        rows = None if self.sharing is None else self.sharing.rows
        values = zip(leaves((self.args, self.kwargs), (Node, Tensor)), self.match.bound.inputs)
        places = [(x, at) for x, value in values for at, dim in enumerate(value.dims or ()) if dim.factors == (rows,)]
        return {**self.local, rows: self.call(COUNT, *places[0])} if rows and places else self.local

    def aten(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """An op of ATen, by its name as in `overloads`."""
        return self.call(*overloads(name), *args, **kwargs)

    def plain(self, /, **changed: Any) -> Any:
        """The op itself, its integer arguments at local sizes, and with these arguments in the place of its own."""
        bound = self.match.bound
        integers = bound.integers(self.args, self.kwargs, self.counted if bound.fills else self.local)
        args, kwargs = with_arguments(self.match.op, self.args, self.kwargs, integers | changed)
        return self.call(self.match.op, *args, **kwargs)

    def shape(self, at: int = 0) -> list[int]:
        """The local shape of output `at`."""
        dims = self.match.bound.outputs[at].dims
        assert dims is not None
        return [dim.size(self.counted) for dim in dims]

    def zeros(self) -> Any:
        """All outputs as zeros, in the dtype of the first argument."""
        like = next(iter(self.given.values()))
        made = [self.aten("new_zeros", like, self.shape(at)) for at in range(len(self.match.bound.outputs))]
        return made[0] if len(made) == 1 else tuple(made)


Count = Callable[[Match], str]
Kernel = Callable[[Shard], Any]
