"""Jobs with pipeline stages on real ranks: checkpoints, clipping and loss scaling do what they do in one process."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import runpy
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.errors import CheckpointError, LostRankError, PlanError
from sbpc.runtime.staged import loop_runner
from sbpc.runtime.start import process_groups
from sbpc.runtime.start.launch import text_of
from sbpc.runtime.state.checkpoint import Checkpoints
from sbpc.runtime.state.checkpoint_record import read_marker
from tests import models
from tests.faults import PIPELINE, run_job
from tests.processes import run_ranks

STAGED: dict[str, Any] = {"stages": "pipe", "microbatches": 4}
LEGS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"pipe": 2, "data": 2}, STAGED | {"schedule": "zbv"}),
    ({"data": 4}, {}),
    ({"pipe": 4}, STAGED),
)
MOST = 0.1  # norm of the gradients


class Tower(nn.Module):
    """Blocks with dropout between an embedding and a head of the same weights; a frozen scale and a parameter that nothing reads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(12, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.rand(width), requires_grad=False)
        self.spare = nn.Parameter(torch.rand(3))
        self.register_buffer("shift", torch.rand(width))
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = x + block(x) * self.scale + self.shift
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def tower() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model and its batch, the same in every process."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, 12, (2, 8, 6))
    return Tower(), (tokens, targets)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Adam without weight decay of what is no matrix."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if (p.dim() > 1) == flat]} for flat in (True, False)]
    return torch.optim.AdamW(groups, lr=1e-2)


def planned(axes: dict[str, int], options: dict[str, Any]) -> Any:
    """The plan of the model on a mesh."""
    mesh: Any = Mesh(**axes)  # type: ignore[arg-type]
    return sbpc.plan(*tower(), mesh, **options)


def file_of(folder: str, axes: dict[str, int]) -> Path:
    """Where the plan for a mesh lies, beside the checkpoints."""
    return Path(folder).with_name("-".join(f"{name}{size}" for name, size in axes.items()) + ".sbpc")


def parallel(folder: str, axes: dict[str, int]) -> tuple[Any, tuple[Any, ...]]:
    """The model as this rank runs it, and its batch."""
    model, args = tower()
    return sbpc.parallelize(model, sbpc.load(file_of(folder, axes))), args


def train_on(folder: str, axes: dict[str, int], steps: int) -> list[float]:
    """Loss and norm of the gradients of `steps` steps from the last checkpoint on; one is saved at the end."""
    module, args = parallel(folder, axes)
    optimizer, checkpoints = optimizer_of(module), Checkpoints(folder)
    start = checkpoints.load(module, optimizer)
    figures = []
    for _ in range(steps):
        optimizer.zero_grad()
        figures.append(float(module.step(*args)))
        ours = torch.distributed.get_world_size() > 1
        norm = (
            module.clip_grad_norm_(MOST) if ours else nn.utils.clip_grad_norm_(module.parameters(), MOST).full_tensor()
        )  # type: ignore[attr-defined]
        figures.append(float(norm))
        optimizer.step()
    checkpoints.save(start + steps, module, optimizer, extra={"from": start})
    checkpoints.wait()
    return figures


def on_four_ranks(folder: str) -> dict[str, Any]:
    """On a rank: two steps on each mesh in turn, each from the checkpoint of the one before; then what else stages do."""
    figures = [figure for axes, _ in LEGS for figure in train_on(folder, axes, 2)]
    whole = tower()[0].state_dict()
    module, _ = parallel(folder, LEGS[-1][0])
    module.load_state_dict({name: value + 1 for name, value in whole.items()})  # strict, with the names of other stages
    taken = sbpc.full_state_dict(module)
    if torch.distributed.get_rank() == 0:
        assert taken.keys() == whole.keys() and all(taken[name].equal(whole[name] + 1) for name in whole)
    twin = copy.deepcopy(module)
    wrong = [name for name, p in twin.named_parameters() if not torch.equal(p.full_tensor(), whole[name] + 1)]
    with pytest.raises(PlanError, match="cannot be pickled"):
        pickle.dumps(module)
    wrong += [*largest(module), *cut_arguments(module), *accumulated(module, folder)]
    return {
        "misused": misused(module),
        "wrong": wrong,
        "figures": figures,
        "skipped": skipped_together(folder),
        "refused": refused_by_all(folder),
    }


