"""One rank alone, and many on one GPU: what a machine with fewer devices than ranks can tell of a job.

Rank 0 runs beside a group that sends nothing and gives each rank its own values: its numbers are wrong, but it makes
the calls of its program, waits for what that waits for, and ends.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import sbpc
from sbpc import Mesh
from sbpc.runtime.start import process_groups
from tests import models
from tests.bench.ablation import SLOW
from tests.processes import run_ranks

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


SENT: dict[str, Callable[[int], float]] = {  # by ranks, for each byte that a rank gives, as the textbook's ring
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather_into_tensor": lambda p: p - 1,
    "reduce_scatter_tensor": lambda p: (p - 1) / p,
    "all_to_all_single": lambda p: (p - 1) / p,
}


class Calls(TorchDispatchMode):
    """Notes products, collectives and waits in their order, and the bytes that collectives send."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.sent = list[str](), 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if name := plain(str(func)):
            self.names.append(name)
        if name in SENT:
            self.sent += args[0].nbytes * SENT[name](process_groups.bound[args[-1]].size())
        return func(*args, **(kwargs or {}))


def plain(name: str) -> str:
    """Returns the name of a product, a collective or a wait, whether it writes into its operand or not; "" of all
    else."""
    space, bare = name.split(".")[0], name.split(".")[1].removesuffix("_") if "." in name else ""
    return bare if space == "_c10d_functional" or bare in ("mm", "bmm", "addmm", "baddbmm") else ""


@pytest.fixture
def rank_0_of_8(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(process_groups, "everyone", functools.cache(process_groups.new_group))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    process_groups.stop()


@pytest.mark.parametrize("device", DEVICES)
def test_rank_0_of_8_makes_the_calls_of_its_program_and_ends(rank_0_of_8: None, device: str) -> None:
    torch.manual_seed(0)
    model, args = models.gpt2(batch=8, layers=1)
    plan = sbpc.plan(model, args, Mesh(data=4, tensor=2, cluster=SLOW))
    module: Any = sbpc.parallelize(model, plan, device=device, executor="code")
    given = [arg.to(device) for arg in args]
    module.step(*given)
    with Calls() as calls:
        module.step(*given)
    program = [plain(str(node.target)) for node in plan.local.graph.nodes if node.op == "call_function"]
    assert calls.names == [name for name in program if name]
    assert len(SENT.keys() & {*program}) > 1 and "mm" in program
    assert calls.sent == pytest.approx(sum(plan.cost.bytes_sent.values()))


def rank_on_one_gpu(plan: sbpc.Plan) -> tuple[list[float], list[float], set[str], int]:
    """On a rank: the losses of three steps, of one process and of all ranks, where parameters lie, and how many
    collectives were on their way at once with kernels between."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.gpt2(batch=8, layers=1)
    eager, args = copy.deepcopy(model).cuda(), tuple(arg.cuda() for arg in args)
    parallel: Any = sbpc.parallelize(model.cuda(), plan, device="cuda", executor="code")
    found = []
    for module, step in ((eager, eager), (parallel, parallel.step)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = step(*args)
            if module is eager:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    names = [str(node.target) for node in plan.local.graph.nodes if node.op == "call_function"]
    apart = sum(
        one.startswith("_c10d") and "wait" not in one and "wait_tensor" not in other
        for one, other in itertools.pairwise(names)
    )
    return found[0], found[1], {parameter.device.type for parameter in parallel.parameters()}, apart


@GPU
def test_four_ranks_on_one_gpu_train_as_one_process() -> None:
    torch.manual_seed(0)
    model, args = models.gpt2(batch=8, layers=1)
    plan = sbpc.plan(model.double(), args, Mesh(data=2, tensor=2, cluster=SLOW))
    for one, all_ranks, devices, apart in run_ranks(rank_on_one_gpu, 4, plan):
        assert all_ranks == pytest.approx(one, rel=1e-10)
        assert devices == {"cuda"} and apart > 0
