"""Recompute: what is computed again has the numbers that it had, is laid out as any other value, and its memory is saved."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import MemoryLimitError, PlanError, SbpcError
from sbpc.graph.about import RECOMPUTES, must_wait
from sbpc.graph.operands import is_late, made_of
from sbpc.graph.ports import BUFFER, MUTATION, PARAMETER, placeholders, results
from sbpc.graph.random_bits import BITS
from sbpc.mesh.cluster import Cluster
from sbpc.passes.loop.recompute import (
    MOVED,
    blocks_of,
    bytes_of,
    cheap_ones,
    closure,
    memory_of,
    moved_bytes,
    repeatable,
    worth,
)
from sbpc.passes.schedule.list_schedule import list_schedule
from sbpc.passes.schedule.schedule import ordered
from sbpc.plans.memory import Life
from sbpc.plans.timeline import works
from tests import models
from tests.compare import largest_error, relative_error
from tests.processes import run_ranks

aten = torch.ops.aten
FORMS = "selective", "full"
LAN = Cluster("lan", 1e10, 1e10, 5e-7, 1, 2e-6, 24e6, 2e-6, 24e6)


class Layer(nn.Module):
    """A transformer layer with its attention written out, and dropout where Megatron-LM has it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.value, self.proj = (nn.Linear(width, width) for _ in range(3))
        # softmax ignores it: its gradient would be zero but for rounding
        self.key = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        y, each = self.norm1(x), (batch, seq, self.heads, width // self.heads)
        q, k, v = (layer(y).view(each).transpose(1, 2) for layer in (self.query, self.key, self.value))
        weights = (q @ k.transpose(2, 3) / math.sqrt(each[-1])).softmax(3)
        out = F.dropout(weights, self.dropout) @ v
        x = x + F.dropout(self.proj(out.transpose(1, 2).reshape(x.shape)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Layers(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


class Residual(nn.Module):
    """Two convolutions with batch norms, whose running statistics are written once a step."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def mlp() -> models.Model:
    blocks = (
        nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2)
    )
    return nn.Sequential(*blocks), (torch.randn(8, 8, requires_grad=True),)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*(Residual(4) for _ in range(2))), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(dim=(2, 3))).square().mean()


def resnet() -> models.Model:
    return ResNet(), (torch.randn(8, 4, 4, 4),)


def transformer() -> models.Model:
    return Layers(), (torch.randn(4, 8, 16),)


NETS: dict[str, Callable[[], models.Model]] = {"mlp": mlp, "resnet": resnet, "transformer": transformer}


def made(net: str) -> models.Model:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return NETS[net]()


@functools.cache
def planned(net: str, form: str, mesh: Mesh = Mesh(x=2), count: int = 1) -> Any:  # noqa: B008
    """The plan of a model, for tests that do not change it."""
    model, args = made(net)
    return sbpc.plan(model, args, mesh, recompute=form, microbatches=count)


def again(plan: sbpc.Plan) -> list[str]:
    """The names of the calls whose values are computed again."""
    return [node.meta[RECOMPUTES] for node in plan.graph.graph.nodes if RECOMPUTES in node.meta]


def differences(one: Any, other: Any) -> float:
    """The largest relative difference of two simulated steps: results, gradients, buffers."""
    pairs = [(one.gradients[name], other.gradients[name]) for name in one.gradients]
    pairs += [(one.buffers[name], other.buffers[name]) for name in one.buffers] + [(one.outputs, other.outputs)]
    return max(relative_error(found, expected, 1e-6) for found, expected in pairs)


# --- numbers ----------------------------------------------------------------------------------------------------------


@functools.cache
def kept_step(net: str) -> Any:
    """What a step that keeps everything gives on one device."""
    return sbpc.simulate(planned(net, "none", Mesh(x=1)), *made(net), seed=5)


WHOLE, HALVES = (Mesh(x=2), 1), (Mesh(x=2, y=2, cluster="h100"), 2)
QUICK = [
    ("mlp", "selective", WHOLE),
    ("mlp", "full", HALVES),
    ("resnet", "full", HALVES),
    ("transformer", "selective", WHOLE),
]
LONG = [
    ("resnet", "selective", WHOLE),
    ("transformer", "selective", HALVES),
    ("transformer", "full", WHOLE),
    ("transformer", "full", HALVES),
]


@pytest.mark.parametrize(
    ("net", "form", "parts"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.prove) for case in LONG)], ids=str
)
def test_every_form_has_the_numbers_of_the_step_that_keeps_everything(
    net: str, form: str, parts: tuple[Mesh, int]
) -> None:
    kept, (model, args) = kept_step(net), made(net)
    plan = planned(net, form, *parts)
    plan.verify()
    assert again(plan)
    assert differences(sbpc.simulate(plan, model, args, seed=5), kept) <= 1e-10
    if net != "transformer":  # which draws other numbers than eager torch
        assert largest_error(plan, model, args) <= 1e-10


def test_dropout_draws_the_numbers_again_that_it_drew() -> None:
    """With the numbers of another stream in the copy the gradients are others: the comparison above sees that."""
    model, args = made("transformer")
    runs = []
    for shift in (0, 1):
        plan = sbpc.plan(model, args, Mesh(x=1), recompute="full", microbatches=1)
        draws = [node for node in plan.annotated.graph.nodes if node.target is BITS and RECOMPUTES in node.meta]
        assert draws
        for node in draws:
            node.args = (*node.args[:2], node.args[2] + 1000 * shift)
        plan.forget()
        runs.append(sbpc.simulate(plan, model, args, seed=5))
    right, wrong = (differences(run, kept_step("transformer")) for run in runs)
    assert right <= 1e-10 < 1e-3 < wrong


def test_a_statistic_of_a_batch_norm_is_written_once_and_not_read_again() -> None:
    plan = planned("resnet", "full")
    norms = [node for node in plan.graph.graph.nodes if RECOMPUTES in node.meta and "batch_norm" in str(node.target)]
    buffers = {node for port, node in placeholders(plan.graph).items() if port.kind == BUFFER}
    assert norms and not any(used in buffers for node in norms for used in node.all_input_nodes)
    written = [result for port, result in zip(plan.ports.outputs, results(plan.graph)) if port.kind == MUTATION]
    assert written and not any(RECOMPUTES in node.meta for node in written if node is not None)


class Counting(nn.Module):
    """A block that reads a buffer which the step writes: in the backward it would read the new value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.layer(x) * self.scale)
        self.scale = self.scale + 1  # type: ignore[assignment]
        return torch.tanh(y)


def test_what_reads_a_buffer_that_the_step_writes_is_kept() -> None:
    torch.set_default_dtype(torch.float64)
    model, args = nn.Sequential(Counting(), nn.Linear(6, 2)), (torch.randn(4, 6),)
    plan = sbpc.plan(model, args, Mesh(x=2), recompute="full", microbatches=1)
    scaled = [
        node.name
        for node in plan.graph.graph.nodes
        if node.target is aten.mul.Tensor and node.meta["phase"] == "forward"
    ]
    assert "exp" in again(plan) and scaled and not set(scaled) & set(again(plan))
    kept = sbpc.plan(model, args, Mesh(x=1), microbatches=1)
    assert differences(sbpc.simulate(plan, model, args), sbpc.simulate(kept, model, args)) <= 1e-10


@torch.library.custom_op("own::logged", mutates_args=())
def logged(x: Tensor) -> Tensor:
    """x; it may write a line somewhere."""
    return x.clone()


logged.register_fake(torch.empty_like)
logged.register_autograd(lambda _, gradient: gradient)


class Owned(nn.Module):
    """A block with an op of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(logged(torch.exp(self.layer(x))))


def test_an_op_of_the_users_own_is_not_called_again() -> None:
    plan = sbpc.plan(
        nn.Sequential(Owned(), nn.Linear(6, 2)), (torch.randn(4, 6),), Mesh(x=1), recompute="full", microbatches=1
    )
    calls = [node for node in plan.graph.graph.nodes if "own.logged" in str(node.target)]
    assert len(calls) == 1 and again(plan)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["transformer", "resnet"])
def test_what_is_dropped_is_not_held_and_the_peak_is_as_predicted(net: str) -> None:
    model, args = made(net)
    held = []
    for form in ("none", *FORMS):
        plan = planned(net, form)
        found = sbpc.simulate(plan, model, args).peak_memory
        assert abs(plan.life.peak - found) <= 0.05 * found
        held.append(found)
        assert (
            (0 < plan.cost.recompute_seconds < plan.cost.compute_seconds)
            == ("recompute " in str(plan))
            == (form != "none")
        )
    assert held[2] < 0.85 * held[0] and held[1] <= held[0]


def test_parts_of_the_batch_compute_again_too() -> None:
    model, args = made("transformer")
    held = {(m, form): peak_of(model, args, m, form) for m in (1, 4) for form in ("none", "full")}
    assert held[4, "full"] < min(held[4, "none"], held[1, "full"]) and held[1, "full"] < held[1, "none"]


def peak_of(model: nn.Module, args: Any, count: int, form: str) -> int:
    plan = sbpc.plan(model, args, Mesh(x=1, cluster="h100"), recompute=form, microbatches=count)
    found = sbpc.simulate(plan, model, args).peak_memory
    held = plan.cost.memory["total"] - plan.cost.memory["optimizer"]
    assert held == found if count == 1 else abs(held - found) <= 1e-3 * found, (
        "the losses of earlier micro-batches are not counted"
    )
    return found


def test_what_is_computed_again_waits_for_its_gradient_however_calls_are_ordered() -> None:
    """Without that order the list scheduler runs it early, as something always runs, and holds as much as if all were kept."""
    mesh = Mesh(t=2, cluster=LAN)
    model, args = models.gpt2(batch=8, seq=16, width=64, heads=4, layers=4)
    boxed = sbpc.baseline("megatron", model, args, mesh, recompute="full", microbatches=1).unscheduled
    calls, after = [node for node in boxed.graph.nodes if node.op == "call_function"], must_wait(boxed)
    assert after and all(after.values())
    orders = [
        ordered(boxed, *list_schedule(calls, works(boxed, mesh), rule="order", after=waits)) for waits in (after, {})
    ]
    waiting, early = (Life.of(gm, mesh).peak for gm in orders)
    assert waiting <= 1.05 * Life.of(boxed, mesh).peak < 1.3 * waiting < early


# --- options ----------------------------------------------------------------------------------------------------------


def test_auto_computes_again_only_where_memory_asks_for_it() -> None:
    torch.manual_seed(0)
    model, args = models.gpt2(batch=48, vocab=24, heads=4, layers=3)
    mesh, options = Mesh(x=2), {"microbatches": 1, "objective": "serial"}
    free = sbpc.plan(model, args, mesh, **options)
    total = free.cost.memory["total"]
    full = sbpc.plan(model, args, mesh, recompute="full", memory=0.7 * total, **options)
    wide, tight = (
        sbpc.plan(model, args, mesh, memory=share * total, recompute="auto", **options) for share in (1.01, 0.7)
    )
    assert wide.cost.recompute_seconds == 0.0 and wide.cost.seconds == free.cost.seconds
    assert tight.cost.recompute_seconds > 0.0 and tight.cost.memory["total"] <= 0.7 * total
    assert tight.options.recompute == "auto"
    tight.verify()
    assert largest_error(tight, model, args) <= 1e-4
    assert tight.cost.seconds < full.cost.seconds and tight.cost.recompute_seconds < full.cost.recompute_seconds


def test_auto_is_no_slower_than_any_form_that_fits() -> None:
    """What is cheap is tried before whole blocks are computed again."""
    torch.manual_seed(0)
    model, args = models.gpt2(batch=48, vocab=24, heads=4, layers=3)
    mesh, options = Mesh(x=2, cluster="h100"), {"microbatches": 1, "objective": "serial"}
    limit = 0.9 * sbpc.plan(model, args, mesh, **options).cost.memory["total"]
    found = []
    for form in ("none", *FORMS):
        with suppress(MemoryLimitError):
            found.append(sbpc.plan(model, args, mesh, recompute=form, memory=limit, **options))
    auto = sbpc.plan(model, args, mesh, recompute="auto", memory=limit, **options)
    assert auto.cost.memory["total"] <= limit and found
    assert auto.cost.seconds <= min(plan.cost.seconds for plan in found) * (1 + 1e-9)


class Chain(nn.Module):
    """Cheap calls that fan out: which are kept, and which are computed again, is a matter of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        z = torch.exp(torch.tanh(y.to(torch.float32)).to(torch.float64) * torch.sigmoid(y))
        return x + self.down(torch.sin(z) * z)


def test_the_selective_form_keeps_and_moves_the_fewest_bytes_of_all_ways() -> None:
    torch.set_default_dtype(torch.float64)
    gm = sbpc.plan(nn.Sequential(Chain(), Chain()), (torch.randn(4, 8),), Mesh(x=1), microbatches=1).annotated
    blocks, fixed = blocks_of(gm), made_of(gm, placeholders(gm, PARAMETER).values())
    for block in dict.fromkeys(blocks.values()):
        able = cheap_ones({node for node in repeatable(gm, fixed) if blocks.get(node) == block}, fixed)
        read = [used for node in blocks if is_late(node) and blocks[node] == block for used in node.all_input_nodes]
        able = closure(read, {node for node in able if not any(user not in blocks for user in node.users)})

        def paid(again: set[Any], read: Any = read, able: set[Any] = able) -> float:
            needed = [*read, *(used for node in again for used in node.all_input_nodes)]
            # a view is kept as the value in whose memory it lies
            kept = {memory_of(used) for used in needed if used not in again and used.op == "call_function"}
            kept -= {memory_of(used) for used in read if used not in able}
            return sum(map(bytes_of, kept)) + MOVED * sum(map(moved_bytes, again))

        found = worth(able, read, ())
        assert 0 < len(found) < len(able) <= 16
        ways = itertools.chain(*(itertools.combinations(able, count) for count in range(len(able) + 1)))
        assert paid(found) == min(paid(set(way)) for way in ways)


def test_a_plan_that_computes_again_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    model, args = made("transformer")
    plan = sbpc.plan(model, args, Mesh(x=2, cluster=LAN), recompute="full", microbatches=1)
    plan.save(tmp_path / "plan.sbpc")
    loaded = sbpc.load(tmp_path / "plan.sbpc")
    assert again(loaded) == again(plan) and loaded.cost.recompute_seconds == plan.cost.recompute_seconds
    assert [node.name for node in loaded.boxed.graph.nodes] == [node.name for node in plan.boxed.graph.nodes]
    plan.export(tmp_path / "programs.sbpc")
    expected = sbpc.simulate(plan, model, args)
    for each in (loaded, sbpc.load_programs(tmp_path / "programs.sbpc")):
        assert differences(sbpc.simulate(each, model, args), expected) == 0.0


def test_what_cannot_be_asked_for_is_refused() -> None:
    model, args = models.mlp(batch=6)
    with pytest.raises(SbpcError, match="recompute is 'some'"):
        sbpc.plan(model, args, Mesh(x=2), recompute="some")
    with pytest.raises(PlanError, match="no block whose backward reads values of its own"):
        sbpc.plan(model, args, Mesh(x=2), recompute="full")
    forward = sbpc.plan(model, args, Mesh(x=2), recompute="full", train=False)
    assert not again(forward)


def test_a_model_without_repeated_blocks_computes_its_children_again() -> None:
    torch.set_default_dtype(torch.float64)
    model, args = models.vgg()
    plan = sbpc.plan(model, args, Mesh(x=2), recompute="full", microbatches=1)
    assert any(name.startswith("convolution") for name in again(plan))
    assert largest_error(plan, model, args) <= 1e-10


# --- processes --------------------------------------------------------------------------------------------------------


def trained(plan: sbpc.Plan) -> list[Any]:
    """On a rank: loss, gradients and buffers of a forward with its backward, then those of one program."""
    found = []
    model, args = made("resnet")
    for joint in (False, True):
        module = sbpc.parallelize(copy.deepcopy(model), plan)
        loss = module.step(*args) if joint else module(*args)  # type: ignore[operator]
        if not joint:
            loss.backward()
        gradients = {name: p.grad.full_tensor() for name, p in module.named_parameters()}  # type: ignore[union-attr]
        found.append((loss.detach(), gradients, {name: b.clone() for name, b in module.named_buffers()}))
    return found


def test_forward_and_backward_and_the_step_on_two_ranks_have_the_numbers_of_one_device() -> None:
    model, args = made("resnet")
    loss = model(*args)
    loss.backward()
    for found in run_ranks(trained, 2, planned("resnet", "full")):
        assert isinstance(found, list), found
        for taken, gradients, buffers in found:
            pairs = [(gradients[name], p.grad) for name, p in model.named_parameters()]
            pairs += [(buffers[name], buffer) for name, buffer in model.named_buffers()] + [(taken, loss.detach())]
            assert max(relative_error(one, other) for one, other in pairs) <= 1e-10  # type: ignore[arg-type]
