"""assign on graphs: equal to trying everything, pins kept or refused, deterministic, homes of gradients."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.api.task import prepare
from sbpc.graph.ports import results
from sbpc.passes.annotate import annotate
from sbpc.passes.assign import layout_problem
from sbpc.passes.assign.space import Space
from sbpc.passes.assign.wishes import placeholder_wishes
from sbpc.passes.canonicalize.normalize import normalize
from sbpc.passes.capture.capture import capture
from sbpc.passes.pipeline import Stages, make_plan
from sbpc.passes.schedule.choice import weighted
from sbpc.plans.options import Options
from sbpc.plans.timeline import ACROSS, COMPUTE, INSIDE
from sbpc.solver import Problem, total
from tests import models

STEPS = ("mm", "gelu", "add", "self mm", "split", "sum", "t")


class Drawn(nn.Module):
    """A few ops on one or two inputs, drawn as a list of (op, operand, operand)."""

    def __init__(self, program: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y]
        for op, a, b in self.program:
            left, right = values[a % len(values)], values[b % len(values)]
            if op == "mm":
                values.append(left @ right)
            elif op == "gelu":
                values.append(torch.nn.functional.gelu(left))
            elif op == "add":
                values.append(left + right)
            elif op == "self mm":
                values.append(left @ left)
            elif op == "split":
                values.append(torch.cat(torch.split(left, left.shape[0] // 2)[::-1]))
            elif op == "sum":
                values.append(left.sum(0, keepdim=True) + right)
            else:
                values.append(left.t())
        return tuple(values[-2:])


def spaces(program: list[tuple[str, int, int]], mesh: Mesh, size: int = 12) -> Space:
    """The solver's space of a drawn program (forward alone); inputs and outputs whole."""
    args = torch.randn(size, size), torch.randn(size, size)
    gm = annotate(normalize(capture(Drawn(program), args, train=False)))
    return Space(gm, mesh, placeholder_wishes(gm, mesh, None, None, False), {})


def seconds_of(space: Space, labels: list[int]) -> float:
    """What the boxed graph of an assignment costs, measured on the graph and not by the solver."""
    return make_plan(
        space.gm, space.mesh, space.assignment(labels), 0.0, Options(objective="serial"), Stages()
    ).cost.seconds


def program(length: int) -> Any:
    """A strategy for programs."""
    step = st.tuples(st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 5))
    return st.lists(step, min_size=1, max_size=length)


@pytest.mark.parametrize(
    ("sizes", "length", "limit"),
    [({"x": 2}, 5, 20_000), pytest.param({"x": 3}, 5, 20_000, marks=pytest.mark.prove), ({"x": 2, "y": 2}, 2, 20_000)],
    ids=str,
)
def test_assign_equals_trying_everything(sizes: dict[str, int], length: int, limit: int) -> None:
    tried = 0

    @settings(max_examples=25)
    @given(program(length))
    def run(drawn: list[tuple[str, int, int]]) -> None:
        nonlocal tried
        mesh = Mesh(**sizes)
        space = spaces(drawn, mesh)
        counts = [len(table) for table in space.tables]
        total = 1
        for count in counts:
            total *= count
        if total > limit:
            return
        tried += 1
        best = min(seconds_of_labels(space, labels) for labels in itertools.product(*map(range, counts)))
        assignment, bound = space.solve()
        found = make_plan(space.gm, mesh, assignment, bound, Options(objective="serial"), Stages()).cost
        assert found.seconds == pytest.approx(best, rel=1e-9, abs=1e-30)
        assert bound <= best * (1 + 1e-9) + 1e-30

    run()
    assert tried >= 5, "hardly any program was small enough to be enumerated"


def seconds_of_labels(space: Space, labels: tuple[int, ...]) -> float:
    """The objective, by the definition: label costs and the cheapest star of every value, over plain Python numbers."""
    seconds = sum(float(v.costs[label]) for v, label in zip(space.variables, labels))
    for value in space.values:
        source = value.out[labels[value.producer]]
        wanted = {int(wants[labels[at]]) for at, wants in value.consumers} - {int(source)}
        seconds += min(
            value.closure[source, alias] + sum(value.closure[alias, target] for target in wanted if target != alias)
            for alias in range(len(value.closure))
        )
    return seconds


