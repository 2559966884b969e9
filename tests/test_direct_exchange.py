"""Direct exchange on real gloo ranks: right, the same in every run, in every executor, and clean when a rank dies."""

from __future__ import annotations

import functools
import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sbpc
from sbpc import Mesh
from sbpc.boxing.paths import path
from sbpc.mesh.layout import Layout
from sbpc.mesh.states import REDUCE
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.direct_exchange import DirectGroup
from sbpc.runtime.start.launch import RankError, launch
from tests import models
from tests.boxings import positions, program
from tests.processes import run_ranks
from tests.test_launch import gone, script

c10d = torch.ops._c10d_functional
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
MESHES = {2: (Mesh(x=2),), 3: (Mesh(x=3),), 4: (Mesh(x=4), Mesh(a=2, b=2))}


def bind(mesh: Mesh, across: bool) -> None:
    """Bind the groups of a mesh as if its ranks were on several nodes, or on one."""
    process_groups.bind(mesh)
    for axes in mesh.runs():
        process_groups.named[mesh.group_name(axes)].across = across  # type: ignore[attr-defined]


def blocks_of(rank: int, ranks: int, rows: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings to a collective: random numbers, of which sums are rounded."""
    numbers = torch.rand(ranks * rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return (numbers * 1000).to(dtype)


def right_results(ranks: int) -> int:
    """On a rank: every dtype, reduction, size and way, twice, against plain sums; how many collectives were right."""
    right = 0
    for mesh, across, dtype, rows in itertools.product(MESHES[ranks], (True, False), DTYPES, (1, 5, 9000)):
        bind(mesh, across)
        for axes in mesh.runs():
            name = mesh.group_name(axes)
            members = next(group for group in mesh.groups(axes) if dist.get_rank() in group)
            me, size = members.index(dist.get_rank()), len(members)
            brought = [blocks_of(rank, size, rows, dtype) for rank in members]
            given = brought[me].t().contiguous().t()  # as wide as it is, but not contiguous
            mine = [each.chunk(size)[me] for each in brought]
            for op, _ in itertools.product(REDUCE, range(2)):
                found = c10d.wait_tensor(c10d.reduce_scatter_tensor(given, op, size, name))
                assert torch.equal(found, functools.reduce(REDUCE[op], mine)), (name, across, dtype, rows, op)
                plain = functools.reduce(REDUCE[op], [each.double() for each in mine])
                assert torch.allclose(found.double(), plain, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6)
                right += 1
            found = c10d.wait_tensor(c10d.all_to_all_single(given, [rows] * size, [rows] * size, name))
            assert torch.equal(found, torch.cat(mine)), (name, across, dtype, rows)
            right += 1
    uneven_shards(ranks)
    return right


def uneven_shards(ranks: int) -> None:
    """On a rank: box large tensors, whose dims do not divide, from one layout into another."""
    mesh = Mesh(u=ranks)
    bind(mesh, True)
    for before, after in (("[P]", "[S(0)]"), ("[P(max)]", "[S(1)]"), ("[S(0)]", "[S(1)]"), ("[S(1)]", "[S(0)]")):
        ends, shape = [Layout.parse(text, mesh.axes) for text in (before, after)], (331, 403)
        whole = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(1)).double()
        part = ends[0].shards(whole, mesh.sizes, torch.Generator().manual_seed(2))[dist.get_rank()]
        steps, rank = path(*ends, shape, 8, mesh), dist.get_rank()
        assert [step.collective for step in steps] == ["reduce_scatter" if "P" in before else "all_to_all"]
        run = program(steps, shape, mesh, rank, whole.dtype)
        for node in run.graph.nodes:  # the program names its groups by their axes
            node.args = tuple(mesh.group_name((0,)) if arg == "u" else arg for arg in node.args)
        run.recompile()
        found = run(part, *positions(mesh, rank))
        assert torch.equal(found, ends[1].shards(whole, mesh.sizes)[rank]), (before, after)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.prove), 3, 4])  # four are groups of two, too
def test_collectives_give_the_plain_sum_in_the_order_of_the_ranks(ranks: int) -> None:
    cases = 2 * len(DTYPES) * 3 * 7 * sum(len(mesh.runs()) for mesh in MESHES[ranks])
    assert run_ranks(right_results, ranks, ranks) == [cases] * ranks


def ways() -> list[Any]:
    """On a rank: which collectives go directly on one node and on several; how many are in flight at the end.

    Where pieces have other sizes, the first rank sees but equal ones, and the second one does not."""
    mesh, taken = Mesh(x=2), list[str]()
    name = mesh.group_name((0,))
    original = DirectGroup.exchange
    DirectGroup.exchange = lambda *given: taken.append("direct") or original(*given)  # type: ignore[func-returns-value,assignment,method-assign]
    small, rank = torch.ones(2, 3), dist.get_rank()
    for across in (False, True):
        bind(mesh, across)
        for sizes in ([[1, 1], [1, 1]], [[1, 1], [1, 2]], [[2, 1], [0, 1]]):  # by rank, what it sends to each
            taken.append(f"{across}")
            x, received = torch.full((sum(sizes[rank]), 20_000), float(rank)), [each[rank] for each in sizes]
            found = c10d.wait_tensor(c10d.all_to_all_single(x, received, sizes[rank], name))
            assert found[:, -1].tolist() == [0.0] * received[0] + [1.0] * received[1]
    taken.append("reduce_scatter")
    c10d.wait_tensor(c10d.reduce_scatter_tensor(small, "sum", 2, name))
    averaged = c10d.wait_tensor(c10d.reduce_scatter_tensor(small * dist.get_rank(), "avg", 2, name))
    assert torch.equal(averaged, small[:1] / 2)
    kinds = [type(group) for group in process_groups.named.values()]
    process_groups.stop()
    return [taken, kinds == [DirectGroup], torch._C._distributed_c10d._get_work_registry_size()]


def test_all_to_alls_go_directly_between_nodes_and_nothing_stays_in_flight() -> None:
    expected = [*["False"] * 3, *["True", "direct"] * 3, "reduce_scatter", "direct"]
    assert run_ranks(ways, 2) == [[expected, True, 0]] * 2


def in_flight() -> bool:
    """On a rank: many collectives of two groups started before the first is awaited, then awaited in another order by each rank."""
    mesh = Mesh(a=2, b=2)
    bind(mesh, True)
    return all(right_in_flight(mesh, dist.get_rank()) for _ in range(10))


def right_in_flight(mesh: Mesh, rank: int) -> bool:
    """Start and await once; gloo's threads free tensors meanwhile."""
    started: list[tuple[Tensor, Tensor]] = []
    for turn, axis in itertools.product(range(4), (0, 1)):
        name, x = mesh.group_name((axis,)), torch.full((2, 20_000), float(10 * turn + axis + 1))
        members = next(group for group in mesh.groups((axis,)) if rank in group)
        started.append((c10d.reduce_scatter_tensor(x * (rank + 1), "sum", 2, name), x[:1] * (sum(members) + 2)))
        started.append((c10d.all_reduce(x, "sum", name), 2 * x))
        moved = torch.cat([x[:1] * (member + 1) for member in members])
        started.append((c10d.all_to_all_single(x * (rank + 1), [1, 1], [1, 1], name), moved))
        del x  # what is sent lives on until it has been awaited
    order = torch.randperm(len(started), generator=torch.Generator().manual_seed(rank)).tolist()
    return all(torch.equal(c10d.wait_tensor(started[at][0]), started[at][1]) for at in order)


def test_collectives_of_several_groups_are_in_flight_at_once() -> None:
    assert run_ranks(in_flight, 4) == [True] * 4


def steps_of(executors: tuple[str, ...]) -> list[dict[str, Tensor]]:
    found = list(map(step_of, executors))
    process_groups.stop()
    return found


def step_of(executor: str) -> dict[str, Tensor]:
    """On a rank: the gradients of one step, whole, by a plan that reduce-scatters them."""
    plan, model, args = sharded_plan()
    module = sbpc.parallelize(model, plan, executor=executor)
    bind(plan.mesh, True)
    module(*args).backward()
    return {name: each.grad.full_tensor() for name, each in module.named_parameters()}  # type: ignore[union-attr]


def sharded_plan() -> tuple[sbpc.Plan, torch.nn.Module, tuple[Tensor, ...]]:
    """A plan of an MLP, with dims that do not divide, whose parameters are stored in shards."""
    torch.manual_seed(0)
    model, args = models.mlp(batch=10, width=7, hidden=13)
    model, args = model.double(), tuple(x.double() for x in args)
    plan = sbpc.baseline("fsdp", model, args, Mesh(x=2))
    assert "reduce_scatter_tensor" in plan.local.code
    return plan, model, args


@pytest.mark.parametrize(
    "executors", [("code", "interpreter", "nans"), pytest.param(("inductor",), marks=pytest.mark.prove)]
)
def test_every_executor_gives_the_numbers_of_simulate(executors: tuple[str, ...]) -> None:
    plan, model, args = sharded_plan()
    _, expected = sbpc.simulate(plan, model, args)
    ranks = run_ranks(steps_of, 2, executors, seconds=280.0)  # Inductor compiles
    assert all(isinstance(rank, list) for rank in ranks), ranks
    for found in (each for rank in ranks for each in rank):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)