def misused(module: Any) -> list[str]:
    """On a rank: what a module with stages says to what it was not planned for."""
    _, args = tower()
    wrong: list[tuple[str, Any]] = [
        ("Call module.step", lambda: module(*args)),
        ("another mode", lambda: (module.eval(), module.step(*args))),
        ("gradients are turned off", lambda: (module.train(), torch.no_grad()(module.step)(*args))),
        ("under autocast to bfloat16", lambda: torch.autocast("cpu", torch.bfloat16)(module.step)(*args)),
        ("argument 0 is", lambda: module.step(args[0][:2], args[1])),
        ("does not ask for a gradient", lambda: (module.requires_grad_(False), module.step(*args))),
        ("is torch.float32", lambda: (module.requires_grad_(True), module.float(), module.step(*args))),
    ]
    unsaid = []
    for said, call in wrong:
        try:
            call()
            unsaid.append(said)
        except PlanError as error:
            unsaid += [] if said in str(error) else [f"{said}: {error}"]
    return unsaid


def cut_arguments(module: Any) -> list[str]:
    """On a rank: whether a DTensor as an argument, and random numbers drawn once more, give another loss."""
    args, state = tower()[1], module.random_state()
    whole = module.step(*args)
    module.set_random_state(state)
    cut = [distribute_tensor(arg, init_device_mesh("cpu", (4,)), [Shard(0)]) for arg in args]
    again = module.step(*cut)
    return [] if torch.equal(whole, again) else [f"{whole} of whole arguments, {again} of DTensors"]


def accumulated(module: Any, folder: str) -> list[str]:
    """On a rank: whether gradients of three steps, two of them within `no_sync`, are others than those of three steps outside."""
    args, state, found = tower()[1], module.random_state(), []
    for within in (0, 2):
        module.zero_grad()
        module.set_random_state(state)
        for at in range(3):
            with module.no_sync() if at < within else contextlib.nullcontext():
                module.step(*args)
            if at < within and any(p.grad is not None for p in module.parameters()):
                return ["no_sync leaves a gradient"]
            if at < within:
                with pytest.raises(PlanError, match="keeps gradients of backwards within no_sync"):
                    Checkpoints(folder).save(99, module)
        found.append(
            {name: p.grad.full_tensor().clone() for name, p in module.named_parameters() if p.grad is not None}
        )
    return [
        name for name, value in found[0].items() if not torch.allclose(value, found[1][name], rtol=1e-10, atol=1e-14)
    ]


def largest(module: Any) -> list[str]:
    """On a rank: whether the norm of the largest element is not that over all stages, or what is infinite is not refused."""
    module.step(*tower()[1])
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    most = max(process_groups.from_all_ranks(max(float(g.full_tensor().abs().max()) for g in gradients)))
    norm = float(module.clip_grad_norm_(most / 2, float("inf")))
    now = max(process_groups.from_all_ranks(max(float(g.full_tensor().abs().max()) for g in gradients)))
    wrong = [f"{norm} and then {now}, not {most}"] if norm != most or abs(now - most / 2) > 1e-5 * most else []
    for none in (0, -torch.inf, torch.nan):  # that of stages is no norm of their norms where one has no gradient
        try:
            wrong.append(f"{none}: {module.clip_grad_norm_(1.0, none)}")
        except PlanError as error:
            wrong += [] if "norm_type is" in str(error) else [str(error)]
    if torch.distributed.get_rank() == 1:
        gradients[0].to_local().fill_(torch.nan)
    try:
        module.clip_grad_norm_(1.0, error_if_nonfinite=True)
        return [*wrong, "a norm of NaN is taken"]
    except PlanError as error:
        return wrong if "the norm of the gradients is nan" in str(error) else [*wrong, str(error)]


def skipped_together(folder: str) -> list[bool]:
    """On a rank: whether a step with a gradient of infinity on the last stage is skipped, and the next one is not."""
    module, args = parallel(folder, LEGS[-1][0])
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
    skipped = []
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(module.step(*args))
        if bad and torch.distributed.get_rank() == 3:
            next(p for p in module.parameters() if p.grad is not None).grad.to_local().fill_(torch.inf)
        before = [p.detach().to_local().clone() for p in module.parameters()]
        scaler.step(optimizer)
        scaler.update()
        skipped.append(all(torch.equal(old, p.to_local()) for old, p in zip(before, module.parameters())))
    return skipped


