"""Plan one step on every mesh of a number of devices. The step is captured once."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule

from sbpc.api.candidates import candidates
from sbpc.api.checks import checked
from sbpc.api.experts import routed_on
from sbpc.api.short_model import short_model
from sbpc.api.strategies import Search, StrategyRow
from sbpc.api.task import Task, prepare
from sbpc.errors import MemoryLimitError, MeshError, SbpcError, check_kinds, least_of, shown
from sbpc.mesh.cluster import COLLECTIVES, Cluster
from sbpc.mesh.mesh import Mesh
from sbpc.passes.pipeline import few_calls
from sbpc.plans.options import BYTES, ERROR, NONE, Options
from sbpc.plans.plan import Plan
from sbpc.rules.choices import may_cut

log = logging.getLogger("sbpc")
SECONDS = 45.0  # of a search of strategies
PAYS = 5e-3  # part of the cost that meshes with one more axis must save for those with two more to be planned whole
AXES = "abcd"  # what the axes are called, outermost first
Progress = Callable[[int, int, Mesh], None]


@dataclass(frozen=True)
class SweepRow:
    """A mesh and the plan on it. cost: by what rows are ranked, a number: seconds of a training step, the optimizer's
    update among them, or bytes that the busiest rank sends. quick: whether the plan is the first that was found, and no
    better one was looked for: `sbpc.plan` on this mesh may find one.

    `plan.cost` has all the figures, `plan.usage` the share of the peak and tokens a second.
    """

    mesh: Mesh
    plan: Plan
    cost: float
    quick: bool = False


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
    seconds: float | None = None,
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
    seconds: CPU seconds after which plans are quick, by default none. Where one more axis has gained less than half a
    percent, those of large models on meshes of yet more axes are, too; `.quick` says so. The first row is
    quick only where `seconds` are over.

    stages, microbatches, recompute: search whole strategies (`sbpc.api.strategies`): with stages of a pipeline, with
    several micro-batches, with what `recompute` of `sbpc.plan` says. Rows are then a `StrategyRow` each: `.mesh`
    with the axes pipe, data and tensor, or expert, over which ranks of several nodes may share out rows of experts;
    `.stages`, `.schedule`, `.microbatches`, `.recompute`, `.cost` with what it is made of, `.lower_bound`, and `.plan`,
    which is made when it is asked for. seconds: CPU seconds after which the search looks at no further strategy, by
    default 45. What has no row stands in `.refused` of every row, with the reason.

    >>> import sbpc, torch
    >>> rows = sbpc.sweep(torch.nn.Linear(8, 8), (torch.ones(4, 8),), devices=4, axes=1)
    >>> [row.mesh for row in rows], rows[0].cost == rows[0].plan.cost.step_seconds
    ([Mesh(a=4)], True)

    Raises MeshError for a number of devices that is none, MemoryLimitError if the step fits on no mesh, and what
    `sbpc.plan` raises.
    """
    check_devices(devices, axes, progress)
    asked: dict[str, Any] = {"optimizer": optimizer, "memory": memory, "recompute": recompute}
    asked |= {"capacity": capacity, "overflow": overflow, "routing": routing}
    options = checked(None, objective=objective, spread=spread, **asked)
    check_kinds(model=(model, "an nn.Module"), seconds=(seconds, "a number of seconds", "None"))
    check_kinds(stages=(stages, "True or False"), microbatches=(microbatches, "True or False"))
    if stages or microbatches or recompute != NONE:
        among = devices, cluster, stages, microbatches
        return strategies(model, args, step, options, among, SECONDS if seconds is None else seconds, progress)
    task, on = for_all_meshes(prepare(model, args, **step), options)
    tried = [on(mesh) for mesh in meshes(devices, cluster, axes, stored_sizes(task.gm))]
    return rows_of(task, tried, progress, seconds)


def check_devices(devices: Any, axes: Any, progress: Any) -> None:
    """Raises MeshError unless `devices` and `axes` are numbers of devices and of axes, and `progress` may be called."""
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= 1 << 20:
        raise MeshError(f"devices is {shown(devices)}\n  It is a number from 1 to {1 << 20:,}.")
    check_kinds(axes=(axes, "an integer"), progress=(progress, "a function", "None"))
    if not 1 <= axes <= len(AXES):
        raise MeshError(f"axes is {axes!r}\n  A mesh has 1 to {len(AXES)} axes.")
    if progress is not None and not takes(progress, 0, 1, None):
        raise MeshError(
            f"progress is {shown(progress)}, which does not take three arguments\n  Give a function that is called as "
            "progress(number, count, mesh): which mesh it is, of how many, and the mesh."
        )


def takes(function: Callable[..., Any], *args: Any) -> bool:
    """Returns whether a function may be called with so many arguments, as far as its signature tells.

    >>> takes(lambda number: None, 0, 1), takes(lambda *args: None, 0, 1), takes(max, 0, 1)
    (False, True, True)
    """
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # it is built in, and has none
        return True
    return True


