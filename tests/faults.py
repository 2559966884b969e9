"""Jobs under torchrun of which a rank is killed at some step: what they print, and what they leave behind."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

GPT, PIPELINE = (Path(__file__).parents[1] / "examples" / name for name in ("02_train_gpt.py", "07_pipeline.py"))
STEP = re.compile(r"step +(\d+)  loss (\S+)")


@dataclass
class Outcome:
    """losses: as printed, by step. starts: the steps that were the first after a start. killed: the step at which."""

    losses: dict[int, str]
    starts: list[int]
    killed: int | None
    seconds: float
    left: list[int]
    port_free: bool


def run_job(
    checkpoint: Path, steps: int, every: int, kill: int | None, seed: int = 0, ranks: int = 2, script: Path = GPT
) -> Outcome:
    """Train an example's model; once rank 0 has printed step `kill`, a rank drawn by `seed` is killed by SIGKILL."""
    port = free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--monitor-interval", "0.1"]
    command += [str(script), "--steps", str(steps), "--every", str(every), "--checkpoint", str(checkpoint)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert job.stdout is not None and job.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=errors.extend, args=(job.stderr,), daemon=True)
    reader.start()
    losses, starts, killed, last = {}, [], None, None
    for line in job.stdout:
        found = STEP.search(line)
        if found is None:
            continue
        step = int(found[1])
        if last is None or step != last + 1:
            starts.append(step)
        if step in losses:  # a step that is done again gives what it gave before
            assert losses[step] == found[2], (step, losses[step], found[2])
        losses[step], last = found[2], step
        if kill is not None and killed is None and step >= kill:
            victims = workers(job.pid)
            os.kill(random.Random(seed).choice(victims), signal.SIGKILL)
            killed = step
    code = job.wait(60)
    reader.join(10)
    assert code == 0, "".join(errors)[-3000:]
    return Outcome(losses, starts, killed, time.monotonic() - begun, processes(str(checkpoint)), can_bind(port))


def workers(parent: int) -> list[int]:
    """The ranks that a torchrun has started, in order."""
    found = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return sorted(int(pid) for pid, above in map(str.split, found.splitlines()) if int(above) == parent)


def processes(mark: str) -> list[int]:
    """The processes whose command line holds `mark`."""
    found = subprocess.run(["ps", "-axo", "pid=,command="], capture_output=True, text=True, check=True).stdout
    lines = [line.split(None, 1) for line in found.splitlines()]
    return [int(line[0]) for line in lines if len(line) == 2 and mark in line[1] and int(line[0]) != os.getpid()]


def free_port() -> int:
    """A port that nobody listens on, below those that systems give out: nobody takes it before it is used."""
    while not can_bind(port := random.randrange(20_000, 30_000)):
        pass
    return port


def can_bind(port: int) -> bool:
    """Whether nobody listens on a port."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
