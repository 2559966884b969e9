"""Checkpoints that could look whole and not be: ranks that disagree, two jobs in a folder, kills at every moment, forged files."""

from __future__ import annotations

import itertools
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sbpc
from sbpc import Mesh
from sbpc.errors import CheckpointError, SbpcError
from sbpc.mesh.layout import Layout
from sbpc.runtime.start import process_groups
from sbpc.runtime.state import block_files
from sbpc.runtime.state.checkpoint import Checkpoints, weights_in, whole_steps
from sbpc.runtime.state.checkpoint_record import digest, read_marker
from sbpc.runtime.state.dtensors import sharded
from tests import models
from tests.processes import forked, run_ranks
from tests.test_plan import refused


@dataclass
class Busy:
    def __post_init__(self) -> None:
        raise AssertionError("code of a class that a checkpoint names runs")


def filled(number: float, width: int = 4) -> nn.Module:
    """A layer full of one number."""
    model = nn.Linear(width, width)
    for parameter in model.parameters():
        nn.init.constant_(parameter, number)
    return model


def saved(folder: Path, step: int, number: float, **options: Any) -> Path:
    """Save such a layer; the folder of the checkpoint."""
    checkpoints = Checkpoints(folder, **options)
    checkpoints.save(step, filled(number))
    checkpoints.wait()
    return folder / f"step-{step:09d}"


def numbers_in(folder: Path, step: int | None = None) -> set[float]:
    """The numbers in the weights of a checkpoint."""
    return {number for tensor in weights_in(folder, step).tensors.values() for number in tensor.flatten().tolist()}


def said_by(call: Callable[[], Any]) -> str:
    """What an error says, nothing if there is none."""
    try:
        call()
    except SbpcError as error:
        return str(error)
    return ""


def disagree(folder: str, plan: sbpc.Plan) -> list[str]:
    """On a rank: what is said where the ranks save other steps, after other updates, or after other training steps."""
    rank, (model, args) = dist.get_rank(), models.mlp()
    module = sbpc.parallelize(model, plan)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    said = []
    for kind, asynchronous in (
        ("first update", True),
        ("update", True),
        ("training", True),
        ("step", True),
        ("step", False),
        ("none", True),
    ):
        module.step(*args)
        for _ in range(1 + rank * ((kind == "none") - (kind == "first update"))):
            optimizer.step()
        # as of one that left out a batch, and met the others' next one
        vars(module)["_sbpc_weights"].steps -= rank * (kind == "training")
        checkpoints = Checkpoints(folder, asynchronous=asynchronous)
        at = 3 + rank * (kind == "step")
        said.append(said_by(partial(checkpoints.save, at, module, optimizer)) or said_by(checkpoints.wait))
        vars(module)["_sbpc_weights"].steps += rank * (kind == "training")
        assert kind == "none" or not Path(folder).exists()
    return said


def test_ranks_that_are_not_at_the_same_step_save_nothing_and_all_say_so(tmp_path: Path) -> None:
    plan = sbpc.plan(*models.mlp(), Mesh(x=2), loss=torch.sum)
    found = run_ranks(disagree, 2, str(tmp_path / "saved"), plan)
    assert found[0] == found[1], found
    whats = ["", "updates of group 0 2 on rank 0, 1 on rank 1", "training steps run 3 on rank 0, 2 on rank 1"]
    whats += ["step 3 on rank 0, 4 on rank 1"] * 2
    for text, what in zip(found[0], whats):
        begin = (
            f"the ranks save states of other moments, so nothing is saved: {what}\n"
            if what
            else "the ranks have only a part of optimizer/"
        )
        assert text.startswith(begin), text
    assert found[0][-1] == "" and whole_steps(tmp_path / "saved") == [3]


def left_alone(folder: str) -> tuple[str, float]:
    """On a rank: what the first one is told that saves alone, and after how many seconds."""
    process_groups.waiting["seconds"] = 1.0
    checkpoints, begun = Checkpoints(folder), time.monotonic()
    if dist.get_rank() == 0:
        checkpoints.save(1, filled(1.0))
        return said_by(checkpoints.wait), time.monotonic() - begun
    time.sleep(3)
    return "", 0.0


