"""Constructors replayed tensor by tensor give what they give on one device; what cannot be replayed is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sbpc.errors import PlanError
from sbpc.runtime.state.deferred_init import Recording
from tests import models


class Layers(nn.Module):
    """Every layer with an initialisation of its own, views, copies, constants, writes into slices and `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Linear(33, 17), nn.Embedding(10, 6, padding_idx=2)
        self.conv, self.lstm, self.norm = nn.Conv2d(3, 5, 3), nn.LSTM(4, 5), nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(8, 2)
        nn.init.orthogonal_(self.linear.weight)
        self.turned = nn.Parameter(torch.randn(3, 4).t())
        self.twice = nn.Parameter(self.linear.weight.detach().clone() * 2)
        self.numbers = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.tied = nn.Linear(6, 10, bias=False)
        self.tied.weight = self.embedding.weight
        self.register_buffer("order", torch.randperm(7))
        with torch.no_grad():
            self.numbers.mul_(2)
            self.linear.bias[2:4] = 7
            self.norm.weight.data.normal_()
            self.norm.bias.data = torch.rand(4)
        self.apply(lambda m: nn.init.normal_(m.weight, 0, 0.02) if isinstance(m, nn.Conv2d) else None)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "layers": Layers,
    "gpt2": lambda: models.gpt2()[0],
    "batch_norm": lambda: models.batch_norm()[0],
    "vgg": lambda: models.vgg()[0],
}


def test_every_tensor_is_what_one_device_draws() -> None:
    for name in BUILDERS:
        torch.manual_seed(7)
        expected = BUILDERS[name]()
        after = torch.rand(3)
        torch.manual_seed(7)
        recording = Recording(BUILDERS[name])
        for kind in ("named_parameters", "named_buffers"):
            for key, value in reversed(list(getattr(expected, kind)(remove_duplicate=False))):  # in any order
                found = recording.tensor(key)
                assert torch.equal(found, value) and found.stride() == value.stride() and type(found) is Tensor, key
        assert torch.equal(torch.rand(3), after)


class Looks(nn.Module):
    """Looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        if self.weight.sum() > 0:
            self.weight.data.zero_()


class Draws(nn.Module):
    """Draws as often as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3).multinomial(2).double())


class Seeds(nn.Module):
    """Seeds torch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(torch.initial_seed() + 1)
        self.weight = nn.Parameter(torch.randn(3))


class Apart(nn.Module):
    """Has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3).normal_(generator=torch.Generator()))


class Nothing(nn.Module):
    """Is on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


def test_what_cannot_be_replayed_is_refused() -> None:
    for kind, message in [
        (Looks, "init= cannot be recorded: DataDependentOutputException"),
        (Draws, "the constructor calls aten.multinomial.default, whose random draws depend on values"),
        (Seeds, "init= seeds torch or draws outside of torch's ops"),
        (Apart, "init= draws from a generator of its own"),
        (Nothing, "init= leaves 'weight' without values"),
        (lambda: 3, "init= returns 3"),
    ]:
        with pytest.raises(PlanError) as error:
            Recording(kind)
        assert str(error.value).startswith(message)
