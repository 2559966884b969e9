"""The search over stages, micro-batches and recompute: rows are ranked, fit, and their plans cost what was predicted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.api.candidates import Candidate, block_times, candidates
from sbpc.api.short_model import short_model
from sbpc.api.staging import short_plans
from sbpc.api.strategies import Search, StrategyRow
from sbpc.api.task import prepare
from sbpc.cli.commands.sweep import refused_lines
from sbpc.cli.main import main
from sbpc.errors import MemoryLimitError, SbpcError
from sbpc.mesh.cluster import Cluster
from sbpc.passes.loop.body import loop_of
from sbpc.plans.staged.estimate import even_ends, repeated
from tests import models
from tests.compare import compare, eager


class Blocks(nn.Module):
    """Residual blocks of two layers; the mean of the squares as the loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


LAN = Cluster("lan", 1e10, 1e10, 5e-7, 1, 2e-6, 1e9, 2e-6, 1e9)


def test_a_short_model_has_two_blocks_of_each_list_and_the_same_forward() -> None:
    model, args = models.gpt2(batch=4, layers=5)
    short, lengths = short_model(model)
    assert lengths == {"blocks": 5}
    assert isinstance(short.blocks, nn.ModuleList) and len(short.blocks) == 2 and len(model.blocks) == 5  # type: ignore[arg-type]
    assert short.blocks[1].up.weight is model.blocks[1].up.weight  # type: ignore[union-attr, index]
    assert short(*args).shape == ()


def test_rows_are_ranked_by_seconds_and_a_plan_takes_what_its_row_says() -> None:
    model, args = Blocks(6, 64), (torch.randn(16, 8),)
    rows = sbpc.sweep(model, args, devices=4, cluster=LAN, stages=True, microbatches=True, seconds=8)
    assert [row.cost for row in rows] == sorted(row.cost for row in rows)
    assert len({row.stages for row in rows}) > 1
    best = rows[0]
    assert best.lower_bound <= best.cost
    parts = best.compute_seconds + best.exposed_seconds + best.bubble_seconds + best.optimizer_seconds
    assert parts == pytest.approx(best.cost) and best.optimizer_seconds > 0 and best.usage is not None
    assert best.plan.stages == best.stages and best.plan.cost.step_seconds == pytest.approx(best.cost, rel=0.1)
    assert best.plan.usage.unit == best.usage.unit == "samples"


def test_the_best_row_under_a_limit_fits_and_is_right() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = Blocks(4, 32), (torch.randn(8, 8),)
    options = {"devices": 4, "cluster": LAN, "stages": True, "microbatches": True, "recompute": "auto", "seconds": 3}
    free = sbpc.sweep(model, args, **options)[0].memory["total"]
    limit = 0.9 * free
    row = sbpc.sweep(model, args, memory=limit, **options)[0]
    assert row.memory["total"] <= limit
    assert row.plan.cost.memory["total"] <= limit
    assert compare(row.plan, model, args, *eager(model, args)) <= 1e-10
    with pytest.raises(MemoryLimitError, match="the strategy that needs least"):
        sbpc.sweep(model, args, memory=1e4, **options)
    with pytest.raises(SbpcError, match="strategies are ranked by seconds"):
        sbpc.sweep(model, args, spread=True, **options)


class Joined(nn.Module):
    """A layer whose batch statistics no micro-batch has on its own, between blocks; also what it computes, beside the loss."""

    def __init__(self, joins: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8) if joins else nn.ReLU()) for _ in range(4)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x.square().mean(), x


def test_what_is_refused_is_told_with_its_reason_and_does_not_move_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = (torch.randn(16, 8),)
    options = {"devices": 2, "cluster": LAN, "stages": True, "microbatches": True, "seconds": 60}
    rows = sbpc.sweep(Joined(joins=True), args, **options)
    assert {row.microbatches for row in rows} == {1}
    reasons = {(each.mesh.sizes, each.microbatches): each.reason for each in rows[0].refused}
    why = "each micro-batch needs the whole batch's value of this op, which depends on parameter blocks.0.0.weight"
    assert why in reasons.values() and all(count > 1 for _, count in reasons)
    assert 0 < rows[0].lower_bound <= min(row.cost for row in rows)
    lines = refused_lines(rows[0].refused)
    assert any(line.endswith("and others") and why in line for line in lines)
    several = sbpc.sweep(Joined(joins=False), args, **options)
    assert len({row.microbatches for row in several}) > 1  # values beside the loss are put together behind the loop
    assert several[0].lower_bound <= several[0].cost


