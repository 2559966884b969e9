"""Slices: the head of a language model and its loss on one part of the positions after the other, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.cli.main import main
from sbpc.errors import MemoryLimitError, PlanError, SbpcError
from sbpc.graph.about import SLICE
from sbpc.passes.loop import slices
from tests import models
from tests.compare import largest_error

BATCH, SEQ, WIDTH, VOCAB = 4, 12, 8, 40
IGNORED = -100
Loss = Callable[[Tensor, Tensor], Tensor]


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of transformers: in float32, of the next token, the last position is ignored."""
    targets = F.pad(targets, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(logits.double().view(-1, VOCAB), targets.view(-1), ignore_index=IGNORED)


def counted(logits: Tensor, targets: Tensor) -> Tensor:
    """A sum over tokens by the number of those that count, which is made of flattened targets, too."""
    flat = targets.reshape(-1)
    total = F.cross_entropy(logits.reshape(-1, VOCAB), flat, reduction="sum", ignore_index=1)
    return total / (flat != 1).sum()


def with_z(logits: Tensor, targets: Tensor) -> Tensor:
    """A penalty on the logarithm of the sum, as PaLM has it."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 1e-2 * logits.logsumexp(-1).square().mean()


LOSSES: dict[str, Loss] = {
    "flattened": lambda y, t: F.cross_entropy(y.view(-1, VOCAB), t.view(-1)),
    "shifted": shifted,
    "counted": counted,
    "of classes first": lambda y, t: F.cross_entropy(y.transpose(1, 2), t),
    "smoothed": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), label_smoothing=0.1),
    "weighted": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), torch.arange(1.0, VOCAB + 1)),
    "with a penalty": with_z,
    "written out": lambda y, t: -(y.log_softmax(-1).gather(2, t.unsqueeze(2))).mean(),
    "capped": lambda y, t: F.cross_entropy((5 * (y / 5).tanh()).flatten(0, 1), t.flatten()),
}


class Small(nn.Module):
    """An embedding and a head, with a loss; the head has a bias."""

    def __init__(self, loss: Loss, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.loss = loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss."""
        return self.loss(self.head(self.mix(self.embed(tokens)).tanh()), targets)


def small(loss: str, tied: bool = False) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A small language model and its arguments."""
    torch.manual_seed(0)
    return Small(LOSSES[loss], tied), tuple(torch.randint(0, VOCAB, (2, BATCH, SEQ)))  # type: ignore[return-value]


def products(plan: sbpc.Plan) -> list[int]:
    """The slices of the calls of the head in the order in which they run."""
    return [node.meta[SLICE] for node in plan.boxed.graph.nodes if SLICE in node.meta]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_in_slices_has_the_numbers_of_one_device(loss: str, float64: None) -> None:
    model, args = small(loss)
    for mesh in (Mesh(p=1), Mesh(data=2, tensor=2, cluster="h100")):
        plan = sbpc.plan(model, args, mesh, slices=3)
        assert largest_error(plan, model, args) < 1e-12 and plan.options.slices == 3
        assert set(products(plan)) == {0, 1, 2}
        made = [node.meta["val"] for node in plan.annotated.graph.nodes if node.op == "call_function"]
        assert all(value.numel() <= BATCH * SEQ * VOCAB // 3 for value in made if isinstance(value, Tensor))


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2},
        {"recompute": "full"},
        {"panels": 2},
        {"objective": "bytes"},
        {"memory": 6e4},
        {"pin": {"head.weight": "S(0)@tensor"}},
        {"inputs": ["S(0)@data", "S(0)@data"]},
    ],
    ids=lambda each: next(iter(each)),
)
def test_slices_go_with_other_options(options: dict[str, Any], float64: None) -> None:
    model, args = small("shifted", tied=True) if "pin" not in options else small("shifted")
    plan = sbpc.plan(model, args, Mesh(data=2, tensor=2, cluster="ethernet"), slices=2, **options)
    assert plan.options.slices == 2 and largest_error(plan, model, args) < 1e-12


@pytest.mark.parametrize("name", ["data", "fsdp", "megatron", "megatron+sp"])
def test_experts_have_slices_too(name: str, float64: None) -> None:
    model, args = models.gpt2(layers=1)
    plan = sbpc.baseline(name, model, args, Mesh(data=2, tensor=2, cluster="h100"), slices=2)
    assert largest_error(plan, model, args) < 1e-12


def test_stages_have_slices_in_the_last_one(float64: None) -> None:
    model, args = models.gpt2()
    plan = sbpc.plan(model, args, Mesh(pipe=2, x=2, cluster="h100"), stages="pipe", microbatches=2, slices=3)
    assert largest_error(plan, model, args) < 1e-12
    assert [any(SLICE in node.meta for node in chunk.bare.graph.nodes) for chunk in plan.chunks] == [False, True]


def test_a_forward_alone_and_a_backward_apart_have_the_numbers(float64: None) -> None:
    model, args = small("shifted")
    loss = sbpc.simulate(sbpc.plan(model, args, Mesh(p=2), slices=3, train=False), model, args).outputs
    assert abs(loss - model(*args)) < 1e-12
    run = sbpc.simulate(sbpc.plan(model, args, Mesh(p=2), slices=3), model, args, tangents=torch.tensor(2.0))
    model(*args).mul(2).backward()
    assert all(torch.allclose(run.gradients[name], each.grad, 1e-12) for name, each in model.named_parameters())


def test_the_logits_of_one_slice_are_alive(float64: None) -> None:
    """Without slices three values as large as the logits are alive at the peak, with k of them three of a k-th."""
    torch.manual_seed(0)
    model, args = models.gpt2(batch=2, seq=64, vocab=3_000, width=24, heads=2, layers=1)
    logits = 2 * 64 * 3_000 * 8
    for cluster, mesh in (("ideal", {"p": 1}), ("h100", {"data": 2, "tensor": 2})):
        plans = [sbpc.plan(model, args, Mesh(cluster=cluster, **mesh), slices=count) for count in (1, 8)]
        peaks = [plan.cost.memory["total"] for plan in plans]
        runs = [sbpc.simulate(plan, model, args).peak_memory for plan in plans]
        assert peaks[0] - peaks[1] > 1.5 * logits / plans[0].mesh.ranks
        assert runs[0] - runs[1] > 1.5 * logits / plans[0].mesh.ranks
        assert products(plans[1]) == sorted(products(plans[1]))


def test_a_tight_memory_makes_slices_and_a_free_plan_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = models.gpt2(batch=2, seq=64, vocab=3_000, width=24, heads=2, layers=1)
    free = sbpc.plan(model, args, Mesh(p=2, cluster="h100"))
    asked = model, args, Mesh(p=2, cluster="h100")
    assert sbpc.plan(*asked, memory=0.6 * free.memory["total"]).options.slices is None  # too small to be worth it
    monkeypatch.setattr(slices, "LEAST", 1)
    tight = sbpc.plan(*asked, memory=0.6 * free.memory["total"])
    assert free.options.slices is None and (tight.options.slices or 1) > 1
    assert tight.memory["total"] <= 0.6 * free.memory["total"]
    mlp, inputs = models.mlp()  # has no head
    assert sbpc.plan(mlp, inputs, Mesh(p=2), memory=1e6).options.slices is None


class Headed(nn.Module):
    """An embedding and a head whose weight is as large as the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(600, 24), nn.Linear(24, 600, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the loss."""
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.flatten())


def test_what_fits_without_slices_alone_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "LEAST", 1)
    asked = Headed(), (torch.randint(0, 600, (2, 12)),), Mesh(p=1)
    least = sbpc.plan(*asked, slices=1).memory["total"]
    with pytest.raises(MemoryLimitError):
        sbpc.plan(*asked, memory=least, slices=4)
    assert sbpc.plan(*asked, memory=least).options.slices is None


def test_a_file_of_a_plan_in_slices_is_read_back(tmp_path: Path) -> None:
    model, args = small("shifted")
    plan = sbpc.plan(model, args, Mesh(p=2, cluster="h100"), slices=2)
    plan.save(tmp_path / "plan")
    again = sbpc.load(tmp_path / "plan")
    assert str(again) == str(plan) and products(again) == products(plan) and again.options.slices == 2


def test_the_command_line_has_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("from tests import models\nmake = models.gpt2\n")
    made = main(["plan", f"{tmp_path}/train.py:make", "--mesh", "p=2", "--slices", "3", "-o", f"{tmp_path}/plan"])
    assert made == 0 and sbpc.load(tmp_path / "plan").options.slices == 3


class Returning(Small):
    """Returns its logits, too."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        logits = self.head(self.embed(tokens))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


class Flat(Small):
    """Takes flattened targets."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), targets)


@pytest.mark.parametrize(
    ("make", "count", "said"),
    [
        (lambda: small("flattened"), 5, "12 positions in 5 slices"),
        (lambda: (Returning(LOSSES["flattened"]), small("flattened")[1]), 2, "the model returns all the logits"),
        (lambda: (Flat(LOSSES["flattened"]), (*small("flattened")[1][:1], small("flattened")[1][1].flatten())), 2,
         "with its rows flattened"),
        (models.mlp, 2, "samples, positions and classes"),
        (lambda: small("flattened"), 0, "an integer from 1 on"),
    ],
    ids=["no divisor", "logits returned", "flat targets", "no head", "none"],
)  # fmt: skip
def test_what_cannot_be_sliced_is_refused(make: Callable[[], Any], count: int, said: str) -> None:
    model, args = make()
    with pytest.raises((PlanError, SbpcError), match=said):
        sbpc.plan(model, args, Mesh(p=2), slices=count)


def each(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each flattened row."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: each(y, t).view(-1, 4).mean(0).square().mean(),
        lambda y, t: F.cross_entropy(y.flatten(0, 1), (t.flatten() + torch.arange(BATCH * SEQ)) % VOCAB),
        lambda y, t: each(y, t)[::2].square().mean(),
    ],
    ids=["dims of their own", "beside a value in blocks", "every other row"],
)
def test_flattened_rows_of_a_part_are_not_taken_for_a_block(loss: Loss) -> None:
    """Rows of the same positions of every sample would else be read as those of one sample after the other."""
    torch.manual_seed(0)
    args = tuple(torch.randint(0, VOCAB, (2, BATCH, SEQ)))
    with pytest.raises(PlanError, match="with its rows flattened"):
        sbpc.plan(Small(loss), args, Mesh(p=1), slices=6)
