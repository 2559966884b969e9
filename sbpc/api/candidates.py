"""The strategies of so many devices, and a guess of what each takes, by which the search looks at the most promising ones first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sbpc.api.planning import Task
from sbpc.api.recompute import forms_of
from sbpc.graph.ports import PARAMETER, placeholders
from sbpc.mesh.cluster import Cluster
from sbpc.mesh.mesh import Mesh
from sbpc.passes.assign.expert_structure import Model
from sbpc.passes.loop.recompute import block_of, recompute
from sbpc.passes.stages.balance import between_blocks, blocks_at, places_of, work_at
from sbpc.plans.cost import OPTIMIZER_STATE
from sbpc.plans.staged.estimate import even_ends
from sbpc.plans.staged.schedules import INTERLEAVED, chunks_in

PIPE, DATA, TENSOR = "pipe", "data", "tensor"
MOST = 4  # chunks on each stage: what more of them would hide of the bubble, they send


@dataclass(frozen=True)
class Candidate:
    """A strategy to be looked at.

    floor: seconds that no layouts, stages or schedule beat: all flops at full speed, evenly over all ranks. least: that, with the bubble
    of its schedule where stages are even. guess: seconds of its slowest stage, with the bubble, and of what is boxed of parameters and
    gradients. stored: by level of `sbpc.passes.stages.zero`, bytes of parameters, gradients and optimizer that a rank has at least.
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
        """The ranks of pipe and of tensor: how much longer than its guess a strategy takes depends on these most of all."""
        return self.mesh.sizes[0], self.mesh.sizes[2]

    @property
    def stages(self) -> int:
        """How many stages it has."""
        return self.mesh.sizes[0]


def candidates(
    task: Task, lengths: dict[str, int], devices: int, cluster: Cluster | str | None, stages: bool, microbatches: bool,
    optimizer: str | None, memory: float | None, form: str,
) -> list[Candidate]:  # fmt: skip
    """Returns the strategies of `devices` ranks, those that may be fastest first. form: what is computed again.

    Stages: divisors of the devices. Ranks of tensor: inside a node. Micro-batches: divisors of the batch that give every rank of data
    1, 2, 4, ... samples. Chunks on each stage: up to `MOST`.
    """
    batch = Model(task.gm).batch
    blocks = sum(lengths.values()) or 1
    work, stored = flops_of(task, lengths), parameter_bytes(task, lengths)
    slowest = Slowest(task, lengths, Mesh(cluster=cluster, **{PIPE: devices}).cluster, form)
    found = []
    for pipe in divisors(devices) if stages else [1]:
        if pipe > max(blocks, 1):
            continue
        for tensor in divisors(devices // pipe):
            mesh = Mesh(cluster=cluster, **{PIPE: pipe, DATA: devices // pipe // tensor, TENSOR: tensor})
            if tensor > mesh.cluster.ranks_per_node and mesh.cluster.ranks_per_node < devices:
                continue
            for count in counts(batch, mesh.sizes[1]) if microbatches else [1]:
                for schedule in schedules(pipe, count, blocks):
                    chunks = chunks_in(schedule)
                    floor = work / (mesh.cluster.peak * devices)
                    least = floor * (1 + (pipe - 1) / (count * chunks))
                    share = stored / (pipe * tensor)
                    held = (share * (2 + OPTIMIZER_STATE[optimizer]), 2 * share, share, 0.0)
                    gathers = 3 * count if memory is not None and held[0] > memory else 2  # sharded: forward, backward, gradient
                    computes = slowest.seconds(count * mesh.ranks // pipe, pipe * chunks) * (count * chunks + pipe - 1)
                    guess = computes + gathers * share / mesh.link((1,), "all_gather")[1] * (mesh.sizes[1] > 1)
                    found.append(Candidate(mesh, schedule, count, floor, least, guess, held))
    return sorted(found, key=lambda each: (each.guess, each.mesh.sizes, each.microbatches, each.schedule))


class Slowest:
    """How long the slowest chunk of a model takes for a micro-batch, its calls cut evenly over the ranks of a stage, without boxing."""

    def __init__(self, task: Task, lengths: dict[str, int], cluster: Cluster, form: str) -> None:
        self.places, self.cluster = places_of(recompute(task.gm, forms_of(task.gm, form))), cluster
        self.starts = [0, *between_blocks(self.places)]
        blocks = blocks_at(self.places)
        self.times = [block_times(lengths, blocks[at]) for at in self.starts] if blocks else []
        self.rows, self.found = dict[int, np.ndarray](), dict[tuple[int, int], float]()

    def seconds(self, parts: int, chunks: int) -> float:
        """Returns the seconds of the slowest chunk on a device that has one of so many parts of every call of a step."""
        if not self.times:
            return 0.0
        if parts not in self.rows:
            self.rows[parts] = np.repeat(np.add.reduceat(work_at(self.places, self.cluster, parts), self.starts), self.times)
        row, key = self.rows[parts], (parts, chunks)
        if key not in self.found:
            ends = even_ends(row.tolist(), min(chunks, len(row)))
            self.found[key] = float(np.add.reduceat(row, ends[:-1]).max())
        return self.found[key]


def schedules(pipe: int, count: int, blocks: int) -> Iterator[str]:
    """Yields the schedules of `count` micro-batches that keep all stages busy, up to `MOST` chunks of the blocks on each stage.

    >>> list(schedules(4, 8, 12)), list(schedules(4, 6, 12))
    (['1f1b', 'interleaved:2', 'interleaved:3'], ['1f1b'])
    """
    yield from ("1f1b",) if count >= pipe else ()
    if pipe > 1 and count % pipe == 0:
        yield from (f"{INTERLEAVED}:{each}" for each in range(2, MOST + 1) if pipe * each <= blocks + 2)


def counts(batch: int, data: int) -> list[int]:
    """Returns the numbers of micro-batches with which each of `data` ranks has a power of two of samples, the batch at most.

    >>> counts(48, 2)
    [24, 12, 6, 3]
    """
    samples = [1 << power for power in range(batch.bit_length())]
    return [batch // (data * each) for each in samples if batch % (data * each) == 0]


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def parameter_bytes(task: Task, lengths: dict[str, int]) -> float:
    """Returns the bytes of the parameters of the whole model, from its short copy."""
    total = 0.0
    for port, node in placeholders(task.gm).items():
        if port.kind == PARAMETER:
            value = node.meta["val"]
            total += value.numel() * value.element_size() * block_times(lengths, block_of(port.name))
    return total


def block_times(lengths: dict[str, int], block: str) -> int:
    """Returns for how many blocks of the whole model one of the short copy stands: the second of a list for all but the first."""
    folder, _, place = block.rpartition(".")
    return lengths[folder] - 1 if folder in lengths and place == "1" else 1


def flops_of(task: Task, lengths: dict[str, int]) -> float:
    """Returns the flops of a step of the whole model on one device, from its short copy."""
    total = 0.0
    for node in task.gm.graph.nodes:
        match = node.meta.get("match")
        if node.op == "call_function" and match is not None and not match.view:
            total += float(match.flops(match.sizes)) * block_times(lengths, block_of(node.meta.get("module") or ""))
    return total
