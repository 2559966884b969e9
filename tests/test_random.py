"""Random numbers: their quality, and that one seed gives the same ones on every mesh, in forward, backward and again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sbpc
from sbpc import Mesh, Plan
from sbpc.graph.random_bits import GOLDEN, bits, seed_of_step
from sbpc.inspect.graph_text import graph_text
from sbpc.passes.capture.random_ops import DRAWS
from tests import hf_models
from tests.compare import eager, relative_error
from tests.processes import run_ranks
from tests.random_plans import random_plan

MESHES = ({"x": 2}, {"x": 4}, {"x": 2, "y": 2}, {"x": 3})
SEED = 5


def mixed(z: int) -> int:
    """SplitMix64 in Python's integers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_bits_are_those_of_the_formula() -> None:
    for seed, stream in [(0, 0), (1, 7), (-3, 2**31)]:
        key = mixed((mixed(seed % 2**64) + (stream + 1) * GOLDEN) % 2**64)
        expected = [mixed((key + (at + 1) * GOLDEN) % 2**64) >> 11 for at in range(12)]
        assert bits(torch.tensor(seed), [3, 4], stream).flatten().tolist() == expected


def test_bits_look_random_within_a_stream_and_between_neighbours() -> None:
    """Each figure is within five standard deviations of what independent uniform numbers give."""
    count = 1 << 16
    draws = {
        (seed, stream): bits(torch.tensor(seed), [256, 256], stream).flatten()
        for seed, stream in itertools.product((0, 1, 2, 2**40), (0, 1, 2, 3))
    }
    units = {key: value.double() / 2**53 - 0.5 for key, value in draws.items()}
    for unit in units.values():
        assert abs(float(unit.mean())) < 5 * math.sqrt(1 / 12 / count)
        assert abs(float(unit.var()) - 1 / 12) < 5 * math.sqrt(1 / 180 / count)
        for lag in (1, 2, 255, 256, 257):
            assert abs(float((unit[lag:] * unit[:-lag]).mean())) < 5 / 12 / math.sqrt(count)
        cells = torch.histc(unit, 64, -0.5, 0.5) - count / 64
        assert float(cells.square().sum()) * 64 / count < 63 + 5 * math.sqrt(2 * 63)
    for one, other in itertools.combinations(units.values(), 2):
        assert abs(float((one * other).mean())) < 5 / 12 / math.sqrt(count)
    for at in range(53):
        ones = torch.cat([value >> at & 1 for value in draws.values()]).double()
        assert abs(float(ones.mean()) - 0.5) < 5 * math.sqrt(0.25 / len(ones))
    assert len(torch.cat(list(draws.values())).unique()) == len(draws) * count


class Noisy(nn.Module):
    """Two layers with `noise(h)` between them."""

    def __init__(self, noise: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.noise = nn.Linear(6, 12), nn.Linear(12, 6), noise

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.noise(self.up(x))).square().mean()


def noisy(noise: Callable[[Tensor], Tensor]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Noisy(noise), (torch.randn(5, 6),)


def heads(h: Tensor) -> Tensor:
    return h.view(5, 3, 2, 2).transpose(1, 2)


NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.2, True),
    "attention": lambda h: F.scaled_dot_product_attention(heads(h), heads(h), heads(h), dropout_p=0.3).reshape(5, 12),
    "bernoulli": lambda h: h * torch.bernoulli(h.sigmoid()) + torch.bernoulli(h.detach(), 0.3),
    "bernoulli in place": lambda h: h * torch.empty_like(h).bernoulli_(0.3) * torch.empty_like(h).bernoulli_(h.sigmoid().detach()),
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout in place": lambda h: F.dropout(h * 1, 0.3, inplace=True),
    "dropout of all": lambda h: h + F.dropout(h, 1.0),
    "dropout twice": lambda h: F.dropout(F.dropout(h, 0.3).relu(), 0.1),
    "dropout with a permutation": lambda h: F.dropout(h.t(), 0.3).t(),
    "feature alpha dropout": lambda h: F.feature_alpha_dropout(h.view(5, 3, 4), 0.3, True).view(5, 12),
    "feature dropout": lambda h: F.dropout1d(h.view(5, 3, 4), 0.3).view(5, 12),
    "gumbel": lambda h: F.gumbel_softmax(h, dim=0),
    "integers": lambda h: h * torch.randint(5, (5, 12)) + torch.randint(-3, 2, (12,)) + torch.randint_like(h, 4)
    - torch.randint_like(h, 3, 9),
    "integers in place": lambda h: h * torch.empty(12).random_(2, 5) + torch.empty(5, 1).random_(3),
    "normal": lambda h: h * torch.randn(5, 12) + torch.randn_like(h) + torch.normal(0.5, 2.0, (12,)),
    "normal in place": lambda h: h * torch.empty(5, 12).normal_(1, 2) + torch.normal(h.detach(), 0.3)
    + torch.normal(h.detach(), h.detach().exp()) * torch.normal(2.0, h.detach().exp()),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "rrelu in place": lambda h: F.rrelu(h * 1, 0.1, 0.9, training=True, inplace=True),
    "uniform": lambda h: h * torch.rand(12) + torch.rand_like(h) - torch.rand(()),
    "uniform in place": lambda h: h * torch.empty(5, 12).uniform_(-1, 2),
}  # fmt: skip


