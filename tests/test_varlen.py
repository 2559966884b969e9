"""Attention over packed sequences is split by its heads (`torch.nn.attention.varlen`)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError
from sbpc.mesh.kernels import Attention
from sbpc.rules import match
from sbpc.rules.proof.prove import Case, prove
from tests import packed
from tests.compare import largest_error
from tests.duality import Dual, missing
from tests.random_plans import random_plan
from tests.samples import CLOSE, close, f
from tests.test_plan import refused

ENDS = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
LATER = torch.tensor([0, 4, 6, 13], dtype=torch.int32)
WINDOWS = [(False, [-1, -1]), (True, [-1, 0]), (False, [2, 0]), (False, [3, 1])]


def cases(causal: bool, window: list[int], groups: int) -> tuple[Case, Case]:
    """A forward and its backward, of which each head of keys serves so many of queries."""
    q, k, v = f(9, 4 * groups, 5), f(13, 4, 5, seed=1), f(13, 4, 5, seed=2)
    given = ENDS, LATER, 5, 7, causal
    ahead = Case(packed.FORWARD, (q, k, v, *given, 0.3, window, groups > 1), tolerance=CLOSE, zero=(2,))
    out, lse, seed = ahead.run()
    return ahead, close(packed.BACKWARD, f(*q.shape, seed=3), q, k, v, out, lse, *given, seed, 0.3, window)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("causal", "window"), WINDOWS)
def test_every_signature_of_packed_attention_is_right_and_its_mutants_are_not(
    causal: bool, window: list[int], groups: int
) -> None:
    ahead, back = cases(causal, window, groups)
    for one in (ahead, back):
        count = prove(one, ranks=(2, 3, 4), pairs=((2, 2),))
        assert count["mutants"] and count["pairs"]
    assert not missing(Dual(ahead, back, ("g0", "i0", "i1", "i2", "o0", "*", "i3", "i4", "*"), (0, 1, 2)))


def test_the_formula_gives_the_gradients_that_autograd_gives() -> None:
    for (causal, window), groups in itertools.product(WINDOWS, (1, 2)):
        ahead, back = cases(causal, window, groups)
        heads = [x.clone().requires_grad_() for x in ahead.operands[:3]]
        out, _, _ = packed.forward(*heads, *ahead.args[3:])
        expected = torch.autograd.grad(out, heads, back.args[0])
        for one, other in zip(back.run(), expected):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_used_keys_are_cut_by_heads_and_pages_are_not_cut_at_all() -> None:
    q, k, v = f(9, 4, 5), f(13, 4, 5, seed=1), f(13, 4, 5, seed=2)
    used = torch.tensor([4, 1, 6], dtype=torch.int32)
    prove(replace(cases(False, [-1, -1], 1)[0], args=(q, k, v, ENDS, LATER, 5, 7, False, None, None, False, used)))
    pages = q, f(2, 8, 4, 5), f(2, 8, 4, 5), ENDS, LATER, 5, 7
    assert match(packed.FORWARD, pages, {"block_table": used.view(3, 1)}, (q, q[..., 0].t(), used)) is None


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}, {"data": 2, "x": 2}], ids=str)
@pytest.mark.usefixtures("float64")
def test_a_block_over_packed_sequences_gives_what_one_device_gives(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    for heads, groups in ((4, 4), (8, 4)):
        model, args = packed.Packed(16, heads, groups, 5), (torch.randn(9, 16), ENDS)
        plan = sbpc.plan(model, args, Mesh(**mesh))
        assert not plan.notes
        for each in (plan, *(random_plan(plan, seed) for seed in range(3))):
            assert largest_error(each, model, args) <= 1e-10


def test_packed_attention_costs_what_its_heads_and_its_longest_sequence_cost() -> None:
    for window, keys in (((-1, -1), 700), ((-1, 0), 700), ((63, 0), 64)):
        model = packed.Packed(64, 8, 4, 700, window)
        args = torch.randn(1000, 64, device="meta"), torch.zeros(5, dtype=torch.int32, device="meta")
        plan = sbpc.plan(model.to("meta"), args, Mesh(x=2))
        ahead, back = (node.meta["match"] for node in plan.graph.graph.nodes if "varlen_attn" in str(node.target))
        for each, products in ((ahead, 2), (back, 5)):
            assert each.flops(each.sizes) == 2 * products * 8 * 1000 * keys * 8
            shape = each.shape(each.sizes, {})
            assert shape == Attention(8 * 1000 * keys, keys, window[1] == 0, each is back, "float32")
            halved = each.sizes | {"g": 2}
            assert each.flops(halved) * 2 == each.flops(each.sizes)
            assert each.shape(halved, {}).pairs * 2 == shape.pairs


def test_a_plan_of_packed_attention_is_not_written_to_a_file(tmp_path: Path) -> None:
    plan = sbpc.plan(packed.Packed(16, 4, 4, 5), (torch.randn(9, 16), ENDS), Mesh(x=2))
    message = refused(PlanError, lambda: plan.save(tmp_path / "plan"))
    assert message == (
        "a file may not call torch_attn._varlen_attn.default, as %_varlen_attn does in the model\n"
        "  Give the op a rule by sbpc.rule, there where the file is read, too."
    )
