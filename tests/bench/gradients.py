"""The error of gradients of 16 bits against float64, by model, plan, number of simulated ranks and `reduce`.

    python -m tests.bench.gradients

Each number is relative to the error of one device: that of sums "as computed" grows with the root of the ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import sbpc
from sbpc import Mesh
from sbpc.errors import PlanError
from tests import models
from tests.gradient_errors import error, of_half

MODELS = {
    "mlp": functools.partial(models.mlp, batch=256, width=64, hidden=128),
    "gpt2": functools.partial(models.gpt2, batch=64, seq=16, vocab=64, width=32, heads=8),
    "conv-net": functools.partial(models.resnet, batch=64, channels=16),
}
PLANS: dict[str, tuple[str | None, dict[str, int], dict[str, Any]]] = {
    "data, 2": ("data", {"d": 2}, {}),
    "data, 16": ("data", {"d": 16}, {}),
    "data, 64": ("data", {"d": 64}, {}),
    "data, 4 x 4": ("data", {"d": 4, "e": 4}, {}),
    "fsdp, 16": ("fsdp", {"d": 16}, {}),
    "tensor, 2 x 4": ("megatron", {"d": 2, "t": 4}, {}),
    "sequence, 2 x 4": ("megatron+sp", {"d": 2, "t": 4}, {}),
    "solved, 16": (None, {"d": 16}, {}),
    "micro-batches, 2": (None, {"d": 2}, {"microbatches": 8}),
    "stages, 2 x 2": (None, {"p": 2, "d": 2}, {"stages": "p", "microbatches": 8}),
}
REDUCE = "as computed", "float32", "exchange"


def main() -> None:
    print(f"{'':50}{''.join(f'{each:>14}' for each in REDUCE)}")
    for name, make in MODELS.items():
        for held in (False, True):
            model, args, options = of_half(make, held)
            one = error(sbpc.plan(model, args, Mesh(d=1), **options), model, args)
            print(f"{name}, {'held in bfloat16' if held else 'autocast'}: {one:.2e} on one device")
            for what, (expert, axes, more) in PLANS.items():
                try:
                    plans = [planned(expert, model, args, axes, reduce=each, **options, **more) for each in REDUCE]
                except PlanError:  # the scheme does not fit the model
                    continue
                print(
                    f"    {what:46}{''.join(f'{error(plan, model, args) / one:14.3f}' for plan in plans)}", flush=True
                )


def planned(expert: str | None, model: Any, args: Any, axes: dict[str, int], **options: Any) -> sbpc.Plan:
    """A verified plan: of an expert, or solved."""
    mesh = Mesh(**axes)
    plan = (
        sbpc.plan(model, args, mesh, **options)
        if expert is None
        else sbpc.baseline(expert, model, args, mesh, **options)
    )
    plan.verify()
    return plan


if __name__ == "__main__":
    main()
