"""Define `sbpc convert`: turn a folder of checkpoints, a safetensors file or a saved state_dict into another of
these."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sbpc.cli.options import add_file
from sbpc.cli.output import check_file, print_json
from sbpc.errors import SbpcError
from sbpc.runtime.state.checkpoint import Checkpoints, weights_in
from sbpc.runtime.state.weight_files import Weights, read_weights, save_weights, tree

NAME = "convert"
HELP = "turn a checkpoint into the weights of one device, or these into a checkpoint"
KINDS = "a folder of checkpoints, *.safetensors, or *.pt as torch.save writes a state_dict"
DESTINATIONS = (
    "one of the same: *.pt is for load_state_dict; the others hold tied tensors once, and buffers that are not"
    " persistent besides, as programs need them"
)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_file(parser, "source", metavar="SOURCE", help=KINDS)
    add_file(parser, "-o", "--output", metavar="DESTINATION", required=True, help=DESTINATIONS)
    step = "of the checkpoint (default: the last one there; 0 for a new one)"
    parser.add_argument("--step", type=int, metavar="N", help=step)


def run(options: argparse.Namespace) -> int:
    """Runs `sbpc convert`. It converts weights alone, and leaves an optimizer's state behind.

    A state_dict holds a tied tensor under all its names, and only persistent buffers. The other two hold each tensor
    once and all buffers, and say which names are tied and which buffers a state_dict leaves out.
    """
    if options.step is not None and options.step < 0:
        raise SbpcError(f"--step {options.step}\n  Give 0 at least.")
    (read, _), (_, write) = format_of(options.source), format_of(options.output)
    if write is not write_folder:
        check_file(options.output)
    if options.step is not None and read is not weights_in and write is not write_folder:
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
        if write is not STATE_DICT[1] and weights.left_out:
            first, *others = weights.left_out
            names = f"{first} and {len(others)} more" if others else first
            print(f"          load_state_dict takes no buffers that are not persistent, as {names}: write *.pt for it")
    return 0


def format_of(path: str) -> tuple[Callable[[str, int | None], Weights], Callable[[Weights, str, int], None]]:
    """Returns the functions that read and write a path, by its suffix."""
    return FORMATS.get(Path(path).suffix, (weights_in, write_folder))


def write_folder(weights: Weights, path: str, step: int) -> None:
    if Path(path).exists() and not Path(path).is_dir():
        raise SbpcError(f"{path} is a file, of no known kind\n  Name {KINDS}.")
    checkpoints = Checkpoints(path)
    checkpoints.save(step, tree(weights.tensors, weights.tied, left_out=weights.left_out))
    checkpoints.wait()


def read_state_dict(path: str, _: int | None) -> Weights:
    try:
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise SbpcError(f"{path} holds no weights: {str(error).splitlines()[0]}\n  Name {KINDS}.") from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise SbpcError(f"{path} holds a {type(state).__name__} that is no state_dict\n  Save model.state_dict().")
    first: dict[Any, str] = {}
    names = {name: first.setdefault(memory_of(value) or name, name) for name, value in state.items()}
    tied = {name: other for name, other in names.items() if name != other}
    return Weights({name: value for name, value in state.items() if name not in tied}, tied)


def memory_of(tensor: Tensor) -> Any:
    """Returns what two names of one tensor have in common and two tensors have not; None for an empty tensor."""
    view = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
    return view if tensor.numel() else None


STATE_DICT = read_state_dict, lambda weights, path, _: torch.save(weights.state_dict(), path)
SAFETENSORS = (lambda path, _: read_weights(path)), (lambda weights, path, _: save_weights(weights, path))
FORMATS: dict[str, Any] = {".pt": STATE_DICT, ".pth": STATE_DICT, ".safetensors": SAFETENSORS}
