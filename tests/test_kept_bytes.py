"""The published formulas of what a transformer layer keeps for its backward, as sympy equalities (Korthikanti et al. 2022, section 4)."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

import sbpc
from sbpc import Mesh
from sbpc.graph.about import RECOMPUTES
from sbpc.graph.ports import PARAMETER, placeholders
from sbpc.mesh.pins import exactly
from sbpc.passes.annotate import annotate
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import output_wishes, placeholder_wishes
from sbpc.passes.memory.limited_space import store
from sbpc.passes.memory.live_bytes import STORED
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.plans.options import Options
from tests.test_recompute import Layers

aten = torch.ops.aten
s_, b_, h_, a_, t_ = sympy.symbols("s b h a t", positive=True)
STATISTICS = 8 * s_ * b_  # mean and deviation of two layer norms, which the paper leaves out
KEPT = {  # bytes of a layer between forward and backward, values of 2 bytes
    ("none", None): s_ * b_ * h_ * (34 + 5 * a_ * s_ / h_) + STATISTICS,
    ("none", "megatron"): s_ * b_ * h_ * (10 + 24 / t_ + 5 * a_ * s_ / (h_ * t_)) + STATISTICS,
    ("none", "megatron+sp"): (s_ * b_ * h_ * (34 + 5 * a_ * s_ / h_) + STATISTICS) / t_,
    ("selective", None): 34 * s_ * b_ * h_ + STATISTICS,
    ("selective", "megatron"): s_ * b_ * h_ * (10 + 24 / t_) + STATISTICS,
    ("selective", "megatron+sp"): (34 * s_ * b_ * h_ + STATISTICS) / t_,
    ("full", None): 2 * s_ * b_ * h_,
    ("full", "megatron"): 2 * s_ * b_ * h_,
    ("full", "megatron+sp"): 2 * s_ * b_ * h_ / t_,
}


# batch, sequence, width, heads, ranks; only what attention keeps is no multiple of s b h
SHAPE, SECOND = (4, 32, 64, 8, 4), (2, 64, 64, 4, 4)
CASES = [pytest.param(*case, SHAPE) for case in KEPT]
CASES += [
    pytest.param("none", scheme, SECOND, marks=pytest.mark.prove if scheme else ())
    for form, scheme in KEPT
    if form == "none"
]


@pytest.mark.parametrize(("form", "scheme", "shape"), CASES)
def test_a_layer_keeps_the_bytes_of_the_published_formulas(
    form: str, scheme: str | None, shape: tuple[int, ...]
) -> None:
    one, two = (kept_bytes(form, scheme, *shape, layers=layers) for layers in (1, 2))
    formula = KEPT[form, scheme].subs(dict(zip((b_, s_, h_, a_, t_), shape)))
    assert sympy.simplify(two - one - formula) == 0, (two - one, formula)


def kept_bytes(
    form: str, scheme: str | None, batch: int, seq: int, width: int, heads: int, ranks: int, layers: int
) -> int:
    """Bytes of activations on a rank at the end of the forward."""
    torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        model = Layers(width, heads, layers).to(torch.bfloat16)
        x = torch.empty(batch, seq, width, dtype=torch.bfloat16, requires_grad=True)
    ends = ["S(1)"] if scheme == "megatron+sp" else None
    options: dict[str, Any] = {"recompute": form, "objective": "serial", "microbatches": 1, "inputs": ends}
    options |= {
        "masters": False,
        "reduce": "as computed",
    }  # sums of 32 bits move what is kept of some layers into parts
    mesh = Mesh(t=1 if scheme is None else ranks)
    plan = (
        sbpc.plan(model, (x,), mesh, **options)
        if scheme is None
        else sbpc.baseline(scheme, model, (x,), mesh, **options)
    )
    if scheme == "megatron":  # whose dropouts behind a block are whole on every rank, where the solver would split them
        whole = [node for node in plan.graph.graph.nodes if node.target in (aten.lt.Scalar, aten.add.Tensor)]
        pin = {node.name: "B" for node in whole if node.meta["val"].dim() == 3 and RECOMPUTES not in node.meta}
        plan = sbpc.baseline(scheme, model, (x,), mesh, **options, pin=pin)
    curve = (stored_as_made(plan, ends) if ends else plan).memory_curve()
    return curve.groups["activations"][curve.phases.index("backward") - 1]


def stored_as_made(plan: sbpc.Plan, ends: list[str]) -> sbpc.Plan:
    """The same layouts, but what the backward reads is kept as it was made, and gathered again."""
    calls = [node for node in plan.graph.graph.nodes if node.op == "call_function" and node.name in plan.layouts]
    calls += [node for port, node in placeholders(plan.graph).items() if port.kind == PARAMETER]
    wishes = {node.name: exactly(plan.layouts[node.name], "as in the plan") for node in calls}
    gm = annotate(store(plan.graph))
    kept = [node for node in gm.graph.nodes if STORED in node.meta]
    wishes |= {node.name: exactly(plan.layouts[node.all_input_nodes[0].name], "as it was made") for node in kept}
    wishes |= placeholder_wishes(gm, plan.mesh, ends, None, False)
    assignment, _ = Space(gm, plan.mesh, wishes, output_wishes(gm, plan.mesh, None, False)).solve()
    return make_plan(gm, plan.mesh, assignment, 0.0, Options(optimizer=None, objective="serial"), Stages())
