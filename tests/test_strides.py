"""Memory formats: every kernel reads its operands right however they lie in memory, in every executor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

import sbpc
from sbpc import Mesh
from sbpc._compat import has_kernel
from sbpc.errors import NanError
from sbpc.mesh.states import counted
from sbpc.rules import registry
from sbpc.rules.binding import flat_outputs
from sbpc.rules.proof.prove import STAND_INS, Case
from sbpc.rules.strides import NEEDS, laid_out
from sbpc.runtime.device_kernels import placed
from sbpc.runtime.executors import EXECUTORS, code
from tests import models, pointwise_cases, proof_cases, vision_models
from tests.compare import compare, eager
from tests.own_ops import raw
from tests.random_plans import random_plan
from tests.strides import WAYS, channels_last, sliced, transposed, variants

FAMILIES = {
    **{name: made for name, made in proof_cases.FAMILIES.items() if name != "cuda"},
    "pointwise": pointwise_cases.cases,
}
CALLS = [one for made in FAMILIES.values() for one in made() if one.values]
ONCE = list({one.op: one for one in CALLS}.values())
QUICK = [one for one in CALLS if one.op in NEEDS or any(one is each for each in ONCE)]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-4}  # kernels sum in another order


GROUPED = torch.ops.aten._grouped_mm.default
UNWEIGHTED = torch.ops.aten.nll_loss2d_forward.default  # on a GPU the weight that no reduction asks for is anything


def program(one: Case) -> GraphModule:
    """The program of one call as localize writes it on one rank; its placeholders are the operands."""
    graph, match = Graph(), one.match()
    places = [graph.placeholder(f"x{at}") for at in range(len(one.operands))]
    args, kwargs = swapped_nodes(one, places)

    def call(op: Any, *given: Any, **named: Any) -> Any:
        return graph.call_function(STAND_INS.get(op, op), given, named)

    graph.output((match.localize(call, args, kwargs, match.sizes, {}),))
    return GraphModule(torch.nn.Module(), graph)


def swapped_nodes(one: Case, places: list[Any]) -> tuple[Any, Any]:
    """The arguments of a case with placeholders, in schema order, for its tensors."""
    mine = iter(places)
    names = [argument.name for argument in one.op._schema.arguments if argument.name in one.kwargs]
    given = one.args, {name: one.kwargs[name] for name in names}
    return map_aggregate(given, lambda item: next(mine) if isinstance(item, Tensor) else item)


def close(found: Any, expected: Any) -> bool:
    """Whether results are equal but for the order in which kernels add."""
    for a, b in zip(flat_outputs(found), flat_outputs(expected)):
        if isinstance(b, Tensor):
            tolerance = TOLERANCE.get(b.dtype, 1e-8)
            if a.shape != b.shape or not torch.allclose(
                counted(a.resolve_conj()), counted(b), rtol=tolerance, atol=tolerance, equal_nan=True
            ):
                return False
    return True


def wrong(one: Case, run: Callable[..., Any], each: bool = True, device: str = "cpu") -> list[str]:
    """The ways to lay out the operands of a call in which it gives other results than with contiguous ones."""
    found = []
    for name, laid in variants([x.to(device) for x in one.operands], each):
        if "expanded" in name and one.op is GROUPED:  # other ends of groups leave rows to none, which hold anything
            continue
        plain = [x.clone(memory_format=torch.contiguous_format) for x in laid]
        try:
            expected = run(plain)
        # values that the op refuses, such as expanded indices, or makes NaN of
        except (RuntimeError, IndexError, NanError):
            continue
        try:
            right = close(run(laid), expected)
        except RuntimeError as error:
            right, name = False, f"{name}: {error}"
        found += [] if right else [f"{one}: {name}"]
    return found


def executed(one: Case, executor: str = "code", device: str = "cpu") -> Callable[[list[Tensor]], Any]:
    """A function of the operands of a call that runs its program."""
    run = EXECUTORS[executor](placed(program(one), torch.device(device)))
    return lambda given: run(list(given))[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_a_kernel_reads_operands_of_any_strides() -> None:
    there = [one for one in ONCE if one.op not in (GROUPED, UNWEIGHTED) and has_kernel(one.op, "cuda")]
    found = [line for one in there for line in wrong(one, executed(one, device="cuda"), device="cuda")]
    assert len(there) > 200 and not found, "\n".join(found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("kernel", ["cudnn", "efficient", "flash"])
def test_on_a_gpu_attention_reads_operands_of_any_strides(kernel: str) -> None:
    """Against the kernel on operands as autograd has them: a result with its heads last, and a gradient like it."""
    name = f"_scaled_dot_product_{kernel}_attention"
    ahead, back = (laid_out(getattr(torch.ops.aten, name + which).default) for which in ("", "_backward"))
    heads = [torch.randn(2, 4, length, 16, device="cuda", dtype=torch.bfloat16) for length in (32, 48, 48)]
    out, sums, *rest = ahead(*heads, *(() if kernel == "flash" else (None, True)))
    dropout, seeds = (0.0, False), rest[4:6]
    ends = {
        "cudnn": ([], [*seeds, None, *rest[:4], *dropout]),
        "efficient": ([None], [*rest, 0.0, [True, True, True, False]]),
        "flash": ([], [*rest[:4], *dropout, *seeds]),
    }

    def run(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor) -> list[Tensor]:
        bias, more = ends[kernel]
        return [
            *ahead(q, k, v, *(() if kernel == "flash" else (None, True)))[:2],
            *back(grad, q, k, v, *bias, out, sums, *more)[:3],
        ]

    operands = [torch.randn_like(out), *heads, out, sums]
    expected = run(*operands)
    for way, laid in variants(operands):
        assert "expanded" in way or close(run(*laid), expected), way


@pytest.mark.prove
@pytest.mark.parametrize("executor", ["code", "interpreter", "nans"])
@pytest.mark.parametrize("part", range(4))
def test_every_sample_call_reads_operands_of_any_strides(part: int, executor: str) -> None:
    found = [line for one in CALLS[part::4] for line in wrong(one, executed(one, executor), each=executor == "code")]
    assert not found, "\n".join(found)


@pytest.mark.prove
@pytest.mark.parametrize("way", ["channels last", "sliced", "last expanded"])
@pytest.mark.parametrize("part", range(16))
def test_inductor_reads_operands_of_any_strides(part: int, way: str) -> None:
    """One program of many calls, since each compilation takes seconds."""
    graph, given, expected = Graph(), list[Tensor](), list[Any]()
    for one in ONCE[part::16]:
        laid = [WAYS[way](x) for x in one.operands]
        if one.op is GROUPED or not can_run(one, laid):
            continue
        call = program(one)
        places = {
            node: graph.placeholder(f"x{len(given) + at}")
            for at, node in enumerate(call.graph.find_nodes(op="placeholder"))
        }
        (made,) = graph.graph_copy(call.graph, places)  # type: ignore[misc]
        several = isinstance(made, Node) and isinstance(one.run(), (tuple, list))
        expected += (
            [graph.call_function(getitem, (made, at)) for at in range(len(one.run()))]
            if several
            else flat_outputs(made)
        )
        given += laid
    graph.output(tuple(expected))
    whole = GraphModule(nn.Module(), graph)
    plain = [x.clone(memory_format=torch.contiguous_format) for x in given]
    for node, a, b in zip(expected, EXECUTORS["inductor"](whole)(given), code(whole)(plain)):
        assert close(a, b), node


def can_run(one: Case, operands: list[Tensor]) -> bool:
    """Whether an op takes these values; it may refuse other indices than those of its case."""
    try:
        executed(one)(operands)
    except (RuntimeError, IndexError):
        return False
    return True


@pytest.mark.parametrize("part", range(4))
def test_a_kernel_reads_operands_of_any_strides(part: int) -> None:
    found = [line for one in QUICK[part::4] for line in wrong(one, executed(one))]
    assert not found, "\n".join(found)


def unet() -> tuple[nn.Module, tuple[Any, ...]]:
    """The U-Net of diffusers: group norms and attention over pixels, whose result is an image with its channels last."""
    from diffusers import UNet2DModel

    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
            sizes = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 16), "attention_head_dim": 8}
            self.net = UNet2DModel(down_block_types=down, up_block_types=up, norm_num_groups=4, **sizes)

        def forward(self, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
            return (self.net(x, t).sample - noise).square().mean()

    return Denoiser(), (torch.randn(4, 3, 8, 8), torch.tensor([1, 5, 9, 2]), torch.randn(4, 3, 8, 8))


def swin() -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4, num_labels=4
    )

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = SwinForImageClassification(config)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.net(x, labels=y).loss

    return Classifier(), (torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4,)))


NETS: dict[str, Callable[[], Any]] = {
    "vgg": lambda: models.vgg(batch=4),
    "resnet": lambda: vision_models.resnet(batch=4),
    "convnext": lambda: vision_models.convnext(batch=4),
    "own u-net": lambda: vision_models.unet(batch=4),
    "swin": swin,
    "u-net": unet,
}


@pytest.mark.parametrize("net", NETS)
def test_a_net_in_channels_last_equals_one_device(net: str) -> None:
    """Model and images are channels last; also a plan that was made with contiguous ones."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = NETS[net]()
    outputs, gradients = eager(copy.deepcopy(model), args)
    laid = copy.deepcopy(model).to(memory_format=torch.channels_last), tuple(map(channels_last, args))
    made = sbpc.plan(*laid, Mesh(x=2))
    contiguous = sbpc.plan(model, args, Mesh(x=2), objective="serial", microbatches=1, panels=1)  # any will do
    assert made.verify() > 100
    for plan in (made, random_plan(made, 1), random_plan(contiguous, 2)):
        assert compare(plan, *laid, outputs, gradients) <= 1e-9


