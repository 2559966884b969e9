"""profile: measure what a flop, a byte of memory and every collective cost on the machine that runs this.

Every figure is the median over repeats, after a warm-up, with all ranks measuring at the same time, as they compute and
communicate in a step. Before each collective they compute, as they do there, and none computes again before all are
through it: it would take the core of a rank that shares it. A collective takes as long as its slowest rank; its time is
fitted as rounds * latency + bytes / rate, or what it takes at least, over messages of many sizes, with the rounds and
bytes of the textbook's ring, so that whatever the backend does instead shows in its own figures.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sbpc.boxing.steps import WIRE
from sbpc.errors import MeshError
from sbpc.mesh.cluster import Cluster, Rate
from sbpc.runtime.start import process_groups as groups

c10d = torch.ops._c10d_functional  # what programs call
# Bytes that a rank sends, by the textbook; most are the sizes of a step's messages, for which the line is to be right.
SENT = tuple(1 << power for power in (12, 14, *range(16, 24), 25, 28))
LONG = 0.1  # seconds of a message that are enough: longer ones are not timed
INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Team:
    """Groups that cut the ranks of the machine alike: `ranks` in each, neighbours `stride` apart; the own group."""

    ranks: int
    stride: int
    group: dist.ProcessGroup

    def inside(self, per_node: int) -> bool:
        """Whether the groups stay inside a node."""
        return self.ranks * self.stride <= per_node


@dataclass(frozen=True)
class Line:
    """Seconds of a collective as `start` + bytes / `rate`, but never less than `least`, and the bytes on the wire for each
    byte of the textbook."""

    start: float
    rate: float
    least: float
    traffic: float = 1.0


def profile(
    name: str = "measured",
    repeats: int = 7,
    sent: Sequence[int] = SENT,
    size: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
    device: str | None = None,
) -> Cluster:
    """The cluster of the ranks that a launcher started, measured; the same on every rank.

    sent: the bytes that a rank sends, by the textbook, in the messages that are timed, up to a LONG one. size: of the square matrices
    multiplied. Raises MeshError for less than two ranks or two sizes of messages.
    """
    where = groups.start(device)
    world = dist.get_world_size()
    if world < 2 or len(set(sent)) < 2 or repeats < 1:
        raise MeshError(
            f"{world} ranks, messages of {list(sent)} bytes, {repeats} repeats\n  Profile 2 ranks and 2 sizes at least."
        )
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    tell("matrix products and memory")
    side = size or (8192 if where.type == "cuda" else 768)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    peak, memory_bandwidth, launch = device_figures(where, side, dtype, repeats)
    found = measure(where, repeats, sent, tell)
    links = {inside: link_of(found, inside, per_node) for inside in (True, False)}
    intra, inter = links[True] or links[False], links[False] or links[True]
    assert intra is not None and inter is not None
    backend, where_from = (
        dist.get_backend(),
        "" if links[False] else "; inter is not measured, and taken to be as intra",
    )
    cluster = Cluster(
        name, peak, memory_bandwidth, launch, per_node, *intra, *inter, memory=memory_of(where, per_node),
        source=f"sbpc profile: torch {torch.__version__}, {backend}, {world} ranks, {per_node} on a node, "
        f"{str(dtype).removeprefix('torch.')}, medians of {repeats}" + (where_from or ("" if links[True] else "; intra as inter")),
    )  # fmt: skip
    return replace(cluster, collectives=rates(found, cluster))


def teams(world: int) -> list[Team]:
    """For every group size that divides the world: groups of neighbours, and of ranks as far apart as can be."""
    found = []
    for ranks in (p for p in range(2, world + 1) if world % p == 0):
        for stride in dict.fromkeys((1, world // ranks)):
            own = None
            for first in (r for r in range(world) if r // stride % ranks == 0):
                members = [first + at * stride for at in range(ranks)]
                group = groups.new(members)
                own = group if dist.get_rank() in members else own
            assert own is not None
            found.append(Team(ranks, stride, own))
    return found


def device_figures(where: torch.device, side: int, dtype: torch.dtype, repeats: int) -> tuple[float, float, float]:
    """Flop/s of matrix products, bytes/s of memory, and the least seconds of a kernel; the median over the ranks."""
    a, b = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
    large = torch.randn(1 << (28 if where.type == "cuda" else 22), device=where)
    out, one = torch.empty_like(large), torch.ones(1, device=where)
    product = timed(lambda: torch.mm(a, b), where, repeats, 10)
    copied = timed(lambda: torch.add(large, 1.0, out=out), where, repeats, 10)
    small = timed(lambda: torch.add(one, 1.0), where, repeats, 1000)
    mine = 2 * side**3 / product, 2 * large.nbytes / copied, small
    return tuple(map(statistics.median, zip(*everyone(mine))))  # type: ignore[return-value]


def timed(run: Callable[[], Any], where: torch.device, repeats: int, calls: int) -> float:
    """The median seconds of a call, all ranks at the same time, of so many that ranks which share a core take turns."""
    seconds = []
    for repeat in range(repeats + 2):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        settle(where)
        if repeat >= 2:
            seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds)


def settle(where: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)


def measure(
    where: torch.device, repeats: int, sent: Sequence[int], tell: Callable[[str], None]
) -> dict[tuple[str, Team], Line]:
    """Time every collective over all groups of a team at once, for messages of several sizes, and fit the lines.

    In turns, each of which passes every message once: what slows the machine for some seconds falls on one repeat of
    many messages, which medians leave out, and not on all repeats of one. Before that a series ends with the first message
    that is LONG in the best of three tries, but has two at least. Raises MeshError where all are of one size.
    """
    tell("which messages are long")
    work = torch.randn(512, 512, device=where)
    noted: dict[Message, list[tuple[float, float]]] = {}
    for team in teams(dist.get_world_size()):
        for collective in WIRE:
            series = {message.textbook: message for message in (Message(collective, team, size) for size in sorted(sent))}
            if len(series) < 2:
                raise MeshError(
                    f"{collective} over {team.ranks} ranks sends {min(series):.0f} bytes where {list(sent)} are asked for\n"
                    "  Give sizes that are further apart."
                )
            for at, message in enumerate(series.values()):
                noted[message] = []
                if min(max(everyone(timed_once(message, work)[0])) for _ in range(3)) > LONG and at:
                    break
    for repeat in range(repeats):
        tell(f"collectives, {repeat + 1} of {repeats}")
        for message, figures in noted.items():
            figures.append(timed_once(message, work))
    lines: dict[tuple[str, Team], list[tuple[float, float, float]]] = {}
    for message, ranks in zip(noted, zip(*everyone(list(noted.values())))):
        alike = list(zip(*ranks))  # what the ranks noted, repeat by repeat
        seconds, moved = (statistics.median(max(rank[at] for rank in same) for same in alike) for at in (0, 1))
        lines.setdefault((message.collective, message.team), []).append((message.textbook, seconds, moved))
    return {
        key: replace(fit([point[:2] for point in points]), traffic=traffic_of(*points[-1])) for key, points in lines.items()
    }


def traffic_of(textbook: float, seconds: float, moved: float) -> float:
    """Bytes on the wire for each byte of the textbook, by the largest message; 1 where most went another way than through the
    interface that was told, or none was: no collective sends less than the textbook's."""
    return moved / textbook if moved > textbook / 2 else 1.0


