"""Say which ranks do not answer when a collective fails: every rank shows in the store that it lives, what it is
doing, and why it has stopped."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from sbpc._compat import default_store
from sbpc.errors import LostRankError

# seconds between two signs of life, to look for those of others, and for the store to answer
BEAT, LOOK, LIMIT = 0.5, 2.5, 8.0
SHOWN = 8  # ranks at most that a message names
WAITED = "waited for another rank as long as --timeout, or sbpc.start(timeout=), allows"
AGAIN = "  See what it says, and start all ranks again from the last checkpoint: the others cannot go on alone."
TOGETHER = "  Have every rank make the same calls of the same modules, or allow more seconds."
ENDED = "the end of its script"
FEWER = (
    "  If it had fewer batches, give every rank as many: even_batches=True of accelerate, drop_last=True, or batches "
    "without rows."
)
GLOO = "/gloo/", "pair closure"  # in the texts of errors of gloo that torch gives no class of their own
STOPPED = "sbpc/stopped/"  # and what ranks do: the key under which the first one says why it has stopped in that
LOST = "sbpc/lost"  # the key under which a rank writes those that it has found to be lost


class Life:
    """The signs of life of all ranks, and this rank's.

    doing: what this rank does, as others will read it. lost: what the ranks did that do not answer any more, once
    one has found out. stopped: what ranks did when another one stopped, and what that says.
    """

    def __init__(self) -> None:
        self.rank, self.ranks, self.doing = dist.get_rank(), dist.get_world_size(), "its start"
        self.lost: dict[int, str] = {}
        self.stopped = "", ""
        self.waits: queue.SimpleQueue[Callable[[], None]] | None = None
        self.kept_by_rank = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # the store, by rank 0
        self.store = default_store().clone()  # a connection of its own: a wait on the other one would hold up the signs
        self.keys = [f"sbpc/alive/{rank}" for rank in range(self.ranks)]
        self.numbers, self.over = itertools.count(), threading.Event()
        self.sign()
        self.thread = threading.Thread(target=self.live, daemon=True, name="sbpc-alive")
        self.thread.start()

    def sign(self) -> None:
        """Writes one sign of life, and takes in what others have found out."""
        self.store.set(self.keys[self.rank], f"{next(self.numbers)} {self.doing}")
        if not self.lost and self.store.check([LOST]):
            self.lost = read(self.store.get(LOST))
        doing = self.doing
        if self.store.check([STOPPED + doing]):
            self.stopped = doing, self.store.get(STOPPED + doing).decode()

    def stop(self, doing: str, said: str) -> None:
        """Says why this rank has stopped in what all ranks do, unless another one has."""
        with contextlib.suppress(RuntimeError):
            self.store.compare_set(STOPPED + doing, "", json.dumps([self.rank, said]))
            if self.rank == 0 and self.kept_by_rank:
                time.sleep(2 * BEAT)  # as in `look`

    def other(self) -> LostRankError | None:
        """Returns the error about another rank that has stopped in what this one does, None if none has."""
        doing, written = self.stopped
        if doing != self.doing or not written:
            return None
        rank, said = json.loads(written)
        here = f"  rank {self.rank} waited for others in {doing}"
        return None if rank == self.rank else LostRankError(f"rank {rank} {said}\n{here}\n{AGAIN}", [rank])

    def wait(self, wait: Callable[[], object]) -> None:
        """Waits in another thread. Raises LostRankError if a rank stops meanwhile, of which a wait of gloo learns
        nothing."""
        if self.waits is None:
            self.waits = queue.SimpleQueue()
            threading.Thread(target=waiting, args=(self.waits,), daemon=True, name="sbpc-waiting").start()
        done, errors = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                wait()
            except BaseException as error:
                errors.append(error)
            done.set()

        self.waits.put(run)
        while not done.wait(BEAT):
            if (error := self.other()) is not None:
                self.waits = None  # that thread waits on
                raise error
        if errors:
            raise errors[0]

    def live(self) -> None:
        """Writes signs of life until the end, or until the store is gone with the rank that kept it."""
        with contextlib.suppress(RuntimeError):
            while not self.over.wait(BEAT):
                self.sign()

    def end(self) -> None:
        """Ends the signs of life. The last one says so, unless an error ends the script."""
        self.over.set()
        self.thread.join(2 * BEAT)
        if not hasattr(sys, "last_value"):
            self.doing = ENDED
            with contextlib.suppress(RuntimeError):
                self.sign()

    def seen(self) -> list[str]:
        """Returns the last sign of every rank, empty of one that has not given any."""
        there = [key for key in self.keys if self.store.check([key])] if self.ranks <= SHOWN else self.keys
        values = (
            self.store.multi_get(there) if self.store.has_extended_api() else [self.store.get(key) for key in there]
        )
        found = dict(zip(there, values))
        return [found.get(key, b"").decode() for key in self.keys]

    def look(self) -> dict[int, str]:
        """Returns what every rank does, and fills `lost` with those that give no sign any more.

        The first rank that finds some writes them down for the others: when they look, it may have ended, too.
        """
        first, limit = self.seen(), time.monotonic() + LOOK
        now, silent = first, {*range(self.ranks)} - {self.rank}
        while silent and not self.lost and time.monotonic() < limit:
            time.sleep(BEAT / 4)
            now = self.seen()
            silent = {rank for rank in silent if now[rank] == first[rank]}
        doing = {rank: text.partition(" ")[2] or "its start" for rank, text in enumerate(now)}
        if silent and not self.lost:
            self.lost = read(
                self.store.compare_set(LOST, "", json.dumps({rank: doing[rank] for rank in sorted(silent)}))
            )
            if self.rank == 0 and self.kept_by_rank:
                time.sleep(2 * BEAT)  # until the others have read it: they could not, were this rank to end now
        return doing | {self.rank: self.doing}


def waiting(waits: queue.SimpleQueue[Callable[[], None]]) -> None:
    """Does what is put into a queue, one after the other."""
    while True:
        waits.get()()


def read(written: bytes) -> dict[int, str]:
    """Returns by rank what the lost ones did."""
    return {int(rank): text for rank, text in json.loads(written).items()}


lives: list[Life] = []  # of this process: one while it has process groups


def begin() -> None:
    """Begins to give signs of life, if that has not begun. A store of the user's own may take none: then errors stay
    torch's."""
    if not lives:
        with contextlib.suppress(RuntimeError):
            lives.append(Life())


