"""Plans in the tools that people use: graphs as Python that runs, torch's structured trace, notebooks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.inspect.python_text import python_text
from tests.models import gpt2, mlp


def function(text: str) -> Any:
    """The function that a module of Python defines."""
    scope: dict[str, Any] = {}
    exec(compile(text, "graph.py", "exec"), scope)
    return scope["forward"]


def test_graphs_printed_as_python_compute_what_the_graphs_compute() -> None:
    for make in [mlp, lambda: gpt2(layers=1)]:
        torch.manual_seed(0)
        plan = sbpc.plan(*make(), Mesh(data=1, tensor=1))
        given = [
            torch.randn(v.shape) if v.is_floating_point() else torch.zeros(v.shape, dtype=v.dtype)
            for v in plan.shapes.values()
        ]
        positions = [torch.zeros(1, dtype=torch.int64)] * (
            len(plan.local.graph.find_nodes(op="placeholder")) - len(given)
        )
        for gm, more in ((plan.graph, []), (plan.boxed, []), (plan.local, positions)):
            found = function(python_text(gm, plan.mesh, "a graph"))(*given, *more)
            for one, other in zip(found, gm(*given, *more), strict=True):
                assert (one is None and other is None) or torch.equal(one, other)


def test_every_line_says_its_type_its_layout_and_where_it_comes_from(capsys: Any, tmp_path: Any) -> None:
    plan = sbpc.plan(*mlp(), Mesh(p=2), pin={"ups.0.weight": "S(0)"})
    plan.save(tmp_path / "plan.sbpc")
    assert main(["show", str(tmp_path / "plan.sbpc"), "--stage", "local", "--python"]) == 0
    text = capsys.readouterr().out
    assert callable(function(text)) and "torch.ops._c10d_functional." in text
    assert re.search(r"    gelu = torch.ops.aten.gelu.default\(\w+\)  # f32\[96, 24\]  S\(1\)", text), text
    assert "    # forward  tests/models.py:" in text and text.startswith('"""MLP on Mesh(p=2): local graph, rank 0\n')
    assert sum(" = torch.ops." in line for line in text.splitlines()) == sum(
        node.op == "call_function" and "getitem" not in str(node.target) for node in plan.local.graph.nodes
    )


def test_notebooks_show_the_report(tmp_path: Any) -> None:
    plan = sbpc.plan(*mlp(), Mesh(p=2))
    html = plan._repr_html_()
    assert html.count("<table>") == 2 and "ups.*.weight" not in html and "ups.0.weight" in html and "[48, 24]" in html


SCRIPT = """
import torch, sbpc
from tests.models import mlp
plan = sbpc.plan(*mlp(), sbpc.Mesh(p=2))
open("report.txt", "w").write(str(plan))
open("graph.txt", "w").write(sbpc.inspect.graph_text.graph_text(plan.boxed, plan.mesh))
"""


def test_the_plan_is_an_artifact_of_torchs_structured_trace(tmp_path: Any) -> None:
    root = os.path.dirname(os.path.dirname(__file__))
    about = {**os.environ, "TORCH_TRACE": str(tmp_path / "trace"), "PYTHONPATH": root}
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=about, check=True, capture_output=True)
    (log,) = (tmp_path / "trace").iterdir()
    artifacts: dict[str, str] = {}
    name = ""
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            artifacts[name] = artifacts.get(name, "") + line[1:] + "\n"
        else:
            name = json.loads(line[line.index("{") :]).get("artifact", {}).get("name", "")
    assert artifacts["plan"].rstrip("\n") == (tmp_path / "report.txt").read_text().rstrip("\n")
    assert artifacts["plan_graph"].rstrip("\n") == (tmp_path / "graph.txt").read_text().rstrip("\n")
    assert json.loads(artifacts["plan_figures"])["mesh"] == {"p": 2}


def test_without_a_trace_nothing_is_made_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    for name in ("graph_text", "plan_json"):
        monkeypatch.setattr(f"sbpc.api.planning.{name}", lambda *given: made.append(given))
    assert sbpc.plan(*mlp(), Mesh(p=2)).parameters and not made
