"""Sequence parallelism (Korthikanti et al. 2022) comes out of the solver where it is cheapest; heads that do not divide."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.boxing.steps import WIRE
from sbpc.mesh.cluster import Rate
from sbpc.mesh.states import Split
from tests.compare import largest_error
from tests.models import RINGS


class Block(nn.Module):
    """Attention, with a head of keys for every `group` heads, and a feed-forward layer, each with its norm and its residual."""

    def __init__(self, width: int, heads: int, hidden: int, group: int = 1) -> None:
        super().__init__()
        self.size, self.group = width // heads, group
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // group, bias=False) for _ in range(2))
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.group > 1)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Blocks and a last norm; the loss is the sum of squares."""

    def __init__(self, width: int, heads: int, hidden: int, layers: int, group: int = 1) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, heads, hidden, group) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(x)).square().sum()


COLUMN_ROW = {f"blocks.*.{n}.weight": "S(0)" for n in ("q", "k", "v", "up")} | {
    f"blocks.*.{n}.weight": "S(1)" for n in ("o", "down")
}


def activations(plan: sbpc.Plan) -> str:
    """The collectives that move activations, in order: phase, what is moved, between which layers."""
    lines = []
    for node in plan.boxed.graph.nodes:
        step = node.meta.get("step")
        if step is not None and node.meta["val"].dim() == 3 and step.collective in WIRE:
            lines.append(f"{node.meta['phase']:8} {step.collective:14} {step.before} -> {step.after}  {node.args[0]}")
    return "\n".join(lines) + "\n"


SCHEME = """\
forward  reduce_scatter [P] -> [S(1)]  einsum_3
forward  all_gather     [S(1)] -> [B]  getitem_5
forward  reduce_scatter [P] -> [S(1)]  einsum_5
forward  all_gather     [S(1)] -> [B]  getitem_8
forward  reduce_scatter [P] -> [S(1)]  einsum_9
forward  all_gather     [S(1)] -> [B]  getitem_13
forward  reduce_scatter [P] -> [S(1)]  einsum_11
backward all_gather     [S(1)] -> [B]  getitem_19
backward reduce_scatter [P] -> [S(1)]  einsum_15
backward all_gather     [S(1)] -> [B]  add_4
backward reduce_scatter [P] -> [S(1)]  add_6
backward all_gather     [S(1)] -> [B]  add_7
backward reduce_scatter [P] -> [S(1)]  einsum_27
backward all_gather     [S(1)] -> [B]  add_8
"""  # of two blocks: gather before columns, scatter after rows, each way


def test_the_solver_finds_sequence_parallelism_where_it_is_cheapest() -> None:
    """Nothing is pinned: the norms and residuals of tokens split over the ranks need less of the memory's bandwidth."""
    with torch.device("meta"):
        model, x = Model(4096, 32, 4 * 4096, 2), torch.randn(2, 2048, 4096)
    plan = sbpc.plan(model, (x,), Mesh(tensor=8, cluster=RINGS), objective="serial")
    assert activations(plan) == SCHEME
    assert {name: str(plan.layout(name)) for name in ("blocks.1.q.weight", "blocks.1.o.weight")} == {
        "blocks.1.q.weight": "[S(0)]",
        "blocks.1.o.weight": "[S(1)]",
    }


MEGATRON = """\
forward  all_reduce     [P] -> [B]  einsum_3
forward  all_reduce     [P] -> [B]  einsum_5
forward  all_reduce     [P] -> [B]  einsum_9
forward  reduce_scatter [P] -> [S(1)]  einsum_11
backward all_gather     [S(1)] -> [B]  getitem_19
backward all_reduce     [P] -> [B]  einsum_15
backward all_reduce     [P] -> [B]  add_6
backward all_reduce     [P] -> [B]  einsum_27
"""  # of two blocks: what is cheapest after the last row layer is another matter, as only a norm and a sum follow


def test_the_solver_finds_sequence_parallelism_where_memory_is_short() -> None:
    """Where switches add up, an all-reduce sends less than a scatter and a gather, and is what the solver takes; it turns
    to scattering and gathering when less memory is given than whole norms and residuals need. Nothing is pinned."""
    switched = dataclasses.replace(RINGS, collectives=(Rate("all_reduce", efficiency=1.5),))
    with torch.device("meta"):
        model, x = Model(4096, 32, 4 * 4096, 2), torch.randn(2, 2048, 4096)
    mesh = Mesh(tensor=8, cluster=switched)
    free = sbpc.plan(model, (x,), mesh, objective="serial")
    assert activations(free) == MEGATRON
    short = sbpc.plan(model, (x,), mesh, memory=0.9 * free.cost.memory["total"], objective="serial")
    assert activations(short) == SCHEME
    assert free.cost.seconds < short.cost.seconds < 1.1 * free.cost.seconds


