"""torch.compile with sbpc as its backend: the script of one device, started once per rank.

    torchrun --nproc-per-node 2 examples/03_torch_compile.py

The parameters stay whole on every rank: the work is spread, memory is not saved. `sbpc.parallelize` does both.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), y)


if __name__ == "__main__":
    dist.init_process_group()
    torch.manual_seed(0)
    model = TwoLayers()
    mesh = sbpc.Mesh(data=dist.get_world_size())
    compiled = torch.compile(model, backend="sbpc", options={"mesh": mesh})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        x, y = torch.randn(2, 64 if step < 3 else 32, 16)  # the last batch is smaller: one more graph
        optimizer.zero_grad()
        loss = compiled(x, y)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.6f}")
    sbpc.stop()
