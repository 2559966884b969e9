"""The strategies of so many devices, and a guess of what each takes, by which the search looks at the most promising
ones first."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch.fx import GraphModule

from sbpc.api.short_model import name_of
from sbpc.api.task import Task
from sbpc.graph.expert_rows import MESSAGE
from sbpc.graph.operands import operands
from sbpc.graph.ports import PARAMETER, placeholders
from sbpc.mesh.cluster import Cluster
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Axes
from sbpc.passes.assign.expert_structure import Model
from sbpc.passes.loop.recompute import block_of
from sbpc.passes.stages.balance import blocks_at, places_of, work_at
from sbpc.plans.options import OPTIMIZER_STATE
from sbpc.plans.staged.schedules import INTERLEAVED, chunks_in
from sbpc.rules import Match
from sbpc.rules.shared_rows import PRODUCT

PIPE, DATA, TENSOR, EXPERT = "pipe", "data", "tensor", "expert"
MOST = 4  # chunks on each stage: what more of them would hide of the bubble, they send


@dataclass(frozen=True)
class Refused:
    """A strategy without a row. reason: a sentence; needed: bytes of a rank where that is that it does not fit, else
    None."""

    mesh: Mesh
    schedule: str
    microbatches: int
    reason: str
    needed: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A strategy to be looked at.

    floor: seconds that no layouts, stages or schedule beat: all flops at full speed, evenly over all ranks. least:
    that, with the bubble of its schedule where stages are even. guess: seconds of a stage with the most blocks, with
    the bubble, and of what is boxed of parameters and gradients. stored: by level of `sbpc.passes.stages.zero`,
    bytes of parameters, gradients and optimizer that a rank has at least.
    """

    mesh: Mesh
    schedule: str
    microbatches: int
    floor: float
    least: float
    guess: float
    stored: tuple[float, ...]

    @property
    def kind(self) -> tuple[int, int]:
        """The ranks of pipe and of tensor: how much longer than its guess a strategy takes depends on these most of
        all."""
        return self.mesh.sizes[0], self.mesh.sizes[2]

    @property
    def stages(self) -> int:
        """How many stages it has."""
        return self.mesh.sizes[0]

    @property
    def part(self) -> float:
        """The part of the batch that is at once on each rank, times the number of ranks."""
        return self.stages / self.microbatches

    def refused(self, reason: str, needed: int | None = None) -> Refused:
        """Returns what is told of it where it has no row."""
        return Refused(self.mesh, self.schedule, self.microbatches, reason, needed)


