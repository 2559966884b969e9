"""Explanations: their alternatives are what pinning gives, and they say what costs more there."""

from __future__ import annotations

import json

import pytest
import torch

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.errors import PlanError
from sbpc.plans.options import OBJECTIVES
from tests.models import gpt2, mlp

NAME = "ups.0.weight"
# one thing after the other, which is what the problem adds up
SERIAL = "serial" if "serial" in OBJECTIVES else "seconds"


@pytest.fixture(scope="module")
def small() -> sbpc.Plan:
    torch.manual_seed(0)
    return sbpc.plan(*mlp(), Mesh(p=4), objective=SERIAL)


@pytest.fixture(scope="module")
def layers() -> sbpc.Plan:
    torch.manual_seed(0)
    return sbpc.plan(*gpt2(layers=2), Mesh(data=2, tensor=2, cluster="h100"), objective=SERIAL)


def test_the_text_of_an_explanation(small: sbpc.Plan) -> None:
    assert (
        str(small.explain(NAME))
        == """\
ups.0.weight is laid out [S(0)]
it saves 288 ps a step against [B], the best of the other layouts

layout  a step  difference  bytes sent    memory  proof
[S(0)]  298 ns                 13.8 kB   40.6 kB  this plan
[B]     299 ns     +288 ps      +288 B  +6.91 kB  exact
[S(1)]  299 ns     +432 ps      +432 B            exact

in [B], +288 ps:
what                     where               boxing              bytes      time
+ all_gather over p      downs.0, forward    [S(1)] -> [B]     3.46 kB  +3.46 ns
+ reduce_scatter over p  downs.0, backward   [P] -> [S(1)]     3.46 kB  +3.46 ns
+ all_to_all over p      ups.0, backward     [S(0)] -> [S(1)]  3.46 kB  +3.46 ns
+ all_gather over p      ups.0, backward     [S(0)] -> [B]     3.46 kB  +3.46 ns
+ all_gather over p      ups.0, forward      [S(0)] -> [B]       144 B   +144 ps
+ all_gather over p      downs.0, forward    [S(0)] -> [B]        72 B    +72 ps
+ reduce_scatter over p  downs.0, backward   [P] -> [S(1)]        72 B    +72 ps
- reduce_scatter over p  the model, forward  [P] -> [S(0)]     6.91 kB  -6.91 ns
- all_gather over p      downs.0, backward   [S(0)] -> [B]     6.91 kB  -6.91 ns

in [S(1)], +432 ps:
what                     where               boxing           bytes      time
+ all_gather over p      downs.0, forward    [S(1)] -> [B]  3.46 kB  +3.46 ns
+ all_gather over p      ups.0, forward      [S(0)] -> [B]  3.46 kB  +3.46 ns
+ reduce_scatter over p  downs.0, backward   [P] -> [S(1)]  3.46 kB  +3.46 ns
+ reduce_scatter over p  ups.0, backward     [P] -> [S(1)]  3.46 kB  +3.46 ns
+ all_gather over p      ups.0, forward      [S(0)] -> [B]    144 B   +144 ps
+ reduce_scatter over p  ups.0, backward     [P] -> [S(1)]    144 B   +144 ps
+ all_gather over p      downs.0, forward    [S(0)] -> [B]     72 B    +72 ps
+ reduce_scatter over p  downs.0, backward   [P] -> [S(1)]     72 B    +72 ps
- reduce_scatter over p  the model, forward  [P] -> [S(0)]  6.91 kB  -6.91 ns
- all_gather over p      downs.0, backward   [S(0)] -> [B]  6.91 kB  -6.91 ns

decided   no pin and no limit has to do with it
how       solved again with each layout pinned and all else free: exact
"""
    )


def test_alternatives_are_what_pinning_gives(small: sbpc.Plan, layers: sbpc.Plan) -> None:
    for plan, model, mesh, name, most in (
        (small, mlp(), Mesh(p=4), NAME, 2),
        (layers, gpt2(layers=2), Mesh(data=2, tensor=2, cluster="h100"), "blocks.1.up.weight", 3),
    ):
        explained = plan.explain(name)
        assert explained.seconds == pytest.approx(plan.cost.seconds) and explained.layout == plan.layout(name)
        for each in explained.alternatives[:most]:
            layout, seconds, difference = each
            pinned = sbpc.plan(*model, mesh, pin={name: str(layout)}, objective=SERIAL)
            assert layout != plan.layout(name) and seconds == pytest.approx(pinned.cost.seconds, rel=1e-6)
            assert difference == pytest.approx(pinned.cost.seconds - plan.cost.seconds, abs=1e-6 * plan.cost.seconds)
            assert each.at_least <= pinned.cost.seconds - plan.cost.seconds + 1e-12


def test_an_alternative_is_a_whole_plan_that_its_parts_add_up_to(layers: sbpc.Plan) -> None:
    for each in layers.explain("blocks.0.up.weight").alternatives[:3]:
        each.plan.verify()
        assert (
            each.plan.layout("blocks.0.up.weight") == each.layout and layers.layout("blocks.0.up.weight") != each.layout
        )
        assert each.seconds == pytest.approx(each.plan.cost.seconds) and each.cost.memory == each.plan.cost.memory
        parts = sum(m.seconds for m in each.appear) - sum(m.seconds for m in each.gone) + sum(each.computing.values())
        assert each.difference == pytest.approx(parts, abs=1e-12) and each.at_least <= each.difference + 1e-12
        sent = sum(m.bytes_sent for m in each.appear) - sum(m.bytes_sent for m in each.gone)
        assert sent == pytest.approx(sum(each.cost.bytes_sent.values()) - sum(layers.cost.bytes_sent.values()))


