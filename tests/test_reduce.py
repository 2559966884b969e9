"""Gradients of 16 bits are summed in float32: on any number of ranks their error is that of one device."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import sbpc
from sbpc import Mesh, Plan
from sbpc.errors import SbpcError, VerifyError
from sbpc.graph.operands import operands
from sbpc.mesh.states import P
from sbpc.passes.verify import adds_up, verify_sums
from sbpc.plans.measure import layout_at
from sbpc.rules.sum_types import begins_sums, narrows
from tests.processes import run_ranks

HALF = torch.bfloat16


class Net(nn.Module):
    """Products, biases and a norm, and a matrix that is read twice, whose gradient is a sum of two."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(width, 2 * width),
            nn.LayerNorm(2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.norm(self.up(x))))
        return F.mse_loss(F.linear(F.linear(x, self.up.weight), self.down.weight), y)


def made(held: bool, rows: int = 128) -> tuple[Net, tuple[Tensor, Tensor], dict[str, Any]]:
    """A model, a batch, and options. held: the model is of bfloat16; else it runs under autocast."""
    torch.manual_seed(0)
    model, args = Net(), (torch.randn(rows, 32), torch.randn(rows, 32))
    if held:
        return model.to(HALF), (args[0].to(HALF), args[1].to(HALF)), {}
    return model, args, {"dtype": HALF}


def error(plan: Plan, model: nn.Module, args: Any) -> float:
    """The error of the gradients of a simulated step."""
    return relative(sbpc.simulate(plan, model, args).gradients, model, args)


def relative(found: Any, model: nn.Module, args: Any) -> float:
    """How far gradients are from those in float64, relative to these, all together."""
    exact = copy.deepcopy(model).double()
    exact(*(each.double() for each in args)).backward()
    wanted = {name: parameter.grad for name, parameter in exact.named_parameters()}
    off = sum(float((found[name].double() - each).square().sum()) for name, each in wanted.items())
    return (off / sum(float(each.square().sum()) for each in wanted.values())) ** 0.5


@pytest.mark.parametrize("held", [False, True])
def test_the_error_of_gradients_does_not_grow_with_the_ranks(held: bool) -> None:
    model, args, options = made(held)
    errors = [error(sbpc.baseline("data", model, args, Mesh(d=p), **options), model, args) for p in (1, 2, 16)]
    assert max(errors) < 1.05 * errors[0]
    as_computed = sbpc.baseline("data", model, args, Mesh(d=16), **options, reduce="as computed")
    assert error(as_computed, model, args) > 1.3 * errors[0]


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("axes", [{"d": 4}, {"d": 2, "t": 2}])
def test_sums_in_float32_are_counted_simulated_saved_and_verified(held: bool, axes: dict[str, int], tmp_path) -> None:
    model, args, options = made(held)
    plan = sbpc.plan(model, args, Mesh(**axes), **options)
    plan.verify()
    plan.save(tmp_path / "plan.sbpc")
    loaded = sbpc.load(tmp_path / "plan.sbpc")
    assert loaded.options.reduce == "float32"
    for each in (plan, loaded):
        run = sbpc.simulate(each, model, args)
        assert run.bytes_sent == each.cost.bytes_sent == plan.cost.bytes_sent
        assert all(run.gradients[name].dtype == p.dtype for name, p in model.named_parameters())
    symbols = {plan.cost.symbols[name]: value for name, value in plan.cost.numbers.items()}
    assert sum(float(each.xreplace(symbols)) for each in plan.cost.bytes_expr.values()) == sum(run.bytes_sent.values())


def swapped(gm: GraphModule) -> GraphModule:
    """The graph with the first cast of which a sum is taken behind that sum."""
    pairs = [(cast, user) for cast in gm.graph.nodes if begins_sums(cast) for user in cast.users if adds_up(user)]
    (cast, step), (narrow,) = pairs[0], operands(pairs[0][0])
    step.replace_input_with(cast, narrow)
    with gm.graph.inserting_after(step):
        moved = gm.graph.node_copy(cast, lambda _: step)
    step.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)
    step.meta["val"] = narrow.meta["val"]
    return gm


