"""Save the state of training in checkpoints, and load them on any mesh and in any layout.

A checkpoint is a folder. Every rank writes its blocks there, into a file that is named for this one save, and reads
them back; then `state.json`, which says what lies where, is moved into place: so a checkpoint is whole, or it is
none. A step is saved again beside the files of before, and what was whole goes away only then.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sbpc.errors import CheckpointError, check_kinds, is_number, shown
from sbpc.runtime.module import steps_run
from sbpc.runtime.start import process_groups
from sbpc.runtime.state import block_files
from sbpc.runtime.state.blocks import TensorBlock, blocks_of, groups_of, merged_groups
from sbpc.runtime.state.checkpoint_fit import as_saved, mistake_in, prepare
from sbpc.runtime.state.checkpoint_record import (
    MARKER,
    check_progress,
    check_record,
    describe,
    digest,
    merged,
    progress,
    read_marker,
    restored,
)
from sbpc.runtime.state.folder_lock import FolderLock, locked
from sbpc.runtime.state.members import refuse_unfinished
from sbpc.runtime.state.weight_files import Weights
from sbpc.runtime.state.whole import masters_of

NAME = re.compile(r"step-(\d{9})")
TODO = "The one before it is whole; mend the cause."


class Checkpoints:
    """The checkpoints in a folder that all ranks share; the last `keep` are kept. A job goes on from them, also on
    another number of ranks, in other layouts, with pipeline stages or without: examples/02_train_gpt.py.

    They hold parameters, buffers, the optimizer's state and settings, and the place among random numbers; of parameters
    with float32 masters (`masters` of `sbpc.plan`) these, which also take what was saved in the type of the model.
    Every rank makes this at the same point, calls `save` at the same steps, and `wait` before it ends. asynchronous:
    what is saved is copied, and written by a thread while training goes on; the next `save` waits for it, and says
    what failed.

    A checkpoint is whole in the folder or not there, whenever a process is killed. Ranks that have not done as many
    steps and updates save nothing, and all say so. What was whole is removed once the new one is on the disk and every
    rank has read back what it wrote. Reading checks the CRC-32 of every block, and takes no block of another save.

    A folder belongs to the job that saves there as long as rank 0 has a Checkpoints that has saved: another job gets
    an error, by flock on a file in it, which ends with the process, and which the file system must have (all local
    ones do, and NFS on Linux). Reading needs no lock.

    `sbpc convert` takes the weights out in one process, or turns a file of weights into a checkpoint: a .pt file is
    a plain state_dict, with tied weights under all their names; a .safetensors file holds a tied tensor once, and
    buffers that are not persistent besides, as programs need them.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, asynchronous: bool = True) -> None:
        check_kinds(
            CheckpointError,
            folder=(folder, "a path"),
            keep=(keep, "an integer"),
            asynchronous=(asynchronous, "True or False"),
        )
        if keep < 1:
            raise CheckpointError(f"keep is {keep}\n  Keep one checkpoint at least.")
        self.folder, self.keep, self.asynchronous = Path(folder), keep, asynchronous
        self.extra: Any = None
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.group = process_groups.new_group(backend="gloo") if dist.is_initialized() else None
        self.lock: FolderLock | None = None
        self.writer = ThreadPoolExecutor(1, "sbpc-checkpoint")
        self.pending: Future[None] | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
        block: bool | None = None,
    ) -> None:
        """Saves what training goes on from after `step` steps. extra: numbers and texts of your own, nested as you
        like. block: whether to return when all is on the disk, or once it is copied; by default as `asynchronous`
        says.

        Raises CheckpointError, also for an earlier save that failed, as it does if ranks disagree on what they save,
        and PlanError amid an accumulation by `no_sync`.
        """
        check_kinds(CheckpointError, block=(block, "True or False", "None"))
        refuse_unfinished(model)
        self.wait()
        if not is_number(step, Integral) or not 0 <= step < 10**9:
            raise CheckpointError(f"step is {shown(step)}\n  Give an integer from 0 to 999,999,999.")
        step = int(step)
        blocks = blocks_of(model, optimizer)
        record = describe(step, blocks, model, optimizer, extra, masters_of(model))
        block = not self.asynchronous if block is None else block
        if not block:
            blocks = {name: replace(each, local=each.local.to("cpu", copy=True)) for name, each in blocks.items()}
        self.pending = self.writer.submit(self.write, blocks, record, progress(record, blocks, steps_run(model)))
        if block:
            self.wait()

    def wait(self) -> None:
        """Returns when what was saved lies whole in the folder. Raises CheckpointError if that failed."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointError:
            raise
        except Exception as error:  # of a collective
            raise CheckpointError(
                f"{self.not_written(cause(error))}\n  Another rank has ended, or has not called save within "
                f"{process_groups.limit().total_seconds():g} s: every rank calls it at the same steps."
            ) from error

    def not_written(self, why: str) -> str:
        """Returns the line that says that a save failed."""
        return f"the checkpoint in {self.folder} was not written: {why}"

    def write(self, blocks: dict[str, TensorBlock], record: dict[str, Any], numbers: dict[str, Any]) -> None:
        """Writes one checkpoint on all ranks together, in the thread of `self.writer`."""
        folder = self.folder / f"step-{record['step']:09d}"
        held = {name: (block.start, block.local.nbytes) for name, block in blocks.items() if block.local.numel()}
        save, names, whole = self.together((numbers, record, held), lambda values: self.begin(folder, values))
        written: Any = {}, 0
        try:
            if names:
                written = block_files.write(folder, save, self.rank, {name: blocks[name] for name in names})
        except Exception as error:  # the others have to know of it
            written = f"rank {self.rank}: {cause(error)}"
        self.together(written, lambda values: self.finish(folder, whole, values))

    def begin(self, folder: Path, values: list[Any]) -> list[Any]:
        """Returns, on the first rank, what each rank is to write: the name of the save, names of blocks, for itself
        the record, too."""
        numbers, records, held = zip(*values)
        check_progress(numbers)
        record = merged(records) | {"save": secrets.token_hex(16)}
        block_files.check_whole(record["tensors"], held)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = locked(self.folder)
        for other in self.folder.glob("step-*"):  # which a killed job has not finished
            number = NAME.fullmatch(other.name)
            if number and int(number[1]) not in self.lock.writing and not (other / MARKER).exists():
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        self.lock.writing.add(record["step"])
        return [
            (record["save"], names, None if rank else record) for rank, names in enumerate(block_files.writers(held))
        ]

    def finish(self, folder: Path, record: dict[str, Any], written: list[Any]) -> list[Any]:
        """Ends a save, on the first rank: moves `state.json` into place, which makes it count, and removes what it
        replaces."""
        assert self.lock is not None
        self.lock.writing.discard(record["step"])
        failed = [each for each in written if isinstance(each, str)]
        if failed:
            raise CheckpointError(f"{self.not_written(failed[0])}\n  {TODO}")
        blocks: dict[str, list[block_files.Piece]] = {name: [] for name in record["tensors"]}
        for name, piece in (item for pieces, _ in written for item in pieces.items()):
            blocks[name].append(piece)
        record |= {"blocks": blocks, "files": [size for _, size in written]}
        try:
            block_files.check_files(folder, record, range(self.ranks), through=False)
        except CheckpointError as error:
            first = self.not_written(f"as rank 0 sees it, {str(error).splitlines()[0]}")
            raise CheckpointError(f"{first}\n  Name a folder that all ranks share.") from error
        record = json.loads(json.dumps(record, allow_nan=False))  # as it will be read
        check_record(record, folder)
        sync(folder)
        unfinished = folder / f"{MARKER}.part"
        write_synced(unfinished, json.dumps(record | {"sha256": digest(record)}))
        unfinished.replace(folder / MARKER)
        sync(folder)
        sync(self.folder)
        for other in folder.iterdir():
            if other.is_file() and other.name != MARKER and not other.name.startswith(record["save"]):
                other.unlink()
        others = [step for step in whole_steps(self.folder) if step != record["step"]]
        for old in others[: max(0, len(others) + 1 - self.keep)]:
            remove(self.folder / f"step-{old:09d}")
        return [None] * len(written)

    def together(self, value: Any, join: Callable[[list[Any]], list[Any]]) -> Any:
        """Returns what `join` makes on the first rank for this one, of the values of all. Raises CheckpointError on
        all if it fails."""
        values = [value] * self.ranks
        if self.group is not None:
            dist.gather_object(value, None if self.rank else values, group=self.group)
        outcomes: list[Any] = [None] * self.ranks
        if self.rank == 0:
            try:
                outcomes = join(values)
            except CheckpointError as error:
                outcomes = [error] * self.ranks
            except Exception as error:  # the others have to know of it
                outcomes = [CheckpointError(f"{self.not_written(cause(error))}\n  {TODO}")] * self.ranks
        outcome = outcomes[:1]
        if self.group is not None:
            dist.scatter_object_list(outcome, None if self.rank else outcomes, group=self.group)
        if isinstance(outcome[0], CheckpointError):
            raise outcome[0]
        return outcome[0]

    def from_all_ranks(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank."""
        return [value] if self.group is None else process_groups.from_all_ranks(value, self.group)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int | None = None) -> int:
        """Loads the last checkpoint, or that of `step`, into a module and its optimizer; returns its step, 0 if
        there is none.

        `extra` is then what was saved as such. The mesh and the layouts may be others than those of the ranks that
        saved. All files are read through before anything is loaded: of damaged ones there is a warning, and without
        `step` the last whole checkpoint is loaded. Raises CheckpointError, before anything is changed, if none is
        whole, or if it does not fit.
        """
        self.wait()
        record = self.whole(step)
        if record is None:
            return 0
        folder = self.folder / f"step-{record['step']:09d}"
        extra = restored(record["extra"], (), "extra", folder)
        masters = masters_of(model)
        blocks = as_saved(blocks_of(model), model, record, masters)
        self.raise_first(mistake_in(blocks, record["tensors"], folder))  # of any rank: all end here, or none
        if optimizer is not None:
            groups = merged_groups(self.from_all_ranks(groups_of(model, optimizer)))
            prepare(model, optimizer, groups, record, folder, masters)
        blocks = as_saved(blocks_of(model, optimizer), model, record, masters)
        mistake = None
        try:
            block_files.read(folder, record, blocks)
            for block in blocks.values():
                if block.master is not None:
                    block.master.copy_(block.local)
        except CheckpointError as error:
            mistake = f"{error} The module holds a part of it: load again before you go on."
        self.raise_first(mistake)
        self.extra = extra
        set_random_state = getattr(model, "set_random_state", None)  # a parallel module has it
        if record["random"] is not None and set_random_state is not None:
            set_random_state(record["random"])
        return int(record["step"])

    def raise_first(self, mistake: str | None) -> None:
        """Raises CheckpointError on all ranks if there is a mistake on any."""
        for said in self.from_all_ranks(mistake):
            if said is not None:
                raise CheckpointError(said)

    def whole(self, step: int | None) -> dict[str, Any] | None:
        """Returns what is said of the last checkpoint that all ranks find whole, or of that of `step`; None if there
        is none."""
        refused: dict[tuple[int, str], CheckpointError] = {}
        while True:
            chosen, save = self.together(None, lambda _: [self.choice(step, refused)] * self.ranks)
            if chosen < 0 and refused:
                raise next(iter(refused.values()))
            if chosen < 0:
                return None
            folder, record, mistake = self.folder / f"step-{chosen:09d}", {}, None
            try:
                record = read_marker(folder)
                if record["save"] != save:
                    raise CheckpointError(f"{folder} was saved anew while it was read\n  Load again.")
                block_files.check_files(folder, record, range(self.rank, len(record["files"]), self.ranks))
            except CheckpointError as error:
                mistake = str(error)
            try:
                self.raise_first(mistake)
                return record
            except CheckpointError as error:
                if step is not None:
                    raise
                refused[chosen, save] = error
                if self.rank == 0 and save_in(folder) == save:  # else it was removed, as a later one is whole
                    warnings.warn(
                        f"{error}\n  It is left out: the one before it is loaded, if that is whole.", stacklevel=3
                    )

    def choice(self, step: int | None, refused: Container[tuple[int, str]]) -> tuple[int, str]:
        """Returns, on the first rank, the step to load and what names its save: step -1 if there is none but those
        refused."""
        for each in whole_steps(self.folder)[::-1] if step is None else [step]:
            found = each, save_in(self.folder / f"step-{each:09d}")
            if found not in refused:
                return found
        return -1, ""


