"""What differs between two plans: told side by side, equal blocks once, nothing where they are the same."""

from __future__ import annotations

import json

import pytest
import torch

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.errors import PlanError
from sbpc.plans.options import OBJECTIVES
from sbpc.plans.plan import Plan
from tests.models import gpt2, mlp

TEXT = """\
two plans, A and B

asked
     A  B
pin     {'*.up.weight': 'S(0)@tensor'}

figures
                        A        B               B - A
a step             787 µs   816 µs  +29.3 µs (+3.73 %)
computing          787 µs   787 µs                   =
communicating         0 s  29.3 µs            +29.3 µs
exposed               0 s  29.3 µs            +29.3 µs
lower bound        787 µs   816 µs  +29.3 µs (+3.73 %)
flops               106 M    106 M                   =
sent over data        0 B      0 B                   =
sent over tensor      0 B  73.7 kB            +73.7 kB
parameters         473 kB   400 kB  -73.7 kB (-15.6 %)
gradients          473 kB   400 kB  -73.7 kB (-15.6 %)
optimizer          947 kB   799 kB   -147 kB (-15.6 %)
activations       1.92 MB  2.07 MB   +147 kB (+7.68 %)
temporaries           0 B      0 B                   =
peak memory       3.45 MB  3.38 MB  -73.7 kB (-2.14 %)

parameters laid out otherwise: 4
where                   count  A       B
blocks.{0-3}.up.weight      4  [B, B]  [B, S(0)]

collectives that differ
module       phase    collective              A             B     B - A
blocks.*.up  forward  all_gather over tensor  -  4 x, 73.7 kB  +73.7 kB
"""


def plan(mesh: Mesh | None = None, **options: object) -> sbpc.Plan:
    torch.manual_seed(0)
    serial = "serial" if "serial" in OBJECTIVES else "seconds"  # one thing after the other
    return sbpc.plan(*gpt2(layers=4), mesh or Mesh(data=2, tensor=2, cluster="h100"), objective=serial, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def free() -> sbpc.Plan:
    return plan()


@pytest.fixture(scope="module")
def pinned() -> sbpc.Plan:
    return plan(pin={"*.up.weight": "S(0)@tensor"})


def test_the_text_of_a_difference(free: sbpc.Plan, pinned: sbpc.Plan) -> None:
    assert str(free.diff(pinned)) == TEXT


def test_equal_plans_do_not_differ(free: sbpc.Plan) -> None:
    found = free.diff(plan())
    assert not found and not found.parameters and not found.collectives
    assert str(found) == "the plans are the same: layouts, collectives, seconds, bytes and memory\n"


def test_layouts_and_collectives_are_those_of_the_plans(free: sbpc.Plan, pinned: sbpc.Plan) -> None:
    found = free.diff(pinned)
    names = [name for name in free.parameters if free.layout(name) != pinned.layout(name)]
    assert list(found.parameters) == names == [f"blocks.{at}.up.weight" for at in range(4)]
    assert found.parameters[names[0]] == (str(free.layout(names[0])), str(pinned.layout(names[0])))
    change = sum(each.bytes_sent[1] - each.bytes_sent[0] for each in found.collectives)
    assert change == pytest.approx(sum(pinned.cost.bytes_sent.values()) - sum(free.cost.bytes_sent.values()))
    numbers = {name: both for name, _, *both in found.figures}
    assert numbers["a step"] == [free.cost.seconds, pinned.cost.seconds]
    assert numbers["peak memory"] == [free.cost.memory["total"], pinned.cost.memory["total"]]
    back = pinned.diff(free)
    assert back.parameters == {name: (other, one) for name, (one, other) in found.parameters.items()}


def test_plans_on_other_meshes_differ_in_what_is_not_whole(free: sbpc.Plan) -> None:
    other = plan(Mesh(x=4, cluster="h100"), pin={"*.up.weight": "S(0)"})
    found = free.diff(other)
    assert found.asked["mesh"] == ("data=2, tensor=2", "x=4")
    assert found.parameters["blocks.0.up.weight"][1] == "[S(0)]" and ("whole", "whole") not in found.values.values()


def test_plans_of_other_models_are_refused(free: sbpc.Plan) -> None:
    with pytest.raises(PlanError, match="different models: no parameter has the same name\n  Compare plans"):
        free.diff(sbpc.plan(*mlp(), free.mesh))


def test_notebooks_show_tables(free: sbpc.Plan, pinned: sbpc.Plan) -> None:
    assert free.diff(pinned)._repr_html_().count("<table>") == 4


def test_the_command_says_by_its_code_whether_plans_differ(
    free: sbpc.Plan, pinned: sbpc.Plan, tmp_path, capsys
) -> None:
    one, other = str(tmp_path / "one.sbpc"), str(tmp_path / "other.sbpc")
    free.save(one)
    pinned.save(other)
    assert main(["diff", one, one]) == 0 and "the plans are the same" in capsys.readouterr().out
    assert main(["diff", one, other]) == 1 and capsys.readouterr().out == TEXT
    assert main(["diff", one, other, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["same"] and found["parameters"]["blocks.3.up.weight"] == ["[B, B]", "[B, S(0)]"]
    assert main(["diff", one, str(tmp_path)]) == 2 and "is no file of a plan" in capsys.readouterr().err


def sent_within_stages(plan: Plan) -> float:
    tallies = (
        (part.program(which), times)
        for at, part in enumerate(plan.chunk_costs)
        for which, times in plan.tally(at).items()
    )
    return sum(times * sum(program.sent.values()) for program, times in tallies)


def test_plans_with_stages_are_compared_with_each_other_and_with_others() -> None:
    net, mesh = mlp(batch=8, layers=2), Mesh(pipe=2, data=2)
    one = sbpc.plan(*net, mesh, stages="pipe", microbatches=4)
    other = sbpc.plan(
        *net, mesh, stages="pipe", microbatches=2, schedule="gpipe", pin={"ups.0.weight": "S(0)@data", "downs.*": "B"}
    )
    found = one.diff(other)
    assert not one.diff(one) and list(found.asked) == ["schedule", "microbatches", "pin"]
    assert found.asked["schedule"] == ("1f1b", "gpipe") and found.parameters.keys() <= set(one.parameters)
    sent = sum(each.bytes_sent[1] - each.bytes_sent[0] for each in found.collectives)
    assert sent == pytest.approx(sent_within_stages(other) - sent_within_stages(one)) and sent > 0
    plain = one.diff(sbpc.plan(*net, Mesh(data=4)))
    figures = {name: (mine, its) for name, _, mine, its in plain.figures}
    assert (
        plain.values == {}
        and figures["bubble"][0] > figures["bubble"][1] == 0
        and plain.asked["stages"] == ("pipe", "")
    )