def test_chunks_are_as_even_as_can_be() -> None:
    assert even_ends([1.0] * 105, 35) == list(range(0, 106, 3))
    assert even_ends([5, 1, 1, 1, 1, 1], 2) == [0, 1, 6]


def test_one_stage_is_a_loop_whose_gradients_are_boxed_once() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, args = models.mlp(batch=8, layers=2)
    e = eager(model, args)
    sent = []
    for count in (1, 2, 4):
        plan = sbpc.plan(model, args, sbpc.Mesh(pipe=1, data=2), stages="pipe", microbatches=count, pin={"*": "B"})
        assert compare(plan, model, args, *e) <= 1e-10
        sent.append(plan.cost.bytes_sent["data"])
    assert max(sent) <= 1.05 * min(sent)


def test_the_command_line_ranks_strategies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "target.py"
    file.write_text("from tests.models import mlp\n\n\ndef build():\n    return mlp(batch=8, layers=4)\n")
    asked = [
        "sweep",
        f"{file}:build",
        "--devices",
        "4",
        "--cluster",
        "a100",
        "--stages",
        "--microbatches",
        "--seconds",
        "2",
    ]
    assert main([*asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["cost"] <= rows[-1]["cost"] and {row["stages"] for row in rows} > {1}
    assert main(asked) == 0
    assert "strategies looked at; none takes less than" in capsys.readouterr().out


def test_what_seems_fastest_is_looked_at_next() -> None:
    """Ranks of tensor are slower than the guess here: after the first of eight, all of fewer ranks come before the others of eight."""

    class Guessing(Search):
        def row(self, each: Candidate) -> StrategyRow:
            seen.append((each.mesh.sizes[2], each.microbatches))
            seconds = each.guess * each.mesh.sizes[2]
            about = each.mesh, 1, each.schedule, each.microbatches, "none"
            return StrategyRow(*about, seconds, seconds, 0.0, 0.0, 0.0, 0.0, None, {"total": 1}, refuse)

    def refuse() -> Any:
        raise AssertionError("no plan is asked for")

    seen: list[tuple[int, int]] = []
    found = [
        Candidate(Mesh(pipe=1, data=8 // tensor, tensor=tensor), "1f1b", count, 0.5, 0.5, 1.0 + count / 100, (0.0,) * 4)
        for count in (1, 2) for tensor in (8, 4, 2, 1)
    ]  # fmt: skip
    rows = Guessing(refuse, None, {}, None, None, "none", 60.0).rows(found)  # type: ignore[arg-type]
    assert seen == [(8, 1), (4, 1), (2, 1), (1, 1), (1, 2), (2, 2), (4, 2), (8, 2)]
    assert [row.mesh.sizes[2] for row in rows] == [1, 1, 2, 2, 4, 4, 8, 8] and rows[0].cost == 1.01


def test_a_guess_is_near_what_a_step_takes_that_sends_nothing() -> None:
    """Where activations are most of what is read: a guess takes a part of a call to read a part of its weights, too."""
    model, args = Blocks(8, 64), (torch.randn(4096, 8),)
    short, lengths = short_model(model)
    task = prepare(short, args)
    for pipe, count in ((1, 1), (1, 4), (2, 4), (4, 8)):
        asked = (Mesh(pipe=pipe, data=1, tensor=1).sizes, count, "1f1b")
        found = candidates(task, lengths, pipe, LAN, True, True, None, None)
        (guess,) = (each.guess for each in found if (each.mesh.sizes, each.microbatches, each.schedule) == asked)
        plan = sbpc.plan(model, args, Mesh(cluster=LAN, pipe=pipe), stages="pipe", microbatches=count)
        assert guess == pytest.approx(plan.cost.compute_seconds * (count + pipe - 1) / count, rel=0.02), (pipe, count)


def test_repeated_blocks_cost_what_a_plan_of_all_blocks_costs() -> None:
    model, args = models.gpt2(batch=8, layers=5, tied=False)
    short, lengths = short_model(model)
    task = prepare(short, args)
    loops = [loop_of(each.gm, 4) for each in (task, prepare(model, args))]
    (blocks, few_at), (all_blocks, whole_at) = (
        short_plans(loop, task.stages, task.about, Mesh(data=2, cluster="a100"), "pipe", "adamw") for loop in loops
    )
    times, ones = [block_times(lengths, block) for block in blocks], [block_times({}, block) for block in all_blocks]
    joined_mesh = Mesh(pipe=2, data=2, cluster="a100")
    plan = sbpc.plan(model, args, joined_mesh, stages="pipe", microbatches=4)
    for level in range(4):
        few, whole = few_at(level), whole_at(level)
        mesh = whole.mesh
        assert sum(times) == len(ones) == mesh.sizes[0] > len(times)
        made = repeated(few, times, mesh, "pipe", "1f1b", 4)
        assert made.cost.seconds == pytest.approx(whole.cost.seconds, rel=1e-2)
        assert made.memory == pytest.approx(whole.memory, rel=1e-2)
        assert made.bytes_sent == pytest.approx(whole.bytes_sent, rel=1e-2)
        joined = repeated(few, times, joined_mesh, "pipe", "1f1b", 4)
        assert level or joined.cost.seconds == pytest.approx(plan.cost.seconds, rel=0.05)


COMPARED: dict[str, tuple[dict[str, Any], int]] = {  # sizes of a GPT, and devices
    "small": ({"batch": 8, "seq": 64, "width": 64, "heads": 4, "layers": 2}, 2),
    "deep": ({"batch": 16, "seq": 64, "width": 64, "heads": 4, "layers": 8}, 8),
    "wide": ({"batch": 16, "seq": 128, "width": 512, "heads": 8, "layers": 3}, 8),
    "long": ({"batch": 8, "seq": 1024, "width": 128, "heads": 4, "layers": 3}, 8),
    "short": ({"batch": 256, "seq": 16, "width": 256, "heads": 4, "layers": 3}, 8),
    "words": ({"batch": 32, "seq": 64, "width": 128, "heads": 4, "layers": 3, "vocab": 32_768}, 8),
    "untied": ({"batch": 32, "seq": 64, "width": 256, "heads": 4, "layers": 4, "vocab": 8192, "tied": False}, 16),
    "many": ({"batch": 64, "seq": 64, "width": 256, "heads": 8, "layers": 4}, 32),
    "large": ({"batch": 64, "seq": 512, "width": 1024, "heads": 16, "layers": 4, "vocab": 16_384}, 32),
    "huge": ({"batch": 128, "seq": 1024, "width": 4096, "heads": 32, "layers": 4, "vocab": 32_768}, 64),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "small" else pytest.mark.prove) for name in COMPARED]
)
def test_no_row_is_slower_than_what_is_known_for_its_mesh(name: str) -> None:
    sizes, devices = COMPARED[name]
    with torch.device("meta"):
        model, args = models.gpt2(**sizes)
    rows = sbpc.sweep(
        model, args, devices=devices, cluster="h100", stages=True, microbatches=True, memory=80e9, seconds=20
    )
    asked = {"stages": "pipe", "memory": 80e9}
    for row in rows[: 2 if name == "small" else 16]:
        known = {}
        for scheme in ("data", "fsdp", "megatron", "megatron+sp"):
            how = asked | {"schedule": row.schedule, "microbatches": row.microbatches, "recompute": row.recompute}
            try:
                known[scheme] = sbpc.baseline(scheme, model, args, row.mesh, **how).cost.seconds
            except SbpcError:  # it does not fit the mesh, or a rank
                continue
        assert row.plan.cost.seconds <= min(known.values(), default=math.inf) * (1 + 1e-9), (row, known)