FAULT = """
import torch
from sbpc import Mesh
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.launch import as_rank
def run():
    process_groups.start(timeout=5)
    mesh = Mesh(x={ranks})
    process_groups.bind(mesh)
    for each in process_groups.named.values():
        each.across = True
    c10d, name = torch.ops._c10d_functional, mesh.group_name((0,))
    x = torch.ones({ranks}, 1 << 20)
    c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", {ranks}, name))
    torch.distributed.barrier()
    if {late} and rank == 1:
        time.sleep(600)
    begun = [c10d.reduce_scatter_tensor(x, "sum", {ranks}, name), c10d.all_to_all_single(x, [1] * {ranks}, [1] * {ranks}, name)]
    begun.append(c10d.all_gather_into_tensor(x, {ranks}, name))
    if rank == 1:
        {fault}
    for each in begun:
        c10d.wait_tensor(each)
    c10d.wait_tensor(c10d.all_reduce(x, "sum", name))
"""
AS_RANK, PLAIN = "with as_rank():\n    run()\n", "run()\n"
FAULTS = {
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", AS_RANK, "rank 1 was ended by SIGKILL", (1, -signal.SIGKILL)),
    "raises": ("raise ValueError('theirs')", AS_RANK, "ValueError: theirs", (1, 1)),
    "raises, without our launcher": ("raise ValueError('theirs')", PLAIN, "ValueError: theirs", None),
    "raises, then tears down": ("process_groups.stop(); raise ValueError('theirs')", PLAIN, "ValueError: theirs", None),
    "waits elsewhere": ("", AS_RANK, "rank 0: waited for another rank as long as --timeout", (0, 1)),
}


# between these lies the hardest one: torch ends what is under way by itself
LONG = ("raises", "raises, then tears down")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.prove if what in LONG else ()) for what in FAULTS]
)
def test_a_rank_that_fails_between_start_and_wait_ends_all_with_its_own_error(
    what: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fault, end, message, of_rank = FAULTS[what]
    ranks = 3 if end == PLAIN else 2  # the hardest ones have ranks that wait for each other, too
    body = FAULT.format(fault=fault or "pass", late=what == "waits elsewhere", ranks=ranks) + end
    with pytest.raises(RankError) as caught:
        launch(script(tmp_path, body), ranks)
    assert gone(tmp_path, ranks) and of_rank in (None, (caught.value.rank, caught.value.code))
    said = str(caught.value) + "".join(capfd.readouterr())
    assert message in said, said
    assert "terminate called" not in said and "SIGABRT" not in said and "SIGSEGV" not in said, said
