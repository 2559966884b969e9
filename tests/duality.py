"""Duality: a backward op is the transpose of its forward op, so each forward signature has its transpose.

S becomes S. Where a tensor is B on the way forward every rank used all of it, so the ranks' gradients add up: B becomes
P, and P becomes B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sbpc.mesh.states import B, P, Split, State
from sbpc.rules import Match, Signature
from sbpc.rules.proof.prove import Case
from tests.samples import case, close, f, indices, x

aten = torch.ops.aten


@dataclass(frozen=True)
class Dual:
    """takes: what each tensor operand of the backward is: "g0" the gradient of output 0, "i0" input 0, "o0" output 0 of
    the forward, "*" anything. gives: by output of the backward, the number of the forward input whose gradient it is.
    """

    forward: Case
    backward: Case
    takes: tuple[str, ...]
    gives: tuple[int | None, ...]


def transposed(state: State) -> State:
    """The state of the gradient of a tensor in `state`."""
    return state if isinstance(state, Split) else P if state == B else B


def covers(state: State) -> tuple[State, ...]:
    """The states that are as good for a gradient: where P would do, B is boxed to it for nothing."""
    return (P, B) if state == P else (state,)


def missing(dual: Dual) -> list[Signature]:
    """The forward signatures whose transpose the backward rule lacks."""
    ahead, back = dual.forward.match(), dual.backward.match()
    return [
        signature
        for signature in ahead.signatures
        if not any(_fits(dual, signature, other, back) for other in back.signatures)
    ]


def _fits(dual: Dual, signature: Signature, other: Signature, back: Match) -> bool:
    assert len(dual.takes) == len(other.inputs), (
        f"{dual.backward}: {len(other.inputs)} operands, {len(dual.takes)} named"
    )
    for take, state in zip(dual.takes, other.inputs):
        if take == "*":
            continue
        number = int(take[1:])
        wanted = {
            "g": lambda n: transposed(signature.outputs[n]),
            "i": lambda n: signature.inputs[n],
            "o": lambda n: signature.outputs[n],
        }[take[0]](number)
        if state != wanted:
            return False
    gradients = zip(dual.gives, other.outputs, back.bound.outputs)
    return all(
        given is None or value.dims is None or state in covers(transposed(signature.inputs[given]))
        for given, state, value in gradients
    )


def duals() -> list[Dual]:
    """One pair per forward op that has a backward op of its own."""
    found = [*_pointwise(), *_dense()]
    logits, target = x(7, 5), indices(5, 7)
    for reduction in (0, 1, 2):
        grad = x(7) if reduction == 0 else x()
        ahead = case(aten.nll_loss_forward.default, logits, target, None, reduction, -100)
        total = ahead.run()[1]
        found.append(
            Dual(
                ahead,
                case(aten.nll_loss_backward.default, grad, logits, target, None, reduction, -100, total),
                ("g0", "i0", "i1", "*"),
                (0,),
            )
        )
        pair = (x(3, 4), x(3, 4, seed=1), reduction)
        grad = x(3, 4) if reduction == 0 else x()
        for forward, backward, more in (
            (aten.mse_loss.default, aten.mse_loss_backward.default, ()),
            (aten.smooth_l1_loss.default, aten.smooth_l1_loss_backward.default, (1.0,)),
            (aten.huber_loss.default, aten.huber_loss_backward.default, (1.0,)),
        ):
            found.append(
                Dual(case(forward, *pair, *more), case(backward, grad, *pair, *more), ("g0", "i0", "i1"), (0,))
            )
        unit = (torch.sigmoid(f(3, 4)), torch.sigmoid(f(3, 4, seed=1)), None, reduction)
        found.append(
            Dual(
                case(aten.binary_cross_entropy.default, *unit),
                case(aten.binary_cross_entropy_backward.default, grad, *unit),
                ("g0", "i0", "i1"),
                (0,),
            )
        )
    return found


def _pointwise() -> list[Dual]:
    found = []
    z, g = f(3, 4), f(3, 4, seed=1)
    for forward, backward, args, saved in (
        (aten.gelu.default, aten.gelu_backward.default, (), "i0"),
        (aten.silu.default, aten.silu_backward.default, (), "i0"),
        (aten.tanh.default, aten.tanh_backward.default, (), "o0"),
        (aten.sigmoid.default, aten.sigmoid_backward.default, (), "o0"),
        (aten.hardswish.default, aten.hardswish_backward.default, (), "i0"),
        (aten.mish.default, aten.mish_backward.default, (), "i0"),
        (aten.hardtanh.default, aten.hardtanh_backward.default, (-1, 1), "i0"),
    ):
        kept = z if saved == "i0" else forward(z)
        found.append(Dual(close(forward, z), close(backward, g, kept, *args), ("g0", saved), (0,)))
    found.append(Dual(close(aten.relu.default, z), close(aten.threshold_backward.default, g, z, 0), ("g0", "o0"), (0,)))
    s = torch.softmax(z, 1)
    found.append(
        Dual(
            close(aten._softmax.default, z, 1, False),
            close(aten._softmax_backward_data.default, g, s, 1, torch.float64),
            ("g0", "o0"),
            (0,),
        )
    )
    found.append(
        Dual(
            close(aten._log_softmax.default, z, 1, False),
            close(aten._log_softmax_backward_data.default, g, s, 1, torch.float64),
            ("g0", "o0"),
            (0,),
        )
    )
    found.append(
        Dual(
            case(aten.slice.Tensor, x(5, 6), 1, 1, 4),
            case(aten.slice_backward.default, x(5, 3), [5, 6], 1, 1, 4, 1),
            ("g0",),
            (0,),
        )
    )
    found.append(
        Dual(
            case(aten.select.int, x(5, 6), 1, 1), case(aten.select_backward.default, x(5), [5, 6], 1, 1), ("g0",), (0,)
        )
    )
    found.append(
        Dual(
            case(aten.view.default, x(12, 6, 5), [72, 5]), case(aten.view.default, x(72, 5), [12, 6, 5]), ("g0",), (0,)
        )
    )
    found.append(
        Dual(
            case(aten.expand.default, x(3, 1, 4), [3, 5, 4]),
            case(aten.sum.dim_IntList, x(3, 5, 4), [1], True),
            ("g0",),
            (0,),
        )
    )
    found.append(
        Dual(
            case(aten.sum.dim_IntList, x(3, 5, 4), [1], True),
            case(aten.expand.default, x(3, 1, 4), [3, 5, 4]),
            ("g0",),
            (0,),
        )
    )
    found.append(
        Dual(close(aten.glu.default, f(3, 8), 1), close(aten.glu_backward.default, g, f(3, 8), 1), ("g0", "i0"), (0,))
    )
    i = indices(7, 4, 3)
    found.append(
        Dual(
            case(aten.gather.default, x(4, 7), 1, i),
            case(aten.scatter_add.default, x(4, 7), 1, i, x(4, 3)),
            ("*", "i1", "g0"),
            (0,),
        )
    )
    found.append(
        Dual(
            case(aten.index.Tensor, x(7, 5), [i]),
            case(aten.index_put.default, x(7, 5), [i], x(4, 3, 5), True),
            ("*", "i1", "g0"),
            (0,),
        )
    )
    return [
        *found,
        Dual(
            case(aten.embedding.default, x(7, 5), i),
            case(aten.embedding_dense_backward.default, x(4, 3, 5), i, 7, -1, False),
            ("g0", "i1"),
            (0,),
        ),
    ]


def _dense() -> list[Dual]:
    found = []
    z, w, b = f(4, 3, 6), f(6), f(6, seed=1)
    out, mean, rstd = aten.native_layer_norm.default(z, [6], w, b, 1e-5)
    back = case(aten.native_layer_norm_backward.default, out, z, [6], mean, rstd, w, b, [True] * 3)
    found.append(
        Dual(
            case(aten.native_layer_norm.default, z, [6], w, b, 1e-5),
            back,
            ("g0", "i0", "o1", "o2", "i1", "i2"),
            (0, 1, 2),
        )
    )
    z, w = f(4, 12, 5), f(12)
    out, mean, rstd = aten.native_group_norm.default(z, w, w, 4, 12, 5, 4, 1e-5)
    back = case(aten.native_group_norm_backward.default, out, z, mean, rstd, w, 4, 12, 5, 4, [True] * 3)
    found.append(
        Dual(
            case(aten.native_group_norm.default, z, w, w, 4, 12, 5, 4, 1e-5),
            back,
            ("g0", "i0", "o1", "o2", "i1"),
            (0, 1, 2),
        )
    )
    z, w, none = f(4, 6, 5), f(6).abs(), torch.empty(0, dtype=torch.float64)
    for train in (False, True):
        ahead = (
            case(aten._native_batch_norm_legit_functional.default, z, w, w, w, w, True, 0.1, 1e-5)
            if train
            else case(aten.native_batch_norm.default, z, w, w, w, w, False, 0.1, 1e-5)
        )
        saved = ahead.run()[1:3] if train else (none, none)
        back = case(aten.native_batch_norm_backward.default, z, z, w, w, w, *saved, train, 1e-5, [True] * 3)
        found.append(Dual(ahead, back, ("g0", "i0", "i1", "i3", "i4", "o1", "o2"), (0, 1, 2)))
    flash, flash_back = (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
    for causal, mask in ((True, None), (False, None), (False, f(5, 7)), (False, f(2, 1, 5, 7))):
        t, more = 5 if causal else 7, {} if mask is None else {"attn_mask": mask}
        q, k, v = f(2, 3, 5, 4), f(2, 3, t, 4, seed=1), f(2, 3, t, 4, seed=2)
        out, lse = flash(q, k, v, 0.0, causal, **more)
        back = case(flash_back, out, q, k, v, out, lse, 0.0, causal, **more)
        found.append(
            Dual(
                case(flash, q, k, v, 0.0, causal, **more),
                back,
                ("g0", "i0", "i1", "i2", "o0", "o1", *(["i3"] if more else [])),
                (0, 1, 2),
            )
        )
    for shape, weight, groups in (
        ((3, 4, 5, 6), (7, 4, 3, 3), 1),
        ((2, 24, 3, 4), (12, 2, 3, 3), 12),
        ((2, 12, 3, 4), (12, 1, 3, 3), 12),
    ):
        args = (x(*shape), x(*weight), x(weight[0]), [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
        ahead = case(aten.convolution.default, *args)
        back = case(aten.convolution_backward.default, ahead.run(), *args[:2], [weight[0]], *args[3:], [True] * 3)
        found.append(Dual(ahead, back, ("g0", "i0", "i1"), (0, 1, 2)))
    z = f(3, 4, 6, 8)
    out, where = aten.max_pool2d_with_indices.default(z, [2, 2])
    back = case(aten.max_pool2d_with_indices_backward.default, out, z, [2, 2], [2, 2], [0, 0], [1, 1], False, where)
    found.append(Dual(case(aten.max_pool2d_with_indices.default, z, [2, 2]), back, ("g0", "i0", "o1"), (0,)))
    average = ([2, 2], [2, 2], [0, 0], False, True, None)
    found.append(
        Dual(
            case(aten.avg_pool2d.default, z, *average),
            case(aten.avg_pool2d_backward.default, out, z, *average),
            ("g0", "i0"),
            (0,),
        )
    )
    found.append(
        Dual(
            case(aten._adaptive_avg_pool2d.default, z, [3, 4]),
            case(aten._adaptive_avg_pool2d_backward.default, out, z),
            ("g0", "i0"),
            (0,),
        )
    )
    for name, more in (("nearest", ()), ("bilinear", (False,))):
        ahead, back = getattr(aten, f"upsample_{name}2d").default, getattr(aten, f"upsample_{name}2d_backward").default
        found.append(
            Dual(
                case(ahead, z, [12, 16], *more),
                case(back, f(3, 4, 12, 16), [12, 16], [3, 4, 6, 8], *more),
                ("g0",),
                (0,),
            )
        )
    return found
