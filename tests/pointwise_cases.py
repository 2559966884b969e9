"""Sample calls of every pointwise op, made from its schema, and by hand where arguments decide what is linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sbpc.graph.operands import leaves
from sbpc.rules.ops.pointwise import pointwise
from sbpc.rules.proof.prove import Case

aten = torch.ops.aten
CLOSE = 1e-10
Make = Callable[..., Tensor]


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The first of these ranges of values that gives finite outputs, not all of them zero, is taken.
DOMAINS: tuple[Make, ...] = (
    lambda *shape, seed: torch.rand(shape, generator=_seeded(seed), dtype=torch.float64) * 0.8 + 0.1,
    lambda *shape, seed: torch.rand(shape, generator=_seeded(seed), dtype=torch.float64) * 3 + 1.1,
    lambda *shape, seed: -torch.rand(shape, generator=_seeded(seed), dtype=torch.float64) * 3 - 1.1,
    lambda *shape, seed: torch.randint(1, 8, shape, generator=_seeded(seed)),
)


def ops() -> list[Any]:
    """Every op with a generated rule, by name."""
    found = []
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None) if space == "aten" else None
        if op is not None and pointwise(op) is not None:
            found.append(op)
    return found


def sample(op: Any, *shapes: tuple[int, ...]) -> Case | None:
    """A call of `op` with tensors of these shapes (the last one repeated), or None if it takes none of the domains."""
    for make in DOMAINS:
        args = [
            _argument(argument, make, at, shapes)
            for at, argument in enumerate(op._schema.arguments)
            if not argument.kwarg_only
        ]
        one = Case(op, tuple(args), tolerance=CLOSE)
        try:
            outputs = one.run()
        except (RuntimeError, NotImplementedError):  # the op takes no such numbers: the next ones
            continue
        flat = leaves(outputs, torch.Tensor)
        if all(torch.isfinite(out).all() and (out.dtype == torch.bool or (out != 0).any()) for out in flat):
            return one
    return None


def _argument(argument: Any, make: Make, at: int, shapes: tuple[tuple[int, ...], ...]) -> Any:
    kind = str(argument.type)
    if kind in ("Tensor", "Optional[Tensor]"):
        shape = shapes[min(at, len(shapes) - 1)]
        found = make(*shape, seed=at)
        return found > found.double().mean() if argument.name in ("condition", "mask") else found
    if argument.has_default_value() and argument.default_value is not None:
        return argument.default_value
    return {"number": 2, "Optional[number]": 2, "int": 2, "float": 0.5, "Optional[float]": 0.25, "bool": False}[kind]


def by_hand() -> list[Case]:
    """Calls whose arguments decide what is linear, and broadcasts."""
    x = torch.arange(12, dtype=torch.float64).reshape(3, 4) - 5.5
    row, column, mask, whole = x[:1] + 20, x[:, :1] + 20, x > 0, torch.arange(12).reshape(3, 4) + 1
    scalar = torch.tensor(3.0, dtype=torch.float64)
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten._to_copy.default, (whole.double(),), {"dtype": torch.float32}),
        (aten._to_copy.default, (x,), {"dtype": torch.int64}),
        (aten._to_copy.default, (whole,), {"dtype": torch.float64}),
        (aten._to_copy.default, (mask,), {"dtype": torch.float64}),
        (aten.add.Tensor, (x, row[0]), {"alpha": 2}),
        (aten.add.Tensor, (row, column), {}),
        (aten.add.Tensor, (x, scalar), {}),
        (aten.add.Tensor, (x, 2.0), {}),
        (aten.add.Tensor, (whole, whole), {}),
        (aten.add.Tensor, (whole, x), {}),
        (aten._conj.default, (torch.complex(x, x[:1] * 2 + x),), {}),
        (aten.addcmul.default, (row, x, column), {"value": 2}),
        (aten.bitwise_and.Tensor, (mask, mask[:1]), {}),
        (aten.clamp.default, (x, -2), {}),
        (aten.clone.default, (x,), {"memory_format": torch.contiguous_format}),
        (aten.div.Tensor, (x, column), {}),
        (aten.div.Scalar_mode, (x, 2), {"rounding_mode": "trunc"}),
        (aten.div.Tensor_mode, (x, column), {"rounding_mode": "floor"}),
        (aten.fill.Tensor, (x, scalar), {}),
        (aten.gelu.default, (x,), {"approximate": "tanh"}),
        (aten.gelu_backward.default, (x, row), {"approximate": "tanh"}),
        (aten.hardtanh_backward.default, (x, row, -1, 40), {}),
        (aten.masked_fill.Scalar, (x, mask, 0), {}),
        (aten.masked_fill.Scalar, (x, mask[0], 2.0), {}),
        (aten.masked_fill.Tensor, (x, mask, scalar), {}),
        (aten.mul.Tensor, (x, 2), {}),
        (aten.mul.Tensor, (row, column), {}),
        (aten.mul.Tensor, (mask, x), {}),
        (aten.mul.Tensor, (x, torch.tensor(2.0, dtype=torch.float64)), {}),
        (aten.native_dropout_backward.default, (x, mask, 2.0), {}),
        (aten.round.decimals, (x / 7,), {"decimals": 1}),
        (aten.sub.Tensor, (scalar, column), {}),
        (aten.threshold_backward.default, (x, -x, 0), {}),
        (aten.where.ScalarOther, (mask, x, 0), {}),
        (aten.where.ScalarOther, (mask, x, 1.0), {}),
        (aten.where.ScalarSelf, (mask, 0.0, x), {}),
        (aten.where.self, (mask[:, :1], row, x), {}),
    ]
    return [Case(op, args, kwargs, tolerance=CLOSE) for op, args, kwargs in calls]


def cases() -> list[Case]:
    """By hand, and for every op one call with equal shapes; one more with broadcasts where it has several tensors."""
    found = by_hand()
    for op in ops():
        same = sample(op, (3, 4))
        found += [same] if same is not None else []
        if same is not None and len(leaves(same.args, torch.Tensor)) > 1:
            spread = sample(op, (2, 3, 4), (3, 1))
            found += [spread] if spread is not None and spread.match() is not None else []
    return found
