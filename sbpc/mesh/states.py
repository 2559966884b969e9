"""Split, Broadcast, Partial, Ragged and Local: what one tensor is over one mesh axis, defined by `shards` and `whole`.

The states are OneFlow's (Yuan et al. 2021, "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch").
Everything else in this project is measured against the two functions of this file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sbpc.errors import LayoutError

Ints = tuple[int, ...]
Axes = Ints  # of a mesh, by number
Shape = Ints
Names = tuple[str, ...]
Numbers = Sequence[int]  # of axes, of dims; their sizes; coordinates


@dataclass(frozen=True)
class Split:
    """`S(dim)`: rank r holds the r-th chunk of dim `dim`, cut as `torch.chunk` cuts: trailing chunks may be short or
    empty.

    >>> [part.tolist() for part in shards(torch.arange(6).view(2, 3), S(1), 2)]
    [[[0, 1], [3, 4]], [[2], [5]]]
    """

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"

    __repr__ = __str__


@dataclass(frozen=True)
class Local(Split):
    """`L(dim)`: places on dim `dim`, as rows sorted by expert, come from places of something split, and rank r holds
    those that come from its chunk of that, in their order: what it gets where it sorts its chunk alone. Where places
    come from is data.

    >>> [part.tolist() for part in shards(torch.tensor([7, 8, 9, 6]), L(0), 2, source=torch.tensor([3, 0, 1, 2]))]
    [[8, 9], [7, 6]]
    """

    def __str__(self) -> str:
        return f"L({self.dim})"

    __repr__ = __str__


@dataclass(frozen=True)
class Broadcast:
    """`B`: every rank holds the whole tensor."""

    def __str__(self) -> str:
        return "B"

    __repr__ = __str__


@dataclass(frozen=True)
class Partial:
    """`P`: the tensor is the elementwise `op` ("sum", "max" or "min") of what the ranks hold, each as large as the
    tensor. `P(own)` is a sum of which each rank holds what its own rows give, as counts of them.

    >>> whole([torch.tensor([1, 2]), torch.tensor([10, 20])], P).tolist()
    [11, 22]
    """

    op: str = "sum"

    @property
    def by(self) -> str:
        """The reduction that puts the summands together."""
        return "sum" if self.op == "own" else self.op

    def __str__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"

    __repr__ = __str__


@dataclass(frozen=True)
class Ragged:
    """`R(dim)`: places on dim `dim`, as the rows of experts, stand group by group, and rank r holds those of its chunk
    of the groups. Where groups end is data. What stands behind the last group is the last rank's.

    >>> [part.tolist() for part in shards(torch.arange(6), Ragged(0), 2, ends=torch.tensor([1, 1, 4]))]
    [[0], [1, 2, 3, 4, 5]]
    """

    dim: int

    def __str__(self) -> str:
        return f"R({self.dim})"

    __repr__ = __str__


State = Split | Local | Broadcast | Partial | Ragged
S = Split
L = Local
B = Broadcast()
P = Partial()
OWN = Partial("own")
STATES = "A state is S(dim), B, P, P(max) or P(min), of rows of experts also R(dim) or L(dim), of their ends P(own)."
REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def is_ordered(state: State) -> bool:
    """Whether rows, or the numbers of where groups of them end, are in an order of which no boxing knows."""
    return isinstance(state, (Local, Ragged)) or state == OWN


def parse_state(text: str) -> State:
    """The state that a text such as "S(0)", "B", "P", "P(max)", "R(0)" or "L(0)" names.

    >>> [parse_state(t) for t in ("S(1)", "B", "P", "P(max)", "R(0)", "L(1)")]
    [S(1), B, P, P(max), R(0), L(1)]

    Raises LayoutError for anything else.
    """
    text = text.strip()
    if text == "B":
        return B
    if match := re.fullmatch(r"S\((\d+)\)", text):
        return Split(int(match[1]))
    if match := re.fullmatch(r"L\(([01])\)", text):
        return Local(int(match[1]))
    if match := re.fullmatch(r"R\(([01])\)", text):
        return Ragged(int(match[1]))
    if match := re.fullmatch(r"P(?:\((sum|max|min|own)\))?", text):
        return Partial(match[1] or "sum")
    raise LayoutError(f"{text!r} is not a state\n  {STATES}")


def chunk_sizes(size: int, ranks: int) -> list[int]:
    """The sizes of the `ranks` chunks of a dim of `size` elements, as `torch.chunk` cuts, padded with empty chunks.

    >>> chunk_sizes(10, 4), chunk_sizes(4, 3), chunk_sizes(2, 4)
    ([3, 3, 3, 1], [2, 2, 0], [1, 1, 0, 0])
    """
    step = -(-size // ranks)
    return [max(0, min(step, size - rank * step)) for rank in range(ranks)]


def row_cuts(size: int, ranks: int, ends: Tensor) -> list[int]:
    """How many of `size` rows each rank holds, which stand in groups that end at `ends`."""
    groups = itertools.accumulate(chunk_sizes(len(ends), ranks))
    bounds = [*(int(ends[count - 1]) for count in groups)][:-1]
    return [end - start for start, end in itertools.pairwise([0, *bounds, size])]


def own_places(source: Tensor, ranks: int) -> list[Tensor]:
    """Which places each rank holds that come from these."""
    ends = torch.tensor([*itertools.accumulate(chunk_sizes(len(source), ranks))])
    rank_of = torch.bucketize(source, ends, right=True)
    return [torch.nonzero(rank_of == rank).flatten() for rank in range(ranks)]


def shards(
    tensor: Tensor,
    state: State,
    ranks: int,
    generator: torch.Generator | None = None,
    ends: Tensor | None = None,
    source: Tensor | None = None,
) -> list[Tensor]:
    """What each of `ranks` ranks holds of `tensor` in `state`. ends: of the groups of a Ragged dim. source: from where
    the places of a Local dim come; the tensor in P(own) is ends of groups of these.

    A Partial state has many representations: this draws independent random integer-valued ones from `generator`.

    >>> [s.tolist() for s in shards(torch.arange(5), Split(0), 3)]
    [[0, 1], [2, 3], [4]]

    Raises LayoutError if the state splits a dim that the tensor lacks.
    """
    if isinstance(state, Local) or state == OWN:
        if source is None:
            raise LayoutError(f"{state} of a tensor of which nobody knows whose rows are whose\n  Give source=.")
        places = own_places(source, ranks)
        if isinstance(state, Local):
            return [tensor.index_select(state.dim, each) for each in places]
        return [torch.bucketize(tensor, each, out_int32=tensor.dtype == torch.int32) for each in places]
    if isinstance(state, Split):
        if state.dim >= tensor.dim():
            raise LayoutError(f"{state} of a tensor with {tensor.dim()} dims\n  Name one of its dims.")
        return [part.contiguous() for part in tensor.split(chunk_sizes(tensor.shape[state.dim], ranks), state.dim)]
    if isinstance(state, Ragged):
        if ends is None:
            raise LayoutError(f"{state} of a tensor whose groups are not known\n  Give ends=, where they end.")
        return [part.contiguous() for part in tensor.split(row_cuts(tensor.shape[state.dim], ranks, ends), state.dim)]
    if isinstance(state, Broadcast):
        return [tensor.clone() for _ in range(ranks)]
    count = ranks - 1 if state.op == "sum" else ranks
    noise = [torch.randint(-4, 5, tensor.shape, generator=generator).to(tensor) for _ in range(count)]
    if state.op == "sum":
        rest = tensor.clone()
        for part in noise:
            rest = rest - part
        return [rest, *noise]
    sign = -1 if state.op == "max" else 1
    parts = [tensor + sign * part.abs() for part in noise]  # none passes the true value; one rank, a random one, has it
    owner = torch.randint(0, ranks, tensor.shape, generator=generator).to(tensor.device)
    return [torch.where(owner == rank, tensor, part) for rank, part in enumerate(parts)]


def whole(parts: list[Tensor], state: State, source: Tensor | None = None) -> Tensor:
    """The tensor of which the ranks hold `parts` in `state`: the inverse of `shards`.

    Raises LayoutError if the parts of a Broadcast tensor differ.
    """
    if isinstance(state, Local):
        assert source is not None
        joined = torch.cat(parts, state.dim)
        return torch.empty_like(joined).index_copy_(state.dim, torch.cat(own_places(source, len(parts))), joined)
    if isinstance(state, (Split, Ragged)):
        return torch.cat(parts, state.dim)
    if isinstance(state, Broadcast):
        for rank, part in enumerate(parts):
            if not torch.equal(counted(part).nan_to_num(), counted(parts[0]).nan_to_num()):
                what = f"a broadcast tensor differs between rank 0 and rank {rank}"
                raise LayoutError(f"{what}\n  This is a bug in a rule.")
        return parts[0]
    total = parts[0]
    for part in parts[1:]:
        total = REDUCE[state.by](total, part)
    return total


def counted(x: Tensor) -> Tensor:
    """The numbers in a type with which torch counts: it hardly does with those of 8 bits."""
    return x.float() if of_8_bits(x.dtype) else x


def of_8_bits(dtype: torch.dtype) -> bool:
    """Whether numbers with a point have 8 bits: they are moved and multiplied, and not summed."""
    return dtype.is_floating_point and dtype.itemsize == 1
