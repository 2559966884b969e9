"""lift: products over flattened dims as products over the dims, as text, by their numbers, and what they make possible."""

from __future__ import annotations

import operator
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

import sbpc
from sbpc import Mesh
from sbpc.boxing.steps import WIRE
from sbpc.passes.canonicalize.lift import lift
from sbpc.passes.canonicalize.normalize import normalize
from sbpc.passes.capture.capture import capture
from tests.compare import largest_error
from tests.models import MODELS, gpt2
from tests.programs import assert_equal, double, eager
from tests.test_normalize import Model, text, x

aten = torch.ops.aten


def lifted(function, *args, train=True):
    """The text of the lifted graph of a function; it computes the same as the function."""
    module = function if isinstance(function, nn.Module) else Model(function)
    gm = lift(normalize(capture(module, args, train=train)))
    gm.graph.lint()
    assert_equal(gm, *eager(module, args, train=train), tolerance=1e-13)
    return text(gm)


def f64(*shape):
    return x(*shape, dtype=torch.float64).requires_grad_()


def test_a_linear_layer_and_its_gradients_keep_their_dims():
    linear = nn.Linear(4, 5).double()
    assert (
        lifted(linear, f64(2, 3, 4))
        == """\
linear [2, 3, 5] = linear(input_1, weight, bias)
einsum [2, 3, 4] = einsum(abd,dc->abc, [tangent_0, weight])
einsum_1 [5, 4] = einsum(cda,cdb->ab, [tangent_0, input_1])
sum_1 [5] = sum.dim_IntList(tangent_0, [0, 1])
return linear, einsum_1, sum_1, einsum"""
    )


def test_a_product_of_matrices_stays_as_it_is():
    assert (
        lifted(lambda x, w: x @ w, f64(3, 4), f64(4, 5), train=False) == "mm [3, 5] = mm(input_0, input_1)\nreturn mm"
    )


def test_the_products_of_attention_keep_batch_and_heads():
    def scores(q, k):
        q, k = (part.view(2, 3, 4, 5).transpose(1, 2) for part in (q, k))
        return (q @ k.transpose(-1, -2)).exp()

    assert (
        lifted(scores, f64(2, 3, 20), f64(2, 3, 20), train=False)
        == """\
view [2, 3, 4, 5] = view(input_0, [2, 3, 4, 5])
permute [2, 4, 3, 5] = permute(view, [0, 2, 1, 3])
view_1 [2, 3, 4, 5] = view(input_1, [2, 3, 4, 5])
permute_2 [2, 4, 5, 3] = permute(view_1, [0, 2, 3, 1])
clone [2, 4, 3, 5] = clone(permute, memory_format=torch.contiguous_format)
clone_1 [2, 4, 5, 3] = clone(permute_2, memory_format=torch.contiguous_format)
einsum [2, 4, 3, 3] = einsum(abce,abed->abcd, [clone, clone_1])
exp [2, 4, 3, 3] = exp(einsum)
return exp"""
    )


PROGRAMS = {
    "heads into the inner dim": (lambda x, w: x.view(2, 3, 20).tanh() @ w, (2, 3, 4, 5), (20, 6)),
    "inner dims that differ": (lambda x, w: x.reshape(6, 20) @ w.reshape(20, 6), (2, 3, 4, 5), (2, 10, 6)),
    "columns of several dims": (lambda x, w: x @ w.view(4, 15), (2, 4), (4, 3, 5)),
    "rows and columns": (lambda x, w: x.view(6, 4) @ w.view(4, 15), (2, 3, 4), (4, 3, 5)),
    "a batch of one": (lambda x, w: x @ w, (1, 3, 4), (4, 5)),
    "a batch that one side has flat": (lambda x, y: torch.bmm(x.view(6, 4, 5), y), (2, 3, 4, 5), (6, 5, 2)),
    "batches that differ": (lambda x, y: torch.bmm(x.view(12, 4, 5), y.view(12, 5, 2)), (3, 4, 4, 5), (2, 6, 5, 2)),
    "a transposed batch": (lambda x, y: x @ y.transpose(-1, -2), (2, 3, 4, 5), (2, 3, 6, 5)),
    "rows of a transposed view": (lambda x, y: x.view(6, 4).t() @ y.view(6, 5), (2, 3, 4), (2, 3, 5)),
    "dims of one element": (lambda x, w: x @ w, (2, 1, 3, 1), (1, 5)),
    "no rows": (lambda x, w: x @ w, (2, 0, 4), (4, 5)),
}


def test_every_kind_of_flattened_product_keeps_its_numbers():
    for name in PROGRAMS:
        function, *shapes = PROGRAMS[name]
        args = tuple(f64(*shape) for shape in shapes)
        lifted(function, *args)
        model = Model(lambda *given, function=function: function(*given).square())
        for mesh in ({"x": 3}, {"x": 2, "y": 2}):
            plan = sbpc.plan(model, args, Mesh(**mesh), train=False, objective="serial")
            found = sbpc.simulate(plan, model, args).outputs
            torch.testing.assert_close(found, model(*args).detach(), rtol=1e-13, atol=1e-13)


def test_lifting_keeps_every_number():
    for name in MODELS:
        torch.manual_seed(0)
        module, args = MODELS[name]()
        module, args = module.double(), double(args)
        gm = lift(normalize(capture(module, args)))
        gm.graph.lint()
        assert_equal(gm, *eager(module, args), tolerance=1e-13)
        if name == "gpt2":  # all but the two products of the backward of the loss, which is flat
            found = [node.target for node in gm.graph.nodes]
            assert (found.count(aten.mm.default), found.count(aten.addmm.default)) == (2, 0)


def test_a_local_program_runs_matrix_products_only():
    torch.manual_seed(0)
    module, args = gpt2(layers=1)
    plan = sbpc.plan(module, args, Mesh(x=2, y=2), objective="serial")
    assert any(node.target is aten.linear.default for node in plan.graph.graph.nodes)
    found = Counter(node.target for node in plan.local.graph.nodes)
    assert found[aten.mm.default] and found[aten.addmm.default] == 4
    assert not found[aten.einsum.default] and not found[aten.linear.default]


class Pair(nn.Module):
    """A residual block: norm, column layer, gelu, row layer."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def test_a_pin_on_the_norm_gives_sequence_parallelism():
    """Gather before the column layer, scatter after the row layer (Korthikanti et al. 2022)."""
    torch.manual_seed(0)
    module = nn.Sequential(Pair(24), Pair(24)).double()
    args = (torch.randn(4, 48, 24, dtype=torch.float64),)
    pins = {"native_layer_norm": "S(1)", "native_layer_norm_1": "S(1)", "gelu": "S(2)", "gelu_1": "S(2)"}
    plan = sbpc.plan(module, args, Mesh(tensor=4), inputs=["S(1)"], outputs=["S(1)"], pin=pins, objective="serial")
    forward = [node for node in plan.boxed.graph.nodes if node.meta.get("phase") == "forward" and "step" in node.meta]
    found = [(node.meta["step"].collective, tuple(node.meta["val"].shape)) for node in forward]
    moved = [(name, shape) for name, shape in found if name in WIRE]
    assert [name for name, shape in moved if len(shape) == 3] == ["all_gather", "reduce_scatter"] * 2
    norms = [node for node in plan.graph.graph.nodes if node.target is operator.getitem and node.args[1] == 0]
    assert [str(plan.layout(node.name)) for node in norms if "norm" in str(node.args[0])][:2] == ["[S(1)]", "[S(1)]"]
    assert largest_error(plan, module, args) <= 1e-12