def step(plan: Plan, model: nn.Module, args: Any, seed: int = SEED, kwargs: Any = None) -> list[Tensor]:
    """The loss of a simulated step and all gradients."""
    outputs, gradients = sbpc.simulate(plan, model, args, kwargs, seed=seed)
    return [outputs if isinstance(outputs, Tensor) else outputs.loss, *(g for g in gradients.values() if g is not None)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    largest = max(float(value.abs().max()) for value in expected)
    return len(found) == len(expected) and all(
        relative_error(one, other, 1e-6 * largest) <= 1e-9 for one, other in zip(found, expected)
    )


def check_noise(name: str, meshes: Mapping[str, Sequence[Mapping[str, int]]], plans: int) -> None:
    model, args = noisy(NOISES[name])
    one = sbpc.plan(model, args, Mesh(x=1))
    expected = step(one, model, args)
    if name in BY_HAND:  # eager torch with the same mask
        outputs, gradients = eager(noisy(BY_HAND[name])[0], args)
        assert same(expected, [*outputs, *gradients.values()])  # type: ignore[arg-type]
    assert not same(expected, step(one, model, args, SEED + 1)) or name == "dropout of all"
    assert not one.notes and all(torch.isfinite(value).all() for value in expected)
    for method, sizes in [(method, sizes) for method, found in meshes.items() for sizes in found]:
        plan = sbpc.plan(model, args, Mesh(**sizes), capture=method)
        assert plan.verify() > 10
        for each in (plan, *(random_plan(plan, seed) for seed in range(plans))):
            assert same(step(each, model, args), expected)


@pytest.mark.parametrize(("method", "first"), [("light", 0), ("aot", 1)])
def test_one_seed_gives_the_same_step_on_meshes_and_that_of_eager_torch_with_the_same_mask(
    method: str, first: int, float64: None
) -> None:
    for name in list(NOISES)[first::2]:
        check_noise(name, {method: ({"x": 3},)}, plans=1)


@pytest.mark.prove
@pytest.mark.parametrize("name", NOISES)
def test_one_seed_gives_the_same_step_on_all_meshes(name: str, float64: None) -> None:
    check_noise(name, {"light": MESHES, "aot": MESHES}, plans=5)


def kept(shape: Any, stream: int, p: float) -> Tensor:
    """The mask of draw number `stream`, at 1 / (1 - p)."""
    return (bits(torch.tensor(SEED), list(shape), stream) < math.ceil((1 - p) * 2**53)) / (1 - p)


BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "alpha dropout": lambda h: alpha(h, kept(h.shape, 0, 0.2) * 0.8),
    "attention": lambda h: (
        torch.softmax(heads(h) @ heads(h).mT / math.sqrt(2), -1) * kept((5, 2, 3, 3), 0, 0.3) @ heads(h)
    ).reshape(5, 12),
    "dropout": lambda h: h * kept(h.shape, 0, 0.3),
    "dropout of all": lambda h: h,
    "dropout twice": lambda h: (h * kept(h.shape, 0, 0.3)).relu() * kept(h.shape, 1, 0.1),
    "dropout with a permutation": lambda h: (h.t() * kept((12, 5), 0, 0.3)).t(),
    "feature dropout": lambda h: (h.view(5, 3, 4) * kept((5, 3, 1), 0, 0.3)).view(5, 12),
    "rrelu": lambda h: torch.where(h <= 0, h * slopes(h.shape), h),
    "uniform": lambda h: h * unit([12], 0) + unit([5, 12], 1) - unit([], 2),
}


