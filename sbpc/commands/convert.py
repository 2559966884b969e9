"""`sbpc convert`: weights between a folder of checkpoints, a safetensors file and a state_dict that torch.save wrote."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbpc.commands.options import file_name
from sbpc.commands.output import check_file, print_json
from sbpc.errors import SbpcError
from sbpc.runtime.checkpoint import Checkpoints, whole_model
from sbpc.runtime.weights import read_tensors, save_tensors, tree

NAME = "convert"
HELP = "turn a checkpoint into the weights of one device, or these into a checkpoint"
KINDS = "a folder of checkpoints, *.safetensors, or *.pt as torch.save writes a state_dict"
Weights = dict[str, Tensor]


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("source", metavar="SOURCE", type=file_name, help=KINDS)
    parser.add_argument("-o", "--output", metavar="DESTINATION", type=file_name, required=True, help="one of the same")
    parser.add_argument(
        "--step", type=int, metavar="N", help="of the checkpoint (default: the last one there; 0 for a new one)"
    )


def run(options: argparse.Namespace) -> int:
    """`sbpc convert`: weights alone; an optimizer's state stays behind."""
    if options.step is not None and options.step < 0:
        raise SbpcError(f"--step {options.step}\n  Give 0 at least.")
    read, write = of(options.source)[0], of(options.output)[1]
    if write is not to_folder:
        check_file(options.output)
    if options.step is not None and read is not of_folder and write is not to_folder:
        raise SbpcError(f"--step {options.step} is of checkpoints\n  Remove it: neither side is a folder of them.")
    weights = read(options.source, options.step)
    write(weights, options.output, options.step or 0)
    count = sum(value.numel() for value in weights.values())
    if options.json:
        shapes = {name: list(value.shape) for name, value in weights.items()}
        print_json({"output": options.output, "tensors": shapes, "elements": count})
    else:
        print(f"written   {options.output}  {len(weights)} tensors, {count:,} elements")
    return 0


def of(path: str) -> tuple[Callable[[str, int | None], Weights], Callable[[Weights, str, int], None]]:
    """What reads and what writes a path, by its end."""
    return ENDS.get(Path(path).suffix, (of_folder, to_folder))


def of_folder(path: str, step: int | None) -> Weights:
    return whole_model(path, step)


def to_folder(weights: Weights, path: str, step: int) -> None:
    if Path(path).exists() and not Path(path).is_dir():
        raise SbpcError(f"{path} is a file, of no known kind\n  Name {KINDS}.")
    checkpoints = Checkpoints(path)
    checkpoints.save(step, tree(weights, {}, (), ()))
    checkpoints.wait()


def of_state(path: str, _: int | None) -> Weights:
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise SbpcError(f"{path} holds no weights: {str(error).splitlines()[0]}\n  Name {KINDS}.") from error
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise SbpcError(f"{path} holds a {type(found).__name__} that is no state_dict\n  Save model.state_dict().")
    return dict(found)


ENDS: dict[str, Any] = {
    ".pt": (of_state, lambda weights, path, _: torch.save(weights, path)),
    ".pth": (of_state, lambda weights, path, _: torch.save(weights, path)),
    ".safetensors": (lambda path, _: read_tensors(path), lambda weights, path, _: save_tensors(weights, path)),
}
