"""Real processes: `module.step` does what a forward and a backward do, whatever the model returns."""

from __future__ import annotations

import dataclasses
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.api.loading import load_module
from sbpc.errors import PlanError
from sbpc.graph.pytree import flatten
from sbpc.runtime.state.weight_files import save_weights, weights_of
from tests.processes import run_ranks


@dataclasses.dataclass
class Output:
    """Results by name, the loss not the first."""

    logits: Tensor
    loss: Tensor | None = None


class Pair(NamedTuple):
    """A scalar that is not the loss, before the loss."""

    norm: Tensor
    loss: Tensor


class Net(nn.Module):
    """Returns its loss as `kind` says, with other results around it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.down(torch.relu(self.up(x)))
        loss = F.mse_loss(logits, y)
        return {
            "scalar": loss, "one": loss.reshape(1), "first": (loss, logits), "dict": {"logits": logits, "loss": loss},
            "dataclass": Output(logits, loss), "named tuple": Pair(logits.square().sum(), loss), "counted": [loss, x.argmax()],
            "second": (logits, loss), "deep": ([logits.square().sum()], {"losses": (logits.mean(), loss)}),
            "none": {"logits": logits}, "two": (logits, loss, logits.sum()),
        }[self.kind]  # fmt: skip


WITH_LOSS = "scalar", "one", "first", "dict", "dataclass", "named tuple", "counted", "second", "deep"
NAMES = {"deep": "1.losses.1"}  # of what is not found otherwise


def model_of(kind: str) -> tuple[Net, tuple[Tensor, Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Net(kind), (torch.randn(8, 6), torch.randn(8, 4))


def loss_in(kind: str, result: Any) -> Tensor:
    """The loss, by hand."""
    if kind == "deep":
        return result[1]["losses"][1]
    places = {"first": 0, "counted": 0, "dict": "loss", "second": 1}
    return (
        result.loss
        if kind in ("dataclass", "named tuple")
        else result[places[kind]]
        if kind in places
        else result.reshape(())
    )


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name, which are then dropped."""
    found = {name: p.grad.full_tensor() for name, p in module.named_parameters()}  # type: ignore[union-attr]
    module.zero_grad()
    return found


def both_ways(folder: str, plans: dict[str, sbpc.Plan]) -> dict[str, Any]:
    """By what a model returns: loss and gradients of a forward and a backward, and of a step; what was refused."""
    found: dict[str, Any] = {}
    for kind, plan in plans.items():
        model, args = model_of(kind)
        module = sbpc.parallelize(model, plan)
        try:
            result = module.step(*args)
        except PlanError as error:
            found[kind] = str(error)
            continue
        assert type(result) is type(model(*args)) and not any(leaf.requires_grad for leaf in flatten(result)[0])
        of_step = loss_in(kind, result).item(), gradients(module)
        loss = loss_in(kind, module(*args))
        loss.backward()
        found[kind] = of_step, (loss.item(), gradients(module))
    loaded = load_module(Path(folder, "net.sbpc"))
    loss = loaded.step(*model_of("scalar")[1])
    found["exported"] = (loss.item(), gradients(loaded)), found["scalar"][1]
    with torch.no_grad(), pytest.raises(PlanError, match="no backward here"):
        loaded.step(*model_of("scalar")[1])
    return found


def on_rank(folder: str, plans: dict[str, sbpc.Plan]) -> Any:
    try:
        return both_ways(folder, plans)
    except Exception:  # the test shows it
        return traceback.format_exc()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("exported")
    plans = {
        kind: sbpc.plan(*model_of(kind), Mesh(data=2), loss=NAMES.get(kind)) for kind in (*WITH_LOSS, "none", "two")
    }
    plans["scalar"].export(folder / "net.sbpc")
    save_weights(weights_of(model_of("scalar")[0]), folder / "net.safetensors")
    found = run_ranks(on_rank, 2, str(folder), plans)
    assert all(isinstance(each, dict) for each in found), found
    return found


def test_a_step_has_the_loss_and_the_gradients_of_a_forward_and_a_backward(ranks: list[Any]) -> None:
    for kind in [*WITH_LOSS, "exported"]:
        model, args = model_of("scalar" if kind == "exported" else kind)
        loss = loss_in(model.kind, model(*args))
        loss.backward()
        for found in ranks:
            for value, grads in found[kind]:
                assert value == pytest.approx(loss.item(), rel=1e-12)
                for name, parameter in model.named_parameters():
                    torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-14)


def test_a_step_of_a_model_that_returns_no_loss_is_refused(ranks: list[Any]) -> None:
    for kind in ["none", "two"]:
        for found in ranks:
            assert (
                "none a loss\n  Return a scalar alone, as `loss`, first of several, or as the only one with a gradient"
                in found[kind]
            )


def test_a_name_says_which_result_is_the_loss(tmp_path: Path) -> None:
    model, args = model_of("deep")
    for name, said in (("1.losses.2", "nothing called '1.losses.2'"), ("1", "nothing called '1'")):
        with pytest.raises(PlanError, match=said):
            sbpc.plan(model, args, Mesh(data=2), loss=name)
    with pytest.raises(PlanError, match=r"gradients, logits \([\d, ]*\), none a loss"):
        sbpc.plan(model_of("none")[0], args, Mesh(data=2), loss="logits")
    for options in ({}, {"microbatches": 2}):
        plan = sbpc.plan(model, args, Mesh(data=2), loss="1.losses.1", **options)
        plan.save(tmp_path / "plan")
        assert plan.options.loss == sbpc.load(tmp_path / "plan").options.loss == 2
        loss = loss_in("deep", model(*args))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        run = sbpc.simulate(plan, model, args)
        torch.testing.assert_close(loss_in("deep", run.outputs), loss.detach(), rtol=1e-12, atol=1e-14)
        for found, wanted in zip(run.gradients.values(), grads):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
