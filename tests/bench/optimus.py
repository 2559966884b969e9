"""How large a batch fits: `python -m tests.bench.optimus`. The claim of Optimus (Xu and You 2021) is 8 times that of Megatron.

A transformer block on 16 ranks, in the bytes a rank that a batch of WHOLE takes in Megatron's layout, in which every rank holds all
activations between its products. Tried are multiples of that batch: the fastest plan on (4, 4) under that limit, by layouts alone, and
in micro-batches. By layouts alone inputs and outputs are stored once over the ranks. A loop reads the parts of the batch from where the
caller has it, such as the memory of the host, and leaves a loss.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import MemoryLimitError
from tests.test_experts import block

WHOLE, SEQ, WIDTH, HEADS = 8, 512, 1024, 16
TIMES = 2, 3, 4, 6, 8, 12, 16, 24, 32
PARTS = 1, 2, 4, 8, 16, 32


class WithLoss(nn.Module):
    """A model whose loss is the mean square of what it returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def fits(batch: int, memory: float, parts: int) -> str | None:
    """Seconds and bytes of the fastest plan found in `memory` bytes, None if none is."""
    with torch.device("meta"):
        model, (x,) = block(batch, SEQ, WIDTH, HEADS)
    looped = parts > 1
    given = (WithLoss(model), (x.detach(),)) if looped else (model, (x,))
    try:
        plan = sbpc.plan(*given, Mesh(a=4, b=4, cluster="h100"), memory=memory, microbatches=parts, spread=not looped)
    except MemoryLimitError:
        return None
    return f"{plan.cost.seconds * 1e3:.2f} ms, {plan.cost.memory['total'] / 1e6:,.0f} MB"


def main() -> None:
    with torch.device("meta"):
        model, args = block(WHOLE, SEQ, WIDTH, HEADS)
    whole = sbpc.baseline("megatron", model, args, Mesh(t=16, cluster="h100"))
    limit = whole.cost.memory["total"]
    print(f"megatron: a batch of {WHOLE} takes {limit / 1e6:,.0f} MB a rank and {whole.cost.seconds * 1e3:.2f} ms")
    for parts in PARTS:
        for times in TIMES:
            found = fits(times * WHOLE, limit, parts)
            print(f"  in {parts} parts {times:2} x the batch: {found or 'does not fit'}", flush=True)
            if found is None:
                break


if __name__ == "__main__":
    main()
