"""Save the state of training in checkpoints, and load them on any mesh and in any layout.

`torch.distributed.checkpoint` writes a step into a folder of another name, which is renamed once all ranks have written,
so that a checkpoint is complete or absent. `state.json` in it says what it holds. The metadata of
torch.distributed.checkpoint is a pickle: load only checkpoints of your own, and take the weights of others as safetensors.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from sbpc.errors import CheckpointError
from sbpc.graph.pytree import unflatten
from sbpc.runtime.module import refuse_unfinished
from sbpc.runtime.start import process_groups
from sbpc.runtime.state.blocks import TensorBlock, blocks_of, groups_of, merged_groups, names_of
from sbpc.runtime.state.checkpoint_record import (
    MARKER,
    describe,
    digest,
    dtype_and_shape,
    merged,
    read_marker,
    tensors_of_state,
)
from sbpc.runtime.state.weight_files import Weights, weights_of

NAME = re.compile(r"step-(\d{9})")


class Saver(DefaultSavePlanner):
    """Writes blocks. Of the ranks that hold one, torch lets the one write it that has least to write."""

    def __init__(self, blocks: Mapping[str, TensorBlock]) -> None:
        super().__init__(flatten_state_dict=False)
        self.blocks = blocks

    def create_local_plan(self) -> SavePlan:
        """Returns what this rank can write."""
        self.plan = SavePlan([write_item(name, block) for name, block in self.blocks.items() if block.local.numel()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Returns the tensor to write."""
        return self.blocks[write_item.index.fqn].local


def write_item(name: str, block: TensorBlock) -> WriteItem:
    """Returns how torch.distributed.checkpoint describes one block of a tensor."""
    start, chunk = torch.Size(block.start), ChunkStorageMetadata(torch.Size(block.start), block.local.shape)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(block.local), torch.Size(block.shape))
    return WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=data)


class Loader(DefaultLoadPlanner):
    """Reads blocks, whatever the blocks were in which they were written."""

    def __init__(self, blocks: Mapping[str, TensorBlock]) -> None:
        super().__init__(flatten_state_dict=False)
        self.blocks = blocks

    def create_local_plan(self) -> LoadPlan:
        """Returns what this rank reads."""
        items = []
        for name, block in self.blocks.items():
            if block.local.numel():
                assert self.metadata is not None
                chunk = ChunkStorageMetadata(torch.Size(block.start), block.local.shape)
                items += create_read_items_for_chunk_list(name, self.metadata.state_dict_metadata[name], [chunk])  # type: ignore[arg-type]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns the tensor to read into."""
        return self.blocks[index.fqn].local


