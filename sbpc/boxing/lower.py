"""Lowering: one boxing step as ATen ops and functional collectives at the local shapes of a rank.

A program is shared by all ranks with the same local shapes: it depends on a rank's coordinates through its shapes and
through the position tensors alone. Uneven chunks travel padded to the largest chunk of their group, so that all ranks
of a group run the same collective on the same shape; where even that chunk is empty, none of them runs it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sbpc.boxing.eight_bits import packed_in, unpacked
from sbpc.boxing.local_values import Local, Rows, concatenate, put, told
from sbpc.boxing.steps import Step
from sbpc.mesh.collectives import EIGHT_BITS, FURTHEST, REDUCES
from sbpc.mesh.layout import Layout
from sbpc.mesh.states import Axes, Numbers, Partial, Ragged, Shape, Split, chunk_sizes, of_8_bits

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
CODES = {each.itemsize: (each, int(torch.iinfo(each).max)) for each in (torch.int32, torch.int64)}


def lower(
    step: Step,
    x: Any,
    call: Callable[..., Any],
    shape: Numbers,
    sizes: Numbers,
    coordinates: Numbers,
    position: Sequence[Any],
    group: Callable[[Axes], str],
    dtype: torch.dtype,
) -> Any:
    """Emit `step` through `call(op, *args)` for the rank at `coordinates`; what the rank holds after it.

    x: what the rank holds of a tensor of `shape` and `dtype` on a mesh of `sizes`. position: by axis an int64 tensor of
    shape [1], the rank's coordinate. group: the name of the group over some axes. The result is contiguous, unless it
    is x itself. float8 goes as bytes: not every backend sends it.
    """
    shared = {state.dim for state in step.before.states if isinstance(state, Ragged)}
    shapes = [
        tuple(Rows(size) if dim in shared else size for dim, size in enumerate(local))
        for local in (layout.local_shape(shape, sizes, coordinates) for layout in step.layouts)
    ]
    before, after = shapes[0], shapes[-1]
    together = tuple(map(max, *shapes))  # the tensor of which the ranks of a group hold parts
    local = Local(call, x, before)
    if math.prod(sizes[axis] for axis in step.axes) == 1:
        return x
    if 0 in together:
        return x if before == after else empty_as(local, after).x
    site = Site(step, after, together, sizes, position, group, dtype)
    if dtype.is_floating_point and step.collective in REDUCES and site.reduction in FURTHEST:
        made = in_order(LOWER[step.collective](ranked(local, site.reduction, dtype), site), dtype)
        return (made.then(aten.clone.default, after) if 0 in after else made.contiguous()).x
    x_sent = local.then(aten.view.dtype, before, torch.int8, solid=False) if of_8_bits(dtype) else local
    made = LOWER[step.collective](x_sent, site)
    # an empty part of what was sent would keep all of that alive
    made = made.then(aten.clone.default, after) if 0 in after else made.contiguous()
    return (made if x_sent is local else made.then(aten.view.dtype, after, dtype)).x


def ranked(x: Local, by: str, dtype: torch.dtype) -> Local:
    """Integers in the order of floating-point numbers, those of 16 bits widened to 32, with NaN at the end that a
    maximum or minimum takes. gloo's and NCCL's own maxima lose NaN, as C's fmax does.

    The bits of a positive number are in its order, those of a negative one in the opposite: these are turned round.
    """
    bits, last = CODES[max(4, dtype.itemsize)]
    nan = x.then(aten.isnan.default, x.shape)
    wide = x if dtype.itemsize >= 4 else x.then(aten._to_copy.default, x.shape, dtype=torch.float32)
    turned = turn(wide.then(aten.view.dtype, x.shape, bits, solid=wide.solid), last)
    return turned.then(aten.masked_fill.Scalar, x.shape, nan.x, last if by == "max" else -last - 1, solid=False)


def in_order(code: Local, dtype: torch.dtype) -> Local:
    """The numbers of which `ranked` gave integers; its last ones are bits of NaN."""
    _, last = CODES[max(4, dtype.itemsize)]
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    x = turn(code, last).then(aten.view.dtype, code.shape, wide, solid=code.solid)
    return x if wide == dtype else x.then(aten._to_copy.default, x.shape, dtype=dtype)


def turn(code: Local, last: int) -> Local:
    """Integers, the negative ones in opposite order; twice, they are what they were."""
    negative = code.then(aten.lt.Scalar, code.shape, 0)
    other = code.then(aten.bitwise_xor.Scalar, code.shape, last)
    return negative.then(aten.where.self, code.shape, other.x, code.x)


def empty_as(x: Local, shape: Shape) -> Local:
    """An empty tensor in another shape."""
    if not any(isinstance(size, Rows) for size in shape):
        return x.view(shape)
    for dim, size in enumerate(shape):
        x = x.pad(dim, size) if size > x.shape[dim] else x.slice(dim, 0, size)
    return x


@dataclass(frozen=True)
class Cut:
    """How the ranks of a group cut a dim of `size` elements along some axes, one after the other.

    axes: in the order of the cuts. ranks: their sizes by axis, in mesh order, in which the ranks of a group stand.
    """

    dim: int
    size: int
    axes: Axes
    ranks: dict[int, int]

    @classmethod
    def of(cls, layout: Layout, axes: Axes, shape: Numbers, sizes: Numbers) -> Cut:
        """How `layout` cuts a tensor of `shape` along `axes`, the last cuts of their dim."""
        state = layout.states[axes[0]]
        assert isinstance(state, Split)
        tail = layout.cuts[state.dim][-len(axes) :]
        return cls(state.dim, shape[state.dim], tail, {axis: sizes[axis] for axis in axes})

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The sizes of the axes in the order of the cuts."""
        return [self.ranks[axis] for axis in self.axes]

    @functools.cached_property
    def chunks(self) -> list[int]:
        """The sizes of the chunks in the order of the cuts; the first is the largest."""
        chunks = [self.size]
        for count in self.lengths:
            chunks = [part for size in chunks for part in chunk_sizes(size, count)]
        return chunks

    @functools.cached_property
    def even(self) -> bool:
        """Whether the chunks, each padded to the first, follow each other with padding at the very end alone."""
        step = self.chunks[0]
        return self.chunks == [max(0, min(step, self.size - at * step)) for at in range(len(self.chunks))]

    @functools.cached_property
    def members(self) -> list[int]:
        """By chunk, in the order of the cuts: the place in the group of the rank that holds it."""
        at = [list(self.ranks).index(axis) for axis in self.axes]
        stands = enumerate(itertools.product(*map(range, self.ranks.values())))
        return [place for _, place in sorted(([stand[i] for i in at], place) for place, stand in stands)]


