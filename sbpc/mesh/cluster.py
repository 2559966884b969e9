"""A cluster: what a flop, a byte of memory and a byte on a link cost, in seconds, on the machines of a mesh."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sbpc.errors import MeshError, check_kinds, is_name, is_number, read_json, shown
from sbpc.mesh.kernels import DEVICES, MEASURED, Attention, Device, Product, kernel_seconds, largest

LINKS = ("intra", "inter")
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
SLOWER = ("attention", "convolution")  # parts of the names of ops that take other times than products of as many flops
UNBOUNDED = ("peak", "memory_bandwidth", "intra_bandwidth", "inter_bandwidth", "memory")  # or infinite, null in JSON
MOST = 1 << 30  # ranks
RANGES = {  # of every figure its unit, the least and the most: wide, but no cost that is made of such figures overflows
    name: limits
    for names, limits in {
        "peak": ("flop/s", 1.0, 1e30),
        "memory": ("bytes", 1.0, 1e30),
        "memory_bandwidth intra_bandwidth inter_bandwidth": ("bytes/s", 1.0, 1e30),
        "launch intra_latency inter_latency latency least start": ("seconds", 0.0, 1e6),
        "wave begin ahead_pair back_pair": ("seconds", 0.0, 1.0),
        "efficiency traffic": ("", 1e-12, 1e12),
        "multiprocessors": ("", 1, 1e6),
        "moving product ahead back": ("", 1e-6, 1.0),
        "hidden": ("", 0.0, 1.0),
        "sharing kernels_beside links_beside": ("times", 1.0, 1e6),
        "attention convolution": ("times", 1e-6, 1e6),
    }.items()
    for name in names.split()
}


@dataclass(frozen=True)
class Rate:
    """How one collective runs over groups of `ranks` ranks on one link; None: over groups of any size, on either link.

    latency: seconds a round, None for the link's own. efficiency: bytes that the textbook's ring sends, per second,
    as a fraction of the link's bandwidth. traffic: bytes on the wire for each byte that the textbook's ring sends.
    least: seconds that it takes at least, however few its bytes and, unlike the latency, however many its ranks.
    """

    collective: str
    ranks: int | None = None
    link: str | None = None
    latency: float | None = None
    efficiency: float = 1.0
    traffic: float = 1.0
    least: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Figures of one device and of its links; see `Mesh` for who uses which link.

    peak: flop/s of one device. memory_bandwidth: bytes/s of its memory. launch: seconds, the least that a kernel
    takes. ranks_per_node: how many ranks share a node. intra_* and inter_*: seconds of latency for one round of a
    collective, and bytes/s: what one rank sends inside a node, and what one *node* sends to the others. memory:
    bytes of one device. collectives: where one runs otherwise than in those figures. source: where the figures are
    from.

    hidden: which part of a kernel's multiplying, moving and starting the longest of them hides: with 1 it takes as
    long as that one, with 0 as all three. All this is so where all ranks compute, and nothing else goes on. sharing:
    how many times as fast one rank computes while no other one does: more than 1 where ranks share cores.
    kernels_beside, links_beside: how many times as long kernels take beside a collective that is on its way, and
    that beside kernels: more than 1 where a processor does both. attention, convolution: how many times as long such
    a kernel takes as a product of as many flops. start: seconds of computing that it costs a rank to start a
    collective that then runs beside kernels. device: what kernels reach by the shape of their work, where that is
    known (`sbpc.mesh.kernels`); where it is, peak and memory_bandwidth are the data sheet's, and `hidden` is 1.

    Named clusters (see `Mesh`) have published figures, for bfloat16 on GPUs. Those of NVIDIA's GPUs have a device by
    published tables of products and of attention, and there a collective takes multiprocessors from the kernels
    beside it (`python -m tests.bench.published` tells how far predictions are off). Of the others data sheets order
    plans, but no device reaches them. `sbpc profile -o cluster.json`, alone or under torchrun, measures yours: of
    each collective the latency of a round, the rate, and what a small message takes at least. With `--links h100` it
    measures devices alone, one is enough, and takes the links as published. `Cluster.load("cluster.json")` reads that
    file, and so does `--cluster cluster.json`.

    >>> cluster = Cluster("two nodes", 100e12, 1e12, 4e-6, 8, 3e-6, 100e9, 14e-6, 25e9)
    >>> cluster.ranks_per_node, cluster.inter_bandwidth
    (8, 25000000000.0)

    Raises MeshError for a figure that is none.
    """

    name: str
    peak: float
    memory_bandwidth: float
    launch: float
    ranks_per_node: int
    intra_latency: float
    intra_bandwidth: float
    inter_latency: float
    inter_bandwidth: float
    memory: float = math.inf
    collectives: tuple[Rate, ...] = ()
    source: str = ""
    hidden: float = 1.0
    sharing: float = 1.0
    kernels_beside: float = 1.0
    links_beside: float = 1.0
    attention: float = 1.0
    convolution: float = 1.0
    start: float = 0.0
    device: Device | None = None

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not is_name(getattr(self, name)):
                raise MeshError(
                    f"cluster {shown(self.name)}: {name} is {shown(getattr(self, name))}\n  It is a text of one line."
                )
        check_count(f"cluster {self.name!r}: ranks_per_node", self.ranks_per_node, 1)
        check_figures(f"cluster {self.name!r}: ", self)
        if not isinstance(self.collectives, tuple) or not all(isinstance(rate, Rate) for rate in self.collectives):
            what = f"cluster {self.name!r}: collectives is {shown(self.collectives)}"
            raise MeshError(f"{what}\n  It is a tuple of rates.")
        for rate in self.collectives:
            check_rate(self.name, rate)
        if not isinstance(self.device, (Device, type(None))):
            raise MeshError(f"cluster {self.name!r}: device is {shown(self.device)}\n  It is a Device or None.")
        if self.device is not None:
            check_figures(f"cluster {self.name!r}: device: ", self.device)

    @property
    def taken(self) -> float:
        """Which part of a rank's device a collective takes away from the kernels beside it."""
        return 1.0 - 1.0 / self.kernels_beside

    @property
    def fastest(self) -> float:
        """The most flop/s of any kernel, by which nothing is told to take longer than it may."""
        device = self.device
        return self.peak * (1.0 if device is None else max(device.product, device.ahead, device.back))

    def kernel_seconds(
        self, op: str, flops: Any, bytes_moved: Any, shape: Product | Attention | None = None, rates: Sequence[Any] = ()
    ) -> Any:
        """Returns the seconds of a call of an op; arguments as those of the function `kernel_seconds`. shape: that of
        its work, where the time depends on it. rates: peak, memory bandwidth and launch, by default the cluster's."""
        work = flops * next((getattr(self, name) for name in SLOWER if name in op), 1.0)
        peak, bandwidth, launch = rates or (self.peak, self.memory_bandwidth, self.launch)
        if self.device is not None:
            return self.device.seconds(work, bytes_moved, shape, (peak, bandwidth, launch))
        return kernel_seconds(work, bytes_moved, peak, bandwidth, launch, self.hidden)

    def rate(self, collective: str, ranks: int, link: str) -> Rate:
        """Returns how a collective runs over groups of `ranks` on `link`: as given for this link and the nearest
        group size."""
        fitting = [rate for rate in self.collectives if rate.collective == collective and rate.link in (link, None)]

        def distance(rate: Rate) -> tuple[float, bool]:
            return (math.inf if rate.ranks is None else abs(math.log(rate.ranks / ranks)), rate.link is None)

        return min(fitting, key=distance, default=Rate(collective))

    def figures(self) -> dict[str, Any]:
        """Returns everything as JSON values; infinity is null, and what a rate leaves open is left out."""
        values = {name: None if value == math.inf else value for name, value in asdict(self).items()}
        rates = [{name: value for name, value in asdict(r).items() if value is not None} for r in self.collectives]
        return values | {"collectives": rates}

    @classmethod
    def of(cls, figures: Any, what: str) -> Cluster:
        """The cluster that `figures` describe. Raises MeshError, which begins with `what`, for missing or bad ones."""
        given = keyed(cls, figures, what)
        rates = given.get("collectives", ())
        if not isinstance(rates, (tuple, list)):
            raise MeshError(f"{what}: collectives is {rates!r}\n  It is a list of rates, each with its collective.")
        read = tuple(Rate(**keyed(Rate, rate, f"{what}: a rate of collectives")) for rate in rates)
        device = given.get("device")
        device = None if device is None else Device(**keyed(Device, device, f"{what}: device"))
        open_ended = {name: math.inf for name, value in given.items() if value is None and name in UNBOUNDED}
        try:
            return cls(**(given | open_ended | {"collectives": read, "device": device}))
        except MeshError as error:
            raise MeshError(f"{what}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes the figures as JSON; infinity is written as null."""
        check_kinds(MeshError, path=(path, "a path"))
        Path(path).write_text(json.dumps(self.figures(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Returns the cluster in a file that `save` or `sbpc profile` wrote. Raises MeshError for a figure that is
        missing or bad."""
        check_kinds(MeshError, path=(path, "a path"))
        try:
            figures = read_json(Path(path).read_text())
        except (OSError, ValueError) as error:
            todo = "Write one with Cluster.save or `sbpc profile`."
            raise MeshError(f"cluster file {path}: {error}\n  {todo}") from error
        return cls.of(figures, f"cluster file {path}")


def keyed(cls: type, figures: Any, what: str) -> dict[str, Any]:
    """The figures by the names of the fields of `cls`. Raises MeshError for missing and unknown ones."""
    known = [field.name for field in fields(cls)]
    needed = [name for name in known if name not in vars(cls)]  # a field with a default is an attribute of its class
    if not isinstance(figures, Mapping):
        raise MeshError(f"{what} is {figures!r:.60}\n  It is a JSON object with {', '.join(needed)}.")
    missing, unknown = [n for n in needed if n not in figures], [n for n in figures if n not in known]
    if missing or unknown:
        faults = [("lacks", missing), ("has unknown", unknown)]
        wrong = " and ".join(f"{word} {', '.join(map(str, names))}" for word, names in faults if names)
        more = [name for name in known if name not in needed]
        raise MeshError(f"{what} {wrong}\n  It needs {', '.join(needed)}; it may have {', '.join(more)}.")
    return dict(figures)


def check_figures(what: str, given: Cluster | Rate | Device) -> None:
    """Raise MeshError, which begins with `what`, unless every figure is a number in its range, or left out where it
    may be."""
    for name, value in vars(given).items():
        if name not in RANGES or (value is None and getattr(type(given), name, ...) is None):
            continue
        unit, least, most = RANGES[name]
        endless = name in UNBOUNDED
        if not is_number(value, (int, float)) or not (least <= value <= most or (endless and value == math.inf)):
            limits = f"from {least:g} to {most:g} {unit}".rstrip() + ", or infinite" * endless
            raise MeshError(f"{what}{name} is {shown(value)}\n  It is a number {limits}.")


def check_count(what: str, value: Any, least: int) -> None:
    """Raise MeshError unless a value is an integer from `least` to MOST."""
    if not is_number(value, int) or not least <= value <= MOST:
        raise MeshError(f"{what} is {shown(value)}\n  It is an integer from {least} to {MOST:,}.")


def check_rate(cluster: str, rate: Rate) -> None:
    """Raise MeshError unless a rate makes sense."""
    what = f"cluster {cluster!r}: of {rate.collective}, "
    if rate.collective not in COLLECTIVES:
        raise MeshError(f"{what}a rate is given\n  The collectives are {', '.join(COLLECTIVES)}.")
    if rate.link not in (*LINKS, None):
        raise MeshError(f"{what}link is {rate.link!r}\n  It is {' or '.join(LINKS)}, or left out for both.")
    if rate.ranks is not None:
        check_count(f"{what}ranks", rate.ranks, 2)
    check_figures(what, rate)


NCCL = "latencies: NCCL's own tuning table (ring, simple protocol); launch floor: estimated"
CHANNELS = 24  # of NCCL inside a node of 8 A100 or H100, each on a multiprocessor (NVIDIA/nccl-tests, issue 100)


def on_gpus(name: str) -> dict[str, Any]:
    """Figures of kernels of a named cluster. Beside a collective they have the multiprocessors that it leaves."""
    device = DEVICES[name]
    return {"device": device, "kernels_beside": device.multiprocessors / (device.multiprocessors - CHANNELS)}


CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster("ideal", 1e12, math.inf, 0.0, MOST, 0.0, 1e12, 0.0, 1e12, source="no machine: a byte costs a flop"),
        Cluster(
            "a100",
            312e12,
            2.039e12,
            4e-6,
            8,
            3.4e-6,
            300e9,
            14e-6,
            200e9,
            memory=80e9,
            source="NVIDIA DGX A100 80GB datasheet: bf16 dense, HBM2e, NVLink 3 in one direction, "
            f"8 x 200 Gbit/s InfiniBand per node; {NCCL}; {MEASURED['a100']}",
            **on_gpus("a100"),
        ),
        Cluster(
            "h100",
            989e12,
            3.35e12,
            4e-6,
            8,
            3.4e-6,
            450e9,
            14e-6,
            400e9,
            memory=80e9,
            source="NVIDIA DGX H100 datasheet: bf16 dense, HBM3, NVLink 4 in one direction, "
            f"8 x 400 Gbit/s InfiniBand per node; {NCCL}; {MEASURED['h100']}",
            **on_gpus("h100"),
        ),
        Cluster(
            "h200",
            989e12,
            4.8e12,
            4e-6,
            8,
            3.4e-6,
            450e9,
            14e-6,
            400e9,
            memory=141e9,
            source="NVIDIA DGX H200 datasheet: bf16 dense, HBM3e, NVLink 4 in one direction, "
            f"8 x 400 Gbit/s InfiniBand per node; {NCCL}; {MEASURED['h200']}",
            **on_gpus("h200"),
        ),
        Cluster(
            "b200",
            2250e12,
            8e12,
            4e-6,
            8,
            3.4e-6,
            900e9,
            14e-6,
            400e9,
            memory=180e9,
            source="NVIDIA DGX B200 datasheet: bf16 dense, HBM3e, NVLink 5 in one direction, "
            f"8 x 400 Gbit/s InfiniBand per node; {NCCL}; {MEASURED['b200']}",
            **on_gpus("b200"),
        ),
        Cluster(
            "perlmutter",
            312e12,
            1.555e12,
            4e-6,
            4,
            3.4e-6,
            300e9,
            14e-6,
            100e9,
            memory=40e9,
            source="NERSC, Perlmutter architecture: 4 x A100 40GB (bf16 dense, HBM2), 12 links of NVLink 3 at 25 GB/s, "
            f"4 x Slingshot 11 at 200 Gbit/s per node; {NCCL}; {MEASURED['perlmutter']}",
            **on_gpus("perlmutter"),
        ),
        Cluster(
            "frontier",
            191.5e12,
            1.6e12,
            4e-6,
            8,
            5.7e-6,
            50e9,
            14e-6,
            100e9,
            memory=64e9,
            source="OLCF, Frontier user guide: 8 dies (half an MI250X: bf16, HBM2e) per node, the slowest Infinity "
            "Fabric "
            "link of a ring through all 8 (50 GB/s of 50 to 200), 4 x Slingshot 11 at 200 Gbit/s per node; "
            "latencies and launch floor: as for others, PCIe and network",
        ),
        Cluster(
            "workstation",
            154.8e12,
            768e9,
            4e-6,
            4,
            5.7e-6,
            31.5e9,
            14e-6,
            1.25e9,
            memory=48e9,
            source="NVIDIA RTX A6000 datasheet: bf16 dense, GDDR6; 4 of them on PCIe 4.0 x16, without NVLink, "
            f"10 Gbit/s Ethernet outside; {NCCL}",
        ),
        Cluster(
            "ethernet",
            0.97e12,
            51.2e9,
            5e-6,
            1,
            50e-6,
            118.7e6,
            50e-6,
            118.7e6,
            memory=32e9,
            source="one 8-core desktop per rank (AMD Ryzen 7 5800X: 8 x 3.8 GHz x 32 flops in float32; DDR4-3200, two "
            "channels), 1 Gbit/s Ethernet (1,460 of 1,538 bytes a frame); latency and launch floor: estimated",
        ),
    )
}


def named_cluster(name: str) -> Cluster:
    """The cluster called `name`. Raises MeshError if there is none."""
    if not isinstance(name, str) or name not in CLUSTERS:
        todo = f"Known are {', '.join(CLUSTERS)}; load others with Cluster.load."
        raise MeshError(f"no cluster is called {shown(name)}\n  {todo}")
    return CLUSTERS[name]


def collective_seconds(rounds: Any, bytes_sent: Any, latency: Any, bandwidth: Any, least: Any) -> Any:
    """Seconds of one collective; every argument a number or a sympy expression."""
    found = rounds * latency + bytes_sent / bandwidth
    return largest(found, least) if least else found
