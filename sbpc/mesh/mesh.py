"""A mesh: ranks arranged along named axes, and the cluster they run on."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sbpc.errors import MeshError
from sbpc.mesh.cluster import Cluster, Rate, named_cluster

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def in_formulas(name: str) -> bool:
    """Whether the figures of clusters are called so in formulas of costs."""
    return name in ("peak", "memory_bandwidth", "launch") or name.startswith(("latency_", "bandwidth_", "least_"))


class Mesh:
    """`Mesh(data=2, tensor=4)`: axes outermost first, ranks row-major, so the last axis is the innermost.

    `cluster` is a Cluster, the name of one, or None for "ideal" (a byte costs as much as a flop, nothing else costs).

    >>> mesh = Mesh(data=2, tensor=4)
    >>> mesh, mesh.ranks, mesh.coordinates(5), mesh.rank((1, 1))
    (Mesh(data=2, tensor=4), 8, (1, 1), 5)

    Raises MeshError for no axes, more than 4 of them, or a size that is not a positive integer, or too many ranks.
    """

    def __init__(self, *, cluster: Cluster | str | None = None, **axes: int) -> None:
        if not 1 <= len(axes) <= 4:
            raise MeshError(f"a mesh of {len(axes)} axes\n  Give 1 to 4 axes, as in Mesh(data=2, tensor=4).")
        for name, size in axes.items():
            if not name.isidentifier() or in_formulas(name):
                raise MeshError(f"an axis is called {name!r}\n  Give it a word that formulas of costs do not use, such as 'data'.")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"axis {name!r} has size {size!r}\n  The size of an axis is an integer from 1 on.")
        if math.prod(axes.values()) > 1 << 20:
            raise MeshError(f"a mesh of {math.prod(axes.values()):,} ranks\n  There may be {1 << 20:,} at most.")
        self.axes = tuple(axes)
        self.sizes = tuple(axes.values())
        self.cluster = cluster if isinstance(cluster, Cluster) else named_cluster("ideal" if cluster is None else cluster)

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Where `rank` stands on each axis."""
        found = []
        for size in reversed(self.sizes):
            rank, at = divmod(rank, size)
            found.append(at)
        return tuple(reversed(found))

    def rank(self, coordinates: Sequence[int]) -> int:
        """The rank that stands at `coordinates`."""
        return functools.reduce(lambda total, item: total * item[0] + item[1], zip(self.sizes, coordinates), 0)

    def axis(self, name: str) -> int:
        """The number of the axis called `name`. Raises MeshError if there is none."""
        if name not in self.axes:
            raise MeshError(f"the mesh has no axis {name!r}\n  Its axes are {', '.join(self.axes)}.")
        return self.axes.index(name)

    def runs(self) -> list[tuple[int, ...]]:
        """Returns every run of neighbouring axes, which are the axes over which programs may communicate.

        >>> Mesh(data=2, tensor=4).runs()
        [(0,), (0, 1), (1,)]
        """
        count = len(self.axes)
        return [tuple(range(first, last)) for first in range(count) for last in range(first + 1, count + 1)]

    def groups(self, axes: Sequence[int]) -> list[list[int]]:
        """The groups of ranks that differ only along `axes` (numbers, ascending), each row-major, by first rank."""
        grouped: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(itertools.product(*map(range, self.sizes))):
            grouped.setdefault(tuple(c for axis, c in enumerate(at) if axis not in axes), []).append(rank)
        return list(grouped.values())

    def link(self, axes: Sequence[int], collective: str) -> tuple[float, float, float]:
        """Of one rank in a collective over `axes` (neighbours): latency of a round (seconds), bandwidth (bytes/s), and
        the seconds that the collective takes at least.

        Groups that leave a node share its links: with `inner` ranks between two neighbours of a group, that many
        groups (at most a node full) cross at once.
        """
        cluster, rate = self.cluster, self.rate(axes, collective)
        latency, bandwidth = cluster.intra_latency, cluster.intra_bandwidth
        if not self.inside(axes):
            sharing = min(cluster.ranks_per_node, math.prod(self.sizes[max(axes) + 1 :]))
            latency, bandwidth = cluster.inter_latency, cluster.inter_bandwidth / sharing
        least = 0.0 if all(self.sizes[at] == 1 for at in axes) else rate.least
        return latency if rate.latency is None else rate.latency, bandwidth * rate.efficiency, least

    def inside(self, axes: Sequence[int]) -> bool:
        """Whether the groups over `axes` stay inside a node."""
        return math.prod(self.sizes[min(axes) :]) <= self.cluster.ranks_per_node

    def rate(self, axes: Sequence[int], collective: str) -> Rate:
        """What the cluster says of a collective over `axes`."""
        ranks = math.prod(self.sizes[at] for at in axes)
        return self.cluster.rate(collective, ranks, "intra" if self.inside(axes) else "inter")

    def key(self, axes: Sequence[int]) -> str:
        """The name of one axis or of several merged ones: "data", "data+tensor"."""
        return "+".join(self.axes[at] for at in axes)

    def group_name(self, axes: Sequence[int]) -> str:
        """The name that programs give to the groups over some axes; bound to process groups at load.

        It holds the shape of the mesh, so that plans for different meshes live in one process.
        """
        return (
            "sbpc::" + ",".join(f"{name}={size}" for name, size in zip(self.axes, self.sizes)) + "::" + self.key(axes)
        )

    def device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """The torch DeviceMesh of the same axes over the ranks of the default process group."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(
            device_type or ("cuda" if torch.cuda.is_available() else "cpu"), self.sizes, mesh_dim_names=self.axes
        )

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, cluster: Cluster | str | None = None) -> Mesh:
        """The mesh with the axes of a torch DeviceMesh; unnamed dims are called axis0, axis1, ..."""
        names = mesh.mesh_dim_names or tuple(f"axis{at}" for at in range(mesh.mesh.dim()))
        if mesh.mesh.flatten().tolist() != list(range(mesh.mesh.numel())):
            raise MeshError(
                f"the device mesh holds the ranks {mesh.mesh.tolist()}\n  sbpc needs ranks 0, 1, ... in row-major order."
            )
        return cls(cluster=cluster, **dict(zip(names, mesh.mesh.shape)))

    def __repr__(self) -> str:
        cluster = "" if self.cluster.name == "ideal" else f", cluster={self.cluster.name!r}"
        return "Mesh(" + ", ".join(f"{name}={size}" for name, size in zip(self.axes, self.sizes)) + cluster + ")"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and (self.axes, self.sizes, self.cluster) == (
            other.axes,
            other.sizes,
            other.cluster,
        )

    def __hash__(self) -> int:
        return hash((self.axes, self.sizes, self.cluster))
