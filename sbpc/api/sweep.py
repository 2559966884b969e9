"""Plan one step on every mesh of a number of devices. The step is captured once."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from sbpc.api.candidates import candidates
from sbpc.api.checks import checked
from sbpc.api.experts import routed, routed_on
from sbpc.api.short_model import short_model
from sbpc.api.strategies import Search
from sbpc.api.task import Task, prepare
from sbpc.errors import MemoryLimitError, MeshError, SbpcError, check_kinds, least_of, shown
from sbpc.mesh.cluster import COLLECTIVES, Cluster
from sbpc.mesh.mesh import Mesh
from sbpc.plans.options import BYTES, ERROR, NONE, Options
from sbpc.plans.plan import Plan
from sbpc.rules.choices import may_cut

log = logging.getLogger("sbpc")
AXES = "abcd"  # what the axes are called, outermost first
Progress = Callable[[int, int, Mesh], None]


@dataclass(frozen=True)
class SweepRow:
    """A mesh and the plan on it. cost: by what rows are ranked, a number: seconds of a training step, the optimizer's
    update among them, or bytes that the busiest rank sends.

    `plan.cost` has all the figures, `plan.usage` the share of the peak and tokens a second.
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
    stages: bool = False,
    microbatches: bool = False,
    recompute: str = "none",
    seconds: float = 45.0,
    capacity: float | None = None,
    overflow: str = ERROR,
    routing: float = 1.0,
    progress: Progress | None = None,
    **step: Any,
) -> list[Any]:
    """Returns a row for every mesh of `devices` ranks with up to `axes` axes, best first: `.mesh`, `.plan` and
    `.cost`, a number.

    Axes are called a, b, c, d, the last one having the fastest links. The step is captured once. Meshes that are
    mirror images with the same links are tried once. A mesh on which the step does not fit into `memory` has no row.
    cluster: a `Cluster`, the name of one, None for "ideal". step: what else `sbpc.plan` takes of a step (kwargs,
    loss, targets, train, dtype, capture). The other options are those of `sbpc.plan`, as are capacity, overflow and
    routing for rows of experts. progress: called with the number of the mesh, of how many, and the mesh.

    stages, microbatches, recompute: search whole strategies (`sbpc.api.strategies`): with stages of a pipeline, with
    several micro-batches, with what `recompute` of `sbpc.plan` says. Rows are then a `StrategyRow` each: `.mesh`
    with the axes pipe, data and tensor, or expert, over which ranks of several nodes may share out rows of experts;
    `.stages`, `.schedule`, `.microbatches`, `.recompute`, `.cost` with what it
    is made of, `.lower_bound`, and `.plan`, which is made when it is asked for. seconds: CPU seconds after which the
    search looks at no further strategy. What has no row stands in `.refused` of every row, with the reason.

    >>> import sbpc, torch
    >>> rows = sbpc.sweep(torch.nn.Linear(8, 8), (torch.ones(4, 8),), devices=4, axes=1)
    >>> [row.mesh for row in rows], rows[0].cost == rows[0].plan.cost.step_seconds
    ([Mesh(a=4)], True)

    Raises MeshError for a number of devices that is none, MemoryLimitError if the step fits on no mesh, and what
    `sbpc.plan` raises.
    """
    check_devices(devices, axes, progress)
    rows_of_experts: dict[str, Any] = {"capacity": capacity, "overflow": overflow, "routing": routing}
    options = checked(
        None,
        optimizer=optimizer,
        objective=objective,
        spread=spread,
        memory=memory,
        recompute=recompute,
        **rows_of_experts,
    )
    check_kinds(model=(model, "an nn.Module"))
    check_kinds(
        stages=(stages, "True or False"),
        microbatches=(microbatches, "True or False"),
        seconds=(seconds, "a number of seconds"),
    )
    if stages or microbatches or recompute != NONE:
        if spread or objective != "seconds":
            raise SbpcError(
                "spread= or objective= with a search of strategies\n  Leave it out: strategies are ranked by seconds."
            )
        few, lengths = short_model(model)
        whole = functools.cache(lambda: prepare(model, args, **step))
        short = prepare(few, args, **step)
        gm, on = routed_on(short.gm, options, short.stages)
        short = replace(short, gm=short.stages.with_sums(gm, replace(options, **short.about)))
        found = candidates(short, lengths, devices, cluster, stages, microbatches, optimizer, memory)
        found = [replace(each, mesh=on(each.mesh)[0]) for each in found]
        search = Search(whole, short, lengths, optimizer, memory, recompute, seconds, rows_of_experts)
        return search.rows(found, progress)
    task = prepare(model, args, **step)
    tried = meshes(devices, cluster, axes, stored_sizes(task.gm))
    rows, errors = [], []
    for number, mesh in enumerate(tried):
        log.info("mesh %d of %d: %s", number + 1, len(tried), mesh)
        if progress is not None:
            progress(number, len(tried), mesh)
        try:
            rows.append(row_of(task.again(), mesh, options))
        except MemoryLimitError as error:
            errors.append(error)
        except SbpcError as error:
            raise type(error)(f"on {mesh}: {error}") from error
    if not rows:
        least = least_of(errors)
        raise MemoryLimitError(f"on none of {len(tried)} meshes; on {least.nearest.mesh} {least}", least.nearest)
    return sorted(rows, key=lambda row: (row.cost, len(row.mesh.axes), row.mesh.sizes))


