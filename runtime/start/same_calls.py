"""Compare what the ranks are about to run: the same call, on the same whole arguments. Programs would mix different
ones in silence.

A checksum reads 32 bits at a time as numbers c and adds up k * c modulo 2 ** 64 with a key k of 64 random bits for
each place, block by block, then those of the sums likewise. Two different blocks have one sum with a chance below 2
** -32, as their numbers differ by less than 2 ** 32 (multilinear hashing: Lemire and Kaser, "Strongly universal
string hashing is fast", 2014).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sbpc.errors import PlanError
from sbpc.mesh.layout import Layout
from sbpc.mesh.mesh import Mesh
from sbpc.mesh.states import Broadcast
from sbpc.runtime.start import lost_ranks, process_groups

FIRST, EVERY = 3, 20  # the calls that are compared: the first ones, then each that this divides
BLOCK = 4096  # numbers of 32 bits that are added up into one
PART = 1 << 22  # elements that are read at a time: whole blocks
numbers = itertools.count()  # of what runs a plan in this process: all ranks make them in one order


class SameCalls:
    """Compares the calls of what runs one plan on all ranks of its mesh: the first three, then every twentieth, and
    the one after a step that failed on this rank: another may still be in that one, and would take this rank's next
    values for those of it.

    part: which one of the program this rank runs, such as "stage 1". layouts: of the arguments. On an axis on which
    one is B, all ranks have to give the same. names: gives theirs. axis: one along which each rank could give its own
    rows. A comparison takes 0.5 to 2.5 % of one step of a GPT of 4 layers of width 256 on 512 tokens and two busy CPU
    ranks, so about 0.1 % of all; on a GPU it waits for what was started before.
    """

    failed = False  # of whatever plan

    def __init__(
        self,
        mesh: Mesh,
        layouts: Sequence[Layout],
        names: Callable[[], Sequence[str]],
        axis: str | None,
        part: str = "",
    ) -> None:
        self.part_of_program = part
        self.mesh, self.layouts, self.names, self.axis = mesh, layouts, names, axis
        self.number, self.calls = next(numbers), 0
        self.group = process_groups.everyone() if mesh.ranks > 1 else None

    @contextmanager
    def call(
        self, how: str, random: dict[str, int], arguments: Sequence[Tensor], where: torch.device, exchanges: bool = True
    ) -> Iterator[None]:
        """Counts the call that runs in the block. how: it runs. random: its place among random numbers. exchanges:
        whether ranks do anything together in it; they need not all make a call in which they do not.

        Raises PlanError, the same on all ranks, if one makes another call, or gives another argument where all take
        the same; LostRankError if a collective fails.
        """
        self.calls += exchanges  # the others are no calls of all ranks
        name = f"call {self.calls} of plan {self.number}, {how}"
        with self.together(name, self.part_of_program) if exchanges else lost_ranks.watched(name):
            if (
                self.group is not None
                and exchanges
                and (self.calls <= FIRST or self.calls % EVERY == 0 or SameCalls.failed)
            ):
                here = f"{name}, random numbers {random}", self.sums(arguments, where)
                self.compare(process_groups.from_all_ranks(here, self.group))
                SameCalls.failed = False
            del arguments  # of which the program alone shall hold what it reads
            yield

    @staticmethod
    @contextmanager
    def together(doing: str, part: str | None = None) -> Iterator[None]:
        """Notes whether what all ranks do together fails here. Raises LostRankError if a collective does. part: see
        `SameCalls`; given where `doing` is told only once, and then the others are told why."""
        try:
            with lost_ranks.watched(doing):
                yield
        except BaseException as error:
            SameCalls.failed = True
            if part is not None:
                lost_ranks.tell(doing, error, part)
            raise

    @torch.no_grad()
    def sums(self, arguments: Sequence[Tensor], where: torch.device) -> list[int]:
        """Returns the checksums of arguments; after the first calls 0 for what each rank may have computed on its
        GPU, where the last bits of a sum differ from run to run.
        """
        rounded = [self.calls > FIRST and each.is_cuda and each.is_floating_point() for each in arguments]
        sums = [
            torch.zeros(1, dtype=torch.int64) if left_out else checksum(each)
            for each, left_out in zip(arguments, rounded)
        ]
        return torch.cat([each.to(where) for each in sums]).tolist() if sums else []

    def compare(self, everywhere: Sequence[tuple[str, list[int]]]) -> None:
        """Raises PlanError unless the ranks agree. everywhere: by rank its call, and the checksums of its arguments."""
        calls = [call for call, _ in everywhere]
        others = [rank for rank, call in enumerate(calls) if call != calls[0]]
        if others:
            raise PlanError(
                f"the ranks do not make the same call: rank {others[0]} is in {calls[others[0]]}; rank 0 is in "
                f"{calls[0]}\n"
                "  Have every rank make the same calls of the same modules in the same order; none may skip a batch "
                "or have one more."
            )
        for at, layout in enumerate(self.layouts):
            firsts: dict[tuple[int, ...], int] = {}
            for rank, (_, sums) in enumerate(everywhere):
                first = firsts.setdefault(self.part(layout, rank), rank)
                if sums[at] != everywhere[first][1][at]:
                    raise self.different(at, first, rank)

    def part(self, layout: Layout, rank: int) -> tuple[int, ...]:
        """Returns which part of an argument a rank gives: its place on the axes on which the argument is not whole."""
        places = zip(self.mesh.coordinates(rank), layout.states)
        return tuple(at for at, state in places if not isinstance(state, Broadcast))

    def different(self, at: int, first: int, rank: int) -> PlanError:
        """Returns the error about an argument that two ranks give differently."""
        todo = (
            "Give the same batch on all ranks: without a DistributedSampler, shuffled and augmented from one seed, "
            "and broadcast by one rank where each would compute it"
        )
        if self.axis is not None:
            todo += (
                "; or plan for the batch of all ranks together, of which each gives its own rows: sbpc.plan(..., "
                f"inputs={self.axis!r})"
            )
        name = self.names()[at]
        what = f"argument {name} is not the same on rank {rank} as on rank {first}"
        return PlanError(f"{what}, and the plan takes the same there: its layout is {self.layouts[at]}\n  {todo}.")


def check_weights(named: Mapping[str, Tensor]) -> None:
    """Raises PlanError, the same on all ranks, unless all hold the same. Every rank must call this at the same
    point."""
    with torch.no_grad():
        everywhere = process_groups.from_all_ranks(
            [int(checksum(each)) for each in named.values()], process_groups.everyone()
        )
    for rank, sums in enumerate(everywhere):
        for name, there, first in zip(named, sums, everywhere[0]):
            if there != first:
                raise PlanError(
                    f"{name} is not the same on rank {rank} as on rank 0\n"
                    "  Make the model from one seed on all ranks, or load the same weights."
                )


def checksum(tensor: Tensor) -> Tensor:
    """Returns one int64 of the bits of a tensor's elements in their order, whatever its strides."""
    # in parts, as products take twice their memory
    sums = torch.cat([sums_of_blocks(part) for part in tensor.reshape(-1).split(PART)])
    while len(sums) > 1:
        sums = sums_of_blocks(sums)
    return sums


def sums_of_blocks(values: Tensor) -> Tensor:
    """Returns the sum of key times number of every block of a vector."""
    blocks = max(1, -(-values.nbytes // (4 * BLOCK)))
    # whole blocks, zeros behind the values
    memory = torch.zeros(blocks * 4 * BLOCK, dtype=torch.uint8, device=values.device)
    memory[: values.nbytes].view(values.dtype).copy_(values)
    return (memory.view(torch.int32).view(-1, BLOCK) * keys(values.device)).sum(1)


@functools.cache
def keys(where: torch.device) -> Tensor:
    """Returns the keys of a block, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (BLOCK,), generator=generator, device="cpu").to(where)
