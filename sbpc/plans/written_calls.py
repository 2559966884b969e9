"""The calls that are written for one op on a rank, where they are others than the op itself: what memory they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from sbpc._compat import storage_of
from sbpc.graph.flex import DENSE
from sbpc.graph.held_bytes import held_bytes
from sbpc.graph.operands import leaves, operands
from sbpc.mesh.layout import Layout, chunk
from sbpc.mesh.mesh import Mesh
from sbpc.rules.binding import flat_outputs
from sbpc.rules.grouped_product import is_several
from sbpc.rules.match import Match, Sharing

# by call what it reads and bytes it makes; results; and, if any, which of the calls waits for what another one sends
Calls = tuple[list[tuple[list[int], list[int]]], list[int], int | None]
WAIT = torch.ops._c10d_functional.wait_tensor.default
HELD: dict[Any, list[int]] = {}  # by call on a rank the bytes of its results, and of what else it holds
WRITTEN: dict[Any, tuple[Match, Calls]] = {}  # by call on a rank what `written` tells, and what has this id


def written(node: Node, mesh: Mesh) -> Calls | None:
    """Returns the calls on the rank at the origin that are written for one which counts places of a dim that is
    split, or has rows that ranks share out, or holds more than its results while it runs; None for any other."""
    match = node.meta.get("match")
    choice = node.meta.get("choice")
    if is_dense(node, mesh):
        return dense_call(node, mesh)
    if match is None or choice is None:
        return None
    if not (choice.sharing or choice.owning or match.shifts & choice.cuts().keys() or is_several(match)):
        return None
    shifted = sorted(match.shifts & choice.cuts().keys())
    origin = (0,) * len(mesh.sizes)
    most = mesh.routing.most
    shards = shards_read(node, mesh)
    factors = [(factor, *choice.busiest(factor, size, mesh.sizes, most)) for factor, size in match.sizes.items()]
    local = {factor: chunk(size, axes, mesh.sizes, origin)[1] for factor, size, axes in factors}
    key = id(match), *shards, *local.items(), *shifted, choice.sharing, choice.apart, choice.owning, most
    rank = torch.zeros(1, dtype=torch.int64, device="meta")
    sharing = None
    if choice.sharing:
        rows = choice.signatures[choice.sharing[0]].ragged
        sizes = tuple(mesh.sizes[axis] for axis in choice.sharing)
        across = tuple((mesh.sizes[axis], "") for axis in sorted(choice.owning))
        sharing = Sharing(sizes, rank, "", rows, most, across=across, apart=choice.apart)
    part = choice.part(match.sizes.items(), mesh.sizes, origin)
    if key not in WRITTEN:
        made = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in shards]
        WRITTEN[key] = match, calls_of_op(node, made, local, shifted, sharing, part)
    return WRITTEN[key][1]


def shards_read(node: Node, mesh: Mesh) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Returns the types and shapes of the operands of a call on the rank at the origin."""
    return shards_in(node, [x.meta["sbp"] for x in operands(node)], mesh)


def shards_in(node: Node, layouts: Sequence[Layout], mesh: Mesh) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Returns the same where the operands are in these layouts."""
    shards, origin = [], (0,) * len(mesh.sizes)
    for x, layout in zip(operands(node), layouts, strict=True):
        shape, cuts = layout.busiest(x.meta["val"].shape, mesh.sizes, mesh.routing.most)
        local_shape = tuple(chunk(size, axes, mesh.sizes, origin)[1] for size, axes in zip(shape, cuts))
        shards.append((x.meta["val"].dtype, local_shape))
    return shards


def is_dense(node: Node, mesh: Mesh) -> bool:
    """Returns whether a call is FlexAttention without a kernel, which holds all scores of a rank at once."""
    return node.target in DENSE and not mesh.cluster.has_gpus


def scores_held(node: Node, layouts: Sequence[Layout], mesh: Mesh) -> int:
    """Returns the bytes that FlexAttention without a kernel holds besides its results, of operands in layouts."""
    return dense_bytes(node, shards_in(node, layouts, mesh))[-1]


def dense_call(node: Node, mesh: Mesh) -> Calls:
    """Returns FlexAttention without a kernel as one call: what it holds besides its results is a storage of its
    own."""
    shards = shards_read(node, mesh)
    first, sizes = len(shards), dense_bytes(node, shards)
    return [([*range(first)], sizes)], [*range(first, first + len(sizes) - 1)], None


def dense_bytes(node: Node, shards: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[int]:
    """Returns the bytes of its results, and of what it holds besides."""
    key = node.target, *shards, repr(map_arg(node.args, lambda _: None))
    if key not in HELD:
        made = [torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in shards]
        args = map_arg(node.args, dict(zip(operands(node), made)).__getitem__)
        results, peak = held_bytes(DENSE[node.target], args)
        sizes = [x.untyped_storage().nbytes() for x in flat_outputs(results) if x is not None]
        HELD[key] = [*sizes, peak - sum(sizes)]
    return HELD[key]


def calls_of_op(
    node: Node,
    shards: Sequence[torch.Tensor],
    local: Mapping[str, int],
    shifted: Sequence[str],
    sharing: Sharing | None,
    part: Mapping[str, int] | None,
) -> Calls:
    """Returns the calls that an op is written as. They run on tensors without data, and storages are numbered, those
    of operands first."""
    offsets = {factor: torch.zeros((), dtype=torch.int64, device="meta") for factor in shifted}
    numbers = {storage_of(x): at for at, x in enumerate(shards)}
    alive, calls = [*offsets.values()], list[tuple[list[int], list[int]]]()  # alive: so that no number is used twice
    waits = list[int]()

    def call(op: Any, *args: Any, **kwargs: Any) -> Any:
        out = op(*args, **kwargs | ({"device": "meta"} if "device" in kwargs else {}))
        given, made = ({storage_of(x): x for x in leaves(each, torch.Tensor)} for each in ((args, kwargs), out))
        waits.extend([len(calls)] if op is WAIT else [])
        fresh = {each: x.untyped_storage().nbytes() for each, x in made.items() if each not in numbers}
        calls.append(([numbers[each] for each in given if each in numbers], list(fresh.values())))
        numbers.update(zip(fresh, range(len(numbers), len(numbers) + len(fresh))))
        alive.append(out)
        return out

    args, kwargs = map_arg((node.args, dict(node.kwargs)), dict(zip(operands(node), shards)).__getitem__)
    results = node.meta["match"].localize(call, args, kwargs, local, offsets, sharing, part)
    made = [0 if x is None else numbers[storage_of(x)] for x in flat_outputs(results)]
    return calls, made, waits[-1] if waits else None  # before that, for the numbers of what is sent
