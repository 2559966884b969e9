"""Golden text: small models through every pass, the whole graph as it comes out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.inspect.graph_text import graph_text


class TwoLayers(nn.Module):
    """A linear layer, gelu, a linear layer."""

    def __init__(self, width: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


PAIR = {"up.weight": "S(0)", "down.weight": "S(1)"}


def rewrite(mesh: Mesh, **options: Any) -> sbpc.Plan:
    """The plan of two layers on a batch of 6."""
    return sbpc.plan(TwoLayers(), (torch.randn(6, 8),), mesh, **options, objective="serial")


def test_column_then_row_parallel_needs_one_all_reduce() -> None:
    plan = rewrite(Mesh(tensor=2), pin=PAIR, train=False)
    assert_expected_inline(
        graph_text(plan.boxed, plan.mesh),
        """\
up.weight    f32[16, 8]  S(0)  parameter
down.weight  f32[8, 16]  S(1)  parameter
x            f32[6, 8]   B     input
permute      f32[8, 16]  S(1)  aten.permute(up.weight, [1, 0])
mm           f32[6, 16]  S(1)  aten.mm(x, permute)
gelu         f32[6, 16]  S(1)  aten.gelu(mm)
permute_1    f32[16, 8]  S(0)  aten.permute(down.weight, [1, 0])
mm_1         f32[6, 8]   P     aten.mm(gelu, permute_1)
box_mm_1     f32[6, 8]   B     all_reduce(mm_1)                   # P -> B over tensor, 192 bytes
output                         output(box_mm_1)
""",
    )


def test_local_program_holds_shards_and_collectives() -> None:
    plan = rewrite(Mesh(tensor=2), pin=PAIR, train=False)
    assert_expected_inline(
        graph_text(plan.local),
        """\
up.weight           f32[8, 8]  S(0)  parameter
down.weight         f32[8, 8]  S(1)  parameter
x                   f32[6, 8]  B     input
position_tensor     i64[1]           input
permute             f32[8, 8]  S(1)  aten.permute(up.weight, [1, 0])
mm                  f32[6, 8]  S(1)  aten.mm(x, permute)
gelu                f32[6, 8]  S(1)  aten.gelu(mm)
permute_1           f32[8, 8]  S(0)  aten.permute(down.weight, [1, 0])
mm_1                f32[6, 8]  P     aten.mm(gelu, permute_1)
contiguous_default                   aten.contiguous(mm_1)
all_reduce_default                   _c10d_functional.all_reduce(contiguous_default, sum, sbpc::tensor=2::tensor)
box_mm_1            f32[6, 8]  B     _c10d_functional.wait_tensor(all_reduce_default)
output                               output(box_mm_1)
""",
    )


def test_backward_of_column_then_row_needs_one_all_reduce_of_the_input_gradient_only() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    plan = sbpc.plan(TwoLayers(), (x,), Mesh(tensor=2), pin=PAIR, objective="serial")
    assert_expected_inline(
        graph_text(plan.boxed, plan.mesh),
        """\
up.weight      f32[16, 8]  S(0)  parameter
down.weight    f32[8, 16]  S(1)  parameter
x              f32[6, 8]   B     input
tangent_0      f32[6, 8]   B     input
permute        f32[8, 16]  S(1)  aten.permute(up.weight, [1, 0])
mm             f32[6, 16]  S(1)  aten.mm(x, permute)
gelu           f32[6, 16]  S(1)  aten.gelu(mm)
permute_1      f32[16, 8]  S(0)  aten.permute(down.weight, [1, 0])
mm_1           f32[6, 8]   P     aten.mm(gelu, permute_1)
box_mm_1       f32[6, 8]   B     all_reduce(mm_1)                        # P -> B over tensor, 192 bytes
permute_2      f32[8, 6]   B     aten.permute(tangent_0, [1, 0])
mm_2           f32[8, 16]  S(1)  aten.mm(permute_2, gelu)
mm_3           f32[6, 16]  S(1)  aten.mm(tangent_0, down.weight)
gelu_backward  f32[6, 16]  S(1)  aten.gelu_backward(mm_3, mm)
permute_4      f32[16, 6]  S(0)  aten.permute(gelu_backward, [1, 0])
mm_4           f32[16, 8]  S(0)  aten.mm(permute_4, x)
mm_5           f32[6, 8]   P     aten.mm(gelu_backward, up.weight)
box_mm_5       f32[6, 8]   B     all_reduce(mm_5)                        # P -> B over tensor, 192 bytes
output                           output(box_mm_1, mm_4, mm_2, box_mm_5)
""",
    )


def test_fully_sharded_weights_are_gathered_and_their_gradients_scattered() -> None:
    x = torch.randn(96, 8)
    plan = sbpc.plan(
        TwoLayers(), (x,), Mesh(data=2), pin={"*.weight": "S(0)"}, inputs=["S(0)"], outputs=["S(0)"], objective="serial"
    )
    assert_expected_inline(
        graph_text(plan.boxed, plan.mesh),
        """\
