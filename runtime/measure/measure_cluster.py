"""Measure what a flop, a byte of memory and every collective cost on the machine that runs this.

Every figure is the median over repeats, after a warm-up, with all ranks measuring at the same time, as they compute
and communicate in a step. Before each collective the ranks compute, as they do in a step, and no rank computes again
before all are through it: it would take the core of a rank that shares it. A collective takes as long as its slowest
rank. Its time over messages of many sizes is fitted as max(start + bytes / rate, least), with the bytes of the
textbook's ring, so that whatever the backend does otherwise shows in its own figures. What kernels and a collective
cost each other, and what ranks that compute do, is measured last.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sbpc.errors import MeshError
from sbpc.mesh.cluster import Cluster, Rate
from sbpc.mesh.collectives import CARRIERS, WIRE
from sbpc.runtime.measure.measure_device import device_figures, layers, memory_of, settle, timed
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.process_groups import from_all_ranks

c10d = torch.ops._c10d_functional  # what programs call
# Bytes that a rank sends, by the textbook; most are the sizes of a step's messages, for which the line is to be right.
SENT = tuple(1 << power for power in (12, 14, *range(16, 24), 25, 28))
LONG = 0.1  # seconds of a message that are enough: longer ones are not timed
MOST = 1 << 28  # bytes that a rank sends beside kernels at most
STARTED, STARTS = 1 << 16, 8  # bytes that a rank sends in a collective whose start is timed; how many follow each other
INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Grouping:
    """Groups of `ranks` ranks, neighbours `stride` apart, that cut the machine into equal pieces.

    group: the name under which this rank's is bound, as those of programs are.
    """

    ranks: int
    stride: int
    group: str

    def inside(self, per_node: int) -> bool:
        """Returns whether the groups stay inside a node."""
        return self.ranks * self.stride <= per_node

    def sharing(self, per_node: int) -> int:
        """Returns how many groups share the link out of a node, as in `Mesh.link`."""
        return 1 if self.inside(per_node) else min(per_node, self.stride)


@dataclass(frozen=True)
class LinearCost:
    """Seconds of a collective: max(`start` + bytes / `rate`, `least`). traffic: bytes on the wire per byte of the
    textbook."""

    start: float
    rate: float
    least: float
    traffic: float = 1.0


Costs = dict[tuple[str, Grouping], LinearCost]


def profile(
    name: str = "measured",
    repeats: int = 7,
    sent: Sequence[int] = SENT,
    size: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    device: str | None = None,
    links: Cluster | None = None,
) -> Cluster:
    """Measures the cluster of the ranks that a launcher started. The result is the same on every rank.

    sent: the bytes, by the textbook, that a rank sends in the messages that are timed, up to a LONG one.
    size: of the square matrices that are multiplied. tell: called with what is measured next.
    links: a cluster of which all that concerns links is taken; then devices alone are measured, and one rank is enough.
    Raises MeshError for less than two ranks or two sizes of messages.
    """
    where = process_groups.start(device)
    world = dist.get_world_size()
    if (world < 2 and links is None) or len(set(sent)) < 2 or repeats < 1:
        raise MeshError(
            f"{world} ranks, messages of {list(sent)} bytes, {repeats} repeats\n  Profile 2 ranks and 2 sizes at least."
        )
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    side = size or (8192 if where.type == "cuda" else 768)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    figures = device_figures(where, side, dtype, repeats, tell)
    told = f"sbpc profile: torch {torch.__version__}, {dist.get_backend()}, {world} ranks, {per_node} on a node, "
    told += f"{str(dtype).removeprefix('torch.')}, medians of {repeats}"
    if links is not None:
        source = f"{told}; links as in {links.name!r}: {links.source}"
        return replace(links, name=name, **figures, memory=memory_of(where, per_node), source=source)
    costs = measure(where, repeats, sent, tell)
    tell("kernels beside a collective")
    kernels_beside, links_beside = beside(where, repeats, costs)
    start = starting(where, repeats, costs)
    intra, inter, missing = links_of(costs, per_node)
    cluster = Cluster(
        name,
        **figures,
        ranks_per_node=per_node,
        intra_latency=intra[0],
        intra_bandwidth=intra[1],
        inter_latency=inter[0],
        inter_bandwidth=inter[1],
        memory=memory_of(where, per_node),
        kernels_beside=kernels_beside,
        links_beside=links_beside,
        start=start,
        source=told + missing,
    )
    return replace(cluster, collectives=rates(costs, cluster))


def groupings(world: int) -> list[Grouping]:
    """Makes, for every group size that divides the world, groups of neighbours and of ranks as far apart as can be."""
    made = []
    for ranks in (p for p in range(2, world + 1) if world % p == 0):
        for stride in dict.fromkeys((1, world // ranks)):
            firsts = (r for r in range(world) if r // stride % ranks == 0)
            name = f"sbpc::profile::{ranks},{stride}"
            process_groups.bind_groups(name, [[first + at * stride for at in range(ranks)] for first in firsts])
            made.append(Grouping(ranks, stride, name))
    return made


def measure(where: torch.device, repeats: int, sent: Sequence[int], tell: Callable[[str], None]) -> Costs:
    """Times every collective over all groups of a grouping at once, for messages of several sizes, and fits its cost.

    Each repeat passes every message once. So if the machine is slow for some seconds, that falls on one repeat of
    many messages, which medians leave out, and not on all repeats of one. Raises MeshError where all messages are of
    one size.
    """
    tell("which messages are long")
    work = torch.randn(512, 512, device=where)
    noted: dict[Message, list[tuple[float, float]]] = {}
    for grouping in groupings(dist.get_world_size()):
        for collective in (each for each in WIRE if each not in CARRIERS):
            noted |= {message: [] for message in series_of(collective, grouping, sent, work)}
    for repeat in range(repeats):
        tell(f"collectives, {repeat + 1} of {repeats}")
        for message, figures in noted.items():
            figures.append(timed_once(message, work))
    points: dict[tuple[str, Grouping], list[tuple[float, float, float]]] = {}
    for message, ranks in zip(noted, zip(*from_all_ranks(list(noted.values())))):
        by_repeat = list(zip(*ranks))
        seconds, moved = (statistics.median(max(rank[at] for rank in same) for same in by_repeat) for at in (0, 1))
        points.setdefault((message.collective, message.grouping), []).append((message.textbook, seconds, moved))
    costs = {}
    for key, each in points.items():
        textbook, _, moved = each[-1]
        # No collective sends less than the textbook's. If less than half of that was seen, no interface was named or
        # the bytes went through another one.
        traffic = moved / textbook if moved > textbook / 2 else 1.0
        costs[key] = replace(fit([point[:2] for point in each]), traffic=traffic)
    return costs


def beside(where: torch.device, repeats: int, costs: Costs) -> tuple[float, float]:
    """Measures how many times as long kernels take while a collective of all ranks runs, and the collective while
    kernels run.

    The kernels are those of a layer, into new memory: a product that stays in caches hardly notices what goes on
    beside it. Both are measured alone and together by turns, as in `sharing`.
    """
    grouping = of_all_ranks(costs)
    message = Message("all_reduce", grouping, int(min(MOST, 2 * LONG * costs["all_reduce", grouping].rate)))
    work, send = torch.randn(512, 512, device=where), message.start(where)
    run = layers(where, torch.bfloat16 if where.type == "cuda" else torch.float32)
    found = []
    for _ in range(repeats):
        kernel = statistics.mean(from_all_ranks(timed(run, where, 1, 1)))
        alone = max(from_all_ranks(timed_once(message, work)[0]))
        count = max(1, int(alone / kernel / 2))  # they are through before the collective is
        dist.barrier()
        start = time.perf_counter()
        value = send()
        for _ in range(count):
            run()
        if where.type == "cuda":
            torch.cuda.current_stream(where).synchronize()
        kernels = time.perf_counter() - start
        c10d.wait_tensor(value)
        settle(where)
        whole = time.perf_counter() - start
        kernels, whole = map(statistics.mean, zip(*from_all_ranks((kernels, whole))))
        left = max(whole - kernels, 0.0)  # the collective ran by itself
        found.append((kernels / (count * kernel), kernels / (alone - left) if left < alone else 1.0))
    beside_sent, beside_run = (max(1.0, statistics.median(each)) for each in zip(*found))
    return beside_sent, beside_run


def of_all_ranks(costs: Costs) -> Grouping:
    return next(grouping for _, grouping in costs if grouping.ranks == dist.get_world_size())


def starting(where: torch.device, repeats: int, costs: Costs) -> float:
    """Measures the seconds of computing that it costs to start a collective between kernels; none on a GPU, which
    goes on meanwhile."""
    if where.type == "cuda":
        return 0.0
    work, send = torch.randn(512, 512, device=where), Message("all_gather", of_all_ranks(costs), STARTED).start(where)
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        sent = []
        for _ in range(STARTS):
            torch.mm(work, work)
            start = time.perf_counter()
            sent.append(send())
            seconds.append(time.perf_counter() - start)
        for value in sent:
            c10d.wait_tensor(value)
    return statistics.median(from_all_ranks(statistics.mean(seconds)))


def series_of(collective: str, grouping: Grouping, sent: Sequence[int], work: torch.Tensor) -> list[Message]:
    """Returns the messages to time, ascending: up to the first that is LONG in the best of three tries, but at least
    two."""
    by_size = {message.textbook: message for message in (Message(collective, grouping, size) for size in sorted(sent))}
    if len(by_size) < 2:
        raise MeshError(
            f"{collective} over {grouping.ranks} ranks sends {min(by_size):.0f} bytes where {list(sent)} are asked "
            "for\n"
            "  Give sizes that are further apart."
        )
    messages: list[Message] = []
    for message in by_size.values():
        messages.append(message)
        if min(max(from_all_ranks(timed_once(message, work)[0])) for _ in range(3)) > LONG and len(messages) > 1:
            break
    return messages


def timed_once(message: Message, work: torch.Tensor) -> tuple[float, float]:
    """Returns the seconds of a message after a computation, and the bytes that left through the named interface, 0
    without."""
    send = message.start(work.device)
    before = wire_bytes()
    torch.mm(work, work)
    settle(work.device)
    dist.barrier()
    start = time.perf_counter()
    c10d.wait_tensor(send())
    settle(work.device)
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds, wire_bytes() - before


@dataclass(frozen=True)
class Message:
    """A collective over all groups of a grouping, in which a rank sends about `sent` bytes by the textbook."""

    collective: str
    grouping: Grouping
    sent: int

    @property
    def block(self) -> int:
        """Returns how many float32 numbers a shard has."""
        block = max(1, round(self.sent / WIRE[self.collective](self.grouping.ranks, 1.0)[1] / 4))
        return max(self.grouping.ranks, block) if self.collective == "all_reduce" else block

    @property
    def textbook(self) -> float:
        """Returns the bytes that a rank sends by the textbook."""
        return float(WIRE[self.collective](self.grouping.ranks, 4.0 * self.block)[1])

    def start(self, where: torch.device) -> Callable[[], torch.Tensor]:
        """Returns the function that starts it."""
        p, block, group = self.grouping.ranks, self.block, self.grouping.group
        given = torch.ones(block * p if self.collective in ("all_to_all", "reduce_scatter") else block, device=where)
        calls: dict[str, list[Any]] = {
            "all_gather": [c10d.all_gather_into_tensor, p],
            "all_reduce": [c10d.all_reduce, "sum"],
            "all_to_all": [c10d.all_to_all_single, [block] * p, [block] * p],
            "reduce_scatter": [c10d.reduce_scatter_tensor, "sum", p],
        }
        op, *options = calls[self.collective]
        return partial(op, given, *options, group)


def wire_bytes() -> int:
    """Returns a rank's share of the bytes that left through the interface which gloo was told to use, 0 if it was
    told none."""
    interface = os.environ.get(INTERFACE)
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    if not interface or not counter.exists():
        return 0
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return int(counter.read_text()) // sharing


def fit(points: Sequence[tuple[float, float]]) -> LinearCost:
    """Fits a line with the least relative errors to the messages from some size on, and `least` to those below.

    Small messages all take about the time of waking threads and peers. A line through all messages would be too low for
    the smallest and the largest, and too high between. points: (bytes, seconds), ascending in bytes.

    >>> fit([(1e3, 2e-3), (1e4, 2e-3), (1e6, 1.1e-2), (2e6, 2.1e-2)])
    LinearCost(start=0.001, rate=100000000.0, least=0.002, traffic=1.0)
    """

    def error(line: LinearCost) -> float:
        return sum((max(line.start + x / line.rate, line.least) / t - 1) ** 2 for x, t in points)

    lines = [LinearCost(*straight(points), 0.0)]
    for flat in range(2, len(points) - 1):
        start, rate = straight(points[flat:])
        least = statistics.median(t for _, t in points[:flat])
        lines.append(LinearCost(start, rate, least if least > start + points[0][0] / rate else 0.0))
    return min(lines, key=error)


def straight(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fits the line seconds = start + bytes / rate with the least relative errors; the start is not negative.

    >>> straight([(1e3, 2e-5), (1e6, 1.019e-3)])
    (1.9e-05, 1000000000.0)
    """
    x, t = np.array(points).T
    slope, start = np.polyfit(x, t, 1, w=1 / t)
    if start < 0 or slope <= 0:
        start, slope = 0.0, np.sum(x / t) / np.sum((x / t) ** 2)
    return float(f"{start:.12g}"), float(f"{1 / slope:.12g}")


