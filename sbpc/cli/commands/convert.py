"""`sbpc convert`: weights between a folder of checkpoints, a safetensors file and a state_dict that torch.save wrote."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbpc.cli.options import file_name
from sbpc.cli.output import check_file, print_json
from sbpc.errors import SbpcError
from sbpc.runtime.state.checkpoint import Checkpoints, weights_in
from sbpc.runtime.state.weight_files import Weights, read_weights, save_weights, tree

NAME = "convert"
HELP = "turn a checkpoint into the weights of one device, or these into a checkpoint"
KINDS = "a folder of checkpoints, *.safetensors, or *.pt as torch.save writes a state_dict"


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("source", metavar="SOURCE", type=file_name, help=KINDS)
    parser.add_argument("-o", "--output", metavar="DESTINATION", type=file_name, required=True, help="one of the same")
    parser.add_argument(
        "--step", type=int, metavar="N", help="of the checkpoint (default: the last one there; 0 for a new one)"
    )


def run(options: argparse.Namespace) -> int:
    """`sbpc convert`: weights alone; an optimizer's state stays behind.

    A state_dict holds a tied tensor under all its names, and no buffers that are not persistent; the other two hold each
    tensor once, all buffers, and beside them which names are tied and which of them a state_dict leaves out.
    """
    if options.step is not None and options.step < 0:
        raise SbpcError(f"--step {options.step}\n  Give 0 at least.")
    read, write = of(options.source)[0], of(options.output)[1]
    if write is not to_folder:
        check_file(options.output)
    if options.step is not None and read is not of_folder and write is not to_folder:
        raise SbpcError(f"--step {options.step} is of checkpoints\n  Remove it: neither side is a folder of them.")
    weights = read(options.source, options.step)
    write(weights, options.output, options.step or 0)
    count = sum(value.numel() for value in weights.tensors.values())
    if options.json:
        shapes = {name: list(value.shape) for name, value in weights.tensors.items()}
        print_json({"output": options.output, "tensors": shapes, "tied": weights.tied, "elements": count})
    else:
        tied = f", {len(weights.tied)} more names of tied ones" if weights.tied else ""
        print(f"written   {options.output}  {len(weights.tensors)} tensors{tied}, {count:,} elements")
    return 0


def of(path: str) -> tuple[Callable[[str, int | None], Weights], Callable[[Weights, str, int], None]]:
    """What reads and what writes a path, by its end."""
    return ENDS.get(Path(path).suffix, (of_folder, to_folder))


def of_folder(path: str, step: int | None) -> Weights:
    return weights_in(path, step)


def to_folder(weights: Weights, path: str, step: int) -> None:
    if Path(path).exists() and not Path(path).is_dir():
        raise SbpcError(f"{path} is a file, of no known kind\n  Name {KINDS}.")
    checkpoints = Checkpoints(path)
    checkpoints.save(step, tree(weights.tensors, weights.tied, left_out=weights.left_out))
    checkpoints.wait()


def of_state(path: str, _: int | None) -> Weights:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise SbpcError(f"{path} holds no weights: {str(error).splitlines()[0]}\n  Name {KINDS}.") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise SbpcError(f"{path} holds a {type(found).__name__} that is no state_dict\n  Save model.state_dict().")
    first: dict[Any, str] = {}
    names = {name: first.setdefault(place(value) or name, name) for name, value in found.items()}
    tied = {name: other for name, other in names.items() if name != other}
    return Weights({name: value for name, value in found.items() if name not in tied}, tied)


def place(tensor: Tensor) -> Any:
    """What two names of a tied tensor have in common, and two tensors have not; None of an empty one."""
    about = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return about if tensor.numel() else None


def to_state(weights: Weights, path: str, _: int) -> None:
    torch.save(weights.state_dict(), path)


ENDS: dict[str, Any] = {
    ".pt": (of_state, to_state),
    ".pth": (of_state, to_state),
    ".safetensors": (lambda path, _: read_weights(path), lambda weights, path, _: save_weights(weights, path)),
}
