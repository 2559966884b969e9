"""Start the ranks of a mesh as processes on this machine, watch them, and end them all when one fails."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from sbpc.errors import SbpcError

log = logging.getLogger("sbpc")
RECORDS, ALIVE = (
    "SBPC_RECORDS",
    "SBPC_ALIVE",
)  # variables of a rank: the folder for its error, the pipe its launcher holds
POLL, GRACE = 0.05, 3.0  # seconds between two looks at the ranks, and for a rank to end when told to
TAIL = 4000  # characters shown of what a rank wrote before it died without a word


class RankError(SbpcError):
    """A rank failed. rank: the first that did. code: how it ended, negative for a signal."""

    def __init__(self, message: str, rank: int, code: int) -> None:
        super().__init__(message)
        self.rank, self.code = rank, code


def launch(arguments: Sequence[str], ranks: int) -> None:
    """Run `python *arguments` once per rank, with the variables that torchrun sets; return when all have ended well.

    Rank 0 writes to the streams of this process, what the others write is shown only if they fail. When a rank fails,
    when this process is interrupted, or even killed, no rank is left behind.

    Raises RankError with the message of the rank that failed first.
    """
    # The store lives in this process, on a port that the system chose: no race for a free one.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    alive, held = os.pipe()
    team: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="sbpc-ranks-") as folder, terminable():
        try:
            for rank in range(ranks):
                team.append(start(arguments, rank, ranks, Path(folder), store.port, alive))
            failed = watch(team)
            error = first_error(failed, Path(folder)) if failed else None
        finally:
            end(team)
            os.close(alive)
            os.close(held)
    if error is not None:
        raise error


def start(
    arguments: Sequence[str], rank: int, ranks: int, folder: Path, port: int, alive: int
) -> subprocess.Popen[bytes]:
    """One rank, in a session of its own, so that it and all it starts can be ended together."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    env = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # all ranks are clients of the store above
        "TORCHELASTIC_RESTART_COUNT": "0",
        RECORDS: str(folder),
        ALIVE: str(alive),
    }
    command = [sys.executable, *arguments]
    log.info("rank %d: %s", rank, " ".join(command))
    if rank == 0:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=(alive,), start_new_session=True)
    with (folder / f"{rank}.log").open("wb") as out:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=(alive,),
            start_new_session=True,
        )


def watch(team: Sequence[subprocess.Popen[bytes]]) -> dict[int, int]:
    """Wait until all ranks have ended well, or until one has not: the exit codes of those that failed."""
    while True:
        codes = [process.poll() for process in team]
        if any(codes):
            time.sleep(2 * POLL)  # whoever died at the same moment
            return {rank: process.returncode for rank, process in enumerate(team) if process.poll()}
        if all(code == 0 for code in codes):
            return {}
        time.sleep(POLL)


def end(team: Sequence[subprocess.Popen[bytes]]) -> None:
    """End all ranks and whatever they have started."""
    for process in team:
        signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for process in team:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("rank process %d does not end when told to: it is killed", process.pid)
    for process in team:
        signal_group(process, signal.SIGKILL)
        process.wait()


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a rank and to whatever it has started, if any of it still runs."""
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        os.killpg(process.pid, number)


def first_error(failed: dict[int, int], folder: Path) -> RankError:
    """The error of the rank that failed first.

    A rank that raised has recorded when. One that died without a record (killed, out of memory) comes first: what the
    others say is then that they have lost it.
    """
    records = {rank: record(folder / f"{rank}.json") for rank in failed}
    rank = min(failed, key=lambda rank: (records[rank].get("time", 0.0), rank))
    code, text = failed[rank], records[rank].get("text")
    if text is not None:
        return RankError(f"rank {rank}: {text}", rank, code)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    written = tail(folder / f"{rank}.log") or "  It left no message." + " Was there memory enough?" * (
        code == -signal.SIGKILL
    )
    return RankError(f"rank {rank} {how}\n{written}", rank, code)


def record(path: Path) -> dict[str, Any]:
    """What a rank recorded, nothing if it did not."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def tail(path: Path) -> str:
    """The end of what a rank wrote."""
    try:
        return path.read_bytes().decode(errors="replace")[-TAIL:].rstrip()
    except OSError:
        return ""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM leaves the block by an exception, as Ctrl-C does, so that what it has started is ended."""

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


@contextmanager
def as_rank() -> Iterator[None]:
    """In a rank: end with the launcher, and end at once on an error, which the launcher is told.

    The process ends without teardown: other ranks may be stuck in a collective with this one.
    """
    if ALIVE in os.environ:
        threading.Thread(target=follow, args=(int(os.environ[ALIVE]),), daemon=True).start()
    try:
        yield
    except BaseException as error:
        code = 2 if isinstance(error, SbpcError) else 1
        text = text_of(error)
        rank = os.environ.get("RANK", "?")
        if RECORDS in os.environ:
            path = Path(os.environ[RECORDS], f"{rank}.json")
            part = path.with_suffix(".part")
            part.write_text(json.dumps({"time": time.time(), "text": text}))
            part.replace(path)
        else:
            print(f"sbpc: rank {rank}: {text}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


LOST = {
    "Timed out waiting": "waited for another rank as long as --timeout, or sbpc.start(timeout=), allows\n"
    "  See what the others do and say, or allow more.",
    "Connection closed by peer": "lost another rank\n  See what the others say.",
}
"""What gloo says when other ranks do not answer -> what that means, and what to do."""


def text_of(error: BaseException) -> str:
    """What is told of an error that ends a rank."""
    if isinstance(error, SbpcError):
        return str(error)
    said = [text for part, text in LOST.items() if part in str(error)]
    return "\n".join([*said, "".join(traceback.format_exception(error))])


def follow(alive: int) -> None:
    """End this rank and whatever it has started when the launcher is gone: nobody else holds the pipe's other end."""
    while os.read(alive, 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)