@dataclass(frozen=True)
class Site:
    """Where a step is emitted: this rank's shape after it, and the tensor of which the ranks of its group hold
    parts."""

    step: Step
    after: Shape
    together: Shape
    sizes: Numbers
    positions: Sequence[Any]
    group_of: Callable[[Axes], str]
    dtype: torch.dtype

    @functools.cached_property
    def left(self) -> Cut:
        """How the group cuts the tensor before the step."""
        first = self.step.parts[0]
        return Cut.of(first.before, first.axes, self.together, self.sizes)

    @functools.cached_property
    def cut(self) -> Cut:
        """How the group cuts the tensor after the step."""
        last = self.step.parts[-1]
        return Cut.of(last.after, last.axes, self.together, self.sizes)

    @property
    def position(self) -> Any:
        """The rank's coordinate on the one axis of the step."""
        (axis,) = self.step.axes
        return self.positions[axis]

    @property
    def group(self) -> str:
        """The name of the group."""
        return self.group_of(self.step.axes)

    @property
    def reduction(self) -> str:
        """How partial results are put together."""
        state = self.step.before.states[self.step.axes[0]]
        assert isinstance(state, Partial)
        return state.by

    def own(self, chunk: Local) -> Local:
        """A rank's chunk without its padding."""
        return chunk.slice(self.cut.dim, 0, self.after[self.cut.dim])


def all_gather(x: Local, site: Site) -> Local:
    """Gather the padded chunks on dim 0, then lay them along the dim that was cut."""
    left = site.left
    block = x.pad(left.dim, left.chunks[0])
    ranks = math.prod(left.lengths)
    shape = put(block.shape, 0, ranks * block.shape[0])
    return join(block.collective(c10d.all_gather_into_tensor.default, shape, ranks, site.group), block.shape, left)


def all_reduce(x: Local, site: Site) -> Local:
    """Reduce the whole."""
    return x.collective(c10d.all_reduce.default, x.shape, site.reduction, site.group)


def all_to_all(x: Local, site: Site) -> Local:
    """Send to each rank its chunk of one dim, and lay the chunks of the other dim that come together."""
    left = site.left
    pieces, ranks, block = divided(x.pad(left.dim, left.chunks[0]), site)
    return site.own(join(sent(pieces, ranks, site), block, left))


