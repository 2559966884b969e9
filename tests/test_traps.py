"""The named traps: what other systems get wrong in silence, each as a plan compared with eager torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import B, Mesh, P, S
from sbpc.boxing.paths import path
from sbpc.errors import PlanError
from sbpc.graph.operands import operands
from sbpc.mesh.layout import Layout
from sbpc.mesh.states import Partial
from tests import models
from tests.compare import largest_error, relative_error
from tests.random_plans import random_plan

TOLERANCE = 1e-10
pytestmark = pytest.mark.usefixtures("float64")


def check(model: nn.Module, args: Any, mesh: Mesh, kwargs: Any = None, plans: int = 4, **options: Any) -> sbpc.Plan:
    """The plan and some random ones equal eager torch."""
    plan = sbpc.plan(model, args, mesh, kwargs=kwargs, **options)
    plan.verify()
    assert largest_error(plan, model, args, kwargs) <= TOLERANCE
    for seed in range(plans):
        drawn = random_plan(plan, seed)
        drawn.verify()
        assert largest_error(drawn, model, args, kwargs) <= TOLERANCE, f"random plan {seed}"
    return plan


def states_read(plan: sbpc.Plan, op: Any) -> set[tuple[Any, ...]]:
    """The input states of all candidate signatures of all calls of an op."""
    nodes = [node for node in plan.graph.graph.nodes if node.target == op]
    assert nodes
    return {signature.inputs for node in nodes for signature in node.meta["signatures"]}


@pytest.mark.parametrize(
    "sizes", [pytest.param({"x": 2}, marks=pytest.mark.prove), {"x": 3}, {"x": 2, "y": 2}], ids=str
)
def test_partial_plus_scalar_and_partial_times_partial(sizes: dict[str, int]) -> None:
    plan = check(*models.scalar_traps(), Mesh(**sizes))
    assert (P,) not in states_read(plan, torch.ops.aten.add.Tensor)  # P + number
    assert (P, P) not in states_read(plan, torch.ops.aten.mul.Tensor)


@pytest.mark.parametrize("sizes", [pytest.param({"x": 2}, marks=pytest.mark.prove), {"x": 2, "y": 3}], ids=str)
def test_bias_is_added_once_under_a_split_contraction(sizes: dict[str, int]) -> None:
    model, args = models.mlp()
    axes = tuple(sizes)
    plan = check(model, args, Mesh(**sizes), pin={"downs.0.weight": f"S(1)@{axes[-1]}"})
    for signature in states_read(plan, torch.ops.aten.addmm.default):
        if signature[1:] == (S(1), S(0)):
            assert signature[0] == P
            break
    else:
        pytest.fail("addmm does not offer a split contraction")


UNEVEN = [  # sizes of the mesh, rows of the batch
    pytest.param(sizes, batch, marks=() if at == number else pytest.mark.prove)
    for at, sizes in enumerate(({"x": 4}, {"x": 3}, {"x": 2, "y": 3}))
    for number, batch in enumerate((48, 10, 5))
]


@pytest.mark.parametrize(("sizes", "batch"), UNEVEN, ids=str)
def test_mean_and_cross_entropy_with_ignore_index_over_an_uneven_batch(batch: int, sizes: dict[str, int]) -> None:
    model, args = models.ignore_index_loss(batch=batch)
    plan = sbpc.plan(model, args, Mesh(**sizes), inputs=None)
    assert largest_error(plan, model, args) <= TOLERANCE
    for seed in range(10):
        assert largest_error(random_plan(plan, seed), model, args) <= TOLERANCE


def test_dtensors_wrong_mean_is_right_here() -> None:
    """DTensor's cross-entropy takes a mean of local means: 1.4841 instead of 1.5638 on such a batch."""
    model, (x, labels) = models.ignore_index_loss(batch=8)
    labels[:] = torch.tensor([-1, -1, -1, 3, 1, 2, 0, -1])
    plan = sbpc.plan(model, (x, labels), Mesh(x=2))
    split = [seed for seed in range(30) if on_a_batch_shard(random_plan(plan, seed))]
    assert split
    for seed in split:
        assert largest_error(random_plan(plan, seed), model, (x, labels)) <= TOLERANCE


