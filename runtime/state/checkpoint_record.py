"""What `state.json` of a checkpoint says: the step, the tensors, where their blocks lie, the optimizer's settings, random numbers.

It is read as a stranger's: types, ranges and sizes are checked before anything is made of them, and it names no file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbpc.errors import CheckpointError, PlanError, shown
from sbpc.graph.pytree import flatten, harmless, unflatten
from sbpc.runtime.state.block_files import Piece, damaged, header, open_file
from sbpc.runtime.state.blocks import TensorBlock, groups_of, merged_groups, states_of
from sbpc.runtime.state.weight_files import weights_of

FORMAT, VERSION, MARKER = "sbpc checkpoint", 2, "state.json"


def describe(
    step: int, blocks: Mapping[str, TensorBlock], model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any
) -> dict[str, Any]:
    """Returns what this rank knows of what `state.json` says of a checkpoint."""
    tensors = {name: dtype_and_shape(block) for name, block in blocks.items()}
    groups: list[dict[str, Any]] = []
    of_group = [] if optimizer is None else zip(groups_of(model, optimizer), optimizer.param_groups)
    for names, group in of_group:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        leaves, structure = flatten(settings, "the optimizer's settings")
        values = [leaf.item() for leaf in leaves]
        groups.append({"names": names, "settings": structure, "values": values})
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
        "format": FORMAT, "version": VERSION, "step": step, "torch": torch.__version__, "tensors": tensors,
        "optimizer": {"class": type(optimizer).__name__, "groups": groups, "plain": plain}, "extra": structure,
        "random": random, "tied": weights.tied, "left_out": list(weights.left_out),
    }  # fmt: skip


def without_tensors(value: Any, what: str) -> Any:
    """Returns the structure of numbers and texts, nested. Raises CheckpointError if it holds tensors."""
    leaves, structure = flatten(value, what)
    harmless(structure)  # as it will be read
    if leaves:
        raise CheckpointError(f"{what} holds tensors\n  Keep them as buffers of the model, as tensors of its state, or as numbers.")
    return structure


def progress(record: Mapping[str, Any], blocks: Mapping[str, TensorBlock], steps: int | None) -> dict[str, Any]:
    """Returns the numbers that must be the same on all ranks, None for what this rank has not.

    They are the step that is saved, how many training steps the module has run in this process, its place among random numbers,
    and how often the optimizer has updated each of its groups: stages hold other parameters of the same groups.
    """
    numbers: dict[str, Any] = {"step": record["step"], "training steps run": steps}
    numbers |= {f"{key} of random numbers": number for key, number in (record["random"] or {}).items()}
    for at, group in enumerate(record["optimizer"]["groups"]):
        names = [name for name in group["names"] if name is not None]
        counts = [record["optimizer"]["plain"].get(name, {}).get("step") for name in names]
        counts += [block.local.item() for name in names if (block := blocks.get(f"optimizer/{name}/step")) and block.local.numel() == 1]
        numbers[f"updates of group {at}"] = max((int(count) for count in counts if isinstance(count, (int, float))), default=None)
    return numbers


def check_progress(of_ranks: Sequence[Mapping[str, Any]]) -> None:
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
                "  Every rank does all steps and updates, and calls save at the same ones: start again from the last checkpoint."
            )


def listed(ranks: Sequence[int]) -> str:
    """Returns the numbers of ranks as text, of many the first.

    >>> listed(range(20))
    '0, 1, 2, 3, 4, 5, 6, 7 and 12 more'
    """
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def merged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what `state.json` says, of what each rank knows: of pipeline stages every rank has the parameters of its own alone."""
    known: list[list[dict[str, Any]]] = [record["optimizer"]["groups"] for record in records]
    names = merged_groups([[group["names"] for group in groups] for groups in known])
    longest = max(known, key=lambda groups: len(groups))
    groups = [group | {"names": whole} for group, whole in zip(longest, names)]
    plain = joined(record["optimizer"]["plain"] for record in records)
    whole = {key: joined(record[key] for record in records) for key in ("tensors", "tied")}
    return {**records[0], **whole, "optimizer": {**records[0]["optimizer"], "groups": groups, "plain": plain}}


