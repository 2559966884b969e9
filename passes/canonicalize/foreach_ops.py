"""Takes apart the ops on lists of tensors that optimizers are written with: plain ops for each tensor of the lists.

The formulas of the fused steps are those of torch's own kernels: SGD with momentum (Sutskever et al. 2013), Adam
(Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from sbpc._compat import OpOverload, op_names, resolve
from sbpc.graph.rewrite import Writer

aten = torch.ops.aten
Formula = Callable[..., tuple[Any, ...]]
Write = Callable[..., Any]  # writes the op of a name on nodes and numbers


def each(write: Writer, *args: Any, **kwargs: Any) -> tuple[Node, ...] | None:
    """Writes `_foreach_NAME` as NAME of every tensor, with its own number where there is a list of them."""
    name = write.target._schema.name.split("::_foreach_")[1]
    given = {key: value for key, value in write.arguments(args, kwargs).items() if value is not None}
    named: dict[str, Any] = {key: given.pop(key) for key in ("alpha", "value") if key in given}
    if name.startswith("addc") and "scalars" in given:
        named["value"] = given.pop("scalars")
    if isinstance(named.get("value"), Node):
        return None
    count = next(len(value) for value in given.values() if isinstance(value, (list, tuple)))
    return tuple(one(write, name, at, tuple(given.values()), named) for at in range(count))


def one(write: Writer, name: str, at: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """Writes the op of a name on entry `at` of every list."""
    mine = [value[at] if isinstance(value, (list, tuple)) else value for value in args]
    named = {key: value[at] if isinstance(value, (list, tuple)) else value for key, value in kwargs.items()}
    values, more = map_arg((mine, named), lambda node: node.meta["val"])
    return write.call(resolve(getattr(aten, name), *values, **more), *mine, **named)


def grown(do: Write, x: Any, y: Any, factor: Any) -> Any:
    """Writes x + factor * y."""
    return do("add", x, do("mul", y, factor))


def steps(formula: Formula, lists: Sequence[str]) -> Callable[..., Any]:
    """Returns the rewrite of a fused step: `formula` for every parameter, its results as lists in the order of the
    op's."""

    def write_all(write: Writer, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], ...]:
        given = write.arguments(args, kwargs)
        columns = {name: given.pop(name) for name in (*lists, "state_steps") if name in given}
        scale, overflow = given.pop("grad_scale"), given.pop("found_inf")
        made = []

        def do(name: str, *args: Any, **kwargs: Any) -> Any:
            return one(write, name, 0, args, kwargs)

        for at in range(len(columns["self"])):
            row = {name: column[at] if at < len(column) else None for name, column in columns.items()}
            before = [row[name] for name in lists]
            if scale is not None:
                row["grads"] = do("div", row["grads"], scale)
            after = formula(do, **row, **given)
            if overflow is not None:
                after = tuple(
                    new if new is None or new is old else do("where", do("eq", overflow, 1), old, new)
                    for old, new in zip(before, after)
                )
            made.append(after)
        return tuple(tuple(item for item in column if item is not None) for column in zip(*made))

    return write_all


def sgd(
    do: Write,
    *,
    self: Node,
    grads: Node,
    momentum_buffer_list: Node | None,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
) -> tuple[Any, ...]:
    """Returns the parameter, the gradient and the momentum after a step."""
    change = do("neg", grads) if maximize else grads
    change = grown(do, change, self, weight_decay) if weight_decay else change
    buffer = momentum_buffer_list
    if momentum:
        buffer = change if is_first_step else grown(do, do("mul", buffer, momentum), change, 1 - dampening)
        change = grown(do, change, buffer, momentum) if nesterov else buffer
    return do("sub", self, do("mul", change, lr)), grads, buffer


def adam(decoupled: bool) -> Formula:
    """Returns the formula of Adam, or of AdamW, whose decay of weights is decoupled from the gradient."""

    def formula(
        do: Write,
        *,
        self: Node,
        grads: Node,
        exp_avgs: Node,
        exp_avg_sqs: Node,
        max_exp_avg_sqs: Node | None,
        state_steps: Node,
        lr: Any,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
    ) -> tuple[Any, ...]:
        """Returns the parameter, the gradient and the averages after a step."""
        change = do("neg", grads) if maximize else grads
        x = self
        if weight_decay and decoupled:
            x = do("sub", x, do("mul", do("mul", x, lr), weight_decay))
        elif weight_decay:
            change = grown(do, change, x, weight_decay)
        mean = do("lerp", exp_avgs, change, 1 - beta1)
        square = grown(do, do("mul", exp_avg_sqs, beta2), do("mul", change, change), 1 - beta2)
        largest = do("maximum", max_exp_avg_sqs, square) if amsgrad else None
        steps = do("_to_copy", state_steps, dtype=torch.float64)
        first, second = (do("rsub", do("pow", beta, steps), 1) for beta in (beta1, beta2))
        below = do("add", do("div", do("sqrt", largest if amsgrad else square), do("sqrt", second)), eps)
        size = do("mul", do("reciprocal", first), lr)
        return do("sub", x, do("div", do("mul", mean, size), below)), grads, mean, square, largest

    return formula


ADAM = ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
FUSED = {
    aten._fused_adam: steps(adam(decoupled=False), ADAM),
    aten._fused_adamw: steps(adam(decoupled=True), ADAM),
    aten._fused_sgd: steps(sgd, ("self", "grads", "momentum_buffer_list")),
}
UNLIKE = ("mm", "norm", "powsum")  # of several results, or reductions with options of their own


def foreach() -> list[OpOverload]:
    """Returns the functional ops on lists of tensors."""
    ops = []
    for name in op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        plain = packet.removeprefix("_foreach_")
        if name.startswith("aten::_foreach_") and plain not in UNLIKE and hasattr(aten, plain):
            op = getattr(getattr(aten, packet), overload or "default")
            ops += [] if op._schema.is_mutable else [op]
    return ops


LISTS: dict[Any, Callable[..., Any]] = {op: each for op in foreach()}
LISTS |= {getattr(packet, name): write for packet, write in FUSED.items() for name in ("default", "tensor_lr")}
