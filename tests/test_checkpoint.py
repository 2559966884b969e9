"""Checkpoints: saved on one mesh and loaded on another, training goes on as if it had not been interrupted."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.errors import CheckpointError
from sbpc.mesh.layout import Layout, broadcast
from sbpc.runtime.module import parallelize
from sbpc.runtime.start import process_groups
from sbpc.runtime.state import block_files
from sbpc.runtime.state.blocks import block_of
from sbpc.runtime.state.checkpoint import Checkpoints, weights_in, whole_steps
from sbpc.runtime.state.dtensors import sharded
from sbpc.runtime.state.weight_files import read_tensors, save_weights, weights_of
from tests import models
from tests.processes import run_ranks
from tests.test_plan import refused

SHAPES = [(7, 5), (2, 3), (8, 8), (1,), ()]
LAYOUTS = ["[B, B]", "[S(0), B]", "[S(0), S(0)]", "[S(0), S(0)] S(0)@y>x", "[S(1), S(0)]", "[S(1), S(1)] S(1)@y>x"]


class Stored(nn.Module):
    """A tensor of every shape in several layouts."""

    def __init__(self, mesh: Mesh, turn: int, fill: float) -> None:
        super().__init__()
        names = [text for text in LAYOUTS if len(mesh.axes) == 2] or ["[S(0)]", "[S(1)]", "[B]"]
        for number, shape in enumerate(SHAPES):
            for at in range(len(LAYOUTS)):
                layout = Layout.parse(names[(at + turn) % len(names)], mesh.axes)
                layout = layout if all(dim < len(shape) for dim in layout.cuts) else broadcast(mesh.axes)
                values = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * number + at
                stored = nn.Parameter(sharded(values * fill, layout, mesh, torch.device("cpu")))
                self.register_parameter(f"p{number}_{at}", stored)


def save_layouts(folder: str) -> str:
    """On a rank: save tensors in many layouts."""
    mesh = Mesh(x=2, y=2)
    process_groups.bind(mesh)
    checkpoints = Checkpoints(folder)
    checkpoints.save(3, Stored(mesh, 0, 1.0))
    checkpoints.wait()
    process_groups.stop()
    return "saved"


def load_layouts(folder: str, axes: dict[str, int]) -> list[str]:
    """On a rank: load them in other layouts on another mesh; the names of those that came out wrong."""
    mesh = Mesh(**axes)
    process_groups.bind(mesh)
    found, expected = Stored(mesh, 2, 0.0), Stored(mesh, 2, 1.0)
    assert Checkpoints(folder).load(found) == 3
    pairs = zip(found.named_parameters(), expected.parameters())
    wrong = [name for (name, one), other in pairs if not torch.equal(one.to_local(), other.to_local())]  # type: ignore[operator]
    saved = weights_in(folder).state_dict()
    wrong += [name for name, value in found.named_parameters() if not torch.equal(value.full_tensor(), saved[name])]  # type: ignore[operator]
    process_groups.stop()
    return wrong


def test_blocks_of_any_layout_are_read_in_any_other_layout_on_any_mesh(tmp_path: Path) -> None:
    assert run_ranks(save_layouts, 4, str(tmp_path)) == ["saved"] * 4
    assert run_ranks(load_layouts, 3, str(tmp_path), {"x": 3}) == [[]] * 3


@pytest.mark.prove
@pytest.mark.parametrize("axes", [{"x": 2, "y": 2}, {"x": 3, "y": 2}, {"x": 2, "y": 3}, {"x": 1, "y": 2}], ids=str)
def test_blocks_are_read_on_more_meshes(tmp_path: Path, axes: dict[str, int]) -> None:
    assert run_ranks(save_layouts, 4, str(tmp_path)) == ["saved"] * 4
    ranks = Mesh(**axes).ranks
    assert run_ranks(load_layouts, ranks, str(tmp_path), axes) == [[]] * ranks


def batches(count: int) -> list[tuple[torch.Tensor, ...]]:
    """Different batches for the MLP of the tests."""
    torch.manual_seed(1)
    return [tuple(torch.randn_like(arg) for arg in models.mlp()[1]) for _ in range(count)]


def optimizer_of(module: nn.Module, name: str) -> tuple[torch.optim.Optimizer, Any]:
    """An optimizer with a schedule."""
    kinds: dict[str, Any] = {"adamw": torch.optim.AdamW, "momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)}
    optimizer = kinds[name](module.parameters(), lr=0.01)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def train_on(folder: str, plan: sbpc.Plan | None, name: str, steps: int) -> list[float]:
    """Train `steps` steps on from the last checkpoint, and save one; on one device without a plan."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, _ = models.mlp()
    if plan is not None:
        model = parallelize(model, plan)
    optimizer, schedule = optimizer_of(model, name)
    checkpoints = Checkpoints(folder, asynchronous=steps % 2 == 0)
    start = checkpoints.load(model, optimizer)
    if start:
        schedule.load_state_dict(checkpoints.extra["schedule"])
    losses = []
    for number in range(start, start + steps):
        optimizer.zero_grad()
        loss = model(*batches(number + 1)[number]).square().sum()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    checkpoints.save(start + steps, model, optimizer, extra={"schedule": schedule.state_dict()})
    checkpoints.wait()
    if plan is not None:
        process_groups.stop()
    return losses


