"""normalize: the canonical graph, as text and by its numbers."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

import sbpc
from sbpc import Mesh
from sbpc._compat import FakeTensor
from sbpc.passes.canonicalize.normalize import REWRITES, normalize
from sbpc.passes.capture.capture import capture
from tests.models import MODELS, gpt2
from tests.programs import assert_equal, double, eager

aten = torch.ops.aten
NOISE = {aten._unsafe_view.default, aten.alias.default, aten.detach.default, aten.mean.default, aten.mean.dim}
NOISE |= {aten.lift_fresh_copy.default, aten.mse_loss.default, aten.t.default, aten.transpose.int}
assert REWRITES.keys() > NOISE


class Model(nn.Module):
    """A forward without parameters, as the test gives it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def text(gm):
    """One line per op: name, shape, op without its namespace, arguments."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            value = node.meta["val"]
            shape = list(value.shape) if isinstance(value, torch.Tensor) else [list(item.shape) for item in value]
            target = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
            given = [str(arg) for arg in node.args] + [f"{key}={arg}" for key, arg in node.kwargs.items()]
            lines.append(f"{node.name} {shape} = {target}({', '.join(given)})")
    return "\n".join([*lines, f"return {', '.join(map(str, gm.graph.output_node().args[0]))}"])


def rewritten(function, *args, train=False):
    """The text of the canonical graph of a function; it computes the same as the function."""
    gm = normalize(capture(Model(function), args, train=train))
    assert_equal(gm, *eager(Model(function), args, train=train), tolerance=1e-6)
    return text(gm)


def x(*shape, **options):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), **options)


def test_the_canonical_graph_of_every_model_is_sound():
    for name in MODELS:
        torch.manual_seed(0)
        module, args = MODELS[name]()
        module, args = module.double(), double(args)
        gm = capture(module, args)
        before = str(gm.graph)
        new = normalize(gm)
        new.graph.lint()
        assert str(gm.graph) == before and new is not gm
        assert new.meta["ports"] is gm.meta["ports"]
        assert_equal(new, *eager(module, args), tolerance=1e-14)
        assert not {node.target for node in new.graph.nodes} & NOISE
        for node in new.graph.nodes:
            assert {"module", "stack_trace", "phase"} <= node.meta.keys()
            assert node.op in ("placeholder", "output") or node.users
            if node.op != "output":
                assert all(isinstance(value, FakeTensor | None) for value in as_tuple(node.meta["val"]))
        assert [node.target for node in normalize(new).graph.nodes] == [node.target for node in new.graph.nodes]


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def test_second_names_of_a_value_go():
    def noise(x):
        y = x.detach().transpose(0, 1).t().permute(1, 0).permute(1, 0)[:].expand(4, 6)
        return y.view(2, 2, 6).view(24).view(4, 6).exp() + torch.tensor(1.0)

    assert (
        rewritten(noise, x(4, 6))
        == """\
exp [4, 6] = exp(input_0)
add [4, 6] = add.Tensor(exp, constant_0)
return add"""
    )


def test_transpositions_become_one_permutation():
    assert (
        rewritten(lambda x: x.transpose(0, -1).permute(1, 0, 2).mT.exp(), x(2, 3, 4))
        == """\
permute_2 [3, 2, 4] = permute(input_0, [1, 0, 2])
exp [3, 2, 4] = exp(permute_2)
return exp"""
    )


def test_views_have_their_sizes_written_out_and_real_slices_stay():
    assert (
        rewritten(lambda x: (x.view(2, -1), x.reshape(6, 4), x[:, 1:], x[None].expand(3, -1, -1)), x(4, 6))
        == """\
view [2, 12] = view(input_0, [2, 12])
view_1 [6, 4] = view(input_0, [6, 4])
slice_1 [4, 5] = slice.Tensor(input_0, 1, 1, 9223372036854775807)
unsqueeze [1, 4, 6] = unsqueeze(input_0, 0)
expand [3, 4, 6] = expand(unsqueeze, [3, -1, -1])
return view, view_1, slice_1, expand"""
    )


def test_a_mean_is_a_sum_and_the_global_count():
    assert (
        rewritten(lambda x: (x.mean(), x.mean((0, -1), keepdim=True), x.mean(0, dtype=torch.float64)), x(4, 6))
        == """\
sum_1 [] = sum.dim_IntList(input_0, [0, 1], False)
div [] = div.Scalar(sum_1, 24)
sum_2 [1, 1] = sum.dim_IntList(input_0, [0, -1], True)
div_1 [1, 1] = div.Scalar(sum_2, 24)
sum_3 [6] = sum.dim_IntList(input_0, [0], False, dtype=torch.float64)
div_2 [6] = div.Scalar(sum_3, 4)
return div, div_1, div_2"""
    )


def test_a_mean_of_16_bit_numbers_is_summed_in_32_bits():
    assert (
        rewritten(lambda x: x.mean(), torch.full((300, 300), 7.0, dtype=torch.float16))
        == """\
