"""What every op may do with Split, Broadcast and Partial: importing this package fills the table of rules."""

from __future__ import annotations

from sbpc.rules.binding import Signature
from sbpc.rules.match import Match, Phases
from sbpc.rules.ops import (
    attention,
    conv,
    decompositions,
    embedding,
    expert_rows,
    factories,
    flex,
    index,
    loss,
    matmul,
    norm,
    packed,
    pointwise,
    reductions,
    views,
)
from sbpc.rules.registry import match, rule
from sbpc.rules.two_phase import decomposition

__all__ = [
    "Match",
    "Phases",
    "Signature",
    "attention",
    "conv",
    "decomposition",
    "decompositions",
    "embedding",
    "expert_rows",
    "factories",
    "flex",
    "index",
    "loss",
    "match",
    "matmul",
    "norm",
    "packed",
    "pointwise",
    "reductions",
    "rule",
    "views",
]
