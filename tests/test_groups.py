"""Process groups over gloo: one collective after the other, also those of DTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import Shard, distribute_tensor

from sbpc import Mesh
from sbpc._compat import gloo_in_turn
from sbpc.runtime.start import process_groups
from tests.processes import run_ranks


def threads(group: Any) -> int:
    """How many threads do the collectives of a group over gloo."""
    return group._get_backend(torch.device("cpu")).options._threads


def threads_of_groups() -> tuple[list[int], bool, bool]:
    """The threads of a group of torch's, one of ours, one of programs; whether a DTensor's mesh takes the last, and gathers right."""
    mesh = process_groups.device_mesh(Mesh(x=2, y=1), "cpu")
    bound, whole = [process_groups.bound[Mesh(x=2, y=1).group_name([axis])] for axis in range(2)], torch.arange(6.0)
    gathered = distribute_tensor(whole, mesh, [Shard(0), Shard(0)]).full_tensor()
    counts = [threads(group) for group in (dist.new_group(), process_groups.new_group(), *bound)]
    return counts, mesh.get_all_groups() == bound, torch.equal(gathered, whole)


def test_a_group_has_one_thread_as_two_free_memory_twice() -> None:
    for found in run_ranks(threads_of_groups, 2):
        assert found == ([2, 1, 1, 1], True, True)


def test_torch_without_gloo_makes_its_groups_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "is_gloo_available", lambda: False)
    made = distributed_c10d.ProcessGroupGloo
    with gloo_in_turn():
        assert distributed_c10d.ProcessGroupGloo is made
