"""Faults: killed ranks start again, stuck ones end in time, ranks that disagree say so, NaNs are traced to their node."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import MeshError, NanError, PlanError
from sbpc.runtime.module import parallelize
from sbpc.runtime.start.agree import check_nodes, compare, identity
from tests.faults import GPT, STEP, processes, run_job
from tests.processes import run_ranks
from tests.test_plan import refused


def losses_of(script: str, checkpoint: str) -> dict[int, str]:
    """On a rank: what the script of the job prints if nobody is killed, by step."""
    sys.argv = [script, "--steps", "12", "--every", "4", "--checkpoint", checkpoint]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(script, run_name="__main__")
    return {int(found[1]): found[2] for found in STEP.finditer(printed.getvalue())}


def test_a_killed_rank_starts_again_from_the_last_checkpoint_and_ends_with_the_same_loss(tmp_path: Path) -> None:
    sizes, script = "SEQUENCE, WIDTH, HEADS, LAYERS = 8, 32, 64, 4, ", tmp_path / "gpt.py"
    assert f"{sizes}2\n" in GPT.read_text()
    # every start of a rank plans: one layer is enough
    script.write_text(GPT.read_text().replace(f"{sizes}2\n", f"{sizes}1\n"))
    whole = run_ranks(losses_of, 2, str(script), str(tmp_path / "whole"))[0]
    assert sorted(whole) == list(range(1, 13))
    killed = run_job(tmp_path / "killed", 12, 4, kill=9, script=script)
    assert killed.killed == 9 and killed.starts[0] == 1 and killed.starts[-1] in (1, 5, 9)
    assert killed.losses == whole
    assert not killed.left and killed.port_free


WAITS = """
import os, time, torch
def model():
    if os.environ.get("RANK") == "1":
        time.sleep(600)
    return torch.nn.Linear(4, 4), (torch.ones(4, 4),)
