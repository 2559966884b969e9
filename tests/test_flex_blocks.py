"""A BlockMask hides what is in none of its blocks and shows all of its full ones, whatever its `mask_mod` says; and
the scores of FlexAttention count in memory where no kernel does it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import sbpc
from sbpc import Mesh
from sbpc.errors import CaptureError, PlanError
from sbpc.graph.flex import BACKWARD, FORWARD
from tests import flexible
from tests.compare import compare
from tests.flexible import causal
from tests.random_plans import random_plan
from tests.test_plan import refused

COUNTS, PLACES = [1, 1, 2, 1], [[0, 1, 2, 3], [1, 0, 2, 3], [2, 0, 1, 3], [3, 2, 1, 0]]
FULL_COUNTS, FULL_PLACES = [0, 0, 1, 0], [[0, 1, 2, 3], [0, 1, 2, 3], [3, 0, 1, 2], [0, 1, 2, 3]]


def listed(counts: list[int], places: list[list[int]], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Blocks as torch lists them, the same for all batches and heads, but for one that the last pair has less."""
    count, place = (torch.tensor(x, dtype=torch.int32) for x in (counts, places))
    count = count.expand(*size, 4).contiguous()
    if size != (1, 1):
        count[-1, -1, 2] -= 1
    return count, place.expand(*size, 4, 4).contiguous()


def by_hand(mask_mod: Any = causal, full: bool = True, size: tuple[int, int] = (1, 1)) -> flex.BlockMask:
    """Narrower than the mask_mod, and with a full block of later tokens."""
    lists: Any = [*listed(COUNTS, PLACES, size), *(listed(FULL_COUNTS, FULL_PLACES, size) if full else ())]
    return flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=2, mask_mod=mask_mod)


class Attending(nn.Module):
    """Attention of four heads with a mask that is made before, or in the forward."""

    def __init__(self, make: Callable[[], Any], inside: bool) -> None:
        super().__init__()
        self.qkv, self.make, self.mask = nn.Linear(16, 48), make, None if inside else make()

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        mask = self.make() if self.mask is None else self.mask
        q, k, v = self.heads(x)
        return flex.flex_attention(q, k, v, block_mask=mask).square().mean()


def shown(mask: flex.BlockMask) -> Tensor:
    """What a mask shows [batches, heads, 8, 8], written out block by block."""
    inner = flex.create_mask(mask.mask_mod, None, None, 8, 8, "cpu")[0, 0]
    sizes = mask.kv_num_blocks.shape[:2]
    found = torch.zeros(*sizes, 8, 8, dtype=torch.bool)
    lists: list[Any] = [(mask.kv_num_blocks, mask.kv_indices, inner)]
    if mask.full_kv_num_blocks is not None:
        lists.append((mask.full_kv_num_blocks, mask.full_kv_indices, torch.ones_like(inner)))
    for counts, places, inside in lists:
        for b, h, row in torch.cartesian_prod(*map(torch.arange, (*sizes, 4))).tolist():
            for column in places[b, h, row, : counts[b, h, row]].tolist():
                block = slice(2 * row, 2 * row + 2), slice(2 * column, 2 * column + 2)
                found[b, h][block] = inside[block]
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("inside", [False, True], ids=["before", "in the forward"])
@pytest.mark.parametrize(
    "given", [{}, {"full": False}, {"mask_mod": None}, {"full": False, "mask_mod": None}, {"size": (2, 4)}], ids=str
)
def test_blocks_are_honoured(given: dict[str, Any], inside: bool) -> None:
    torch.manual_seed(0)
    model, x = Attending(functools.partial(by_hand, **given), inside), torch.randn(2, 8, 16)
    q, k, v = model.heads(x)
    scores = (q @ k.mT / 2).masked_fill(~shown(model.make()), -torch.inf)
    loss = (scores.softmax(-1).nan_to_num() @ v).square().mean()
    gradients = dict(zip(("qkv.weight", "qkv.bias"), torch.autograd.grad(loss, list(model.parameters()))))
    plan = sbpc.plan(model, (x,), Mesh(x=2))
    assert not plan.notes
    for each in (plan, *(random_plan(plan, seed) for seed in range(3))):
        assert compare(each, model, (x,), [loss.detach()], gradients) <= 1e-12


def test_blocks_that_follow_from_a_mask_mod_cost_nothing() -> None:
    make = functools.partial(flex.create_block_mask, causal, None, None, 8, 8, "cpu", BLOCK_SIZE=2)
    plan = sbpc.plan(Attending(make, True), (torch.randn(2, 8, 16),), Mesh(x=2))
    calls = [node for node in plan.graph.graph.nodes if node.target in (FORWARD, BACKWARD)]
    texts = [[value for value in node.args if isinstance(value, str)] for node in calls]
    assert texts == [["", "t0 = ge.Tensor(q, kv)"]] * 2


def test_other_blocks_need_another_plan() -> None:
    model, args = Attending(by_hand, False), (torch.randn(2, 8, 16),)
    plan = sbpc.plan(model, args, Mesh(x=2))
    mask: Any = model.mask
    sbpc.simulate(plan, model, args)
    mask.kv_num_blocks[0, 0, 2] -= 1
    message = refused(PlanError, functools.partial(sbpc.simulate, plan, model, args))
    assert message.startswith("mask is BlockMask(causal ") and "Plan anew" in message
    mask.kv_num_blocks[0, 0, 2] += 1
    sbpc.simulate(plan, model, args)


def test_a_mask_as_an_argument_is_refused_with_what_to_do() -> None:
    class Given(Attending):
        def forward(self, x: Tensor, mask: Any) -> Tensor:  # type: ignore[override]
            self.mask = mask
            return super().forward(x)

    args = torch.ones(2, 8, 16), by_hand()
    message = refused(CaptureError, lambda: sbpc.plan(Given(by_hand, True), args, Mesh(x=2)))
    assert message.startswith("args[1] is a torch.nn.attention.flex_attention.BlockMask\n")
    assert message.endswith("make it in the forward, by create_block_mask from tensors that are given.")


def test_a_limit_of_memory_has_prices_for_scores() -> None:
    model, args = flexible.Net("window", groups=4, length=64), flexible.batch(length=64)
    free = sbpc.plan(model, args, Mesh(data=2, x=2))
    limit = 0.925 * free.memory["total"]  # without prices of scores none was found below 0.935
    assert sbpc.plan(model, args, Mesh(data=2, x=2), memory=limit).memory["total"] <= limit


@pytest.mark.parametrize("cluster", [None, "h100"])
@pytest.mark.parametrize(("kinds", "groups"), [(("window", "alibi"), 4), (("documents", "table"), 2)])
def test_scores_are_in_the_predicted_memory_where_no_kernel_of_gpus_does_without(
    kinds: tuple[str, ...], groups: int, cluster: str | None
) -> None:
    torch.manual_seed(0)
    model, args = flexible.Net(*kinds, groups=groups, length=32), flexible.batch(length=32)
    plan = sbpc.plan(model, args, Mesh(data=2, x=2, cluster=cluster))
    for each in (plan, *(random_plan(plan, seed) for seed in range(3))):
        predicted = each.cost.memory["total"] - each.cost.memory["optimizer"]
        assert sbpc.simulate(each, model, args).peak_memory == predicted
    scores = 4 * 4 * 4 * 32 * 32 // 4  # bytes on each of four ranks
    held = max(each.bytes for each in plan.memory_curve().held)
    assert (held >= 2 * scores) == (cluster is None)
