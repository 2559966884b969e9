"""PyTorch's own strategies, written by hand: what plans are held against on a bed.

Every strategy trains the same net from the same weights on the same batch, in micro-batches if asked. Gradients are communicated once
a step, beside the last backward, as those who tune such scripts do it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

GPT_SIZES = {"batch": 16, "seq": 128, "vocab": 4096, "width": 512, "heads": 8, "layers": 4}
VGG_SIZES = {"batch": 128, "hidden": 4096, "classes": 100}


# --- the nets ---------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads  # of a head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        # q, k and v head by head: who cuts the rows of qkv cuts the heads, whatever their number is on a rank
        q, k, v = self.qkv(x).view(batch, seq, -1, 3, self.size).permute(3, 0, 2, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).reshape(batch, seq, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT that returns its logits: strategies by hand cut the loss, too."""

    def __init__(self, vocab: int, seq: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class VGG(nn.Module):
    """Most parameters in the classifier, most flops in the convolutions."""

    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, pool in ((64, True), (128, True), (256, False), (256, True), (512, True)):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else [])]
            channels = width
        self.features = nn.Sequential(*layers, nn.Flatten())
        linear = nn.Linear(2048, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        self.classifier = nn.Sequential(*linear)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))


NETS: dict[str, Callable[..., tuple[nn.Module, tuple[Tensor, Tensor]]]] = {}  # those of other files


