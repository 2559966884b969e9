"""Running what may crash or hang: each item in a forked worker, with a limit of seconds per item.

An op of strange shapes may kill the interpreter (a division by zero in C++ raises SIGFPE) or never come back.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import select
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
LENGTH = 8  # bytes of the number that goes before each message


@dataclass(frozen=True)
class Lost:
    """No result: why the worker ended."""

    why: str


def attempt(function: Callable[[Item], Any], items: Sequence[Item], seconds: float) -> Iterator[tuple[Item, Any]]:
    """(item, function(item)) in order, in a forked worker; Lost in the place of a result if that kills it or hangs.

    Results are pickled. Raises RuntimeError with the worker's traceback if `function` raises.
    """
    at = 0
    while at < len(items):
        child, pipe = start(function, items, at)
        lost = None
        try:
            while at < len(items) and lost is None:
                message = receive(pipe, seconds)
                if isinstance(message, Lost):
                    lost = message
                    continue
                kind, value = message
                if kind == "error":
                    raise RuntimeError(value)
                yield items[at], value
                at += 1
        finally:
            os.close(pipe)
            ended = end(child, kill=lost is None or lost.why != "")
        if lost is not None:
            yield items[at], Lost(lost.why or ended)
            at += 1


def start(function: Callable[[Item], Any], items: Sequence[Item], first: int) -> tuple[int, int]:
    """A worker for the items from `first` on: its process and the pipe it writes to."""
    pipe, out = os.pipe()
    child = os.fork()
    if child:
        os.close(out)
        return child, pipe
    try:
        os.close(pipe)
        faulthandler.disable()
        torch.set_num_threads(1)  # the threads of the process that was forked are not in this one
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings about shapes that are tried on purpose
        for item in items[first:]:
            try:
                message = ("done", function(item))
            except Exception:  # whatever it is, the process that waits raises it
                message = ("error", traceback.format_exc())
            body = pickle.dumps(message)
            os.write(out, len(body).to_bytes(LENGTH, "little") + body)
            if message[0] == "error":
                break
    finally:
        os._exit(0)


def receive(pipe: int, seconds: float) -> Any:
    """The next message, or Lost if the worker has ended or takes too long."""
    found = b""
    wanted = LENGTH
    while len(found) < wanted:
        ready, _, _ = select.select([pipe], [], [], seconds)
        if not ready:
            return Lost(f"not done after {seconds:g} s")
        part = os.read(pipe, wanted - len(found))
        if not part:
            return Lost("")
        found += part
        if wanted == LENGTH and len(found) == LENGTH:
            wanted += int.from_bytes(found, "little")
    return pickle.loads(found[LENGTH:])


def end(child: int, kill: bool) -> str:
    """Wait for a worker to end, and see to it that it does; how it ended."""
    if kill:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return f"killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "it ended early"
