"""What every op may do with Split, Broadcast and Partial: importing this package fills the table of rules."""

from __future__ import annotations

from sbpc.rules import attention, conv, embedding, factories, index, loss, matmul, norm, pointwise, reductions, views
from sbpc.rules.binding import Signature
from sbpc.rules.registry import Match, match, rule

__all__ = [
    "Match", "Signature", "attention", "conv", "embedding", "factories", "index", "loss", "match", "matmul", "norm",
    "pointwise", "reductions", "rule", "views",
]  # fmt: skip
