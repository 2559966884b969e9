"""The page about a plan: what it holds, that it loads nothing, that names cannot break out of it, what its script does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.errors import PlanError
from sbpc.inspect.graph_rows import graph_rows
from sbpc.inspect.model_map import model_map
from sbpc.inspect.page import cards, page_html
from sbpc.inspect.page_charts import curves, largest_difference, length, memory, timeline, union, without
from sbpc.inspect.page_graph import fold
from sbpc.inspect.tables import quantity
from sbpc.plans.options import OBJECTIVES
from sbpc.plans.timeline import Event
from tests.models import Nasty, gpt2, mlp


@pytest.fixture(scope="module")
def plan() -> sbpc.Plan:
    torch.manual_seed(0)
    serial = "serial" if "serial" in OBJECTIVES else "seconds"  # one thing after the other
    mesh, pin = Mesh(data=2, tensor=2, cluster="h100"), {"*.up.weight": "S(0)@tensor"}
    return sbpc.plan(*gpt2(layers=4), mesh, pin=pin, objective=serial)


@pytest.fixture(scope="module")
def page(plan: sbpc.Plan, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    plan.save_page(path)
    return path.read_text()


def data_of(page: str) -> dict:
    """The JSON in a page."""
    return json.loads(page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])


class Tags(HTMLParser):
    """Counts the tags of a page, and finds those that are not closed."""

    VOID = ("meta", "link", "input", "br", "path", "line", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.rows: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr" and dict(attrs).get("id"):
            self.rows.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def tags(page: str) -> Tags:
    """The tags of a page."""
    parser = Tags()
    parser.feed(page)
    return parser


def test_its_data_are_those_of_the_plan(plan: sbpc.Plan, page: str) -> None:
    data = data_of(page)
    assert data["parameters"] == {name: str(home) for name, home in plan.parameters.items()}
    assert data["seconds"] == plan.cost.seconds and data["memory"] == plan.cost.memory
    assert data["bytes_sent"] == plan.cost.bytes_sent and data["mesh"] == {"data": 2, "tensor": 2}
    assert sum(sent for *_, sent in data["collectives"]) == pytest.approx(sum(plan.cost.bytes_sent.values()))
    assert max(size for _, size, *_ in data["moments"]) == plan.cost.memory["total"]
    held = memory(plan.memory_curve(), device=0.0)["held"]
    (card,) = (card for card in cards(plan, held) if card["title"] == "peak memory of a rank")
    assert sum(held.values()) == plan.cost.memory["total"]  # what is alive at the peak, not each kind at its own
    assert [text for _, _, text, _ in card["parts"]] == [quantity(size, "B") for size in held.values() if size]


def test_every_tag_is_closed_and_every_row_reads_rows(page: str) -> None:
    found = tags(page)
    assert not found.wrong and not found.open
    ids = {row["id"] for row in found.rows}
    assert len(ids) == len(found.rows) == len(data_of(page)["rows"])
    assert all(f"r{source}" in ids for row in found.rows for source in (row["data-s"] or "").split())


def test_equal_blocks_stand_once(plan: sbpc.Plan, page: str) -> None:
    rows = model_map(plan)
    assert [row.label for row in rows if row.depth == 0] == [
        "tokens.weight",
        "positions.weight",
        "blocks.{0-3}",
        "norm",
    ]
    blocks = next(row for row in rows if row.label == "blocks.{0-3}")
    assert blocks.times == 4 and blocks.bytes == 4 * sum(
        row.bytes // 4 for row in rows if row.depth == 1 and row.times == 4
    )
    assert sum(row.bytes for row in rows if row.depth == 0) == plan.cost.memory["parameters"]
    assert '<span class="times">× 4</span>' in page and "blocks.3.up.weight" not in page.partition("<script")[0]


def test_blocks_that_differ_are_apart(plan: sbpc.Plan) -> None:
    other = sbpc.plan(*gpt2(layers=4), plan.mesh, pin={"blocks.2.up.weight": "S(0)@tensor"})
    labels = [row.label for row in model_map(other) if "blocks" in row.label or "{" in row.label or row.label.isdigit()]
    assert labels == ["blocks", "{0-1,3}", "2"]


def test_folded_rows_stand_for_all(plan: sbpc.Plan) -> None:
    rows = graph_rows(plan.boxed, plan.mesh)
    folded = fold(rows)
    assert sum(len(group.rows) * len(group.blocks) for group in folded.groups) == len(rows) == len(folded.shown)
    for row in rows:
        shown = rows[folded.shown[row.at]]
        assert (shown.op, shown.type, shown.layout, shown.section) == (row.op, row.type, row.layout, row.section)


def test_alternatives_are_those_of_explain(plan: sbpc.Plan, page: str) -> None:
    best = plan.explain("blocks.0.down.weight").alternatives[0]
    row = page.partition('data-name="blocks.0.down.weight"')[2].partition('<tr class="parameter"')[0]
    assert f"<code>{best.layout}</code>" in row and "all_gather over tensor" in row


def test_it_loads_nothing_and_knows_dark_mode(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    assert re.findall(r"https?://", page) == [] and not re.search(r"@import|url\(|\bsrc=", page)
    assert re.findall(r'(?:href)="([^#"][^"]*)"', page) == ["data:,"]


def test_names_are_escaped() -> None:
    plan = sbpc.plan(Nasty(), (torch.randn(4, 8),), Mesh(data=2))
    page = page_html(plan, {}, {"<i>": [1.0]})
    assert "\x00" not in page and "<script>alert" not in page and "<i>" not in page and "&lt;i&gt;" in page
    assert page.count("<script") == 2 and "</title><script>alert(1)</script>.weight" in data_of(page)["parameters"]


def test_losses_are_drawn_with_the_largest_difference(plan: sbpc.Plan) -> None:
    assert "any step: 1.00e-03" in page_html(plan, {}, {"one": [4.0, 2.0], "many": [4.0, 2.002]})
    assert 'id="losses"' not in page_html(plan, {})


def test_differences_of_losses_that_are_no_numbers_are_infinite() -> None:
    assert largest_difference([[2.0, 1.0], [2.0, 1.1]]) == pytest.approx(0.1)
    assert largest_difference([[2.0], [float("nan")]]) == float("inf")
    assert largest_difference([[2.0, 1.0], [2.0]]) == float("inf")


def test_curves_stay_in_their_frame_and_leave_gaps_where_there_is_no_number() -> None:
    drawn = curves({"a": [3.0, float("nan"), 1.0, 2.0], "flat": [2.0]})
    path = drawn["runs"][0]["path"]
    assert path.count("M") == 2 and path.count("L") == 1
    for x, y in re.findall(r"([\d.]+) ([\d.]+)", path):
        assert 0 <= float(x) <= drawn["width"] and 0 <= float(y) <= drawn["height"]


EVENTS = [
    Event("compute", 0.0, 4.0, "mm", "mm", "blocks.0", "forward"), Event("compute", 6.0, 10.0, "mm_1", "mm", "blocks.0", "backward"),
    Event("links inside a node", 3.0, 7.0, "box_x", "all_gather", "blocks.0", "forward"),
    Event("links across nodes", 5.0, 5.5, "box_y", "all_reduce", "blocks.1", "forward"),
]  # fmt: skip


def test_a_timeline_marks_what_is_exposed() -> None:
    drawn = timeline(EVENTS, {"mm": 7})
    assert drawn["lanes"] == ["compute", "links inside a node", "links across nodes"]
    assert drawn["whole"] == "10 s" and drawn["exposed_seconds"] == "2 s"
    assert drawn["exposed"] == [(400.0, 200.0, 108.0)] and drawn["rows"] == [("blocks.*", "forward", "2.5 s", 100.0)]
    assert [(bar["x"], bar["end"], bar["y"]) for bar in drawn["bars"]] == [
        (0.0, 400.0, 6.0), (600.0, 1000.0, 6.0), (300.0, 700.0, 40.0), (500.0, 550.0, 74.0)
    ]  # fmt: skip
    assert [bar["row"] for bar in drawn["bars"]] == [7, None, None, None]
    many = [Event("compute", at * 1e-3, (at + 1) * 1e-3, "k", "mm", "", "forward") for at in range(100_000)]
    assert len(timeline(many, {})["bars"]) < 1000


def test_spans_are_joined_and_cut() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 1.5)]) == [(0, 2), (3, 4)]
    assert without([(0, 10)], [(1, 2), (4, 5)]) == [(0, 1), (2, 4), (5, 10)] and length([(0, 1), (5, 7)]) == 3


def test_a_plan_with_a_timeline_shows_it(plan: sbpc.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbpc.Plan, "timeline", lambda self: EVENTS, raising=False)
    page = page_html(plan, {})
    assert 'id="time"' in page and page.count('<rect class="t-') == 4 and '<rect class="exposed"' in page


def test_a_forward_alone_and_one_axis_have_pages(tmp_path) -> None:
    sbpc.plan(*mlp(), Mesh(p=2), train=False).save_page(tmp_path / "page.html")
    found = tags((tmp_path / "page.html").read_text())
    assert not found.wrong and found.rows
    with pytest.raises(PlanError, match=r"the page cannot be written: .*\n  Name a file"):
        sbpc.plan(*mlp(), Mesh(p=2)).save_page(tmp_path)


def test_the_command_writes_the_page_of_a_file(plan: sbpc.Plan, tmp_path, capsys) -> None:
    plan.save(tmp_path / "plan.sbpc")
    assert main(["show", str(tmp_path / "plan.sbpc"), "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"written   {tmp_path / 'page.html'}\n"
    assert data_of((tmp_path / "page.html").read_text())["seconds"] == plan.cost.seconds


SCRIPT = """
const done = [], ask = (text, run) => { const find = document.getElementById("find"); find.value = text; find.dispatchEvent(new Event("input")); };
window.onerror = (message) => done.push("error: " + message);
const shown = () => [...document.querySelectorAll("tr.v")].filter((row) => !row.hidden && !row.parentElement.hidden);
ask("blocks.3.up.weight");
setTimeout(() => {
  done.push(shown().map((row) => row.cells[0].textContent));
  document.getElementById("reset").click();
  document.getElementById("wires").click();
  done.push(shown().map((row) => row.className));
  const row = shown()[0];
  row.click();
  done.push(document.querySelector("#panel h3").textContent, [...document.querySelectorAll("tr.source")].length, [...document.querySelectorAll("tr.reader")].length);
  const other = document.querySelector("#model details");
  other.querySelector("summary").click();
  done.push(other.open, document.getElementById("panel").hidden);
  document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  done.push(document.getElementById("panel").hidden);
  document.querySelector("[data-for=memchart] [data-zoom=in]").click();
  done.push(document.getElementById("memchart").getAttribute("viewBox"));
  document.querySelector("[data-for=memchart] [data-zoom=all]").click();
  const chart = document.getElementById("memchart"), frame = chart.getBoundingClientRect();
  chart.dispatchEvent(new MouseEvent("click", { clientX: frame.left + frame.width * peak / 1000, clientY: frame.top + 50 }));
  done.push(document.querySelector("#panel h3").textContent);
  document.body.replaceChildren(Object.assign(document.createElement("pre"), { textContent: "DONE" + JSON.stringify(done) + "END" }));
}, 300);
"""


def test_in_a_browser_search_filters_and_clicks_work_without_errors(plan: sbpc.Plan, page: str, tmp_path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium on the path")
    peak = max(data_of(page)["moments"], key=lambda moment: moment[1])
    script = f"const peak = {peak[0]}; {SCRIPT}"
    (tmp_path / "page.html").write_text(page.replace("</body>", f"<script>{script}</script></body>"))
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--virtual-time-budget=5000",
    ]
    ran = subprocess.run(
        [*command, "--dump-dom", f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in ran.stderr, ran.stderr
    found, wires, title, sources, readers, opened, before, after, box, at_peak = json.loads(
        ran.stdout.partition("DONE")[2].partition("END")[0].replace("&gt;", ">").replace("&amp;", "&")
    )
    assert "blocks.0.up.weight" in found and all("up" in name or "linear" in name for name in found)
    assert (
        wires == ["v boxing"] * len(wires)
        and len(wires) > 0
        and title == "box_blocks_0_up_weight"
        and (sources, readers) == (1, 2)
    )
    assert opened and not before and after and box == "250 0 500 220"
    curve = plan.memory_curve()
    assert at_peak == peak[2] == curve.calls[curve.peak]


def test_the_graphs_of_all_chunks_are_drawn_and_those_of_equal_ones_once() -> None:
    mesh = Mesh(pipe=4, cluster="h100")
    page = page_html(sbpc.plan(*gpt2(layers=4), mesh, stages="pipe", microbatches=4), {})
    assert re.findall(r"Chunk ([^:<]*): Parameters", page) == ["0", "1, and 2 alike", "3"]
