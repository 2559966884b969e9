"""Symbolic dims: carried by the rules, and right at other sizes, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.api.task import prepare
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.plans.options import Options
from sbpc.plans.symbolic_sizes import name_dims
from tests import models

GPT: dict[str, Any] = {
    "tokens": ("b", "s"), "targets": ("b", "s"), "tokens.weight": ("v", "h"), "positions.weight": ("s", "h"),
    "*.qkv.weight": ("3*h", "h"), "*.qkv.bias": ("3*h",), "*.proj.weight": ("h", "h"), "*.proj.bias": ("h",),
    "*.up.weight": ("4*h", "h"), "*.up.bias": ("4*h",), "*.down.weight": ("h", "4*h"), "*.down.bias": ("h",),
    "*norm*": ("h",), "heads": 4,
}  # fmt: skip
H100 = Mesh(data=2, tensor=2, cluster="h100")


class Pair(nn.Module):
    """Two linear layers on [b, s, h]."""

    def __init__(self, width: int = 8, hidden: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


PAIR = {"x": ("b", "s", "h"), "up.weight": ("4*h", "h"), "down.weight": ("h", "4*h")}


def pair(dynamic: Any = None, mesh: Mesh | None = None, **options: Any) -> sbpc.Plan:
    """The plan of two layers on [6, 10, 8]."""
    return sbpc.plan(
        Pair(), (torch.randn(6, 10, 8),), mesh or Mesh(t=2), dynamic=dynamic, **options, objective="serial"
    )


SIZES = [
    {"batch": 24, "seq": 16, "vocab": 160, "width": 96, "heads": 8},
    {"batch": 8, "seq": 12, "vocab": 52, "width": 24, "heads": 12},
]


PAIRS = [
    pytest.param(mesh, sizes, marks=pytest.mark.prove if (mesh == H100) != (sizes is SIZES[0]) else ())
    for mesh in (H100, Mesh(x=2, y=2))
    for sizes in SIZES
]


@pytest.mark.parametrize(("mesh", "sizes"), PAIRS, ids=str)
def test_formula_at_other_sizes_is_the_cost_of_the_same_layouts_there(mesh: Mesh, sizes: dict[str, int]) -> None:
    model, args = models.gpt2(batch=4, seq=14, vocab=44, width=16, heads=4)
    plan = sbpc.plan(model, args, mesh, dynamic=GPT, objective="serial")
    assert not plan.notes and plan.cost.subs() == pytest.approx(plan.cost.seconds, rel=1e-12)
    model, args = models.gpt2(**sizes)
    there = make_plan(prepare(model, args).gm, mesh, plan.assignment, 0.0, Options(objective="serial"), Stages()).cost
    names = {"batch": "b", "seq": "s", "vocab": "v", "width": "h", "heads": "heads"}
    found = {names[name]: size for name, size in sizes.items()}
    assert plan.cost.subs(found) == pytest.approx(there.seconds, rel=1e-12)
    numbers = {plan.cost.symbols[name]: value for name, value in (plan.cost.numbers | found).items()}
    for axis, sent in there.bytes_sent.items():
        assert float(plan.cost.bytes_expr[axis].subs(numbers)) == pytest.approx(sent, rel=1e-12)
    assert plan.cost.memory_expr.xreplace(numbers) == there.memory["total"]
    numbers = {plan.cost.symbols[name]: value for name, value in plan.cost.numbers.items()}
    assert plan.cost.memory_expr.xreplace(numbers) == plan.memory["total"]


def test_memory_as_a_formula_is_right_on_more_ranks() -> None:
    args = (torch.randn(32, 64),)
    plan = sbpc.plan(nn.Linear(64, 32, bias=False), args, Mesh(t=2), pin={"weight": "S(0)"}, optimizer="adamw", dynamic={"input_1": ("b", "k"), "weight": ("n", "k")},
                     inputs=["S(0)"], objective="serial")  # fmt: skip
    cost, wide = plan.cost, Mesh(t=8)
    for sizes in ({"b": 32}, {"b": 512, "n": 64}):
        found = {"k": 64, "n": 32} | sizes
        gm = prepare(nn.Linear(found["k"], found["n"], bias=False), (torch.randn(found["b"], 64),)).gm
        there = make_plan(gm, wide, plan.assignment, 0.0, Options(objective="serial"), Stages())
        numbers = {cost.symbols[name]: value for name, value in (cost.numbers | found | {"t": 8}).items()}
        assert cost.memory_expr.xreplace(numbers) == there.memory["total"]


def test_dims_that_are_not_named_are_what_they_meet() -> None:
    model, args = models.gpt2(batch=4, seq=14, vocab=44, width=16, heads=4)
    few = {
        name: GPT[name]
        for name in ("tokens", "tokens.weight", "positions.weight", "*.qkv.weight", "*.up.weight", "heads")
    }
    full, plan = (sbpc.plan(model, args, H100, dynamic=names, objective="serial") for names in (GPT, few))
    assert not plan.notes
    assert plan.cost.expr == full.cost.expr and plan.cost.bytes_expr == full.cost.bytes_expr


def test_a_dim_that_meets_no_name_stays_its_number() -> None:
    plan, full = pair({"x": ("b", None, None)}), pair(PAIR)
    assert plan.cost.subs(b=12) == pytest.approx(full.cost.subs(b=12), rel=1e-12) != plan.cost.seconds
    assert plan.notes[-1] == (
        "dims that meet none that is named are numbers in formulas: up.weight[0] = 32, up.weight[1] = 8, down.weight[0] = 8 and 1 more"
    )
    half = pair({"x": ("b", "s", "h"), "up.weight": ("4*h", "h")})
    assert half.notes[-1] == "dims that meet none that is named are numbers in formulas: down.weight[0] = 8"
    assert half.cost.subs(b=12, s=20) == pytest.approx(full.cost.subs(b=12, s=20), rel=1e-12)
    assert {"s", "h"}.isdisjoint(map(str, plan.cost.expr.free_symbols))


def test_bytes_of_a_column_row_pair_read_as_in_the_textbook() -> None:
    x = torch.randn(2, 3, 64, requires_grad=True)
    pins = {"up.weight": "S(0)", "down.weight": "S(1)"}
    cost = sbpc.plan(Pair(64, 256), (x,), Mesh(t=2), dynamic=PAIR, pin=pins, objective="serial").cost
    assert str(sympy.simplify(cost.bytes_expr["t"])) == "16*b*h*s*(t - 1)/t"


def test_formula_is_evaluated_for_arrays_that_broadcast() -> None:
    cost = pair(PAIR, Mesh(t=2, cluster="h100")).cost
    batches, widths = np.arange(1, 20_001), np.array([[8], [512]])
    found = cost.evaluate(b=batches, h=widths)
    assert found.shape == (2, 20_000)
    for batch, width in ((1, 8), (777, 512), (20_000, 8)):
        assert found[int(width == 512), batch - 1] == cost.subs(b=batch, h=width)


def test_dims_survive_a_file(tmp_path: Path) -> None:
    plan = pair(PAIR)
    plan.save(tmp_path / "plan")
    read = sbpc.load(tmp_path / "plan")
    assert read.cost.expr == plan.cost.expr and read.cost.terms.numbers == {"b": 6, "s": 10, "h": 8}


def test_what_only_a_number_tells_is_a_symbol_where_one_is_meant_and_else_a_number_with_a_note() -> None:
    class Ramp(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + torch.zeros(x.shape[0]), y

    def dims(*sizes: int) -> tuple[str, tuple[str, ...]]:
        gm = prepare(Ramp(), (torch.randn(sizes[0]), torch.randn(sizes[1])), train=False).gm
        name_dims(gm, Mesh(t=2), {"x": ("a",), "y": ("b",)})
        (zeros,) = [node for node in gm.graph.nodes if "zeros" in str(node.target)]
        return str(zeros.meta["dims"]), gm.meta["notes"]

    assert dims(6, 10) == ("((a,),)", ())
    assert dims(6, 6) == ("((6,),)", ("zeros: a dim of 6 elements may be a or b; in formulas it is a number",))


WRONG: list[tuple[Any, str]] = [
    (3, "dynamic is 3\n  Give a mapping such as"),
    ({"z": ("b",)}, "dynamic: 'z' is no parameter and no input\n  The closest names are"),
    ({"x": ("b", "s")}, "dynamic: 'x' has the dims ('b', 's'), %x the shape [6, 10, 8]\n  Give one per dim"),
    ({"x": ("b", "s", "f(h)")}, "dynamic: dim 2 of 'x' is 'f(h)'\n  Give names, integers and + - * / of them"),
    ({"x": ("b", "s", "h*")}, "dynamic: dim 2 of 'x' is 'h*'\n  Give names"),
    (
        {"x": ("b", "s", "h"), "up.weight": ("3*h", "h")},
        "dynamic: a dim of %up_weight is 3*h, which is 24, and has 32 elements\n  With h = 8: mend one of them.",
    ),
    ({"x": ("b*s", "b/s", "h")}, "dynamic: the number of b, s cannot be told\n  Give it, as in {'b': 12}."),
    ({"x": ("t", "s", "h")}, "dynamic: 't' is the name of something else in the formula\n  Call the dim otherwise."),
    (
        {"x": ("b", "s", "latency_t")},
        "dynamic: 'latency_t' is the name of something else in the formula\n  Call the dim otherwise.",
    ),
    ({"heads": 1}, "dynamic: heads is 1\n  Plan at sizes from 2 on"),
]


def test_dims_that_make_no_sense_are_refused() -> None:
    for dynamic, message in WRONG:
        with pytest.raises(sbpc.SbpcError) as error:
            pair(dynamic)
        assert str(error.value).startswith(message)


def test_of_patterns_that_name_one_dim_the_last_one_is_taken_also_from_a_file(tmp_path: Path) -> None:
    names = {"weight": ("n", "k"), "input_1": ("b", "k"), "*ight": ("2*m", "k")}
    plan = sbpc.plan(nn.Linear(8, 6), (torch.randn(10, 8),), Mesh(t=2), dynamic=names)
    plan.save(tmp_path / "plan")
    found = sbpc.load(tmp_path / "plan")
    assert (
        list(found.options.dynamic or {}) == list(names)
        and found.options == plan.options
        and found.numbers == plan.numbers
    )
    assert found.cost.expr == plan.cost.expr and str(found) == str(plan)