def save_in(folder: Path) -> str:
    """Returns what names the save that is in the folder of a checkpoint, nothing if that cannot be read."""
    try:
        return str(read_marker(folder)["save"])
    except CheckpointError:
        return ""


def cause(error: BaseException) -> str:
    """Returns in one line what has failed."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def whole_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, ascending."""
    before = None
    while True:
        steps = sorted(int(found[1]) for path in folder.glob("step-*") if (found := NAME.fullmatch(path.name)))
        whole = [step for step in steps if (folder / f"step-{step:09d}" / MARKER).is_file()]
        if whole or steps == before:  # else a job may have replaced one by another while this looked
            return whole
        before = steps


def remove(path: Path) -> None:
    """Removes a checkpoint, `state.json` first, so that what is half removed does not count as complete."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    """Writes a file and returns when it is on the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def weights_in(folder: str | Path, step: int | None = None) -> Weights:
    """Reads the whole parameters and buffers of a checkpoint in one process, masters in the type of the model. Without
    `step` it is the last one."""
    folder = Path(folder)
    steps = whole_steps(folder)
    if not steps or step not in (None, *steps):
        raise CheckpointError(
            f"{folder} holds no checkpoint{'' if step is None else f' of step {step}'}\n  It holds {steps}."
        )
    folder /= f"step-{steps[-1] if step is None else step:09d}"
    record = read_marker(folder)
    # before memory is taken for them
    block_files.check_files(folder, record, range(len(record["files"])), through=False)
    try:
        blocks = {
            name: TensorBlock(
                torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu"), tuple(shape), (0,) * len(shape)
            )
            for name, (dtype, shape) in record["tensors"].items()
            if name.startswith("model/")
        }
    except RuntimeError as error:
        what = f"{folder} holds more than this process has memory for: {cause(error)}"
        raise CheckpointError(
            f"{what}\n  Read it where there is more, or load it on several ranks by sbpc.Checkpoints."
        ) from error
    block_files.read(folder, record, blocks)
    tensors = {name.removeprefix("model/"): block.local for name, block in blocks.items()}
    tensors |= {name: tensors[name].to(getattr(torch, kind)) for name, kind in record["masters"].items()}
    return Weights(tensors, record["tied"], tuple(record["left_out"]))