@atexit.register
def end() -> None:
    """Ends the signs of life, before what they need."""
    while lives:
        lives.pop().end()


def wait_for(work: Any, where: torch.device) -> None:
    """Waits for a message. Raises LostRankError once another rank has stopped in what all do."""
    if lives and where.type == "cpu":
        lives[0].wait(work.wait)
    else:
        work.wait()


def tell(doing: str, error: BaseException, part: str) -> None:
    """Tells the other ranks why this one has stopped in what all do, unless another one is why. part: which one of
    the program it runs."""
    if lives and not isinstance(error, LostRankError):
        first = str(error).partition("\n")[0]
        lives[0].stop(doing, f"{part and f'of {part} '}has stopped in {doing}: {type(error).__name__}: {first}")


@contextlib.contextmanager
def watched(doing: str | None = None) -> Iterator[None]:
    """Raises LostRankError in the place of an error of a collective. doing: what this rank does meanwhile, if it is
    to be told."""
    life = lives[0] if lives else None
    if life is not None and doing is not None:
        life.doing = doing
    try:
        yield
    except RuntimeError as error:
        if life is None or not (isinstance(error, dist.DistError) or any(each in str(error) for each in GLOO)):
            raise
        raise explained(life, error) from error
    finally:
        if life is not None and doing is not None:
            life.doing = f"what comes after {doing}"


def explained(life: Life, error: RuntimeError) -> LostRankError:
    """Returns the error that says which ranks do not answer, in a few seconds even if the store does not answer
    either."""
    found: list[dict[int, str]] = []

    def look() -> None:
        with contextlib.suppress(RuntimeError):
            life.sign()
            found.append(life.look())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(LIMIT)
    cause = re.sub(r"^\[[^]]*\] ", "", str(error).partition("\n")[0].partition(". ")[0])
    here = f"  rank {life.rank} was in {life.doing}: {cause}"
    if (other := life.other()) is not None:
        return other
    if life.lost:
        last = [
            f"rank {rank} does not answer any more; its last sign of life came from {text}"
            for rank, text in life.lost.items()
        ]
        fewer = [FEWER] if ENDED in life.lost.values() else []
        return LostRankError("\n".join([*last[:SHOWN], here, *fewer, AGAIN]), list(life.lost))
    if not found:
        keeper = [0] if life.kept_by_rank and life.rank else []
        who = "rank 0, which keeps the store of the job, does" if keeper else "the store of the job and other ranks do"
        return LostRankError(f"{who} not answer\n{here}\n{AGAIN}", keeper)
    others = [f"  rank {rank} is in {text}" for rank, text in found[0].items() if text != life.doing] or [
        "  the others are in the same"
    ]
    what = WAITED if "Timed out waiting" in str(error) else "another rank has broken off a collective"
    return LostRankError("\n".join([f"{what}; all ranks are alive", here, *others[:SHOWN], TOGETHER]), [])