class Checkpoints:
    """The checkpoints in a folder that all ranks share; the last `keep` are kept. A job goes on from them, also on another number
    of ranks, in other layouts, with pipeline stages or without: examples/02_train_gpt.py.

    They hold parameters, buffers, the optimizer's state and settings, and the place among random numbers. Every rank makes this
    at the same point, calls `save` at the same steps, and `wait` before it ends. asynchronous: what is saved is copied, and
    written while training goes on. A checkpoint is whole in the folder or not there.

    `sbpc convert` takes the weights out in one process, or turns a file of weights into a checkpoint: a .pt file is a plain
    state_dict, with tied weights under all their names; a .safetensors file holds a tied tensor once, and buffers that are not
    persistent besides, as programs need them. The metadata of torch.distributed.checkpoint is a pickle: load checkpoints of your
    own alone, and take strangers' weights as safetensors.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, asynchronous: bool = True) -> None:
        if keep < 1:
            raise CheckpointError(f"keep is {keep}\n  Keep one checkpoint at least.")
        self.folder, self.keep, self.asynchronous = Path(folder), keep, asynchronous
        self.extra: Any = None
        self.alone = not dist.is_initialized()
        self.first = self.alone or dist.get_rank() == 0
        self.group = None if self.alone else process_groups.new_group(backend="gloo")
        self.writer = ThreadPoolExecutor(1, "sbpc-checkpoint")
        self.pending: Future[None] | None = None

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, extra: Any = None
    ) -> None:
        """Saves what training goes on from after `step` steps. extra: numbers and texts of your own, nested as you like.

        Raises CheckpointError, also for an earlier save that failed, and PlanError amid an accumulation by `no_sync`.
        """
        refuse_unfinished(model)
        self.wait()
        blocks = blocks_of(model, optimizer)
        record = describe(step, blocks, model, optimizer, extra)
        if self.asynchronous:
            blocks = {name: replace(each, local=each.local.to("cpu", copy=True)) for name, each in blocks.items()}
        self.pending = self.writer.submit(self.write, step, blocks, record)
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Returns when what was saved lies whole in the folder. Raises CheckpointError if that failed."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"the checkpoint in {self.folder} was not written: {cause(error)}\n  The one before it is whole; mend the cause."
            ) from error

    def write(self, step: int, blocks: dict[str, TensorBlock], record: dict[str, Any]) -> None:
        """Writes one checkpoint on all ranks together, in the thread of `self.writer`."""
        unfinished, final = (self.folder / f"step-{step:09d}{end}" for end in (".part", ""))
        if self.first:
            remove(unfinished)
            unfinished.mkdir(parents=True)
        self.barrier()
        tensors = {name: block.local for name, block in blocks.items()}
        ranks: dict[str, Any] = {"process_group": self.group, "no_dist": self.alone}
        save(tensors, storage_writer=FileSystemWriter(unfinished), planner=Saver(blocks), **ranks)
        records: list[Any] = [record] * (1 if self.alone else dist.get_world_size())
        if self.group is not None:
            dist.gather_object(record, records if self.first else None, group=self.group)
        if self.first:
            record = merged(records)
            write_synced(unfinished / MARKER, json.dumps(record | {"sha256": digest(record)}, allow_nan=False))
            remove(final)
            unfinished.rename(final)
            sync(self.folder)
            for old in sorted(whole_steps(self.folder))[: -self.keep]:
                remove(self.folder / f"step-{old:09d}")
        self.barrier()

    def from_all_ranks(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, by rank."""
        return [value] if self.group is None else process_groups.from_all_ranks(value, self.group)

    def barrier(self) -> None:
        """Waits until all ranks are here."""
        if self.group is not None:
            dist.barrier(self.group)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int | None = None) -> int:
        """Loads the last checkpoint, or that of `step`, into a module and its optimizer; returns its step, 0 if there is none.

        `extra` is then what was saved as such. The mesh and the layouts may be others than those of the ranks that
        saved. Raises CheckpointError if it does not fit the model or the optimizer.
        """
        self.wait()
        chosen = self.chosen(step)
        if chosen < 0:
            return 0
        folder = self.folder / f"step-{chosen:09d}"
        record = read_marker(folder)
        if optimizer is not None:
            groups = merged_groups(self.from_all_ranks(groups_of(model, optimizer)))
            prepare(model, optimizer, groups, record, folder)
        blocks = as_saved(blocks_of(model, optimizer), model, record)
        for mistake in self.from_all_ranks(mistake_in(blocks, record["tensors"], folder)):  # of any rank: all end here, or none
            if mistake is not None:
                raise CheckpointError(mistake)
        read(folder, blocks, {"process_group": self.group, "no_dist": self.alone})
        self.extra = unflatten(record["extra"], ())
        set_random_state = getattr(model, "set_random_state", None)  # a parallel module has it
        if record["random"] is not None and set_random_state is not None:
            set_random_state(record["random"])
        return int(record["step"])

    def chosen(self, step: int | None) -> int:
        """Returns the step to load, on all ranks that which the first one sees: -1 if there is none. Removes unfinished ones."""
        chosen = torch.tensor([-1 if step is None else step])
        if self.first:
            for unfinished in self.folder.glob("step-*.part"):
                remove(unfinished)
            chosen[0] = max(whole_steps(self.folder), default=-1) if step is None else step
        if self.group is not None:
            dist.broadcast(chosen, 0, group=self.group)
        return int(chosen)


def read(folder: Path, blocks: Mapping[str, TensorBlock], ranks: Mapping[str, Any]) -> None:
    """Reads blocks from the folder of one checkpoint."""
    tensors = {name: block.local for name, block in blocks.items()}
    try:
        load(tensors, storage_reader=FileSystemReader(folder), planner=Loader(blocks), **ranks)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be read: {cause(error)}\n  Remove it: an earlier one is loaded then.") from error