def refused_by_all(folder: str) -> str:
    """On a rank: what a checkpoint says to stages of which one alone has a parameter that it lacks."""
    module, _ = parallel(folder, LEGS[-1][0])
    if torch.distributed.get_rank() == 2:
        module.register_parameter("more", nn.Parameter(torch.ones(2)))
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(folder).load(module)
    return str(caught.value)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of checkpoints of four ranks, and what they found."""
    folder = tmp_path_factory.mktemp("job")
    for axes, options in (*LEGS, ({"x": 1}, {})):
        planned(axes, options).save(file_of(str(folder / "many"), axes))
    found = run_ranks(on_four_ranks, 4, str(folder / "many"))
    assert all(part == found[0] for part in found), found
    return folder, found[0]


def test_a_job_goes_on_over_stages_without_them_and_in_one_process_as_if_uninterrupted(
    job: tuple[Path, dict[str, Any]],
) -> None:
    folder, found = job
    expected = run_ranks(train_on, 1, str(folder / "one"), {"x": 1}, 8)[0]
    last = run_ranks(train_on, 1, str(folder / "many"), {"x": 1}, 2)[0]
    assert found["figures"] + last == pytest.approx(expected, rel=1e-10)
    assert min(expected[1::2]) > MOST


def test_weights_of_all_stages_are_converted_and_a_tied_one_is_written_once(job: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = job
    assert main(["convert", str(folder / "many"), "--step", "6", "-o", str(folder / "a.pt")]) == 0
    model, _ = tower()
    model.load_state_dict(torch.load(folder / "a.pt", weights_only=True))  # strict
    record = read_marker(folder / "many" / "step-000000006")
    assert "optimizer/table.weight/exp_avg" in record["blocks"] and len(record["blocks"]) == 12 + 3 * 9
    for name, (_, shape) in record["tensors"].items():
        assert sum(math.prod(piece.shape) for piece in record["blocks"][name]) == math.prod(shape), name


def test_stages_skip_a_step_together_and_refuse_together_what_was_not_planned(job: tuple[Path, dict[str, Any]]) -> None:
    _, found = job
    assert found["skipped"] == [True, False] and found["wrong"] == [] and found["misused"] == []
    assert found["refused"].startswith("more is float64 [2], ") and "lacks it" in found["refused"]


def lose_a_rank(plan: Any) -> tuple[str, float]:
    """On a rank: the last one is killed in the middle of a step's schedule; what the others say, and after how many seconds they end."""
    model, args = models.mlp(layers=4)
    module: Any = sbpc.parallelize(model, plan)
    module.step(*args)
    part, done = loop_runner.Step.part, []

    def counted(step: Any, *what: Any) -> None:
        done.append(what)
        if torch.distributed.get_rank() == 3 and len(done) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        part(step, *what)

    loop_runner.Step.part = counted  # type: ignore[method-assign]
    start = time.monotonic()
    with pytest.raises(LostRankError) as caught:
        module.step(*args)
    process_groups.stop()
    return text_of(caught.value), time.monotonic() - start


def test_a_rank_killed_in_the_middle_of_the_schedule_ends_all_stages_at_once() -> None:
    *others, killed = run_ranks(
        lose_a_rank, 4, sbpc.plan(*models.mlp(layers=4), Mesh(pipe=4), stages="pipe", microbatches=8)
    )
    assert killed is None
    for text, seconds in others:
        assert text.startswith("rank 3 does not answer any more; its last sign of life came from ") and seconds < 20


# of its parts each has a test: a restart under torchrun, a death within a schedule, going on from a checkpoint
@pytest.mark.prove
def test_a_killed_rank_of_a_stage_starts_again_from_the_last_checkpoint_and_ends_with_the_same_loss(
    tmp_path: Path,
) -> None:
    example = runpy.run_path(str(PIPELINE))
    torch.manual_seed(0)
    model, losses = example["Net"](), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(8):
        optimizer.zero_grad()
        loss = model(*example["batch"](step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses[step + 1] = loss.item()
    found = run_job(tmp_path / "saved", 8, 3, kill=5, ranks=4, script=PIPELINE)
    assert found.killed == 5 and found.starts[0] == 1 and found.starts[-1] in (1, 4, 7) and not found.left
    assert {step: float(text) for step, text in found.losses.items()} == pytest.approx(losses, abs=1e-5)
