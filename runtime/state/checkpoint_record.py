"""What `state.json` of a checkpoint says: the step, the tensors, where their blocks lie, the optimizer's settings,
random numbers.

It is read as a stranger's: types, ranges and sizes are checked before anything is made of them, and it names no file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import CheckpointError, PlanError, shown
from sbpc.graph.pytree import flatten, harmless, unflatten
from sbpc.plans.file_schema import HELD, NONE, TEXT, Check, either, leaf, many, one_of, row
from sbpc.plans.file_schema import record as entries
from sbpc.runtime.state.block_files import Piece, damaged, header, open_file
from sbpc.runtime.state.blocks import TensorBlock, groups_of, merged_groups, states_of
from sbpc.runtime.state.weight_files import weights_of

FORMAT, VERSION, MARKER = "sbpc checkpoint", 2, "state.json"
Record = dict[str, Any]  # what `state.json` says, or a part of that


def describe(
    step: int,
    blocks: Mapping[str, TensorBlock],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    masters: Mapping[str, str],
) -> Record:
    """Returns what this rank knows of what `state.json` says of a checkpoint. masters: by name the model's type."""
    tensors = {name: dtype_and_shape(block) for name, block in blocks.items()}
    groups: list[Record] = []
    of_group = [] if optimizer is None else zip(groups_of(model, optimizer), optimizer.param_groups)
    for names, group in of_group:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        leaves, structure = flatten(settings, "the optimizer's settings")
        values = [leaf.item() for leaf in leaves]
        groups.append({"names": names, "settings": plain_only(structure, "the optimizer's settings"), "values": values})
    plain = {
        name: {
            key: without_tensors(value, f"the optimizer's {key} of {name}")
            for key, value in state.items()
            if not isinstance(value, Tensor)
        }
        for name, state in states_of(model, optimizer)
    }
    structure = without_tensors(extra, "extra")
    random, weights = getattr(model, "random_state", lambda: None)(), weights_of(model)
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "torch": torch.__version__,
        "tensors": tensors,
        "optimizer": {"class": type(optimizer).__name__, "groups": groups, "plain": plain},
        "extra": structure,
        "random": random,
        "tied": weights.tied,
        "left_out": list(weights.left_out),
        "masters": {name: kind for name, kind in masters.items() if f"model/{name}" in blocks},
    }


def without_tensors(value: Any, what: str) -> Any:
    """Returns the structure of numbers and texts, nested. Raises CheckpointError if it holds tensors."""
    leaves, structure = flatten(value, what)
    if leaves:
        raise CheckpointError(
            f"{what} holds tensors\n  Keep them as buffers of the model, as tensors of its state, or as numbers."
        )
    return plain_only(structure, what)


def plain_only(structure: Any, what: str) -> Any:
    """Returns a structure. Raises CheckpointError if `restored` would refuse it."""
    try:
        harmless(structure)
    except PlanError as error:
        raise CheckpointError(f"{what}: {error}") from error
    return structure


def progress(record: Record, blocks: Mapping[str, TensorBlock], steps: int | None) -> Record:
    """Returns the numbers that must be the same on all ranks, None for what this rank has not.

    They are the step that is saved, how many training steps the module has run in this process, its place among
    random numbers, and how often the optimizer has updated each of its groups: stages hold other parameters of the
    same groups.
    """
    numbers: Record = {"step": record["step"], "training steps run": steps}
    numbers |= {f"{key} of random numbers": number for key, number in (record["random"] or {}).items()}
    for at, group in enumerate(record["optimizer"]["groups"]):
        names = [name for name in group["names"] if name is not None]
        counts = [record["optimizer"]["plain"].get(name, {}).get("step") for name in names]
        counts += [
            block.local.item()
            for name in names
            if (block := blocks.get(f"optimizer/{name}/step")) and block.local.numel() == 1
        ]
        numbers[f"updates of group {at}"] = max(
            (int(count) for count in counts if isinstance(count, (int, float))), default=None
        )
    return numbers


def check_progress(of_ranks: Sequence[Record]) -> None:
    """Raises CheckpointError that says which ranks have which numbers if they have others."""
    for key in joined(of_ranks):
        ranks: dict[Any, list[int]] = {}
        for rank, numbers in enumerate(of_ranks):
            if numbers.get(key) is not None:
                ranks.setdefault(numbers[key], []).append(rank)
        if len(ranks) > 1:
            texts = [f"{number} on {'rank' if len(at) == 1 else 'ranks'} {listed(at)}" for number, at in ranks.items()]
            raise CheckpointError(
                f"the ranks save states of other moments, so nothing is saved: {key} {', '.join(texts)}\n"
                "  Every rank does all steps and updates, and calls save at the same ones: start again from the last "
                "checkpoint."
            )