def test_renamings_with_few_layouts_lose_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts are left out of renamings of dims; the cheapest plan costs the same, and other plans find their labels."""
    fewer = 0

    begin = [("mm", 0, 1), ("gelu", 2, 0), ("t", 3, 0), ("mm", 4, 1), ("gelu", 5, 0), ("t", 6, 0), ("mm", 7, 2)]

    @settings(max_examples=30)
    @given(program(4).map(begin.__add__), st.sampled_from([Mesh(x=2, y=2), Mesh(x=2, y=3, cluster="h100"), Mesh(x=3)]))
    def run(drawn: list[tuple[str, int, int]], mesh: Mesh) -> None:
        nonlocal fewer
        monkeypatch.setattr(layout_problem, "MANY", 10**9)
        whole = spaces(drawn, mesh)
        monkeypatch.setattr(layout_problem, "MANY", 0)
        narrow = spaces(drawn, mesh)
        fewer += sum(map(len, narrow.tables)) < sum(map(len, whole.tables))
        cheapest, _ = whole.solve()
        found, bound = narrow.solve()
        seconds = narrow.seconds(found)
        assert seconds == pytest.approx(whole.seconds(cheapest), rel=1e-9, abs=1e-30)
        assert whole.seconds(found) == pytest.approx(seconds, rel=1e-9, abs=1e-30)
        assert seconds <= narrow.seconds(cheapest) <= whole.seconds(cheapest) * (1 + 1e-9) + 1e-30
        assert bound <= seconds * (1 + 1e-9)

    run()
    assert fewer >= 10, "hardly any renaming had fewer layouts"


class Turned(nn.Module):
    """A renaming of dims that is given back three times."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        turned = x.permute(1, 0, 2, 3)
        return turned, turned, turned