def on_a_batch_shard(plan: sbpc.Plan) -> bool:
    """Whether the loss is taken of a batch shard."""
    node = next(n for n in plan.graph.graph.nodes if n.target == torch.ops.aten.nll_loss_forward.default)
    return plan.assignment.choices[node.name].signatures[0].inputs[0] == S(0)


@pytest.mark.parametrize("sizes", [pytest.param({"x": 2}, marks=pytest.mark.prove), {"x": 2, "y": 2}], ids=str)
def test_tied_embeddings_are_one_parameter_with_one_gradient(sizes: dict[str, int]) -> None:
    model, args = models.gpt2(tied=True, layers=1)
    plan = check(model, args, Mesh(**sizes), plans=2)
    run = sbpc.simulate(plan, model, args)
    assert list(run.gradients) == [name for name, _ in model.named_parameters()]
    tied = list(plan.ports.tied)
    assert tied and all(plan.layout(name) == plan.layout(plan.ports.tied[name]) for name in tied)


class Merge(nn.Module):
    """A view that merges a dim with the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.linear(x.reshape(x.shape[0] * x.shape[1], 12))
            .tanh()
            .reshape(x.shape)
            .transpose(0, 1)
            .reshape(-1, 12)
            .square()
            .sum()
        )


@pytest.mark.parametrize(
    "shape",
    [pytest.param((4, 6, 12), marks=pytest.mark.prove), (6, 5, 12), pytest.param((3, 2, 12), marks=pytest.mark.prove)],
)
def test_view_that_merges_a_split_dim(shape: tuple[int, ...]) -> None:
    plan = check(Merge(), (torch.randn(shape),), Mesh(x=2, y=3), plans=8)
    for node in plan.graph.graph.nodes:
        if node.target == torch.ops.aten.view.default and node.args[1] == [shape[0] * shape[1], 12]:
            read = {signature.inputs[0] for signature in node.meta["signatures"]}
            assert S(0) in read and S(1) not in read


def test_gather_of_the_outer_of_two_splits_does_not_interleave() -> None:
    axes = ("x", "y")
    tensor = torch.arange(16.0).reshape(8, 2)
    before = Layout(axes, (S(0), S(0)))
    after = Layout(axes, (B, S(0)))
    mesh = Mesh(x=2, y=2)
    steps = path(before, after, (8, 2), 8, mesh)
    assert [step.collective for step in steps] != ["all_gather"]
    assert len(after.shards(tensor, mesh.sizes)) == 4  # and test_lowering.py runs every such pair


@pytest.mark.parametrize(
    "batch", [pytest.param(1, marks=pytest.mark.prove), 5, pytest.param(7, marks=pytest.mark.prove)]
)
def test_batch_that_does_not_divide(batch: int) -> None:
    check(*models.mlp(batch=batch), Mesh(data=4), plans=6)
    check(*models.gpt2(batch=batch, layers=1), Mesh(data=2, tensor=2), plans=1)


def test_mesh_axis_of_size_one() -> None:
    plan = check(*models.mlp(), Mesh(data=1, tensor=2, rest=1), plans=4)
    assert plan.cost.bytes_sent["data"] == plan.cost.bytes_sent["rest"] == 0
    check(*models.mlp(), Mesh(data=1), plans=2)


def test_unused_parameter_has_no_gradient() -> None:
    model, args = models.unused_parameter()
    plan = check(model, args, Mesh(x=2))
    gradients = sbpc.simulate(plan, model, args).gradients
    assert gradients["unused.weight"] is None and gradients["used.weight"] is not None


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state() -> None:
    model, args = models.lora()
    plan = check(model, args, Mesh(x=2, y=2))
    assert "base.weight" not in sbpc.simulate(plan, model, args).gradients
    full = sum(p.numel() for p in model.parameters()) * 8
    assert plan.cost.memory["optimizer"] < 2 * full


def test_eval_mode_and_forward_alone() -> None:
    model, args = models.two_outputs()
    model.eval()
    plan = sbpc.plan(model, args, Mesh(x=2), train=False)
    run = sbpc.simulate(plan, model, args)
    assert run.gradients == {} and plan.cost.memory["gradients"] == plan.cost.memory["optimizer"] == 0
    for found, expected in zip(run.outputs[:3], model(*args)):
        assert relative_error(found, expected.detach()) <= TOLERANCE
    assert not model.training


def test_several_outputs_in_their_structure() -> None:
    for name in ("two_outputs", "dict_output", "dataclass_output"):
        model, args = getattr(models, name)()
        plan = check(model, args, Mesh(x=2))
        assert type(sbpc.simulate(plan, model, args).outputs) is type(model(*args))


def test_keyword_none_and_non_tensor_arguments() -> None:
    model, args, kwargs = models.kwargs_model()
    plan = check(model, args, Mesh(x=2, y=2), kwargs)
    with pytest.raises(sbpc.SbpcError, match="the arguments are not like those planned"):
        sbpc.simulate(plan, model, args, kwargs | {"scale": 2.0})


def test_constants_that_compare_equal_are_not_the_same_argument() -> None:
    """A number decides the type of a result, and what divides by 0.0 has another sign than what divides by -0.0."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: Any) -> Tensor:
            return x * by

    x = torch.arange(4)
    for planned, given in ((2, 2.0), (1, True), (0.0, -0.0)):
        plan = sbpc.plan(Scaled(), (x, planned), Mesh(x=2))
        assert torch.equal(sbpc.simulate(plan, Scaled(), (x, planned)).outputs, x * planned)
        with pytest.raises(PlanError, match="the arguments are not like those planned"):
            sbpc.simulate(plan, Scaled(), (x, given))


