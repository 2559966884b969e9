"""A cluster: what a flop, a byte of memory and a byte on a link cost, in seconds, on the machines of a mesh."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from sbpc.errors import MeshError


@dataclass(frozen=True)
class Cluster:
    """Figures of one device and of its links; see `Mesh` for who uses which link.

    peak: flop/s of one device. memory_bandwidth: bytes/s of its memory. launch: seconds, the least that a kernel
    takes. ranks_per_node: how many ranks share a node. intra_* and inter_*: seconds of latency for one round of a
    collective, and bytes/s that one rank sends, inside a node and that one *node* sends to the others. efficiency: by
    collective, the fraction of the bandwidth that it reaches.
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
    efficiency: tuple[tuple[str, float], ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "efficiency", "source"):
                continue
            least = 0.0 if field.name.endswith(("latency", "launch")) else 1e-30
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= least:
                raise MeshError(
                    f"cluster {self.name!r}: {field.name} is {value!r}\n  It is a number, {'not negative' if least == 0 else 'positive'}."
                )
        for collective, fraction in self.efficiency:
            if not isinstance(fraction, (int, float)) or not fraction > 0:
                raise MeshError(
                    f"cluster {self.name!r}: the efficiency of {collective} is {fraction!r}\n  It is a positive number."
                )

    def save(self, path: str | Path) -> None:
        """Write the figures as JSON; infinity is written as null."""
        figures = {k: None if v == math.inf else v for k, v in asdict(self).items()} | {
            "efficiency": dict(self.efficiency)
        }
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read what `save` wrote. Raises MeshError for a file that lacks a figure or holds a bad one."""
        try:
            figures = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise MeshError(f"cluster file {path}: {error}\n  Write one with Cluster.save.") from error
        known = {field.name for field in fields(cls)}
        needed = known - {"memory", "efficiency", "source"}
        if not isinstance(figures, dict) or not needed <= figures.keys() or not figures.keys() <= known:
            wrong = sorted(needed ^ (figures.keys() & needed)) if isinstance(figures, dict) else ["a JSON object"]
            extra = sorted(figures.keys() - known) if isinstance(figures, dict) else []
            raise MeshError(
                f"cluster file {path}: missing {wrong}, unknown {extra}\n  It needs {', '.join(sorted(needed))}."
            )
        figures = {k: math.inf if v is None else v for k, v in figures.items()}
        efficiency = figures.get("efficiency") or {}
        if not isinstance(efficiency, dict):
            raise MeshError(f"cluster file {path}: efficiency is {efficiency!r}\n  It maps a collective to a fraction.")
        return cls(**(figures | {"efficiency": tuple(sorted(efficiency.items()))}))


CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        Cluster("ideal", 1e12, math.inf, 0.0, 1 << 30, 0.0, 1e12, 0.0, 1e12, source="no machine: a byte costs a flop"),
        Cluster(
            "h100", 989e12, 3.35e12, 4e-6, 8, 3e-6, 450e9, 8e-6, 400e9, memory=80e9,
            source="NVIDIA H100 SXM datasheet (bf16 dense, HBM3, NVLink 4, one direction), 8 x 400 Gbit/s per DGX node",
        ),
    )
}  # fmt: skip


def named_cluster(name: str) -> Cluster:
    """The cluster called `name`. Raises MeshError if there is none."""
    if name not in CLUSTERS:
        raise MeshError(
            f"no cluster is called {name!r}\n  Known are {', '.join(CLUSTERS)}; load others with Cluster.load."
        )
    return CLUSTERS[name]
