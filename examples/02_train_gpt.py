"""Train a small GPT on the text of Python's own documentation, over all ranks, with checkpoints; killed ranks start
again.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/02_train_gpt.py --steps 100

Run it again with more steps, or on another number of ranks, and it goes on from the last checkpoint.
"""

import argparse
import pydoc_data.topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh

BATCH, SEQUENCE, WIDTH, HEADS, LAYERS = 8, 32, 64, 4, 2
TEXT = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.proj(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(SEQUENCE, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step: the same on every rank, and the same after a restart."""
    starts = torch.randint(len(TEXT) - SEQUENCE, (BATCH,), generator=torch.Generator().manual_seed(step)).tolist()
    rows = torch.stack([TEXT[at : at + SEQUENCE + 1] for at in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT over all ranks.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20, help="save a checkpoint after so many steps")
    parser.add_argument("--checkpoint", default="gpt-checkpoints", help="the folder of the checkpoints")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = sbpc.start(timeout=60)  # joins the other ranks; who waits longer than that for one of them gives up
    mesh = Mesh(data=dist.get_world_size())
    plan = sbpc.plan(GPT(), batch(0), mesh)
    model = sbpc.parallelize(GPT(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoints = sbpc.Checkpoints(options.checkpoint, keep=2)
    start = checkpoints.load(model, optimizer)  # 0 if there is none
    for step in range(start, options.steps):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        loss = model(tokens.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.6f}", flush=True)
        if (step + 1) % options.every == 0 or step + 1 == options.steps:
            checkpoints.save(step + 1, model, optimizer)  # written while training goes on
    checkpoints.wait()
    sbpc.stop()


if __name__ == "__main__":
    main()
