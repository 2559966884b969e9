"""The halves of a program: what they take and give, what shares memory, and when they wait."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import sbpc
from sbpc import Mesh
from sbpc.graph.ports import OUTPUT, TANGENT
from sbpc.runtime.one_process.lockstep import lockstep
from sbpc.runtime.one_process.simulate import shards_of, whole_inputs
from sbpc.runtime.partition import backward_nodes, memory_of, partition, wait
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
    programs = [plan.local_at(rank) for rank in range(2)]
    late = backward_nodes(programs[0])
    shared = [node for node in programs[0].graph.nodes if node.meta.get("phase") == "backward" and node not in late]
    assert shared  # boxings that the backward of one micro-batch and the forward of the next one read
    whole = lockstep(programs, given, groups).outputs
    halves, (tangent,) = [partition(program) for program in programs], [at for at, p in enumerate(plan.ports.inputs) if p.kind == TANGENT]
    inputs = [[*values[:tangent], *values[tangent + 1 :]] for values in given]
    early = lockstep([half.forward for half in halves], inputs, groups).outputs
    kept = [[*out[1:], values[tangent]] for out, values in zip(early, given)]
    found = lockstep([half.backward for half in halves], kept, groups).outputs
    (loss,) = [at for at, port in enumerate(plan.ports.outputs) if port.kind == OUTPUT]
    for rank, results in enumerate(whole):
        gradients = [each for at, each in enumerate(results) if at != loss]
        assert torch.equal(early[rank][0], results[loss])
        assert all(map(torch.equal, found[rank], gradients)) and len(found[rank]) == len(gradients) == 5
