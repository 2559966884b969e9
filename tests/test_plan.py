"""Plans: refused input, cost as numbers and as a formula, memory limits, and files that carry no code."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Cluster, Mesh
from sbpc.errors import CaptureError, MemoryLimitError, MeshError, PinError, PlanError
from sbpc.plans.measure import kernel_of
from tests import models
from tests.compare import largest_error
from tests.random_plans import random_plan
from tests.test_golden import TwoLayers

H100 = Mesh(data=4, tensor=4, cluster="h100")


def refused(kind: type[Exception], call: Any) -> str:
    """The message of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def two_layers(**options: Any) -> Any:
    """A call that plans two layers with these options."""
    mesh = options.pop("mesh", Mesh(tensor=2))
    return lambda: sbpc.plan(TwoLayers(), (torch.randn(6, 8),), mesh, **options)


PINS = [
    (
        {"upp.weight": "S(0)"},
        "pin 'upp.weight' matches no parameter and no value\n  The closest names are up.weight, down.weight, permute.",
    ),
    (
        {"up.weight": "S(2)"},
        "pin 'up.weight': 'S(2)': the tensor has no dim 2\n  %up_weight : f32[16, 8] = placeholder\n  Its dims are 0 to 1.",
    ),
    (
        {"up.weight": "S(0)", "*.weight": "S(1)"},
        "two pins of %up_weight disagree on axis 'tensor': S(0) and S(1)\n  pin 'up.weight': 'S(0)'\n  pin '*.weight': 'S(1)'\n  Remove one of them.",
    ),
    (
        {"up.weight": "Q"},
        "pin 'up.weight': 'Q': 'Q' is not a state\n"
        "  A state is S(dim), B, P, P(max) or P(min), of rows of experts also R(dim) or L(dim), of their ends P(own).",
    ),
    ({"up.weight": "S(0)@z"}, "pin 'up.weight': 'S(0)@z': the mesh has no axis 'z'\n  Its axes are tensor."),
    (
        {"up.weight": "P"},
        "pin 'up.weight': 'P' cannot be met\n  %up_weight : f32[16, 8] = placeholder\n  It can be left in [B], [S(0)], [S(1)].",
    ),
    ({"x": "S(0)"}, "pin 'x': 'S(0)' pins an input or a buffer\n  Lay out inputs with inputs=; buffers are whole."),
]


def test_pins_that_cannot_be_met_are_refused_with_the_reason() -> None:
    for pins, message in PINS:
        assert refused(PinError, two_layers(pin=pins)) == message, pins


def test_pin_of_a_dim_with_fewer_elements_than_ranks_names_both() -> None:
    assert refused(PinError, two_layers(pin={"up.weight": "S(1)"}, mesh=Mesh(tensor=16))) == (
        "pin 'up.weight': 'S(1)': dim 1 of (16, 8) cannot be split over axis 'tensor': 8 elements, 16 ranks\n"
        "  %up_weight : f32[16, 8] = placeholder\n"
        "  Pin another dim, or pad it to a multiple of the axis."
    )


def test_bare_pin_needs_a_mesh_of_one_axis() -> None:
    assert refused(PinError, two_layers(pin={"up.weight": "S(0)"}, mesh=Mesh(data=2, tensor=2))) == (
        "pin 'up.weight': 'S(0)': 'S(0)' names no axis\n  Say which: S(0)@tensor."
    )


def test_a_tied_parameter_is_pinned_under_any_of_its_names() -> None:
    model, args = models.gpt2(layers=1, tied=True)
    plan = sbpc.plan(model, args, Mesh(x=2))
    (other, first), *_ = plan.ports.tied.items()
    assert sbpc.plan(model, args, Mesh(x=2), pin={other: "S(0)"}).layout(first).states == (sbpc.S(0),)
    message = refused(PinError, lambda: sbpc.plan(model, args, Mesh(x=2), pin={other: "S(0)", first: "S(1)"}))
    assert message.startswith("two pins of %") and "disagree on axis 'x': S(0) and S(1)" in message


def test_data_dependent_branch_names_the_users_line() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                return x
            return -x

    message = refused(CaptureError, lambda: sbpc.plan(Branch(), (torch.randn(3),), Mesh(x=2)))
    assert 'test_plan.py", line' in message and "in forward" in message and "if x.sum() > 0:" in message


