"""What crosses between pipeline stages: parameters that several read, sums over stages, and plans in which something is not sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError, VerifyError
from sbpc.passes.stages import cut
from tests.compare import compare, eager

STAGED: dict[str, Any] = {"stages": "pipe", "microbatches": 2}


class Once(nn.Module):
    """Every layer reads what is made of one parameter once."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.randn(8, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared.tanh()
        for layer in self.layers:
            x = x + torch.relu(layer(x) @ shared)
        return x.square().mean()


class Turns(nn.Module):
    """Two layers by turns, as in ALBERT, with one norm in front of all; `divided` by the norm of the layer's weight."""

    def __init__(self, divided: bool = True) -> None:
        super().__init__()
        self.divided = divided
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for at in range(4):
            layer = self.layers[at % 2]
            more = layer(self.norm(x))
            x = x + (more / (1 + layer.weight.norm()) if self.divided else more)
        return x.square().mean()


class Rotated(nn.Module):
    """Every layer reads what the first one makes, so that two chunks of a stage read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        angles = self.first(x).cos()
        for layer in self.layers:
            x = x + layer(x) * angles
        return x.square().mean()


def example(net: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Tensor]]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return net(), (torch.randn(8, 8),)


@pytest.mark.parametrize(("net", "schedule"), [(Once, "1f1b"), (Once, "zbv"), (Turns, "interleaved"), (Turns, "zbv")])
def test_every_stage_makes_what_it_reads_of_parameters_alone(net: type[nn.Module], schedule: str) -> None:
    model, args = example(net)
    plan = sbpc.plan(model, args, Mesh(pipe=2, data=2), schedule=schedule, **STAGED)
    plan.verify()
    assert compare(plan, model, args, *eager(model, args)) <= 1e-10
    assert sbpc.simulate(plan, model, args).bytes_sent == plan.cost.bytes_sent


def test_what_a_plan_under_a_memory_limit_keeps_of_parameters_does_not_cross(tmp_path: Path) -> None:
    model, args = example(lambda: Turns(divided=False))
    options = STAGED | {"schedule": "interleaved", "objective": "serial"}
    free = sbpc.plan(model, args, Mesh(pipe=2, data=2), **options)
    plan = sbpc.plan(model, args, Mesh(pipe=2, data=2), memory=0.8 * free.memory["total"], **options)
    kept = [node for chunk in plan.chunks for node in chunk.graph.graph.nodes if node.name == "norm_weight_stored"]
    assert len(kept) > 1 and all(node.op == "call_function" for node in kept)
    plan.save(tmp_path / "plan")
    for each in (plan, sbpc.load(tmp_path / "plan")):
        assert compare(each, model, args, *eager(model, args)) <= 1e-10


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_plan_in_which_no_chunk_leaves_what_another_one_waits_for_is_refused(
    schedule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # now what is made before all micro-batches is to cross in each
    monkeypatch.setattr(cut, "made_of", lambda *_: set())
    plan = sbpc.plan(*example(Once), Mesh(pipe=2), schedule=schedule, **STAGED)
    words = "tanh, which chunk 0 is to send and leaves in no micro-batch"
    with pytest.raises(VerifyError, match=words):
        plan.verify()
    plan.save(tmp_path / "plan")
    with pytest.raises(PlanError, match=words):
        sbpc.load(tmp_path / "plan")


@pytest.mark.parametrize("schedule", ["interleaved:3", "zbv"])
def test_a_value_that_two_chunks_of_a_stage_read_is_sent_once(schedule: str) -> None:
    model, args = example(Rotated)
    plan = sbpc.plan(model, args, Mesh(pipe=2, cluster="ethernet"), schedule=schedule, **STAGED)
    readers = [(name, owner) for chunk, owner in zip(plan.chunks, plan.owners) for name in chunk.receives.values()]
    assert len(set(readers)) < len(readers)
    run = sbpc.simulate(plan, model, args)
    assert run.bytes_sent == plan.cost.bytes_sent
    latency, bandwidth, _ = plan.mesh.link((0,), "send")
    sent = [0.0, 0.0]  # by stage the bytes whose seconds are predicted
    for action in plan.everything:
        for need in plan.needs(action):
            if seconds := plan.sending(need, action):
                sent[plan.owners[need.chunk]] += (seconds - latency) * bandwidth
    assert max(sent) == pytest.approx(run.bytes_sent["pipe"])
