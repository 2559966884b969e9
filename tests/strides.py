"""The same values laid out otherwise in memory: what callers, views and collectives make of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

Way = Callable[[Tensor], Tensor]


def ordered(x: Tensor, order: Sequence[int]) -> Tensor:
    """The values with their dims in this order in memory, the outermost first."""
    return x.permute(*order).contiguous().permute(*(order.index(dim) for dim in range(x.dim()))) if x.dim() else x


def channels_last(x: Tensor) -> Tensor:
    return ordered(x, [0, *range(2, x.dim()), 1]) if x.dim() > 2 else x


def odd_ones(x: Tensor) -> Tensor:
    """Channels last, but that dims of one element have strides that no format gives them."""
    strides = channels_last(x).stride()
    return (
        channels_last(x).as_strided(x.shape, [1 if size == 1 else stride for size, stride in zip(x.shape, strides)])
        if x.dim() > 2
        else x
    )


def transposed(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else x


def turned(x: Tensor) -> Tensor:
    """The first dim innermost."""
    return ordered(x, list(reversed(range(x.dim()))))


def sliced(x: Tensor) -> Tensor:
    """Every second element of a larger tensor, from the third on."""
    wide = x.new_ones([2 * size + 3 for size in x.shape])
    wide[tuple(slice(2, 2 * size + 2, 2) for size in x.shape)] = x
    return wide[tuple(slice(2, 2 * size + 2, 2) for size in x.shape)]


def expanded(dim: int) -> Way:
    """Other values: those at 0 of a dim, there for all of it."""

    def way(x: Tensor) -> Tensor:
        return x.narrow(dim, 0, 1).expand(x.shape) if x.dim() > dim and x.shape[dim] > 1 else x

    return way


def last_expanded(x: Tensor) -> Tensor:
    return expanded(x.dim() - 1)(x) if x.dim() else x


WAYS: dict[str, Way] = {
    "channels last": channels_last,
    "odd ones": odd_ones,
    "transposed": transposed,
    "turned": turned,
    "sliced": sliced,
    "first expanded": expanded(0),
    "second expanded": expanded(1),
    "last expanded": last_expanded,
}


def variants(operands: Sequence[Tensor], each: bool = True) -> Iterator[tuple[str, list[Tensor]]]:
    """Yields, with a name, the operands laid out in every way: one at a time (if `each`) and all together."""
    alone = [(at,) for at in range(len(operands))] if each and len(operands) > 1 else []
    for (name, way), places in itertools.product(WAYS.items(), [*alone, tuple(range(len(operands)))]):
        made = [way(x) if at in places else x for at, x in enumerate(operands)]
        if any(new is not old for new, old in zip(made, operands)):
            yield f"{name}, operands {places}", made
