"""Write, check and read the files of blocks of a checkpoint: a rank's is a line that names the save, then the bytes
of its blocks.

`state.json` says which block lies where, with its CRC-32. That detects damage, not intent.
"""

from __future__ import annotations

import math
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sbpc.errors import CheckpointError
from sbpc.runtime.state.blocks import TensorBlock

CHUNK = 1 << 24  # bytes that are read at once to be checked


class Piece(NamedTuple):
    """Where a block of `shape`, which begins at the indices `start` of its tensor, lies: in the file of a rank, from
    a byte on."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    offset: int
    crc: int


def header(save: str) -> bytes:
    """Returns what a file of blocks begins with. save: what names the save, which no other has."""
    return f"sbpc blocks 2 {save}\n".encode()


def path_of(folder: Path, save: str, rank: int) -> Path:
    """Returns the file of the blocks that a rank writes."""
    return folder / f"{save}-{rank:05d}.blocks"


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor as they are saved."""
    return tensor.cpu().reshape(-1).view(torch.uint8).numpy().data


def check_whole(tensors: Mapping[str, Any], held: Sequence[Mapping[str, Any]]) -> None:
    """Raises CheckpointError unless the blocks of all ranks are whole tensors. tensors: dtype and shape by name.
    held: as in `writers`."""
    found: dict[str, dict[Any, int]] = {name: {} for name in tensors}
    for name, (start, size) in (item for blocks in held for item in blocks.items()):
        found[name][start] = size
    for name, (dtype, shape) in tensors.items():
        if sum(found[name].values()) != math.prod(shape) * getattr(torch, dtype).itemsize:
            raise CheckpointError(
                f"the ranks have only a part of {name}, so nothing is saved\n"
                "  Every rank does all steps and updates, with the same model and optimizer: start again from the "
                "last checkpoint."
            )


