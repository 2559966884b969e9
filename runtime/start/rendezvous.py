"""How the ranks of one attempt find each other in a store that may still hold what earlier attempts left there.

torchrun keeps one store over all restarts, and does not clear it: a rank that starts again can read the address of one
that is dead. So each rank greets under a name that nobody had before, rank 0 answers to that name, and all go on
under the name of this meeting.
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
    """The part of torchrun's store for this attempt; None where torchrun keeps none, and rank 0 makes a new one.

    Every rank must call this at the same point. Raises MeshError if one does not come within `seconds`.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, limit = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timedelta(seconds=seconds)
    store = TCPStore(*address, ranks, False, limit)
    return PrefixStore(f"sbpc/{meet(store, rank, ranks, seconds)}", store)


def meet(store: Store, rank: int, ranks: int, seconds: float) -> str:
    """A name that the ranks which meet now have in common, and that no earlier meeting had."""
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
    """As rank 0: answer every greeting, those of the dead too, until all ranks are here."""
    others, heard, limit = range(1, ranks), dict[int, str](), time.monotonic() + seconds
    while not all(store.check([f"sbpc/{name}/here/{other}"]) for other in others):
        for other in others:
            if store.check([f"sbpc/hello/{other}"]):
                greeting = store.get(f"sbpc/hello/{other}").decode()
                if heard.get(other) != greeting:
                    store.set(f"sbpc/welcome/{greeting}", name)
                    heard[other] = greeting
        if time.monotonic() > limit:
            late = [other for other in others if not store.check([f"sbpc/{name}/here/{other}"])]
            raise MeshError(f"ranks {late[:8]} did not come within {seconds:g} s\n  See what they say, or raise --timeout.")
        time.sleep(PAUSE)