@pytest.mark.parametrize("held", [False, True])
def test_a_cast_that_moves_across_a_collective_is_found(held: bool) -> None:
    model, args, options = made(held)
    gm = sbpc.baseline("data", model, args, Mesh(d=4), **options, objective="serial").boxed
    verify_sums(gm)
    with pytest.raises(VerifyError, match=r"a gradient is summed in torch.bfloat16, not in torch.float32\n  %box_"):
        verify_sums(swapped(gm))


def test_a_sum_that_is_made_in_float32_is_never_cast_before_it_is_taken() -> None:
    model, args, _ = made(True)
    for reduce, wide in (("float32", True), ("as computed", False)):
        gm = sbpc.baseline("data", model, args, Mesh(d=4), reduce=reduce).unscheduled
        (loss,) = [node for node in gm.graph.nodes if narrows(node) and not node.meta["val"].dim()]
        assert (P in layout_at(loss).states) != wide


def test_a_float32_model_is_planned_as_ever() -> None:
    model, args = Net(), (torch.randn(16, 32), torch.randn(16, 32))
    plans = [sbpc.plan(model, args, Mesh(d=2), reduce=reduce) for reduce in ("float32", "as computed")]
    assert str(plans[0].boxed.graph) == str(plans[1].boxed.graph)


def test_an_unknown_type_of_sums_is_refused() -> None:
    model, args, _ = made(False)
    with pytest.raises(SbpcError, match="reduce is 'int8'\n  It is one of 'float32', 'exchange', 'as computed'"):
        sbpc.plan(model, args, Mesh(d=2), reduce="int8")


LOOPS: dict[str, dict[str, Any]] = {
    "micro-batches": {"axes": {"d": 2}, "microbatches": 8},
    "stages": {"axes": {"p": 2, "d": 2}, "stages": "p", "microbatches": 8},
}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("loop", LOOPS)
def test_micro_batches_and_stages_add_up_gradients_in_float32(loop: str, held: bool) -> None:
    model, args, options = made(held)
    axes, more = LOOPS[loop]["axes"], {key: value for key, value in LOOPS[loop].items() if key != "axes"}
    one = error(sbpc.plan(model, args, Mesh(d=1), **options), model, args)
    plan = sbpc.plan(model, args, Mesh(**axes), **options, **more)
    plan.verify()
    assert error(plan, model, args) < 1.05 * one
    run = sbpc.simulate(plan, model, args)
    assert run.bytes_sent == plan.cost.bytes_sent and run.peak_memory <= plan.cost.memory["total"]
    assert {node.meta["val"].dtype for chunk in plan.programs for node in chunk.summed} == {torch.float32}


def stepped(plans: list[Plan]) -> Any:
    """Gradients of real steps: at once, and of eight parts of the batch within `no_sync`, weighted to give the same."""
    found = []
    for held, plan in zip((False, True), plans):
        model, args, _ = made(held)
        module: Any = sbpc.parallelize(model, plan)
        if plan.loop is not None:
            module.step(*args)
        else:
            for at in range(8):
                with module.no_sync() if at < 7 else contextlib.nullcontext():
                    module.step(*(each.chunk(8)[at] for each in args))
        found.append({name: p.grad.full_tensor() for name, p in module.named_parameters()})
    return found


@pytest.mark.parametrize("loop", [None, "stages"])
def test_real_ranks_add_up_gradients_in_float32(loop: str | None) -> None:
    plans, ranks = [], 2 if loop is None else 4
    for held in (False, True):
        model, args, options = made(held, rows=16 if loop is None else 128)
        more = {"stages": "p", "microbatches": 8} if loop else {"objective": "serial"}
        plans.append(sbpc.plan(model, args, Mesh(**({"p": 2, "d": 2} if loop else {"d": 2})), **options, **more))
    results = run_ranks(stepped, ranks, plans)
    assert all(isinstance(each, list) for each in results), results[0]
    for held, of_ranks in zip((False, True), zip(*results)):
        found = {name: each for rank in of_ranks for name, each in rank.items()}
        model, args, options = made(held)
        one = error(sbpc.plan(model, args, Mesh(d=1), **options), model, args)
        scale = 1 if loop else 8
        assert relative({name: each.double() / scale for name, each in found.items()}, model, args) < 1.05 * one