def candidates(
    task: Task,
    lengths: dict[str, int],
    devices: int,
    cluster: Cluster | str | None,
    stages: bool,
    microbatches: bool,
    optimizer: str | None,
    memory: float | None,
) -> list[Candidate]:
    """Returns the strategies of `devices` ranks, those that may be fastest first.

    Stages: divisors of the devices. Ranks of tensor: inside a node; across nodes the axis is called expert, and is
    there for a model whose ranks may share out rows of experts. Micro-batches: divisors of the batch that give
    every rank of data 1, 2, 4, ... samples; one where no strategy has such a number. Chunks on each stage: up to
    `MOST`.
    """
    batch, calls = Model(task.gm).batch, [node for node in task.gm.graph.nodes if node.op == "call_function"]
    blocks = sum(lengths.values()) or 1
    matches = (
        (node.meta.get("module") or "", node.meta["match"]) for node in calls if node.meta.get("match") is not None
    )
    work = total(lengths, ((module, least_flops(match)) for module, match in matches if not match.view))
    sizes = {port.name: node.meta["val"].nbytes for port, node in placeholders(task.gm, PARAMETER).items()}
    rows = total(lengths, rows_of_experts(task.gm))
    of_experts = total(lengths, ((name, sizes.pop(name)) for name in matrices_of_experts(task.gm) if rows))
    stored = total(lengths, sizes.items())
    places, sheet = places_of(task.gm), Mesh(cluster=cluster, **{PIPE: devices}).cluster
    times = [block_times(lengths, block) for block in blocks_at(places)]
    # with so many parts of every call
    seconds = functools.cache(lambda parts: float(work_at(places, sheet, parts) @ np.array(times)))
    found = []
    for pipe in divisors(devices) if stages else [1]:
        if pipe > blocks:
            continue
        for tensor in divisors(devices // pipe):
            data = devices // pipe // tensor
            mesh = Mesh(cluster=cluster, **{PIPE: pipe, DATA: data, TENSOR: tensor})
            if tensor > mesh.cluster.ranks_per_node and mesh.cluster.ranks_per_node < devices:
                if not rows or data == 1:  # without data an axis of less is no worse: rows may go over both
                    continue
                mesh = Mesh(cluster=cluster, **{PIPE: pipe, DATA: data, EXPERT: tensor})
            batches = data * tensor if EXPERT in mesh.axes else data  # experts' axis has rows of tokens of its own
            for count in counts(batch, batches) if microbatches else [1]:
                for schedule in schedules(pipe, count, blocks):
                    chunks = chunks_in(schedule)
                    floor = work / (mesh.cluster.fastest * devices)
                    least = floor * (1 + (pipe - 1) / (count * chunks))
                    held = levels(stored / (pipe * tensor) + of_experts / devices, optimizer)
                    computes = (
                        seconds(count * devices // pipe)
                        * math.ceil(blocks / (pipe * chunks))
                        / blocks
                        * (count * chunks + pipe - 1)
                    )
                    boxes = boxing(mesh, stored, of_experts, rows, count, memory, optimizer)
                    guess = computes + boxes
                    found.append(Candidate(mesh, schedule, count, floor, least, guess, held))
    if microbatches and not found:
        return candidates(task, lengths, devices, cluster, stages, False, optimizer, memory)
    return sorted(found, key=lambda each: (each.guess, each.mesh.sizes, each.microbatches, each.schedule))


def levels(share: float, optimizer: str | None) -> tuple[float, ...]:
    """Returns by level of `sbpc.passes.stages.zero` the bytes that a rank has of so many bytes of parameters, their
    gradients and the optimizer's state."""
    return share * (2 + OPTIMIZER_STATE[optimizer]), 2 * share, share, 0.0


def boxing(
    mesh: Mesh,
    stored: float,
    of_experts: float,
    rows: float,
    count: int,
    memory: float | None,
    optimizer: str | None,
) -> float:
    """Returns a guess of the seconds in which a rank sends parameters and gradients, and rows of experts: these are
    shared out over the last axis, or over all of a stage, whichever takes less. stored, of_experts, rows: bytes of the
    whole model."""
    pipe, data, tensor = mesh.sizes
    copies = data * tensor if EXPERT in mesh.axes else data  # of all but experts
    over = (1, 2) if EXPERT in mesh.axes else (1,)

    def of_parameters(share: float, ranks: int, axes: Axes) -> float:
        # sharded: forward, backward, gradient
        gathers = 3 * count if memory is not None and levels(share, optimizer)[0] > memory else 2
        return gathers * share / mesh.link(axes, "all_gather")[1] * (ranks > 1)

    dense = stored * copies / mesh.ranks
    if not rows:
        return of_parameters(dense, copies, over)
    ways = []
    for axes, ranks in (((2,), tensor), ((1, 2), data * tensor)):
        sent = rows / mesh.ranks * (1 - 1 / ranks) / mesh.link(axes, "all_to_all")[1]
        share = of_experts / (pipe * ranks)
        several = of_parameters(dense + share, copies, over) * dense / (dense + share)
        several += of_parameters(dense + share, mesh.ranks // pipe // ranks, (1,)) * share / (dense + share)
        ways.append(sent + several)
    return min(ways)


def rows_of_experts(gm: GraphModule) -> Iterator[tuple[str, float]]:
    """Yields the module and the bytes of rows that go to experts, or come back from them, forward and backward."""
    for node in gm.graph.nodes:
        if node.target in MESSAGE:
            value = (*operands(node), node)[MESSAGE[node.target]].meta["val"]
            yield node.meta.get("module") or "", value.nbytes


def matrices_of_experts(gm: GraphModule) -> list[str]:
    """Returns the names of the parameters of experts: those that products of groups of rows read, or what is made of
    one alone."""
    found, names = dict[str, None](), {node: port.name for port, node in placeholders(gm, PARAMETER).items()}
    for node in gm.graph.nodes:
        for used in operands(node)[:2] if node.target is PRODUCT else ():
            while used.op == "call_function" and len(used.all_input_nodes) == 1:
                (used,) = used.all_input_nodes
            found |= {names[used]: None} if used in names else {}
    return list(found)


def schedules(pipe: int, count: int, blocks: int) -> Iterator[str]:
    """Yields the schedules of `count` micro-batches that keep all stages busy, up to `MOST` chunks of the blocks on
    each stage.

    >>> list(schedules(4, 8, 12)), list(schedules(4, 6, 12))
    (['1f1b', 'interleaved:2', 'interleaved:3'], ['1f1b'])
    """
    yield from ("1f1b",) if count >= pipe else ()
    if pipe > 1 and count % pipe == 0:
        yield from (f"{INTERLEAVED}:{each}" for each in range(2, MOST + 1) if pipe * each <= blocks + 2)


def counts(batch: int, data: int) -> list[int]:
    """Returns the numbers of micro-batches with which each of `data` ranks has a power of two of samples, the batch
    at most.

    >>> counts(48, 2)
    [24, 12, 6, 3]
    """
    samples = [1 << power for power in range(batch.bit_length())]
    return [batch // (data * each) for each in samples if batch % (data * each) == 0]


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def least_flops(match: Match) -> float:
    """Returns the flops of a call, without those of pairs that a kernel of attention may leave out."""
    return float(match.flops(match.sizes)) * (0.5 if match.causal else 1.0)


def block_times(lengths: dict[str, int], block: str) -> int:
    """Returns for how many blocks of the whole model one of the short copy stands: the second of a run for all but
    the first. lengths: see `short_model`."""
    folder, _, place = block.rpartition(".")
    run = name_of(folder, str(int(place) - 1)) if place.isdigit() else ""
    return lengths[run] - 1 if run in lengths else 1


def total(lengths: dict[str, int], sizes: Iterable[tuple[str, float]]) -> float:
    """Returns the sum of sizes over the whole model. sizes: of the short copy, each with a name that begins with its
    block's."""
    return sum(size * block_times(lengths, block_of(name)) for name, size in sizes)