def reduce_scatter(x: Local, site: Site) -> Local:
    """Reduce the padded chunks, each to its rank."""
    pieces, ranks, block = divided(x, site)
    return site.own(pieces.collective(c10d.reduce_scatter_tensor.default, block, site.reduction, ranks, site.group))


def exchange(x: Local, site: Site) -> Local:
    """Send to each rank its chunk as it is, and add up in float32 the chunks that come together: rounded once."""
    pieces, ranks, block = divided(x, site)
    total = sent(pieces, ranks, site).view((ranks, *block)).then(aten.sum.dim_IntList, block, [0], dtype=torch.float32)
    return site.own(total.then(aten._to_copy.default, block, dtype=site.dtype))


def divided(x: Local, site: Site) -> tuple[Local, int, Shape]:
    """The chunks that the ranks of a group get, as `divide` lays them, how many these are, and the shape of one."""
    pieces, ranks = divide(x, site.cut), math.prod(site.cut.lengths)
    return pieces, ranks, put(pieces.shape, 0, pieces.shape[0] // ranks)


def sent(pieces: Local, ranks: int, site: Site) -> Local:
    """Send to each rank its piece of equal ones along dim 0."""
    if isinstance(pieces.shape[0], Rows):  # nobody can say how many of them go to each
        flat = pieces.contiguous().view((ranks, math.prod(pieces.shape) // ranks))
        return sent(flat, ranks, site).view(pieces.shape)
    splits = [pieces.shape[0] // ranks] * ranks
    return pieces.collective(c10d.all_to_all_single.default, pieces.shape, splits, splits, site.group)


def exchange_in(kind: str, x: Local, site: Site) -> Local:
    """Send to each rank its chunk in 8 bits, and add up in float32 the chunks that come together."""
    pieces, ranks, block = divided(x, site)
    packed = packed_in(kind, pieces, block)
    total = unpacked(kind, sent(packed, ranks, site), block).view((ranks, *block))
    return site.own(total.then(aten.sum.dim_IntList, block, [0]))


def gather_in(kind: str, x: Local, site: Site) -> Local:
    """Gather the padded chunks in 8 bits on dim 0, then lay them along the dim that was cut."""
    left = site.left
    block, ranks = x.pad(left.dim, left.chunks[0]), math.prod(left.lengths)
    packed = packed_in(kind, block, block.shape)
    moved = packed.collective(
        c10d.all_gather_into_tensor.default, put(packed.shape, 0, ranks * packed.shape[0]), ranks, site.group
    )
    every = unpacked(kind, moved, block.shape).view(put(block.shape, 0, ranks * block.shape[0]))
    return join(every, block.shape, left)


def keep(x: Local, site: Site) -> Local:
    """Zeros, but on coordinate 0 of the axis."""
    away = Local(x.call, site.position, (1,)).then(aten.ne.Scalar, (1,), 0)
    mask = away.view([1] * len(x.shape))
    return x.then(aten.masked_fill.Scalar, x.shape, mask.x, 0, solid=x.solid)


def pad(x: Local, site: Site) -> Local:
    """The chunk in its place, zeros elsewhere. Ranks with a full chunk tell by position, a short one is the last."""
    cut = site.left
    dim, step, held = cut.dim, cut.chunks[0], x.shape[cut.dim]
    if held < step:
        return x.pad(dim, cut.size, front=cut.size - held)
    full = cut.size // step
    number = Local(x.call, site.position, (1,)).then(aten.add.Scalar, (1,), 1)
    away = numbers(number, full).then(aten.ne.Tensor, (full,), number.x).view(put([1] * (len(x.shape) + 1), dim, full))
    wide = put(x.shape, dim, full, step)
    chunks = x.view(put(x.shape, dim, 1, step)).then(aten.expand.default, wide, told(wide), solid=False)
    filled = chunks.then(aten.masked_fill.Scalar, wide, away.x, 0)  # zeros to copy into would be a second copy
    return filled.view(put(x.shape, dim, full * step)).pad(dim, cut.size)


def cut_out(x: Local, site: Site) -> Local:
    """The rank's chunk. Ranks with a full chunk tell by position, a short one is the last."""
    cut = site.cut
    dim, step, held = cut.dim, cut.chunks[0], site.after[cut.dim]
    if held < step:  # a copy: a view would keep the whole tensor alive
        return x.then(aten.slice_copy.Tensor, put(x.shape, dim, held), dim, cut.size - held, cut.size)
    full = cut.size // step
    chunks = x.slice(dim, 0, full * step).view(put(x.shape, dim, full, step))
    chunk = chunks.then(aten.index_select.default, put(x.shape, dim, 1, step), dim, site.position)
    return chunk.view(site.after)


def crop(x: Local, site: Site) -> Local:
    """Of the chunk that one axis cut what lies in the one that the other axis cuts; zeros in the rest of that one.

    A chunk begins at its number times the size of the first, unless it is empty. What is found and copied is blocks, of
    which all chunks begin and end at multiples.
    """
    left, cut = site.left, site.cut
    dim, held, wanted = cut.dim, x.shape[cut.dim], site.after[cut.dim]
    if 0 in (held, wanted):
        return x.slice(dim, 0, 0).pad(dim, wanted)
    block = math.gcd(left.chunks[0], cut.chunks[0], held, wanted)
    first = [Local(x.call, site.positions[at.axes[0]], (1,)) for at in (left, cut)]
    there, here = (at.then(aten.mul.Scalar, (1,), by.chunks[0] // block) for at, by in zip(first, (left, cut)))
    ahead = here.then(aten.sub.Tensor, (1,), there.x)
    count = (wanted // block,)
    place = numbers(ahead, *count).then(aten.add.Tensor, count, ahead.x)  # in x, whose blocks are counted from 1 on
    nearest = place.then(aten.clamp.default, count, 1, held // block)
    away = nearest.then(aten.ne.Tensor, count, place.x).view(put([1] * (len(x.shape) + 1), dim, *count))
    blocks, taken = put(x.shape, dim, held // block, block), put(x.shape, dim, *count, block)
    found = x.view(blocks).then(aten.index_select.default, taken, dim, nearest.then(aten.sub.Scalar, count, 1).x)
    return found.then(aten.masked_fill.Scalar, taken, away.x, 0).view(site.after)


def numbers(like: Local, count: int) -> Local:
    """The numbers from 1 to `count`; like: a tensor of integers."""
    return like.then(aten.new_ones.default, (count,), [count]).then(aten.cumsum.default, (count,), 0)


def divide(x: Local, cut: Cut) -> Local:
    """The chunks of one dim, padded to one size, laid along dim 0 in the order of the ranks that get them."""
    dim, step = cut.dim, cut.chunks[0]
    block = put(x.shape, dim, step)
    if cut.even:
        apart = put(x.shape, dim, *cut.lengths, step)
        members = [dim + cut.axes.index(axis) for axis in cut.ranks]
        rest = [at for at in range(len(apart)) if at not in members]
        count = len(cut.chunks)
        return x.pad(dim, count * step).shuffle(apart, members + rest, put(block, 0, count * block[0]))
    ends = list(itertools.accumulate(cut.chunks))
    parts = [x.slice(dim, end - size, end).pad(dim, step) for size, end in zip(cut.chunks, ends)]
    return concatenate([part for _, part in sorted(zip(cut.members, parts), key=lambda item: item[0])], 0)


def join(x: Local, block: Shape, cut: Cut) -> Local:
    """Blocks laid along dim 0 in the order of the ranks they came from, laid along one dim instead, without padding."""
    dim, count = cut.dim, len(cut.chunks)
    if cut.even:
        apart = (*cut.ranks.values(), *block)
        rest = list(range(len(cut.ranks), len(apart)))
        members = [list(cut.ranks).index(axis) for axis in cut.axes]
        dims = [*rest[:dim], *members, *rest[dim:]]
        return x.shuffle(apart, dims, put(block, dim, count * block[dim])).slice(dim, 0, cut.size)
    size, places = block[0], zip(cut.members, cut.chunks)
    if isinstance(size, Rows):
        by_rank = x.view((math.prod(cut.lengths), *block))
        blocks = [(by_rank.slice(0, place, place + 1).view(block), length) for place, length in places]
    else:
        blocks = [(x.slice(0, place * size, (place + 1) * size), length) for place, length in places]
    parts = [each.slice(dim, 0, length) for each, length in blocks]
    return concatenate([part for part in parts if part.shape[dim]], dim)


LOWER: dict[str, Callable[[Local, Site], Local]] = {
    "all_gather": all_gather,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "crop": crop,
    "exchange": exchange,
    "keep": keep,
    "pad": pad,
    "reduce_scatter": reduce_scatter,
    "slice": cut_out,
    **{f"exchange_{kind}": functools.partial(exchange_in, kind) for kind in EIGHT_BITS},
    **{f"gather_{kind}": functools.partial(gather_in, kind) for kind in EIGHT_BITS},
}
