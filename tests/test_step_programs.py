"""The programs of a step: what they take and give, what shares memory, and when they wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import sbpc
from sbpc import Mesh
from sbpc.graph.ports import TANGENT, results
from sbpc.plans.staged.schedules import FORWARD as EARLY
from sbpc.plans.staged.stage_parts import parts_of
from sbpc.plans.step_programs import BACKWARD, ENDING, FORWARD, JOINT, UNSENT, UNSENT_JOINT, StepPrograms
from sbpc.runtime.one_process.lockstep import lockstep
from sbpc.runtime.one_process.simulate import shards_of, whole_inputs
from sbpc.runtime.prepared import memory_of, prepared, wait
from tests import models

CPU = torch.device("cpu")


def calls(gm: torch.fx.GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "call_function"]


def test_waits_stand_right_before_what_needs_them_and_collectives_where_they_were() -> None:
    model, args = models.mlp(batch=960, layers=3)
    plan = sbpc.plan(model, args, Mesh(data=2), inputs=["S(0)"], pin={"*": "B"}, objective="serial")
    backward = prepared(StepPrograms(plan).program(BACKWARD, 0), CPU, plan.options.overlaps, 0, len(plan.parameters))
    nodes = calls(backward)
    started, whole = (
        [node.meta["boxed"] for node in each if "c10d" in str(node.target) and node.target is not wait]
        for each in (nodes, calls(plan.local))
    )
    assert started == [name for name in whole if name in started] and len(started) > 4
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
    programs = StepPrograms(plan)
    for name, early, late in (
        (BACKWARD, 0, 3),
        (UNSENT, 0, 2),
        (ENDING, 0, 3),
        (JOINT, 2, 3),
        (UNSENT_JOINT, 2, 2),
        (FORWARD, 2, 0),
    ):
        found: list[Any] = results(prepared(programs.program(name, 0), CPU, True, early, late))
        roots = [memory_of(node) for node in found[early : early + late]]
        assert len(set(roots)) == len(roots) == late
        assert all(root.op == "call_function" for root in roots)
        assert all(node.op == "call_function" for node in found[:early])


class Contrastive(nn.Module):
    """Pairs of a batch against each other: its micro-batches are written out, one after the other, as each reads the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.scale = nn.Linear(8, 6), nn.Linear(10, 6), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = (F.normalize(values, dim=-1) for values in (self.left(x), self.right(y)))
        logits, labels = self.scale.exp() * left @ right.T, torch.arange(len(x))
        return F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)


def test_halves_of_a_step_with_written_out_micro_batches_give_what_the_step_gives() -> None:
    torch.manual_seed(0)
    model, args = Contrastive(), (torch.randn(8, 8), torch.randn(8, 10))
    plan = sbpc.plan(model, args, Mesh(data=2), microbatches=2)
    given = shards_of(plan, whole_inputs(plan, model, args, None, None, 0))
    groups = {plan.mesh.group_name(axes): plan.mesh.groups(axes) for axes in plan.mesh.runs()}
    shared = [
        node
        for node, part in parts_of(plan.boxed, None).items()
        if node.meta.get("phase") == "backward" and part == EARLY
    ]
    assert shared  # boxings that the backward of one micro-batch and the forward of the next one read
    (tangent,) = [at for at, port in enumerate(plan.ports.inputs) if port.kind == TANGENT]
    programs = StepPrograms(plan)

    def run(name: str, inputs: list[list[Tensor]]) -> list[list[Tensor]]:
        places = [[*values, *given[rank][len(plan.ports.inputs) :]] for rank, values in enumerate(inputs)]
        return lockstep([programs.program(name, rank) for rank in range(2)], places, groups).outputs

    inputs = [values[: len(plan.ports.inputs)] for values in given]
    whole = run(JOINT, inputs)
    early = run(FORWARD, [[*values[:tangent], *values[tangent + 1 :]] for values in inputs])
    kept = [[*out[1:], values[tangent]] for out, values in zip(early, inputs)]
    left = run(UNSENT, kept)
    ways = [(early, run(BACKWARD, kept)), (early, run(ENDING, left)), (run(UNSENT_JOINT, inputs), run(ENDING, left))]
    for first, found in ways:
        for rank, (loss, *gradients) in enumerate(whole):
            assert torch.equal(first[rank][0], loss)
            assert all(map(torch.equal, found[rank], gradients)) and len(found[rank]) == len(gradients) == 5


class Places(nn.Module):
    """A table of places, whose gradient is summed over the batch before it is scattered, and one table in two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.scale = nn.Embedding(12, 8), nn.Embedding(6, 8), nn.Parameter(torch.ones(8))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        return F.cross_entropy((x * self.scale @ self.table.weight.T).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("expert", ["data", "fsdp"])
def test_nothing_is_sent_for_gradients_before_their_ways_home(expert: str) -> None:
    torch.manual_seed(0)
    model, args = Places(), (torch.randint(0, 12, (8, 6)),)
    plan = sbpc.baseline(expert, model, args, Mesh(x=2, y=4, cluster="h100"))
    given = shards_of(plan, whole_inputs(plan, model, args, None, None, 0))
    groups = {plan.mesh.group_name(axes): plan.mesh.groups(axes) for axes in plan.mesh.runs()}
    programs, places = StepPrograms(plan), [values[len(plan.ports.inputs) :] for values in given]

    def run(name: str, inputs: list[list[Tensor]]) -> list[list[Tensor]]:
        return lockstep([programs.program(name, rank) for rank in range(8)], inputs, groups).outputs

    whole, (early, left) = run(JOINT, given), zip(*((each[:1], each[1:]) for each in run(UNSENT_JOINT, given)))
    doubled = [[2 * value for value in values] for values in left]
    for first, found, (loss, *gradients) in zip(early, run(ENDING, [[*a, *b] for a, b in zip(doubled, places)]), whole):
        assert torch.equal(first[0], loss)
        for one, two in zip(found, gradients, strict=True):
            torch.testing.assert_close(one, 2 * two)
    sent = {
        str(node.target).split(".")[1] for node in programs.program(UNSENT, 0).graph.nodes if "c10d" in str(node.target)
    }
    assert sent <= {"all_gather_into_tensor", "wait_tensor"}  # of parameters
