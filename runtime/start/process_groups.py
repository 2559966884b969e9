"""Make the process groups that programs name, once per mesh, and free them at the end."""

from __future__ import annotations

import ctypes
import functools
import os
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from sbpc._compat import gloo_in_turn, register_process_group, unregister_process_group
from sbpc.errors import MeshError, check_kinds
from sbpc.mesh.mesh import Mesh
from sbpc.runtime.start import lost_ranks
from sbpc.runtime.start.direct_exchange import DirectGroup

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h; 32 MB is the most that the second one may be
LONGEST = 1e9  # seconds: more than any job, and no more than clocks can add
PAUSE = 0.02  # seconds between two looks at the store of torchrun
TIMEOUT = 60.0  # seconds that a rank waits for another one before it ends with an error, unless told otherwise

# The state of this process, like torch's own table of groups: a group name means one process group in a process, every
# module and every plan there shares it, and `stop` ends them all. So none of it can belong to one plan or module.
bound: dict[str, dist.ProcessGroup] = {}
named: dict[str, dist.ProcessGroup] = {}  # what the names mean in programs: gloo groups with direct exchange
meshes: dict[tuple[Mesh, str], DeviceMesh] = {}
parts_of: dict[Mesh, Sequence[Sequence[int]]] = {}  # by mesh that stands for several parts of all ranks, these
waiting = {"seconds": TIMEOUT}


def limit() -> timedelta:
    """Returns how long a rank waits for another one."""
    return timedelta(seconds=min(waiting["seconds"], LONGEST))


def start(device: str | None = None, timeout: float | None = None) -> torch.device:
    """Joins the ranks of this start, if that has not been done, and returns the device of this rank. Call it before
    all else.

    It joins the process group that the launcher set up. timeout: seconds after which a rank that waits for another
    one ends with an error that says which ranks do not answer, as far as it is known; 60 unless told otherwise.
    After `torchrun --max-restarts` has started killed ranks again, it joins those of the new start. device: "cuda"
    or "cpu"; by default what there is. Raises MeshError outside a launcher.
    """
    check_kinds(MeshError, timeout=(timeout, "a number of seconds", "None"), device=(device, "a text", "None"))
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = device_of(kind)
    if kind == "cpu":
        keep_memory()
    if timeout is not None:
        waiting["seconds"] = float(min(timeout, LONGEST))  # of numpy, too
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise MeshError("there is no process group\n  Run under torchrun --nproc-per-node N, or use sbpc.simulate.")
        store = store_of_attempt(waiting["seconds"])
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        options: dict[str, Any] = {} if store is None else {"store": store, **place}
        with gloo_in_turn():
            dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=limit(), **options)
    lost_ranks.begin()
    return where


def device_of(kind: str) -> torch.device:
    """Returns the device of this rank: the GPU with the rank's number on its machine, or the CPU. Raises MeshError
    without that GPU."""
    if kind == "cpu":
        return torch.device(kind)
    if kind != "cuda":
        raise MeshError(f"the device is {kind!r}\n  It is 'cpu' or 'cuda'.")
    local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local >= there:
        raise MeshError(f"rank {local} of this machine has no GPU, there are {there}\n  Start one rank for each GPU.")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def keep_memory() -> None:
    """Lets glibc keep what this process frees, up to 1 GB: a step asks for the same again, and Linux would clear
    every page anew."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for name, size in ((M_MMAP_THRESHOLD, 1 << 25), (M_TRIM_THRESHOLD, 1 << 30)):
            mallopt(name, size)


def check_ranks(mesh: Mesh) -> None:
    """Raises MeshError unless there is one process for every rank of the mesh."""
    there = dist.get_world_size() if dist.is_initialized() else 1
    if there != mesh.ranks:
        raise MeshError(
            f"{mesh} needs {mesh.ranks} ranks, there are {there}\n  Run under torchrun --nproc-per-node {mesh.ranks}."
        )


def bind(mesh: Mesh) -> None:
    """Makes the process groups of a mesh, or of each of its parts, that do not exist yet and binds each under its name.

    Every rank must call this at the same point: making groups is a collective.
    """
    for axes in mesh.runs():
        parts = parts_of.get(mesh, [range(mesh.ranks)])
        bind_groups(
            mesh.group_name(axes), [[part[at] for at in group] for part in parts for group in mesh.groups(axes)]
        )


def bind_groups(name: str, groups: Sequence[Sequence[int]]) -> None:
    """Makes these groups, of which one holds this rank, and binds that one under a name, if the name is not bound yet.

    On gloo each has a second one for the messages of direct exchange, so that a group does one kind of thing at a time.
    """
    if name in bound:
        return
    nodes, direct = from_all_ranks(node()), dist.get_backend() == "gloo"
    for ranks in groups:
        group, messages = new_group(ranks), new_group(ranks) if direct else None
        if dist.get_rank() in ranks:
            across = len({nodes[rank] for rank in ranks}) > 1
            bound[name] = group
            named[name] = group if messages is None else DirectGroup(group, messages, across)
    register_process_group(name, named[name])


def node() -> str:
    """Returns the name of this rank's node: its number under torchrun, else the name of the machine."""
    return os.environ.get("GROUP_RANK") or socket.gethostname()


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> Any:
    """Makes a process group of these ranks, or of all. Every rank must call this at the same point."""
    with gloo_in_turn():
        return dist.new_group(ranks, timeout=limit(), backend=backend)


