"""Train in Lightning by its ModelParallelStrategy, which takes a module with DTensor parameters as it is: by the
Trainer, then by Fabric, each beside the same steps on one device.

    pip install lightning
    torchrun --nproc-per-node 2 examples/10_lightning.py

`strategy="ddp"` and "fsdp" are refused: the plan is the parallelism. Clipping is the module's: it knows all ranks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import sbpc

ROWS, STEPS, EPOCHS, CLIP = 16, 3, 2, 0.5  # rows of a batch of all ranks together, steps of an epoch
QUIET = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")}
COMPUTES: dict[str, Any] = {"accelerator": "gpu" if torch.cuda.is_available() else "cpu", "num_nodes": 1}


class Net(nn.Module):
    """Two layers; the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def data(rank: int = 0, ranks: int = 1) -> DataLoader:
    """Gives this rank's part of every batch. Lightning's own sampler would do, too, but shuffles."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, STEPS * ROWS, 32, generator=generator)
    rows = TensorDataset(x, y)
    return DataLoader(rows, ROWS // ranks, sampler=DistributedSampler(rows, ranks, rank, shuffle=False))


def parallel(net: nn.Module, device_mesh: Any) -> Any:
    """The module on Lightning's mesh; each rank along the axis data_parallel gives its part of a batch."""
    batch = torch.empty(2, ROWS, 32, device="meta")
    shards = ["S(0)@data_parallel", "S(0)@data_parallel"]
    return sbpc.parallelize(net, sbpc.plan(net, tuple(batch), sbpc.Mesh.from_device_mesh(device_mesh), inputs=shards))


class Module(lightning.LightningModule):
    """What the Trainer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net: Any = seeded()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Is called once the ranks have met, and again before each fit, validate and test."""
        if type(self.net) is Net:
            self.net = parallel(self.net, self.device_mesh)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(*batch)  # of all rows of all ranks, the same on each
        self.losses.append(loss.item())
        return loss

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.net.clip_grad_norm_(CLIP)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps what dropout goes on from; weights and the optimizer are in the checkpoint already."""
        checkpoint["random"] = self.net.random_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.net.set_random_state(checkpoint["random"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def by_trainer(rank: int, ranks: int) -> list[float]:
    """An epoch, and another one that goes on from Lightning's checkpoint of the first, as after a restart."""
    losses: list[float] = []
    for epoch in range(EPOCHS):
        module = Module()
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        options = {**COMPUTES, "devices": ranks, "strategy": strategy, "use_distributed_sampler": False}
        trainer = lightning.Trainer(max_epochs=epoch + 1, **options, **QUIET)
        trainer.fit(module, data(rank, ranks), ckpt_path="lightning-checkpoint" if epoch else None)
        trainer.save_checkpoint("lightning-checkpoint")
        losses += module.losses
    return losses


def by_fabric(rank: int, ranks: int) -> list[float]:
    """The module is made parallel before Fabric sees it, so that its `step`, `no_sync` and clipping stay in reach."""
    strategy = FabricStrategy(lambda module, device_mesh: module, ranks, 1)
    fabric = lightning.Fabric(devices=ranks, strategy=strategy, **COMPUTES)
    fabric.launch()
    module = fabric.setup(parallel(seeded(), strategy.device_mesh))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=1e-2))
    return steps(module, optimizer, data(rank, ranks), fabric.backward, module.clip_grad_norm_)


def on_one_device() -> list[float]:
    net = seeded()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    clip = lambda norm: nn.utils.clip_grad_norm_(net.parameters(), norm)  # noqa: E731
    return steps(net, optimizer, data(), Tensor.backward, clip)


def steps(net: Any, optimizer: Any, batches: Iterable[list[Tensor]], backward: Any, clip: Any) -> list[float]:
    """Trains by a loop of one's own, and returns the losses."""
    losses = []
    for batch in itertools.chain(*[batches] * EPOCHS):
        optimizer.zero_grad()
        loss = net(*batch)
        backward(loss)
        clip(CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = by_trainer(rank, ranks), by_fabric(rank, ranks), on_one_device()
    if rank == 0:
        print("step    Trainer     Fabric  one device")
        for step, losses in enumerate(zip(*found, strict=True), 1):
            print(f"{step:4d}", *(f"{loss:10.6f}" for loss in losses))
    sbpc.stop()


if __name__ == "__main__":
    main()
