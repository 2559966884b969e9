"""A bed: hosts on one Linux machine, each a network namespace whose link to a common switch is as slow as asked.

Needs root and iproute2. A host has one interface, eth0; both directions of its link pass a token bucket with a queue that holds all
windows of TCP, so that nothing is dropped. Ranks run before other processes of the machine, which would otherwise be measured, too.
They stay in one session: Linux shares cores out among sessions first (`sched_autogroup`), and were each rank one, its threads of gloo
would wait up to seconds for a core on which another rank computes. Hosts with cores of their own know no such thing. Everything is
removed at the end, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

WINDOW = 1 << 19  # bytes of a TCP connection under way at most
BATCH = 1 << 14  # bytes that the kernel hands to a link at once at most
PORT = 29500
NICE = -10  # of ranks, and of their session among the others


def sh(*command: str, must: bool = True) -> None:
    """Run a command of the system; raise with what it said if it fails and must not."""
    done = subprocess.run(command, capture_output=True, text=True)
    if must and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def missing() -> str | None:
    """Why there can be no bed here, None if there can be one."""
    tools = [tool for tool in ("ip", "tc", "nice") if shutil.which(tool) is None]
    if sys.platform != "linux" or tools:
        return f"a bed needs Linux and iproute2: {', '.join(tools) or sys.platform}"
    return None if os.geteuid() == 0 else "a bed needs root"


def prefer(nice: int) -> int:
    """Give this session a nice value among the sessions of the machine, where Linux has such; return the one before."""
    group = Path("/proc/self/autogroup")
    if not group.exists():
        return 0
    before = int(group.read_text().split()[-1])
    group.write_text(str(nice))
    return before


class Bed:
    """`with Bed(4, 200) as bed:` four hosts, 200 Mbit/s each way; `bed.run(command)` runs it as a rank on each."""

    def __init__(self, hosts: int, mbit: float) -> None:
        self.hosts, self.mbit, self.name = hosts, mbit, f"sbpc{os.getpid()}"
        self.team: list[subprocess.Popen[bytes]] = []
        self.before = 0

    def space(self, host: int | str) -> str:
        """The namespace of a host, or of the switch."""
        return f"{self.name}-{host}"

    def __enter__(self) -> Bed:
        self.before = prefer(NICE)
        try:
            switch = self.space("switch")
            for host in ("switch", *range(self.hosts)):
                sh("ip", "netns", "add", self.space(host))
            sh("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            sh("ip", "-n", switch, "link", "set", "bridge", "up")
            for host in range(self.hosts):
                self.plug(host, switch)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def plug(self, host: int, switch: str) -> None:
        """Join a host to the switch by a link of the given speed in both directions."""
        space, port = self.space(host), f"port{host}"
        sh("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", switch)
        for where, device in ((space, "eth0"), (switch, port)):
            sh("ip", "-n", where, "link", "set", device, "gso_max_size", str(BATCH), "up")
            bucket = max(BATCH + 2048, int(self.mbit * 1e6 / 8 * 5e-4))
            speed = ("rate", f"{int(self.mbit * 1e6)}bit", "burst", str(bucket), "limit", str(2 * WINDOW * self.hosts))
            sh("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *speed)
        sh("ip", "-n", switch, "link", "set", port, "master", "bridge")
        sh("ip", "-n", space, "addr", "add", f"10.93.0.{host + 1}/24", "dev", "eth0")
        sh("ip", "-n", space, "link", "set", "lo", "up")
        windows = f"4096 131072 {WINDOW}"
        # A connection that was idle while its rank computed starts at full speed again.
        for name, value in (("rmem", windows), ("wmem", windows), ("slow_start_after_idle", "0")):
            setting = f"/proc/sys/net/ipv4/tcp_{name}"
            sh("ip", "netns", "exec", space, "sh", "-c", f"echo '{value}' > {setting}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        for host in (*range(self.hosts), "switch"):
            sh("ip", "netns", "del", self.space(host), must=False)
        prefer(self.before)

    def end(self) -> None:
        """End all processes of the hosts."""
        for process in self.team:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.team = []

    def run(self, command: Sequence[str], seconds: float = 900) -> None:
        """Run a command on every host, with torchrun's variables; raise with what a rank said if it fails."""
        with tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder, str(host)) for host in range(self.hosts)]
            for host, log in enumerate(logs):
                env = dict(
                    os.environ, RANK=str(host), WORLD_SIZE=str(self.hosts), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                    MASTER_ADDR="10.93.0.1", MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="eth0", OMP_NUM_THREADS="1",
                )  # fmt: skip
                with log.open("wb") as out:
                    inside = ["ip", "netns", "exec", self.space(host), "nice", "-n", str(NICE), *command]
                    self.team.append(
                        subprocess.Popen(
                            inside, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL, preexec_fn=os.setpgrp
                        )
                    )
            limit = time.monotonic() + seconds
            while any(p.poll() is None for p in self.team) and not any(p.poll() for p in self.team):
                if time.monotonic() > limit:
                    break
                time.sleep(0.1)
            time.sleep(1.0 if any(p.poll() for p in self.team) else 0.0)
            codes = [p.poll() for p in self.team]
            self.end()
            ended = {host: code for host, code in enumerate(codes) if code != 0}
            if ended:  # one that a signal ended first: the others may only have missed it
                bad = min(ended, key=lambda host: (ended[host] is None, ended[host] or 0))
                raise RuntimeError(f"ranks ended with {ended}; of rank {bad}:\n{logs[bad].read_text()[-3000:]}")