OTHERS = "Known are a100, b200, ethernet, frontier, h100, h200, ideal, perlmutter, workstation; load others with Cluster.load."
MESHES: list[tuple[Any, str]] = [
    (lambda: Mesh(), "a mesh of 0 axes\n  Give 1 to 4 axes, as in Mesh(data=2, tensor=4)."),
    (lambda: Mesh(x=0), "axis 'x' has size 0\n  The size of an axis is an integer from 1 on."),
    (lambda: Mesh(x=2.0), "axis 'x' has size 2.0\n  The size of an axis is an integer from 1 on."),  # type: ignore[arg-type]
    (lambda: Mesh(x=2, cluster="h1000"), f"no cluster is called 'h1000'\n  {OTHERS}"),
    (
        lambda: Cluster("c", -1, 1, 0, 1, 0, 1, 0, 1),
        "cluster 'c': peak is -1\n  It is a number from 1 to 1e+30 flop/s, or infinite.",
    ),
    (
        lambda: Cluster("c", *[1] * 8, collectives=[3]),  # type: ignore[arg-type]
        "cluster 'c': collectives is [3]\n  It is a tuple of rates.",
    ),
    (lambda: Cluster.load(None), "path is None\n  Give a path."),  # type: ignore[arg-type]
    *(
        (lambda name=name: Mesh(x=2, cluster=name), f"no cluster is called {name!r}\n  {OTHERS}")
        for name in (["h100"], 3, 0, "")
    ),
]


def test_malformed_meshes_are_refused() -> None:
    for call, message in MESHES:
        assert refused(MeshError, call) == message


def test_what_plan_cannot_do_is_refused() -> None:
    assert "optimizer is 'lion'" in refused(sbpc.SbpcError, two_layers(optimizer="lion"))
    assert "objective is 'joy'" in refused(sbpc.SbpcError, two_layers(objective="joy"))
    assert "inputs= has 2 layouts for 1 tensors" in refused(PinError, two_layers(inputs=["B", "B"]))
    assert "[P] cannot be stored" in refused(PinError, two_layers(outputs=["P"]))
    assert "the mesh is of type int" in refused(sbpc.SbpcError, two_layers(mesh=4))


KINDS: list[dict[str, Any]] = [
    {"pin": {"up.weight": 3}},
    {"pin": "up.weight"},
    {"pin": {3: "S(0)"}},
    {"inputs": "S(0)"},
    {"inputs": [3]},
    {"outputs": 5},
    {"kwargs": [1]},
    {"kwargs": {3: 4}},
    {"dump": 3},
    {"train": None},
    {"optimizer": ["adamw"]},
    {"dynamic": {3: 4}},
    {"loss": 3},
    {"memory": "80G"},
    {"memory": float("nan")},
    {"memory": -1},
    {"memory": True},
    {"spread": "yes"},
]


def test_arguments_of_the_wrong_kind_are_refused() -> None:
    for options in KINDS:
        message = refused(sbpc.SbpcError, two_layers(**options))
        assert "\n  " in message and not message.startswith("Traceback"), options


def test_error_in_the_models_own_forward_names_its_line() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x.reshape(-1)

    message = refused(CaptureError, lambda: sbpc.plan(Broken(), (torch.randn(3, 4),), Mesh(x=2)))
    assert message.startswith("the model's forward raises RuntimeError") and "return x @ x.reshape(-1)" in message


def test_a_mesh_of_too_many_ranks_is_refused() -> None:
    assert refused(MeshError, lambda: Mesh(x=10**14)).endswith("There may be 1,048,576 at most.")


