"""Rows of experts that ranks share out where a step runs in parts: micro-batches, stages, recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sbpc
from sbpc import Mesh
from sbpc.mesh.states import Ragged
from tests.compare import largest_error
from tests.routed import ROUTINGS, Layers, batch
from tests.test_shared_rows import PRODUCT, states

PIPE: dict[str, Any] = {"pipe": 2, "a": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "micro-batches": ({"a": 4}, {"microbatches": 2, "schedule": "breadth-first"}),
    "on two axes": ({"a": 2, "b": 2}, {"microbatches": 4}),
    "beside another axis": ({"a": 2, "b": 2, "c": 2}, {"microbatches": 2}),
    "stages": (PIPE, {"stages": "pipe", "microbatches": 2}),
    "stages on two axes": ({"pipe": 2, "a": 2, "b": 2}, {"stages": "pipe", "microbatches": 4, "schedule": "1f1b"}),
    "interleaved": (PIPE, {"stages": "pipe", "microbatches": 2, "schedule": "interleaved:2"}),
    "recomputed": ({"a": 2, "b": 2}, {"recompute": "full"}),
    "partly": ({"a": 2}, {"recompute": "selective", "microbatches": 2}),
    "stages, recomputed": (PIPE, {"stages": "pipe", "microbatches": 2, "recompute": "full"}),
}


def planned(case: str, model: nn.Module, **more: Any) -> sbpc.Plan:
    """The plan of a case, whose experts are split over its axes but that of stages, at most two of them."""
    sizes, options = CASES[case]
    axes = [axis for axis in sizes if axis != "pipe"][:2]
    pin = ", ".join("S(0)" if axis in axes else "B" for axis in sizes if axis != "pipe")
    pins = {"*experts*": f"[{pin}]" if (len(sizes) > 1 and "pipe" not in sizes) or len(axes) > 1 else f"S(0)@{axes[0]}"}
    return sbpc.plan(model, batch(experts=8), Mesh(**sizes), pin=pins, **options, **more)


@pytest.mark.parametrize("case", CASES)
def test_steps_in_parts_equal_one_device_whatever_the_routing(case: str) -> None:
    torch.manual_seed(0)
    model = Layers(4 if case == "interleaved" else 2, experts=8).double()
    plan = planned(case, model)
    products = [node for chunk in plan.chunks for node in chunk.graph.graph.nodes if node.target is PRODUCT]
    assert products and all(Ragged(0) in states(n) or n.meta["val"].dim() == 3 for n in products)
    assert (plan.loop is not None) == ("microbatches" in CASES[case][1])
    assert plan.verify() > 100
    for routing in ROUTINGS:
        assert largest_error(plan, model, batch(routing, experts=8)) <= 1e-10, routing
