"""The examples run and print what they promise, and so do those of the README and of docstrings."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import sbpc
from sbpc.cli import demo_run as demo
from sbpc.cli.main import parser
from sbpc.errors import SbpcError
from sbpc.inspect.picture import graph_svg
from sbpc.inspect.tables import quantity
from sbpc.mesh.states import parse_state, whole
from sbpc.rules import registry
from tests.models import mlp
from tests.processes import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
README = (EXAMPLES.parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)  # language, text
QUICK_START, UNDER_TORCHRUN = (text for language, text in BLOCKS if language == "python")


def test_two_layers_prints_every_stage_and_equal_gradients(capsys):
    runpy.run_path(str(EXAMPLES / "01_two_layers.py"), run_name="__main__")
    out = capsys.readouterr().out
    stages = ["--- annotated", "--- boxed", "--- local, rank 0", "--- plan"]
    assert [line for line in out.splitlines() if line.startswith("---")] == stages
    errors = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("gradient")]
    assert len(errors) == 2 and max(errors) < 1e-5


def test_the_picture_of_the_readme_is_the_one_that_the_first_example_draws():
    module = runpy.run_path(str(EXAMPLES / "01_two_layers.py"))
    plan = sbpc.plan(*module["two_layers"](), module["MESH"], pin=module["PINS"], objective="serial")
    title = f"{plan.options.model} on {plan.mesh}: boxed graph"  # as `sbpc show` has it
    assert graph_svg(plan.boxed, plan.mesh, title) == (EXAMPLES / "two_layers.svg").read_text()


def test_pictures_of_plans_are_small_and_hold_their_figures():
    module = runpy.run_path(str(EXAMPLES / "08_pictures.py"))
    plan = sbpc.plan(*mlp(batch=8, layers=2), sbpc.Mesh(data=2, tensor=2, cluster="h100"))
    stages = sbpc.plan(*mlp(batch=8, layers=2), sbpc.Mesh(pipe=2, data=2), stages="pipe", microbatches=4)
    drawn = {
        "map": module["map_picture"](plan),
        "timeline": module["timeline_picture"](plan),
        "schedule": module["schedule_picture"](stages),
    }
    for name, svg in drawn.items():
        seconds = quantity((stages if name == "schedule" else plan).cost.seconds, "s")
        assert ElementTree.fromstring(svg).tag.endswith("svg") and seconds in svg
        committed = (EXAMPLES / f"{name}.svg").read_text()
        assert ElementTree.fromstring(committed).tag.endswith("svg") and len(committed) < 150_000
    # the last backward of the second stage sends first
    assert (
        all(name.rpartition(".")[2] in drawn["map"] for name in plan.parameters)
        and drawn["schedule"].count(">3</text>") == 5
    )


def test_options_of_a_plan_change_it(capsys):
    runpy.run_path(str(EXAMPLES / "06_options.py"), run_name="__main__")
    lines = {line.split("  ")[0].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert {"best", "pinned", "in less memory", "data", "fsdp", "megatron", "b = 1024"} < set(lines)
    seconds = {name: float(line[17:].split()[0]) for name, line in lines.items() if "gap" in line}
    assert min(seconds.values()) == seconds["best"]


def test_own_rule_splits_an_op_of_ones_own(capsys):
    with own_rules():
        runpy.run_path(str(EXAMPLES / "05_own_rule.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "LOUD" not in out and "note      proved rule for example.gated_backward.default" in out
    assert "25.0 % of one device's" in out
    errors = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("gradient")]
    assert len(errors) == 4 and max(errors) < 1e-5


def test_a_pipeline_prints_its_plan_and_draws_its_schedule(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["07_pipeline.py"])
    runpy.run_path(str(EXAMPLES / "07_pipeline.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert (
        out.startswith("Net on Mesh(pipe=2, data=2): 4 ranks, 2 stages along 'pipe', 1f1b, 8 micro-batches\n")
        and "\n    1      1  " in out
    )
    assert (tmp_path / "pipeline.html").read_text().count("of micro-batch 7 in chunk") == 5


def test_lightning_trains_as_one_device_does_and_goes_on_from_its_checkpoint(tmp_path):
    pytest.importorskip("lightning", reason="lightning is not installed: pip install lightning")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = subprocess.run(
        [*command, str(EXAMPLES / "10_lightning.py")], cwd=tmp_path, text=True, capture_output=True, timeout=200
    )
    assert job.returncode == 0, job.stderr
    done = job.stdout
    losses = [list(map(float, line.split()[1:])) for line in done[done.index("step    Trainer") :].splitlines()[1:]]
    assert len(losses) == 6 and losses[0][0] != losses[5][0]
    for trainer, fabric, one_device in losses:
        assert max(abs(trainer - one_device), abs(fabric - one_device)) < 1e-5


@contextlib.contextmanager
def own_rules():
    """Take out again what is registered meanwhile."""
    before = dict(registry.TABLE)
    yield
    for op in [op for op in registry.TABLE if op not in before]:
        registry.put(op, None)


def test_an_exported_file_trains_and_infers_as_one_device_does(capfd, monkeypatch):
    example = str(EXAMPLES / "04_export_and_run.py")
    monkeypatch.setattr(sys, "argv", [example])
    runpy.run_path(example, run_name="__main__")
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["one", "train", "train", "train", "inference"]
    losses = [float(line[-1]) for line in lines]
    assert losses[0] == losses[1] == losses[4] > losses[2] > losses[3]


def test_the_text_of_the_demo_is_the_same_in_every_run():
    (first, _), *_ = demo.batches(1)
    (again, _), *_ = demo.batches(1)
    tokens, targets = first
    assert all(torch.equal(one, other) for one, other in zip(first, again))
    assert tokens.shape == (demo.BATCH, demo.SEQUENCE) and torch.equal(tokens[:, 1:], targets[:, :-1])


def test_the_model_of_the_demo_has_about_a_million_parameters():
    count = sum(parameter.numel() for parameter in demo.model_of("float32").parameters())
    assert 0.5e6 < count < 2e6


def test_the_plan_of_the_demo_holds_and_gives_each_rank_a_quarter_of_the_work():
    args, kwargs = next(demo.batches(1))
    plan = sbpc.plan(demo.model_of("float32"), args, sbpc.Mesh(data=2, tensor=2), kwargs=kwargs)
    share, sent = demo.check(plan)
    assert plan.verify() > 3000 and round(share, 3) == 0.25 and sent.count("bytes") == 3
    assert "blocks.*.attention.query.weight  [160, 160]" in str(plan)


def test_the_demo_refuses_a_replicated_plan():
    args, _ = next(demo.batches(1))
    plan = sbpc.plan(torch.nn.Linear(8, 8), (torch.randn(3, 8),), sbpc.Mesh(data=1, tensor=1))
    object.__setattr__(plan.mesh, "sizes", (2, 2))  # one rank's work, said to be four ranks'
    assert plan.mesh.ranks == 4 and args[0].dtype == torch.int64
    with pytest.raises(SbpcError, match="the plan is replicated"):
        demo.check(plan)


def compiled_script():
    """On a rank, which has joined the others: what the script prints and says."""
    torch.distributed.init_process_group = lambda: None
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as said:
        runpy.run_path(str(EXAMPLES / "03_torch_compile.py"), run_name="__main__")
    return printed.getvalue(), said.getvalue()


def test_a_compiled_script_trains_on_two_ranks():
    ranks = run_ranks(compiled_script, 2)
    losses = [float(line.split()[-1]) for line in ranks[0][0].splitlines() if line.startswith("step")]
    assert len(losses) == 4 and all(0.5 < loss < 2 for loss in losses) and ranks[1][0] == ""
    assert [said.count("torch.compile hands over whole parameters") for _, said in ranks] == [1, 1]


def script_of_a_trainer(folder):
    """On a rank, which has joined the others: what the script prints."""
    ranks = str(torch.distributed.get_world_size())
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    sys.argv = ["09_hf_trainer.py", folder]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / "09_hf_trainer.py"), run_name="__main__")
    return printed.getvalue()


def test_a_trainer_of_transformers_trains_on_two_ranks_by_one_line(tmp_path):
    pytest.importorskip("accelerate", reason="pip install sbpc[integrations]")
    first, other = run_ranks(script_of_a_trainer, 2, str(tmp_path))
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", first)]
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0] and "eval_loss" in first
    assert "LlamaForCausalLM on Mesh(data=2)" in first and "LlamaForCausalLM" not in other
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "checkpoint-16" / "optimizer.pt").exists()


# --- the README and docstrings ----------------------------------------------------------------------------------------
def test_links_of_the_readme_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 20 and [link for link in links if not (EXAMPLES.parent / link).exists()] == []


def test_the_matrix_of_the_readme_is_divided_as_states_are_defined():
    head, *lines = (
        next(text for _, text in BLOCKS if text.startswith("X "))
        .replace("rank 0", " " * 6)
        .replace("rank 1", " " * 6)
        .splitlines()
    )
    # of the columns, two digits wide at most
    starts = [max(match.start() - 1, 0) for match in re.finditer(r"\S+", head)]
    matrix, *columns = (
        [[[int(number) for number in line[start:end].split()] for line in part] for part in (lines[:4], lines[5:])]
        for start, end in zip(starts, [*starts[1:], None])
    )
    expected = torch.arange(1, 17).view(4, 4)
    assert torch.equal(torch.tensor(matrix[0]), expected) and len(columns) == 4
    for name, ranks in zip(head.split()[1:], columns):
        parts = [torch.tensor([row for row in rows if row]) for rows in ranks]
        assert torch.equal(whole(parts, parse_state(name)), expected), name


def test_the_quick_start_of_the_readme_prints_what_it_shows(capsys):
    exec(QUICK_START, {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = next(text for _, text in BLOCKS if text.startswith("name ")).splitlines()
    assert len(shown) > 2 and [line for line in shown if line not in printed] == []


def test_every_line_of_code_in_the_table_of_the_readme_runs(tmp_path):
    rows = [row.split("|")[2] for row in README.splitlines() if row.startswith("| ") and row.count("|") == 3]
    lines = [line for row in rows for line in re.findall("`([^`]+)`", row)]
    commands = [line for line in lines if line.startswith("sbpc ")]
    assert len(lines) > 17 and len(commands) == 10
    for command in commands:
        parser().parse_args(shlex.split(command)[1:])
    assert run_ranks(run_lines, 1, str(tmp_path), [line for line in lines if line not in commands]) == [None]


def run_lines(folder, lines):
    """On one rank: what the README says to write, after its quick start and what a reader would have made for it."""
    os.chdir(folder)
    for name, function in (("scale", lambda x, w: x * w), ("shift", lambda x, w: x + w)):
        torch.library.custom_op(f"mylib::{name}", function, mutates_args=(), schema="(Tensor x, Tensor w) -> Tensor")
    four, one = {}, {}  # names where the mesh has four ranks, for what needs no processes, and one rank, for what does
    for names, start in ((four, QUICK_START), (one, QUICK_START.replace("data=2, tensor=2", "data=1, tensor=1"))):
        exec(start, names)
        names |= {"x": torch.randn(4, 5), "w": torch.randn(5), "step": 1}
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters())
    four["mesh"].cluster.save("cluster.json")
    exec(UNDER_TORCHRUN, dict(one))
    for line in lines:
        exec(line, one if "parallelize" in line or "load_module" in line else four)
    sbpc.stop()


def test_examples_in_docstrings_are_true():
    names = [module.name for module in pkgutil.walk_packages(sbpc.__path__, "sbpc.") if module.name != "sbpc.__main__"]
    results = [doctest.testmod(importlib.import_module(name)) for name in names if "._" not in name]  # no machine code
    assert sum(result.attempted for result in results) > 40 and sum(result.failed for result in results) == 0
