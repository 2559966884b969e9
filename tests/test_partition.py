"""The halves of a program: what they take and give, what shares memory, and when they wait."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import sbpc
from sbpc import Mesh
from sbpc.runtime.partition import memory_of, partition, wait
from tests import models


def calls(gm: torch.fx.GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def test_waits_stand_right_before_what_needs_them_and_collectives_where_they_were() -> None:
    model, args = models.mlp(batch=960, layers=3)
    plan = sbpc.plan(model, args, Mesh(data=2), inputs=["S(0)"], pin={"*": "B"}, objective="serial")
    backward = partition(plan.local).backward
    nodes = calls(backward)
    started = [node.name for node in nodes if "c10d" in str(node.target) and node.target is not wait]
    assert started == [node.name for node in calls(plan.local) if node.name in started] and len(started) > 4
    at_end = 0
    for at, node in enumerate(nodes):
        if node.target is wait:
            later = (other for other in nodes[at:] if other.target is not wait and memory_of(other) is other)
            reader = next(later, backward.graph.output_node())
            assert memory_of(node) in [memory_of(used) for used in reader.all_input_nodes]
            at_end += reader.op == "output"
    assert at_end > 4  # the gradients


class Shares(nn.Module):
    """Two parameters with one gradient, one whose gradient is the tangent, one that is a result."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.whole = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.relu(x) + self.left + self.right, self.whole


def test_no_two_gradients_share_memory_and_no_result_is_a_parameter() -> None:
    plan = sbpc.plan(Shares(), (torch.randn(4),), Mesh(data=1))
    halves = partition(plan.local)
    found = list(halves.backward.graph.output_node().args[0])  # type: ignore[arg-type]
    roots = [memory_of(node) for node in found]
    assert len(set(roots)) == len(roots) == 3
    assert all(root.op == "call_function" for root in roots)
    results = list(halves.forward.graph.output_node().args[0])[:2]  # type: ignore[arg-type]
    assert all(node.op == "call_function" for node in results)