def strategies(
    model: nn.Module,
    args: Sequence[Any],
    step: Mapping[str, Any],
    options: Options,
    among: tuple[int, Cluster | str | None, bool, bool],
    seconds: float,
    progress: Progress | None,
) -> list[StrategyRow]:
    """Returns the rows of a search of whole strategies. among: how many devices of which cluster, whether with stages,
    and whether with micro-batches."""
    if options.spread or not options.overlaps:
        what = "spread= or objective= with a search of strategies"
        raise SbpcError(f"{what}\n  Leave it out: strategies are ranked by seconds.")
    few, lengths = short_model(model)
    whole = functools.cache(lambda: prepare(model, args, **step))
    short, on = for_all_meshes(prepare(few, args, **step), options)
    found = candidates(short, lengths, *among, options.optimizer, options.memory)
    found = [replace(each, mesh=on(each.mesh)[0]) for each in found]
    rows_of_experts = {name: getattr(options, name) for name in ("capacity", "overflow", "routing")}
    about = options.optimizer, options.memory, options.recompute, seconds, rows_of_experts
    return Search(whole, short, lengths, *about).rows(found, progress)


def for_all_meshes(task: Task, options: Options) -> tuple[Task, Callable[[Mesh], tuple[Mesh, Options]]]:
    """Returns a step with what is the same on all meshes: rows beyond a capacity dropped, sums in wider types; and
    what makes of a mesh the mesh and the options with its shares of experts' rows."""
    gm, on = routed_on(task.gm, options, task.stages)
    return replace(task, gm=task.stages.with_sums(gm, replace(options, **task.about))), on


def rows_of(
    task: Task, tried: Sequence[tuple[Mesh, Options]], progress: Progress | None, seconds: float | None
) -> list[SweepRow]:
    """Returns the rows of a step on meshes, with the options on each, best first. Raises MemoryLimitError if the step
    fits on none. tried: fewest axes first.

    A mesh has the plans of each mesh whose axes are its own, merged. So where one more axis has gained less than PAYS,
    a graph of many calls gets a quick plan on meshes of more axes, and where `seconds` are over, any graph does. What
    is best then is planned as well as can be.
    """
    start, best, quick, made = time.process_time(), math.inf, False, list[SweepRow | MemoryLimitError]()
    plan_on = functools.partial(attempted, task, progress=progress)

    def late() -> bool:
        return seconds is not None and time.process_time() - start > seconds

    for _, group in itertools.groupby(tried, lambda each: len(each[0].axes)):
        level = [plan_on(on, (len(made) + at, len(tried)), quick or late()) for at, on in enumerate(group)]
        least = min((row.cost for row in level if isinstance(row, SweepRow)), default=math.inf)
        quick = quick or (not few_calls(task.gm) and least > best * (1 - PAYS))
        made, best = made + level, min(best, least)
    rows = ranked(row for row in made if isinstance(row, SweepRow))
    if not rows:
        least_error = least_of([error for error in made if isinstance(error, MemoryLimitError)])
        what = f"on none of {len(tried)} meshes; on {least_error.nearest.mesh} {least_error}"
        raise MemoryLimitError(what, least_error.nearest)
    asked = {on[0].sizes: on for on in tried}
    while rows[0].quick and not late():
        again = plan_on(asked[rows[0].mesh.sizes], (len(tried), len(tried) + 1), False)
        found = [rows[0], again] if isinstance(again, SweepRow) else rows[:1]
        rows = ranked([replace(min(found, key=lambda row: row.cost), quick=False), *rows[1:]])
    return rows


def ranked(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Returns rows, best first, of equal ones that with the fewest axes."""
    return sorted(rows, key=lambda row: (row.cost, len(row.mesh.axes), row.mesh.sizes))


def attempted(
    task: Task, on: tuple[Mesh, Options], place: tuple[int, int], quick: bool, progress: Progress | None
) -> SweepRow | MemoryLimitError:
    """Returns the row of a mesh with the options on it, or the error where the step does not fit. The plan forgets the
    graphs that were made for its cost, and makes them again on use. place: number of the plan, of how many."""
    mesh, options = on
    log.info("plan %d of %d: %s", place[0] + 1, place[1], mesh)
    if progress is not None:
        progress(*place, mesh)
    quick = quick and options.overlaps  # else it takes little more to find the best
    try:
        plan = task.again().plan(mesh, options, quick)
    except MemoryLimitError as error:
        return error
    except SbpcError as error:
        raise type(error)(f"on {mesh}: {error}") from error
    cost = plan.cost.step_seconds if plan.cost.objective != BYTES else plan.cost.paid
    plan.forget()
    return SweepRow(mesh, plan, cost, quick and not plan.serial_bound)  # what has one was planned whole, as to fit


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