@pytest.mark.parametrize("name", ["adamw", pytest.param("momentum", marks=pytest.mark.prove)])
def test_training_goes_on_over_2_then_4_then_3_ranks_as_if_uninterrupted(tmp_path: Path, name: str) -> None:
    expected = train_on(str(tmp_path / "one"), None, name, 8)
    losses: list[float] = []
    for axes, steps in (({"x": 2}, 3), ({"x": 2, "y": 2}, 2), ({"x": 3}, 3)):
        plan = sbpc.plan(*models.mlp(), Mesh(**axes))
        found = run_ranks(train_on, plan.mesh.ranks, str(tmp_path / "many"), plan, name, steps)
        assert all(part == found[0] for part in found), found
        losses += found[0]
    assert losses == pytest.approx(expected, rel=1e-6)
    one, many = weights_in(tmp_path / "one").state_dict(), weights_in(tmp_path / "many").state_dict()
    model, _ = models.mlp()
    model.load_state_dict(many)
    assert one.keys() == many.keys() and all(torch.allclose(one[key], many[key], rtol=1e-6) for key in one)


def killed_while_saving(folder: str) -> str:
    """On a rank: save twice; rank 1 is killed in the middle of the second."""
    mesh = Mesh(x=2)
    process_groups.bind(mesh)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, Stored(mesh, 0, 1.0))
    checkpoints.wait()
    if dist.get_rank() == 1:
        kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        block_files.bytes_of = kill  # type: ignore[assignment]
    checkpoints.save(2, Stored(mesh, 0, 2.0))
    try:
        checkpoints.wait()
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    found = run_ranks(killed_while_saving, 2, str(tmp_path))
    assert found[1] is None and "was not written" in found[0], found
    assert whole_steps(tmp_path) == [1] and (tmp_path / "step-000000002").is_dir()
    assert torch.equal(weights_in(tmp_path).state_dict()["p2_0"], torch.arange(64.0).reshape(8, 8) + 200)
    model = nn.ParameterDict(weights_in(tmp_path).state_dict())
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.load(model) == 1
    checkpoints.save(3, model)
    checkpoints.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "step-000000001", "step-000000003"]


def test_the_last_checkpoints_are_kept_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.load(model, optimizer) == 0
    for step in range(1, 5):
        checkpoints.save(step, model, optimizer, extra={"place": (step, 0.5)})
    checkpoints.wait()
    assert whole_steps(tmp_path) == [3, 4]
    assert checkpoints.load(model, optimizer, step=3) == 3 and checkpoints.extra == {"place": (3, 0.5)}
    assert "weight is float32 [4, 3]" in refused(CheckpointError, lambda: checkpoints.load(nn.Linear(3, 4)))
    sgd = torch.optim.SGD(model.parameters())
    assert "saved with AdamW" in refused(CheckpointError, lambda: checkpoints.load(model, sgd))
    assert "no checkpoint" in refused(CheckpointError, lambda: checkpoints.load(model, step=1))
    assert "which the model has not" in refused(
        CheckpointError, lambda: checkpoints.save(5, nn.Linear(1, 1), optimizer)
    )
    refused(CheckpointError, lambda: weights_in(tmp_path / "nothing").state_dict())
    assert block_of(model.weight).shape == (2, 3)


