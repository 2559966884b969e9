"""Optimizer steps as programs: fused, on lists, and written by hand; every parameter is split as it likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import sgd

import sbpc
from sbpc import Mesh
from sbpc.passes.canonicalize.foreach_ops import LISTS
from tests.compare import relative_error
from tests.random_plans import random_plan

aten = torch.ops.aten
SHAPES = ((6, 4), (5,))
Columns = list[list[Tensor]]


class Update(nn.Module):
    """`function(columns)`: lists of one tensor per parameter in, lists out."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, columns: Columns, *more: Tensor) -> Any:
        return [list(column) for column in self.function(columns, *more)]


def columns(count: int) -> Columns:
    """Parameters, gradients, averages of any sign and of squares, and steps."""
    torch.manual_seed(0)
    made = [[torch.randn(shape) for shape in SHAPES] for _ in range(count)]
    return [*made[:3], *([value.square() for value in column] for column in made[3:])]


def numbers() -> list[Tensor]:
    return [torch.tensor(float(at), dtype=torch.float32) for at in (3, 1)]


ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "amsgrad": False, "maximize": False}
SGD: dict[str, Any] = {"dampening": 0.1, "nesterov": False, "maximize": False, "is_first_step": False}
RATE = torch.tensor(0.1, dtype=torch.float64)


def fused_adam(op: Any, lr: Any = 0.1, **options: Any) -> Callable[..., Any]:
    given = {**ADAM, "weight_decay": 0.01, **options}

    def step(c: Columns, *more: Tensor) -> Any:
        extra = dict(zip(("grad_scale", "found_inf"), more))
        largest = c[4] if given["amsgrad"] else []
        return op(*c[:4], largest, c[-1], lr=lr, **given, **extra)

    return step


def fused_sgd(op: Any, lr: Any = 0.1, momentum: float = 0.9, **options: Any) -> Callable[..., Any]:
    given = {**SGD, "weight_decay": 0.01, **options}
    return lambda c, *more: op(c[0], c[1], c[2] if momentum else [], lr=lr, momentum=momentum, **given)


def clones(*given: list[Tensor]) -> Columns:
    return [[value.clone() for value in column] for column in given]


def on_lists(c: Columns) -> Any:
    """AMSGrad as torch.optim writes it for lists, but for its own check of the device."""
    p, g, m, v, largest, steps = clones(*c)
    torch._foreach_add_(steps, 1)
    torch._foreach_add_(g, p, alpha=0.01)
    torch._foreach_lerp_(m, g, 0.1)
    torch._foreach_mul_(v, 0.99)
    torch._foreach_addcmul_(v, g, g, value=0.01)
    torch._foreach_maximum_(largest, v)
    below = torch._foreach_sqrt(largest)
    torch._foreach_div_(below, [2.0, 3.0])
    torch._foreach_add_(below, 1e-6)
    torch._foreach_mul_(below, [torch.sqrt(step) for step in steps])
    torch._foreach_addcdiv_(p, m, below, [-0.1, -0.2])
    return p, m, v, largest, torch._foreach_pow(0.9, steps)


def in_place(c: Columns) -> Any:
    p, g, m, v, _, steps = clones(*c)
    fused_adam(aten._fused_adamw_)([p, g, m, v, steps])
    return p, m, v


def stock_sgd(c: Columns) -> Any:
    p, g, m = clones(*c[:3])
    sgd.sgd(
        p, g, m, foreach=True, weight_decay=0.01, momentum=0.9, lr=0.1, dampening=0.1, nesterov=True, maximize=False
    )
    return p, m


def by_hand(c: Columns) -> Any:
    """Lion (Chen et al. 2023)."""
    signs = [torch.sign(0.9 * m + 0.1 * g) for m, g in zip(c[2], c[1])]
    return [p - 0.1 * (s + 0.01 * p) for p, s in zip(c[0], signs)], [torch.lerp(m, g, 0.01) for m, g in zip(c[2], c[1])]


def norm_clipped(c: Columns) -> Any:
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(c[1])))
    return [torch._foreach_sub(c[0], torch._foreach_mul(c[1], 1 / (total + 1)))]


MORE = (torch.tensor(4.0), torch.tensor(0.0))
STEPS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "adam": (fused_adam(aten._fused_adam), ()),
    "adam, amsgrad, maximize": (fused_adam(aten._fused_adam, amsgrad=True, maximize=True), ()),
    "adam, scaled": (fused_adam(aten._fused_adam), MORE),
    "adam, scaled, overflow": (fused_adam(aten._fused_adam), (MORE[0], torch.tensor(1.0))),
    "adam, tensor rate": (lambda c, lr: fused_adam(aten._fused_adam, lr)(c), (RATE,)),
    "adamw": (fused_adam(aten._fused_adamw), ()),
    "adamw, tensor rate": (lambda c, lr: fused_adam(aten._fused_adamw, lr, amsgrad=True)(c), (RATE,)),
    "by hand": (by_hand, ()),
    "in place": (in_place, ()),
    "norm": (norm_clipped, ()),
    "sgd": (fused_sgd(aten._fused_sgd, momentum=0.0), ()),
    "sgd, first": (fused_sgd(aten._fused_sgd, is_first_step=True), ()),
    "sgd, nesterov, maximize": (fused_sgd(aten._fused_sgd, nesterov=True, dampening=0.0, maximize=True), ()),
    "sgd, tensor rate": (lambda c, lr: fused_sgd(aten._fused_sgd, lr)(c), (RATE,)),
    "on lists": (on_lists, ()),
    "stock sgd": (stock_sgd, ()),
}


def check(name: str, meshes: tuple[dict[str, int], ...]) -> None:
    function, more = STEPS[name]
    args = ([*columns(5), numbers()], *more)
    model = Update(function)
    expected = model(*args)
    for sizes in meshes:
        plan = sbpc.plan(model, args, Mesh(**sizes), train=False)  # type: ignore[arg-type]
        assert not plan.notes or name == "norm"
        assert not [node for node in plan.graph.graph.nodes if node.target in LISTS]
        for each in (plan, *(random_plan(plan, seed) for seed in range(2))):
            found = sbpc.simulate(each, model, args).outputs
            pairs = [pair for new, old in zip(found, expected) for pair in zip(new, old)]
            assert len(pairs) == sum(map(len, expected))
            assert all(relative_error(new, old) <= 1e-9 for new, old in pairs)


def test_a_step_equals_eager_torch(float64: None) -> None:
    for name in STEPS:
        check(name, ({"x": 3},))


@pytest.mark.prove
def test_a_step_equals_eager_torch_on_more_meshes(float64: None) -> None:
    for name in STEPS:
        check(name, ({"x": 3}, {"x": 2, "y": 2}))
