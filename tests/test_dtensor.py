"""Where torch's DTensor was wrong and a plan is not: a mean whose shards of the batch count unequally many targets."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import sbpc
from sbpc import Mesh
from tests.dtensor_rules import local_ranks


class Loss(nn.Module):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, target: Tensor) -> Tensor:
        return F.cross_entropy(self.logits, target)


@pytest.mark.usefixtures("float64")
def test_cross_entropy_with_ignored_targets_is_that_of_one_device_where_dtensor_may_average_means():
    assert not dist.is_initialized()
    torch.manual_seed(0)
    logits, target = torch.randn(8, 6), torch.randint(0, 6, (8,))
    target[:3] = -100  # the first rank counts one target, the second one four
    eager = Loss(logits)
    expected = eager(target)
    expected.backward()
    means = [F.cross_entropy(part, targets) for part, targets in zip(logits.chunk(2), target.chunk(2))]
    with local_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        sharded = [distribute_tensor(value, mesh, [Shard(0)]) for value in (logits, target)]
        found = F.cross_entropy(*sharded).full_tensor().reconcile()
    assert not dist.is_initialized()
    average = torch.stack(means).mean()
    assert (f"{average:.4f}", f"{expected:.4f}") == ("1.4841", "1.5638")
    assert torch.allclose(found, average) or torch.allclose(found, expected)  # 2.13 averages, 2.15 is right
    model = Loss(logits)
    plan = sbpc.plan(model, (target,), Mesh(x=2), pin={"logits": "S(0)"})
    run = sbpc.simulate(plan, model, (target,))
    assert str(plan.layouts["logits"]) == "[S(0)]"
    assert torch.allclose(run.outputs, expected, rtol=1e-12)
    assert torch.allclose(run.gradients["logits"], eager.logits.grad, rtol=1e-12)
