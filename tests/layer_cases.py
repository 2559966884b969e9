"""Sample calls of the ops of layers and losses that have a rule."""

from __future__ import annotations

import torch

from sbpc.rules.proof.prove import Case
from tests.samples import CLOSE, case, close, f, x, y

aten = torch.ops.aten


def attention() -> list[Case]:
    flash, back = (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
    found = []
    masks = [None, f(5, 7), f(2, 1, 5, 7), f(2, 3, 5, 7)]
    for causal, mask in [(True, None), *((False, mask) for mask in masks)]:
        t = 5 if causal else 7
        q, k, v, g = f(2, 3, 5, 4), f(2, 3, t, 4, seed=1), f(2, 3, t, 4, seed=2), f(2, 3, 5, 4, seed=3)
        kwargs = {} if mask is None else {"attn_mask": mask}
        found.append(close(flash, q, k, v, 0.0, causal, **kwargs))
        out, lse = flash(q, k, v, 0.0, causal, **kwargs)
        found.append(close(back, g, q, k, v, out, lse, 0.0, causal, **kwargs))
    found.append(close(flash, f(2, 6, 5, 4), f(2, 3, 7, 4), f(2, 3, 7, 4, seed=1), 0.0, False))
    for dim in (1, -1):
        s = torch.softmax(f(3, 4, 5), dim)
        found += [
            close(aten._softmax.default, f(3, 4, 5), dim, False),
            close(aten._log_softmax.default, f(3, 4, 5), dim, False),
        ]
        masked = torch.where(torch.arange(60).view(3, 4, 5) % 7 < 3, f(3, 4, 5), -torch.inf)
        masked[0], masked[1, 2], masked[1, :, 3] = -torch.inf, -torch.inf, -torch.inf  # some rows have nothing
        found += [close(aten._safe_softmax.default, z, dim) for z in (f(3, 4, 5), masked)]
        found += [close(aten._softmax_backward_data.default, x(3, 4, 5), s, dim, torch.float64)]
        found += [close(aten._log_softmax_backward_data.default, x(3, 4, 5), s.log(), dim, torch.float64)]
    return found


def norm() -> list[Case]:
    found = []
    ln, back = aten.native_layer_norm.default, aten.native_layer_norm_backward.default
    for shape, d in (((4, 3, 5), 1), ((4, 3, 5), 2), ((4, 6), 1)):
        dims, w, b = list(shape[-d:]), f(*shape[-d:]), f(*shape[-d:], seed=1)
        _, mean, rstd = ln(f(*shape), dims, w, b, 1e-5)
        found += [close(ln, f(*shape), dims, w, b, 1e-5), close(ln, f(*shape), dims, None, None, 1e-5)]
        grad = x(*shape)
        found.append(close(back, grad, f(*shape), dims, mean, rstd, w, b, [True, True, True]))
        found.append(close(back, grad, f(*shape), dims, mean, rstd, w, None, [True, True, False]))
        found.append(close(back, grad, f(*shape), dims, mean, rstd, None, None, [True, False, False]))
    z, w, b = f(4, 12, 3, 5), f(12), f(12, seed=1)
    _, mean, rstd = aten.native_group_norm.default(z, w, b, 4, 12, 15, 4, 1e-5)
    found += [
        close(aten.native_group_norm.default, z, w, b, 4, 12, 15, 4, 1e-5),
        close(aten.native_group_norm.default, f(4, 24, 7), None, None, 4, 24, 7, 12, 1e-5),
        close(aten.native_group_norm.default, f(4, 12, 5, 1), w, b, 4, 12, 5, 4, 1e-5),
    ]
    found.append(
        close(
            aten.native_group_norm_backward.default, x(4, 12, 3, 5), z, mean, rstd, w, 4, 12, 15, 4, [True, True, True]
        )
    )
    z7 = f(4, 7, 5)  # every channel a group: ranks may be more than there are
    _, mean, rstd = aten.native_group_norm.default(z7, w[:7], b[:7], 4, 7, 5, 7, 1e-5)
    found += [
        close(aten.native_group_norm.default, z7, w[:7], b[:7], 4, 7, 5, 7, 1e-5),
        close(aten.native_group_norm_backward.default, x(4, 7, 5), z7, mean, rstd, w[:7], 4, 7, 5, 7, [True] * 3),
    ]
    z1 = f(4, 6, 5)  # one group: its channels may be split
    _, mean, rstd = aten.native_group_norm.default(z1, w[:6], b[:6], 4, 6, 5, 1, 1e-5)
    found += [
        close(aten.native_group_norm.default, z1, w[:6], b[:6], 4, 6, 5, 1, 1e-5),
        close(aten.native_group_norm_backward.default, x(4, 6, 5), z1, mean, rstd, w[:6], 4, 6, 5, 1, [True] * 3),
    ]
    z12 = f(4, 24, 3, 5)
    _, mean, rstd = aten.native_group_norm.default(z12, f(24), None, 4, 24, 15, 12, 1e-5)
    found.append(
        close(
            aten.native_group_norm_backward.default,
            x(4, 24, 3, 5),
            z12,
            mean,
            rstd,
            f(24),
            4,
            24,
            15,
            12,
            [True, True, True],
        )
    )
    z, w, b, mean, var = f(4, 6, 3, 5), f(6), f(6, seed=1), f(6, seed=2), f(6, seed=3).abs() + 1
    grad, ones = x(4, 6, 3, 5), [True, True, True]
    _, saved, inverse = aten._native_batch_norm_legit.no_stats(z, w, b, True, 0.1, 1e-5)
    found.append(close(aten._native_batch_norm_legit.no_stats, z, w, b, True, 0.1, 1e-5))
    found.append(close(aten._native_batch_norm_legit_functional.default, z, w, b, mean, var, True, 0.1, 1e-5))
    found.append(
        Case(
            aten._native_batch_norm_legit_no_training.default,
            (z, w, b, mean, var, 0.1, 1e-5),
            tolerance=CLOSE,
            zero=(1, 2),
        )
    )
    found.append(
        close(aten.native_batch_norm_backward.default, grad, z, w, mean, var, saved, inverse, True, 1e-5, ones)
    )
    found.append(
        Case(aten.native_batch_norm.default, (z, w, b, mean, var, False, 0.1, 1e-5), tolerance=CLOSE, zero=(1, 2))
    )
    found.append(close(aten.native_batch_norm.default, z, w, b, None, None, True, 0.1, 1e-5))
    none = torch.empty(0, dtype=torch.float64)
    found.append(close(aten.native_batch_norm_backward.default, grad, z, w, mean, var, none, none, False, 1e-5, ones))
    found.append(
        close(
            aten.native_batch_norm_backward.default,
            f(4, 6),
            f(4, 6, seed=1),
            w,
            mean,
            var,
            none,
            none,
            False,
            1e-5,
            ones,
        )
    )
    for shape, dim in (((6, 5), 0), ((6, 5), 1), ((4, 3, 5), 0), ((4, 3, 5), 2)):
        v, keep = f(*shape), [at for at in range(len(shape)) if at != dim % len(shape)]
        size = v.norm(2, keep, True)
        g = f(*size.shape, seed=1)
        found.append(close(aten._weight_norm_interface.default, v, g, dim))
        found.append(close(aten._weight_norm_interface_backward.default, x(*shape), v, g, size, dim))
        found += [close(aten.renorm.default, v, order, dim, 2.0) for order in (2, 1.5)]
    return found


def embedding() -> list[Case]:
    found = [
        case(aten.embedding.default, x(7, 5), y(7, 3, 4)),
        case(aten.embedding.default, x(9, 5), y(9, 6), 2),
        case(aten.embedding.default, x(3, 2), y(3, 4)),
    ]
    for padding in (-1, 0, 4, 8):
        found.append(case(aten.embedding_dense_backward.default, x(3, 6, 5), y(9, 3, 6), 9, padding, False))
    return [*found, case(aten.embedding_dense_backward.default, x(6, 5), y(3, 6), 3, 1, False)]


def loss() -> list[Case]:
    found = []
    for rest in ((), (7,), (2, 3, 5)):
        logits = x(*rest[:1], 5, *rest[1:])
        spatial = len(rest) == 3
        ahead = aten.nll_loss2d_forward.default if spatial else aten.nll_loss_forward.default
        back = aten.nll_loss2d_backward.default if spatial else aten.nll_loss_backward.default
        for weight, ignored, reduction in (
            (None, -100, 2),
            (x(5, low=1), 1, 2),
            (None, 4, 2),
            (None, 2, 0),
            (x(5, low=1), -100, 0),
            (None, 1, 1),
            (None, -100, 1),
        ):
            zero = (1,) if reduction == 0 and rest else ()
            target = y(5, *rest) if rest else torch.tensor(3)
            if ignored == -100 and rest:
                target = torch.where(torch.arange(target.numel()).reshape(target.shape) % 3 == 0, -100, target)
            found.append(
                Case(
                    ahead,
                    (logits, target, weight, reduction, ignored),
                    tolerance=CLOSE if reduction == 1 else 0.0,
                    zero=zero,
                )
            )
            grad = x(*rest) if reduction == 0 else torch.tensor(3.0, dtype=torch.float64)
            total = ahead(logits, target, weight, reduction, ignored)[1] + 1
            found.append(
                Case(
                    back,
                    (grad, logits, target, weight, reduction, ignored, total),
                    tolerance=CLOSE if reduction == 1 else 0.0,
                )
            )
    for reduction in (0, 1, 2):
        pair, unit = (x(3, 4), x(3, 4, seed=5)), (torch.sigmoid(f(3, 4)), torch.sigmoid(f(3, 4, seed=1)))
        grad = x(3, 4, seed=2) if reduction == 0 else torch.tensor(2.0, dtype=torch.float64)
        found += [
            close(aten.mse_loss.default, *pair, reduction),
            close(aten.mse_loss_backward.default, grad, *pair, reduction),
        ]
        found += [
            close(aten.smooth_l1_loss.default, *pair, reduction, 2.0),
            close(aten.smooth_l1_loss_backward.default, grad, *pair, reduction, 2.0),
        ]
        found += [
            close(aten.huber_loss.default, *pair, reduction, 2.0),
            close(aten.huber_loss_backward.default, grad, *pair, reduction, 2.0),
        ]
        found += [
            close(aten.binary_cross_entropy.default, *unit, f(4).abs(), reduction),
            close(aten.binary_cross_entropy_backward.default, grad, *unit, None, reduction),
        ]
        found += [close(aten.binary_cross_entropy_with_logits.default, f(3, 4), unit[1], None, f(4).abs(), reduction)]
    return found


def conv() -> list[Case]:
    found = []
    plain = ([1, 1], [1, 1], [1, 1], False, [0, 0])
    for shape, weight, groups, more in (
        ((3, 4, 5, 6), (7, 4, 3, 3), 1, plain),
        ((2, 4, 7, 6), (5, 4, 1, 2), 1, ([2, 1], [0, 1], [1, 1], False, [0, 0])),
        ((2, 12, 3, 4), (12, 1, 3, 3), 12, plain),
        ((2, 24, 3, 4), (12, 2, 3, 3), 12, plain),
        ((2, 12, 4), (24, 1, 3), 12, ([1], [1], [1], False, [0])),
        ((3, 4, 3, 4), (4, 7, 2, 3), 1, ([2, 1], [0, 0], [1, 1], True, [1, 0])),
        ((2, 24, 3, 4), (24, 3, 2, 2), 12, ([1, 1], [0, 0], [1, 1], True, [0, 0])),
    ):
        outs = weight[1] * groups if more[3] else weight[0]
        for bias in (None, x(outs)):
            found.append(case(aten.convolution.default, x(*shape), x(*weight), bias, *more, groups))
        grad = x(*aten.convolution.default(x(*shape), x(*weight), None, *more, groups).shape, seed=4)
        for sizes, mask in (
            ([outs], [True] * 3),
            ([0], [True, True, False]),
            ([outs], [False, True, True]),
            (None, [True, False, False]),
        ):
            found.append(
                case(aten.convolution_backward.default, grad, x(*shape), x(*weight), sizes, *more, groups, mask)
            )
    for shape in ((3, 4, 6, 8), (4, 6, 8)):
        z = (
            torch.randperm(torch.Size(shape).numel(), generator=torch.Generator().manual_seed(0))
            .double()
            .reshape(shape)
        )
        pool = ([2, 3], [2, 2], [1, 1], [1, 1], False)
        out, where = aten.max_pool2d_with_indices.default(z, *pool)
        found += [
            case(aten.max_pool2d_with_indices.default, z, *pool),
            case(aten.max_pool2d_with_indices_backward.default, x(*out.shape), z, *pool, where),
        ]
        average = ([2, 2], [2, 2], [1, 1], False, True, None)
        out = aten.avg_pool2d.default(z, *average)
        found += [
            close(aten.avg_pool2d.default, z, *average),
            close(aten.avg_pool2d_backward.default, x(*out.shape), z, *average),
        ]
        out = aten._adaptive_avg_pool2d.default(z, [3, 5])
        found += [
            close(aten._adaptive_avg_pool2d.default, z, [3, 5]),
            close(aten._adaptive_avg_pool2d_backward.default, x(*out.shape), z),
        ]
    image, grown = x(2, 3, 4, 5), x(2, 3, 8, 10)
    found += [
        close(aten.upsample_nearest2d.default, image, [8, 10]),
        close(aten.upsample_nearest2d_backward.default, grown, [8, 10], [2, 3, 4, 5]),
    ]
    found += [
        close(aten.upsample_bilinear2d.default, image, [8, 10], False),
        close(aten.upsample_bilinear2d_backward.default, grown, [8, 10], [2, 3, 4, 5], False),
    ]
    return found


FAMILIES = {made.__name__: made for made in (attention, norm, embedding, loss, conv)}