"""


def test_a_rank_that_is_stuck_ends_a_job_under_torchrun_within_its_timeout(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "sbpc", "run"]
    command += [f"{tmp_path}/waits.py:model", "--mesh", "x=2", "--timeout", "5"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode
    assert "sbpc: rank 0: waited for another rank as long as --timeout" in done.stderr, done.stderr
    assert not processes(str(tmp_path))


def disagree() -> list[str]:
    """On a rank: run a model that is not the one of rank 0, then one in stages whose collectives are not scheduled as there."""
    rank, said = dist.get_rank(), []
    width = 4 + rank
    for model, mesh, options in (
        (nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)), Mesh(x=2), {}),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Mesh(x=2), STAGED | {"objective": ("seconds", "serial")[rank]}),
    ):  # fmt: skip
        try:
            parallelize(model, sbpc.plan(model, (torch.ones(4, 4),), mesh, loss=torch.sum, **options))
            said.append("agreed")
        except PlanError as error:
            said.append(str(error))
    return said


STAGED: dict[str, Any] = {"stages": "x", "microbatches": 2}


def test_ranks_with_other_models_or_plans_find_out_at_start() -> None:
    found = run_ranks(disagree, 2)
    assert found[0] == found[1], found
    for said, what in zip(found[0], ("model", "options"), strict=True):
        assert f"rank 1 has another {what} than rank 0" in said, found


def test_plans_that_run_otherwise_are_told_apart() -> None:
    def same(mesh: Mesh, **options: Any) -> dict[str, str]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return identity(sbpc.plan(model, (torch.ones(4, 4),), mesh, loss=torch.sum, **options))

    mesh = Mesh(x=2, y=2)
    staged = same(mesh, **STAGED)
    assert staged == same(mesh, **STAGED)
    for other in ({"stages": "y"}, {"schedule": "gpipe"}, {"microbatches": 4}, {"objective": "serial"}):
        assert "rank 1 has another " in refused(
            PlanError, lambda other=other: compare([staged, same(mesh, **STAGED | other)])
        )
    for options in ({}, STAGED):
        plans = [same(Mesh(x=2, y=2, cluster=cluster), **options) for cluster in ("ideal", "h100")]
        assert plans[0]["model"] == plans[1]["model"] and plans[0]["cluster"] != plans[1]["cluster"]


def test_what_differs_between_ranks_is_named() -> None:
    same = {"torch": "2.13.0", "sbpc": "0.1", "mesh": "Mesh(x=3)", "model": "ab", "layouts": "cd", "node": "0"}
    compare([same, same | {"node": "1"}, same])
    message = refused(PlanError, lambda: compare([same, same, same | {"torch": "2.12.0", "layouts": "ef"}]))
    assert message == (
        "the ranks do not run the same: rank 2 has another torch than rank 0\n"
        "  rank 0: 2.13.0\n  rank 2: 2.12.0\n"
        "  1 of 3 ranks differ from rank 0: start all with the same torch, model, options and file, or give all of them "
        "one plan: sbpc plan -o FILE."
    )
    for key in ("mesh", "model", "layouts", "cluster", "options"):
        assert f"another {key} than" in refused(PlanError, lambda key=key: compare([same, same | {key: "x"}]))
    exported = {key: same[key] for key in ("torch", "sbpc", "mesh", "node")}
    assert "another file" in refused(PlanError, lambda: compare([exported | {"file": "1"}, exported | {"file": "2"}]))
    assert "another file" in refused(PlanError, lambda: compare([same, exported | {"file": "2"}]))


def test_nodes_hold_neighbouring_ranks_and_whole_inner_axes() -> None:
    check_nodes(Mesh(data=2, tensor=4), list("aaaabbbb"))
    check_nodes(Mesh(data=2, tensor=4), list("aabbccdd"))
    check_nodes(Mesh(data=4, tensor=2), list("aaaabbbb"))
    check_nodes(Mesh(data=2, tensor=3), list("aaaaaa"))
    message = refused(MeshError, lambda: check_nodes(Mesh(data=2, tensor=2), list("abab")))
    assert message.startswith("the ranks of node a are not neighbours: [0, 2]\n")
    message = refused(MeshError, lambda: check_nodes(Mesh(data=2, tensor=3), list("aabbcc")))
    assert message.startswith(
        "axis 'tensor' of Mesh(data=2, tensor=3) is cut by the nodes: its groups span 3 ranks, a node has 2\n"
    )
    assert "[2, 1]" in refused(MeshError, lambda: check_nodes(Mesh(x=3), list("aab")))


class Root(nn.Module):
    """Makes NaN in the forward below zero, and in the backward at zero."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x) * 0.0


class Sick(nn.Module):
    """A model that divides by zero in the gradient of a root."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)
        self.root = Root()
        nn.init.constant_(self.up.weight, fill)

    def forward(self, x: Tensor) -> Tensor:
        return self.root(self.up(x)).sum()


def sick(fills: tuple[float, ...], plan: sbpc.Plan) -> list[str]:
    """On a rank: what is said of a step, for each number in the weights of a model that may make NaN."""
    return [said_of(fill, plan) for fill in fills]


def said_of(fill: float, plan: sbpc.Plan) -> str:
    model, args = Sick(fill), (torch.ones(4, 4),)
    module = parallelize(model, plan, executor="nans")
    try:
        module(*args).backward()
    except NanError as error:
        return str(error)
    return "no NaN"


def test_nan_is_traced_to_the_first_node_that_makes_it() -> None:
    plan = sbpc.plan(Sick(1.0), (torch.ones(4, 4),), Mesh(x=2))
    for rank, (none, found, backward) in enumerate(run_ranks(sick, 2, (1.0, -1.0, 0.0), plan)):
        assert none == "no NaN"
        assert found.startswith(f"rank {rank}: %sqrt in the forward is the first to make NaN\n"), found
        assert "aten.sqrt.default" in found and "    root\n" in found
        assert 'test_faults.py", line' in found and "return torch.sqrt(x) * 0.0" in found and "from -4 to -4" in found
        assert "in the backward is the first to make NaN" in backward and "root" in backward, backward