WRONG: list[tuple[Any, str]] = [
    (lambda plan: plan.certify(seconds="x"), "seconds is 'x'\n  Give a number of seconds."),
    (lambda plan: plan.certify(seconds=float("nan")), "seconds is nan\n  Give a number of seconds."),
    (lambda plan: plan.certify(seconds=-1), "seconds is -1\n  Give a number of seconds."),
    (lambda plan: plan.certify(seconds=10**5000), "seconds is an integer of 16610 bits\n  Give a number of seconds."),
    (lambda plan: plan.layout(3), "name is 3\n  Give a text."),
    (lambda plan: plan.local_at("0"), "rank is '0'\n  Give an integer."),
    (lambda plan: plan.save(None), "path is None\n  Give a path."),
    (lambda plan: plan.export(None), "path is None\n  Give a path."),
    (lambda plan: plan.export("file", 3), "inference is 3\n  Give a plan made with train=False, or None."),
    (lambda plan: sbpc.load(None), "path is None\n  Give a path."),  # type: ignore[arg-type]
    (lambda plan: sbpc.load_module(None), "path is None\n  Give a path."),  # type: ignore[arg-type]
    (lambda plan: sbpc.load_rules(None), "path is None\n  Give a path."),  # type: ignore[arg-type]
    (lambda plan: sbpc.plan(None, (), plan.mesh), "model is None\n  Give an nn.Module."),  # type: ignore[arg-type]
    (lambda plan: sbpc.baseline(["data"], nn.ReLU(), (), plan.mesh), "name is ['data']\n  Give a text."),  # type: ignore[arg-type]
    (lambda plan: sbpc.simulate(3, nn.ReLU(), ()), "the plan is 3\n  Give what sbpc.plan or sbpc.load returns."),  # type: ignore[arg-type]
    (lambda plan: sbpc.simulate(plan, nn.ReLU(), (), seed="x"), "seed is 'x'\n  Give an integer."),  # type: ignore[arg-type]
]


def test_every_call_refuses_arguments_of_the_wrong_kind() -> None:
    plan = two_layers()()
    for call, message in WRONG:
        assert refused(sbpc.SbpcError, lambda call=call: call(plan)) == message


def test_unknown_names_and_ranks_are_refused() -> None:
    plan = two_layers()()
    assert refused(PlanError, lambda: plan.layout("up.weigh")).startswith(
        "the plan has no parameter and no value 'up.weigh'"
    )
    assert refused(PlanError, lambda: plan.local_at(2)) == "rank 2 of a mesh of 2 ranks\n  Ranks are 0 to 1."


PAIRS = [
    pytest.param(net, mesh, marks=() if net == quick else pytest.mark.prove)
    for quick, mesh in (
        ("mlp", Mesh(x=3)),
        ("resnet", Mesh(data=2, tensor=2)),
        ("resnet", H100),
        ("mlp", Mesh(a=2, b=2, c=2, cluster="h100")),
    )
    for net in ("mlp", "resnet")
]


@pytest.mark.parametrize(("net", "mesh"), PAIRS, ids=str)
def test_formula_of_the_cost_gives_its_seconds(net: str, mesh: Mesh) -> None:
    model, args = getattr(models, net)(batch=10)
    cost = sbpc.plan(model, args, mesh, objective="serial").cost
    assert isinstance(cost.expr, sympy.Expr) and cost.expr.free_symbols <= set(cost.symbols.values())
    assert cost.subs() == pytest.approx(cost.seconds, rel=1e-9)
    numbers = {cost.symbols[name]: value for name, value in cost.numbers.items()}
    finite = {
        symbol: sympy.oo if value == float("inf") else sympy.Float(value, 30) for symbol, value in numbers.items()
    }
    assert float(cost.expr.subs(finite)) == pytest.approx(cost.seconds, rel=1e-9)
    assert cost.seconds == cost.compute_seconds + cost.comm_seconds
    refused(KeyError, lambda: cost.subs(nothing=1.0))


@pytest.mark.parametrize("net", ["gpt2", "resnet"])
def test_calls_are_counted_by_kernel(net: str) -> None:
    model, args = getattr(models, net)(layers=1)
    found = sbpc.plan(model, args, Mesh(x=2, y=2), objective="serial")
    for plan in (found, *(random_plan(found, seed) for seed in range(3))):
        calls = [node for node in plan.boxed.graph.nodes if node.op == "call_function" and "choice" in node.meta]
        assert dict(plan.cost.kernels) == Counter(kernel_of(call, plan.mesh) for call in calls)


def test_a_cost_prints_in_a_line() -> None:
    cost = sbpc.plan(TwoLayers(), (torch.randn(6, 8),), H100).cost
    assert repr(cost).startswith(f"Cost({cost.seconds:.6g} s: ") and "\n" not in repr(cost) and len(repr(cost)) < 300


