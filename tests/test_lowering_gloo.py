"""Lowering on real processes: gloo gives the tensor that the layouts define, from uneven and empty shards too."""

from __future__ import annotations

import math
import multiprocessing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from sbpc._compat import register_process_group, unregister_process_group
from sbpc.boxing.paths import path
from sbpc.boxing.steps import Step
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from tests.boxings import numbers, positions, program

GRID, LINE = Mesh(a=2, b=2), Mesh(c=4)
CASES = (
    (GRID, "[S(0), S(0)]", "[B, B]", (8, 6), torch.float32),
    (GRID, "[S(0), S(0)] S(0)@b>a", "[B, B]", (7, 3), torch.float32),
    (GRID, "[S(0), S(0)]", "[B, S(0)]", (8, 6), torch.int64),
    (GRID, "[P, P]", "[B, B]", (5,), torch.float64),
    (GRID, "[P, P]", "[S(1), S(0)]", (3, 7), torch.float32),
    (GRID, "[P, P]", "[S(0), S(0)] S(0)@b>a", (7, 2), torch.int64),
    (GRID, "[P(max), P(max)]", "[S(1), S(1)]", (2, 9), torch.float32),
    (GRID, "[P, P(max)]", "[B, S(0)]", (4, 4), torch.int64),
    (GRID, "[S(0), S(1)]", "[S(1), S(0)]", (6, 5), torch.bfloat16),
    (GRID, "[S(0), S(0)]", "[S(1), S(1)] S(1)@b>a", (5, 6), torch.float32),
    (GRID, "[B, B]", "[P, S(1)]", (3, 5), torch.float32),
    (GRID, "[S(1), B]", "[B, S(1)]", (4, 5, 2), torch.int64),
    (LINE, "[S(0)]", "[S(1)]", (5, 3), torch.float32),
    (LINE, "[S(1)]", "[B]", (3, 2), torch.bool),
    (LINE, "[P(min)]", "[S(0)]", (2, 3), torch.int64),
    (LINE, "[S(0)]", "[S(1)]", (3, 0), torch.float32),
    (LINE, "[P]", "[B]", (), torch.float64),
    # NaN on one rank alone, which gloo's own maxima lose
    (GRID, "[P(max), B]", "[B, B]", (3, 7), torch.float32),
    (LINE, "[P(min)]", "[B]", (9,), torch.float64),
    (LINE, "[P(max)]", "[S(0)]", (6, 2), torch.float64),
    (LINE, "[P(max)]", "[B]", (5, 1), torch.bfloat16),
    (LINE, "[P(min)]", "[S(0)]", (3, 4), torch.float16),
)


def steps_of(case: tuple[Mesh, str, str, tuple[int, ...], torch.dtype]) -> tuple[Layout, Layout, tuple[Step, ...]]:
    mesh, before, after, shape, dtype = case
    ends = Layout.parse(before, mesh.axes), Layout.parse(after, mesh.axes)
    return *ends, path(*ends, shape, dtype.itemsize, mesh)


def whole_tensor(case: tuple[Mesh, str, str, tuple[int, ...], torch.dtype]) -> Tensor:
    """The tensor of a case; one of maxima or minima begins with what is no number, or infinite."""
    _, before, _, shape, dtype = case
    whole = numbers(shape, torch.int64).gt(0) if dtype == torch.bool else numbers(shape, dtype)
    if "(m" in before and dtype.is_floating_point:
        whole.view(-1)[:4] = torch.tensor([-math.inf, math.nan, math.inf, math.nan])
    return whole


def run_rank(rank: int, folder: str) -> None:
    """Box every case on this rank and write what it holds then."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4, timeout=wait)
    names = []
    for mesh in (GRID, LINE):
        for axes in mesh.runs():
            for ranks in mesh.groups(axes):
                group = dist.new_group(ranks, timeout=wait)
                if rank in ranks:
                    names.append(mesh.key(axes))
                    register_process_group(names[-1], group)
    held = []
    for case in CASES:
        mesh, shape, (before, _, taken) = case[0], case[3], steps_of(case)
        part = before.shards(whole_tensor(case), mesh.sizes, torch.Generator().manual_seed(1))[rank]
        part = part if rank == 2 else torch.where(part.isnan(), torch.zeros_like(part), part)
        part = part.transpose(0, -1).contiguous().transpose(0, -1) if part.dim() > 1 else part
        held.append(program(taken, shape, mesh, rank, part.dtype)(part, *positions(mesh, rank)))
    torch.save(held, f"{folder}/{rank}.pt")
    for name in names:
        unregister_process_group(name)
    dist.destroy_process_group()


def test_gloo_boxes_as_defined(tmp_path: Path) -> None:
    # import once, not four times
    multiprocessing.set_forkserver_preload(["tests.test_lowering_gloo", "sbpc.boxing.lower"])
    mp.start_processes(run_rank, (str(tmp_path),), nprocs=4, start_method="forkserver")
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    used: dict[str, None] = {}
    for case, parts in zip(CASES, zip(*ranks)):
        mesh, _, after, taken = case[0], *steps_of(case)
        used |= dict.fromkeys(step.collective for step in taken)
        torch.testing.assert_close(
            after.whole(list(parts), mesh.sizes), whole_tensor(case), rtol=0, atol=0, equal_nan=True, msg=str(case)
        )
    assert {"all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice", "keep"} <= used.keys()