def test_a_rank_that_saves_alone_is_told_so_within_the_timeout(tmp_path: Path) -> None:
    (text, seconds), _ = run_ranks(left_alone, 2, str(tmp_path))
    assert "was not written" in text and "has not called save within 1 s" in text and 0.5 < seconds < 3, (text, seconds)
    assert not list(tmp_path.iterdir())


def two_jobs(folder: str) -> list[Any]:
    """On a rank, which is a job of its own: what is said when both save to a folder, and after the first has been killed."""
    rank, place = dist.get_rank(), Path(folder)
    dist.barrier()  # else the first to stop cuts off the other one, which still connects to it
    process_groups.stop()
    ready, said = place.with_name("ready"), []
    if rank == 0:
        checkpoints = [Checkpoints(place, keep=9), Checkpoints(str(place) + "/.", keep=9)]
        for step, each in ((1, checkpoints[0]), (2, checkpoints[1]), (3, checkpoints[0])):
            each.save(step, filled(1.0))
            each.wait()
        if os.fork() == 0:  # a child that outlives it
            time.sleep(8)
            os._exit(0)
        ready.write_text(str(os.getpid()))
        while ready.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    while not ready.exists() or not ready.read_text():
        time.sleep(0.01)
    pid, checkpoints = ready.read_text(), [Checkpoints(place, keep=9)]
    said.append(checkpoints[0].load(filled(0.0)))  # reading needs no lock
    checkpoints[0].save(2, filled(2.0))
    said += [pid, said_by(checkpoints[0].wait), whole_steps(place), numbers_in(place)]
    ready.unlink()
    for _ in range(100):
        checkpoints[0].save(4, filled(2.0))
        if not said_by(checkpoints[0].wait):
            break
        time.sleep(0.02)
    return [*said, whole_steps(place), numbers_in(place)]