def build(net: str, **sizes: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A net, "gpt", "vgg" or one of NETS, and its whole batch (inputs, targets), the same on every rank."""
    torch.manual_seed(0)
    if net in NETS:
        return NETS[net](**sizes)
    if net == "vgg":
        given = VGG_SIZES | sizes
        batch = given.pop("batch")
        return VGG(**given), (torch.randn(batch, 3, 32, 32), torch.randint(given["classes"], (batch,)))
    given = GPT_SIZES | sizes
    batch = given.pop("batch")
    tokens, targets = torch.randint(given["vocab"], (2, batch, given["seq"]))
    return GPT(**given), (tokens, targets)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of logits [..., classes]."""
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


# --- the strategies ---------------------------------------------------------------------------------------------------
@dataclass
class Way:
    """How a rank takes part in a step: the net that it runs, on which part of the batch, in which contexts.

    last: the context of a micro-batch's forward and backward, by whether it is the last one. loss_context: that of the loss.
    """

    net: nn.Module
    inputs: Tensor
    targets: Tensor
    last: Callable[[bool], Any] = lambda _: contextlib.nullcontext()
    loss_context: Callable[[], Any] = contextlib.nullcontext


def ddp(net: nn.Module, inputs: Tensor, targets: Tensor) -> Way:
    """Data parallelism; gradients are all-reduced beside the backward."""
    data = DistributedDataParallel(net, gradient_as_bucket_view=True)
    return Way(data, part(inputs), part(targets), lambda ends: contextlib.nullcontext() if ends else data.no_sync())


def zero2(net: nn.Module, inputs: Tensor, targets: Tensor, gathered_again: bool = False) -> Way:
    """Parameters are stored once over the ranks and gathered for the forward; for the backward, too, if `gathered_again`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*units(net), net):
        sharded: Any = fully_shard(unit, mesh=mesh, reshard_after_forward=gathered_again)
        sharded.set_custom_reduce_scatter(DirectReduceScatter())
    return Way(net, part(inputs), part(targets), lambda ends: sync_if(net, ends))


def tensor(net: nn.Module, inputs: Tensor, targets: Tensor) -> Way:
    """Tensor parallelism over all ranks."""
    return Way(
        net, inputs, targets, loss_context=tensor_parallel(net, init_device_mesh("cpu", (dist.get_world_size(),)))
    )


def tensor_and_data(net: nn.Module, inputs: Tensor, targets: Tensor) -> Way:
    """Tensor parallelism on pairs of ranks, data parallelism over the pairs."""
    pairs = dist.get_world_size() // 2
    grid = init_device_mesh("cpu", (pairs, 2), mesh_dim_names=("data", "tensor"))
    context = tensor_parallel(net, grid["tensor"])
    for unit in (*units(net), net):
        replicate(unit, mesh=grid["data"])
    mine = dist.get_rank() // 2
    return Way(net, inputs.chunk(pairs)[mine], targets.chunk(pairs)[mine], lambda ends: sync_if(net, ends), context)


def hybrid(net: nn.Module, inputs: Tensor, targets: Tensor) -> Way:
    """The VGG's convolutions by data parallelism, its classifier by tensor parallelism (Krizhevsky 2014). Not in micro-batches."""
    ranks = dist.get_world_size()
    whole = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
    styles = {"classifier": whole, "classifier.0": ColwiseParallel(), "classifier.2": RowwiseParallel()}
    parallelize_module(net, init_device_mesh("cpu", (ranks,)), styles)
    features = DistributedDataParallel(net.get_submodule("features"), gradient_as_bucket_view=True)
    net.features = features
    features.register_forward_hook(lambda module, given, output: summed(output, ranks))
    return Way(net, part(inputs), targets)


STRATEGIES: dict[str, Callable[[nn.Module, Tensor, Tensor], Way]] = {
    "ddp": ddp, "zero2": zero2, "fsdp": partial(zero2, gathered_again=True), "tp": tensor, "tp x dp": tensor_and_data, "hybrid": hybrid,
}  # fmt: skip
OF_NET = {
    "gpt": ("ddp", "zero2", "fsdp", "tp", "tp x dp", "pipeline"),
    "vgg": ("ddp", "zero2", "fsdp", "tp", "tp x dp", "hybrid"),
}


def strategy(name: str, net: nn.Module, batch: tuple[Tensor, Tensor], microbatches: int = 1) -> Callable[[], float]:
    """A step of the net by a strategy: forward, backward, optimizer. The mean over ranks of what it returns is the loss of the batch.

    name: one of `OF_NET`. microbatches: into how many a rank cuts its part of the batch; gradients are communicated with the last one.
    """
    if name == "pipeline":
        return pipeline(net, batch, microbatches)
    way = STRATEGIES[name](net, *batch)
    optimizer = optimizer_of(way.net)
    pieces = list(zip(way.inputs.chunk(microbatches), way.targets.chunk(microbatches)))

    def step() -> float:
        total = 0.0
        for at, (piece, target) in enumerate(pieces):
            with way.last(at == len(pieces) - 1):
                output = way.net(piece)
                with way.loss_context():
                    loss: Any = loss_of(output, target) / len(pieces)
                    loss.backward()
            total += float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def pipeline(net: nn.Module, batch: tuple[Tensor, Tensor], microbatches: int) -> Callable[[], float]:
    """A step of the GPT as a pipeline in which every rank holds as many blocks, by torch's own 1F1B."""
    assert isinstance(net, GPT)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    many = len(net.blocks) // ranks
    stage = Stage(net, rank * many, (rank + 1) * many)
    schedule = Schedule1F1B(PipelineStage(stage, rank, ranks, torch.device("cpu")), microbatches, loss_of)
    optimizer = optimizer_of(stage)
    inputs, targets = batch

    def step() -> float:
        losses: list[Tensor] = []
        given = (inputs,) if rank == 0 else ()
        schedule.step(*given, **({"target": targets, "losses": losses} if rank == ranks - 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
        return ranks * sum(map(float, losses)) / microbatches

    return step


class Stage(nn.Module):
    """Some blocks of the GPT, with what comes before the first or after the last one."""

    def __init__(self, net: GPT, first: int, end: int) -> None:
        super().__init__()
        self.blocks = net.blocks[first:end]
        if first == 0:
            self.tokens, self.positions = net.tokens, net.positions
        self.last = nn.Sequential(net.norm, net.head) if end == len(net.blocks) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "tokens"):
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all steps that are held against each other."""
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, foreach=False)


def part(x: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


@contextlib.contextmanager
def sync_if(net: Any, ends: bool) -> Iterator[None]:
    """Lets a sharded or replicated net communicate gradients only if `ends`."""
    net.set_requires_gradient_sync(ends)
    yield


def summed(output: Tensor, ranks: int) -> Tensor:
    """Makes of DistributedDataParallel's mean over ranks of shares of one loss their sum."""
    output.register_hook(lambda gradient: gradient * ranks)
    return output


class DirectReduceScatter(ReduceScatter):
    """gloo's reduce_scatter sends as much as its all_reduce. This one sends every shard once, to its owner, which is fairer."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        ranks, me = group.size(), group.rank()
        pieces, got = input_tensor.view(ranks, -1), output_tensor.new_empty(ranks, output_tensor.numel())
        # receives come first: sends hold up what lies behind them
        others = [(me - at) % ranks for at in range(1, ranks)]
        works = [dist.irecv(got[other], group=group, group_src=other) for other in others]
        works += [dist.isend(pieces[other], group=group, group_dst=other) for other in reversed(others)]
        for work in works:
            work.wait()
        got[me] = pieces[me]
        torch.sum(got, 0, out=output_tensor.view(-1))
        if op == dist.ReduceOp.AVG:
            output_tensor /= ranks


def units(net: nn.Module) -> list[nn.Module]:
    """What is communicated at once: blocks, or the parts of the VGG."""
    return list(net.blocks) if isinstance(net, GPT) else [net.classifier[0], net.classifier[2], net.features]  # type: ignore[union-attr,index]


def tensor_parallel(net: nn.Module, mesh: DeviceMesh) -> Callable[[], Any]:
    """Cuts the net's products as Megatron does. What it returns is the context of the loss."""
    if not isinstance(net, GPT):
        parallelize_module(net, mesh, {"classifier.0": ColwiseParallel(), "classifier.2": RowwiseParallel()})
        return contextlib.nullcontext
    styles: dict[str, Any] = {"tokens": RowwiseParallel(input_layouts=Replicate())}
    styles["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for at in range(len(net.blocks)):
        for name, style in (
            ("qkv", ColwiseParallel),
            ("out", RowwiseParallel),
            ("up", ColwiseParallel),
            ("down", RowwiseParallel),
        ):
            styles[f"blocks.{at}.{name}"] = style()
    parallelize_module(net, mesh, styles)
    return loss_parallel
