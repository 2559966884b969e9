"""Losses. A mean over a split batch is no mean of local means: it is fixed, or the local sum over the global count."""

from __future__ import annotations

import math
from typing import Any

from sbpc.rules.match import Arguments, Shard
from sbpc.rules.ops.dims import aligned, joined
from sbpc.rules.ops.embedding import Lookup, addressed, without
from sbpc.rules.registry import rule

NONE, MEAN, SUM = 0, 1, 2


# --- negative log likelihood ------------------------------------------------------------------------------------------
def _nll_dims(given: Arguments) -> tuple[str, str, list[str]]:
    """The dims of self and of target, and the names of the latter."""
    rest = [f"n{at}" for at in range(given["target"].dim())]
    return " ".join([*rest[:1], "c", *rest[1:]]), joined(rest), rest


def nll(given: Arguments, outputs: Any) -> str:
    """none: total_weight is 0 (but that of a lone sample). mean: local targets weigh unequally, so nothing is split."""
    x, target, rest = _nll_dims(given)
    names = " ".join([*rest, "c"])
    if given["reduction"] == NONE and rest:
        return f"{x}, {target}, c -> {target}, () ; +c ; same({names} -> 1) ; idx c @ 1 ; lin(0 -> 0)"
    clause = f"fix {names}" if given["reduction"] == MEAN else f"+{names} ; idx c @ 1"
    return f"{x}, {target}, c -> (), () ; {clause} ; lin(0 -> 0)"


def nll_backward(given: Arguments, outputs: Any) -> str:
    """total_weight is the global one; of self only the shape is read."""
    x, target, _ = _nll_dims(given)
    grad = target if given["reduction"] == NONE else "()"
    return f"{grad}, {x}, {target}, c, total_weight=() -> {x} ; idx c @ 2 ; lin(0) ; lin(1 -> )"


def nll_local(shard: Shard, lookup: Lookup) -> Any:
    """Where the classes are split, targets of other ranks are ignored; each target is picked on one rank."""
    target = without(shard, lookup, shard.given["target"], shard.given["ignore_index"], -100)
    return shard.plain(target=target, ignore_index=-100)


# --- pointwise losses -------------------------------------------------------------------------------------------------
def pointwise_loss(given: Arguments, outputs: Any) -> str | None:
    """self, target (, weights): the reduction sums over all dims."""
    operands = _aligned(given, "self", "target", "weight", "pos_weight")
    if operands is None:
        return None
    if given["reduction"] == NONE:
        return f"{', '.join(operands)} -> {operands[0]}"
    return f"{', '.join(operands)} -> ()" + (f" ; +{operands[0]}" if given["self"].dim() else "")


def pointwise_loss_backward(given: Arguments, outputs: Any) -> str | None:
    operands = _aligned(given, "grad_output", "self", "target", "weight")
    return None if operands is None else f"{', '.join(operands)} -> {operands[1]} ; lin(0)"


def _aligned(given: Arguments, *names: str) -> list[str] | None:
    """The dims of those operands that the op has, None for a target that is broadcast."""
    shape = given["self"].shape
    return [aligned(given[n], shape) for n in names if n in given] if given["target"].shape == shape else None


def mean_local(shard: Shard) -> Any:
    """A mean, forward or backward, over a split dim: the sum over the global count."""
    sizes = shard.match.sizes
    if shard.given["reduction"] != MEAN or all(shard.local[factor] == size for factor, size in sizes.items()):
        return shard.plain()
    return shard.aten("div.Scalar", shard.plain(reduction=SUM), math.prod(sizes.values()))


LOSSES = "binary_cross_entropy{0} huber_loss{0} mse_loss{0} smooth_l1_loss{0}"
rule(LOSSES.format("") + " binary_cross_entropy_with_logits", pointwise_loss, local=mean_local)
rule(LOSSES.format("_backward"), pointwise_loss_backward, local=mean_local)
rule("nll_loss_forward nll_loss2d_forward", nll, local=addressed("c", "target", nll_local))
rule("nll_loss_backward nll_loss2d_backward", nll_backward, local=addressed("c", "target", nll_local))
