"""The examples run, and print what they promise."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import sbpc
from sbpc.cli import demo_run as demo
from sbpc.errors import SbpcError
from sbpc.rules import registry

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_two_layers_prints_every_stage_and_equal_gradients(capsys):
    runpy.run_path(str(EXAMPLES / "01_two_layers.py"), run_name="__main__")
    out = capsys.readouterr().out
    stages = ["--- annotated", "--- boxed", "--- local, rank 0", "--- plan"]
    assert [line for line in out.splitlines() if line.startswith("---")] == stages
    errors = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("gradient")]
    assert len(errors) == 2 and max(errors) < 1e-5


def test_own_rule_splits_an_op_of_ones_own(capsys):
    with own_rules():
        runpy.run_path(str(EXAMPLES / "05_own_rule.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "LOUD" not in out and "note      proved rule for example.gated_backward.default" in out
    assert "25.0 % of one device's" in out
    errors = [float(line.split()[-1]) for line in out.splitlines() if line.startswith("gradient")]
    assert len(errors) == 4 and max(errors) < 1e-5


@contextlib.contextmanager
def own_rules():
    """Take out again what is registered meanwhile."""
    before = dict(registry.TABLE)
    yield
    for op in [op for op in registry.TABLE if op not in before]:
        registry.put(op, None)


def test_an_exported_file_trains_and_infers_as_one_device_does():
    ended = subprocess.run([sys.executable, str(EXAMPLES / "04_export_and_run.py")], capture_output=True, text=True)
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, ended.stderr
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


def test_the_readme_shows_the_plan_of_the_demo():
    args, kwargs = next(demo.batches(1))
    plan = sbpc.plan(demo.model_of("float32"), args, sbpc.Mesh(data=2, tensor=2), kwargs=kwargs)
    console = Console(file=io.StringIO(), width=120)
    demo.print_plan(plan, console)
    printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
    shown = (EXAMPLES.parent / "README.md").read_text().split("\n1. plan")[1].split("\n3. train")[0]
    first, verified = shown.split("\n2. verify")
    lines = [line for line in first.splitlines()[1:] if line not in ("", "...")]
    assert len(lines) > 20 and [line for line in lines if line not in printed] == []
    assert f"{plan.verify():,} edges" in verified and demo.check(plan)[1] in verified


def test_the_demo_refuses_a_replicated_plan():
    args, _ = next(demo.batches(1))
    plan = sbpc.plan(torch.nn.Linear(8, 8), (torch.randn(3, 8),), sbpc.Mesh(data=1, tensor=1))
    object.__setattr__(plan.mesh, "sizes", (2, 2))  # one rank's work, said to be four ranks'
    assert plan.mesh.ranks == 4 and args[0].dtype == torch.int64
    with pytest.raises(SbpcError, match="the plan is replicated"):
        demo.check(plan)


def test_a_compiled_script_trains_on_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*command, str(EXAMPLES / "03_torch_compile.py")],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(line.split()[-1]) for line in ended.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 4 and all(0.5 < loss < 2 for loss in losses)
    assert ended.stderr.count("torch.compile hands over whole parameters") == 2
