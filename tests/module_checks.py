"""What a training script does with a module, run in one process on the plain one, on ranks on the parallel one: equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from tests.module_worlds import UNEVEN, Alone, Net, batch, seeded


class Logits(Net):
    """The same without a loss."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.out(x)


class Stats(nn.Module):
    """A batch norm, whose buffers change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.norm(self.inner(x))[:, :3], y)


def weights(world: Alone, module: nn.Module) -> dict[str, Tensor]:
    return {name: world.whole(value) for name, value in module.state_dict().items()}


def gradients(world: Alone, module: nn.Module) -> dict[str, Any]:
    return {name: None if p.grad is None else world.whole(p.grad) for name, p in module.named_parameters()}


def names(world: Alone) -> Any:
    module = world.uneven()
    found = [
        [n for n, _ in module.named_parameters()],
        [n for n, _ in module.named_buffers()],
        list(module.state_dict()),
    ]
    kinds = [isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters()]
    return found, kinds, [tuple(p.shape) for p in module.parameters()], isinstance(module, Net), weights(world, module)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.1, foreach=False),
    "adam foreach": lambda ps: torch.optim.Adam(ps, lr=0.1, amsgrad=True, foreach=True),
    "adam fused": lambda ps: torch.optim.Adam(ps, lr=0.1, fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


def optimizers(world: Alone) -> Any:
    """Clipped steps under a schedule with every optimizer."""
    found = {}
    module = world.uneven()
    start = weights(world, module)
    for name, make in OPTIMIZERS.items():
        module.load_state_dict(start)
        optimizer = make([p for p in module.parameters() if p.requires_grad])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
        told = []
        for step in range(3):
            optimizer.zero_grad(set_to_none=step != 1)
            loss = module(*batch(step))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(
                module.parameters(), 0.3, norm_type=2.0 if step else torch.inf, foreach=step < 2
            )
            optimizer.step()
            schedule.step()
            told += [loss.item(), world.whole(norm).item()]
        found[name] = told, weights(world, module)
    return found


def accumulation(world: Alone) -> Any:
    """Gradients add up over batches, also with those of a retained graph; `grad` does not touch them."""
    module = world.uneven()
    found = []
    for seed in range(3):
        (module(*batch(seed)) / 3).backward()
        found.append(gradients(world, module))
    loss = module(*batch(4))
    loss.backward(retain_graph=True)
    loss.backward()
    found.append(gradients(world, module))
    apart = torch.autograd.grad(module(*batch(5)), [module.up.weight, module.twin])
    found.append(gradients(world, module))
    module.zero_grad(set_to_none=False)
    module(*batch(6)).backward()
    return found, [world.whole(g) for g in apart], gradients(world, module)


def states(world: Alone) -> Any:
    """State dicts: whole ones, of part of the module, of another layout, assigned, incomplete."""
    torch.manual_seed(5)
    other = {name: torch.randn_like(value) for name, value in Net().state_dict().items()}
    module = world.uneven()
    found = []
    found.append([str(module.load_state_dict(other)), weights(world, module), module(*batch()).item()])
    part = {"weight": torch.ones(8, 5), "bias": torch.zeros(8)}
    found.append([str(module.up.load_state_dict(part)), weights(world, module), module(*batch()).item()])
    elsewhere = world.parallel(seeded(), batch(), pin={"up.weight": "[B, S(1)]", "down.weight": "[S(0), B]"})
    for assign in (False, True):
        found.append([str(module.load_state_dict(elsewhere.state_dict(), assign=assign)), weights(world, module)])
        module(*batch()).backward()
        found.append(gradients(world, module))
    found.append(str(module.load_state_dict({"up.bias": torch.ones(8), "more": torch.ones(1)}, strict=False)))
    for wrong in ({"up.bias": torch.ones(8)}, dict(module.state_dict()) | {"up.bias": torch.ones(9)}):
        try:
            module.load_state_dict(wrong)
        except RuntimeError as error:
            found.append(str(error).splitlines()[1:])
    return found, weights(world, module)


def modes(world: Alone) -> Any:
    """Training with running statistics, evaluation between the steps, and inference."""
    module = world.parallel(seeded(Stats), batch(), evaluate=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        module.train()(*batch(step)).backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            loss = module(*batch(7))
        with torch.inference_mode():
            again = module(*batch(7))
        found += [loss.item(), again.item(), loss.requires_grad]
    with torch.no_grad():
        loss = module.train()(*batch(8))
    return found, loss.item(), loss.requires_grad, weights(world, module)


def layouts(world: Alone) -> Any:
    """Arguments and results as shards; DTensor arguments in the planned layout and in another; gradients of arguments."""
    x, y = batch()
    x.requires_grad_()
    options: dict[str, Any] = {"inputs": ["[S(0), B]"], "outputs": ["[S(0), S(1)]"], "pin": UNEVEN}
    module = world.parallel(seeded(Logits), (x,), **options)
    found = []
    for given in (world.part(x, "[S(0), B]"), world.placed(x, "[S(0), B]"), world.placed(x, "[B, S(1)]")):
        module.zero_grad()
        out = module(given)
        ((out - world.part(y, "[S(0), S(1)]")) ** 2).sum().backward()
        grad: Any = given.grad
        kept = world.whole(grad, "" if isinstance(grad, DTensor) else "[S(0), B]")
        given.grad = x.grad = None
        found.append([world.whole(out, "[S(0), S(1)]"), kept, gradients(world, module)])
    plain = world.parallel(seeded(Logits), (x,))
    out = plain(world.placed(x, "[S(0), S(1)]"))
    out.sum().backward()
    return found, world.whole(out), gradients(world, plain)


def half(world: Alone) -> Any:
    """Two plans of one model in one process, one with autocast, in turns."""
    full, low = world.parallel(seeded(), batch()), world.parallel(seeded(), batch(), dtype=torch.bfloat16)
    found = []
    for seed in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = low(*batch(seed))
        loss.backward()
        found += [full(*batch(seed)).item(), str(loss.dtype)]
    return found, {name: None if p.grad is None else str(p.grad.dtype) for name, p in low.named_parameters()}


def scaler(world: Alone) -> Any:
    """A gradient scaler skips the step in which one rank alone sees an infinite gradient."""
    module = world.uneven()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    scale = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        scale.scale(module(*batch(step))).backward()
        if step == 1:
            grad: Any = module.up.bias.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            if not isinstance(grad, DTensor) or dist.get_rank() == 0:
                local[0] = torch.inf
        scale.step(optimizer)
        scale.update()
        found.append(scale.get_scale())
    return found


def hooks(world: Alone) -> Any:
    """Hooks of the whole module, from before the plan and from after it, and of parameters."""
    model = seeded(Logits)
    model.register_forward_hook(lambda module, args, out: out * 2)
    x, _ = batch()
    module = world.parallel(model, (x,))
    calls = []
    module.register_forward_pre_hook(lambda module, args: calls.append("before"))
    module.register_forward_hook(lambda module, args, out: calls.append("after"))
    module.twin.register_hook(lambda grad: calls.append(("grad", world.whole(grad))))
    module.down.weight.register_post_accumulate_grad_hook(lambda p: calls.append(("added", world.whole(p.grad))))
    out = module(x)
    out.sum().backward()
    return world.whole(out), gradients(world, module), sorted(calls, key=str)


def copies(world: Alone) -> Any:
    """A deep copy trains apart from the original; an average of weights is one."""
    module = world.uneven()
    other = copy.deepcopy(module)
    average = AveragedModel(module)
    found = []
    for step in range(2):
        other.zero_grad()
        loss = other(*batch(step))
        loss.backward()
        torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.1).step()
        average.update_parameters(other)
        found.append(loss.item())
    return found, weights(world, module), weights(world, other), weights(world, average), average(*batch()).item()


class Large(nn.Module):
    """Parameters of half a megabyte, initialised twice, the first of them tied to another."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(256, 256, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.head = nn.Linear(256, 256, bias=False)
        self.head.weight = self.table.weight
        self.small = nn.Parameter(nn.init.orthogonal_(torch.empty(16, 16)))
        self.layers[1:].apply(lambda m: nn.init.normal_(m.weight, std=0.1) if isinstance(m, nn.Linear) else None)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x).square().mean() * self.mask.sum() + self.small.sum()


def meta(world: Alone) -> Any:
    """A model from the meta device, built tensor by tensor from one seed; the generator goes on as after one device."""
    found = []
    for kind, args, pin in ((Net, batch(), UNEVEN), (Large, (torch.arange(8),), {"*weight": "[S(0), S(1)]"})):
        torch.manual_seed(11)
        module, over = world.built(kind, args, pin=pin)
        module(*args).backward()
        found.append([weights(world, module), gradients(world, module), over if kind is Large else 0, torch.rand(2)])
    return found


def epochs(world: Alone) -> Any:
    """A loop over a DataLoader."""
    module = world.parallel(seeded(), batch(rows=4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for x, y in DataLoader(TensorDataset(*batch(rows=12)), batch_size=4):
        optimizer.zero_grad()
        loss = module(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


CHECKS: dict[str, Callable[[Alone], Any]] = {
    check.__name__: check
    for check in (names, meta, optimizers, accumulation, states, modes, layouts, half, scaler, hooks, copies, epochs)
}
