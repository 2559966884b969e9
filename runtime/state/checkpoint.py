"""Checkpoints: a folder of steps, each whole or not there, that are loaded on any mesh and in any layout.

A step is written by `torch.distributed.checkpoint` into a folder of another name, which is renamed once all ranks have
written; `state.json` in it says what it holds. The metadata of torch.distributed.checkpoint is a pickle: load
checkpoints of your own, and take weights of strangers as safetensors.
"""

from __future__ import annotations

import hashlib
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
from sbpc.graph.pytree import flatten, unflatten
from sbpc.runtime.start import process_groups as groups
from sbpc.runtime.state.blocks import Part, empty_like, names_of, parts_of, states_of
from sbpc.runtime.state.weight_files import Weights, weights_of

FORMAT, VERSION, MARKER = "sbpc checkpoint", 1, "state.json"
NAME = re.compile(r"step-(\d{9})")


class Saver(DefaultSavePlanner):
    """Writes parts, each block by one of the ranks that hold it."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(flatten_state_dict=False)
        self.parts = parts

    def create_local_plan(self) -> SavePlan:
        """What this rank writes."""
        turns = enumerate(self.parts.items())
        mine = {name: part for at, (name, part) in turns if part.replica == at % part.replicas and part.local.numel()}
        self.plan = SavePlan([write_item(name, part) for name, part in mine.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """What is written."""
        return self.parts[write_item.index.fqn].local


def write_item(name: str, part: Part) -> WriteItem:
    """One block of one tensor."""
    start, chunk = torch.Size(part.start), ChunkStorageMetadata(torch.Size(part.start), part.local.shape)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part.local), torch.Size(part.shape))
    return WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=data)


class Loader(DefaultLoadPlanner):
    """Reads parts, whatever the blocks were in which they were written."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        super().__init__(flatten_state_dict=False)
        self.parts = parts

    def create_local_plan(self) -> LoadPlan:
        """What this rank reads."""
        items = []
        for name, part in self.parts.items():
            if part.local.numel():
                assert self.metadata is not None
                chunk = ChunkStorageMetadata(torch.Size(part.start), part.local.shape)
                items += create_read_items_for_chunk_list(name, self.metadata.state_dict_metadata[name], [chunk])  # type: ignore[arg-type]
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Where what is read goes."""
        return self.parts[index.fqn].local


class Checkpoints:
    """The checkpoints in a folder that all ranks share; the last `keep` are kept. A job goes on from them, also on another number
    of ranks and in other layouts: examples/02_train_gpt.py.

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
        self.group = None if self.alone else groups.new(backend="gloo")
        self.writer = ThreadPoolExecutor(1, "sbpc-checkpoint")
        self.pending: Future[None] | None = None

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, extra: Any = None
    ) -> None:
        """Saves what training goes on from after `step` steps. extra: numbers and texts of your own, nested as you like.

        Raises CheckpointError, also for an earlier save that failed.
        """
        self.wait()
        held = parts_of(model, optimizer)
        about = describe(step, held, model, optimizer, extra)
        if self.asynchronous:
            held = {name: replace(part, local=part.local.to("cpu", copy=True)) for name, part in held.items()}
        self.pending = self.writer.submit(self.write, step, held, about)
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

    def write(self, step: int, held: dict[str, Part], about: dict[str, Any]) -> None:
        """Write one checkpoint, on all ranks together; runs in a thread of its own."""
        part, final = (self.folder / f"step-{step:09d}{end}" for end in (".part", ""))
        if self.first:
            remove(part)
            part.mkdir(parents=True)
        self.together()
        tensors = {name: each.local for name, each in held.items()}
        about_writer: dict[str, Any] = {"process_group": self.group, "no_dist": self.alone}
        save(tensors, storage_writer=FileSystemWriter(part), planner=Saver(held), **about_writer)
        if self.first:
            write_synced(part / MARKER, json.dumps(about | {"sha256": digest(about)}, allow_nan=False))
            remove(final)
            part.rename(final)
            sync(self.folder)
            for old in sorted(whole_steps(self.folder))[: -self.keep]:
                remove(self.folder / f"step-{old:09d}")
        self.together()

    def together(self) -> None:
        """All ranks stand here."""
        if self.group is not None:
            dist.barrier(self.group)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int | None = None) -> int:
        """Loads the last checkpoint, or that of `step`, into a module and its optimizer; returns its step, 0 if there is none.

        `extra` is then what was saved as such. The mesh and the layouts may be others than those of the ranks that
        saved. Raises CheckpointError if it does not fit the model or the optimizer.
        """
        self.wait()
        chosen = torch.tensor([-1 if step is None else step])
        if self.first:
            clean(self.folder)
            chosen[0] = max(whole_steps(self.folder), default=-1) if step is None else step
        if self.group is not None:
            dist.broadcast(chosen, 0, group=self.group)
        if chosen.item() < 0:
            return 0
        folder = self.folder / f"step-{int(chosen):09d}"
        about = read_marker(folder)
        if optimizer is not None:
            prepare(model, optimizer, about, folder)
        held = as_saved(parts_of(model, optimizer), model, about)
        check(held, about["tensors"], folder)
        read(folder, held, {"process_group": self.group, "no_dist": self.alone})
        self.extra = unflatten(about["extra"], ())
        draw_on = getattr(model, "set_random_state", None)  # a parallel module has it
        if about["random"] is not None and draw_on is not None:
            draw_on(about["random"])
        return int(about["step"])


