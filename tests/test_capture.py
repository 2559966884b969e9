"""Capture: the graph computes what the module computes, by both methods, and what cannot be captured is refused."""

from __future__ import annotations

import copy
import linecache
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sbpc
from sbpc import Mesh
from sbpc._compat import FakeTensorMode
from sbpc.errors import CaptureError
from sbpc.graph.ports import MUTATION, TANGENT, Port, placeholders
from sbpc.graph.pytree import unflatten
from sbpc.passes.canonicalize.normalize import normalize
from sbpc.passes.capture.capture import capture
from tests.models import MODELS, batch_norm, dataclass_output, gpt2, kwargs_model, lora, mlp, unused_parameter
from tests.programs import assert_equal, double, eager

METHODS = ("light", "aot")


class Model(nn.Module):
    """A linear layer and a forward that the test gives."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(6, 6)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.function(self, *args)


def check(module, args, kwargs=None, *, tolerance=0.0, method="light", **options):
    """Capture in float64, and compare outputs, buffers and all gradients with the module's own."""
    module, args = module.double(), double(args)
    given, expected = eager(module, args, double(kwargs or {}), **options)
    before = copy.deepcopy(module.state_dict())
    gm = capture(module, args, double(kwargs or {}), method=method, **options)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    gm.graph.lint()
    assert_equal(gm, given, expected, tolerance)
    assert_equal(normalize(gm), given, expected, max(tolerance, 1e-14))
    return gm


def ops(gm):
    return Counter(node.target for node in gm.graph.nodes if node.op == "call_function")


