"""A cluster: what a flop, a byte of memory and a byte on a link cost, in seconds, on the machines of a mesh."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sbpc.errors import MeshError, check_kinds, is_name, is_number, read_json, shown
from sbpc.mesh.collectives import ALGORITHMS, CARRIERS, PLACES, Way
from sbpc.mesh.kernels import Device, Shape, kernel_seconds, largest

LINKS = ("intra", "inter")
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
SLOWER = ("attention", "convolution")  # parts of the names of ops that take other times than products of as many flops
UNBOUNDED = ("peak", "memory_bandwidth", "intra_bandwidth", "inter_bandwidth", "memory")  # or infinite, null in JSON
MOST, MOST_TEXT = 1 << 30, 4000  # ranks, and characters of what is told of figures
RANGES = {  # of every figure its unit, the least and the most: wide, but no cost that is made of such figures overflows
    name: limits
    for names, limits in {
        "peak": ("flop/s", 1.0, 1e30),
        "memory": ("bytes", 1.0, 1e30),
        "memory_bandwidth intra_bandwidth inter_bandwidth most": ("bytes/s", 1.0, 1e30),
        "launch intra_latency inter_latency latency least start base intra inter": ("seconds", 0.0, 1e6),
        "wave begin ahead_pair back_pair": ("seconds", 0.0, 1.0),
        "efficiency traffic": ("", 1e-12, 1e12),
        "multiprocessors tile": ("", 1, 1e6),
        "ramp diagonal": ("keys", 0.0, 1e6),
        "cache": ("bytes", 0.0, 1e30),
        "float8 bfloat16 tf32 float32 float64": ("times", 1e-3, 1e3),
        "moving product ahead back": ("", 1e-6, 1.0),
        "hidden": ("", 0.0, 1.0),
        "sharing kernels_beside links_beside cached": ("times", 1.0, 1e6),
        "attention convolution": ("times", 1e-6, 1e6),
    }.items()
    for name in names.split()
}
GPU_PEAK = 1e13  # flop/s


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
    bytes of one device. collectives: where one runs otherwise than in those figures. ways: how the library runs those
    collectives of which `collectives` says nothing: each as it is fastest for the size of a message; without, as
    rings. source: where the figures are from.

    hidden: which part of a kernel's multiplying, moving and starting the longest of them hides: with 1 it takes as
    long as that one, with 0 as all three. All this is so where all ranks compute, and nothing else goes on. sharing:
    how many times as fast one rank computes while no other one does: more than 1 where ranks share cores.
    kernels_beside, links_beside: how many times as long kernels take beside a collective that is on its way, and
    that beside kernels: more than 1 where a processor does both. attention, convolution: how many times as long such
    a kernel takes as a product of as many flops. start: seconds of computing that it costs a rank to start a
    collective that then runs beside kernels. device: what kernels reach by the shape of their work, where that is
    known (`sbpc.mesh.kernels`), and by the type of what is multiplied; without, all types take as long.

    Named clusters (see `Mesh`; `sbpc clusters` lists them) have published figures, for bfloat16 on GPUs, and run
    collectives as NCCL does. Those of NVIDIA's GPUs have a device by published tables of products and of attention,
    and there a collective takes multiprocessors from the kernels beside it (`python -m tests.bench.published` tells
    how far predictions are off). Of the others, data sheets order plans, but no device reaches them. `sbpc profile -o
    cluster.json`, alone or under torchrun, measures yours: products by shape and type, attention by width and length,
    memory by size; of each collective the latency of a round, the rate, and what a small message takes at least. With
    `--links h100` it measures devices alone, one is enough, and takes the links as published.
    `Cluster.load("cluster.json")` reads that file, and so does `--cluster cluster.json`.

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
    ways: tuple[Way, ...] = ()
    device: Device | None = None

    def __post_init__(self) -> None:
        for name in ("name", "source"):
            if not is_name(getattr(self, name), MOST_TEXT):
                raise MeshError(
                    f"cluster {shown(self.name)}: {name} is {shown(getattr(self, name))}\n  It is a text of one line."
                )
        check_count(f"cluster {self.name!r}: ranks_per_node", self.ranks_per_node, 1)
        check_figures(f"cluster {self.name!r}: ", self)
        for name, (kind, word) in PARTS.items():
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(each, kind) for each in value):
                raise MeshError(f"cluster {self.name!r}: {name} is {shown(value)}\n  It is a tuple of {word}s.")
        for rate in self.collectives:
            check_rate(self.name, rate)
        for way in self.ways:
            check_way(self.name, way)
        if not isinstance(self.device, (Device, type(None))):
            raise MeshError(f"cluster {self.name!r}: device is {shown(self.device)}\n  It is a Device or None.")
        if self.device is not None:
            check_figures(f"cluster {self.name!r}: device: ", self.device)

    def __hash__(self) -> int:
        """Of few figures, as meshes are looked up often."""
        return hash((self.name, self.peak, self.intra_bandwidth, self.inter_bandwidth, len(self.collectives)))

    @property
    def has_gpus(self) -> bool:
        """Whether devices are GPUs, of which none multiplies as slowly as CPUs do."""
        return self.peak >= GPU_PEAK

    @property
    def taken(self) -> float:
        """Which part of a rank's device a collective takes away from the kernels beside it."""
        return 1.0 - 1.0 / self.kernels_beside

    @property
    def fastest(self) -> float:
        """The most flop/s of any kernel, by which nothing is told to take longer than it may."""
        device = self.device
        return self.peak * (1.0 if device is None else device.fastest)

    def kernel_seconds(
        self, op: str, flops: Any, bytes_moved: Any, shape: Shape | None = None, rates: Sequence[Any] = ()
    ) -> Any:
        """Returns the seconds of a call of an op; arguments as those of the function `kernel_seconds`. shape: that of
        its work, where the time depends on it. rates: peak, memory bandwidth and launch, by default the cluster's."""
        work = flops * next((getattr(self, name) for name in SLOWER if name in op), 1.0)
        peak, bandwidth, launch = rates or (self.peak, self.memory_bandwidth, self.launch)
        if self.device is not None:
            return self.device.seconds(work, bytes_moved, shape, (peak, bandwidth, launch), self.hidden)
        return kernel_seconds(work, bytes_moved, peak, bandwidth, launch, self.hidden)

    def rate(self, collective: str, ranks: int, link: str) -> Rate:
        """Returns how a collective runs over groups of `ranks` on `link`: as given for this link and the nearest
        group size."""

        def distance(rate: Rate) -> tuple[float, bool]:
            return (math.inf if rate.ranks is None else abs(math.log(rate.ranks / ranks)), rate.link is None)

        return min(self.rates(collective, link), key=distance, default=Rate(collective))

    def rates(self, collective: str, link: str) -> list[Rate]:
        """Returns what was measured of a collective on `link`, or else of what sends for it."""
        found = [rate for rate in self.collectives if rate.collective == collective and rate.link in (link, None)]
        return found or (self.rates(CARRIERS[collective], link) if collective in CARRIERS else [])

    def figures(self) -> dict[str, Any]:
        """Returns everything as JSON values; infinity is null, and what a rate or a way leaves open is left out."""
        values = {name: None if value == math.inf else value for name, value in asdict(self).items()}
        for part in PARTS:
            rows = map(asdict, getattr(self, part))
            values[part] = [
                {name: value for name, value in row.items() if value not in (None, math.inf)} for row in rows
            ]
        if self.device is not None:
            values["device"] = {name: value for name, value in asdict(self.device).items() if value is not None}
        return values

    @classmethod
    def of(cls, figures: Any, what: str) -> Cluster:
        """The cluster that `figures` describe. Raises MeshError, which begins with `what`, for missing or bad ones."""
        given = keyed(cls, figures, what)
        given |= {name: math.inf for name, value in given.items() if value is None and name in UNBOUNDED}
        for name, (kind, word) in PARTS.items():
            rows = given.get(name, ())
            if not isinstance(rows, (tuple, list)):
                raise MeshError(f"{what}: {name} is {rows!r}\n  It is a list of {word}s, each a JSON object.")
            given[name] = tuple(kind(**keyed(kind, row, f"{what}: a {word} of {name}")) for row in rows)
        if given.get("device") is not None:
            given["device"] = Device(**keyed(Device, given["device"], f"{what}: device"))
        try:
            return cls(**given)
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