def test_a_parameter_that_is_tied_after_it_was_planned_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = sbpc.plan(model, (torch.randn(6, 4),), Mesh(x=2))
    model[1].weight = model[0].weight
    with pytest.raises(PlanError, match=r"tied to 0\.weight, and was not when planned"):
        sbpc.simulate(plan, model, (torch.randn(6, 4),))


def test_input_that_requires_grad() -> None:
    model, args = models.two_outputs()
    x = args[0].detach().requires_grad_()
    plan = sbpc.plan(model, (x,), Mesh(x=2, y=2))
    run = sbpc.simulate(plan, model, (x,))
    left, right, _, _ = model(x)
    (expected,) = torch.autograd.grad((left, right), x, (torch.ones_like(left), torch.ones_like(right)))
    assert relative_error(run.input_gradients[0], expected) <= TOLERANCE


def test_two_plans_with_different_meshes_in_one_process() -> None:
    model, args = models.mlp()
    first, second = sbpc.plan(model, args, Mesh(x=2)), sbpc.plan(model, args, Mesh(x=3, y=2))
    for plan in (first, second, first):
        assert largest_error(plan, model, args) <= TOLERANCE


def test_partial_maximum_is_read_by_a_boxing_only() -> None:
    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).amax(dim=0)

    model, args = Largest(), (torch.randn(24, 12),)
    plan = sbpc.plan(model, args, Mesh(x=2, y=2), train=False)
    offered = {s.outputs for node in plan.graph.graph.nodes for s in node.meta.get("signatures", ())}
    assert (Partial("max"),) in offered
    for seed in range(10):
        drawn = random_plan(plan, seed)
        found = sbpc.simulate(drawn, model, args).outputs
        assert relative_error(found, model(*args).detach()) <= TOLERANCE
        for node in drawn.graph.graph.nodes:
            if "signatures" in node.meta:
                read = [
                    drawn.assignment.choices[node.name].input(slot, ("x", "y")) for slot in range(len(operands(node)))
                ]
                assert not any(Partial("max") in layout.states for layout in read)


@dataclass
class Batch:
    x: Tensor
    labels: Tensor


def test_arguments_in_a_dataclass() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 4)

        def forward(self, batch: Batch) -> Tensor:
            return F.cross_entropy(self.linear(batch.x), batch.labels)

    check(Takes(), (Batch(torch.randn(24, 12), torch.randint(0, 4, (24,))),), Mesh(x=2))