def read(folder: Path, held: Mapping[str, Part], about_reader: Mapping[str, Any]) -> None:
    """Read parts from the folder of one checkpoint."""
    tensors = {name: part.local for name, part in held.items()}
    try:
        load(tensors, storage_reader=FileSystemReader(folder), planner=Loader(held), **about_reader)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be read: {cause(error)}\n  Remove it: an earlier one is loaded then.") from error


def cause(error: BaseException) -> str:
    """What has failed, in a line; torch.distributed.checkpoint gives the tracebacks of all ranks as one text."""
    if isinstance(error, CheckpointException):
        rank, (first, _) = min(error.failures.items())
        return f"rank {rank}: {cause(first)}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def digest(about: Mapping[str, Any]) -> str:
    """The SHA-256 of what `state.json` says."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def describe(
    step: int, held: Mapping[str, Part], model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any
) -> dict[str, Any]:
    """What `state.json` says of a checkpoint."""
    tensors = {name: [str(p.local.dtype).removeprefix("torch."), list(p.shape)] for name, p in held.items()}
    groups, names = [], names_of(model)
    for group in [] if optimizer is None else optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        leaves, structure = flatten(settings, "the optimizer's settings")
        values = [leaf.item() for leaf in leaves]
        groups.append({"names": [names[p] for p in group["params"]], "settings": structure, "values": values})
    plain = {
        name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        for name, state in states_of(model, optimizer)
    }
    leaves, structure = flatten(extra, "extra")
    if leaves:
        raise CheckpointError("extra holds tensors\n  Keep them as buffers of the model, or as numbers.")
    random, weights = getattr(model, "random_state", lambda: None)(), weights_of(model)
    return {
        "format": FORMAT, "version": VERSION, "step": step, "torch": torch.__version__, "tensors": tensors,
        "optimizer": {"class": type(optimizer).__name__, "groups": groups, "plain": plain}, "extra": structure,
        "random": random, "tied": weights.tied, "left_out": list(weights.left_out),
    }  # fmt: skip


def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, about: dict[str, Any], folder: Path) -> None:
    """Give an optimizer the settings of a checkpoint and, for every tensor of state in it, one to be filled."""
    saved, names = about["optimizer"], names_of(model)
    there = [[names.get(p) for p in group["params"]] for group in optimizer.param_groups]
    if not saved["groups"]:
        raise CheckpointError(
            f"{folder} holds weights alone, nothing of an optimizer\n"
            "  Load the model alone, before its optimizer is made; sbpc run takes weights by --weights FILE.safetensors."
        )
    if saved["class"] != type(optimizer).__name__ or [group["names"] for group in saved["groups"]] != there:
        raise CheckpointError(
            f"{folder} was saved with {saved['class']} over {[len(g['names']) for g in saved['groups']]} parameters, "
            f"this is {type(optimizer).__name__} over {[len(group) for group in there]}\n"
            "  Make the optimizer that was saved, or load the model alone."
        )
    kept: dict[str, dict[str, Any]] = {}
    for full, about_tensor in about["tensors"].items():
        kind, _, name = full.partition("/")
        if kind == "optimizer":
            name, _, key = name.rpartition("/")
            kept.setdefault(name, {})[key] = about_tensor
    for group, old in zip(optimizer.param_groups, saved["groups"]):
        group.update(unflatten(old["settings"], [torch.tensor(value) for value in old["values"]]))
        for parameter in group["params"]:
            state = dict(saved["plain"].get(names[parameter], {}))
            where = parameter.device if group.get("fused") or group.get("capturable") else None
            for key, (dtype, shape) in kept.get(names[parameter], {}).items():
                like = tuple(shape) == tuple(parameter.shape) and key != "step"
                kind = getattr(torch, dtype)
                state[key] = empty_like(parameter, kind) if like else torch.zeros(shape, dtype=kind, device=where)
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state


def as_saved(held: Mapping[str, Part], model: nn.Module, about: Mapping[str, Any]) -> dict[str, Part]:
    """Parts by the names that a checkpoint has for them.

    It may have a tied tensor under another of its names, and need not have buffers that state_dict leaves out: weights
    from elsewhere lack them, and the model's constructor has made them.
    """
    weights, there, tied = weights_of(model), about["tensors"], about.get("tied", {})
    found: dict[str, Part] = {}
    for full, part in held.items():
        name = full.removeprefix("model/")
        if full not in there and name in weights.tensors:
            names = [name, *(other for other, first in weights.tied.items() if first == name)]
            others = [f"model/{tied.get(other, other)}" for other in names]
            if not any(other in there for other in others) and name in weights.left_out:
                continue
            full = next((other for other in others if other in there and other not in held), full)
        found[full] = part
    return found


def check(held: Mapping[str, Part], tensors: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError unless a checkpoint holds what is asked for."""
    for name, part in held.items():
        found = tensors.get(name)
        here = [str(part.local.dtype).removeprefix("torch."), list(part.shape)]
        if found != here:
            what = "lacks it" if found is None else f"has {found[0]} {found[1]}"
            raise CheckpointError(
                f"{name.partition('/')[2]} is {here[0]} {here[1]}, {folder} {what}\n  Load what was saved from this model."
            )


