"""Ranks that give different batches, or do not make the same calls, end with one error; ranks that are gone are named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import LostRankError, SbpcError
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.same_calls import BLOCK, EVERY, FIRST, checksum
from tests.faults import free_port
from tests.processes import run_ranks

DTYPES = (
    *(
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
    ),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn),
)


def sum_of(tensor: Tensor) -> int:
    return int(checksum(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checksum_sees_every_bit_and_the_order_and_no_strides(dtype: torch.dtype) -> None:
    shape = (2, 2, 3, 1)
    drawn = torch.randint(0, 256, (12 * torch.empty((), dtype=dtype).element_size(),), dtype=torch.uint8)
    bits = drawn & 1 if dtype == torch.bool else drawn
    whole, found = bits.view(dtype).view(shape), set()
    for byte in range(len(bits)):
        for bit in range(1 if dtype == torch.bool else 8):
            other = bits.clone()
            other[byte] ^= 1 << bit
            found.add(sum_of(other.view(dtype).view(shape)))
    assert len(found) == len(bits) * (1 if dtype == torch.bool else 8) and sum_of(whole) not in found
    for same in (
        whole.to(memory_format=torch.channels_last),
        whole.transpose(0, 2).contiguous().transpose(0, 2),
        whole[None].repeat(3, 1, 1, 1, 1)[1],
    ):
        assert sum_of(same) == sum_of(whole)
    assert sum_of(whole[0, 0, 0, 0]) == sum_of(whole[0, 0, 0, 0].clone()) and sum_of(whole[:0]) == 0
    rows = torch.arange(6).to(dtype).view(6, 1) if dtype != torch.bool else torch.tensor([[True], [False], [True]])
    assert sum_of(rows) != sum_of(rows.roll(1, 0))


def test_a_checksum_sees_rows_that_change_places_far_apart_and_signs_that_flip() -> None:
    x = torch.arange(5.0 * BLOCK, dtype=torch.float64)
    for step in (1, 2, 1 << 9, BLOCK // 2, BLOCK, 2 * BLOCK):
        other = x.clone()
        other[0], other[step] = x[step], x[0]
        assert sum_of(other) != sum_of(x), step
    signs = {sum_of(torch.where(torch.arange(len(x)) % modulus == 1, -x, x)) for modulus in range(2, 60)}
    assert len(signs) == 58 and sum_of(x.to(torch.complex128).conj()) != sum_of(x.to(torch.complex128))


class Net(nn.Module):
    """Two layers, whose result is a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return (self.down(self.up(x).tanh()) - shift).square().mean()


def drawn(seed: int = 0, rows: int = 4) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))


ARGS = drawn(), torch.zeros(4)


def said(call: Callable[[], Any]) -> str:
    """What an error of sbpc says, the name of its class first."""
    try:
        call()
    except SbpcError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def ways(plans: dict[str, Any], exported: str) -> dict[str, list[str]]:
    """On a rank: by way to run a module what is said of batches of its own, and before of the same ones. torch.compile also of weights."""
    flat, staged, loop = (sbpc.parallelize(Net(), plans[name]) for name in ("flat", "staged", "loop"))
    evaluated, loaded = (
        sbpc.parallelize(Net(), plans["flat"], evaluate=plans["evaluate"]),
        sbpc.load_module(exported, weights="zeros"),
    )
    compiled = torch.compile(Net(), backend="sbpc", options={"mesh": Mesh(a=2)})
    calls = {
        "call": evaluated, "step": flat.step, "stages": staged.step, "loop": loop.step, "loaded": loaded, "compiled": compiled,
        "evaluation": lambda *args: evaluated.eval()(*args),
    }  # fmt: skip
    own = drawn(dist.get_rank()), ARGS[1]
    other = Net()
    with torch.no_grad():
        other.down.bias[2] += dist.get_rank()
    of_weights = said(lambda: torch.compile(other, backend="sbpc", options={"mesh": Mesh(a=2)})(*ARGS))
    assert of_weights.startswith("PlanError: down.bias is not the same on rank 1 as on rank 0\n"), of_weights
    return {
        way: [said(lambda call=call: call(*ARGS)), said(lambda call=call: call(*own))] for way, call in calls.items()
    }


def test_ranks_with_batches_of_their_own_are_refused_however_a_module_runs(tmp_path: Path) -> None:
    def plan(**options: Any) -> Any:
        return sbpc.plan(Net(), ARGS, Mesh(a=2), **options)

    plans = {"flat": plan(), "staged": plan(stages="a", microbatches=2), "loop": plan(microbatches=2)}
    plans["evaluate"] = sbpc.plan(Net().eval(), ARGS, Mesh(a=2), train=False, pin=plans["flat"].parameters)
    plans["flat"].export(tmp_path / "net.sbpc")
    found = run_ranks(ways, 2, plans, str(tmp_path / "net.sbpc"))
    assert found[0] == found[1], found
    for way, (same, own) in found[0].items():
        assert same == "nothing", (way, same)
        assert own.startswith("PlanError: argument x is not the same on rank 1 as on rank 0"), (way, own)
        assert "Give the same batch on all ranks" in own
        assert ("inputs='a')" in own) == (way not in ("stages", "compiled")), (way, own)  # which take no such option