def unit(shape: list[int], stream: int) -> Tensor:
    return bits(torch.tensor(SEED), shape, stream) / 2**53


def slopes(shape: Any) -> Tensor:
    return 1 / 8 + unit(list(shape), 0) * (1 / 3 - 1 / 8)


def alpha(h: Tensor, keep: Tensor) -> Tensor:
    """Klambauer et al. 2017: what is dropped takes the value -alpha', then mean and variance are put back."""
    limit, p = 1.7580993408473766, 0.2
    a = 1 / math.sqrt((limit**2 * p + 1) * (1 - p))
    return a * (h * keep - limit * (1 - keep)) + a * limit * p


class Met(TorchDispatchMode):
    """Notes the ops that are run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add(func)
        return func(*args, **(kwargs or {}))


def test_every_random_op_that_can_be_captured_is_drawn_by_a_test() -> None:
    with Met() as met:
        for noise in NOISES.values():
            model, args = noisy(noise)
            model(*args)
            torch.native_dropout(args[0], 0.5, True)  # eager torch takes F.dropout apart in another way
    assert not [op for op in DRAWS if op not in met.ops]


def test_the_local_program_draws_from_where_its_shard_starts() -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Dropout(0.5))
    pins = {"0.weight": "S(0)@b", "mm": "[S(0), S(1)]"}
    plan = sbpc.plan(model, (torch.randn(4, 4),), Mesh(a=2, b=3), train=False, pin=pins, objective="serial")
    assert_expected_inline(
        graph_text(plan.local),
        """\
