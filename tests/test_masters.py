"""Parameters held in 16 bits have masters in float32 at their homes, which optimizers step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError, SbpcError
from sbpc.graph.ports import PARAMETER
from tests.gradient_errors import HALF, error
from tests.test_reduce import Net

WIDE = torch.float32


def made(rows: int = 128, dtype: torch.dtype = HALF) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model that is held in 16 bits, and a batch."""
    torch.manual_seed(0)
    return Net().to(dtype), (torch.randn(rows, 32, dtype=dtype), torch.randn(rows, 32, dtype=dtype))


def stored(plan: Any) -> dict[str, torch.dtype]:
    """The types in which a plan stores parameters."""
    return {port.name: value.dtype for port, value in plan.shapes.items() if port.kind == PARAMETER}


def test_masters_are_there_where_an_optimizer_trains_what_is_held_in_16_bits() -> None:
    model, args = made()
    model.up.bias.requires_grad_(False)  # type: ignore[union-attr]
    mesh, trained = Mesh(d=2), {name for name, p in model.named_parameters() if p.requires_grad}
    plan = sbpc.plan(model, args, mesh)
    assert plan.options.masters and plan.ports.masters == dict.fromkeys(trained, "bfloat16")
    assert stored(plan) == {name: WIDE if name in trained else HALF for name, _ in model.named_parameters()}
    others = {"masters": False}, {"optimizer": None}, {"train": False}
    for plan in (*(sbpc.plan(model, args, mesh, **each) for each in others), sbpc.plan(Net(), made(8, WIDE)[1], mesh)):
        assert plan.options.masters is False and plan.ports.masters == {}
    assert sbpc.plan(model, args, mesh, optimizer=None, masters=True).ports.masters


PLANS: dict[str, dict[str, Any]] = {
    "data": {"axes": {"d": 4}, "pin": {"up.weight": "S(0)@d"}},
    "tensor": {"axes": {"d": 2, "t": 2}},
    "exchange": {"axes": {"d": 4}, "reduce": "exchange"},
    "as computed": {"axes": {"d": 4}, "reduce": "as computed"},
    "in micro-batches": {"axes": {"d": 2}, "microbatches": 8},
    "in stages": {"axes": {"p": 2, "d": 2}, "stages": "p", "microbatches": 8},
}


@pytest.mark.parametrize("name", PLANS)
def test_masters_are_counted_simulated_saved_and_verified(name: str, tmp_path: Path) -> None:
    model, args = made()
    axes, more = PLANS[name]["axes"], {key: value for key, value in PLANS[name].items() if key != "axes"}
    one = error(sbpc.plan(model, args, Mesh(d=1)), model, args)
    plan = sbpc.plan(model, args, Mesh(**axes), **more)
    plan.save(tmp_path / "plan.sbpc")
    loaded = sbpc.load(tmp_path / "plan.sbpc")
    assert loaded.ports.masters == plan.ports.masters and loaded.options.masters
    for each in (plan, loaded):
        each.verify()
        run = sbpc.simulate(each, model, args)
        assert run.bytes_sent == each.cost.bytes_sent == plan.cost.bytes_sent
        assert run.peak_memory <= each.cost.memory["total"] == plan.cost.memory["total"]
        assert {gradient.dtype for gradient in run.gradients.values() if gradient is not None} == {WIDE}
    bare = sbpc.plan(model, args, Mesh(**axes), **more, masters=False)
    found, without = error(plan, model, args), error(bare, model, args)
    assert found <= without and found < (1.05 if more.get("reduce") is None else 1.5) * one
    assert "masters" in plan.diff(bare).asked
    symbols = {plan.cost.symbols[symbol]: value for symbol, value in plan.cost.numbers.items()}
    for axis, each in plan.cost.bytes_expr.items():
        assert float(each.xreplace(symbols)) == run.bytes_sent[axis]


def test_masters_are_cast_at_home_and_gathered_in_16_bits() -> None:
    model, args = made()
    for masters in (True, False):
        plan = sbpc.baseline("fsdp", model, args, Mesh(d=4), masters=masters, reduce="as computed")
        steps = [node for node in plan.boxed.graph.nodes if "step" in node.meta]
        gathered = [node.meta["val"].dtype for node in steps if node.meta["step"].collective == "all_gather"]
        assert len(gathered) >= 2 and set(gathered) == {HALF}
        assert plan.cost.memory["parameters"] == sum(p.numel() for p in model.parameters()) * (4 if masters else 2) / 4
        assert plan.cost.memory["optimizer"] == 2 * plan.cost.memory["parameters"]


def test_what_needs_no_masters_is_refused_them() -> None:
    _, args = made(8, WIDE)
    with pytest.raises(
        PlanError, match="masters=True, and no parameter that is trained is held in bfloat16 or float16"
    ):
        sbpc.plan(Net(), args, Mesh(d=2), masters=True)
    with pytest.raises(SbpcError, match="masters is 'yes'"):
        sbpc.plan(Net(), args, Mesh(d=2), masters="yes")
