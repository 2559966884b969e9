"""Cut a model into stages of a pipeline: two stages, each on half of the ranks, with checkpoints; killed ranks start
again.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/07_pipeline.py

Run alone it prints the plan, and writes the schedule with its bubbles to pipeline.html.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sbpc
from sbpc import Mesh

BATCH, WIDTH, LAYERS = 64, 32, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x - target).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: the same on every rank, and the same after a restart."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.flip(1)


def plan(data: int) -> Any:
    """Two stages of `data` ranks each; a step works on eight parts of the batch, forwards and backwards by turns."""
    return sbpc.plan(Net(), batch(0), Mesh(pipe=2, data=data), stages="pipe", microbatches=8, schedule="1f1b")


def train(steps: int, every: int, folder: str) -> None:
    """Trains as a rank, on from the last checkpoint."""
    sbpc.start(timeout=60)  # joins the other ranks; who waits longer than that for one of them gives up
    torch.manual_seed(0)
    model = sbpc.parallelize(Net(), plan(dist.get_world_size() // 2))  # holds the parameters of this rank's stage
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoints = sbpc.Checkpoints(folder)  # of all stages; they load on any other mesh, with stages or without
    for step in range(checkpoints.load(model, optimizer), steps):
        optimizer.zero_grad()
        loss = model.step(*batch(step))  # forward and backward of all stages
        model.clip_grad_norm_(1.0)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.6f}", flush=True)
        if (step + 1) % every == 0 or step + 1 == steps:
            checkpoints.save(step + 1, model, optimizer)
    checkpoints.wait()
    sbpc.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model in stages of a pipeline.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10, help="save a checkpoint after so many steps")
    parser.add_argument("--checkpoint", default="pipeline-checkpoints", help="the folder of the checkpoints")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.steps, options.every, options.checkpoint)
    else:
        planned = plan(2)
        print(planned)
        planned.save_page("pipeline.html")