def parts(plan: sbpc.Plan) -> list[str]:
    """On a rank of a mesh of two axes: what is said where the ranks of axis a, of b, or none give the same."""
    module, (a, b) = sbpc.parallelize(Net(), plan), plan.mesh.coordinates(dist.get_rank())
    return [said(lambda seed=seed: module(drawn(seed, 2), ARGS[1])) for seed in (a, b, 0)]


def test_an_argument_of_which_each_rank_gives_its_part_is_compared_along_the_other_axes() -> None:
    found = run_ranks(parts, 4, sbpc.plan(Net(), ARGS, Mesh(a=2, b=2), inputs=["S(0)@a", None]))
    assert found == [found[0]] * 4
    right, wrong, same = found[0]
    assert (right, same) == ("nothing", "nothing") and "not the same on rank 1 as on rank 0" in wrong


def parting(plan: sbpc.Plan) -> tuple[list[str], ...]:
    """On a rank: what is said of each call where batches differ from the fourth on; where the second one has left out a batch; and where
    one calls a module and the other its step, another module, or has drawn more."""
    first, second, third, fourth = (sbpc.parallelize(Net(), plan) for _ in range(4))
    rank, calls = dist.get_rank(), range(1, EVERY + 1)
    later = [said(lambda at=at: first(drawn(rank if at > FIRST else 0), ARGS[1])) for at in calls]
    skipped = [said(lambda: [second(drawn(at), ARGS[1]) for at in [*calls, 0] if rank == 0 or at != FIRST + 1])]
    other = [said(lambda: (third if rank else third.step)(*ARGS)), said(lambda: (third if rank else fourth)(*ARGS))]
    fourth.set_random_state({"seed": 0, "step": rank})
    return later, skipped, [*other, said(lambda: fourth(*ARGS))]


def one_more(plan: sbpc.Plan) -> str:
    """On a rank: what is said where the first one has one batch more."""
    sbpc.start(timeout=3)
    module = sbpc.parallelize(Net(), plan)
    text = said(lambda: [module(*ARGS) for _ in range(FIRST + 2 - dist.get_rank())])
    time.sleep(5 * dist.get_rank())
    return text


def test_ranks_that_part_later_or_make_other_calls_end_with_an_error() -> None:
    plan = sbpc.plan(Net(), ARGS, Mesh(a=2))
    found = run_ranks(parting, 2, plan)
    assert found[0] == found[1], found
    later, skipped, other = found[0]
    assert (
        set(later[:-1]) == {"nothing"}
        and "argument x is not the same" in later[-1]
        and "argument x is not the same" in skipped[0]
    ), found
    there = "call 1 of plan 2, forward, ", "call 2 of plan 2, forward, ", "'step': 1}"
    for text, on_one, on_zero in zip(other, there, ("forward and backward", "plan 3", "'step': 0}")):
        assert text.startswith("PlanError: the ranks do not make the same call: rank 1 is in "), text
        assert on_one in text.partition(";")[0] and on_zero in text.partition(";")[2], text
    meeting = sbpc.plan(Net(), ARGS, Mesh(a=2), pin={"up.weight": "S(0)", "down.weight": "S(1)"})  # in each forward
    text, nothing = run_ranks(one_more, 2, meeting)
    assert nothing == "nothing" and text == (
        "LostRankError: waited for another rank as long as --timeout, or sbpc.start(timeout=), allows; all ranks are alive\n"
        f"  rank 0 was in call {FIRST + 2} of plan 0, forward: Timed out waiting 3000ms for recv operation to complete\n"
        f"  rank 1 is in what comes after call {FIRST + 1} of plan 0, forward\n"
        "  Have every rank make the same calls of the same modules, or allow more seconds."
    )


def ending(plan: sbpc.Plan) -> str:
    """On a rank: what is said where the second one has one batch less, and ends."""
    module = sbpc.parallelize(Net(), plan)
    text = said(lambda: [module(*ARGS) for _ in range(FIRST + 2 - dist.get_rank())])
    if dist.get_rank():
        sbpc.stop()
    return text


