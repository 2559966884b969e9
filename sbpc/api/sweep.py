"""Every mesh of a number of devices, and the plan on each, best first: the step is captured once."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule

from sbpc.api.planning import Task, check_options, prepare
from sbpc.errors import MemoryLimitError, MeshError, SbpcError, check_kinds
from sbpc.mesh.cluster import COLLECTIVES, Cluster
from sbpc.mesh.mesh import Mesh
from sbpc.plans.plan import Plan
from sbpc.rules.choices import may_cut

log = logging.getLogger("sbpc")
AXES = "abcd"  # what the axes are called, outermost first
Progress = Callable[[int, int, Mesh], None]


@dataclass(frozen=True)
class Row:
    """A mesh and the plan on it. cost: what was minimised, a number: seconds, or bytes that the busiest rank sends.

    `plan.cost` has all the figures.
    """

    mesh: Mesh
    plan: Plan
    cost: float


def sweep(
    model: nn.Module,
    args: Sequence[Any],
    *,
    devices: int,
    cluster: Cluster | str | None = None,
    axes: int = 4,
    optimizer: str | None = "adamw",
    objective: str = "seconds",
    spread: bool = False,
    memory: float | None = None,
    progress: Progress | None = None,
    **step: Any,
) -> list[Row]:
    """Returns a row for every mesh of `devices` ranks with up to `axes` axes, best first: `.mesh`, `.plan` and `.cost`, a number.

    Axes are called a, b, c, d, the last one having the fastest links. The step is captured once. Meshes that are mirror images
    with the same links are tried once. A mesh on which the step does not fit into `memory` has no row. cluster: a `Cluster`, the
    name of one, None for "ideal". step: what else `sbpc.plan` takes of a step (kwargs, loss, targets, train, dtype, capture).
    The other options are those of `sbpc.plan`. progress: called with the number of the mesh, of how many, and the mesh.

    >>> import sbpc, torch
    >>> rows = sbpc.sweep(torch.nn.Linear(8, 8), (torch.ones(4, 8),), devices=4, axes=1)
    >>> [row.mesh for row in rows], rows[0].cost == rows[0].plan.cost.seconds
    ([Mesh(a=4)], True)

    Raises MeshError for a number of devices that is none, MemoryLimitError if the step fits on no mesh, and what `sbpc.plan`
    raises.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= 1 << 20:
        raise MeshError(f"devices is {devices!r}\n  It is a number from 1 to {1 << 20:,}.")
    check_kinds(axes=(axes, "an integer"), progress=(progress, "a function", "None"))
    if not 1 <= axes <= len(AXES):
        raise MeshError(f"axes is {axes!r}\n  A mesh has 1 to {len(AXES)} axes.")
    options: dict[str, Any] = {"optimizer": optimizer, "objective": objective, "spread": spread, "memory": memory}
    check_options(**options)
    task = prepare(model, args, **step)
    found = meshes(devices, cluster, axes, stored_sizes(task.gm))
    rows, errors = [], []
    for number, mesh in enumerate(found):
        log.info("mesh %d of %d: %s", number + 1, len(found), mesh)
        if progress is not None:
            progress(number, len(found), mesh)
        try:
            rows.append(row(task.again(), mesh, options))
        except MemoryLimitError as error:
            errors.append(error)
        except SbpcError as error:
            raise type(error)(f"on {mesh}: {error}") from error
    if not rows:
        raise MemoryLimitError(f"on none of {len(found)} meshes: {errors[-1]}")
    return sorted(rows, key=lambda r: (r.cost, len(r.mesh.axes), r.mesh.sizes))


def row(task: Task, mesh: Mesh, options: dict[str, Any]) -> Row:
    """The plan on one mesh and its cost; graphs that were made for that are dropped, and made again on use."""
    plan = task.plan(mesh, **options)
    cost = plan.cost.paid
    plan.forget()
    return Row(mesh, plan, cost)


def meshes(devices: int, cluster: Cluster | str | None, axes: int, stored: Sequence[int] = ()) -> list[Mesh]:
    """Every factorisation of `devices` as a mesh, fewest axes first, without those that are another one mirrored.

    A mirror image has the same links and the same runs of neighbouring axes, so what is possible on one is so on the
    other, unless a stored dim (sizes in `stored`) is cut unevenly: that is allowed in mesh order only.

    >>> [mesh.sizes for mesh in meshes(8, None, 4)], [mesh.sizes for mesh in meshes(8, None, 4, [12])]
    ([(8,), (2, 4), (2, 2, 2)], [(8,), (2, 4), (4, 2), (2, 2, 2)])
    """
    found: dict[Any, Mesh] = {}
    for count in range(1, axes + 1):
        for sizes in factorisations(devices, count):
            mesh = Mesh(cluster=cluster, **dict(zip(AXES, sizes)))
            uneven = any(may_cut(size, cut, False, True) != may_cut(size, cut, True, True)
                         for size in stored for cut in subsets(sizes))  # fmt: skip
            found.setdefault(links(mesh) if uneven else min(links(mesh), links(mesh, -1)), mesh)
    return list(found.values())


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered factors from 2 on, `count` of them; of one factor the number itself, be it 1.

    >>> list(factorisations(12, 2)), list(factorisations(1, 1))
    ([(2, 6), (3, 4), (4, 3), (6, 2)], [(1,)])
    """
    if count == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factorisations(number // first, count - 1))


def subsets(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Two or more of the sizes in their order."""
    return itertools.chain(*(itertools.combinations(sizes, count) for count in range(2, len(sizes) + 1)))


def links(mesh: Mesh, direction: int = 1) -> tuple[Any, ...]:
    """The sizes of the axes from one end to the other, and the link of every run of neighbouring axes."""
    order = range(len(mesh.axes))[::direction]
    runs = [order[first:last] for first in range(len(order)) for last in range(first + 1, len(order) + 1)]
    return tuple(mesh.sizes[axis] for axis in order), tuple(
        mesh.link(sorted(run), kind) for run in runs for kind in COLLECTIVES
    )


def stored_sizes(gm: GraphModule) -> list[int]:
    """The sizes of all dims of stored tensors."""
    found = [size for node in gm.graph.nodes if node.op == "placeholder" for size in node.meta["val"].shape]
    return sorted(set(found))