def test_a_folder_belongs_to_one_job_until_its_process_ends(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    first, second = run_ranks(two_jobs, 2, str(folder))
    assert first is None
    step, pid, said, before, ones, after, twos = second
    assert said.startswith(f"{folder} belongs to another job: process {pid} on ") and ", since 20" in said, said
    assert (step, before, ones) == (3, [1, 2, 3], {1.0}) and (after, twos) == ([1, 2, 3, 4], {2.0})


def restarted(folder: str, store: str) -> tuple[list[int], str]:
    """On a rank: save, leave the process group and join one again, as a job that starts again in the same processes; the last one's
    disk is full.
    """
    rank, kept = dist.get_rank(), []
    for attempt in range(2):
        if attempt:
            process_groups.stop()
            dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
        kept.append(Checkpoints(folder))
        kept[-1].save(kept[-1].load(filled(0.0)) + 1, filled(1.0))
        kept[-1].wait()

    def full(tensor: torch.Tensor) -> memoryview:
        raise OSError(28, "No space left on device")

    mesh = Mesh(x=2)
    process_groups.bind(mesh)
    model = nn.ParameterDict(
        {"weight": sharded(torch.ones(4), Layout.parse("[S(0)]", mesh.axes), mesh, torch.device("cpu"))}
    )
    if rank == 1:
        block_files.bytes_of = full
    kept[-1].save(3, model)
    return whole_steps(Path(folder)), said_by(kept[-1].wait)


def test_a_job_saves_on_after_a_restart_in_the_same_processes_and_all_ranks_learn_that_one_cannot_write(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(restarted, 2, str(tmp_path / "saved"), str(tmp_path / "store"))
    assert first == second and first[0] == [1, 2], (first, second)
    assert (
        "was not written: rank 1: OSError: [Errno 28] No space left on device\n  The one before it is whole" in first[1]
    )


def test_a_folder_that_was_removed_is_locked_anew(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "saved")
    for step in (1, 2):
        checkpoints.save(step, filled(1.0))
        checkpoints.wait()
        lock = checkpoints.lock
        assert lock is not None and lock.holds() and whole_steps(tmp_path / "saved") == [step]
        shutil.rmtree(tmp_path / "saved")


def test_blocks_of_another_save_are_refused(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "one", 1, 1.0), saved(tmp_path / "two", 1, 2.0)
    (ours,), (theirs,) = one.glob("*.blocks"), two.glob("*.blocks")
    assert ours.name != theirs.name and ours.stat().st_size == theirs.stat().st_size
    shutil.copy(theirs, ours)
    assert "it does not begin as this save does" in refused(CheckpointError, lambda: weights_in(tmp_path / "one"))


def test_what_does_not_read_back_as_it_was_written_is_not_kept_and_the_one_before_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 1.0, keep=1)
    sync = os.fsync

    def spoil(descriptor: int) -> None:
        sync(descriptor)
        for path in tmp_path.glob("step-000000002/*.blocks"):
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(os, "fsync", spoil)
    message = refused(CheckpointError, lambda: saved(tmp_path, 2, 2.0, keep=1))
    assert "was not written: rank 0: CheckpointError: " in message and "is not what was written" in message
    monkeypatch.undo()
    write = block_files.write

    def elsewhere(*args: Any) -> tuple[dict[str, block_files.Piece], int]:
        written = write(*args)
        next(tmp_path.glob("step-000000002/*.blocks")).unlink()  # as on a machine that has another folder of this name
        return written

    monkeypatch.setattr(block_files, "write", elsewhere)
    message = refused(CheckpointError, lambda: saved(tmp_path, 2, 2.0, keep=1))
    assert "FileNotFoundError" in message and message.endswith("\n  Name a folder that all ranks share."), message
    monkeypatch.undo()
    assert whole_steps(tmp_path) == [1] and numbers_in(tmp_path) == {1.0}
    saved(tmp_path, 2, 2.0, keep=1)
    assert whole_steps(tmp_path) == [2] and numbers_in(tmp_path) == {2.0}


def test_going_back_never_removes_what_was_just_saved(tmp_path: Path) -> None:
    for keep, steps in ((1, [5]), (2, [5, 20]), (4, [5, 10, 20])):
        folder = tmp_path / str(keep)
        for step in (10, 20, 5):
            saved(folder, step, float(step), keep=keep)
        assert whole_steps(folder) == steps and numbers_in(folder, 5) == {5.0}


def killed_everywhere(folder: Path) -> int:
    """In a process of its own: save over a checkpoint, killed at each of its calls to the file system in turn; how many there are."""
    torch.set_num_threads(1)
    killed = 0
    for turn, (step, keep) in enumerate([(2, 1), (1, 1)]):
        for count in range(1, 200):
            place = folder / f"{turn}-{count}"
            saved(place, 1, 1.0)
            pid = os.fork()
            if pid == 0:
                seen = itertools.count(1)

                def tick(event: str, args: Any, seen: Any = seen, count: int = count) -> None:
                    if (
                        event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
                        and next(seen) == count
                    ):
                        os.kill(os.getpid(), signal.SIGKILL)

                sys.addaudithook(tick)
                try:
                    saved(place, step, 2.0, keep=keep)
                    os._exit(0)
                finally:
                    os._exit(1)
            ended = os.waitpid(pid, 0)[1]
            there = whole_steps(place)
            numbers = [numbers_in(place, each) for each in there]
            assert there and all(each in ({1.0}, {2.0}) for each in numbers), (turn, count, there, numbers)
            assert ended or numbers[-1] == {2.0}, (turn, count, there)
            saved(place, 3, 3.0, keep=1)
            assert sorted(path.name for path in place.iterdir()) == ["lock", "step-000000003"], list(place.iterdir())
            if not ended:
                break
            assert os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL, (turn, count, ended)
            killed += 1
    return killed


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    assert forked(killed_everywhere, tmp_path) > 20


def read_and_write(folder: str) -> tuple[int, list[str]]:
    """On a rank, which is a job of its own: one saves the same two steps again and again, the other loads; how often, and what was wrong."""
    rank, place, wrong, count = dist.get_rank(), Path(folder), [], 0
    dist.barrier()  # else the first to stop cuts off the other one, which still connects to it
    process_groups.stop()
    done = place.with_name("done")
    if rank == 0:
        for turn in range(1, 60):
            saved(place, turn % 3, float(turn), keep=1)
        done.touch()
    while not done.exists():
        model = filled(0.0)
        try:
            step = Checkpoints(place).load(model)
        except CheckpointError as error:
            wrong += [] if "load again before you go on" in str(error) or "step-" in str(error) else [str(error)]
            continue
        numbers = {number for parameter in model.parameters() for number in parameter.flatten().tolist()}
        first = not count and numbers == {0.0}  # before anything is saved
        wrong += (
            []
            if first or (len(numbers) == 1 and 0.0 not in numbers and next(iter(numbers)) % 3 == step)
            else [f"{step}: {numbers}"]
        )
        count += not first
    return count, wrong


def test_a_job_that_loads_while_another_saves_gets_one_checkpoint_or_none(tmp_path: Path) -> None:
    _, (count, wrong) = run_ranks(read_and_write, 2, str(tmp_path / "saved"))
    assert count > 3 and wrong == [], (count, wrong)


def forged(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what `state.json` says, with its digest."""
    record = json.loads((folder / "state.json").read_text())
    record.pop("sha256")
    change(record)
    (folder / "state.json").write_text(json.dumps(record | {"sha256": digest(record)}))


FORGED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda r: r.update(version=1), "is a checkpoint of version 1, this sbpc reads version 2"),
    (lambda r: r.update(step=2), "its step is none that"),
    (lambda r: r.update(step=True), "its step is none that"),
    (lambda r: r.pop("random"), "its random is none that"),
    (lambda r: r.update(save="../../../../etc/passwd"), "its save is none that"),
    (lambda r: r.update(save="0" * 32), "FileNotFoundError"),
    (lambda r: r.update(files=[-1]), "its files is none that"),
    (
        lambda r: r["tensors"].update({"model/weight": ["float32", [1 << 40, 1 << 40]]}),
        "its blocks are not those of 'model/weight'",
    ),
    (lambda r: r["tensors"].update({"model/weight": ["__import__", [4, 4]]}), "its tensors is none that"),
    (lambda r: r["tensors"].update({"model/weight": ["float64", [4, 4]]}), "its blocks do not lie one after another"),
    (lambda r: r["tensors"].update({"model/more": ["float32", [1 << 40]]}), "its blocks are not those of 'model/more'"),
    (lambda r: r["blocks"]["model/weight"][0].__setitem__(2, 7), "its blocks are not those of 'model/weight'"),
    (lambda r: r["blocks"]["model/weight"][0].__setitem__(2, -1), "its blocks is none that"),
    (lambda r: r["blocks"]["model/weight"][0].__setitem__(3, 1 << 62), "its blocks do not lie one after another"),
    (lambda r: r["blocks"]["model/weight"][0].__setitem__(0, [1, 0]), "its blocks are not those of 'model/weight'"),
    (lambda r: r["files"].__setitem__(0, r["files"][0] + 4096), "its blocks do not lie one after another"),
    (lambda r: grow(r, 1 << 40), "bytes, not "),
    (lambda r: r["optimizer"].update(plain={"weight": 3}), "its optimizer is none that"),
    (
        lambda r: r["optimizer"].update(groups=[{"names": [], "settings": ["dict", [["params", 1]]], "values": []}]),
        "its optimizer is none",
    ),
    (lambda r: r.update(tied={"a": ["b"]}), "its tied is none that"),
    (lambda r: r.update(random={"step": 1, "seed": 1 << 70}), "its random is none that"),
    (lambda r: r.update(tied={"a": "b"}), "a tensor is tied to 'b', which is none of its tensors"),
    (lambda r: r["tensors"].update({"model/weight": ["quint8", [4, 16]]}), "its tensors is none that"),
    (lambda r: r["blocks"].update(more=[]), "it has blocks of 'more', but no such tensor"),
    (lambda r: r["optimizer"].update({"class": "a\nb"}), "its optimizer is none"),
    (lambda r: twice(r["blocks"]["model/weight"]), "its blocks are not those of 'model/weight'"),
]


def twice(pieces: list[Any]) -> None:
    """Say of the second half of a tensor's block that it is the first one as well."""
    start, _, rank, offset, crc = pieces[0]
    pieces[:] = [[start, [2, 4], rank, offset, crc], [start, [2, 4], rank, offset + 32, crc]]


def grow(record: dict[str, Any], by: int) -> None:
    """Make a tensor larger in all that `state.json` says."""
    last, (piece,) = max(record["blocks"].items(), key=lambda item: item[1][0][3])
    shape = [math.prod(record["tensors"][last][1]) + by]
    record["tensors"][last][1] = shape
    piece[0], piece[1] = [0], shape
    record["files"][0] = piece[3] + 4 * shape[0]


@pytest.mark.parametrize(("change", "said"), FORGED, ids=range(len(FORGED)))
def test_a_forged_record_is_refused_before_memory_is_taken_for_what_it_says(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], said: str
) -> None:
    folder = saved(tmp_path, 1, 1.0)
    assert read_marker(folder)["step"] == 1
    forged(folder, change)
    for read in (lambda: weights_in(tmp_path), lambda: Checkpoints(tmp_path).load(filled(0.0), step=1)):
        message = refused(CheckpointError, read)
        assert said in message and message.count("\n") == 1, message


def test_weights_for_which_there_is_no_memory_are_refused_in_words(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1, 1.0)
    forged(folder, lambda record: grow(record, 1 << 40))
    os.truncate(next(folder.glob("*.blocks")), json.loads((folder / "state.json").read_text())["files"][0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40 if limits[1] == resource.RLIM_INFINITY else limits[1], limits[1]))
    try:
        assert "holds more than this process has memory for" in refused(CheckpointError, lambda: weights_in(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_what_is_refused_leaves_a_module_and_its_optimizer_as_they_were(tmp_path: Path) -> None:
    model = filled(1.0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model, torch.optim.SGD(model.parameters(), lr=1.0))
    checkpoints.wait()
    busy = ["dataclass", f"{__name__}:Busy", []]  # a class that is loaded
    other, optimizer = filled(2.0, width=5), torch.optim.SGD(model.parameters(), lr=2.0)
    refused(CheckpointError, lambda: checkpoints.load(other, torch.optim.SGD(other.parameters(), lr=2.0)))
    for change in (
        lambda record: record.update(extra=busy),
        lambda record: record.update(extra=["dict", [[["list", []], 1]]]),
        lambda record: record["optimizer"].update(plain={"weight": {"momentum": busy}}),
        lambda record: record["optimizer"]["groups"][0]["settings"][1].append(["more", busy]),
    ):
        whole = (tmp_path / "step-000000001" / "state.json").read_bytes()
        forged(tmp_path / "step-000000001", change)
        message = refused(CheckpointError, lambda: checkpoints.load(model, optimizer))
        (tmp_path / "step-000000001" / "state.json").write_bytes(whole)
        assert str(tmp_path) in message and optimizer.param_groups[0]["lr"] == 2.0 and not optimizer.state, message
    assert "does more than to hold its fields" in refused(
        CheckpointError, lambda: checkpoints.save(2, model, extra=Busy.__new__(Busy))
    )
    assert checkpoints.load(model, optimizer) == 1 and optimizer.param_groups[0]["lr"] == 1.0


def test_a_checkpoint_is_read_whatever_the_default_device_is(tmp_path: Path) -> None:
    saved(tmp_path, 1, 3.0)
    model = filled(1.0)
    with torch.device("meta"):
        assert Checkpoints(tmp_path).load(model) == 1
        assert numbers_in(tmp_path) == {3.0}
    assert {number for parameter in model.parameters() for number in parameter.flatten().tolist()} == {3.0}