def test_a_renaming_that_several_read_keeps_the_layouts_from_which_they_can_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gathered once, it is sliced for each of the three."""
    seconds = []
    for many in (0, 10**9):
        monkeypatch.setattr(layout_problem, "MANY", many)
        given, outputs = ["S(0)@x"], ["S(0)@x", "S(2)@x", "S(3)@x"]
        plan = sbpc.plan(
            Turned(),
            (torch.randn(16, 16, 8, 8),),
            Mesh(x=2),
            inputs=given,
            outputs=outputs,
            train=False,
            objective="serial",
        )
        seconds.append((plan.cost.seconds, plan.cost.lower_bound))
    assert seconds[0] == seconds[1]


def assert_box_pays_the_objective(space: Space, generator: torch.Generator, times: int) -> None:
    """Labels drawn at random cost on the boxed graph what the objective says."""
    for _ in range(times):
        labels = [int(torch.randint(len(table), (), generator=generator)) for table in space.tables]
        seconds = seconds_of_labels(space, tuple(labels))
        assert seconds < float("inf")
        assert seconds_of(space, labels) == pytest.approx(seconds, rel=1e-9)
        assert total(Problem(space.variables, space.values), labels) == pytest.approx(seconds, rel=1e-9)


@settings(max_examples=25)
@given(
    program(8), st.sampled_from([Mesh(x=2, y=2), Mesh(x=2, y=3, cluster="h100"), Mesh(x=2, y=2, z=2)]), st.integers(0)
)
def test_box_pays_the_objective_for_random_graphs_and_labels(drawn: Any, mesh: Mesh, seed: int) -> None:
    assert_box_pays_the_objective(spaces(drawn, mesh), torch.Generator().manual_seed(seed % 1_000), 3)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mlp", (2, 4)),
        ("gpt2", (2, 2, 2)),
        *(pytest.param(*case, marks=pytest.mark.prove) for case in (("mlp", (2, 2, 2)), ("gpt2", (2, 4)))),
    ],
    ids=str,
)
def test_box_pays_the_objective_for_models_and_random_labels(name: str, sizes: tuple[int, ...]) -> None:
    model, args = models.gpt2(layers=1) if name == "gpt2" else models.mlp()
    task, mesh = prepare(model, args), Mesh(cluster="h100", **dict(zip("xyz", sizes)))
    space = Space(task.gm, mesh, placeholder_wishes(task.gm, mesh, None, None, False), {})
    assert_box_pays_the_objective(space, torch.Generator().manual_seed(0), 8)


def test_a_plan_of_least_bytes_has_its_bound_in_bytes(tmp_path: Path) -> None:
    model, args = models.mlp()
    mesh, pin = Mesh(x=2, y=2, cluster="h100"), {"ups.*.weight": "[S(0), S(1)]"}
    plan = sbpc.plan(model, args, mesh, objective="bytes", pin=pin)
    assert plan.cost.gap == 0 and plan.cost.lower_bound == sum(plan.cost.bytes_sent.values()) > 1
    assert f"no plan with these pins sends less than {plan.cost.lower_bound:,.0f} bytes a rank" in str(plan)
    assert plan.certify(seconds=1) == 0
    fastest = sbpc.plan(model, args, mesh, pin=pin, objective="serial")
    assert plan.cost.paid <= sum(fastest.cost.bytes_sent.values()) and fastest.cost.seconds <= plan.cost.seconds
    plan.save(tmp_path / "plan")
    assert sbpc.load(tmp_path / "plan").cost.gap == 0


def test_gradients_land_in_their_parameters_home() -> None:
    model, args = models.gpt2(layers=1)
    plan = sbpc.plan(model, args, Mesh(x=2, y=2), pin={"*.up.weight": "S(0)@x"}, objective="serial")
    for port, node, layout in zip(plan.ports.outputs, results(plan.graph), plan.assignment.outputs):
        if port.kind == "gradient":
            assert node is not None and layout == plan.layout(port.name)


def test_pin_of_a_column_and_row_pair_needs_one_all_reduce_each_way() -> None:
    model, args = models.mlp()
    plan = sbpc.plan(
        model,
        args,
        Mesh(tensor=2),
        pin={"ups.*.weight": "S(0)@tensor", "downs.*.weight": "S(1)@tensor"},
        objective="serial",
    )
    assert str(plan.layout("ups.0.weight")) == "[S(0)]" and str(plan.layout("downs.0.weight")) == "[S(1)]"


def test_pin_with_an_order_of_splits_is_kept() -> None:
    model, args = models.mlp()
    plan = sbpc.plan(model, args, Mesh(data=2, tensor=2), pin={"ups.0.weight": "S(0)@tensor>data"}, objective="serial")
    assert str(plan.layout("ups.0.weight")) == "[S(0), S(0)] S(0)@tensor>data"


def saved_plan(path: str) -> str:
    """The first line of the file of a plan: all but its graph."""
    torch.manual_seed(0)
    sbpc.plan(*models.gpt2(layers=1), Mesh(x=2)).save(path)
    return Path(path).read_text().splitlines()[0]


def test_plan_is_the_same_in_every_process(tmp_path: Path) -> None:
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    script = f"from tests.test_assign import saved_plan; saved_plan({there!r})"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, timeout=240)
    assert saved_plan(here) == Path(there).read_text().splitlines()[0]


WEIGHTS = {COMPUTE: 0.5, INSIDE: 0.3, ACROSS: 0.2}


@pytest.mark.parametrize("name", ["gpt2", "resnet", "batch_norm"])
def test_a_problem_at_other_weights_is_the_one_made_anew(name: str) -> None:
    """Its tables are those of the problem without weights, scaled: but for calls in two phases, which box between them."""
    model, args = getattr(models, name)()
    mesh = Mesh(x=2, y=2, cluster="h100")
    gm = prepare(model, args).gm
    there = weighted(mesh, WEIGHTS)
    scaled, anew = (
        Space(gm, there, {}, {}, like=Space(gm, mesh, {}, {}), part=WEIGHTS[COMPUTE]),
        Space(gm, there, {}, {}),
    )
    for mine, other, one, two in zip(scaled.variables, anew.variables, scaled.tables, anew.tables):
        assert mine.costs == pytest.approx(other.costs, rel=1e-12), mine.name
        assert all(map(np.array_equal, one.ports, two.ports)) and (one.digits == two.digits).all(), mine.name
    assert all(map(np.array_equal, (v.closure for v in scaled.values), (v.closure for v in anew.values)))
    assert scaled.classes() == anew.classes() and scaled.classes(1) == anew.classes(1)


def test_computing_alone_is_bounded_without_solving_and_a_plan_is_found_without_a_bound() -> None:
    model, args = models.gpt2(batch=8)
    mesh = Mesh(x=2, y=2, cluster="h100")
    gm = prepare(model, args).gm
    computing, links = (Space(gm, weighted(mesh, each), {}, {}) for each in ({COMPUTE: 1.0, INSIDE: 0.0}, WEIGHTS))
    apart = computing.bound_apart()
    assert "values" not in vars(computing), "boxings were priced"
    assert apart == pytest.approx(computing.bound(), rel=1e-6) and apart == pytest.approx(sum(computing.least.values()))
    (alone, none), (solved, bound) = links.solve(bounded=False), links.solve(exact=False)
    assert none == 0 and 0 < links.bound_apart() < links.bound() <= bound * (1 + 1e-9)
    assert bound <= links.seconds(alone) <= 1.01 * links.seconds(solved)
