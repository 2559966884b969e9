"""Plans with pipeline stages in files, on the command line and in pictures."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.cli.target import load_target
from sbpc.errors import PlanError
from sbpc.plans.plan_bytes import read
from tests import models
from tests.compare import compare, eager
from tests.forging import sealed
from tests.test_plan import refused

STAGED: dict[str, Any] = {"stages": "pipe", "microbatches": 4}
NETS: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 4, "seq": 4, "vocab": 12, "width": 8, "heads": 2}, "ignore_index_loss": {}, "resnet": {"layers": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A plan with stages, and its file."""
    path = tmp_path_factory.mktemp("plan") / "plan.sbpc"
    plan = sbpc.plan(*models.mlp(layers=2), Mesh(pipe=2, data=2), **STAGED)
    plan.save(path)
    return plan, path


@pytest.mark.parametrize(
    ("net", "stages", "schedule", "recompute"),
    [("gpt2", 2, "1f1b", "full"), ("ignore_index_loss", 1, "gpipe", "none"), ("resnet", 2, "zbv", "none")],
)
def test_saved_plan_with_stages_is_read_back_whole(
    tmp_path: Path, net: str, stages: int, schedule: str, recompute: str
) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = getattr(models, net)(**NETS[net])
    plan = sbpc.plan(model, args, Mesh(pipe=stages, data=2), schedule=schedule, recompute=recompute, **STAGED)
    plan.save(tmp_path / "plan")
    found = sbpc.load(tmp_path / "plan")
    assert str(found) == str(plan) and found.layouts == plan.layouts and found.cost == plan.cost
    assert found.verify() == plan.verify() and found.options == plan.options
    assert compare(found, model, args, *eager(model, args)) <= 1e-10
    assert (plan.cost.recompute_seconds > 0) == (recompute == "full")
    found.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "plan").read_bytes()


def first(body: dict[str, Any], key: str) -> list[Any]:
    """What the first chunk that has any says of its ports under a key, and changes there are changes of the file."""
    return next(chunk[key] for chunk in body["chunks"] if chunk[key])


HOSTILE: list[tuple[str, Any]] = [
    ("no such axis", lambda body: body["options"].update(stages="data2")),
    ("no such schedule", lambda body: body["options"].update(schedule="2f2b")),
    ("another schedule", lambda body: body["options"].update(schedule="zbv")),
    ("micro-batches that do not divide", lambda body: body["loop"].update(count=7)),
    ("no micro-batches", lambda body: body["loop"].update(count=0)),
    ("micro-batches that are no number", lambda body: body["loop"].update(count="4")),
    ("something else boxed in the loop", lambda body: body["loop"].update(in_loop=[["input", "0"]])),
    ("a bound that is none", lambda body: body.update(lower_bound=None)),
    ("no chunks", lambda body: body.update(chunks=[])),
    ("chunks in another order", lambda body: body["chunks"].reverse()),
    ("a chunk twice", lambda body: body["chunks"].__setitem__(1, body["chunks"][0])),
    ("layouts on another mesh", lambda body: body["chunks"][0].update(outputs=["[B, B]" if each else None for each in body["chunks"][0]["outputs"]])),
    ("code in a chunk", lambda body: body["chunks"][0]["graph"][-2].update(target="os.system")),
    ("code before the loop", lambda body: body["loop"]["before"]["graph"][0].update(target="x=print()")),
    ("another graph after the loop", lambda body: body["loop"].update(after=body["loop"]["before"])),
    ("an op after the loop that writes a file", lambda body: body["loop"]["after"]["graph"][-2].update(op="call_function", target="aten.add_.Tensor")),
    ("no inputs of the body", lambda body: body["loop"].update(inputs={})),
    ("an input from nowhere", lambda body: body["loop"]["inputs"].update({"0": ["argument", 5, 0]})),
    ("an input of a kind", lambda body: body["loop"]["inputs"].update({"0": ["file", 0, 0]})),
    ("an input cut along no dim", lambda body: body["loop"]["inputs"].update({"0": ["argument", 0, 2]})),
    ("values joined otherwise", lambda body: body["loop"].update(joins=["mean"])),
    ("values not joined", lambda body: body["loop"].update(joins=[])),
    ("no shapes", lambda body: body["loop"].update(shapes=[])),
    ("another shape", lambda body: body["loop"]["shapes"][0].__setitem__(2, ["float32", [1], [1]])),
    ("a value that nobody sends", lambda body: first(body, "receives")[0].__setitem__(2, "nothing")),
    ("a value sent as another", lambda body: first(body, "sends")[0].__setitem__(2, "nothing")),
    ("a port that is not there", lambda body: first(body, "sends")[0].__setitem__(1, "77")),
    ("another result", lambda body: first(body, "results")[0].__setitem__(2, 1)),
    ("values joined along no dim", lambda body: body["loop"].update(joins=[0])),
    ("nothing received", lambda body: first(body, "receives").clear()),
    ("an argument of the body that is not there", lambda body: first(body, "arguments")[0].__setitem__(2, "9")),
    ("a parameter elsewhere", lambda body: body["ports"]["inputs"].pop(0)),
]  # fmt: skip