0.weight                          f32[2, 4]   [B, S(0)]     parameter
input_1                           f32[4, 4]   [B, B]        input
seed                              i64[]       [B, B]        input
position_a                        i64[1]                    input
position_b                        i64[1]                    input
permute                           f32[4, 2]   [B, S(1)]     aten.permute(0.weight, [1, 0])
view_default                                                aten.view(input_1, [2, 2, 4])
index_select_default                                        aten.index_select(view_default, 0, position_a)
box_input_1                       f32[2, 4]   [S(0), B]     aten.view(index_select_default, [2, 4])
mm                                f32[2, 2]   [S(0), S(1)]  aten.mm(box_input_1, permute)
mul_scalar                                                  aten.mul.Scalar(position_a, 2)
view_default_2                                              aten.view(mul_scalar, [])
mul_scalar_1                                                aten.mul.Scalar(position_b, 2)
view_default_3                                              aten.view(mul_scalar_1, [])
mul_scalar_2                                                aten.mul.Scalar(view_default_2, 6)
mul_scalar_3                                                aten.mul.Scalar(view_default_3, 1)
add_tensor                                                  aten.add.Tensor(mul_scalar_2, mul_scalar_3)
bits                              i64[2, 2]   [S(0), S(1)]  sbpc.bits(seed, [2, 2], 0, strides=[6, 1], start=add_tensor)
lt                                bool[2, 2]  [S(0), S(1)]  aten.lt.Scalar(bits, 4503599627370496)
mul                               f32[2, 2]   [S(0), S(1)]  aten.mul.Tensor(mm, lt)
mul_1                             f32[2, 2]   [S(0), S(1)]  aten.mul.Scalar(mul, 2.0)
contiguous_default                                          aten.contiguous(mul_1)
all_gather_into_tensor_default                              _c10d_functional.all_gather_into_tensor(contiguous_default, 3, sbpc::a=2,b=3::b)
wait_tensor_default                                         _c10d_functional.wait_tensor(all_gather_into_tensor_default)
view_default_4                                              aten.view(wait_tensor_default, [3, 2, 2])
permute_default_1                                           aten.permute(view_default_4, [1, 0, 2])
contiguous_default_1                                        aten.contiguous(permute_default_1)
box_mul_1                         f32[2, 6]   [S(0), B]     aten.view(contiguous_default_1, [2, 6])
contiguous_default_2                                        aten.contiguous(box_mul_1)
all_gather_into_tensor_default_1                            _c10d_functional.all_gather_into_tensor(contiguous_default_2, 2, sbpc::a=2,b=3::a)
box_mul_2                         f32[4, 6]   [B, B]        _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
output                                                      output(box_mul_2)
""",
    )


def test_what_is_computed_anew_draws_the_same_numbers(float64: None) -> None:
    def plain(h: Tensor) -> Tensor:
        return F.dropout(F.dropout(h, 0.3).exp(), 0.1)

    def anew(h: Tensor) -> Tensor:
        return checkpoint(plain, h, use_reentrant=False)

    (model, args), (again, _) = noisy(lambda h: F.dropout(plain(h), 0.2)), noisy(lambda h: F.dropout(anew(h), 0.2))
    expected = step(sbpc.plan(model, args, Mesh(x=1)), model, args)
    for mesh in MESHES[2:]:
        plan = sbpc.plan(again, args, Mesh(**mesh))
        draws = [node.args[2] for node in plan.graph.graph.nodes if "bits" in str(node.target)]
        assert sorted(draws) == [0, 0, 1, 1, 2]  # type: ignore[type-var]
        assert same(step(plan, again, args), expected)


def test_a_module_in_eval_mode_draws_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.RReLU(), nn.Dropout1d(0.1)).eval()
    plan = sbpc.plan(model, (torch.randn(4, 3, 6),), Mesh(x=2), train=False)
    assert not [port for port in plan.ports.inputs if port.kind == "seed"]
    assert not [node for node in plan.graph.graph.nodes if "bits" in str(node.target)]


def check_model(net: str, attention: str, meshes: Sequence[Mapping[str, int]]) -> None:
    model, kwargs = hf_models.MODELS[net](attention, 1)
    model = model.double()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.1
    expected: list[Tensor] = []
    with hf_models.Doubled():
        for sizes in ({"x": 1}, *meshes):
            plan = sbpc.plan(model, (), Mesh(**sizes), kwargs=kwargs)
            found = step(plan, model, (), kwargs=kwargs)
            expected = expected or found
            assert not plan.notes and same(found, expected)
            if plan.mesh.ranks in (2, 4):
                assert plan.cost.flops <= 1.05 / plan.mesh.ranks * plan.cost.flops_one_device
        assert not same(step(plan, model, (), SEED + 1, kwargs), expected)


def test_a_model_of_the_library_with_dropout_agrees_on_meshes(float64: None) -> None:
    check_model("gpt2", "sdpa", ({"x": 2},))


@pytest.mark.prove
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("net", ["gpt2", "bert", "t5", "vit"])
def test_models_of_the_library_with_dropout_agree_on_all_meshes(net: str, attention: str, float64: None) -> None:
    check_model(net, attention, MESHES)


def three_steps(path: str) -> list[Any]:
    """Losses of three forwards, and of two more after going back to the second, on a rank whose own seed is another."""
    torch.set_default_dtype(torch.float64)
    model, args = noisy(NOISES["dropout twice"])
    torch.manual_seed(17 + torch.distributed.get_rank())
    parallel = sbpc.parallelize(model, sbpc.load(path))
    found, states = [], []
    for _ in range(3):
        states.append(parallel.random_state())
        loss = parallel(*args)
        loss.backward()
        found.append(loss.item())
    parallel.set_random_state(states[1])
    found += [parallel(*args).item() for _ in range(2)]
    return [states, found, list(parallel.state_dict()) == list(model.state_dict())]


def test_ranks_agree_on_a_seed_that_moves_on_from_step_to_step(tmp_path: Any, float64: None) -> None:
    model, args = noisy(NOISES["dropout twice"])
    plan = sbpc.plan(model, args, Mesh(x=2))
    plan.save(tmp_path / "plan.sbpc")
    expected = [step(plan, model, args, seed_of_step(17, at))[0].item() for at in range(3)]
    assert len(set(expected)) == 3
    for states, losses, same_names in run_ranks(three_steps, 2, str(tmp_path / "plan.sbpc")):
        assert states == [{"seed": 17, "step": at} for at in range(3)] and same_names
        assert losses == pytest.approx([*expected, *expected[1:]], rel=1e-12)