def writers(held: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns by rank the names of the blocks that it writes: of the ranks that hold a block, the one with least to
    write does.

    held: by rank, start and bytes of each block by name.
    """
    holders: dict[tuple[str, Any], list[int]] = {}
    for rank, blocks in enumerate(held):
        for name, (start, _) in blocks.items():
            holders.setdefault((name, start), []).append(rank)
    names: list[list[str]] = [[] for _ in held]
    loads = [0] * len(held)
    for (name, _), ranks in holders.items():
        rank = min(ranks, key=loads.__getitem__)
        names[rank].append(name)
        loads[rank] += held[rank][name][1]
    return names


def write(folder: Path, save: str, rank: int, blocks: Mapping[str, TensorBlock]) -> tuple[dict[str, Piece], int]:
    """Writes the file of this rank, reads it back once it is on the disk, and returns where each block lies, and how
    long it is.

    CRC-32 takes some 0.4 s a GB, twice. What is read back comes from the memory of the system as a rule: that the
    disk keeps what it has taken is what fsync promises.
    """
    path, pieces, offset = path_of(folder, save, rank), {}, len(header(save))
    with path.open("xb") as file:
        file.write(header(save))
        for name, block in blocks.items():
            data = bytes_of(block.local)
            file.write(data)
            pieces[name] = Piece(block.start, tuple(block.local.shape), rank, offset, zlib.crc32(data))
            offset += data.nbytes
        file.flush()
        os.fsync(file.fileno())
    check(folder, save, rank, offset, pieces.values())
    return pieces, offset


def open_file(path: Path) -> BufferedReader:
    """Opens a file to be read. Raises OSError also for a pipe or a device, which may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is no file")
    return path.open("rb")


@contextmanager
def opened(folder: Path, save: str, rank: int, size: int) -> Iterator[BufferedReader]:
    """Opens the file of the blocks of a rank. Raises CheckpointError unless it is of this save and has this many
    bytes."""
    path = path_of(folder, save, rank)
    try:
        with open_file(path) as file:
            length = os.fstat(file.fileno()).st_size
            if length != size:
                raise damaged(path, f"it has {length} bytes, not {size}")
            if file.read(len(header(save))) != header(save):
                raise damaged(path, "it does not begin as this save does")
            yield file
    except OSError as error:
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def check(folder: Path, save: str, rank: int, size: int, pieces: Iterable[Piece]) -> None:
    """Reads the file of the blocks of a rank through. Raises CheckpointError unless it holds what was written."""
    ordered = sorted(pieces, key=lambda piece: piece.offset)
    ends = [*(piece.offset for piece in ordered[1:]), size]
    buffer = memoryview(bytearray(CHUNK if ordered else 0))
    with opened(folder, save, rank, size) as file:
        for piece, end in zip(ordered, ends):
            at, crc = piece.offset, 0
            file.seek(at)
            while at < end and (count := file.readinto(buffer[: end - at])):
                at, crc = at + count, zlib.crc32(buffer[:count], crc)
            if crc != piece.crc:
                raise spoilt(folder, save, piece)


def check_files(folder: Path, record: Mapping[str, Any], ranks: Iterable[int], through: bool = True) -> None:
    """Checks the files of blocks of some ranks: reads them, too, if `through`, else looks at their sizes and how
    they begin."""
    pieces: dict[int, list[Piece]] = {rank: [] for rank in ranks if record["files"][rank]}
    for piece in (piece for there in record["blocks"].values() for piece in there):
        if through and piece.rank in pieces:
            pieces[piece.rank].append(piece)
    for rank, there in pieces.items():
        check(folder, record["save"], rank, record["files"][rank], there)


def read(folder: Path, record: Mapping[str, Any], blocks: Mapping[str, TensorBlock]) -> None:
    """Reads blocks, whatever the blocks were in which they were written. Raises CheckpointError for what is not what
    was written."""
    wanted: dict[int, list[tuple[Piece, TensorBlock]]] = {}
    for name, block in blocks.items():
        there = [piece for piece in record["blocks"][name] if math.prod(map(len, common(piece, block)))]
        for piece in there:
            wanted.setdefault(piece.rank, []).append((piece, block))
        if sum(math.prod(map(len, common(piece, block))) for piece in there) != block.local.numel():
            raise CheckpointError(f"{folder} lacks a part of {name.partition('/')[2]}\n  Load another checkpoint.")
    for rank, pairs in sorted(wanted.items()):
        with opened(folder, record["save"], rank, record["files"][rank]) as file:
            for piece, block in sorted(pairs, key=lambda pair: pair[0].offset):
                saved = torch.empty(math.prod(piece.shape), dtype=block.local.dtype, device="cpu")
                data = bytes_of(saved)
                file.seek(piece.offset)
                if file.readinto(data) != data.nbytes or zlib.crc32(data) != piece.crc:
                    raise spoilt(folder, record["save"], piece)
                place = common(piece, block)
                theirs, ours = (
                    tuple(slice(r.start - s, r.stop - s) for r, s in zip(place, each.start)) for each in (piece, block)
                )
                block.local[ours].copy_(saved.view(piece.shape)[theirs])


def spoilt(folder: Path, save: str, piece: Piece) -> CheckpointError:
    """Returns the error about a block with another CRC-32 than it was written with."""
    return damaged(path_of(folder, save, piece.rank), f"the block at byte {piece.offset} is not what was written")


def common(piece: Piece, block: TensorBlock) -> list[range]:
    """Returns by dim which indices of the whole tensor are in both."""
    sides = zip(piece.start, piece.shape, block.start, block.local.shape)
    return [range(max(a, b), max(a, b, min(a + m, b + n))) for a, m, b, n in sides]


def damaged(path: Path, why: str) -> CheckpointError:
    """Returns the error about a file that is not what was written."""
    return CheckpointError(f"{path} is damaged: {why}\n  Copy it anew, or load an earlier checkpoint by step=.")
