"""Products of float8 matrices, their scales and casts: the numbers of one device on any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError, VerifyError
from sbpc.mesh.states import Partial
from sbpc.passes.verify import verify_boxed
from sbpc.rules import match
from tests import scaled
from tests.compare import largest_error
from tests.processes import run_ranks
from tests.scaled import AHEAD, BACK, made

aten = torch.ops.aten
ROUNDED = 1e-5  # sums in float32; a number that is rounded to float8 the other way would be off by far more
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data": ({"data": 2}, {"inputs": "data"}),
    "data over four": ({"data": 4}, {"inputs": "data", "pin": {"*.weight": "S(0)"}}),
    "tensor": ({"t": 4}, {"pin": {"up.weight": "S(0)", "down.weight": "S(1)"}}),
    "sequence": ({"s": 2}, {"inputs": ["S(1)"]}),
    "data and tensor": (
        {"data": 2, "t": 2},
        {"inputs": "data", "pin": {"up.weight": "S(0)@t", "down.weight": "S(1)@t"}},
    ),
    "micro-batches": ({"d": 2}, {"microbatches": 2}),
}


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_gives_the_numbers_of_one_device(plan: str, rows: bool) -> None:
    axes, options = PLANS[plan]
    model, args = made(rows)
    assert largest_error(sbpc.plan(model, args, Mesh(**axes), **options), model, args) < ROUNDED


class Cast(nn.Module):
    """A cast, and its scale."""

    def __init__(self, dim: int | None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return scaled.cast(x, AHEAD, self.dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_scales_and_what_is_cast_by_them_are_bit_for_bit_those_of_one_device(
    dim: int | None, dtype: torch.dtype
) -> None:
    model, x = Cast(dim), torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    for asked in (["S(0)"], ["S(1)"]):
        plan = sbpc.plan(model, (x,), Mesh(d=4), train=False, inputs=asked)
        for found, expected in zip(sbpc.simulate(plan, model, (x,)).outputs, model(x)):
            assert found.dtype == expected.dtype and torch.equal(found.float(), expected.float())


def maxima(plan: sbpc.Plan) -> list[tuple[int, ...]]:
    """The shapes of the maxima that ranks tell each other."""
    steps = [node for node in plan.boxed.graph.nodes if "step" in node.meta]
    return [tuple(n.meta["val"].shape) for n in steps if Partial("max") in n.meta["step"].before.states]


def test_a_scale_of_a_tensor_costs_one_number_and_those_of_split_rows_none() -> None:
    model, args = made(False)
    assert set(maxima(sbpc.baseline("data", model, args, Mesh(d=2)))) == {()}
    model, args = made(True)
    assert maxima(sbpc.baseline("data", model, args, Mesh(d=2), train=False)) == []


def sent(plan: sbpc.Plan, collective: str) -> set[torch.dtype]:
    """The types of the numbers of matrices that a collective sends."""
    steps = [node for node in plan.boxed.graph.nodes if "step" in node.meta]
    return {n.meta["val"].dtype for n in steps if n.meta["step"].collective == collective and n.meta["val"].dim() > 1}


def test_weights_are_cast_before_they_are_gathered() -> None:
    model, args = made(False, torch.bfloat16, batch=32)
    plan = sbpc.plan(model, args, Mesh(data=2), inputs="data", pin={"*.weight": "S(0)"})
    assert sent(plan, "all_gather") == {AHEAD}


def test_gradients_of_weights_are_summed_in_float32() -> None:
    for rows in (False, True):
        model, args = made(rows, torch.bfloat16)
        plan = sbpc.baseline("data", model, args, Mesh(d=2))
        assert sent(plan, "all_reduce") == {torch.float32}
        products = [node for node in plan.boxed.graph.nodes if node.target is aten._scaled_mm.default]
        kinds = {n.meta["val"].dtype for n in products if n.meta["sbp"].partial}
        assert kinds == {torch.bfloat16 if rows else torch.float32}  # kernels of rows give no float32


def test_no_sum_goes_through_8_bits() -> None:
    x = torch.randn(4, 6)
    for kind in (AHEAD, BACK):
        found = match(aten._to_copy.default, (x,), {"dtype": kind}, x.to(kind))
        assert found is not None and [str(s.outputs[0]) for s in found.signatures] == ["B", "S(0)", "S(1)"]


def test_a_sum_of_8_bits_that_a_pass_wrote_is_refused() -> None:
    model, args = made(False)
    boxed = sbpc.baseline("data", model, args, Mesh(d=2)).boxed
    node = next(node for node in boxed.graph.nodes if "step" in node.meta and node.meta["step"].before.partial)
    node.meta["val"] = node.meta["val"].to(AHEAD)
    with pytest.raises(VerifyError, match="float8_e4m3fn has no sums, and is in P"):
        verify_boxed(boxed, Mesh(d=2))


def test_scales_of_blocks_have_no_rule() -> None:
    a, b, blocks = (
        torch.empty(4, 256, device="meta").to(AHEAD),
        torch.empty(256, 32, device="meta").to(AHEAD),
        torch.ones(4, 2),
    )
    given = (a, b, blocks, torch.ones(2, 32), None, None, torch.bfloat16)
    assert match(aten._scaled_mm.default, given, {}, torch.empty(4, 32, dtype=torch.bfloat16)) is None


def test_a_device_that_does_not_multiply_float8_is_told_of() -> None:
    model, args = made(False)
    with pytest.raises(
        PlanError, match="%_scaled_mm is a product of float8, which the devices of cluster 'a100' do not"
    ):
        sbpc.plan(model, args, Mesh(d=2, cluster="a100"))


def trained(plan: sbpc.Plan | None, steps: int = 3) -> list[float]:
    """The losses of a few steps, of a plan's module or, without one, of torch."""
    model, args = made(False, torch.bfloat16)
    run: Any = model if plan is None else sbpc.parallelize(model, plan)
    optimizer, losses = torch.optim.SGD(run.parameters(), lr=0.5), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run(*args) if plan is None else run.step(*args)
        if plan is None:
            loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def test_ranks_train_as_one_device_does() -> None:
    model, args = made(False, torch.bfloat16)
    plan = sbpc.plan(model, args, Mesh(d=2), pin={"*.weight": "S(0)"}, masters=False)
    assert {AHEAD, BACK} & (sent(plan, "all_gather") | sent(plan, "all_to_all"))
    first, second = run_ranks(trained, 2, plan)
    assert first == second and first == pytest.approx(trained(None), rel=2e-3)


@pytest.mark.parametrize(
    ("recipe", "off"), [("tensorwise", ROUNDED), ("rowwise", 2**-4), ("rowwise_with_gw_hp", 2**-4)]
)
def test_float8_training_of_torchao_gives_the_numbers_of_one_device(recipe: str, off: float) -> None:
    """With scales by row it multiplies in bfloat16, so that ranks add other roundings."""
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False))
    net = float8.convert_to_float8_training(net, config=float8.Float8LinearConfig.from_recipe_name(recipe))
    model, args = Loss(net), (torch.randn(8, 16, 32),)
    for axes, options in (PLANS[name] for name in ("data", "sequence", "micro-batches")):
        plan = sbpc.plan(model, args, Mesh(**axes), **options)
        products = [node for node in plan.boxed.graph.nodes if node.target is aten._scaled_mm.default]
        assert len(products) >= 3 and all(node.meta["choice"].cuts() for node in products)
        assert largest_error(plan, model, args) < off


class Loss(nn.Module):
    """The mean square of what a model gives."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()
