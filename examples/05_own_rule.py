"""An op of your own: its rule is proved when it is registered, and its layers are split like any others.

python examples/05_own_rule.py
"""

import torch
from torch import Tensor, nn

import sbpc


@torch.library.custom_op("example::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    """x * sigmoid(gate) + bias, in one kernel."""
    return x * gate.sigmoid() + bias


@torch.library.custom_op("example::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = gate.sigmoid()
    return grad * s, grad * x * s * (1 - s), grad.sum((0, 1))


gated.register_fake(lambda x, gate, bias: torch.empty_like(x))
gated_backward.register_fake(lambda grad, x, gate: (torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[-1])))
gated.register_autograd(
    lambda ctx, grad: gated_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]),
)

# x and bias may be partial sums together, for the op is linear in both; the gate must be known in full. The gradient
# of the bias is a sum over b and s: where those are split, each rank holds a part of the sum.
x, gate, bias = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.randn(5)
sbpc.rule("example::gated", "b s d, b s d, d -> b s d ; lin(0,2)", examples=[(x, gate, bias)])
sbpc.rule(
    "example::gated_backward",
    "b s d, b s d, b s d -> b s d, b s d, d ; +b s ; lin(0)",
    examples=[(torch.randn(3, 4, 5), x, gate)],
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(*dims, bias=False) for dims in ((16, 64), (16, 64), (64, 16)))
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.up(x), self.gate(x), self.bias)).square().sum()


def block() -> tuple[nn.Module, tuple[Tensor]]:
    return Block(), (torch.randn(8, 32, 16),)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, args = block()
    plan = sbpc.plan(model, args, sbpc.Mesh(data=2, tensor=2), pin={"up.weight": "S(0)@tensor"})
    print(plan)
    loss, gradients = sbpc.simulate(plan, model, args)
    expected = model(*args)
    expected.backward()
    print(f"loss       {loss.item():.5f} on 4 ranks, {expected.item():.5f} on one")
    for name, parameter in model.named_parameters():
        error = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        print(f"gradient   {name}: largest relative difference {error.item():.0e}")