def test_sequence_parallelism_that_the_solver_finds_equals_one_device() -> None:
    torch.manual_seed(0)
    model, x = Model(48, 4, 192, 2).double(), torch.randn(2, 24, 48, dtype=torch.float64)
    plan = sbpc.plan(model, (x,), Mesh(tensor=4), pin=COLUMN_ROW, objective="serial")
    assert activations(plan) == SCHEME
    assert largest_error(plan, model, (x,)) <= 1e-10


@pytest.mark.parametrize(("ranks", "split"), [(2, False), (3, True), pytest.param(4, False, marks=pytest.mark.prove)])
def test_heads_that_do_not_divide_are_refused_by_signature_and_not_by_model(ranks: int, split: bool) -> None:
    """Of 24 numbers that are 3 heads each of 2 ranks would hold one and a half heads: the view cannot have them split,
    and no more than the view."""
    torch.manual_seed(0)
    model, x = Model(24, 3, 96, 1).double(), torch.randn(1, 5, 24, dtype=torch.float64)
    plan = sbpc.plan(model, (x,), Mesh(tensor=ranks), pin=COLUMN_ROW, objective="serial")
    views = [node for node in plan.graph.graph.nodes if node.target is torch.ops.aten.view.default]
    states = {plan.layout(node.name).states[0] for node in views if node.meta["val"].shape == (1, 5, 3, 8)}
    assert states == {Split(2)} if split else Split(2) not in states
    assert str(plan.layout("gelu")) == "[S(2)]"
    for name in ("q", "o", "up", "down"):  # their weights and the gradients of these are split as they were pinned
        assert plan.layout(f"blocks.0.{name}.weight").states[0] == (Split(0) if name in ("q", "up") else Split(1))
    assert plan.cost.flops <= 0.52 * plan.cost.flops_one_device
    assert plan.verify() > 100 and largest_error(plan, model, (x,)) <= 1e-10


CONTEXT = """\
forward  all_gather     [S(0)] -> [B]  (32768, 512)
forward  all_gather     [S(0)] -> [B]  (32768, 512)
backward reduce_scatter [P] -> [S(2)]  (1, 1, 32768, 512)
backward reduce_scatter [P] -> [S(2)]  (1, 1, 32768, 512)
"""  # of a block: keys and values whole, their gradients summed; the queries, and all else of the tokens, stay where they are


def test_the_solver_splits_a_long_sequence_of_which_heads_and_batch_are_few() -> None:
    """Nothing is pinned: each of 8 ranks has a part of the queries of causal attention, and reads all keys and values."""
    with torch.device("meta"):
        model, x = Model(2048, 4, 4 * 2048, 1, group=4), torch.randn(1, 32768, 2048)
    plan = sbpc.plan(model, (x,), Mesh(sequence=8, cluster=RINGS), objective="serial")
    steps = [node for node in plan.boxed.graph.nodes if "step" in node.meta and 32768 in node.meta["val"].shape]
    moved = [(node.meta["phase"], node.meta["step"], tuple(node.meta["val"].shape)) for node in steps]
    lines = [
        f"{phase:8} {s.collective:14} {s.before} -> {s.after}  {shape}\n"
        for phase, s, shape in moved
        if s.collective in WIRE
    ]
    assert "".join(lines) == CONTEXT
    assert plan.cost.flops <= 1.01 * plan.cost.flops_one_device / 8


@pytest.mark.parametrize("axes", [pytest.param({"s": 2}, marks=pytest.mark.prove), {"s": 3}, {"s": 2, "t": 2}], ids=str)
def test_causal_attention_over_a_split_sequence_equals_one_device(axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, x = Model(8, 2, 32, 2, group=2).double(), torch.randn(1, 13, 8, dtype=torch.float64)
    plan = sbpc.plan(
        model, (x,), Mesh(**axes), pin={"_scaled_dot_product*": ", ".join(f"S(2)@{axis}" for axis in axes)}
    )
    attention = [node for node in plan.boxed.graph.nodes if "_scaled_dot_product" in str(node.target)]
    assert len(attention) == 4 and all(
        all(s.outputs[0] == Split(2) for s in node.meta["choice"].signatures) for node in attention
    )
    assert plan.verify() > 100 and largest_error(plan, model, (x,)) <= 1e-10
