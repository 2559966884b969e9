"""The strategies of so many devices, and a guess of what each takes, by which the search looks at the most promising
ones first."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from sbpc.api.task import Task
from sbpc.graph.ports import PARAMETER, placeholders
from sbpc.mesh.cluster import Cluster
from sbpc.mesh.mesh import Mesh
from sbpc.passes.assign.expert_structure import Model
from sbpc.passes.loop.recompute import block_of
from sbpc.passes.stages.balance import blocks_at, places_of, work_at
from sbpc.plans.options import OPTIMIZER_STATE
from sbpc.plans.staged.schedules import INTERLEAVED, chunks_in
from sbpc.rules import Match

PIPE, DATA, TENSOR = "pipe", "data", "tensor"
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

    Stages: divisors of the devices. Ranks of tensor: inside a node. Micro-batches: divisors of the batch that give
    every rank of data 1, 2, 4, ... samples. Chunks on each stage: up to `MOST`.
    """
    batch, calls = Model(task.gm).batch, [node for node in task.gm.graph.nodes if node.op == "call_function"]
    blocks = sum(lengths.values()) or 1
    matches = (
        (node.meta.get("module") or "", node.meta["match"]) for node in calls if node.meta.get("match") is not None
    )
    work = total(lengths, ((module, least_flops(match)) for module, match in matches if not match.view))
    parameters = ((port.name, node) for port, node in placeholders(task.gm).items() if port.kind == PARAMETER)
    stored = total(lengths, ((name, node.meta["val"].nbytes) for name, node in parameters))
    places, sheet = places_of(task.gm), Mesh(cluster=cluster, **{PIPE: devices}).cluster
    times = [block_times(lengths, block) for block in blocks_at(places)]
    # with so many parts of every call
    seconds = functools.cache(lambda parts: float(work_at(places, sheet, parts) @ np.array(times)))
    found = []
    for pipe in divisors(devices) if stages else [1]:
        if pipe > blocks:
            continue
        for tensor in divisors(devices // pipe):
            mesh = Mesh(cluster=cluster, **{PIPE: pipe, DATA: devices // pipe // tensor, TENSOR: tensor})
            if tensor > mesh.cluster.ranks_per_node and mesh.cluster.ranks_per_node < devices:
                continue
            for count in counts(batch, mesh.sizes[1]) if microbatches else [1]:
                for schedule in schedules(pipe, count, blocks):
                    chunks = chunks_in(schedule)
                    floor = work / (mesh.cluster.fastest * devices)
                    least = floor * (1 + (pipe - 1) / (count * chunks))
                    share = stored / (pipe * tensor)
                    held = (share * (2 + OPTIMIZER_STATE[optimizer]), 2 * share, share, 0.0)
                    # sharded: forward, backward, gradient
                    gathers = 3 * count if memory is not None and held[0] > memory else 2
                    computes = (
                        seconds(count * devices // pipe)
                        * math.ceil(blocks / (pipe * chunks))
                        / blocks
                        * (count * chunks + pipe - 1)
                    )
                    guess = computes + gathers * share / mesh.link((1,), "all_gather")[1] * (mesh.sizes[1] > 1)
                    found.append(Candidate(mesh, schedule, count, floor, least, guess, held))
    return sorted(found, key=lambda each: (each.guess, each.mesh.sizes, each.microbatches, each.schedule))


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
    """Returns for how many blocks of the whole model one of the short copy stands: the second of a list for all but
    the first."""
    folder, _, place = block.rpartition(".")
    return lengths[folder] - 1 if folder in lengths and place == "1" else 1


def total(lengths: dict[str, int], sizes: Iterable[tuple[str, float]]) -> float:
    """Returns the sum of sizes over the whole model. sizes: of the short copy, each with a name that begins with its
    block's."""
    return sum(size * block_times(lengths, block_of(name)) for name, size in sizes)
