"""Sample calls of every op that has a rule, of distinct sizes; those of layers and losses are in layer_cases."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from sbpc.graph.expert_rows import GATHER, SCATTER
from sbpc.graph.random_bits import BITS
from sbpc.rules.proof.prove import STAND_INS, Case
from sbpc.rules.strides import laid_out
from tests import cuda_cases, flex_cases, layer_cases
from tests.samples import case, close, f, x, y

aten = torch.ops.aten
HALF, E5M2 = torch.bfloat16, torch.float8_e5m2


def h(*shape: int) -> Tensor:
    """Few small integers, whose sums of products have digits enough in 16 bits: all but a few are zero."""
    return torch.where(y(9, *shape, seed=len(shape)) < 2, x(*shape), torch.zeros(())).bfloat16()


def h8(*shape: int, kind: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """The same in 8 bits."""
    return h(*shape).to(kind)


def scales(*shape: int) -> Tensor:
    """Powers of two, by which products stay exact."""
    return 2.0 ** x(*shape).float()


def ends(*rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, **rest: None) -> Tensor:
    """The op, and for float64, which it does not take, its definition: group by group, and zeros behind the last end."""
    if a.dtype != torch.float64:
        return laid_out(aten._grouped_mm.default)(a, b, offs, **rest)
    if offs is None:
        return a @ b
    parts = [slice(*part) for part in itertools.pairwise([0, *offs.tolist()])]
    if b.dim() == 2:
        return torch.stack([a[:, part] @ b[part] for part in parts])
    rows = [a[part] @ matrix for part, matrix in zip(parts, b)]
    return torch.cat([*rows, a.new_zeros(len(a) - parts[-1].stop, b.shape[-1])])


STAND_INS[aten._grouped_mm.default] = grouped


def matmul() -> list[Case]:
    return [
        case(aten.mm.default, x(4, 6), x(6, 5)),
        case(aten.mm.default, x(3, 2), x(2, 7)),
        case(aten.bmm.default, x(3, 4, 6), x(3, 6, 5)),
        case(aten.addmm.default, x(5), x(4, 6), x(6, 5)),
        case(aten.addmm.default, x(4, 5), x(4, 6), x(6, 5), beta=2, alpha=3),
        case(aten.addmm.default, x(1, 5), x(4, 6), x(6, 5)),
        case(aten.addmm.default, x(4, 1), x(4, 6), x(6, 5)),
        case(aten.addmm.default, x(), x(4, 6), x(6, 5)),
        case(aten.baddbmm.default, x(3, 4, 5), x(3, 4, 6), x(3, 6, 5)),
        case(aten.baddbmm.default, x(4, 5), x(3, 4, 6), x(3, 6, 5)),
        case(aten.baddbmm.default, x(3, 1, 5), x(3, 4, 6), x(3, 6, 5)),
        case(aten.dot.default, x(5, low=1), x(5, seed=1, low=1)),
        case(aten.mv.default, x(4, 6), x(6)),
        case(aten.einsum.default, "bsk,kn->bsn", [x(2, 3, 4), x(4, 5)]),
        case(aten.einsum.default, "bsk,bsn->kn", [x(2, 3, 4), x(2, 3, 5)]),
        case(aten.einsum.default, "ij,jk,kl->il", [x(2, 3), x(3, 4), x(4, 5)]),
        case(aten.einsum.default, "ij,ij->", [x(2, 3), x(2, 3, seed=1)]),
        case(aten.einsum.default, "bsk,nk->bsn", [x(2, 3, 4), x(5, 4)]),
        case(aten.einsum.default, "bhsd,bhtd->bhst", [x(2, 3, 4, 5), x(2, 3, 7, 5)]),
        case(aten.einsum.default, "bsth,bsdh->hbtd", [x(2, 3, 4, 5), x(2, 3, 7, 5)]),
        case(aten.einsum.default, "bk,bkn->bn", [x(2, 4), x(2, 4, 5)]),
        case(aten.einsum.default, "ij,jk->k", [x(2, 3), x(3, 4)]),
        case(aten._grouped_mm.default, h(10, 48), h(3, 48, 24), ends(4, 4, 10)),
        case(aten._grouped_mm.default, h(10, 48), h(3, 24, 48).mT, ends(0, 7, 10)),
        case(aten._grouped_mm.default, h(10, 48).t(), h(10, 24), ends(4, 4, 10)),
        case(aten._grouped_mm.default, h(3, 10, 48), h(3, 48, 24)),
        case(aten._grouped_mm.default, h(10, 48).float(), h(3, 48, 24).float(), ends(4, 4, 10)),
        case(aten._grouped_mm.default, x(10, 8), x(3, 8, 6), ends(4, 4, 9)),
        case(aten._grouped_mm.default, x(8, 10), x(10, 6), ends(4, 4, 9)),
        case(aten._grouped_mm.default, x(3, 4, 8), x(3, 8, 6)),
        case(aten._scaled_mm.default, h8(5, 32), h8(48, 32).t(), scales(), scales(1), out_dtype=torch.float32),
        case(
            aten._scaled_mm.default, h8(5, 64), h8(48, 64, kind=E5M2).t(), scales(5, 1), scales(1, 48), None, None, HALF
        ),
        case(aten._scaled_mm.default, h8(5, 48), h8(32, 48).t(), scales(1, 1), scales(), h(32), out_dtype=HALF),
        case(aten._scaled_mm.default, h8(5, 64), h8(48, 64).t(), scales(), scales()),
        case(aten._scaled_mm.default, h8(4, 24), h8(24, 24).t(), scales(4, 1), scales(1, 24), out_dtype=torch.float32),
        case(aten._to_copy.default, h(4, 3), dtype=E5M2),
        case(aten.linear.default, x(2, 3, 4), x(5, 4)),
        case(aten.linear.default, x(2, 3, 4), x(5, 4), x(5)),
        case(aten.linear.default, x(3, 4), x(5, 4), x(5)),
        case(aten.linear.default, x(4), x(5, 4), bias=x(5)),
    ]


def reductions() -> list[Case]:
    found = []
    for dim, keep in (([1], False), ([0, -1], True), ([], False), ([1], True), (None, False)):
        args = (x(3, 4, 5), dim, keep)
        found += [case(aten.sum.dim_IntList, *args), close(aten.mean.dim, *args)]
        found += [case(op, f(3, 4, 5), *args[1:]) for op in (aten.amax.default, aten.amin.default) if dim is not None]
        kept = {"keepdim": keep}
        found += [
            close(op, f(3, 4, 5), dim, **kept)
            for op in (aten.var.correction, aten.std.correction, aten.std_mean.correction, aten.var_mean.correction)
        ]
        found.append(close(aten.linalg_vector_norm.default, f(3, 4, 5), 2, dim, keep))
        found += [close(aten.norm.ScalarOpt_dim, f(3, 4, 5), order, dim, keep) for order in (None, 3) if dim]
        found += [
            close(aten.linalg_vector_norm.default, x(3, 4, 5), order, [1], keep)
            for order in (0, 1, 3.5, torch.inf, -torch.inf)
        ]
        found += [case(op, x(3, 4, 5) > 2, dim, keep) for op in (aten.any.dims, aten.all.dims)]
        if dim:
            found.append(close(aten.logsumexp.default, f(3, 4, 5), dim, keep))
    found += [
        case(op, f(3, 4, 5)) for op in (aten.max.default, aten.min.default, aten.argmax.default, aten.argmin.default)
    ]
    found += [
        case(op, f(3, 4, 5), 1, True) for op in (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim)
    ]
    found += [case(aten.sum.default, x(3, 4)), case(aten.sum.default, y(9, 3, 4)), close(aten.mean.default, x(5, 4))]
    found += [
        close(aten.mean.dim, x(3, 4, 5).float(), [1], True, dtype=torch.float64),
        case(aten.sum.default, x(3, 4) > 0),
    ]
    found += [close(aten.norm.Scalar, f(3, 4, 5)), close(aten.norm.Scalar, f(5, 4), 1)]
    found += [case(aten.prod.default, x(2, 3)), case(aten.prod.dim_int, x(2, 3), 1)]
    found += [case(op, x(3, 4) > 0) for op in (aten.any.default, aten.all.default)]
    found += [case(op, x(3, 4) > 0, 1, True) for op in (aten.any.dim, aten.all.dim)]
    return [*found, case(aten.sum.default, x()), case(aten.sum.dim_IntList, x(3, 1, 5), [1, 2])]


def views() -> list[Case]:
    v = aten.view.default
    found = [
        case(v, x(12, 6, 5), [72, 5]),
        case(v, x(72, 5), [12, 6, -1]),
        case(v, x(12, 60), [12, 12, 5]),
        case(v, x(12, 12, 5), [144, 5]),
        case(v, x(12, 4), [8, 6]),
        case(v, x(1, 12, 4), [48]),
        case(v, x(24, 5), [2, 12, 1, 5]),
        case(v, x(2, 3, 4), [24]),
        case(v, x(1), []),
        case(v, x(12, 6), [12, 2, 3]),
        case(aten._unsafe_view.default, x(12, 2, 3), [12, 6]),
        case(aten.reshape.default, x(5, 12).t(), [12, 5, 1]),
        case(aten.reshape.default, x(5, 12).t(), [60]),
        case(aten.permute.default, x(2, 3, 4), [2, 0, -2]),
        case(aten.t.default, x(3, 4)),
        case(aten.t.default, x(3)),
        case(aten.transpose.int, x(2, 3, 4), -1, 1),
        case(aten.unsqueeze.default, x(3, 4), 1),
        case(aten.unsqueeze.default, x(3, 4), -1),
        case(aten.squeeze.dim, x(3, 1, 4), 1),
        case(aten.squeeze.dim, x(3, 2, 4), 1),
        case(aten.squeeze.dims, x(3, 1, 4), [0, 1]),
        case(aten.squeeze.default, x(3, 1, 4)),
        case(aten.expand.default, x(3, 1, 4), [5, -1, 6, 4]),
        case(aten.expand.default, x(1), [3]),
        case(aten.expand.default, x(), [3, 2]),
        case(aten.diagonal.default, x(3, 4, 5), 0, 0, 2),
        case(aten.slice.Tensor, x(5, 6), 1, 1, 4),
        case(aten.slice.Tensor, x(5, 6), -2, 0, 2**63 - 1),
        case(aten.slice.Tensor, x(5, 6), 0, 0, 5, 2),
        case(aten.slice_backward.default, x(5, 3), [5, 6], 1, 1, 4, 1),
        case(aten.slice_backward.default, x(5, 6), [5, 6], 0, 0, 5, 1),
        case(aten.select.int, x(4, 5, 6), -2, 3),
        case(aten.select_backward.default, x(4, 6), [4, 5, 6], 1, -1),
        case(aten.split.Tensor, x(4, 7), 3, 1),
        case(aten.split_with_sizes.default, x(4, 7, 3), [1, 2, 4], -2),
        case(aten.unbind.int, x(4, 2, 3), 1),
        case(aten.unfold.default, x(4, 7, 3), 1, 3, 2),
        case(aten.unfold.default, x(4, 7, 3), 1, 7, 7),
        case(aten.split_with_sizes.default, x(4, 7, 3), [7], 1),
        case(aten.cat.default, [x(4, 3), x(4, 5)], 1),
        case(aten.cat.default, [x(2, 3, 4), x(2, 5, 4), x(2, 1, 4)], -2),
        case(aten.stack.default, [x(4, 3), x(4, 3, seed=1)], 1),
        case(aten.repeat.default, x(3, 4), [2, 1, 3]),
        case(aten.repeat.default, x(3, 4), [2, 1]),
        case(aten.flip.default, x(3, 4, 5), [0, -1]),
        case(aten.roll.default, x(3, 4), [1], [1]),
        case(aten.roll.default, x(3, 4), [2]),
        case(aten.constant_pad_nd.default, x(3, 4, 5), [0, 0, 1, 2]),
        case(aten.constant_pad_nd.default, x(3, 4), [1, -1], 7.0),
        case(aten.tril.default, x(2, 3, 4)),
        case(aten.triu.default, x(2, 3, 4), 1),
        case(aten.slice_scatter.default, x(4, 6), x(4, 2, seed=1), 1, 2, 4),
        case(aten.view_as_complex.default, x(4, 3, 2)),
        case(aten.view_as_real.default, torch.complex(x(4, 3), x(4, 3, seed=1))),
        case(aten.select_scatter.default, x(4, 6), x(4, seed=1), 1, 2),
    ]
    return found


def factories() -> list[Case]:
    found = [
        case(aten._assert_tensor_metadata.default, x(3, 4), [3, 4], None, torch.float64),
        case(aten._assert_tensor_metadata.default, x(3, 4), None, None, torch.float64),
        case(aten.native_dropout.default, x(3, 4), 0.0, True),
        case(aten.native_dropout.default, x(3, 4), 0.5, False),
        case(BITS, torch.tensor(3), [3, 4], 1),
        case(BITS, torch.tensor(4), [5, 2, 3], 0),
        case(aten.arange.default, 7),
        case(aten.arange.default, 7, dtype=torch.float64),
        case(aten.arange.start, 3, 10, dtype=torch.float64),
    ]
    found += [
        case(aten.arange.start, 2, 9),
        case(aten.arange.start_step, 2, 20, 3),
        close(aten.arange.start_step, 0.5, 4, 0.25, dtype=torch.float64),
    ]
    found += [
        case(aten.full.default, [3, 4], 7.0),
        case(aten.ones.default, [3, 4]),
        case(aten.scalar_tensor.default, 3.0),
    ]
    found += [
        case(aten.full_like.default, x(3, 4), 7.0),
        case(aten.ones_like.default, x(3, 4)),
        case(aten.ones_like.default, x()),
    ]
    found += [
        case(aten.new_full.default, x(3, 4), [5, 2], 7.0),
        case(aten.new_ones.default, x(3, 4), [5, 2]),
        case(aten.new_ones.default, x(), [5]),
    ]
    found += [
        Case(aten.zeros.default, ([3, 4],), zero=(0,)),
        Case(aten.zeros_like.default, (x(3, 4),), zero=(0,)),
        Case(aten.new_zeros.default, (x(3), [5, 2]), zero=(0,)),
    ]
    found += [
        Case(op, args, values=False)
        for op, args in (
            (aten.empty.memory_format, ([3, 4],)),
            (aten.empty_permuted.default, ([3, 4], [1, 0])),
            (aten.empty_like.default, (x(3, 4),)),
            (aten.new_empty.default, (x(3), [5, 2])),
        )
    ]
    return found


def index() -> list[Case]:
    pick, wide = y(7, 4, 3), y(7, 2, 5)
    found = [
        case(aten.gather.default, x(4, 7), 1, pick),
        case(aten.gather.default, x(4, 7), 1, wide),
        case(aten.gather.default, x(7, 4), 0, y(7, 9, 4)),
    ]
    found += [
        case(aten.scatter_add.default, x(4, 7), 1, pick, x(4, 3)),
        case(aten.scatter_add.default, x(4, 7), 1, wide, x(2, 5)),
    ]
    once = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(s))[:3] for s in range(4)])
    found += [
        case(aten.scatter.src, x(4, 7), 1, once, x(4, 3)),
        case(aten.scatter.value, x(4, 7), 1, once, 0),
        case(aten.scatter.value, x(4, 7), 1, once, 5.0),
    ]
    i, j = y(5, 2, 3), torch.where(y(5, 2, 3, seed=2) > 2, -1, y(5, 2, 3))
    calls: list[tuple[Tensor, list[Tensor | None]]] = [
        (x(5, 4, 6), [j]),
        (x(4, 5, 6), [None, i]),
        (x(5, 5, 4), [i, i]),
        (x(5, 4, 5), [i, None, i]),
        (x(5, 5, 4), [y(5, 7, 1), y(5, 3)]),
        (x(5, 4), [torch.tensor(3)]),
    ]
    for source, where in calls:
        out = aten.index.Tensor(source, where)
        found.append(case(aten.index.Tensor, source, where))
        found.append(case(aten.index_put.default, source, where, x(*out.shape, seed=3), True))
    found += [
        case(aten._unsafe_index.Tensor, x(5, 4), [i]),
        case(aten._unsafe_index_put.default, x(5, 4), [i], x(2, 3, 4), True),
    ]
    found += [
        case(aten.index_put.default, x(7, 4), [once[0]], x(3, 4)),
        case(aten.index_put.default, x(7, 4), [y(7, 3)], x(4), True),
        case(aten.index_put.default, x(7, 4), [y(7, 3)], x(3, 1), True),
    ]
    found += [
        case(aten.index_select.default, x(4, 7, 3), 1, y(7, 5)),
        case(GATHER, x(7, 3), y(7, 5), ends(2, 5), True),
        case(SCATTER, x(5, 3, 2), y(7, 5), ends(2, 7), 7, False),
        case(torch.ops.sbpc.within_capacity.default, torch.tensor([1, 1, 1, 0, 1, 2, 1]), 3, 3),
        case(aten.index_add.default, x(4, 7, 3), 1, y(7, 5), x(4, 5, 3), alpha=2),
    ]
    for op in (
        aten.cummax.default,
        aten.cummin.default,
        aten.cumprod.default,
        aten.cumsum.default,
        aten.logcumsumexp.default,
    ):
        found.append(close(op, f(3, 4, 5) if op == aten.logcumsumexp.default else x(3, 4, 5), 1))
    found += [case(op, f(3, 4, 5), 1) for op in (aten.sort.default, aten.median.dim, aten.mode.default)]
    found += [
        case(aten.sort.stable, x(3, 4, 5), stable=True, dim=-1),
        case(aten.topk.default, f(3, 7, 4), 3, 1),
        case(aten.kthvalue.default, f(3, 4, 5), 2, 1, True),
    ]
    found += [close(aten.glu.default, f(3, 8, 5), 1), close(aten.glu_backward.default, x(3, 4, 5), f(3, 8, 5), 1)]
    return [
        *found,
        case(aten.bucketize.Tensor, f(3, 4), torch.tensor([-1.0, 0.0, 1.0])),
        case(aten.histc.default, f(3, 4), 5, -2.0, 2.0),
    ]


FAMILIES = (
    {made.__name__: made for made in (matmul, reductions, views, factories, index, cuda_cases.cuda)}
    | layer_cases.FAMILIES
    | flex_cases.FAMILIES
)