def test_a_save_that_does_not_block_writes_what_was_there_when_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, held, model = block_files.write, threading.Event(), nn.Linear(3, 2)
    monkeypatch.setattr(block_files, "write", lambda *args: (held.wait(20), write(*args))[1])
    checkpoints, before = Checkpoints(tmp_path, asynchronous=False), copy.deepcopy(model.state_dict())
    checkpoints.save(1, model, block=False)
    nn.init.zeros_(model.weight)
    assert whole_steps(tmp_path) == []
    held.set()
    checkpoints.save(2, model)  # waits for the first
    assert whole_steps(tmp_path) == [1, 2] and checkpoints.load(model, step=1) == 1
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    checkpoints.folder = Path("/proc/none")
    checkpoints.save(3, model, block=False)
    assert "was not written" in refused(CheckpointError, checkpoints.wait)


def dropping() -> models.Model:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 4)), (torch.ones(6, 8),)


def drop_on(folder: str, plan: sbpc.Plan, steps: int) -> list[float]:
    """On a rank: train a model with dropout on from the last checkpoint."""
    model, args = dropping()
    module = parallelize(model, plan)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    checkpoints = Checkpoints(folder)
    start = checkpoints.load(module, optimizer)
    losses = []
    for _ in range(steps):
        loss = module(*args).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    checkpoints.save(start + steps, module, optimizer)
    checkpoints.wait()
    process_groups.stop()
    return losses


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    plan = sbpc.plan(*dropping(), Mesh(x=2))
    expected, first, second = (
        run_ranks(drop_on, 2, str(tmp_path / name), plan, steps)[0]
        for name, steps in (("one", 4), ("two", 2), ("two", 2))
    )
    assert first + second == expected
    assert len(set(expected)) == 4