def timed_once(message: Message, work: torch.Tensor) -> tuple[float, float]:
    """Seconds of a message after a computation, and the bytes that left through the interface, 0 where none is told."""
    run = message.call(work.device)
    before = wire_bytes()
    torch.mm(work, work)
    settle(work.device)
    dist.barrier()
    start = time.perf_counter()
    run()
    settle(work.device)
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds, wire_bytes() - before


@dataclass(frozen=True)
class Message:
    """A collective over all groups of a team, in which a rank sends about `sent` bytes by the textbook."""

    collective: str
    team: Team
    sent: int

    @property
    def block(self) -> int:
        """Float32 numbers of a shard."""
        block = max(1, round(self.sent / WIRE[self.collective](self.team.ranks, 1.0)[1] / 4))
        return max(self.team.ranks, block) if self.collective == "all_reduce" else block

    @property
    def textbook(self) -> float:
        """Bytes that a rank sends by the textbook."""
        return float(WIRE[self.collective](self.team.ranks, 4.0 * self.block)[1])

    def call(self, where: torch.device) -> Callable[[], Any]:
        """What runs it."""
        p, block, group = self.team.ranks, self.block, self.team.group.group_name
        given = torch.ones(block * p if self.collective in ("all_to_all", "reduce_scatter") else block, device=where)
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": lambda: c10d.all_gather_into_tensor(given, p, group),
            "all_reduce": lambda: c10d.all_reduce(given, "sum", group),
            "all_to_all": lambda: c10d.all_to_all_single(given, [block] * p, [block] * p, group),
            "reduce_scatter": lambda: c10d.reduce_scatter_tensor(given, "sum", p, group),
        }
        return lambda: c10d.wait_tensor(calls[self.collective]())