def test_file_of_stages_with_bad_content_is_refused(written: tuple[Any, Path], tmp_path: Path) -> None:
    whole = read(written[1])
    for what, change in HOSTILE:
        content = copy.deepcopy(whole)
        change(content)
        (tmp_path / "bad").write_bytes(sealed(content))
        message = refused(PlanError, lambda: sbpc.load(tmp_path / "bad"))
        assert "bad: " in message and message.count("\n") == 1, (what, message)


TARGET = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(blocks)
        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()
    return Model(), (torch.randn(8, 8),)
"""
ASKED = ("--mesh", "pipe=2,data=2", "--stages", "pipe", "--microbatches", "4")


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / f"target_of_{tmp_path.name}.py"
    path.write_text(TARGET)
    return f"{path}:model"


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def test_commands_plan_and_show_stages(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.sbpc"
    assert run("plan", target, *ASKED, "--schedule", "interleaved", "-o", file) == 0
    out = capsys.readouterr().out
    assert (
        "2 stages along 'pipe', interleaved, 4 micro-batches" in out
        and re.search(r"\n +3 +1  ", out)
        and "verified" in out
    )
    assert run("plan", target, *ASKED, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (
        report["schedule"] == "1f1b"
        and [chunk["stage"] for chunk in report["chunks"]] == [0, 1]
        and report["bubble_seconds"] > 0
    )
    assert run("show", file) == 0
    out = capsys.readouterr().out
    assert (out.count("boxed graph, chunk ") == 4 and "aten.addmm" in out) or "aten.mm" in out
    assert run("show", file, "--stage", "local", "--rank", "3", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["chunks"]) == 2  # of the two of stage 1
    assert run("show", file, "--html", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="t-forward') == 16 and page.count('class="t-backward') == 16 + 3 and "http" not in page
    sbpc.load(file).save_page(tmp_path / "page.html", losses={"one": [2.0, 1.0], "many": [2.0, 1.01]})
    assert 'id="losses"' not in page and "any step: 1.00e-02" in (tmp_path / "page.html").read_text()
    assert run("diff", file, file) == 0
    capsys.readouterr()
    for arguments, message in (
        (("plan", target, "--mesh", "pipe=2", "--schedule", "1f1b"), "schedule='1f1b' of a step that is no loop"),
        (("plan", target, *ASKED, "--schedule", "x"), "no schedule 'x' is known"),
        (("show", file, "--svg", tmp_path / "a.svg"), "--svg draws one graph"),
        (("show", file, "--stages", "pipe"), "--stages cannot change it"),
        (("run", target, "--plan", file, "--trace", tmp_path / "none" / "t.json"), "there is no folder"),
        (("run", target, "--plan", file, "--trace", tmp_path / "t.json", "--steps", "2"), "--trace with 2 steps to go"),
        (
            ("show", file, "--html", tmp_path / "b.html", "--trace", tmp_path / "t.json"),
            "is no trace: FileNotFoundError",
        ),
        (("run", file, "--infer"), "holds stages of a pipeline, which train"),
        (("explain", file, "blocks.0.0.weight"), "that was read from a file does not hold the problem that it solves"),
    ):
        assert run(*arguments) == 2 and message in capsys.readouterr().err, message


def test_run_trains_stages_from_an_exported_file_and_goes_on(
    target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.sbpc"
    assert run("export", target, *ASKED, "-o", file) == 0
    always = ("--lr", "0.01", "--checkpoint", tmp_path / "saved", "--json")
    capfd.readouterr()
    assert run("run", file, "--steps", "2", *always) == 0  # without the target
    first = json.loads(capfd.readouterr().out)
    assert run("run", target, "--mesh", "pipe=2", "--stages", "pipe", "--steps", "4", *always) == 0
    second = json.loads(capfd.readouterr().out)
    model, args = load_target(target).model, load_target(target).args
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(4):
        loss = model(*args)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert second["start"] == 2 and first["losses"] + second["losses"] == pytest.approx(losses, rel=1e-5)


def test_what_a_plan_with_stages_has_not_says_what_to_do(written: tuple[Any, Path]) -> None:
    plan, file = written
    for call in (lambda: plan.local_at(0), lambda: plan.boxed, lambda: plan.graph):
        assert "a plan of 2 chunks has no one graph" in refused(PlanError, call)
    assert "that was read from a file does not hold" in refused(PlanError, lambda: sbpc.load(file).certify(seconds=1.0))
    assert "holds stages of a pipeline, which train" in refused(PlanError, lambda: sbpc.load_module(file, "inference"))
    with pytest.raises(AttributeError):
        plan.nothing  # noqa: B018
    assert not hasattr(plan, "nothing") and copy.copy(plan).axis == "pipe"
    assert plan._repr_html_().count("<table>") == 3