def test_loss_and_targets_given_apart() -> None:
    model = nn.Linear(12, 4)
    x, labels = torch.randn(24, 12), torch.randint(0, 4, (24,))
    plan = sbpc.plan(model, (x,), Mesh(x=2), loss=F.cross_entropy, targets=(labels,))
    run = sbpc.simulate(plan, model, (x, labels))
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    assert relative_error(run.outputs, loss.detach()) <= TOLERANCE
    assert relative_error(run.gradients["weight"], model.weight.grad) <= TOLERANCE


def test_op_without_a_rule_is_replicated_and_the_plan_says_so() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.matrix_exp(self.linear(x)[:12]).sum()

    model, args = Odd(), (torch.randn(24, 12) / 10,)
    plan = sbpc.plan(model, args, Mesh(x=2))
    assert largest_error(plan, model, args) <= TOLERANCE
    assert "no rule for aten.linalg_matrix_exp.default" in str(plan)


class Strided(nn.Module):
    """Reads a product's memory by strides of its own."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return torch.as_strided(y.t() if self.turned else y, (3, 4), (4, 1)).tanh().sum(1)


def test_op_that_reads_strides_gets_those_it_was_captured_with_or_is_refused() -> None:
    x = torch.randn(3, 6)
    check(Strided(False), (x,), Mesh(x=3, y=2))
    with pytest.raises(sbpc.SbpcError, match="reads the memory of a tensor that is not contiguous"):
        sbpc.plan(Strided(True), (x,), Mesh(x=3, y=2))


def test_batch_norm_in_eval_mode() -> None:
    for train in [True, False]:
        model, args = nn.BatchNorm1d(6).eval(), (torch.randn(12, 6),)
        plan = sbpc.plan(model, args, Mesh(x=2), train=train)
        assert plan.verify() > 10
        assert relative_error(sbpc.simulate(plan, model, args).outputs, model(*args).detach()) <= TOLERANCE


def test_mesh_of_four_axes_uneven_and_in_any_order_of_splits() -> None:
    plan = check(*models.mlp(batch=50), Mesh(a=2, b=1, c=3, d=2), plans=1)
    assert plan.cost.flops < plan.cost.flops_one_device / 8
    tensor = torch.randn(7, 5)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)):
        layout = Layout(plan.mesh.axes, (S(0), S(1), S(0), S(0)), order)
        parts = layout.shards(tensor, plan.mesh.sizes)
        assert torch.equal(layout.whole(parts, plan.mesh.sizes), tensor)
        assert Layout.parse(str(layout), plan.mesh.axes) == layout
        for rank, part in enumerate(parts):
            at = plan.mesh.coordinates(rank)
            assert part.shape == layout.local_shape(tensor.shape, plan.mesh.sizes, at)
            assert torch.equal(part, layout.shard(tensor, plan.mesh.sizes, at))


def test_rows_that_two_axes_cut_unevenly_begin_where_they_do() -> None:
    """Of 5 rows over 2 and 2 ranks three ranks have one, at 2, 3 and 4: a shape that is equal, and steps that are not."""
    model, tokens = nn.Embedding(5, 4), (torch.arange(20) % 5).view(4, 5)
    pins = {"weight": "S(0)@a>b", "embedding": "[P, P]", "embedding_dense_backward": "[S(0), S(0)]"}
    plan = check(model, (tokens,), Mesh(a=2, b=2), plans=0, pin=pins)
    assert len({plan.chunk.shape_class(rank) for rank in range(4)}) == 3


def test_an_op_in_place_becomes_the_op_of_its_arguments_whatever_its_overload_is_called() -> None:
    """The backward of a norm of order 3 writes by pow_.Scalar, which is no pow.Scalar: that takes a number first."""

    class Powers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            far = torch.linalg.vector_norm(y, 3) + F.normalize(y, p=1.5).sum()
            return far + (y * 2).float_power_(2).sum() + y.abs().add(1).pow_(x.abs()).mean()

    check(Powers(), (torch.randn(6, 4),), Mesh(x=2))