def wire_bytes() -> int:
    """Bytes that left through the interface that gloo was told to use, a rank's share of it; 0 if it was not told."""
    interface = os.environ.get(INTERFACE)
    counter = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
    if not interface or not counter.exists():
        return 0
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return int(counter.read_text()) // sharing


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The line with the least relative errors that holds from some size on, with what smaller messages take below.

    Small messages take about the same time, that of waking threads and peers: a line through all of them would be too
    low for the smallest and the largest, and too high between. Points ascend in bytes.

    >>> fit([(1e3, 2e-3), (1e4, 2e-3), (1e6, 1.1e-2), (2e6, 2.1e-2)])
    Line(start=0.001, rate=100000000.0, least=0.002, traffic=1.0)
    """

    def error(line: Line) -> float:
        return sum((max(line.start + x / line.rate, line.least) / t - 1) ** 2 for x, t in points)

    lines = [Line(*straight(points), 0.0)]
    for flat in range(2, len(points) - 1):
        start, rate = straight(points[flat:])
        least = statistics.median(t for _, t in points[:flat])
        lines.append(Line(start, rate, least if least > start + points[0][0] / rate else 0.0))
    return min(lines, key=error)


def straight(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The line seconds = start + bytes / rate with the least relative errors; the start is not negative.

    >>> straight([(1e3, 2e-5), (1e6, 1.019e-3)])
    (1.9e-05, 1000000000.0)
    """
    # With u = 1 / t and v = x / t: the least squares of 1 - a u - b v.
    u, v = [1 / t for _, t in points], [x / t for x, t in points]
    uu, uv, vv = sum(x * x for x in u), sum(x * y for x, y in zip(u, v)), sum(x * x for x in v)
    start = (sum(u) * vv - sum(v) * uv) / (uu * vv - uv * uv)
    slope = (sum(v) * uu - sum(u) * uv) / (uu * vv - uv * uv)
    if start < 0 or slope <= 0:
        start, slope = 0.0, sum(v) / vv
    return float(f"{start:.12g}"), float(f"{1 / slope:.12g}")


def everyone(mine: Any) -> list[Any]:
    """What every rank gives."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def link_of(found: dict[tuple[str, Team], Line], inside: bool, per_node: int) -> tuple[float, float] | None:
    """Latency of a round, and bandwidth, of the links inside nodes or between them: of the best collective there."""
    lines = [(key, line) for key, line in found.items() if key[1].inside(per_node) == inside]
    if not lines:
        return None
    latency = min(max(line.start, line.least) / WIRE[collective](team.ranks, 1.0)[0] for (collective, team), line in lines)
    reached: dict[tuple[str, int], list[float]] = {}
    for (collective, team), line in lines:
        reached.setdefault((collective, team.ranks), []).append(line.rate * sharing(team, per_node, inside))
    return latency, max(map(statistics.median, reached.values()))


def sharing(team: Team, per_node: int, inside: bool) -> int:
    """How many groups share the link out of a node, as `Mesh.link` has it."""
    return 1 if inside else min(per_node, team.stride)


def rates(found: dict[tuple[str, Team], Line], cluster: Cluster) -> tuple[Rate, ...]:
    """How each collective runs over groups of each size on each link; the median where several teams tell."""
    told: dict[tuple[str, int, str], list[Rate]] = {}
    for (collective, team), line in found.items():
        inside = team.inside(cluster.ranks_per_node)
        link = "intra" if inside else "inter"
        bandwidth = (
            cluster.intra_bandwidth
            if inside
            else cluster.inter_bandwidth / sharing(team, cluster.ranks_per_node, False)
        )
        latency = line.start / WIRE[collective](team.ranks, 1.0)[0]
        least = max(line.start, line.least)  # what a small message takes, however the line was fitted
        rate = Rate(collective, team.ranks, link, latency, line.rate / bandwidth, line.traffic, least)
        told.setdefault((collective, team.ranks, link), []).append(rate)
    return tuple(
        replace(several[0], **{
            name: statistics.median(getattr(rate, name) for rate in several)
            for name in ("latency", "efficiency", "traffic", "least")
        })
        for several in told.values()
    )  # fmt: skip


def memory_of(where: torch.device, per_node: int) -> float:
    """Bytes of one device; on CPUs a rank's share of the machine's."""
    if where.type == "cuda":
        return float(torch.cuda.get_device_properties(where).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node)
