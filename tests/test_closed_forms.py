"""The published formulas of communication, as sympy equalities: what the cost model says of the published layouts.

Words that one rank sends in the linear layers of a block (norms, biases, attention apart), on rings, without recompute.
"""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.graph.ports import PARAMETER, placeholders
from sbpc.mesh.pins import exactly
from sbpc.passes.annotate import annotate
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import output_wishes, placeholder_wishes
from sbpc.passes.memory.limited_space import store
from sbpc.passes.memory.live_bytes import STORED
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.plans.options import Options
from sbpc.plans.symbolic_sizes import declare
from tests.models import RINGS

b, s, h, m, k, n = (sympy.Symbol(name, positive=True) for name in ("b", "s", "h", "m", "k", "n"))
p, q, r = (sympy.Symbol(name, positive=True) for name in ("p", "q", "r"))
DIMS = {"x": ("b", "s", "h"), "up.weight": ("4*h", "h"), "down.weight": ("h", "4*h"), "[qkvp]*.weight": ("h", "h")}


class Linears(nn.Module):
    """The four products of a transformer block, 12 h^2 weights; a product of q, k and v stands for attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(self.query(x) * self.key(x) * self.value(x))
        return self.down(F.gelu(self.up(x)))


def words(name: str, mesh: Mesh, ends: str, train: bool = True) -> dict[str, Any]:
    """Words by axis that the expert's plan sends; inputs and outputs in the layout `ends`."""
    x = torch.empty(16, 32, 64, requires_grad=True, device="meta")
    ends_of = {"inputs": [ends], "outputs": [ends]}
    plan = sbpc.baseline(
        name, Linears(64).to("meta"), (x,), mesh, dynamic=DIMS, train=train, **ends_of, objective="serial"
    )
    assert not plan.notes
    return {axis: sent / 4 for axis, sent in plan.cost.bytes_expr.items()}


def homes(plan: sbpc.Plan) -> dict[str, Any]:
    """The layouts of parameters by the names of their placeholders."""
    return {
        node.name: plan.layouts[node.name] for port, node in placeholders(plan.graph).items() if port.kind == PARAMETER
    }


def equal(found: Any, formula: Any) -> None:
    assert sympy.simplify(found - formula) == 0, f"{sympy.factor(found)} is not {formula}"


def test_data_parallelism_reduces_every_gradient() -> None:
    equal(words("data", Mesh(p=4), "S(0)")["p"], 2 * (p - 1) / p * 12 * h**2)


def test_fully_sharded_data_parallelism_gathers_weights_and_scatters_gradients() -> None:
    equal(words("fsdp", Mesh(p=4), "S(0)")["p"], 2 * (p - 1) / p * 12 * h**2)
    equal(words("fsdp", Mesh(p=4), "S(0)", train=False)["p"], (p - 1) / p * 12 * h**2)


@pytest.mark.parametrize(("name", "ends"), [("megatron", "B"), ("megatron+sp", "S(1)")])
def test_megatron_sends_four_activations_forward_and_four_backward(name: str, ends: str) -> None:
    equal(words(name, Mesh(p=4), ends, train=False)["p"], 4 * (p - 1) / p * b * s * h)
    equal(words(name, Mesh(p=4), ends)["p"], 8 * (p - 1) / p * b * s * h)


def test_megatron_with_data_parallelism_divides_both() -> None:
    found = words("megatron", Mesh(q=2, p=2), "S(0)@q")
    equal(found["p"], 8 * (p - 1) / p * b * s * h / q)
    equal(found["q"], 2 * (q - 1) / q * 12 * h**2 / p)


def test_optimus_gathers_seven_activations_and_all_weights_and_scatters_them_backward() -> None:
    forward = {"q": (q - 1) / q * 12 * h**2 / r, "r": (r - 1) / r * 7 * b * s * h / q}
    found = words("summa", Mesh(q=2, r=2), "[S(0), S(2)]", train=False)
    for axis, formula in forward.items():
        equal(found[axis], formula)
    square = sum(found.values()).subs(r, q)
    equal(square, (q - 1) / q**2 * (7 * b * s * h + 12 * h**2))
    both = words("summa", Mesh(q=2, r=2), "[S(0), S(2)]")  # gathered copies are kept
    equal(sum(both.values()).subs(r, q), 2 * (q - 1) / q**2 * (7 * b * s * h + 12 * h**2))


