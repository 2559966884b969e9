"""A mesh: ranks arranged along named axes, and the cluster they run on."""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

from sbpc.errors import MeshError, shown
from sbpc.mesh.cluster import Cluster, Rate, named_cluster
from sbpc.mesh.collectives import ALONE, INSIDE, TOGETHER, WIRE, Lines, Way, ceil_div, envelope, largest
from sbpc.mesh.routing import Routing
from sbpc.mesh.states import Axes, Numbers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def in_formulas(name: str) -> bool:
    """Whether the figures of clusters are called so in formulas of costs."""
    return name in ("peak", "memory_bandwidth", "launch") or name.startswith(("latency_", "bandwidth_", "least_"))


class Mesh:
    """Ranks in a grid of named axes: `Mesh(data=2, tensor=4)`.

    Axes are given outermost first and ranks are row-major, so the last axis is the innermost and has the fastest
    links. The names mean nothing to the solver: what you call `data` may well serve tensor parallelism, if that is
    cheaper; pins decide where you want to. cluster: what computing and sending cost; a `Cluster`, the name of one
    ("a100", "h100", "h200", "b200", "perlmutter", "frontier", "workstation", "ethernet"), or None for "ideal". There a
    byte costs as much as a flop and nothing else costs: it shows what a plan can do, and predicts no real machine.

    >>> mesh = Mesh(data=2, tensor=4)
    >>> mesh, mesh.ranks, mesh.coordinates(5), mesh.rank((1, 1))
    (Mesh(data=2, tensor=4), 8, (1, 1), 5)

    Raises MeshError for no axes, more than 4 of them, a size that is not a positive integer, or too many ranks.
    """

    def __init__(self, *, cluster: Cluster | str | None = None, **axes: int) -> None:
        if not 1 <= len(axes) <= 4:
            raise MeshError(f"a mesh of {len(axes)} axes\n  Give 1 to 4 axes, as in Mesh(data=2, tensor=4).")
        for name, size in axes.items():
            if not name.isidentifier() or in_formulas(name):
                todo = "Give it a word that formulas of costs do not use, such as 'data'."
                raise MeshError(f"an axis is called {name!r}\n  {todo}")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"axis {name!r} has size {shown(size)}\n  The size of an axis is an integer from 1 on.")
        if math.prod(axes.values()) > 1 << 20:
            raise MeshError(f"a mesh of {math.prod(axes.values()):,} ranks\n  There may be {1 << 20:,} at most.")
        self.axes = tuple(axes)
        self.sizes = tuple(axes.values())
        cluster = "ideal" if cluster is None else cluster
        self.cluster = cluster if isinstance(cluster, Cluster) else named_cluster(cluster)
        self.routing = Routing()

    def like(self, cluster: Cluster, **axes: int) -> Mesh:
        """Returns a mesh with another cluster, of these axes or of the same ones."""
        made = Mesh(cluster=cluster, **(axes or dict(zip(self.axes, self.sizes))))
        made.routing = self.routing
        return made

    def routed(self, routing: Routing) -> Mesh:
        """Returns the same mesh where shares of experts' rows are so uneven, which is no part of what it equals."""
        made = self.like(self.cluster)
        made.routing = routing
        return made

    @property
    def ranks(self) -> int:
        """How many ranks the mesh has."""
        return math.prod(self.sizes)

    def coordinates(self, rank: int) -> Axes:
        """Returns where `rank` stands on each axis."""
        found = []
        for size in reversed(self.sizes):
            rank, at = divmod(rank, size)
            found.append(at)
        return tuple(reversed(found))

    def rank(self, coordinates: Numbers) -> int:
        """Returns the rank that stands at `coordinates`."""
        return functools.reduce(lambda total, item: total * item[0] + item[1], zip(self.sizes, coordinates), 0)

    def without(self, axis: str | None) -> Mesh:
        """Returns the mesh of one stage where stages are along an axis: all others, or one rank; without an axis the
        whole mesh.

        Raises MeshError if there is no such axis.
        """
        if axis is None:
            return self
        at = self.axis(axis)
        sizes = {name: size for number, (name, size) in enumerate(zip(self.axes, self.sizes)) if number != at}
        return self.like(self.cluster, **(sizes or {axis: 1}))

    def axis(self, name: str) -> int:
        """Returns the number of the axis called `name`. Raises MeshError if there is none."""
        if not isinstance(name, str) or name not in self.axes:
            raise MeshError(f"the mesh has no axis {shown(name)}\n  Its axes are {', '.join(self.axes)}.")
        return self.axes.index(name)

    def runs(self) -> list[Axes]:
        """Returns every run of neighbouring axes, as numbers: a collective goes over one of them.

        >>> Mesh(data=2, tensor=4).runs()
        [(0,), (0, 1), (1,)]
        """
        ends = itertools.combinations(range(len(self.axes) + 1), 2)
        return [tuple(range(first, last)) for first, last in ends]

    def groups(self, axes: Numbers) -> list[list[int]]:
        """Returns the groups of ranks that differ only along `axes` (numbers, ascending), each row-major, by first
        rank.

        >>> Mesh(data=2, tensor=2).groups((0,))
        [[0, 2], [1, 3]]
        """
        grouped: dict[Axes, list[int]] = {}
        for rank, at in enumerate(itertools.product(*map(range, self.sizes))):
            grouped.setdefault(tuple(c for axis, c in enumerate(at) if axis not in axes), []).append(rank)
        return list(grouped.values())

    def link(self, axes: Numbers, collective: str) -> tuple[float, float, float]:
        """Returns, for one rank in a collective over `axes` (neighbours) that runs as a ring: seconds of latency of a
        round, bytes/s, and the seconds that the collective takes at least.

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

    def ways(self, axes: Numbers, collective: str) -> list[Way]:
        """Returns the ways that the cluster's library has for a collective over `axes`: none where it runs as one
        ring, or where it was measured."""
        inside, cluster = self.inside(axes), self.cluster
        if not cluster.ways or cluster.rates(collective, "intra" if inside else "inter"):
            return []
        place = INSIDE if inside else ALONE if self.neighbours(axes) == 1 else TOGETHER
        return [way for way in cluster.ways if way.fits(collective, place)]

    def neighbours(self, axes: Numbers) -> int:
        """Returns how many ranks of a group over `axes` stand on one node, where it goes across nodes."""
        return max(1, self.cluster.ranks_per_node // math.prod(self.sizes[max(axes) + 1 :]))

    def nodes(self, axes: Numbers, ranks: Any) -> Any:
        """Returns on how many nodes a group of `ranks` ranks over `axes` stands, as a number or a formula; at other
        sizes it stays inside a node, or goes across, as it does here."""
        if self.inside(axes):
            return 1
        if (each := self.neighbours(axes)) == 1:
            return ranks
        even = math.prod(self.sizes[at] for at in axes) % each == 0
        return largest(1, ranks / each) if even else ceil_div(ranks, each)

    def lines(self, axes: Numbers, collective: str) -> tuple[Lines, float]:
        """Returns what a collective over `axes` takes for a block of n bytes, as lines of which the cheapest counts
        (see `envelope`), and the seconds that it takes at least."""
        return _lines(self, tuple(axes), collective)

    def inside(self, axes: Numbers) -> bool:
        """Returns whether the groups over `axes` stay inside a node."""
        return math.prod(self.sizes[min(axes) :]) <= self.cluster.ranks_per_node

    def rate(self, axes: Numbers, collective: str) -> Rate:
        """Returns what the cluster says of a collective over `axes`."""
        ranks = math.prod(self.sizes[at] for at in axes)
        return self.cluster.rate(collective, ranks, "intra" if self.inside(axes) else "inter")

    def key(self, axes: Numbers) -> str:
        """Returns the name of one axis or of several merged ones: "data", "data+tensor"."""
        return "+".join(self.axes[at] for at in axes)

    def group_name(self, axes: Numbers) -> str:
        """Returns the name that programs give to the groups over some axes; it is bound to process groups at load.

        It holds the shape of the mesh, so that plans for different meshes live in one process.
        """
        return f"sbpc::{','.join(self._named_sizes())}::{self.key(axes)}"

    def device_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Returns the torch DeviceMesh of the same axes over the ranks of the default process group."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh

        kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
        return init_device_mesh(kind, self.sizes, mesh_dim_names=self.axes)

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, cluster: Cluster | str | None = None) -> Mesh:
        """Returns the mesh with the axes of a torch DeviceMesh; unnamed dims are called axis0, axis1, ...

        Raises MeshError unless it holds ranks 0, 1, ... in row-major order.
        """
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(mesh, DeviceMesh):
            raise MeshError(f"the device mesh is {shown(mesh)}\n  Give what torch's init_device_mesh returns.")
        names = mesh.mesh_dim_names or tuple(f"axis{at}" for at in range(mesh.mesh.dim()))
        if mesh.mesh.flatten().tolist() != list(range(mesh.mesh.numel())):
            todo = "sbpc needs ranks 0, 1, ... in row-major order."
            raise MeshError(f"the device mesh holds the ranks {mesh.mesh.tolist()}\n  {todo}")
        return cls(cluster=cluster, **dict(zip(names, mesh.mesh.shape)))

    def __repr__(self) -> str:
        cluster = "" if self.cluster.name == "ideal" else f", cluster={self.cluster.name!r}"
        return f"Mesh({', '.join(self._named_sizes())}{cluster})"

    def _named_sizes(self) -> list[str]:
        return [f"{name}={size}" for name, size in zip(self.axes, self.sizes)]

    def __eq__(self, other: object) -> bool:
        same = (getattr(self, name) == getattr(other, name, None) for name in ("axes", "sizes", "cluster"))
        return isinstance(other, Mesh) and all(same)

    def __hash__(self) -> int:
        return hash((self.axes, self.sizes, self.cluster))


@functools.lru_cache(maxsize=1 << 12)
def _lines(mesh: Mesh, axes: Axes, collective: str) -> tuple[Lines, float]:
    ranks = math.prod(mesh.sizes[at] for at in axes)
    if ranks == 1 or collective not in WIRE:
        return ((0.0, 0.0),), 0.0
    latency, bandwidth, least = mesh.link(axes, collective)
    ways, nodes = mesh.ways(axes, collective), float(mesh.nodes(axes, ranks))
    if ways:
        return envelope(way.line(collective, ranks, nodes, bandwidth) for way in ways), 0.0
    rounds, blocks = WIRE[collective](ranks, 1)
    return ((float(rounds * latency), float(blocks / bandwidth)),), least