def links_of(costs: Costs, per_node: int) -> tuple[tuple[float, float], tuple[float, float], str]:
    """Returns the links inside nodes and between them, and what the source says if one was taken for the other."""
    intra, inter = link_of(costs, True, per_node), link_of(costs, False, per_node)
    known = intra or inter
    assert known is not None
    said = (
        "" if intra and inter else "; intra as inter" if inter else "; inter is not measured, and taken to be as intra"
    )
    return intra or known, inter or known, said


def link_of(costs: Costs, inside: bool, per_node: int) -> tuple[float, float] | None:
    """Returns latency of a round and bandwidth of the links inside nodes or between them, by the best collective
    there."""
    there = {key: cost for key, cost in costs.items() if key[1].inside(per_node) == inside}
    if not there:
        return None
    latency = min(max(cost.start, cost.least) / rounds(*key) for key, cost in there.items())
    bandwidths: dict[tuple[str, int], list[float]] = {}
    for (collective, grouping), cost in there.items():
        bandwidths.setdefault((collective, grouping.ranks), []).append(cost.rate * grouping.sharing(per_node))
    return latency, max(map(statistics.median, bandwidths.values()))


def rounds(collective: str, grouping: Grouping) -> float:
    """Returns the rounds of a collective by the textbook."""
    return float(WIRE[collective](grouping.ranks, 1.0)[0])


def rates(costs: Costs, cluster: Cluster) -> tuple[Rate, ...]:
    """Returns how each collective runs over groups of each size on each link, the median over groupings of that
    size."""
    measured: dict[tuple[str, int, str], list[Rate]] = {}
    for (collective, grouping), cost in costs.items():
        inside = grouping.inside(cluster.ranks_per_node)
        bandwidth = cluster.intra_bandwidth if inside else cluster.inter_bandwidth
        efficiency = cost.rate / (bandwidth / grouping.sharing(cluster.ranks_per_node))
        least = max(cost.start, cost.least)  # what a small message takes, however the cost was fitted
        key = collective, grouping.ranks, "intra" if inside else "inter"
        rate = Rate(*key, cost.start / rounds(collective, grouping), efficiency, cost.traffic, least)
        measured.setdefault(key, []).append(rate)
    figures = ("latency", "efficiency", "traffic", "least")
    return tuple(
        replace(same[0], **{name: statistics.median(getattr(rate, name) for rate in same) for name in figures})
        for same in measured.values()
    )