def test_a_rank_that_ends_with_fewer_batches_is_said_to_have_ended() -> None:
    plan = sbpc.plan(Net(), ARGS, Mesh(a=2), pin={"up.weight": "S(0)", "down.weight": "S(1)"})
    text, nothing = run_ranks(ending, 2, plan)
    assert nothing == "nothing" and text.startswith(
        "LostRankError: rank 1 does not answer any more; its last sign of life came from the end of its script\n"
    )
    assert "If it had fewer batches, give every rank as many" in text


def losing(plan: Any, lost: int, how: signal.Signals, port: int) -> Any:
    """On a rank: what is said, by which ranks, and after how many seconds, once one is gone or stands still before its third step.

    port: where rank 0 keeps the store, 0 for a store in a file.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if port:
        dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    sbpc.start(timeout=3)
    pids = process_groups.from_all_ranks(os.getpid())
    module: Any = sbpc.parallelize(Net(), plan)
    for _ in range(2):
        module.step(*ARGS)
    if rank == lost:
        os.kill(os.getpid(), how)
    begun = time.monotonic()
    try:
        module.step(*ARGS)
    except LostRankError as error:
        seconds = time.monotonic() - begun
        if how == signal.SIGSTOP and rank == (lost + 1) % ranks:
            time.sleep(4)  # until the others have seen that it stands still
            os.kill(pids[lost], signal.SIGKILL)
        return str(error), error.ranks, seconds
    return None


def test_the_others_say_which_rank_stands_still() -> None:
    found = run_ranks(losing, 3, sbpc.plan(Net(), ARGS, Mesh(a=3), stages="a", microbatches=2), 1, signal.SIGSTOP, 0)
    for rank in (0, 2):
        text, ranks, seconds = found[rank]
        assert ranks == [1] and seconds < 15, found
        assert (
            text.startswith("rank 1 does not answer any more; its last sign of life came from ")
            and f"\n  rank {rank} was in" in text
        )


def test_a_rank_that_is_gone_with_the_store_of_the_job_is_named_by_the_others() -> None:
    found = run_ranks(losing, 2, sbpc.plan(Net(), ARGS, Mesh(a=2)), 0, signal.SIGKILL, free_port())
    text, ranks, seconds = found[1]
    assert found[0] is None and ranks == [0] and seconds < 15, found
    assert text.startswith("rank 0, which keeps the store of the job, does not answer\n"), text


def uneven(plan: sbpc.Plan) -> float:
    """The last result of more calls on later ranks."""
    module = sbpc.parallelize(nn.Linear(4, 2).train(plan.options.train), plan)
    for _ in range(1 + 3 * dist.get_rank()):
        with torch.no_grad():
            result = module(drawn(rows=2))
    if plan.options.train:  # which all do together
        module(drawn(rows=2)).sum().backward()
    return float(result.sum())


def test_ranks_may_evaluate_alone_where_nothing_is_sent() -> None:
    layouts = {"inputs": ["S(0)"], "outputs": ["S(0)"], "pin": {"*": "B"}}
    for train in (False, True):
        plan = sbpc.plan(nn.Linear(4, 2).train(train), (drawn(rows=4),), Mesh(a=2), train=train, **layouts)
        first, second = run_ranks(uneven, 2, plan)
        assert isinstance(first, float) and first == second


def failing(plan: sbpc.Plan) -> list[str]:
    """On a rank: what is said of calls of which one fails on rank 0 alone, and of the next one."""
    sbpc.start(timeout=3)
    module: Any = sbpc.parallelize(Net(), plan, executor="nans")
    batches = [(drawn(at, 2 if plan.options.inputs else 4), ARGS[1]) for at in range(FIRST + 2)]
    if dist.get_rank() == 0:
        batches[FIRST][0].fill_(torch.nan)
    return [said(lambda batch=batch: module.step(*batch)).partition(":")[0] for batch in batches]


def test_a_rank_does_not_go_on_beside_others_after_a_step_that_failed_there_alone() -> None:
    for options in ({"inputs": ["S(0)", None]}, {"stages": "a", "microbatches": 2}):
        found = run_ranks(failing, 2, sbpc.plan(Net(), ARGS, Mesh(a=2), **options))
        assert found == [["nothing"] * FIRST + [first, "LostRankError"] for first in ("NanError", "LostRankError")], (
            options
        )


def collecting(plan: sbpc.Plan) -> str:
    """What is said where one rank alone adds up its gradients."""
    module = sbpc.parallelize(Net(), plan)
    with module.no_sync() if dist.get_rank() else nullcontext():
        return said(lambda: module.step(*ARGS))


def test_a_rank_that_adds_up_gradients_alone_is_refused() -> None:
    for options in ({}, {"stages": "a", "microbatches": 2}):
        for text in run_ranks(collecting, 2, sbpc.plan(Net(), ARGS, Mesh(a=2), **options)):
            assert (
                text.startswith("PlanError: the ranks do not make the same call: rank 1 is in")
                and "within no_sync" in text
            ), text