def test_the_pin_that_decided_is_named() -> None:
    pinned = sbpc.plan(*mlp(), Mesh(p=4), pin={NAME: "B"})
    explained = pinned.explain(NAME)
    assert explained.alternatives == () and len(explained.decided) == 1
    assert explained.decided[0].startswith(f"pin {NAME!r}: 'B' names it; without the pin it is [S(0)], a step takes ")
    other = pinned.explain("downs.0.weight")
    assert f"pin {NAME!r}: 'B' names others" in other.decided[0]


def test_the_limit_that_decided_is_named() -> None:
    free = sbpc.plan(*mlp(), Mesh(p=4, cluster="h100"))
    limit = 0.8 * free.cost.memory["total"]
    plan = sbpc.plan(*mlp(), Mesh(p=4, cluster="h100"), memory=limit)
    name = next(name for name, layout in plan.parameters.items() if layout != free.layout(name))
    explained = plan.explain(name)
    assert f"without the limit it is {free.layout(name)}" in explained.decided[0]
    assert not any(each.exact for each in explained.alternatives)


def test_values_and_inputs_can_be_explained(small: sbpc.Plan) -> None:
    assert len(small.explain("gelu").alternatives) > 0
    given = small.explain(small.graph.graph.find_nodes(op="placeholder")[-1].name)
    assert "it comes in from outside" in given.decided[0] and given.how == "there is no other layout that it may have"


def test_of_a_pattern_the_first_that_it_matches_is_explained(layers: sbpc.Plan) -> None:
    for pattern in ("blocks.*.up.weight", "*.{1,0-3}.up.weight"):
        found = layers.explain(pattern)
        assert found.name == f"blocks.{int('{' in pattern)}.up.weight" and found.layout == layers.layout(found.name)


def test_a_plan_from_a_file_explains_itself_alike(layers: sbpc.Plan, tmp_path) -> None:
    layers.save(tmp_path / "plan.sbpc")
    found, known = (plan.explain("blocks.1.up.weight") for plan in (sbpc.load(tmp_path / "plan.sbpc"), layers))
    assert [each.layout for each in found.alternatives] == [each.layout for each in known.alternatives]
    assert [each.seconds for each in found.alternatives] == pytest.approx([each.seconds for each in known.alternatives])
    assert found.alternatives[0].cost.memory == known.alternatives[0].cost.memory and found.layout == known.layout


def test_a_pinned_plan_from_a_file_names_its_pins(tmp_path) -> None:
    pins = {f"*{name}.0.{kind}": "B" for name in ("ups", "downs") for kind in ("weight", "bias")} | {"gelu": "B"}
    sbpc.plan(*mlp(), Mesh(p=4), pin=pins).save(tmp_path / "plan.sbpc")
    decided = sbpc.load(tmp_path / "plan.sbpc").explain("downs.0.bias").decided
    assert decided[0].startswith("pin '*downs.0.bias': 'B' names it; without the pin ")
    assert len(decided) == 5 and decided[4] == "1 more pins, which name others, were not tried"


def test_what_cannot_be_explained_is_refused(small: sbpc.Plan, tmp_path) -> None:
    with pytest.raises(PlanError, match="no parameter and no value 'up'\n  The closest names are"):
        small.explain("up")
    limited = sbpc.plan(*mlp(), Mesh(p=4), memory=1e9)
    limited.save(tmp_path / "plan.sbpc")
    with pytest.raises(PlanError, match=r"does not hold the prices of its memory limit.*\n  Plan the model anew"):
        sbpc.load(tmp_path / "plan.sbpc").explain(NAME)


def test_notebooks_show_a_table(small: sbpc.Plan) -> None:
    html = small.explain(NAME)._repr_html_()
    assert html.count("<table>") == 3 and f"<strong>{NAME} is laid out [S(0)]</strong>" in html


def test_the_command_prints_the_text_and_json(small: sbpc.Plan, tmp_path, capsys) -> None:
    small.save(tmp_path / "plan.sbpc")
    assert main(["explain", str(tmp_path / "plan.sbpc"), NAME]) == 0 and capsys.readouterr().out == str(
        small.explain(NAME)
    )
    assert main(["explain", str(tmp_path / "plan.sbpc"), NAME, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = small.explain(NAME).alternatives
    assert [(each["layout"], each["seconds"]) for each in found["alternatives"]] == [
        (str(row.layout), row.seconds) for row in rows
    ]


def test_a_plan_with_stages_explains_layouts_within_a_stage() -> None:
    net, mesh = mlp(batch=16, layers=2), Mesh(pipe=2, data=2, cluster="h100")
    asked = {"stages": "pipe", "microbatches": 2, "pin": {"downs.*": "B"}, "objective": "serial"}
    plan = sbpc.plan(*net, mesh, **asked)
    explained = plan.explain(NAME)
    assert explained.layout == plan.layout(NAME) and explained.alternatives[0].difference > 0
    assert "pin 'downs.*': 'B' names others; without the pin " in explained.decided[0]
    assert str(explained).endswith(
        "on the mesh of one stage, for one of 2 micro-batches, which passes through all stages\n"
    )
    best = explained.alternatives[0]
    parts = sum(m.seconds for m in best.appear) - sum(m.seconds for m in best.gone) + sum(best.computing.values())
    assert best.difference == pytest.approx(parts, abs=1e-12)
    pinned = sbpc.plan(*net, mesh, **{**asked, "pin": {**asked["pin"], NAME: str(best.layout)}})
    assert (
        pinned.explain(NAME).seconds == pytest.approx(best.seconds, rel=1e-6)
        and pinned.cost.seconds > plan.cost.seconds
    )
