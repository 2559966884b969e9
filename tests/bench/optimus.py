"""How large a batch fits: `python -m tests.bench.optimus`. The claim of Optimus (Xu and You 2021) is 8 times that of Megatron.

A transformer block on 16 ranks, in the bytes a rank that a batch of WHOLE takes in Megatron's layout, in which every rank holds all
activations between its products. For each number of micro-batches the largest batch under that limit is sought by doubling, then by
halving the distance: of the fastest plan on (4, 4), by layouts alone and in a loop. By layouts alone inputs and outputs are stored once
over the ranks, and counted by the plan. A loop reads its parts from where the caller has the batch; here that is stored once over
the ranks, too, so its bytes are taken off the limit.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import MemoryLimitError
from tests.test_experts import block

WHOLE, SEQ, WIDTH, HEADS = 8, 512, 1024, 16
PARTS = 1, 4, 16, 64
RANKS = 16


class WithLoss(nn.Module):
    """A model whose loss is the mean square of what it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def fits(batch: int, memory: float, parts: int) -> bool:
    """Whether a plan is found in `memory` bytes; its figures are printed."""
    with torch.device("meta"):
        model, (x,) = block(batch, SEQ, WIDTH, HEADS)
    looped = parts > 1
    given = (WithLoss(model), (x.detach(),)) if looped else (model, (x,))
    outside = x.nbytes / RANKS if looped else 0.0
    start, found = time.process_time(), "does not fit"
    if outside < memory:
        try:
            mesh = Mesh(a=4, b=4, cluster="h100")
            plan = sbpc.plan(*given, mesh, memory=memory - outside, microbatches=parts, spread=not looped)
            found = f"{plan.cost.seconds * 1e3:.2f} ms, {(plan.cost.memory['total'] + outside) / 1e6:,.0f} MB"
        except MemoryLimitError:
            pass
    took = time.process_time() - start
    print(f"  {parts:2} micro-batches, {batch / WHOLE:g} x the batch: {found} ({took:.1f} CPU s)", flush=True)
    return found != "does not fit"


def largest(memory: float, parts: int) -> int:
    """The largest batch that fits, to an eighth of itself: a multiple of WHOLE and of `parts`, 0 if there is none."""
    unit = max(WHOLE, parts)
    good, bad = 0, 1
    while fits(bad * unit, memory, parts):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle * unit, memory, parts) else (good, middle)
    return good * unit


def main() -> None:
    with torch.device("meta"):
        model, args = block(WHOLE, SEQ, WIDTH, HEADS)
    whole = sbpc.baseline("megatron", model, args, Mesh(t=RANKS, cluster="h100"))
    limit = whole.cost.memory["total"]
    print(
        f"megatron: a batch of {WHOLE} takes {limit / 1e6:,.0f} MB a rank and {whole.cost.seconds * 1e3:.2f} ms",
        flush=True,
    )
    for parts in PARTS:
        print(f"in {parts} micro-batches: {largest(limit, parts) / WHOLE:g} x the batch of megatron", flush=True)


if __name__ == "__main__":
    main()
