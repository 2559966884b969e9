"""Real gloo processes for tests: a function run on every rank, its results by rank."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import sbpc
from sbpc.cli.main import main


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, seconds: float = 120.0) -> list[Any]:
    """What `function(*args)` returns on each of `ranks` new processes, an Exception's text where it raises.

    A rank that ends without a result has None, and how it ended is printed. After `seconds` all that still run are killed
    and the test fails. Plans among `args`, also in lists, tuples and dicts, are planned once: the ranks load them, a tenth of the work.
    """
    with tempfile.TemporaryDirectory() as folder:
        args = tuple(saved(arg, Path(folder, f"plan{at}")) for at, arg in enumerate(args))
        workers = [forks().Process(target=worker, args=(function, rank, ranks, folder, args)) for rank in range(ranks)]
        for process in workers:
            process.start()
        limit = time.monotonic() + seconds
        for process in workers:
            process.join(max(0.0, limit - time.monotonic()))
        late = [rank for rank, process in enumerate(workers) if process.is_alive()]
        for rank, process in enumerate(workers):
            if process.exitcode:
                print(f"rank {rank} ended with {process.exitcode}, which if negative is a signal", file=sys.stderr)
        for process in workers:
            process.kill()
            process.join()
        assert not late, f"ranks {late} still ran after {seconds} s"
        found = []
        for rank in range(ranks):
            path = Path(folder, f"result{rank}")
            found.append(torch.load(path, weights_only=False) if path.exists() else None)
        return found


def forks() -> Any:
    """Processes that are forked where torch and sbpc are imported, once, and before any thread is started."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    return context


def forked(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process of its own, which is small: to fork it takes a third of what the process of all tests takes."""
    with ProcessPoolExecutor(1, mp_context=forks()) as pool:
        return pool.submit(function, *args).result()


@dataclass(frozen=True)
class Saved:
    """A plan on its way to the ranks."""

    path: Path


def saved(arg: Any, path: Path) -> Any:
    """An argument as the ranks get it: plans as files."""
    if isinstance(arg, (list, tuple)):
        return type(arg)(saved(each, Path(f"{path}-{at}")) for at, each in enumerate(arg))
    if isinstance(arg, dict):
        return {name: saved(each, Path(f"{path}-{at}")) for at, (name, each) in enumerate(arg.items())}
    if not isinstance(arg, sbpc.Plan):
        return arg
    arg.save(path)
    return Saved(path)


def loaded(arg: Any) -> Any:
    """An argument as it was given."""
    if isinstance(arg, (list, tuple)):
        return type(arg)(map(loaded, arg))
    if isinstance(arg, dict):
        return {name: loaded(each) for name, each in arg.items()}
    return sbpc.load(arg.path) if isinstance(arg, Saved) else arg


def worker(function: Callable[..., Any], rank: int, ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    """One rank. What it raises or dies of is printed with where it was, as the other ranks only see that it is gone."""
    faulthandler.enable()
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    store = dist.FileStore(os.path.join(folder, "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=30))
    try:
        result = function(*map(loaded, args))
    except Exception as error:  # the test looks at what the rank returns, this text as well
        result = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    torch.save(result, os.path.join(folder, f"result{rank}.part"))
    os.rename(os.path.join(folder, f"result{rank}.part"), os.path.join(folder, f"result{rank}"))
    if not isinstance(result, str):
        wait_for_others(ranks, folder)


def wait_for_others(ranks: int, folder: str, seconds: float = 5.0) -> None:
    """Waits until every rank has its result: one that ended before would break groups that others still connect."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and not all(
        os.path.exists(os.path.join(folder, f"result{at}")) for at in range(ranks)
    ):
        time.sleep(0.005)


def command(*arguments: str) -> str:
    """On a rank: what `sbpc` prints there as a rank of a job that is started; a start of Python takes as long as a hundred steps."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(list(arguments)) == 0
    return printed.getvalue()