sum_1 [] = sum.dim_IntList(input_0, [0, 1], False, dtype=torch.float32)
div [] = div.Scalar(sum_1, 90000)
_to_copy [] = _to_copy(div, dtype=torch.float16)
return _to_copy"""
    )


def test_a_mean_over_labels_is_a_sum_over_the_weight_of_those_that_count():
    logits, labels = x(4, 6).requires_grad_(), torch.tensor([0, 2, 5, 2])
    assert (
        rewritten(lambda x, y: F.cross_entropy(x, y, ignore_index=2), logits, labels, train=True)
        == """\
_log_softmax [4, 6] = _log_softmax(input_0, 1, False)
nll_loss_forward [[], []] = nll_loss_forward(_log_softmax, input_1, None, 2, 2)
ne [4] = ne.Scalar(input_1, 2)
sum_1 [] = sum(ne)
_to_copy [] = _to_copy(sum_1, dtype=torch.float32)
getitem [] = getitem(nll_loss_forward, 0)
div [] = div.Tensor(getitem, _to_copy)
div_1 [] = div.Tensor(tangent_0, _to_copy)
nll_loss_backward [4, 6] = nll_loss_backward(div_1, _log_softmax, input_1, None, 2, 2, _to_copy)
_log_softmax_backward_data [4, 6] = _log_softmax_backward_data(nll_loss_backward, _log_softmax, 1, torch.float32)
return div, _log_softmax_backward_data"""
    )


def test_a_mean_over_16_bit_labels_does_not_overflow():
    logits, labels = torch.full((9000, 2), -10.0, dtype=torch.float16), torch.zeros(9000, dtype=torch.int64)
    gm = normalize(capture(Model(F.nll_loss), (logits, labels), train=False))
    assert_equal(gm, *eager(Model(lambda x, y: F.nll_loss(x.float(), y).half()), (logits, labels), train=False))


def test_a_loss_over_elements_is_one_of_each_element_summed_and_divided():
    assert (
        rewritten(F.mse_loss, x(4, 6).requires_grad_(), 2 * x(4, 6), train=True)
        == """\
mse_loss [4, 6] = mse_loss(input_0, input_1, 0)
sum_1 [] = sum.dim_IntList(mse_loss, [0, 1], False)
div [] = div.Scalar(sum_1, 24)
div_1 [] = div.Scalar(tangent_0, 24)
expand [4, 6] = expand(div_1, [4, 6])
mse_loss_backward [4, 6] = mse_loss_backward(expand, input_0, input_1, 0)
return div, mse_loss_backward"""
    )


LOSSES = {
    "binary cross-entropy": (lambda x, y, **how: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), **how)),
    "cross-entropy": (lambda x, y, **how: F.cross_entropy(x, y.argmax(1), weight=y[0].exp(), **how)),
    "cross-entropy of pixels": (
        lambda x, y, **how: F.cross_entropy(x.view(2, 6, 2, 1), y.view(2, 6, 2, 1).argmax(1), **how)
    ),
    "huber": F.huber_loss,
    "smooth l1": (lambda x, y, **how: F.smooth_l1_loss(x, y, beta=0.5, **how)),
    "soft margin": (lambda x, y, **how: F.soft_margin_loss(x, y.sign(), **how)),
    "squares": F.mse_loss,
}


def test_every_loss_keeps_its_value_and_gradient():
    for name in LOSSES:
        for reduction in ["mean", "sum", "none"]:
            model = Model(functools.partial(LOSSES[name], reduction=reduction))
            args = x(4, 6, dtype=torch.float64).requires_grad_(), x(4, 6, dtype=torch.float64).flip(0)
            gm = normalize(capture(model, args))
            assert_equal(gm, *eager(model, args), tolerance=1e-14)
            numbers = [
                node.args for node in gm.graph.nodes if "loss" in str(node.target) or "entropy" in str(node.target)
            ]
            assert numbers  # and 1 is torch's number for a mean:
            assert not [arg for args in numbers for arg in args if type(arg) is int and arg == 1]


def test_values_of_new_nodes_are_recomputed():
    gm = normalize(capture(*gpt2(layers=1)))
    loss = gm.graph.output_node().args[0][0]
    assert loss.target is aten.div.Tensor and loss.meta["val"].shape == () and loss.meta["phase"] == "forward"
    assert "cross_entropy" in loss.meta["stack_trace"]


def test_new_tensors_are_made_of_their_sizes_alone():
    def joined(x):
        made = x.new_zeros(x.shape[0], 6)
        return (torch.cat([made, x.new_full((x.shape[0], 2), 3.0), x], 1) * x.new_ones(4, 1)).square().sum()

    args = (x(4, 6, dtype=torch.float64).requires_grad_(),)
    gm = normalize(capture(Model(joined), args))
    assert not [node for node in gm.graph.nodes if "new_" in str(node.target)]
    assert_equal(gm, *eager(Model(joined), args), tolerance=1e-14)
    plan = sbpc.plan(Model(joined), args, Mesh(a=2), inputs=["S(0)@a"])
    found = [node for node in plan.graph.graph.nodes if node.target in (aten.zeros.default, aten.full.default)]
    assert len(found) == 2 and all(str(node.meta["sbp"]) == "[S(0)]" for node in found)