def test_a_program_compiled_for_some_strides_runs_with_others() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, y)),))
    run = EXECUTORS["inductor"](GraphModule(nn.Module(), graph))
    one, other = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    run([one, other[:1].expand(other.shape)])  # what it is compiled with
    for name, (a, b) in variants([one, other]):
        assert torch.equal(run([a, b])[0], a * b), name


@pytest.mark.parametrize("known", [False, True])
def test_an_op_of_a_user_gets_its_operands_as_they_lay_when_captured(known: bool, monkeypatch: Any) -> None:
    """Without a rule and with one: its kernel reads memory as if it were contiguous."""
    monkeypatch.setattr(registry, "TABLE", dict(registry.TABLE))
    if known:
        sbpc.rule("own::raw", "a b -> a b ; lin(0)", examples=[(torch.randn(4, 6),)])

    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            moved = y.t().contiguous() if known else y.t()  # a kernel for contiguous operands mixes up a transposed one
            return raw(x).exp() + raw(moved).exp()

    torch.set_default_dtype(torch.float64)
    args = torch.randn(4, 6), torch.randn(6, 4)
    plan = sbpc.plan(Net(), args, Mesh(x=2), train=False)
    for way in (transposed, sliced):
        assert torch.equal(sbpc.simulate(plan, Net(), tuple(map(way, args))).outputs, Net()(*args)), way
