"""Pictures: what is in them, that they are sound XML, and that nothing of a model can break out of them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch

import sbpc
from sbpc.inspect.graph_rows import Fold, fold, graph_rows
from sbpc.inspect.picture import graph_svg, sources
from tests.models import Nasty, gpt2, mlp

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def small() -> sbpc.Plan:
    torch.manual_seed(0)
    return sbpc.plan(*mlp(), sbpc.Mesh(data=2, tensor=2))


@pytest.fixture(scope="module")
def large() -> sbpc.Plan:
    torch.manual_seed(0)
    return sbpc.plan(*gpt2(layers=2), sbpc.Mesh(data=2))


def elements(svg: str, name: str, kind: str = "") -> list[ET.Element]:
    """The elements of a picture with this tag and, if given, this class."""
    return [item for item in ET.fromstring(svg).iter(SVG + name) if not kind or kind in item.get("class", "").split()]


def test_a_picture_has_a_row_for_every_value_in_graph_order(small):
    shown = [row.findtext(f"{SVG}title") for row in elements(graph_svg(small.boxed, small.mesh), "g", "row")]
    rows = graph_rows(small.boxed, small.mesh)
    assert [line.split()[0] for line in shown] == [row.name for row in rows]
    assert len(rows) == len(small.boxed.graph.nodes)


def test_every_state_is_a_chip_and_a_boxing_shows_the_state_before_it(small):
    rows = graph_rows(small.boxed, small.mesh)
    chips = [text.text for text in elements(graph_svg(small.boxed, small.mesh), "text", "state")]
    legend = {state for row in rows for state in row.states} | {state for row in rows for _, state in row.moved}
    drawn = [state for row in rows for state in row.states] + [state for row in rows for _, state in row.moved]
    assert sorted(chips) == sorted([*legend, *drawn])


def test_collectives_are_highlighted_with_their_bytes_and_local_steps_are_not(small):
    svg = graph_svg(small.boxed, small.mesh)
    rows = graph_rows(small.boxed, small.mesh)
    boxings = [row for row in rows if row.kind == "boxing"]
    assert boxings and len(elements(svg, "rect", "boxing")) == len(boxings)
    assert len(elements(svg, "rect", "free")) == sum(row.kind == "free" for row in rows)
    assert [text.text for text in elements(svg, "text", "boxed")] == [f"{row.sent:,.0f} B" for row in boxings]
    assert sum(row.sent for row in boxings) == pytest.approx(sum(small.cost.bytes_sent.values()))


def test_forward_and_backward_are_marked():
    """Where collectives run beside computing, a backward may begin with what no forward makes."""
    plan = sbpc.plan(*mlp(), sbpc.Mesh(data=2, tensor=2), objective="serial")
    sections = [text.text for text in elements(graph_svg(plan.boxed, plan.mesh), "text", "section")]
    assert sections == ["PARAMETERS AND INPUTS", "FORWARD", "BACKWARD", "RESULTS"]


def test_every_stage_can_be_drawn(small):
    for gm in (small.graph, small.boxed, small.local):
        svg = graph_svg(gm, small.mesh)
        assert "up" in svg and len(elements(svg, "g", "row")) == len(gm.graph.nodes)


def test_a_picture_is_the_same_in_every_run(small):
    again = sbpc.plan(*mlp(), sbpc.Mesh(data=2, tensor=2))
    assert graph_svg(small.boxed, small.mesh) == graph_svg(again.boxed, again.mesh)


def test_arcs_join_values_with_their_readers(small):
    rows = graph_rows(small.boxed, small.mesh)
    edges = sum(len(set(row.sources)) for row in rows)
    assert len(elements(graph_svg(small.boxed, small.mesh), "path", "arc")) == edges
    at = {row.at: 0.0 for row in rows if row.kind != "view"}
    through = [row for row in rows if any(rows[source].kind == "view" for source in row.sources)]
    assert through and all(rows[source].kind != "view" for row in through for source in sources(rows, row.at, at))


def test_nothing_is_drawn_outside_of_the_picture(small):
    svg = graph_svg(small.boxed, small.mesh, "a title")
    width, height = map(float, ET.fromstring(svg).get("viewBox", "").split()[2:])
    for item in [*elements(svg, "rect"), *elements(svg, "text")]:
        assert 0 <= float(item.get("x", "nan")) <= width and 0 <= float(item.get("y", "nan")) <= height


def test_a_large_graph_is_folded_and_the_picture_says_by_how_much(large):
    rows = graph_rows(large.boxed, large.mesh)
    shown, left_out = fold(rows, 60)
    assert len(rows) == len([row for row in shown if not isinstance(row, Fold)]) + sum(left_out.values())
    assert left_out["views"] > 0
    svg = graph_svg(large.boxed, large.mesh, limit=60)
    assert f"{left_out['views']} views left out" in svg and f"{len(rows)} values" in svg
    assert graph_svg(large.boxed, large.mesh, limit=10**6).count("left out") == 0


def test_a_block_that_repeats_another_is_one_line_and_one_that_differs_is_not(large):
    rows = [row for row in graph_rows(large.boxed, large.mesh) if row.module.startswith("blocks.0")][:8]
    rows = [replace(row, section="forward", module="blocks.0") for row in rows]
    same = [replace(row, module="blocks.1") for row in rows]
    other = [replace(row, module="blocks.2", layout="[B]") for row in rows]
    shown, left_out = fold([*rows, *same, *other], 10)
    folds = [row for row in shown if isinstance(row, Fold)]
    assert [row.text for row in folds] == ["blocks.1: the same 8 values as blocks.0"]
    assert left_out["in repeated blocks"] == 8


def test_names_are_escaped(small):
    plan = sbpc.plan(Nasty(), (torch.randn(4, 8),), sbpc.Mesh(data=2))
    svg = graph_svg(plan.boxed, plan.mesh, "<b>&\x07")
    assert any("</title><script>" in (title.text or "") for title in elements(svg, "title"))
    assert "\x00" not in svg and "\x07" not in svg


def test_pictures_load_nothing_and_know_dark_mode(small):
    text = graph_svg(small.boxed, small.mesh)
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"(src|href)=|@import|url\(", text)
    assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"]