def x(*shape):
    return torch.randn(shape or (4, 6), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_both_methods_compute_outputs_and_all_gradients_with_the_same_ops():
    for name in MODELS:
        found = []
        for method in METHODS:
            torch.manual_seed(0)
            module, args = MODELS[name]()
            found.append(normalize(check(module, args, method=method)))
        light, aot = found
        assert ops(light) == ops(aot), name
        assert light.meta["ports"] == aot.meta["ports"], name


class HookedOnce(nn.Module):
    """Puts a hook on a part in its first call and notes that it has, as transformers does to tell of router logits."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if not getattr(self, "has_hook", False):
            self.layer.register_forward_hook(lambda layer, args, out: 3 * out)
            self.has_hook = True
        return self.layer(x).square().mean()


def test_hooks_that_a_forward_puts_on_parts_go_with_the_note_that_it_has():
    model, x = HookedOnce(), torch.randn(8, 4)
    plans = [sbpc.plan(model, (x,), Mesh(a=2)) for _ in range(2)]
    assert not model.layer._forward_hooks and not hasattr(model, "has_hook")
    found = [sbpc.simulate(plan, model, (x,)).outputs for plan in plans]
    assert found[0] == found[1] == pytest.approx(model(x).item(), rel=1e-6)
    assert len(model.layer._forward_hooks) == 1 and sbpc.simulate(plans[0], model, (x,)).outputs == found[0]


def test_without_training_there_are_no_tangents_and_no_gradients():
    for method in METHODS:
        module, args = gpt2(layers=1)
        gm = check(module, args, train=False, method=method)
        assert {port.kind for port in gm.meta["ports"].inputs} == {"parameter", "input"}
        assert [str(port.kind) for port in gm.meta["ports"].outputs] == ["output"]
        assert {node.meta["phase"] for node in gm.graph.nodes} == {"forward"}


def test_keyword_arguments_are_inputs_and_numbers_are_constants():
    module, args, kwargs = kwargs_model()
    gm = check(module, args, kwargs)
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    assert names == ["linear_weight", "linear_bias", "x", "mask", "pair_left", "pair_right", "tangent_0"]
    assert unflatten(gm.meta["ports"].arguments, "abcd") == (
        ("a",),
        {"mask": "b", "scale": 0.5, "pair": {"left": "c", "right": "d"}},
    )


def test_a_loss_takes_the_output_and_the_targets():
    for method in METHODS:
        loss, labels = nn.CrossEntropyLoss(weight=torch.rand(6).double()), torch.tensor([1, 5, -100, 0])
        gm = check(Model(lambda m, x: m.linear(x)), (x(),), loss=loss, targets=(labels,), method=method)
        assert [node.name for node in gm.graph.nodes if node.op == "placeholder"][-3:] == [
            "input_0",
            "target",
            "tangent_0",
        ]


def test_results_keep_their_classes():
    module, args = dataclass_output()
    gm = capture(module, args)
    found = unflatten(gm.meta["ports"].results, ["loss", "logits"])
    assert type(found) is type(module(*args)) and (found.loss, found.logits, found.extra) == ("loss", "logits", None)


def test_ports_tell_tied_frozen_and_unused_parameters():
    assert capture(*gpt2(layers=1)).meta["ports"].tied == {"head.weight": "tokens.weight"}
    assert capture(*lora()).meta["ports"].frozen == ("base.weight", "base.bias")
    assert capture(*unused_parameter()).meta["ports"].unused == ("unused.weight", "unused.bias")


def test_modules_without_values_give_the_same_graph():
    real = capture(*gpt2(layers=1))
    for kind in ["meta", "fake"]:
        with torch.device("meta") if kind == "meta" else FakeTensorMode():
            module, args = gpt2(layers=1)
        gm = capture(module, args)
        assert str(gm.graph) == str(real.graph)
        assert {node.meta["val"].device.type for node in gm.graph.nodes if node.op == "placeholder"} == {"cpu"}


def test_the_graph_is_the_same_in_every_run():
    module, args = gpt2(layers=1)
    assert str(capture(module, args).graph) == str(capture(module, args).graph)


def test_every_node_knows_its_module_line_and_phase():
    for method in METHODS:
        gm = capture(*gpt2(layers=1), method=method)
        found = {}
        for node in gm.graph.nodes:
            assert node.meta["phase"] in ("forward", "backward")
            if node.op == "call_function":
                assert re.fullmatch(r'(  File ".*", line \d+, in \S+\n    .*\n?)+', node.meta["stack_trace"]), node
                found.setdefault((node.target, node.meta["phase"]), []).append(node)
        aten = torch.ops.aten
        assert [node.meta["module"] for node in found[aten.gelu.default, "forward"]] == ["blocks.0"]
        assert [node.meta["module"] for node in found[aten.gelu_backward.default, "backward"]] == ["blocks.0"]
        assert (
            "return x + self.down(F.gelu(self.up("
            in found[aten.gelu_backward.default, "backward"][0].meta["stack_trace"]
        )
        assert {"blocks.0.up", "blocks.0.down", "head"} <= {
            n.meta["module"] for n in found[aten.mm.default, "backward"]
        }
        assert 'tests/models.py", line ' in found[aten.gelu.default, "forward"][0].meta["stack_trace"]


def test_written_buffers_come_out_as_mutations():
    for method in METHODS:
        gm = check(*batch_norm(), method=method)
        found = [port.name for port in gm.meta["ports"].outputs if port.kind == MUTATION]
        assert found == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
        module, args = batch_norm()
        assert not [
            port for port in check(module.eval(), args, method=method).meta["ports"].outputs if port.kind == MUTATION
        ]


def test_replaced_buffers_come_out_as_mutations():
    for method in METHODS:

        def forward(m, x):
            m.average = 0.9 * m.average + m.linear(x).mean()
            return m.linear(x) * m.average

        module = Model(forward)
        module.register_buffer("average", torch.ones(()))
        gm = check(module, (x(),), method=method, tolerance=1e-15)
        assert Port(MUTATION, "average") in gm.meta["ports"].outputs


def masked(m, x):
    y = m.linear(x)
    y[:, 0] = 0
    y[0].mul_(2)
    return y


def constants(m, x):
    weights = torch.tensor([1.0, 2.0])
    weights += 1
    return m.linear(x) * weights.sum() * torch.tensor(3.0).item()


def widened(m, x):
    return m.linear(x) * torch.arange(6, dtype=torch.float32).mul_(2).add_(torch.ones(6, dtype=torch.float64))


def undone(m, x):
    """Sorts and undoes it, as a mixture of experts does."""
    order = x.sum(1).argsort()
    back = torch.empty_like(order)
    back[order] = torch.arange(len(x))
    return m.linear(x[order])[back]


def shifted(m, x):
    """As models of the library shift targets: slices of fresh memory are written, one of them two views deep."""
    to = x.new_zeros(x.shape)
    to[:, 1:] = x[:, :-1].clone()
    to[:, 0] = 2.0
    to[1:][:, 2] += 1.0
    to.masked_fill_(to == 2.0, 3.0)
    return m.linear(to)


def read_after(m, x):
    """A view that is read after another one has written what it shows."""
    to = x.new_zeros(x.shape)
    part = to[1:]
    to[:, 1:] = x[:, :-1]
    return m.linear(to), part * 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient * ctx.saved_tensors[0]


FORWARDS = {
    "aliases of the input": lambda m, x: (x, x.view(-1), m.linear(x)),
    "a function with its own backward": lambda m, x: Square.apply(m.linear(x)),
    "a mean over one dim and its neighbour": lambda m, x: m.linear(x).view(2, 2, 6).mean((0, 2), keepdim=True),
    "a parameter as output": lambda m, x: (m.linear.weight, m.linear(x)),
    "a write into a detached alias": lambda m, x: m.linear(x).mul(3).relu_().detach().mul_(2) + m.linear(x),
    "constants": constants,
    "dropout of nothing": lambda m, x: F.dropout(m.linear(x), 0.0),
    "fresh writes": lambda m, x: F.relu_(m.linear(x)).mul(2).add_(1).clamp_(0, 1),
    "outputs twice and as views": lambda m, x: (lambda y: (y, y.view(-1), y))(m.linear(x)),
    "recomputation": lambda m, x: checkpoint(lambda z: m.linear(z).relu().exp(), x, use_reentrant=False).sum(),
    "places by index": undone,
    "several results": lambda m, x: (m.linear(x).topk(2), x.sort(), m.linear(x).var(1)),
    "writes into slices": shifted,
    "writes into slices without gradients": lambda m, x: shifted(m, x.detach()),
    "writes into views": masked,
    "writes that views see": read_after,
    "writes that views see without gradients": lambda m, x: read_after(m, x.detach()),
    "writes that keep their dtype": widened,
}


def test_forwards_full_of_traps_are_right():
    for name in FORWARDS:
        for method in METHODS:
            check(Model(FORWARDS[name]), (x().requires_grad_(),), method=method, tolerance=1e-14)


def test_writes_into_fresh_memory_do_not_need_aot_autograd(monkeypatch):
    monkeypatch.delattr("sbpc.passes.capture.capture.joint")
    for name in [
        "a write into a detached alias",
        "fresh writes",
        "places by index",
        "writes into slices without gradients",
        "writes that keep their dtype",
    ]:
        capture(Model(FORWARDS[name]), (x().requires_grad_(),))


def test_fused_layers_come_apart():
    for module in [nn.LSTM(6, 5), nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0)]:
        for method in METHODS:
            check(copy.deepcopy(module), (x(2, 3, 6),), method=method, tolerance=1e-14)
            gm = check(copy.deepcopy(module).eval(), (x(2, 3, 6),), method=method, tolerance=1e-14, train=False)
            assert not [op for op in ops(gm) if "rnn" in str(op) or "encoder" in str(op)]


def test_names_that_clash_stay_apart():
    for method in METHODS:
        module = Model(lambda m, scale: m.linear(scale) * m.scale * getattr(m, "lambda"), scale=nn.Parameter(x(6)))
        module.register_parameter("lambda", nn.Parameter(x(6)))
        module.register_parameter("linear_weight", nn.Parameter(x(6)))
        check(module, (x(),), method=method)
        check(nn.Sequential(nn.Linear(6, 6)), (x(),), method=method)


def test_autocast_wraps_model_and_loss():
    for dtype in [torch.bfloat16, torch.float16]:
        module, labels = Model(lambda m, x: m.linear(m.linear(x))), torch.tensor([1, 5, 2, 0])
        given, expected = eager(module, (x(),), loss=F.cross_entropy, targets=(labels,), dtype=dtype)
        gm = capture(module, (x(),), loss=F.cross_entropy, targets=(labels,), dtype=dtype)
        assert_equal(gm, given, expected)
        assert dtype in {
            node.meta["val"].dtype for node in gm.graph.nodes if node.target is torch.ops.aten.addmm.default
        }


def test_capture_works_wherever_the_caller_stands():
    module, args = mlp()
    expected = str(capture(module, args).graph)
    with torch.no_grad():
        assert str(capture(module, args).graph) == expected
    with torch.inference_mode():
        assert str(capture(module, args).graph) == expected


def test_tangents_are_contiguous_whatever_the_strides_of_the_output():
    gm = check(Model(lambda m, x: m.linear(x).t()), (x(),))
    tangent = next(n for p, n in placeholders(gm).items() if p.kind == TANGENT)
    assert tangent.meta["val"].is_contiguous()


def test_the_module_is_left_unchanged():
    def forward(m, x):
        m.cache, m.calls = m.linear(x), m.calls + 1
        m.linear.extra = x
        found = m.cache + m.calls
        m.cache, m.calls, m.linear.extra = None, 0, None
        return found

    module = Model(forward, calls=0)
    attributes, linear = dict(vars(module)), dict(vars(module.linear))
    weight = module.linear.weight
    for method in METHODS:
        capture(module, (x(),), method=method)
    assert vars(module) == attributes and vars(module.linear) == linear
    assert module.linear.weight is weight and weight.grad is None and module.training
    with pytest.raises(CaptureError):
        capture(Model(lambda m, x: m.linear(x).sum().item()), (x(),))
    module(x())


def assign_data(m, x):
    y = m.linear(x)
    y.data = y.data * 2
    return y + 0


def assign_weight(m, x):
    y = m.linear(x)
    m.linear.weight.data = m.linear.weight.data * 0.9
    return y


def write_weight(m, x):
    with torch.no_grad():
        m.linear.weight.mul_(0.9)
    return m.linear(x)


REFUSED = {
    "branch": (lambda m, x: m.linear(x) if x.sum() > 0 else x, "needs the values of a tensor"),
    "item": (lambda m, x: m.linear(x) * x.sum().item(), "_local_scalar_dense.default needs the values of a tensor"),
    "nonzero": (lambda m, x: m.linear(x)[x > 0], "needs the values of a tensor"),
    "permutation": (lambda m, x: m.linear(x)[torch.randperm(4)], "randperm.default draws random numbers in a way"),
    "samples": (lambda m, x: torch.multinomial(m.linear(x), 2), "Pass the result as an argument"),
    "own generator": (
        lambda m, x: m.linear(x) + torch.rand(6, generator=torch.Generator()),
        "rand.generator draws from a generator of its own",
    ),
    "seeding": (lambda m, x: (torch.manual_seed(3), F.dropout(m.linear(x)))[1], "the forward seeds torch's generator"),
    "wide integers": (lambda m, x: m.linear(x) * torch.randint(2**40, (6,)), "random integers of [0, 1099511627776)"),
    "complex noise": (
        lambda m, x: m.linear(x) * torch.randn(6, dtype=torch.complex64),
        "random numbers of torch.complex64",
    ),
    "attribute": (lambda m, x: m.linear(x) * m.mask, "uses a tensor [6] that is no parameter, no buffer"),
    "write into an argument": (lambda m, x: m.linear(x.add_(1)), "writes into 'input_0'"),
    "write into a parameter": (write_weight, "writes into 'linear.weight'"),
    "write through data": (lambda m, x: (m.linear.weight.data.mul_(2), m.linear(x))[1], "writes into 'linear.weight'"),
    "assignment to data": (assign_data, "assigns to the .data of a tensor"),
}


def test_a_parameter_that_is_replaced_behind_the_last_op_is_refused():
    for method in METHODS:
        with pytest.raises(CaptureError, match=r"assigns to the \.data of a tensor"):
            capture(Model(assign_weight), (x(),), method=method)


def test_what_no_graph_can_hold_is_refused_with_the_users_line():
    for name in REFUSED:
        for method in METHODS:
            function, message = REFUSED[name]
            with pytest.raises(CaptureError) as caught:
                capture(Model(function, mask=x(6)), (x(),), method=method)
            assert message in str(caught.value)
            assert re.search(r'\n  File "tests/test_capture.py", line \d+, in .*\n    ', str(caught.value))


def test_what_cannot_be_a_program_is_refused():
    for change, message in [
        ({"method": "dynamo"}, "method is 'dynamo'"),
        ({"dtype": torch.float32}, "dtype is torch.float32"),
        ({"targets": (1,)}, "targets without a loss"),
        ({"loss": nn.AdaptiveLogSoftmaxWithLoss(6, 4, [2])}, "the loss has parameters"),
        ({"args": (object(),)}, "args[0] is a builtins.object"),
        ({"args": (torch.ones(2, 2).to_sparse(),)}, "'input_0' is a tensor of layout torch.sparse_coo"),
        ({"args": (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),)}, "'input_0' is a nested tensor"),
        ({"module": Model(lambda m, x: 3)}, "the model returns no tensor"),
        ({"module": Model(lambda m, x: {x})}, "the result is a builtins.set"),
        ({"module": nn.LazyLinear(6)}, "'weight' has no shape yet"),
    ]:
        change = {"module": Model(lambda m, x: m.linear(x)), "args": (x(),), **change}
        with pytest.raises(CaptureError, match=re.escape(message)):
            capture(change.pop("module"), change.pop("args"), **change)


def test_two_parameters_over_the_same_memory_are_refused():
    module = Model(lambda m, x: m.other(m.linear(x)), other=nn.Linear(6, 6))
    module.other.weight = nn.Parameter(module.linear.weight.data)
    with pytest.raises(CaptureError, match=r"'other.weight' shares memory with 'linear.weight'"):
        capture(module, (x(),))
    halves = torch.randn(12, 6)  # neighbours in one storage do not overlap
    module.linear.weight, module.other.weight = nn.Parameter(halves[:6]), nn.Parameter(halves[6:])
    check(module, (x(),))


def test_a_buffer_is_written_only_where_no_other_one_lies_over_its_memory():
    module = Model(lambda m, x: m.linear(x) * m.counts.add_(1.0)[:6] + m.view, counts=nn.Buffer(torch.ones(8)))
    module.view = nn.Buffer(module.counts[2:])
    for method in ("light", "aot"):
        with pytest.raises(CaptureError, match="the forward writes 'counts', which shares memory with 'view'"):
            capture(module, (x(),), method=method)
    module.function = lambda m, x: m.linear(x) * m.counts[:6] + m.view  # read alone
    check(module, (x(),))


def test_a_line_is_shown_as_it_is_when_a_model_is_captured_again(tmp_path):
    file = tmp_path / "edited.py"
    for text in ("x.nonzero()", "x.add(1).nonzero()"):
        file.write_text(f"def forward(m, x):\n    return {text}\n")
        linecache.checkcache(str(file))
        names = {}
        exec(compile(file.read_text(), str(file), "exec"), names)
        with pytest.raises(CaptureError, match=re.escape(f"return {text}\n")):
            capture(Model(names["forward"]), (x(),))


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize("method", METHODS)
def test_attention_whose_values_have_another_width_takes_the_fused_kernel(method):
    """Latent attention has keys of 192 numbers and values of 128."""

    def attended(model, x, mask):
        q, k, v, w = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in model.linear(x).split([4, 4, 2, 2], -1))
        narrow = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scaled = F.scaled_dot_product_attention(query=q, key=k[:, :1], value=w[:, :1], scale=0.3, enable_gqa=True)
        return narrow, scaled, F.scaled_dot_product_attention(v, w, torch.cat([q, k], -1), mask)

    model, given = Model(attended, linear=nn.Linear(6, 12)), (x(3, 5, 6), torch.ones(5, 5).tril().bool())
    model.double()
    gm = capture(model, double(given), method=method)
    assert_equal(gm, *eager(model, double(given)), 1e-12)
    assert ops(gm)[ATTENTION] == 3 and not any("softmax" in str(op) for op in ops(gm))


def test_attention_that_no_fused_kernel_takes_is_written_out():
    def attended(model, x):
        q = k = model.linear(x).unflatten(-1, (2, -1)).transpose(1, 2)
        biased = F.scaled_dot_product_attention(q, k, k[..., :2], model.bias)
        return biased, F.scaled_dot_product_attention(q[0], k[0], k[0, ..., :2])

    gm = check(Model(attended, bias=nn.Parameter(x(5, 5))), (x(3, 5, 6),), tolerance=1e-12)
    assert ops(gm)[ATTENTION] == 0
