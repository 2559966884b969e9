"""Pointwise ops: their rules are generated from `torch.Tag.pointwise` and from a table of which are linear in what."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from sbpc._compat import OpOverload
from sbpc.rules.binding import flat_outputs
from sbpc.rules.match import FREE, Arguments, Entry, overloads
from sbpc.rules.ops.dims import aligned
from sbpc.rules.registry import GENERATORS, rule

aten = torch.ops.aten
# Pointwise by nature, though torch does not tag them so.
UNTAGGED = overloads(
    "_conj _prelu_kernel _prelu_kernel_backward _to_copy alias complex copy detach elu_backward fill.Scalar "
    "fill.Tensor floor_divide floor_divide.Scalar hardsigmoid_backward hardswish hardswish_backward hardtanh_backward "
    "leaky_relu_backward lift_fresh_copy masked_fill.Tensor mish_backward polar rrelu_with_noise_backward rsub.Tensor "
    "softplus_backward softshrink_backward where.ScalarOther where.ScalarSelf"
)
UNLIKE = overloads("equal rrelu")  # tagged pointwise, yet not a tensor (equal) or random (rrelu)
VIEWS = overloads("_conj alias detach")
# By arguments that are jointly linear: the ops. A number in the place of one of them makes the op affine: P + 1 is not
# legal.
LINEAR = {
    "grad_output": "_prelu_kernel_backward elu_backward gelu_backward hardsigmoid_backward hardswish_backward "
    "hardtanh_backward leaky_relu_backward logit_backward mish_backward native_dropout_backward "
    "rrelu_with_noise_backward sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward "
    "threshold_backward",
    "real imag": "complex",
    "self": "_conj _conj_physical _to_copy alias clone conj_physical deg2rad detach div.Scalar div.Tensor "
    "lift_fresh_copy mul.Scalar mul.Tensor neg positive rad2deg true_divide.Tensor",
    "other": "mul.Tensor",  # P * P is not legal
    "self end": "lerp.Scalar lerp.Tensor",
    "self other": "add.Tensor rsub.Tensor sub.Tensor where.self",
    "self tensor1": "addcdiv addcmul",
    "self tensor2": "addcmul",
    "self value": "masked_fill.Tensor",
    "src": "copy",
    "value": "fill.Tensor",
}
# Linear in the first of these arguments if the second, a scalar, is zero.
LINEAR_AT_ZERO = {
    "masked_fill.Scalar": ("self", "value"),
    "where.ScalarOther": ("self", "other"),
    "where.ScalarSelf": ("other", "self"),
}
# The values of these arguments do not matter, only their shape.
IGNORED = {"copy": "self", "fill.Scalar": "self", "fill.Tensor": "self"}


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
    if ignored := IGNORED.get(_name(op)):
        clauses.append(f"lin({names.index(ignored)} -> )")
    return " ; ".join([f"{', '.join(operands)} -> {', '.join(results)}", *clauses])


def _name(op: OpOverload) -> str:
    """The name of an op in these tables."""
    return str(op).removeprefix("aten.").removesuffix(".default")


def _linear(op: OpOverload, given: Arguments) -> list[list[str]]:
    """The groups of arguments in which this call is jointly linear."""
    groups = [names.split() for names, ops in LINEAR.items() if _name(op) in ops.split()]
    linear, zero = LINEAR_AT_ZERO.get(_name(op), ("", ""))
    if linear and given[zero] == 0:
        groups.append([linear])
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
rule("_assert_tensor_metadata", metadata, flops=FREE)
rule("native_dropout", dropout, nonempty="a")