def test_formula_of_data_parallelism_is_the_textbook_one() -> None:
    x = torch.randn(96, 8)
    plan = sbpc.plan(TwoLayers(), (x,), Mesh(data=2), pin={"*.weight": "B"}, inputs=["S(0)"], outputs=["S(0)"])
    p, bandwidth = plan.cost.symbols["data"], plan.cost.symbols["bandwidth_data"]
    latency = plan.cost.symbols["latency_data"]
    communicated = sum(term for term in plan.cost.expr.as_ordered_terms() if term.has(bandwidth) or term.has(latency))
    expected = 2 * (2 * (p - 1) * latency + 2 * (p - 1) / p * 16 * 8 * 4 / bandwidth)
    assert sympy.simplify(communicated - expected) == 0


def test_memory_limit_is_kept_or_refused_with_the_largest_tensors() -> None:
    model, args = models.mlp(batch=12)
    free = sbpc.plan(model, args, Mesh(x=4), objective="serial")
    least = 0
    for share in (1.0, 0.9, 0.8, 0.7):
        limit = free.cost.memory["total"] * share
        try:
            plan = sbpc.plan(model, args, Mesh(x=4), memory=limit, objective="serial")
        except MemoryLimitError as error:
            assert "more than the limit of" in str(error) and "the largest tensors: %" in str(error)
            break
        assert plan.cost.memory["total"] <= limit
        assert plan.cost.seconds >= free.cost.seconds * (1 - 1e-9)
        assert largest_error(plan, model, args) <= 1e-4
        least += 1
    assert least >= 1
    assert "more than the limit of 10" in refused(
        MemoryLimitError, lambda: sbpc.plan(model, args, Mesh(x=4), memory=10)
    )


def test_spread_stores_everything_once() -> None:
    plan = sbpc.plan(
        nn.Linear(16, 16, bias=False),
        (torch.randn(16, 16),),
        Mesh(x=2, y=2),
        train=False,
        spread=True,
        objective="bytes",
    )
    for name in ("weight", "input_1"):
        assert all(isinstance(state, sbpc.S) for state in plan.layout(name).states)
    assert all(isinstance(state, sbpc.S) for state in plan.assignment.outputs[0].states)  # type: ignore[union-attr]


