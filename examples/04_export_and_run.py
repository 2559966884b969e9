"""Export a model with the programs of its ranks to one file; train and infer from the file, without planning or source.

    python examples/04_export_and_run.py

The command line does the same: `sbpc export target -o model.sbpc`, then `sbpc run model.sbpc`, with `--infer` for the
forward alone, or `torchrun --nproc-per-node 2 -m sbpc run model.sbpc`.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc.runtime.start.launch import launch
from sbpc.runtime.state.weight_files import save_weights, weights_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


def export(file: Path) -> None:
    """One file with both programs, and the weights beside it: nothing in them is code."""
    torch.manual_seed(0)
    model, args, mesh = Net(), (torch.ones(8, 16),), sbpc.Mesh(tensor=2)
    train = sbpc.plan(model, args, mesh)
    inference = sbpc.plan(model.eval(), args, mesh, train=False)
    train.export(file, inference)
    save_weights(weights_of(model), file.with_suffix(".safetensors"))
    print(f"one device  loss {model(*args).item():.6f}")


def rank(file: str) -> None:
    """What every rank does: it knows the file alone."""
    device = sbpc.start()
    model = sbpc.load_module(file, "train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.ones(8, 16, device=device)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        print(f"train       step {step} loss {loss.item():.6f}")
    print(f"inference   loss {sbpc.load_module(file, 'inference')(x).item():.6f}")
    sbpc.stop()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            export(Path(folder, "model.sbpc"))
            launch([__file__, str(Path(folder, "model.sbpc"))], ranks=2)  # as torchrun does
