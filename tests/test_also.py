"""One parallel module with several plans: each call runs the plan of its mode and its shapes, on one state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import sbpc
from sbpc import Mesh
from sbpc.runtime.module import runner_of
from tests.module_checks import Stats
from tests.module_worlds import batch, seeded
from tests.processes import run_ranks

SIZES = (8, 8, 3, 8, 3)  # rows of the batches of an epoch and a half


def trained(module: Any, step: Callable[..., Tensor]) -> list[float]:
    """Losses of training on batches of two sizes, with an evaluation on a third one after each."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    found = []
    for number, rows in enumerate(SIZES):
        optimizer.zero_grad()
        loss = step(module.train(), *batch(number, rows))
        optimizer.step()
        with torch.no_grad():
            found += [loss.item(), module.eval()(*batch(9, 5)).item(), module.train()(*batch(8, 8)).item()]
    return found


def backward(module: Any, *args: Tensor) -> Tensor:
    """A step as torch has it."""
    loss: Tensor = module(*args)
    loss.backward()
    return loss.detach()


def plans_of(model: Any) -> list[sbpc.Plan]:
    """Plans for training on 8 rows, on 4 in another layout, and on 3, for a forward alone on 8, and for evaluation on 5."""
    mesh = Mesh(x=2)
    first = sbpc.plan(model.train(), batch(0, 8), mesh, pin={"inner.weight": "S(0)"})
    homes = first.parameters
    small = sbpc.plan(model, batch(0, 3), mesh, pin=homes)
    forward = sbpc.plan(model, batch(0, 8), mesh, train=False, pin=homes)
    other = sbpc.plan(model, batch(0, 4), mesh, pin={"inner.weight": "B"})
    return [first, other, small, forward, sbpc.plan(model.eval(), batch(0, 5), mesh, train=False, pin=homes)]


def on_ranks(first: sbpc.Plan, other: sbpc.Plan, *others: sbpc.Plan) -> dict[str, Any]:
    """Losses of training by backward and by step, and what is said of calls that were not planned."""
    torch.set_default_dtype(torch.float64)
    model = seeded(Stats)
    found: dict[str, Any] = {"backward": trained(sbpc.parallelize(model, first, also=others), backward)}
    module: Any = sbpc.parallelize(model, first, also=others[:2], evaluate=others[2])
    found["step"] = trained(module, lambda module, *args: module.step(*args))
    found["state"] = {name: whole(value) for name, value in module.state_dict().items()}
    found["sums"] = summed(module, lambda at: nullcontext() if at == 4 else module.no_sync())
    found["errors"] = [said(call) for call in misuses(model, module, first, other, others)]
    module = sbpc.parallelize(model, first, also=others)
    vars(first).update(vars(other))  # as `certify` does that finds a better plan
    found["replaced"] = trained(module, backward)
    return found