def listed(ranks: Sequence[int]) -> str:
    """Returns the numbers of ranks as text, of many the first.

    >>> listed(range(20))
    '0, 1, 2, 3, 4, 5, 6, 7 and 12 more'
    """
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def merged(records: Sequence[Record]) -> Record:
    """Returns what `state.json` says, of what each rank knows: of pipeline stages every rank has the parameters of
    its own alone."""
    known: list[list[Record]] = [record["optimizer"]["groups"] for record in records]
    names = merged_groups([[group["names"] for group in groups] for groups in known])
    longest = max(known, key=lambda groups: len(groups))
    groups = [group | {"names": whole} for group, whole in zip(longest, names)]
    plain = joined(record["optimizer"]["plain"] for record in records)
    whole = {key: joined(record[key] for record in records) for key in ("tensors", "tied", "masters")}
    return {**records[0], **whole, "optimizer": {**records[0]["optimizer"], "groups": groups, "plain": plain}}


def joined(parts: Iterable[Record]) -> Record:
    """Returns what is in any of several mappings."""
    return {key: value for part in parts for key, value in part.items()}


def dtype_and_shape(block: TensorBlock) -> list[Any]:
    """Returns the dtype of a tensor as text and its whole shape, as `state.json` has them."""
    return [str(block.local.dtype).removeprefix("torch."), list(block.shape)]


def tensors_of_state(record: Record) -> dict[str, Record]:
    """Returns dtype and shape of the tensors of an optimizer's state in a checkpoint, by parameter and key."""
    tensors: dict[str, Record] = {}
    for full, dtype_and_shape in record["tensors"].items():
        kind, _, name_and_key = full.partition("/")
        if kind == "optimizer":
            name, _, key = name_and_key.rpartition("/")
            tensors.setdefault(name, {})[key] = dtype_and_shape
    return tensors


