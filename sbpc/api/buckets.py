"""Pad batches of tokens to few lengths, so that few plans are made: `sbpc.buckets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sbpc.errors import PlanError, SbpcError, check_kinds, is_number, shown
from sbpc.runtime.start import process_groups

FILL: Mapping[Any, Any] = {
    "input_ids": 0,
    "attention_mask": 0,
    "labels": -100,  # what `cross_entropy` ignores
    "position_ids": 0,
    "token_type_ids": 0,
}


class Buckets:
    """Pads a batch, or makes one of a list of examples, see `buckets`."""

    def __init__(self, lengths: Sequence[int], fill: Mapping[Any, Any], together: bool) -> None:
        self.lengths, self.fill, self.together = sorted({*lengths}), fill, together

    def __call__(self, batch: Any) -> Any:
        """Returns the batch at the least length that holds it."""
        if isinstance(batch, list) and batch and all(isinstance(each, (Mapping, tuple, list)) for each in batch):
            return self.of_examples(batch)
        items = named(batch)
        length = next((value.shape[1] for value in items.values() if value.dim() > 1), None)
        if length is None:
            raise PlanError("no tensor of the batch has a length, its dim 1\n  Give tensors [rows, length, ...].")
        to = self.least(length)
        padded = {
            key: self.padded(key, value, to) if value.dim() > 1 and value.shape[1] == length else value
            for key, value in items.items()
        }
        return like(batch, padded)

    def of_examples(self, examples: Sequence[Any]) -> Any:
        """Returns the batch of examples, whose tensors, or lists of numbers, begin with the length."""
        rows = [named(each) for each in examples]
        if any(row.keys() != rows[0].keys() for row in rows):
            raise PlanError("the examples hold other things than each other\n  Give the same of each.")
        lengths = [max((len(each) for each in row.values() if each.dim()), default=0) for row in rows]
        to = self.least(max(lengths))
        padded = {
            key: torch.stack(
                [
                    self.padded(key, row[key][None], to)[0] if row[key].dim() and len(row[key]) == length else row[key]
                    for row, length in zip(rows, lengths)
                ]
            )
            for key in rows[0]
        }
        return like(examples[0], padded)

    def least(self, length: int) -> int:
        """Returns the least of the lengths that holds so many tokens, on all ranks together where these go together."""
        longest = max(process_groups.from_all_ranks(length, process_groups.everyone())) if self.together else length
        to = next((each for each in self.lengths if each >= longest), None)
        if to is None:
            raise PlanError(
                f"a batch of length {longest}, and the longest bucket is {self.lengths[-1]}\n"
                "  Cut what is longer, or give a longer bucket."
            )
        return to

    def padded(self, key: Any, value: Tensor, to: int) -> Tensor:
        """Returns a tensor [rows, length, ...] at another length."""
        if key not in self.fill:
            what = f"nothing says what {key!r} is padded with"
            raise PlanError(f"{what}\n  Give it: sbpc.buckets(..., fill={{{key!r}: 0}}); labels are ignored at -100.")
        result = value.new_full((value.shape[0], to, *value.shape[2:]), self.fill[key])
        result[:, : value.shape[1]] = value
        return result


def buckets(lengths: Sequence[int], *, fill: Mapping[Any, Any] | None = None, together: bool = False) -> Buckets:
    """Returns what pads batches to the least of some lengths that holds them: each length is planned once.

    It takes a batch, a dict or a tuple of tensors [rows, length, ...], or, as `collate_fn` of a DataLoader, a list of
    examples whose tensors or lists begin with the length. Padding stands behind. Labels of -100 count in no mean of
    `cross_entropy`, so the loss is that of the batch without padding where the model keeps padding out: a causal one
    does, others by `attention_mask`.

    fill       by name, or by place in a tuple, what is padded with what; known are input_ids, attention_mask,
               position_ids and token_type_ids (0), and labels (-100).
    together   all ranks take the same length, which holds the longest: where each gives its own rows
               (`inputs="data"`). Every rank then calls it at the same point, so in no worker of a loader.

    >>> import sbpc, torch
    >>> pad = sbpc.buckets([4, 8])
    >>> pad({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[6, 7, 2]])})["labels"].tolist()
    [[6, 7, 2, -100]]
    >>> pad([{"input_ids": [5]}, {"input_ids": [5, 6]}])["input_ids"].tolist()
    [[5, 0, 0, 0], [5, 6, 0, 0]]

    Raises PlanError for a batch that is longer than all lengths, and for what is padded with nobody knows what.
    """
    check_kinds(lengths=(lengths, "a list"), together=(together, "True or False"))
    if not lengths or not all(is_number(each, int) and each > 0 for each in lengths):
        raise SbpcError(f"lengths is {shown(lengths)}\n  Give numbers of tokens, such as [512, 1024, 2048].")
    return Buckets(lengths, {**FILL, **(fill or {})}, together)


def named(batch: Any) -> dict[Any, Tensor]:
    """Returns the tensors of a batch, or of an example, by name or place."""
    if not isinstance(batch, (Mapping, tuple, list)):
        raise PlanError(f"a batch is {shown(batch)}\n  Give a dict or a tuple of tensors, or a list of such examples.")
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return {key: value if isinstance(value, Tensor) else torch.tensor(value) for key, value in items}


def like(batch: Any, padded: Mapping[Any, Tensor]) -> Any:
    """Returns padded tensors in a dict, a tuple or a list, as they came."""
    if isinstance(batch, Mapping):
        return dict(padded)
    return type(batch)(*padded.values()) if hasattr(batch, "_fields") else type(batch)(padded.values())