def test_optimus_gathers_everything_once_more_where_no_gathered_copy_is_kept() -> None:
    """What the backward reads is stored as it was made; what calls leave is as where gathered copies are kept. Else the
    solver finds what sends less: 4 h^2 in the place of 4 bsh where `down` takes the gradient of its weight."""
    mesh = Mesh(q=2, r=2)
    x = torch.empty(16, 32, 64, requires_grad=True, device="meta")
    ends = ["[S(0), S(2)]"]
    free = sbpc.baseline(
        "summa", Linears(64).to("meta"), (x,), mesh, dynamic=DIMS, inputs=ends, outputs=ends, objective="serial"
    )
    wishes = placeholder_wishes(free.graph, mesh, ends, None, False)
    calls = [node for node in free.graph.graph.nodes if node.op == "call_function" and node.name in free.layouts]
    wishes |= {node.name: exactly(free.layouts[node.name], "as in the baseline") for node in calls}
    wishes |= {name: exactly(home, "as in the baseline") for name, home in homes(free).items()}
    gm = annotate(store(free.graph))
    gm.meta["dynamic"] = declare(gm, DIMS)
    for node in gm.graph.nodes:
        if STORED in node.meta:
            wishes[node.name] = exactly(free.layouts[node.args[0].name], "stored as it was made")
    assignment, _ = Space(gm, mesh, wishes, output_wishes(gm, mesh, ends, False)).solve()
    plan = make_plan(gm, mesh, assignment, 0.0, Options(objective="serial"), Stages())
    found = {axis: sent / 4 for axis, sent in plan.cost.bytes_expr.items()}
    equal(found["q"], 3 * (q - 1) / q * 12 * h**2 / r)
    equal(found["r"], 3 * (r - 1) / r * 7 * b * s * h / q)
    equal(sum(found.values()).subs(r, q), 3 * (q - 1) / q**2 * (7 * b * s * h + 12 * h**2))
    assert plan.cost.memory["activations"] < 0.8 * free.cost.memory["activations"]


class Chain(nn.Module):
    """Two linear layers, k -> n -> k."""

    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(k, n, bias=False), nn.Linear(n, k, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_axonn_has_its_five_terms_per_layer_with_x_and_y_in_turn() -> None:
    mesh = Mesh(d=2, z=2, y=2, x=2, cluster=RINGS)
    args = (torch.empty(512, 64, requires_grad=True, device="meta"),)
    plan = sbpc.baseline(
        "agarwal", Chain(64, 96).to("meta"), args, mesh, inputs=["[S(0), S(0), B, S(1)]"], outputs=["[S(0), S(0), B, S(1)]"],
        dynamic={"x": ("m", "k"), "first.weight": ("n", "k"), "second.weight": ("k", "n")}, objective="serial",
    )  # fmt: skip
    d, z, y, x = (plan.cost.symbols[axis] for axis in mesh.axes)

    def layer(k: Any, n: Any, x: Any, y: Any) -> dict[str, Any]:
        """One layer that is summed over x forward: Gd, Gz, Gx, Gy are the sizes of the axes."""
        return {
            "AG_z": (z - 1) / z * k * n / (x * y),  # forward; the gathered copy is kept
            "RS_z": (z - 1) / z * k * n / (x * y),
            "AR_x": 2 * (x - 1) / x * m * n / (d * z * y),
            "AR_y": 2 * (y - 1) / y * m * k / (d * z * x),
            "AR_d": 2 * (d - 1) / d * k * n / (x * y * z),
        }

    first, second = layer(k, n, x, y), layer(n, k, y, x)
    found = {axis: sent / 4 for axis, sent in plan.cost.bytes_expr.items()}
    equal(found["z"], first["AG_z"] + first["RS_z"] + second["AG_z"] + second["RS_z"])
    equal(found["x"], first["AR_x"] + second["AR_y"])
    equal(found["y"], first["AR_y"] + second["AR_x"])
    equal(found["d"], first["AR_d"] + second["AR_d"])
    assert set(found) == {"d", "z", "y", "x"}


def test_seconds_are_bytes_over_bandwidth_and_rounds_of_latency() -> None:
    x = torch.empty(16, 32, 64, requires_grad=True, device="meta")
    cost = sbpc.baseline(
        "megatron", Linears(64).to("meta"), (x,), Mesh(p=4, cluster=RINGS), dynamic=DIMS, objective="serial"
    ).cost
    bandwidth, latency = cost.symbols["bandwidth_p"], cost.symbols["latency_p"]
    sent = [term for term in cost.expr.args if term.has(bandwidth) or term.has(latency)]
    equal(sum(sent), 4 * (2 * (p - 1) * latency + 2 * (p - 1) / p * 4 * b * s * h / bandwidth))