up.weight        f32[16, 8]   S(0)  parameter
down.weight      f32[8, 16]   S(0)  parameter
x                f32[96, 8]   S(0)  input
tangent_0        f32[96, 8]   S(0)  input
box_up_weight    f32[16, 8]   B     all_gather(up.weight)                  # S(0) -> B over data, 256 bytes
permute          f32[8, 16]   B     aten.permute(box_up_weight, [1, 0])
mm               f32[96, 16]  S(0)  aten.mm(x, permute)
gelu             f32[96, 16]  S(0)  aten.gelu(mm)
box_down_weight  f32[8, 16]   B     all_gather(down.weight)                # S(0) -> B over data, 256 bytes
permute_1        f32[16, 8]   B     aten.permute(box_down_weight, [1, 0])
mm_1             f32[96, 8]   S(0)  aten.mm(gelu, permute_1)
permute_2        f32[8, 96]   S(1)  aten.permute(tangent_0, [1, 0])
mm_2             f32[8, 16]   P     aten.mm(permute_2, gelu)
box_mm_2         f32[8, 16]   S(0)  reduce_scatter(mm_2)                   # P -> S(0) over data, 256 bytes
mm_3             f32[96, 16]  S(0)  aten.mm(tangent_0, box_down_weight)
gelu_backward    f32[96, 16]  S(0)  aten.gelu_backward(mm_3, mm)
permute_4        f32[16, 96]  S(1)  aten.permute(gelu_backward, [1, 0])
mm_4             f32[16, 8]   P     aten.mm(permute_4, x)
box_mm_4         f32[16, 8]   S(0)  reduce_scatter(mm_4)                   # P -> S(0) over data, 256 bytes
output                              output(mm_1, box_mm_4, box_mm_2)
""",
    )


def test_uneven_batch_slices_by_the_position_of_the_rank() -> None:
    plan = rewrite(Mesh(data=4), pin={"gelu": "S(0)"}, train=False)
    assert_expected_inline(
        graph_text(plan.local_at(3)),
        """\
up.weight                       f32[16, 8]  B     parameter
down.weight                     f32[8, 16]  B     parameter
x                               f32[6, 8]   B     input
position_data                   i64[1]            input
permute                         f32[8, 16]  B     aten.permute(up.weight, [1, 0])
view_default                                      aten.view(permute, [8, 4, 4])
index_select_default                              aten.index_select(view_default, 1, position_data)
box_permute                     f32[8, 4]   S(1)  aten.view(index_select_default, [8, 4])
mm                              f32[6, 4]   S(1)  aten.mm(x, box_permute)
constant_pad_nd_default                           aten.constant_pad_nd(mm, [0, 0, 0, 2])
all_to_all_single_default                         _c10d_functional.all_to_all_single(constant_pad_nd_default, [2, 2, 2, 2], [2, 2, 2, 2], sbpc::data=4::data)
wait_tensor_default                               _c10d_functional.wait_tensor(all_to_all_single_default)
view_default_2                                    aten.view(wait_tensor_default, [4, 2, 4])
permute_default_1                                 aten.permute(view_default_2, [1, 0, 2])
contiguous_default                                aten.contiguous(permute_default_1)
view_default_3                                    aten.view(contiguous_default, [2, 16])
slice_tensor                                      aten.slice.Tensor(view_default_3, 0, 0, 0)
box_mm                          f32[0, 16]  S(0)  aten.clone(slice_tensor)
gelu                            f32[0, 16]  S(0)  aten.gelu(box_mm)
permute_1                       f32[16, 8]  B     aten.permute(down.weight, [1, 0])
mm_1                            f32[0, 8]   S(0)  aten.mm(gelu, permute_1)
constant_pad_nd_default_1                         aten.constant_pad_nd(mm_1, [0, 0, 0, 2])
all_gather_into_tensor_default                    _c10d_functional.all_gather_into_tensor(constant_pad_nd_default_1, 4, sbpc::data=4::data)
wait_tensor_default_1                             _c10d_functional.wait_tensor(all_gather_into_tensor_default)
slice_tensor_1                                    aten.slice.Tensor(wait_tensor_default_1, 0, 0, 6)
box_mm_1                        f32[6, 8]   B     aten.contiguous(slice_tensor_1)
output                                            output(box_mm_1)
""",
    )


def test_every_stage_is_dumped(tmp_path: Any) -> None:
    plan = rewrite(Mesh(tensor=2), dump=tmp_path)
    names = [path.name for path in sorted(tmp_path.iterdir())]
    stages = ["capture", "normalize", "decompose", "lift", "annotate", "assign", "box", "localize"]
    assert names == [f"{number:02}_{stage}.txt" for number, stage in enumerate(stages)]
    assert (tmp_path / "06_box.txt").read_text() == graph_text(plan.boxed)
    assert set(plan.times) >= {"capture", "normalize", "annotate", "assign", "verify"}


def test_report_of_a_plan() -> None:
    plan = rewrite(Mesh(tensor=2), pin=PAIR)
    assert_expected_inline(
        str(plan),
        """\
TwoLayers on Mesh(tensor=2): 2 ranks

parameters
name         shape    home layout  count
up.weight    [16, 8]  [S(0)]           1
down.weight  [8, 16]  [S(1)]           1

collectives
axis    collective  count  bytes sent per rank
tensor  all_reduce      1                  192

seconds   4.13e-09 a step: 3.94e-09 computing, 1.92e-10 communicating
proof     no plan with these pins takes less than 4.13e-09 s: the gap is 0.00 %
flops     3.94 k a rank, 50.0 % of one device's 7.87 k (1/2 is 50.0 %)
memory    512 B parameters, 512 B gradients, 1.02 kB optimizer, 960 B activations, 0 B temporaries; 2.95 kB at the peak, less than their sum
cluster   'ideal': a byte costs as much as a flop. It predicts no real machine; name one (h100, or a file),
          or measure yours with `sbpc profile`
""",
    )