def test_saved_plan_is_read_back_whole(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    for net, options in (("gpt2", {"layers": 1}), ("vgg", {}), ("dict_output", {})):
        model, args = getattr(models, net)(**options)
        plan = sbpc.plan(model, args, Mesh(x=2, y=2))
        plan.save(tmp_path / "plan")
        read = sbpc.load(tmp_path / "plan")
        assert str(read) == str(plan) and read.mesh == plan.mesh and read.layouts == plan.layouts
        assert read.local.code == plan.local.code
        assert read.verify() == plan.verify()
        assert largest_error(read, model, args) <= 1e-10


def test_damaged_and_hostile_files_are_refused(tmp_path: Path) -> None:
    model, args = models.mlp()
    path, broken = tmp_path / "plan", tmp_path / "broken"
    sbpc.plan(model, args, Mesh(x=2)).save(path)
    data = path.read_bytes()
    generator = random.Random(0)
    for _ in range(100):
        at = generator.randrange(len(data))
        kind = generator.randrange(3)
        if kind == 0:
            changed = data[:at]
        elif kind == 1:
            changed = data[:at] + bytes([data[at] ^ (1 << generator.randrange(8))]) + data[at + 1 :]
        else:
            changed = data[:at] + b"x" + data[at:]
        broken.write_bytes(changed)
        refused(PlanError, lambda: sbpc.load(broken))
    refused(PlanError, lambda: sbpc.load(tmp_path / "nothing"))
    refused(PlanError, lambda: sbpc.load(tmp_path))
    broken.write_text("[" * 100_000)
    refused(PlanError, lambda: sbpc.load(broken))
    refused(PlanError, lambda: sbpc.plan(model, args, Mesh(x=2)).save(tmp_path / "no" / "plan"))


CODE = "__import__('os').abort()"  # would end the test run


def call_in(body: dict[str, Any]) -> dict[str, Any]:
    """The first call of a plan's file."""
    return next(node for node in body["chunks"][0]["graph"] if node["op"] == "call_function")


HOSTILE: list[tuple[str, Any]] = [
    ("code in a placeholder", lambda body: body["chunks"][0]["graph"][0].update(target=f"x={CODE}")),
    ("code in a default", lambda body: body["chunks"][0]["graph"][0].update(args=[{"torch": CODE}])),
    ("code in a keyword", lambda body: call_in(body).update(kwargs={"dict": {f"x={CODE}": 1}})),
    (
        "an op that reads files",
        lambda body: call_in(body).update(target="aten.from_file.default", args=["/etc/passwd"]),
    ),
    ("an op that writes", lambda body: call_in(body).update(target="aten.add_.Tensor")),
    ("strides that do not fit", lambda body: body["chunks"][0]["graph"][0].update(val=["float32", [2, 2], [-1, 1]])),
    ("a port of no kind", lambda body: body["chunks"][0]["ports"]["inputs"][0].update(kind="x")),
    ("no aliases", lambda body: body["chunks"][0].update(aliases=[])),
    ("an unknown optimizer", lambda body: body["options"].update(optimizer="x")),
    ("a bound that is none", lambda body: body.update(lower_bound=None)),
    ("no graph", lambda body: body["chunks"][0].update(graph={})),
    ("target", lambda body: body["chunks"][0]["graph"][-2].update(target="os.system")),
    ("namespace", lambda body: body["chunks"][0]["graph"][-2].update(target="builtins.eval.default")),
    ("kind", lambda body: body["chunks"][0]["graph"][-2].update(op="call_module")),
    ("attribute", lambda body: body["chunks"][0]["graph"][-2].update(target="aten.__class__.default")),
    ("choices", lambda body: body["chunks"][0]["choices"].clear()),
    ("argument", lambda body: body["chunks"][0]["graph"][-2].update(args=[{"torch": "load"}])),
    ("layout", lambda body: body["chunks"][0].update(outputs=["[Q]"])),
    ("mesh", lambda body: body.update(mesh=[["x", 0]])),
    ("forward reference", lambda body: body["chunks"][0]["graph"].reverse()),
]


def test_files_with_a_good_checksum_and_bad_content_are_refused(tmp_path: Path) -> None:
    model, args = models.mlp()
    path = tmp_path / "plan"
    sbpc.plan(model, args, Mesh(x=2)).save(path)
    head, whole = path.read_text().splitlines()
    for what, change in HOSTILE:
        content = json.loads(whole)
        change(content)
        body = json.dumps(content)
        path.write_text(
            json.dumps(json.loads(head) | {"sha256": hashlib.sha256(body.encode()).hexdigest()}) + "\n" + body + "\n"
        )
        with pytest.raises(PlanError):
            print(what, "is taken:", sbpc.load(path))


def test_nothing_is_allocated_for_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 15, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 1 << 15))  # 17 GB of weights
        args = (torch.empty(1 << 14, 1 << 15),)
    plan = sbpc.plan(model, args, H100)
    assert plan.cost.flops == pytest.approx(plan.cost.flops_one_device / 16, rel=0.05)
    refused(PlanError, lambda: sbpc.simulate(plan, model, args))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_ranks_with_the_same_local_shapes_whose_chunks_begin_elsewhere_run_programs_of_their_own() -> None:
    mesh, x = Mesh(z=2, y=2, x=3), torch.arange(51.0).view(17, 3)
    ends = {"inputs": ["[S(0), S(0), B]"], "outputs": ["[S(0), B, S(0)]"]}
    plan = sbpc.plan(Doubled(), (x,), mesh, train=False, **ends)
    assert "crop" in {node.meta["step"].collective for node in plan.boxed.graph.nodes if "step" in node.meta}
    one, other = (next(rank for rank in range(12) if mesh.coordinates(rank) == at) for at in ((0, 1, 0), (1, 1, 0)))
    shapes = [[node.meta.get("local_shape") for node in plan.local_at(rank).graph.nodes] for rank in (one, other)]
    assert shapes[0] == shapes[1] and plan.local_at(one).code != plan.local_at(other).code
    assert torch.equal(sbpc.simulate(plan, Doubled(), (x,)).outputs, 2 * x)