@functools.lru_cache(maxsize=1)
def everyone() -> Any:
    """Returns a gloo group of all ranks, for what they tell each other beside the programs. Every rank must call
    this at the same point."""
    return new_group(backend="gloo")


def from_all_ranks(value: Any, group: Any = None) -> list[Any]:
    """Returns the values of all ranks, by rank, by way of a group of all. Every rank must call this at the same
    point."""
    values: list[Any] = [None] * dist.get_world_size()
    with lost_ranks.watched():
        dist.all_gather_object(values, value, group)
    return values


def stop() -> None:
    """Unbinds all groups and leaves the process group: call it at the end."""
    lost_ranks.end()
    for name in bound:
        unregister_process_group(name)
    bound.clear()
    named.clear()
    meshes.clear()
    parts_of.clear()
    everyone.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def bind_within(mesh: Mesh, parts: Sequence[Sequence[int]], kind: str) -> None:
    """Makes the process groups of a mesh that stands for several equal parts of all ranks, such as the stages of a
    pipeline.

    parts: the ranks of each part, in the order of the mesh. kind: of device. Raises MeshError if the mesh stands for
    other parts here. Every rank must call this at the same point.
    """
    if parts_of.setdefault(mesh, parts) != parts:
        raise MeshError(
            f"{mesh} stands for the ranks {parts_of[mesh]} in this process, and for {parts}\n  Run one such plan at a "
            "time."
        )
    device_mesh(mesh, kind)


def is_part(mesh: DeviceMesh) -> bool:
    """Returns whether a torch DeviceMesh is that of one of several parts of all ranks."""
    return any(mesh == known for (planned, _), known in meshes.items() if planned in parts_of)


def ranks_beside(mesh: Mesh) -> list[int]:
    """Returns the ranks of the part that this rank is in, all where a mesh stands for all."""
    (mine,) = (part for part in parts_of.get(mesh, [range(mesh.ranks)]) if dist.get_rank() in part)
    return list(mine)


def place(mesh: Mesh) -> tuple[int, ...]:
    """Returns where this rank stands on a mesh, or on that of its part."""
    return mesh.coordinates(ranks_beside(mesh).index(dist.get_rank()))


def device_mesh(mesh: Mesh, kind: str) -> DeviceMesh:
    """Returns the torch DeviceMesh of a mesh over the groups that its programs use; the first call for a mesh is a
    collective."""
    if (mesh, kind) not in meshes:
        bind(mesh)
        groups = [bound[mesh.group_name((axis,))] for axis in range(len(mesh.axes))]
        ranks = torch.tensor(ranks_beside(mesh)).view(mesh.sizes)
        meshes[mesh, kind] = DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0], kind, ranks, mesh_dim_names=mesh.axes
        )
    return meshes[mesh, kind]


# --- how the ranks of one attempt meet in a store that may still hold the keys of earlier attempts --------------------
# torchrun keeps one store over all restarts and does not clear it, so a restarted rank can read the address of a dead
# one. Therefore each rank greets under a fresh name, rank 0 answers to that name, and all go on under a prefix that
# rank 0 made.
def store_of_attempt(seconds: float) -> Store | None:
    """Returns the part of torchrun's store for this attempt, or None if torchrun keeps no store.

    Every rank must call this at the same point. Raises MeshError if one does not come within `seconds`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, limit = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=seconds)
    store = TCPStore(*address, ranks, False, limit)
    return PrefixStore(f"sbpc/{meet(store, rank, ranks, seconds)}", store)


def meet(store: Store, rank: int, ranks: int, seconds: float) -> str:
    """Returns the name of this attempt, the same on all ranks and new in the store."""
    own = uuid.uuid4().hex
    if rank == 0:
        welcome(store, own, ranks, seconds)
        return own
    store.set(f"sbpc/hello/{rank}", own)
    try:
        store.wait([f"sbpc/welcome/{own}"], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise MeshError(f"rank 0 did not come within {seconds:g} s\n  See what it says, or raise --timeout.") from error
    name = store.get(f"sbpc/welcome/{own}").decode()
    store.set(f"sbpc/{name}/here/{rank}", "")
    return name


def welcome(store: Store, name: str, ranks: int, seconds: float) -> None:
    """Answers every greeting as rank 0, those of dead ranks too, until all ranks are here."""
    others, answered, limit = range(1, ranks), dict[int, str](), time.monotonic() + seconds
    while not all(store.check([f"sbpc/{name}/here/{other}"]) for other in others):
        for other in others:
            if store.check([f"sbpc/hello/{other}"]):
                greeting = store.get(f"sbpc/hello/{other}").decode()
                if answered.get(other) != greeting:
                    store.set(f"sbpc/welcome/{greeting}", name)
                    answered[other] = greeting
        if time.monotonic() > limit:
            late = [other for other in others if not store.check([f"sbpc/{name}/here/{other}"])]
            raise MeshError(
                f"ranks {late[:8]} did not come within {seconds:g} s\n  See what they say, or raise --timeout."
            )
        time.sleep(PAUSE)
