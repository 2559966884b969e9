"""Bring the ranks of one attempt together in a store that may still hold the keys of earlier attempts.

torchrun keeps one store over all restarts and does not clear it, so a restarted rank can read the address of a dead one.
Therefore each rank greets under a fresh name, rank 0 answers to that name, and all go on under a prefix that rank 0 made.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from sbpc.errors import MeshError

PAUSE = 0.02  # seconds between two looks at the store


def store_of_attempt(seconds: float) -> Store | None:
    """Returns the part of torchrun's store for this attempt, or None if torchrun keeps no store.

    Every rank must call this at the same point. Raises MeshError if one does not come within `seconds`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, limit = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=seconds)
    store = TCPStore(*address, ranks, False, limit)
    return PrefixStore(f"sbpc/{meet(store, rank, ranks, seconds)}", store)


def meet(store: Store, rank: int, ranks: int, seconds: float) -> str:
    """Returns the name of this attempt, the same on all ranks and new in the store."""
    own = uuid.uuid4().hex
    if rank == 0:
        welcome(store, own, ranks, seconds)
        return own
    store.set(f"sbpc/hello/{rank}", own)
    try:
        store.wait([f"sbpc/welcome/{own}"], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise MeshError(f"rank 0 did not come within {seconds:g} s\n  See what it says, or raise --timeout.") from error
    name = store.get(f"sbpc/welcome/{own}").decode()
    store.set(f"sbpc/{name}/here/{rank}", "")
    return name


def welcome(store: Store, name: str, ranks: int, seconds: float) -> None:
    """Answers every greeting as rank 0, those of dead ranks too, until all ranks are here."""
    others, answered, limit = range(1, ranks), dict[int, str](), time.monotonic() + seconds
    while not all(store.check([f"sbpc/{name}/here/{other}"]) for other in others):
        for other in others:
            if store.check([f"sbpc/hello/{other}"]):
                greeting = store.get(f"sbpc/hello/{other}").decode()
                if answered.get(other) != greeting:
                    store.set(f"sbpc/welcome/{greeting}", name)
                    answered[other] = greeting
        if time.monotonic() > limit:
            late = [other for other in others if not store.check([f"sbpc/{name}/here/{other}"])]
            raise MeshError(f"ranks {late[:8]} did not come within {seconds:g} s\n  See what they say, or raise --timeout.")
        time.sleep(PAUSE)
