"""A GPT whose blocks have a mixture of experts, and PyTorch's expert parallelism of it, written by hand.

Each rank has its tokens and its experts, as in torchtitan's `ExpertParallel`: rows are sorted by expert, counts are exchanged,
rows go to their experts by `all_to_all_single`, are sorted by the experts there, multiplied, and go back. All else is data parallel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 - it defines the op that stands for a product of groups in any type
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.nn.parallel import DistributedDataParallel

from tests.bench.by_hand import GPT, GPT_SIZES, NETS, STRATEGIES, Block, Way, part

product = torch.ops.transformers.grouped_mm_fallback
SIZES = GPT_SIZES | {"experts": 32, "chosen": 2, "hidden": 1024}


class Experts(nn.Module):
    """Every token goes to `chosen` of the experts, sorted by expert, and is the sum of what these make of it."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen, self.experts, self.parallel = chosen, experts, False
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = torch.softmax(self.router(rows), -1).topk(self.chosen)
        order = torch.argsort(ids.flatten(), stable=True)
        counts = torch.histc(ids.flatten().float(), self.experts, 0, self.experts - 1)
        sent = rows[order // self.chosen]
        made = self.sent_to_experts(sent, counts.long()) if self.parallel else self.computed(sent, counts)
        made = made * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return made[back].view(*weights.shape, -1).sum(1).view(x.shape)

    def computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts make of rows that stand expert by expert."""
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        return product(F.gelu(product(rows, self.up, ends)), self.down, ends)

    def sent_to_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The same where each rank has its part of the experts. counts: of this rank's rows, by expert."""
        ranks = dist.get_world_size()
        taken = all_to_all_single(counts, None, None, dist.group.WORLD)  # of my experts, rank after rank
        sizes = [each.view(ranks, -1).sum(1).tolist() for each in (taken, counts)]
        got = all_to_all_single_autograd(rows, sizes[0], sizes[1], dist.group.WORLD)
        mine = torch.arange(self.experts // ranks).repeat(ranks).repeat_interleave(taken)  # by row its expert
        order = torch.argsort(mine, stable=True)
        made = self.computed(got[order], taken.view(ranks, -1).sum(0))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return all_to_all_single_autograd(made[back], sizes[1], sizes[0], dist.group.WORLD)


class MixedBlock(Block):
    """A block whose tokens go to experts."""

    def __init__(self, width: int, heads: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__(width, heads)
        del self.up, self.down
        self.mix = Experts(width, hidden, experts, chosen)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mix(self.norm2(x))


def build(**sizes: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The net and its whole batch (inputs, targets), the same on every rank."""
    torch.manual_seed(0)
    given = SIZES | sizes
    batch, layers = given["batch"], given["layers"]
    mixed = [given[name] for name in ("width", "heads", "hidden", "experts", "chosen")]
    net = GPT(given["vocab"], given["seq"], given["width"], given["heads"], 0)
    net.blocks = nn.ModuleList(MixedBlock(*mixed) for _ in range(layers))
    tokens, targets = torch.randint(given["vocab"], (2, batch, given["seq"]))
    return net, (tokens, targets)


def expert_parallel(net: nn.Module, inputs: Tensor, targets: Tensor) -> Way:
    """Experts are split over all ranks, and so are tokens; gradients of all else are all-reduced beside the backward."""
    ranks = dist.get_world_size()
    for mix in (each for each in net.modules() if isinstance(each, Experts)):
        mix.parallel = True
        for name in ("up", "down"):
            own = nn.Parameter(part(getattr(mix, name)).detach().clone())
            own.register_hook(lambda gradient: gradient / ranks)  # the loss is the mean over ranks
            setattr(mix, name, own)
    own = [f"{name}.{each}" for name, mix in net.named_modules() if isinstance(mix, Experts) for each in ("up", "down")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, own)  # type: ignore[attr-defined]
    data: Any = DistributedDataParallel(net, gradient_as_bucket_view=True)
    return Way(data, part(inputs), part(targets))


NETS["experts"] = build
STRATEGIES["ep"] = expert_parallel