def whole(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def summed(module: Any, keeping: Callable[[int], Any]) -> list[Tensor]:
    """The sums of gradients of batches of two shapes."""
    module.train().zero_grad()
    for at, rows in enumerate((8, 3, 3, 8, 3)):
        with keeping(at):
            module(*batch(at, rows)).backward()
    return [whole(each.grad) for each in module.parameters()]


def misuses(
    model: Any, module: Any, first: sbpc.Plan, other: sbpc.Plan, others: Sequence[sbpc.Plan]
) -> list[Callable[[], Any]]:
    x, y = batch(0, 4)

    return [
        lambda: module.train()(x, y),
        lambda: module.train()(x, y=y.float()),
        lambda: module.eval()(x, y),
        lambda: sbpc.parallelize(model, first, also=others[0]),  # type: ignore[arg-type]
        lambda: sbpc.parallelize(model, first, also=[other]),
    ]


def said(call: Callable[[], Any]) -> str:
    """What the error says."""
    with pytest.raises(sbpc.SbpcError) as error:
        call()
    return str(error.value)


ERRORS = [
    """no plan is for arguments of these shapes
  given:   (float64[4, 5], float64[4, 3])
  planned: (float64[8, 5], float64[8, 3])
  planned: (float64[3, 5], float64[3, 3])
  planned: (float64[8, 5], float64[8, 3])
  Plan the model on such arguments, too, with pin=plan.parameters, and give it as parallelize(..., also=[...]); or pad them to planned shapes.""",
    """no plan is for arguments of these shapes
  given:   (float64[4, 5], y=float32[4, 3])
  planned: (float64[8, 5], float64[8, 3])
  planned: (float64[3, 5], float64[3, 3])
  planned: (float64[8, 5], float64[8, 3])
  Plan the model on such arguments, too, with pin=plan.parameters, and give it as parallelize(..., also=[...]); or pad them to planned shapes.""",
    """argument 0 is torch.float64 (4, 5), the plan is for torch.float64 (5, 5)
  Give also='auto' to sbpc.parallelize, which plans other shapes when they come, or pad the last batch to the planned one.""",
    "also is a Plan\n  Give a list of plans.",
    "inner.weight is stored in [S(0)] by one plan, in [B] by the other\n  Make the other one with pin=plan.parameters.",
]


def test_each_call_runs_the_plan_of_its_mode_and_shapes_on_one_state() -> None:
    torch.set_default_dtype(torch.float64)
    alone = seeded(Stats)
    expected = trained(alone, backward)
    sums = summed(copy.deepcopy(alone), lambda _: nullcontext())
    for found in run_ranks(on_ranks, 2, *plans_of(seeded(Stats))):
        assert found["backward"] == pytest.approx(expected, rel=1e-12)
        assert found["step"] == pytest.approx(expected, rel=1e-12) == found["replaced"]
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(found["state"][name], value, rtol=1e-12, atol=1e-14)
        assert found["errors"] == ERRORS
        torch.testing.assert_close(found["sums"], sums, rtol=1e-12, atol=1e-14)


class Squares(nn.Module):
    """Two layers and a loss, and a parameter that nothing reads; batches are those of `batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(2))
        self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.down(self.up(x).relu()) - y).square().mean()


def of_loops(plans: dict[str, sbpc.Plan]) -> list[tuple[str, list[Tensor]]]:
    """Loss and gradients of calls that loops and programs of the whole batch run, in modules that have both."""
    torch.set_default_dtype(torch.float64)
    model, found = seeded(Squares), []
    for first, *others in (("loop", "whole", "small"), ("whole", "loop of 16", "small")):
        module: Any = sbpc.parallelize(model, plans[first], also=[plans[name] for name in others])
        for rows in (8, 16, 3) if "loop of 16" in others else (8, 3):
            for way in ("step", "step within no_sync", "backward"):
                if way == "backward" and rows == 16:
                    assert "runs forward and backward together" in said(partial(module, *batch(0, 16)))
                    continue
                module.zero_grad()
                if way == "step within no_sync":
                    with module.no_sync():
                        module.step(*batch(1, rows))
                loss = backward(module, *batch(0, rows)) if way == "backward" else module.step(*batch(0, rows))
                assert module.idle.grad is None
                found.append((f"{way} {rows}", [loss, *(whole(p.grad) for p in [*module.parameters()][1:])]))
        runner, (x, _) = runner_of(module), batch(0, 8)
        assert "one is a loop" in said(partial(kept_by_a_loop, module, 8 if first == "loop" else 16))
        module.zero_grad()
        if first == "loop":
            # another device than that of the batch, of which micro-batches go there one by one
            runner.where = torch.device("meta")
            assert runner.shard_of(runner.inputs[0], x, True) is x
    return found


def kept_by_a_loop(module: Any, rows: int) -> None:
    """A backward outside of no_sync, of another plan than the loop that ran within."""
    with module.no_sync():
        module.step(*batch(0, rows))
    module.step(*batch(0, 3))


def test_loops_stand_beside_programs_of_the_whole_batch_in_one_module() -> None:
    torch.set_default_dtype(torch.float64)
    model, mesh = seeded(Squares), Mesh(x=2)
    first = sbpc.plan(model, batch(0, 8), mesh, pin={"up.weight": "S(0)"})
    about = {"pin": first.parameters}
    plans = {
        "whole": first, "loop": sbpc.plan(model, batch(0, 8), mesh, microbatches=4, **about),
        "loop of 16": sbpc.plan(model, batch(0, 16), mesh, microbatches=2, **about), "small": sbpc.plan(model, batch(0, 3), mesh, **about),
    }  # fmt: skip
    assert [name for name, plan in plans.items() if plan.loop is not None] == ["loop", "loop of 16"]
    for found in run_ranks(of_loops, 2, plans):
        assert len(found) == 14
        for what, (loss, *gradients) in found:
            rows = int(what.split()[-1])
            model.zero_grad()
            wanted = model(*batch(0, rows))
            (wanted + (model(*batch(1, rows)) if "no_sync" in what else 0.0)).backward()
            torch.testing.assert_close(loss, wanted.detach(), msg=what)
            torch.testing.assert_close(gradients, [p.grad for p in [*model.parameters()][1:]], msg=what)


def adversaries(module: Any) -> list[Tensor]:
    """What a discriminator gives by turns: its gradients of what is real, that of a fake, and of a fake while it is frozen."""
    found = []
    for rows, asks, frozen in (
        (8, False, False),
        (8, True, False),
        (8, True, True),
        (8, False, False),
        (3, True, False),
    ):
        x = batch(0, rows)[0].requires_grad_(asks)
        module.requires_grad_(not frozen)
        module.zero_grad()
        module(x).square().sum().backward()
        found += [whole(each.grad) for each in (x, *module.parameters()) if each.grad is not None]
    return found


def on_both(*plans: sbpc.Plan) -> list[list[Tensor]]:
    """On a rank: the same whichever plan comes first."""
    torch.set_default_dtype(torch.float64)
    orders = [plans, plans[::-1]]
    return [adversaries(sbpc.parallelize(seeded(Critic), first, also=others)) for first, *others in orders]


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))


def test_of_two_plans_the_one_runs_that_gives_the_gradients_that_are_asked_for() -> None:
    torch.set_default_dtype(torch.float64)
    model, mesh = seeded(Critic), Mesh(x=2)
    x, fake, few = batch(0, 8)[0], batch(0, 8)[0].requires_grad_(), batch(0, 3)[0].requires_grad_()
    real = sbpc.plan(model, (x,), mesh, pin={"0.weight": "S(0)"})
    plans = [real, *(sbpc.plan(model, (each,), mesh, pin=real.parameters) for each in (fake, few))]
    plans.append(sbpc.plan(model.requires_grad_(False), (fake,), mesh, pin=real.parameters))
    expected = adversaries(model)
    for found in run_ranks(on_both, 2, *plans):
        for each in found:
            assert len(each) == len(expected) == 4 + 5 + 1 + 4 + 5
            torch.testing.assert_close(each, expected, rtol=1e-12, atol=1e-14)
