"""Two linear layers on a mesh of two axes: every stage from the model to the program of one rank.

    python examples/01_two_layers.py

The same file is a target for the command line, and draws the picture of the README:

    sbpc show examples/01_two_layers.py:two_layers --mesh data=2,tensor=2 \\
        --pin "up.weight=[B, S(0)]" --pin "down.weight=[B, S(1)]" --svg examples/two_layers.svg
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc.inspect.graph_text import graph_text

MESH, PINS = sbpc.Mesh(data=2, tensor=2), {"up.weight": "[B, S(0)]", "down.weight": "[B, S(1)]"}


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().sum()


def two_layers() -> tuple[nn.Module, tuple[Tensor]]:
    return TwoLayers(), (torch.randn(128, 16),)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, args = two_layers()
    plan = sbpc.plan(model, args, MESH, pin=PINS, objective="serial")  # in the order of the model, nothing overlaps
    for title, graph in (("annotated", plan.graph), ("boxed", plan.boxed), ("local, rank 0", plan.local)):
        print(f"--- {title}\n{graph_text(graph, MESH)}")
    print(f"--- plan\n{plan}verified  {plan.verify()} edges")
    loss, gradients = sbpc.simulate(plan, model, args)  # all four ranks in this process
    expected = model(*args)
    expected.backward()
    print(f"\nloss       {loss.item():.5f} on 4 ranks, {expected.item():.5f} on one")
    for name, parameter in model.named_parameters():
        error = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        print(f"gradient   {name}: largest relative difference {error.item():.0e}")
