"""`sbpc.buckets`: batches at few lengths, with the means of what is no padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import sbpc


class Causal(nn.Module):
    """A causal model that also takes a mask, as models of language do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(11, 8), nn.Embedding(16, 8), nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(position_ids)
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Pair(NamedTuple):
    tokens: Tensor
    labels: Tensor


def examples(*lengths: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(1, 11, (length,), generator=generator).tolist() for length in lengths]
    return [
        {"input_ids": each, "labels": each, "position_ids": [*range(len(each))], "id": at}
        for at, each in enumerate(drawn)
    ]


def test_a_padded_batch_has_the_loss_and_the_gradients_of_its_tokens() -> None:
    torch.manual_seed(0)
    model, data = Causal().double(), examples(5, 7, 3, 9, 2, 6)
    loader = DataLoader(data, batch_size=2, collate_fn=sbpc.buckets([8, 16]))  # type: ignore[arg-type]
    seen = set()
    for at, batch in enumerate(loader):
        assert batch.pop("id").tolist() == [2 * at, 2 * at + 1]
        seen.add(batch["input_ids"].shape)
        found = torch.autograd.grad(model(**batch), list(model.parameters()))
        losses = []
        for each in data[2 * at : 2 * at + 2]:
            alone = {name: torch.tensor([value]) for name, value in each.items() if name != "id"}
            losses.append((model(**alone), len(each["labels"]) - 1))
        mean = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
        for one, other in zip(found, torch.autograd.grad(mean, list(model.parameters()))):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert seen == {(2, 8), (2, 16)}


def test_a_batch_keeps_its_structure_and_what_has_no_length() -> None:
    pad = sbpc.buckets([4, 8], fill={0: 9, 1: -100})
    given = Pair(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, 2))
    found = pad(given)
    assert (
        isinstance(found, Pair)
        and found.tokens.tolist() == [[1, 1, 1, 9]] * 2
        and found.labels[0, 3].tolist() == [-100, -100]
    )
    weights = torch.ones(2)
    assert [each.shape for each in pad([torch.ones(2, 5), weights])] == [(2, 8), (2,)]
    same = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    assert pad(same)["input_ids"].equal(same["input_ids"])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": torch.ones(1, 9)}, "a batch of length 9, and the longest bucket is 8"),
        (
            {"speech": torch.ones(1, 3)},
            "nothing says what 'speech' is padded with\n  Give it: sbpc.buckets(..., fill={'speech': 0})",
        ),
        ({"input_ids": torch.ones(9)}, "no tensor of the batch has a length"),
        ([{"input_ids": [1]}, {"labels": [1]}], "the examples hold other things than each other"),
        (torch.ones(2, 3), "a batch is tensor"),
    ],
)
def test_what_cannot_be_padded_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(sbpc.SbpcError) as error:
        sbpc.buckets([4, 8])(batch)
    assert message in str(error.value)