def read_marker(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises CheckpointError if it is none."""
    try:
        about = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} is no checkpoint: {error}\n  Name one that sbpc wrote.") from error
    if not isinstance(about, dict) or (about.get("format"), about.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(f"{folder} is no checkpoint of version {VERSION}\n  Name one that this sbpc wrote.")
    written = about.pop("sha256", None)
    if written not in (None, digest(about)):  # one of before has none
        raise CheckpointError(f"{folder / MARKER} is damaged\n  Remove {folder}: an earlier checkpoint is loaded then.")
    return about


def whole_steps(folder: Path) -> list[int]:
    """The steps of which a whole checkpoint lies in a folder."""
    found = [NAME.fullmatch(path.name) for path in folder.glob("step-*") if (path / MARKER).is_file()]
    return sorted(int(match[1]) for match in found if match is not None)


def clean(folder: Path) -> None:
    """Remove what saves that were cut short have left."""
    for path in folder.glob("step-*.part"):
        remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint, its marker first: what is half removed is not taken for whole."""
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def write_synced(path: Path, text: str) -> None:
    """Write a file that is on the disk when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """See to it that the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whole_model(folder: str | Path, step: int | None = None) -> dict[str, Tensor]:
    """A plain one-device state dict out of a checkpoint, read in one process."""
    return weights_in(folder, step).state_dict()


def weights_in(folder: str | Path, step: int | None = None) -> Weights:
    """The whole parameters and buffers of a checkpoint, read in one process."""
    folder = Path(folder)
    steps = whole_steps(folder)
    if not steps or step not in (None, *steps):
        raise CheckpointError(f"{folder} holds no checkpoint{'' if step is None else f' of step {step}'}\n  It holds {steps}.")
    folder /= f"step-{steps[-1] if step is None else step:09d}"
    about = read_marker(folder)
    found = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        for name, (dtype, shape) in about["tensors"].items()
        if name.startswith("model/")
    }
    read(folder, {name: Part(t, tuple(t.shape), (0,) * t.dim()) for name, t in found.items()}, {"no_dist": True})
    tensors = {name.removeprefix("model/"): tensor for name, tensor in found.items()}
    return Weights(tensors, about.get("tied", {}), tuple(about.get("left_out", ())))
