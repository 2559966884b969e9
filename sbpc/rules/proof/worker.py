"""Running what may crash or hang: each item in a forked worker, with a limit of seconds per item.

An op of strange shapes may kill the interpreter (a division by zero in C++ raises SIGFPE) or never come back.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")


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
        child, pipe = start(function, items[at:])
        lost = None
        try:
            while at < len(items) and lost is None:
                if not pipe.poll(seconds):
                    lost = f"not done after {seconds:g} s"
                    continue
                try:
                    kind, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    lost = ""
                    continue
                if kind == "error":
                    raise RuntimeError(value)
                yield items[at], value
                at += 1
        finally:
            pipe.close()
            ended = end(child, kill=lost != "")
        if lost is not None:
            yield items[at], Lost(lost or ended)
            at += 1


def start(function: Callable[[Item], Any], items: Sequence[Item]) -> tuple[int, Connection]:
    """A worker: its process, and the pipe to which it writes."""
    pipe, out = Pipe(duplex=False)
    child = os.fork()
    if child:
        out.close()
        return child, pipe
    try:
        pipe.close()
        faulthandler.disable()
        torch.set_num_threads(1)  # the threads of the process that was forked are not in this one
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings about shapes that are tried on purpose
        for item in items:
            try:
                message = ("done", function(item))
            except Exception:  # whatever it is, the process that waits raises it
                message = ("error", traceback.format_exc())
            out.send_bytes(pickle.dumps(message))
            if message[0] == "error":
                break
    finally:
        os._exit(0)


def end(child: int, kill: bool) -> str:
    """Wait for a worker to end, and see to it that it does; how it ended."""
    if kill:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return f"killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else "it ended early"
