"""Pointwise ops: their rules are generated from `torch.Tag.pointwise` and from a table of which are linear in what."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sbpc._compat import OpOverload
from sbpc.rules.binding import flat_outputs
from sbpc.rules.match import FREE, Arguments, Entry
from sbpc.rules.ops.dims import aligned
from sbpc.rules.registry import GENERATORS, rule

aten = torch.ops.aten
# Pointwise by nature, though torch does not tag them so.
UNTAGGED = (
    aten._conj.default, aten._prelu_kernel.default, aten._prelu_kernel_backward.default, aten._to_copy.default,
    aten.alias.default, aten.complex.default, aten.copy.default, aten.detach.default, aten.elu_backward.default,
    aten.fill.Scalar, aten.fill.Tensor, aten.floor_divide.default, aten.floor_divide.Scalar,
    aten.hardsigmoid_backward.default, aten.hardswish.default, aten.hardswish_backward.default,
    aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.lift_fresh_copy.default,
    aten.masked_fill.Tensor, aten.mish_backward.default, aten.polar.default, aten.rrelu_with_noise_backward.default,
    aten.rsub.Tensor, aten.softplus_backward.default, aten.softshrink_backward.default, aten.where.ScalarOther,
    aten.where.ScalarSelf,
)  # fmt: skip
# Tagged pointwise, yet not a tensor (equal) or random (rrelu).
UNLIKE = (aten.equal.default, aten.rrelu.default)
VIEWS = (aten._conj.default, aten.alias.default, aten.detach.default)
# By arguments that are jointly linear: the ops. A number in the place of one of them makes the op affine: P + 1 is not legal.
LINEAR: dict[tuple[str, ...], tuple[str, ...]] = {
    ("grad_output",): (
        "_prelu_kernel_backward.default", "elu_backward.default", "gelu_backward.default",
        "hardsigmoid_backward.default", "hardswish_backward.default", "hardtanh_backward.default",
        "leaky_relu_backward.default", "logit_backward.default", "mish_backward.default",
        "native_dropout_backward.default", "rrelu_with_noise_backward.default", "sigmoid_backward.default",
        "silu_backward.default", "softplus_backward.default", "softshrink_backward.default",
        "tanh_backward.default", "threshold_backward.default",
    ),
    ("real", "imag"): ("complex.default",),
    ("self",): (
        "_conj.default", "_conj_physical.default", "_to_copy.default", "alias.default", "clone.default", "conj_physical.default",
        "deg2rad.default", "detach.default", "div.Scalar", "div.Tensor", "lift_fresh_copy.default",
        "mul.Scalar", "mul.Tensor", "neg.default", "positive.default", "rad2deg.default", "true_divide.Tensor",
    ),
    ("other",): ("mul.Tensor",),  # P * P is not legal
    ("self", "end"): ("lerp.Scalar", "lerp.Tensor"),
    ("self", "other"): ("add.Tensor", "rsub.Tensor", "sub.Tensor", "where.self"),
    ("self", "tensor1"): ("addcdiv.default", "addcmul.default"),
    ("self", "tensor2"): ("addcmul.default",),
    ("self", "value"): ("masked_fill.Tensor",),
    ("src",): ("copy.default",),
    ("value",): ("fill.Tensor",),
}  # fmt: skip
# Linear if this scalar argument is zero.
LINEAR_AT_ZERO = {
    "masked_fill.Scalar": ("self", "value"),
    "where.ScalarOther": ("self", "other"),
    "where.ScalarSelf": ("other", "self"),
}
# The values of these arguments do not matter, only their shape.
IGNORED = {"copy.default": "self", "fill.Scalar": "self", "fill.Tensor": "self"}


def pointwise_text(op: OpOverload, given: Arguments, outputs: Any) -> str | None:
    """The rule of one call: dims aligned from the right, "1" where an operand is broadcast.

    >>> pointwise_text(aten.add.Tensor, {"self": torch.ones(2, 3), "other": torch.ones(3)}, torch.ones(2, 3))
    'd0 d1, d1, _ -> d0 d1 ; lin(0, 1)'
    """
    flat = flat_outputs(outputs)
    if not all(isinstance(output, Tensor) for output in flat):
        return None
    shape = flat[0].shape
    names = [argument.name for argument in op._schema.arguments]
    operands = [aligned(given.get(name), shape) for name in names]
    results = [aligned(output, shape) for output in flat]
    clauses = [f"lin({', '.join(map(str, sorted(map(names.index, group))))})" for group in _linear(op, given)]
    key = str(op)[5:]
    if key in IGNORED:
        clauses.append(f"lin({names.index(IGNORED[key])} -> )")
    return " ; ".join([f"{', '.join(operands)} -> {', '.join(results)}", *clauses])


def _linear(op: OpOverload, given: Arguments) -> list[tuple[str, ...]]:
    """The groups of arguments in which this call is jointly linear."""
    key = str(op)[5:]
    groups = [group for group, ops in LINEAR.items() if key in ops]
    if key in LINEAR_AT_ZERO and given[LINEAR_AT_ZERO[key][1]] == 0:
        groups.append((LINEAR_AT_ZERO[key][0],))
    return [group for group in groups if all(isinstance(given.get(name), Tensor) for name in group)]


@functools.cache
def pointwise(op: OpOverload) -> Entry | None:
    """The generated row of a functional pointwise op, None for any other op."""
    tagged = torch.Tag.pointwise in op.tags and not op._schema.is_mutable and op not in UNLIKE
    if not tagged and op not in UNTAGGED:
        return None
    return Entry(op, functools.partial(pointwise_text, op), flops=FREE if op in VIEWS else None, view=op in VIEWS)


def dropout(given: Arguments, outputs: Any) -> str | None:
    """Dropout that drops nothing; a random one has no rule."""
    return "*a -> *a, *a ; lin(0 -> 0)" if given["p"] == 0 or given["train"] is False else None


def metadata(given: Arguments, outputs: Any) -> str | None:
    """A check of the dtype, device and sizes of a tensor."""
    return "*a, size=[*a] -> _ ; lin(0 -> )" if given["stride"] is None else None


GENERATORS.append(pointwise)
rule(aten._assert_tensor_metadata.default, metadata, flops=FREE)
rule(aten.native_dropout.default, dropout, nonempty="a")