def joined(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what is in any of several mappings."""
    return {key: value for part in parts for key, value in part.items()}


def dtype_and_shape(block: TensorBlock) -> list[Any]:
    """Returns the dtype of a tensor as text and its whole shape, as `state.json` has them."""
    return [str(block.local.dtype).removeprefix("torch."), list(block.shape)]


def tensors_of_state(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns dtype and shape of the tensors of an optimizer's state in a checkpoint, by parameter and key."""
    tensors: dict[str, dict[str, Any]] = {}
    for full, dtype_and_shape in record["tensors"].items():
        kind, _, name_and_key = full.partition("/")
        if kind == "optimizer":
            name, _, key = name_and_key.rpartition("/")
            tensors.setdefault(name, {})[key] = dtype_and_shape
    return tensors


def digest(record: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of what `state.json` says."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_marker(folder: Path) -> dict[str, Any]:
    """Returns what `state.json` says of a checkpoint, its blocks as pieces. Raises CheckpointError if the folder holds none."""
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
    check_record(record, folder)
    pieces = {name: [Piece(tuple(start), tuple(shape), *place) for start, shape, *place in each] for name, each in record["blocks"].items()}
    return record | {"blocks": pieces}


def restored(structure: Any, leaves: Sequence[Any], what: str, folder: Path) -> Any:
    """Returns that of which `flatten` made a structure. Raises CheckpointError if it is none, or makes what would run code of its own."""
    try:
        harmless(structure)
        return unflatten(structure, leaves)
    except PlanError as error:
        raise CheckpointError(f"{what} in {folder}: {error}") from error
    except Exception as error:  # whatever nonsense it holds, it is the file that is wrong
        raise damaged(folder / MARKER, f"{what} makes no sense: {type(error).__name__}") from error


def check_record(record: dict[str, Any], folder: Path) -> None:
    """Raises CheckpointError unless a record has all that it must have, and its blocks fill the tensors and the files."""
    wrong = [key for key, fits in FIELDS.items() if key not in record or not fits(record[key])]
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
    if absent := [first for first in record["tied"].values() if f"model/{first}" not in record["tensors"]]:
        raise damaged(folder / MARKER, f"a tensor is tied to {absent[0]!r:.80}, which is none of its tensors")
    for spans, length in zip(filled, record["files"]):
        spans.sort()
        ends = [begin, *(end for _, end in spans)]
        if [start for start, _ in spans] != ends[:-1] or length != (ends[-1] if spans else 0):
            raise damaged(folder / MARKER, "its blocks do not lie one after another in their files")


def fill(pieces: Sequence[Sequence[Any]], shape: Sequence[int]) -> bool:
    """Returns whether blocks are the cells of one grid, as layouts cut tensors, and so hold each element of a tensor once."""
    if math.prod(shape) == 0 or any(len(start) != len(shape) or len(size) != len(shape) for start, size, *_ in pieces):
        return math.prod(shape) == 0 and not pieces
    cells = {tuple(start) for start, *_ in pieces}
    sides = [sorted({(start[dim], start[dim] + size[dim]) for start, size, *_ in pieces}) for dim in range(len(shape))]
    whole = all([0, *(end for _, end in side)] == [*(begin for begin, _ in side), length] for side, length in zip(sides, shape))
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


def is_count(value: Any) -> bool:
    """Returns whether a value is a number from 0 on that fits into 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def is_number(value: Any) -> bool:
    """Returns whether a value is an integer of 64 bits."""
    return type(value) is int and -1 << 63 <= value < 1 << 63


def is_value(value: Any) -> bool:
    """Returns whether a value is that of a tensor with one element."""
    return isinstance(value, (bool, float)) or is_number(value)


def is_shape(value: Any) -> bool:
    """Returns whether a value is the shape of a tensor, or indices into one."""
    return isinstance(value, (list, tuple)) and all(map(is_count, value))


def is_dict(value: Any, fits: Callable[[Any], bool]) -> bool:
    """Returns whether a value is a dict of texts to what fits."""
    return isinstance(value, dict) and all(isinstance(key, str) for key in value) and all(map(fits, value.values()))


def is_text(value: Any) -> bool:
    """Returns whether a value is a text."""
    return isinstance(value, str)


def is_tensor(value: Any) -> bool:
    """Returns whether a value tells dtype and shape of a tensor."""
    return isinstance(value, list) and len(value) == 2 and is_text(value[0]) and kind_of(value[0]) is not None and is_shape(value[1])


def is_piece(value: Any) -> bool:
    """Returns whether a value tells where a block lies, which has elements."""
    match value:
        case [start, shape, int(_), int(_), int(_)]:
            return is_shape(start) and is_shape(shape) and all(shape) and all(map(is_count, value[2:]))
    return False


def is_group(value: Any) -> bool:
    """Returns whether a value tells the settings of a group of an optimizer."""
    match value:
        case {"names": list(names), "settings": ["dict", list(pairs)], "values": list(values)}:
            keys = [pair[0] for pair in pairs if isinstance(pair, list) and len(pair) == 2 and is_text(pair[0])]
            named = all(name is None or is_text(name) for name in names)
            return named and len(keys) == len(pairs) and "params" not in keys and all(map(is_value, values))
    return False


def is_optimizer(value: Any) -> bool:
    """Returns whether a value tells of an optimizer, or of none."""
    match value:
        case {"class": str(name), "groups": list(groups), "plain": plain}:
            return name.isidentifier() and all(map(is_group, groups)) and is_dict(plain, lambda state: is_dict(state, lambda _: True))
    return False


FIELDS: dict[str, Callable[[Any], bool]] = {  # what a record has besides `extra`, which `unflatten` checks
    "step": is_count,
    "save": lambda value: is_text(value) and re.fullmatch("[0-9a-f]{32}", value) is not None,
    "tensors": lambda value: is_dict(value, is_tensor),
    "blocks": lambda value: is_dict(value, lambda pieces: isinstance(pieces, list) and all(map(is_piece, pieces))),
    "files": is_shape,
    "optimizer": is_optimizer,
    "tied": lambda value: is_dict(value, is_text),
    "left_out": lambda value: isinstance(value, list) and all(map(is_text, value)),
    "random": lambda value: value is None or (is_dict(value, is_number) and list(value) == ["seed", "step"]),
    "extra": lambda _: True,
}