def cause(error: BaseException) -> str:
    """Returns in one line what has failed. torch.distributed.checkpoint gives the tracebacks of all ranks as one text."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {cause(first)}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def prepare(
    model: nn.Module, optimizer: torch.optim.Optimizer, groups: list[list[str | None]], record: dict[str, Any], folder: Path
) -> None:
    """Gives an optimizer the settings in a checkpoint and, for every tensor of state there, one to be filled.

    groups: by group of the optimizer the names of its parameters on all ranks. Raises CheckpointError if they are not those saved.
    """
    saved, names = record["optimizer"], names_of(model)
    if not saved["groups"]:
        raise CheckpointError(
            f"{folder} holds weights alone, nothing of an optimizer\n"
            "  Load the model alone, before its optimizer is made; sbpc run takes weights by --weights FILE.safetensors."
        )
    same = [set(group["names"]) for group in saved["groups"]] == [set(group) for group in groups]  # stages have them in another order
    if saved["class"] != type(optimizer).__name__ or not same:
        raise CheckpointError(
            f"{folder} was saved with {saved['class']} over {[len(g['names']) for g in saved['groups']]} parameters, "
            f"this is {type(optimizer).__name__} over {[len(group) for group in groups]}\n"
            "  Make the optimizer that was saved, or load the model alone."
        )
    tensors = tensors_of_state(record)
    for group, old in zip(optimizer.param_groups, saved["groups"]):
        group.update(unflatten(old["settings"], [torch.tensor(value) for value in old["values"]]))
        on_device = group.get("fused") or group.get("capturable")  # these count steps on the parameter's device
        for parameter in group["params"]:
            name = names[parameter]
            state = saved["plain"].get(name, {}) | zeros(parameter, tensors.get(name, {}), parameter.device if on_device else None)
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state


def zeros(parameter: nn.Parameter, tensors: Mapping[str, tuple[str, Any]], device: torch.device | None) -> dict[str, Tensor]:
    """Returns the tensors of a parameter's state, to be filled. tensors: by key, dtype and shape. device: of those of other shapes."""
    state = {}
    for key, (dtype, shape) in tensors.items():
        kind = getattr(torch, dtype)
        like = tuple(shape) == tuple(parameter.shape) and key != "step"
        state[key] = torch.zeros_like(parameter, dtype=kind) if like else torch.zeros(shape, dtype=kind, device=device)
    return state


def as_saved(blocks: Mapping[str, TensorBlock], model: nn.Module, record: Mapping[str, Any]) -> dict[str, TensorBlock]:
    """Returns blocks by the names that a checkpoint has for them.

    A checkpoint may have a tied tensor under another of its names. It may lack buffers that state_dict leaves out, as
    weights from elsewhere do: the model's constructor has made them, and they stay as they are.
    """
    weights, saved, tied = weights_of(model), record["tensors"], record.get("tied", {})
    renamed: dict[str, TensorBlock] = {}
    for full, block in blocks.items():
        name = full.removeprefix("model/")
        if full not in saved and name in weights.tensors:
            names = [name, *(other for other, first in weights.tied.items() if first == name)]
            others = [f"model/{tied.get(other, other)}" for other in names]
            if not any(other in saved for other in others) and name in weights.left_out:
                continue
            full = next((other for other in others if other in saved and other not in blocks), full)
        renamed[full] = block
    return renamed


def mistake_in(blocks: Mapping[str, TensorBlock], tensors: Mapping[str, Any], folder: Path) -> str | None:
    """Returns what is wrong if a checkpoint does not hold what is asked for."""
    for name, block in blocks.items():
        saved, here = tensors.get(name), dtype_and_shape(block)
        if saved != here:
            what = "lacks it" if saved is None else f"has {saved[0]} {saved[1]}"
            return f"{name.partition('/')[2]} is {here[0]} {here[1]}, {folder} {what}\n  Load what was saved from this model."
    return None


def whole_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, ascending."""
    matches = [NAME.fullmatch(path.name) for path in folder.glob("step-*") if (path / MARKER).is_file()]
    return sorted(int(match[1]) for match in matches if match is not None)


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
    """Reads the whole parameters and buffers of a checkpoint in one process. Without `step` it is the last one."""
    folder = Path(folder)
    steps = whole_steps(folder)
    if not steps or step not in (None, *steps):
        raise CheckpointError(f"{folder} holds no checkpoint{'' if step is None else f' of step {step}'}\n  It holds {steps}.")
    folder /= f"step-{steps[-1] if step is None else step:09d}"
    record = read_marker(folder)
    blocks = {
        name: TensorBlock(torch.zeros(shape, dtype=getattr(torch, dtype)), tuple(shape), (0,) * len(shape))
        for name, (dtype, shape) in record["tensors"].items()
        if name.startswith("model/")
    }
    read(folder, blocks, {"no_dist": True})
    tensors = {name.removeprefix("model/"): block.local for name, block in blocks.items()}
    return Weights(tensors, record.get("tied", {}), tuple(record.get("left_out", ())))
