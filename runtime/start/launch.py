"""Start the ranks of a mesh as processes on this machine, watch them, and end all of them when one fails.

They are forked from a process that has imported torch and sbpc, once: that takes each of them three seconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from sbpc.errors import SbpcError
from sbpc.runtime.start.lost_ranks import WAITED

log = logging.getLogger("sbpc")
RECORDS = "SBPC_RECORDS"  # variable of a rank: the folder for the record of its error
IMPORTED = ["torch._dynamo", "sbpc.api.planning", "sbpc.api.loading", "sbpc.cli.main", "sbpc.cli.train_loop"]
SAME, GRACE = 0.1, 3.0  # seconds in which ranks fail at the same moment, and for a rank to end when told to
TAIL = 4000  # characters shown of what a rank wrote before it died without a word


class RankError(SbpcError):
    """A rank failed. rank: the first one that failed. code: its exit code, negative for a signal."""

    def __init__(self, message: str, rank: int, code: int) -> None:
        super().__init__(message)
        self.rank, self.code = rank, code


def prepare() -> Any:
    """Starts to import what ranks will need, unless that has begun, and returns the kind of their processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    return context


def launch(arguments: Sequence[str], ranks: int) -> None:
    """Runs `python *arguments` once per rank, with the variables that torchrun sets, and returns when all have ended
    well. The arguments are those of a script, or "-m" and those of a module.

    Rank 0 writes to the streams of this process. What the others write is shown only if they fail. No rank is left
    behind when a rank fails, or when this process is interrupted or killed.

    Raises RankError with the message of the rank that failed first.
    """
    # The store lives in this process, on a port that the system chose: no race for a free one.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    processes: list[ForkServerProcess] = []
    with tempfile.TemporaryDirectory(prefix="sbpc-ranks-") as folder, terminable():
        try:
            for rank in range(ranks):
                processes.append(start(arguments, rank, ranks, Path(folder), store.port))
            failed = watch(processes)
            error = first_error(failed, Path(folder)) if failed else None
        finally:
            end(processes)
    if error is not None:
        raise error


def start(arguments: Sequence[str], rank: int, ranks: int, folder: Path, port: int) -> ForkServerProcess:
    """Starts one rank."""
    log.info("rank %d: python %s", rank, " ".join(arguments))
    with contextlib.ExitStack() as opened:
        # rank 0 writes to our streams
        files = [opened.enter_context((folder / f"{rank}.log").open("wb")).fileno()] * 2 if rank else [1, 2]
        streams = [opened.enter_context(Connection(os.dup(file))) for file in files]  # what can be sent to a process
        given = list(arguments), variables(rank, ranks, folder, port), os.getcwd(), streams
        process: ForkServerProcess = prepare().Process(target=run, args=given)
        process.start()
    return process


def run(arguments: list[str], environment: dict[str, str], folder: str, streams: list[Connection]) -> None:
    """Runs `python *arguments` in this process, in a session of its own, so that it and all its children can be ended
    together."""
    os.setsid()
    threading.Thread(target=follow, daemon=True).start()
    for at, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), at)
        stream.close()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def variables(rank: int, ranks: int, folder: Path, port: int) -> dict[str, str]:
    """Returns the environment of one rank: what torchrun sets, and what `as_rank` reads."""
    return {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # all ranks are clients of the launcher's store
        "TORCHELASTIC_RESTART_COUNT": "0",
        RECORDS: str(folder),
    }


def watch(processes: Sequence[ForkServerProcess]) -> dict[int, int]:
    """Waits until all ranks have ended or one has failed, and returns the exit codes of those that failed, by rank,
    the first one first."""
    failed: dict[int, int] = {}
    while not failed and (running := [process.sentinel for process in processes if process.exitcode is None]):
        wait(running)
        failed = codes(processes)
    time.sleep(SAME if failed else 0.0)
    return failed | codes(processes)


def codes(processes: Sequence[ForkServerProcess]) -> dict[int, int]:
    """Returns the exit codes of ranks that failed."""
    return {rank: code for rank, process in enumerate(processes) if (code := process.exitcode)}


def end(processes: Sequence[ForkServerProcess]) -> None:
    """Ends all ranks and their children."""
    for process in processes:
        signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            log.warning("rank process %d does not end when told to: it is killed", process.pid)
    for process in processes:
        signal_group(process, signal.SIGKILL)
        process.join()


def signal_group(process: ForkServerProcess, number: int) -> None:
    """Sends a signal to a rank and its children, if any of them still runs."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        if process.exitcode is None and os.getpgid(process.pid) != process.pid:  # it is just being started
            os.kill(process.pid, number)
        else:
            os.killpg(process.pid, number)


def first_error(failed: dict[int, int], folder: Path) -> RankError:
    """Returns the error of the rank that failed first.

    A rank that raised an error has recorded when. A rank that died without a record, as when it is killed, comes before
    those: their errors say that they have lost it.
    """
    records = {rank: record(folder / f"{rank}.json") for rank in failed}
    rank = min(failed, key=lambda rank: records[rank].get("time", 0.0))
    code, text = failed[rank], records[rank].get("text")
    if text is not None:
        return RankError(f"rank {rank}: {text}", rank, code)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    without = "  It left no message." + " Was there memory enough?" * (code == -signal.SIGKILL)
    return RankError(f"rank {rank} {how}\n{tail(folder / f'{rank}.log') or without}", rank, code)


def record(path: Path) -> dict[str, Any]:
    """Returns the record of a rank's error, empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        recorded = json.loads(path.read_text())
        return recorded if isinstance(recorded, dict) else {}
    return {}


def tail(path: Path) -> str:
    """Returns the end of what a rank wrote."""
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace")[-TAIL:].rstrip()
    return ""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM raise an exception in the block, as Ctrl-C does, so that what the block started is ended."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def as_rank() -> Iterator[None]:
    """Runs the block as a rank: on an error, which it records for the launcher, the process ends at once and without
    teardown, because other ranks may be stuck in a collective with this one.
    """
    try:
        yield
    except BaseException as error:
        text, rank = text_of(error), os.environ.get("RANK", "?")
        if RECORDS in os.environ:
            path = Path(os.environ[RECORDS], f"{rank}.json")
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps({"time": time.time(), "text": text}))
            unfinished.replace(path)
        else:
            print(f"sbpc: rank {rank}: {text}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2 if isinstance(error, SbpcError) else 1)


LOST = {
    "Timed out waiting": f"{WAITED}\n  See what the others do and say, or allow more.",
    **dict.fromkeys(
        ["Connection closed by peer", "Connection reset by peer"], "lost another rank\n  See what the others say."
    ),
}
"""A text of gloo's errors when other ranks do not answer -> what it means, and what to do."""


def text_of(error: BaseException) -> str:
    """Returns the message about an error that ends a rank."""
    if isinstance(error, SbpcError):
        return str(error)
    meanings = [meaning for text, meaning in LOST.items() if text in str(error)]
    return "\n".join([*meanings, "".join(traceback.format_exception(error))])


def follow() -> None:
    """Ends this rank and its children when the launcher is gone."""
    launcher: Any = multiprocessing.parent_process()
    launcher.join()
    os.killpg(os.getpgid(0), signal.SIGKILL)