def check_figures(what: str, given: Cluster | Rate | Way | Device) -> None:
    """Raise MeshError, which begins with `what`, unless every figure is a number in its range, or left out where it
    may be."""
    for name, value in vars(given).items():
        if name not in RANGES or (value is None and getattr(type(given), name, ...) is None):
            continue
        unit, least, most = RANGES[name]
        endless = name in UNBOUNDED or getattr(type(given), name, None) == math.inf
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
    if rate.collective not in (*COLLECTIVES, *CARRIERS):
        raise MeshError(f"{what}a rate is given\n  The collectives are {', '.join(COLLECTIVES)}.")
    if rate.link not in (*LINKS, None):
        raise MeshError(f"{what}link is {rate.link!r}\n  It is {' or '.join(LINKS)}, or left out for both.")
    if rate.ranks is not None:
        check_count(f"{what}ranks", rate.ranks, 2)
    check_figures(what, rate)


def check_way(cluster: str, way: Way) -> None:
    """Raise MeshError unless a way makes sense."""
    what = f"cluster {cluster!r}: of a way, "
    for name, known in (("algorithm", ALGORITHMS), ("place", PLACES)):
        if not isinstance(value := getattr(way, name), str) or value not in known:
            raise MeshError(f"{what}{name} is {shown(value)}\n  Known are {', '.join(known)}.")
    if not is_name(way.protocol):
        raise MeshError(f"{what}protocol is {shown(way.protocol)}\n  It is a text of one line.")
    check_figures(what, way)


def read_named(path: Path) -> Cluster:
    """Returns the cluster of a file of this package: figures, and by names of figures where they are from."""
    read = json.loads(path.read_text())
    source = " | ".join(f"{names}: {text}" for names, text in read["sources"].items())
    return Cluster.of(read["figures"] | {"name": path.stem, "source": source}, path.name)


PARTS: dict[str, tuple[type, str]] = {"collectives": (Rate, "rate"), "ways": (Way, "way")}
CLUSTERS = {path.stem: read_named(path) for path in sorted(Path(__file__).with_name("clusters").glob("*.json"))}


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