def digest(record: Record) -> str:
    """Returns the SHA-256 of what `state.json` says."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_marker(folder: Path) -> Record:
    """Returns what `state.json` says of a checkpoint, its blocks as pieces. Raises CheckpointError if the folder
    holds none."""
    try:
        with open_file(folder / MARKER) as file:
            record = json.loads(file.read().decode())
        written = record.pop("sha256", None) if isinstance(record, dict) else None
        found = digest(record)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{folder} is no checkpoint: {error}\n  Name one that sbpc wrote.") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is no checkpoint\n  Name one that sbpc wrote.")
    if record.get("version") != VERSION:
        what = f"{folder} is a checkpoint of version {shown(record.get('version'))}, this sbpc reads version {VERSION}"
        raise CheckpointError(f"{what}\n  Turn it into safetensors by `sbpc convert` of the sbpc that wrote it.")
    if written != found:
        raise damaged(folder / MARKER, "its text is not what sbpc wrote")
    record.setdefault("masters", {})  # of one that an earlier sbpc wrote
    check_record(record, folder)
    pieces = {
        name: [Piece(tuple(start), tuple(shape), *place) for start, shape, *place in each]
        for name, each in record["blocks"].items()
    }
    return record | {"blocks": pieces}


def restored(structure: Any, leaves: Sequence[Any], what: str, folder: Path) -> Any:
    """Returns that of which `flatten` made a structure. Raises CheckpointError if it is none, or makes what would
    run code of its own."""
    try:
        harmless(structure)
        return unflatten(structure, leaves)
    except PlanError as error:
        raise CheckpointError(f"{what} in {folder}: {error}") from error
    except Exception as error:  # whatever nonsense it holds, it is the file that is wrong
        raise damaged(folder / MARKER, f"{what} makes no sense: {type(error).__name__}") from error


def check_record(record: Record, folder: Path) -> None:
    """Raises CheckpointError unless a record has all that it must have, and its blocks fill the tensors and the
    files."""
    wrong = [key for key, check in FIELDS.items() if key not in record or check(record[key]) is not None]
    if wrong or f"step-{record['step']:09d}" != folder.name:
        raise damaged(folder / MARKER, f"its {wrong[0] if wrong else 'step'} is none that sbpc writes there")
    begin = len(header(record["save"]))
    filled: list[list[tuple[int, int]]] = [[] for _ in record["files"]]
    for name, (dtype, shape) in record["tensors"].items():
        pieces = record["blocks"].get(name, ())
        if any(rank >= len(filled) for _, _, rank, *_ in pieces) or not fill(pieces, shape):
            raise damaged(folder / MARKER, f"its blocks are not those of {name!r:.80}")
        for _, size, rank, offset, _ in pieces:
            filled[rank].append((offset, offset + math.prod(size) * kind_of(dtype).itemsize))
    if others := sorted(record["blocks"].keys() - record["tensors"].keys()):
        raise damaged(folder / MARKER, f"it has blocks of {others[0]!r:.80}, but no such tensor")
    wide = {name for name, (dtype, _) in record["tensors"].items() if dtype == "float32"}
    if others := [name for name in record["masters"] if f"model/{name}" not in wide]:
        raise damaged(
            folder / MARKER, f"{others[0]!r:.80}, which is none of its float32 tensors, is said to be a master"
        )
    if absent := [first for first in record["tied"].values() if f"model/{first}" not in record["tensors"]]:
        raise damaged(folder / MARKER, f"a tensor is tied to {absent[0]!r:.80}, which is none of its tensors")
    for spans, length in zip(filled, record["files"]):
        spans.sort()
        ends = [begin, *(end for _, end in spans)]
        if [start for start, _ in spans] != ends[:-1] or length != (ends[-1] if spans else 0):
            raise damaged(folder / MARKER, "its blocks do not lie one after another in their files")


def fill(pieces: Sequence[Sequence[Any]], shape: Sequence[int]) -> bool:
    """Returns whether blocks are the cells of one grid, as layouts cut tensors, and so hold each element of a tensor
    once."""
    if math.prod(shape) == 0 or any(len(start) != len(shape) or len(size) != len(shape) for start, size, *_ in pieces):
        return math.prod(shape) == 0 and not pieces
    cells = {tuple(start) for start, *_ in pieces}
    sides = [sorted({(start[dim], start[dim] + size[dim]) for start, size, *_ in pieces}) for dim in range(len(shape))]
    whole = all(
        [0, *(end for _, end in side)] == [*(begin for begin, _ in side), length] for side, length in zip(sides, shape)
    )
    return whole and len(cells) == len(pieces) == math.prod(map(len, sides))


@functools.cache
def kind_of(dtype: str) -> Any:
    """Returns the torch dtype of a name, None if it is that of none, or if torch cannot copy what is of it."""
    found = vars(torch).get(dtype)
    try:
        torch.zeros(1, dtype=found, device="cpu").copy_(torch.zeros(1, dtype=found, device="cpu"))
    except (TypeError, RuntimeError):
        return None
    return found if str(found) == f"torch.{dtype}" else None  # torch has two names of some


def texts_to(check: Check) -> Check:
    """Returns the check of an object of any texts."""
    return lambda value: (
        leaf(lambda v: type(v) is dict and all(type(key) is str for key in v))(value)
        or many(check)(list(value.values()))
    )


ANYTHING, COUNT = leaf(lambda v: True), leaf(lambda v: type(v) is int and 0 <= v < 1 << 63)
WIDE = leaf(lambda v: type(v) is int and -1 << 63 <= v < 1 << 63)
SHAPE, SETTING = many(COUNT), row(leaf(lambda v: type(v) is str and v != "params"), ANYTHING)
SIZES = many(leaf(lambda v: type(v) is int and 0 < v < 1 << 63))  # a block has elements
DTYPE = leaf(lambda v: type(v) is str and kind_of(v) is not None)
VALUE = either(WIDE, leaf(lambda v: isinstance(v, (bool, float))))  # that of a tensor with one element
GROUP = entries(
    {"names": many(either(NONE, TEXT)), "settings": row(one_of("dict"), many(SETTING)), "values": many(VALUE)}
)
CLASS = leaf(lambda v: type(v) is str and v.isidentifier())
RANDOM = entries(dict.fromkeys(("seed", "step"), WIDE))
FIELDS: dict[str, Check] = {  # what a record has besides `extra`, which `unflatten` checks
    "step": COUNT,
    "save": leaf(lambda v: type(v) is str and re.fullmatch("[0-9a-f]{32}", v) is not None),
    "tensors": texts_to(row(DTYPE, SHAPE)),
    "blocks": texts_to(many(row(SHAPE, SIZES, COUNT, COUNT, COUNT))),
    "files": SHAPE,
    "optimizer": entries({"class": CLASS, "groups": many(GROUP), "plain": texts_to(texts_to(ANYTHING))}),
    "tied": texts_to(TEXT),
    "left_out": many(TEXT),
    "masters": texts_to(HELD),
    "random": either(NONE, leaf(lambda v: RANDOM(v) is None and list(v) == ["seed", "step"])),
    "extra": ANYTHING,
}
