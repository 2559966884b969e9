"""What a plan can be asked: pins, a memory limit, the plans of experts, the best mesh, and its cost as a formula.

python examples/06_options.py
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().sum()


def show(what: str, plan: sbpc.Plan) -> None:
    """Print a line about a plan: its seconds, how far they may be from the best, its memory, where up.weight is
    stored."""
    cost = plan.cost
    print(
        f"{what:16} {cost.seconds:.3e} s  gap {cost.gap:.1%}  {cost.memory['total']:9,} bytes  "
        f"{plan.layout('up.weight')}"
    )


if __name__ == "__main__":
    with torch.device("meta"):  # planning allocates no weights
        model, args = TwoLayers(), (torch.empty(512, 64),)
    mesh = sbpc.Mesh(data=2, tensor=2)
    best = sbpc.plan(model, args, mesh)
    show("best", best)
    show("pinned", sbpc.plan(model, args, mesh, pin={"up.*": "S(1)@tensor", "down.*": "B@data"}))
    show("in less memory", sbpc.plan(model, args, mesh, memory=0.9 * best.cost.memory["total"]))
    for name in ("data", "fsdp", "megatron"):
        show(name, sbpc.baseline(name, model, args, mesh))
    for row in sbpc.sweep(model, args, devices=8)[:3]:
        print(f"{row.mesh!s:30} {row.cost:.3e} s")
    plan = sbpc.plan(model, args, mesh, dynamic={"x": ("b", "h"), "up.weight": ("4*h", "h")})
    print("seconds  ", plan.cost.expr)
    print("bytes    ", plan.cost.bytes_expr)
    print("b = 1024 ", f"{plan.cost.subs(b=1024):.3e} s")
    print("b = 512, 2048, 8192 ", plan.cost.evaluate(b=np.array([512, 2048, 8192])))