def check_devices(devices: Any, axes: Any, progress: Any) -> None:
    """Raises MeshError unless `devices` and `axes` are numbers of devices and of axes."""
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= 1 << 20:
        raise MeshError(f"devices is {shown(devices)}\n  It is a number from 1 to {1 << 20:,}.")
    check_kinds(axes=(axes, "an integer"), progress=(progress, "a function", "None"))
    if not 1 <= axes <= len(AXES):
        raise MeshError(f"axes is {axes!r}\n  A mesh has 1 to {len(AXES)} axes.")


def row_of(task: Task, mesh: Mesh, options: Options) -> SweepRow:
    """Plans one mesh. The plan forgets the graphs that were made for its cost, and makes them again on use."""
    gm, mesh, options = routed(task.gm, mesh, options, task.stages)
    plan = replace(task, gm=gm).plan(mesh, options)
    cost = plan.cost.step_seconds if plan.cost.objective != BYTES else plan.cost.paid
    plan.forget()
    return SweepRow(mesh, plan, cost)


def meshes(devices: int, cluster: Cluster | str | None, axes: int, stored: Sequence[int] = ()) -> list[Mesh]:
    """Returns every factorisation of `devices` as a mesh, fewest axes first, and of two mirror images only the first.

    A mirror image has the same links and the same runs of neighbouring axes, so both have the same plans. The exception
    is a stored dim that is cut unevenly, as only mesh order allows that. stored: the sizes of stored dims.

    >>> [mesh.sizes for mesh in meshes(8, None, 4)], [mesh.sizes for mesh in meshes(8, None, 4, [12])]
    ([(8,), (2, 4), (2, 2, 2)], [(8,), (2, 4), (4, 2), (2, 2, 2)])
    """
    by_links: dict[Any, Mesh] = {}
    for count in range(1, axes + 1):
        for sizes in factorisations(devices, count):
            mesh = Mesh(cluster=cluster, **dict(zip(AXES, sizes)))
            uneven = any(
                may_cut(size, cut, False, True) != may_cut(size, cut, True, True)
                for size in stored
                for cut in subsets(sizes)
            )
            by_links.setdefault(links(mesh) if uneven else min(links(mesh), links(mesh, -1)), mesh)
    return list(by_links.values())


def factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields the ways to write `number` as an ordered product of `count` factors from 2 on, or of itself alone.

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
    """Yields every choice of two or more of the sizes, in their order."""
    return itertools.chain(*(itertools.combinations(sizes, count) for count in range(2, len(sizes) + 1)))


def links(mesh: Mesh, direction: int = 1) -> tuple[Any, ...]:
    """Returns the sizes of the axes from one end to the other, and what is sent over every run of neighbouring axes
    takes."""
    count = len(mesh.axes) - 1
    runs = mesh.runs() if direction > 0 else [tuple(count - axis for axis in reversed(run)) for run in mesh.runs()]
    return mesh.sizes[::direction], tuple(mesh.lines(run, kind) for run in runs for kind in COLLECTIVES)


def stored_sizes(gm: GraphModule) -> list[int]:
    """Returns the sizes of all dims of stored tensors, ascending."""
    return sorted({size for node in gm.graph.find_nodes(op="placeholder") for size in node.meta["val"].shape})