def test_the_command_line_converts_weights_between_every_two_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    saved, wanted = tmp_path / "saved", model.state_dict()
    checkpoints = Checkpoints(saved)
    checkpoints.save(3, nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    checkpoints.save(7, model, torch.optim.AdamW(model.parameters()))
    checkpoints.wait()
    chain = [
        saved,
        tmp_path / "a.safetensors",
        tmp_path / "b.pt",
        tmp_path / "again",
        tmp_path / "c.pth",
        tmp_path / "d.safetensors",
    ]
    for source, destination in itertools.pairwise(chain):
        assert main(["convert", str(source), "-o", str(destination)]) == 0
    assert "7 tensors, 17 elements" in capsys.readouterr().out
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert Checkpoints(tmp_path / "again").load(other) == 0 and whole_steps(tmp_path / "again") == [0]
    for found in (other.state_dict(), torch.load(chain[4], weights_only=True), read_tensors(chain[5])):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert main(["convert", str(saved), "--step", "3", "-o", str(tmp_path / "e.pt")]) == 0
    save_weights(weights_of(Tied()), tmp_path / "tied.safetensors")
    capsys.readouterr()
    for destination, left in (("g.safetensors", True), ("g.pt", False)):
        assert main(["convert", str(tmp_path / "tied.safetensors"), "-o", str(tmp_path / destination)]) == 0
        assert ("no buffers that are not persistent, as scale: write *.pt" in capsys.readouterr().out) == left
    Tied().load_state_dict(torch.load(tmp_path / "g.pt", weights_only=True))
    assert not torch.equal(torch.load(tmp_path / "e.pt", weights_only=True)["0.weight"], wanted["0.weight"])
    (tmp_path / "bad.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    capsys.readouterr()
    for source, said in (
        ("bad.pt", "holds no weights"),
        ("nothing", "holds no checkpoint"),
        ("none.safetensors", "holds no tensors"),
    ):
        assert main(["convert", str(tmp_path / source), "-o", str(tmp_path / "f.pt")]) == 2
        assert said in capsys.readouterr().err


class Tied(nn.Module):
    """A tied head, a module under two names, a buffer that a state_dict leaves out, one under two names, a frozen bias."""

    def __init__(self, other: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.norm = self.again = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.randn(4), persistent=False)
        self.register_buffer("shift", torch.randn(4))
        self.twin = nn.Module()
        self.twin.register_buffer("shift", self.shift)
        self.bias = nn.Parameter(torch.randn(6), requires_grad=False)
        self.head.weight = self.table.weight
        if other:  # the head comes first
            self._modules = dict(reversed(self._modules.items()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.again(self.norm(self.table(x)).relu()) * self.scale + self.shift + self.twin.shift
        return (self.head(h) + self.bias).square().mean()


TOKENS = (torch.arange(12) % 6,)


def train_tied(folder: str, plan: sbpc.Plan | None, steps: int) -> tuple[list[float], list[str]]:
    """Train it on from the last checkpoint and save one; the losses and the names of its state."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model: nn.Module = Tied()
    if plan is not None:
        model = parallelize(model, plan)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    checkpoints = Checkpoints(folder)
    start, losses = checkpoints.load(model, optimizer), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*TOKENS)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    checkpoints.save(start + steps, model, optimizer)
    checkpoints.wait()
    if plan is not None:
        process_groups.stop()
    return losses, list(model.state_dict())


def test_tied_weights_and_buffers_go_over_2_then_3_ranks_and_back_to_one_device(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    expected, names = train_tied(str(tmp_path / "one"), None, 6)
    losses: list[float] = []
    for ranks in (2, 3):
        plan = sbpc.plan(Tied(), TOKENS, Mesh(x=ranks))
        found = run_ranks(train_tied, ranks, str(tmp_path / "many"), plan, 3)
        assert all(part == (found[0][0], names) for part in found), found
        losses += found[0][0]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert main(["convert", str(tmp_path / "many"), "-o", str(tmp_path / "a.pt")]) == 0
    model, (last, _) = Tied(), train_tied(str(tmp_path / "one"), None, 1)
    model.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))  # strict, under all names
    torch.manual_seed(0)
    model.scale = Tied().scale
    assert model(*TOKENS).item() == pytest.approx(last[0], rel=1e-6)


def names_in_file(path: str) -> list[str]:
    """On a rank: the names in the state of a module from an exported file."""
    found = list(sbpc.load_module(path).state_dict())
    process_groups.stop()
    return found


def test_module_of_an_exported_file_has_the_names_of_the_model_in_its_state_dict(tmp_path: Path) -> None:
    model, path = Tied(), tmp_path / "model.sbpc"
    sbpc.plan(model, TOKENS, Mesh(x=2)).export(path)
    save_weights(weights_of(model), path.with_suffix(".safetensors"))
    found = run_ranks(names_in_file, 2, str(path))[0]
    assert sorted(found) == sorted(model.state_dict())


@pytest.mark.parametrize("other", [False, True], ids=["the same order", "another order"])
def test_every_form_of_weights_knows_tied_names_and_what_a_state_dict_leaves_out(
    tmp_path: Path, other: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Tied()
    checkpoints = Checkpoints(tmp_path / "saved")
    checkpoints.save(3, model)
    checkpoints.wait()
    names = ["saved", "a.safetensors", "b.pt", "again", "c.safetensors", "d.pt"]
    for source, destination in itertools.pairwise(tmp_path / name for name in names):
        assert main(["convert", str(source), "-o", str(destination)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("written")]
    assert "a.safetensors  9 tensors, 7 more names of tied ones" in said[0] and "b.pt  9 tensors, 7 more" in said[1]
    assert "again  8 tensors, 7 more" in said[2]  # a .pt has no scale
    wanted = model.state_dict()
    for name in ("b.pt", "d.pt"):
        found = torch.load(tmp_path / name, weights_only=True)
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert found["head.weight"].data_ptr() == found["table.weight"].data_ptr()
    for folder in ("saved", "again"):
        loaded = Tied(other)
        kept = loaded.scale.clone()
        Checkpoints(tmp_path / folder).load(loaded)
        assert all(torch.equal(value, wanted[key]) for key, value in loaded.state_dict().items())
        assert torch.equal(loaded.scale, model.scale if folder == "saved" else kept)


def test_checkpoint_of_tied_weights_is_refused_by_a_model_that_has_untied_them(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, Tied())
    checkpoints.wait()
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.randn(6, 4))
    assert "head.weight is float32 [6, 4]" in refused(CheckpointError, lambda: checkpoints.load(untied))


def spoilt(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the bytes of a file."""
    path.write_bytes(change(path.read_bytes()))


DAMAGES: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("state.json", lambda data: data.replace(b"[2, 3]", b"[2, 4]"), "state.json is damaged"),
    ("state.json", lambda data: data.replace(b"float32", b"float64"), "state.json is damaged"),
    ("state.json", lambda data: data.replace(b"tensors", b"tensor_"), "state.json is damaged"),
    ("state.json", lambda data: data[:50], "is no checkpoint: "),
    ("*.blocks", lambda data: data[: len(data) // 2], "bytes, not "),
    ("*.blocks", lambda data: b"", "it has 0 bytes, not "),
    ("*.blocks", lambda data: b"x" + data[1:], "it does not begin as this save does"),
    (
        "*.blocks",
        lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
        "the block at byte 47 is not what was written",
    ),
]


def saved_step(folder: Path, step: int, fill: float, keep: int = 2) -> Path:
    """Save a layer full of one number with its optimizer, by a job of its own; the folder of the checkpoint."""
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, fill)
    optimizer = torch.optim.AdamW([model.bias, model.weight])
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    nn.init.constant_(model.weight, fill)
    checkpoints = Checkpoints(folder, keep=keep)
    checkpoints.save(step, model, optimizer, extra={2: 1.5, 10: None})
    checkpoints.wait()
    return folder / f"step-{step:09d}"


@pytest.mark.parametrize(("name", "change", "said"), DAMAGES)
def test_damaged_checkpoint_is_refused_in_two_lines_and_the_one_before_is_loaded(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], said: str
) -> None:
    (path,) = saved_step(tmp_path, 1, 1.0).glob(name)
    spoilt(path, change)
    model, checkpoints = nn.Linear(3, 2), Checkpoints(tmp_path)
    before = model.weight.clone()
    optimizer = torch.optim.AdamW([model.bias, model.weight])
    reads = [lambda: weights_in(tmp_path), lambda: checkpoints.load(model, optimizer, step=1)]
    for read in reads:
        message = refused(CheckpointError, read)
        assert said in message and message.count("\n") == 1, message
    with pytest.warns(UserWarning, match="It is left out"):
        message = refused(CheckpointError, lambda: checkpoints.load(model, optimizer))
    assert said in message and torch.equal(model.weight, before) and not optimizer.state
    (path,) = saved_step(tmp_path, 3, 3.0).glob(name)
    saved_step(tmp_path, 2, 2.0, keep=3)
    spoilt(path, change)
    with pytest.warns(UserWarning, match="step-000000003"):
        assert checkpoints.load(model, optimizer) == 2
    assert model.weight.eq(2.0).all()


def test_weights_alone_are_no_checkpoint_of_an_optimizer(tmp_path: Path) -> None:
    model, checkpoints = nn.Linear(3, 2), Checkpoints(tmp_path)
    checkpoints.save(0, model)
    message = refused(CheckpointError, lambda: checkpoints.load(model, torch.optim.AdamW(model.parameters())))
    assert "holds weights alone, nothing of an optimizer" in message
    assert checkpoints.load(model) == 0


def test_an_optimizer_keeps_what_it_knows_of_a_parameter_besides_tensors(tmp_path: Path) -> None:
    model, checkpoints = nn.Linear(3, 2), Checkpoints(tmp_path)
    first, second = (torch.optim.SGD(model.parameters(), lr=float("inf")) for _ in range(2))
    known = {"step": 3, "table": {10: (1, None), 9: [2.5]}, "best": float("-inf")}
    first.state[model.weight] = dict(known)
    checkpoints.save(1, model, first)
    assert checkpoints.load(model, second) == 1 and second.state[model.weight] == known
    first.state[model.weight] = {"history": [torch.ones(2)]}
    assert "history of weight holds tensors" in refused(CheckpointError, lambda: checkpoints.save(2, model, first))
