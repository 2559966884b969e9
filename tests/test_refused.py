"""Models that no plan can hold: each is refused by a message that names the op and the user's line. And complex ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sbpc
from sbpc import Mesh
from sbpc.errors import CaptureError
from tests.compare import compare, eager
from tests.processes import run_ranks
from tests.random_plans import random_plan

LIBRARY = torch.library.Library("sbpc_tests", "DEF")
LIBRARY.define("double_(Tensor(a!) x) -> ()")
LIBRARY.define("no_fake(Tensor x) -> Tensor")
LIBRARY.impl("double_", lambda x: x.mul_(2) and None, "CompositeExplicitAutograd")  # never run: capture refuses it
LIBRARY.impl("no_fake", lambda x: 2 * x, "CPU")
torch.library.register_fake("sbpc_tests::double_", lambda x: None, lib=LIBRARY)


class Model(nn.Module):
    """Some layers, and a forward that the test gives."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function
        self.table, self.norm = nn.Embedding(9, 6, sparse=True), nn.BatchNorm1d(6, momentum=None)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def writes(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    torch.ops.sbpc_tests.double_(y)
    return y


def asks_for_its_shape(m: Any, x: Tensor) -> Tensor:
    return torch.ops.sbpc_tests.no_fake(m.linear(x))


def sparse_gradient(m: Any, x: Tensor) -> Tensor:
    return m.table(x.argmax(1))


def sparse_tensor(m: Any, x: Tensor) -> Tensor:
    return torch.sparse.mm(x.to_sparse(), m.linear.weight)


def nested(m: Any, x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([m.linear(x)[0], x[1]]).sum()


def jagged(m: Any, x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([m.linear(x)[0], x[1]], layout=torch.jagged).sum()


def branches(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (m.linear(x),))


def leaves_torch(m: Any, x: Tensor) -> Tensor:
    return m.linear(x) * float(x.numpy().sum())


def checks(m: Any, x: Tensor) -> Tensor:
    y = m.linear(x)
    assert not torch.isnan(y).any()
    return y


def averages_all(m: Any, x: Tensor) -> Tensor:
    return m.norm(m.linear(x))


def copies(m: Any, x: Tensor) -> Tensor:
    return copy.deepcopy(m.linear)(x)


def trains(m: Any, x: Tensor) -> Tensor:
    loss = m.linear(x).sum()
    loss.backward()
    return loss


def recomputes(m: Any, x: Tensor) -> Tensor:
    return checkpoint(m.linear, m.linear(x), use_reentrant=True)


REFUSED = (
    writes, asks_for_its_shape, sparse_gradient, sparse_tensor, nested, jagged, branches, leaves_torch, checks,
    averages_all, copies, trains, recomputes,
)  # fmt: skip


def message(function: Callable[[Any, Tensor], Any], method: str = "light") -> str:
    """The error of capture, without numbers of lines and the frame that all have."""
    with pytest.raises(CaptureError) as caught:
        sbpc.plan(Model(function), (torch.randn(4, 6),), Mesh(x=2), capture=method)
    text = re.sub(r"line \d+", "line N", str(caught.value))
    return text.replace('  File "tests/test_refused.py", line N, in forward\n    return self.function(self, x)\n', "")


def test_every_refusal_names_the_op_and_the_line_and_says_what_to_do() -> None:
    assert_expected_inline(
        "\n\n".join(map(message, REFUSED)),
        """\
sbpc_tests.double_.default writes into its arguments
  File "tests/test_refused.py", line N, in writes
    torch.ops.sbpc_tests.double_(y)
  Give it a form that returns new tensors.

sbpc_tests.no_fake.default does not say what it gives for tensors without values
  File "tests/test_refused.py", line N, in asks_for_its_shape
    return torch.ops.sbpc_tests.no_fake(m.linear(x))
  Tell it with torch.library.register_fake, or use another op.

aten._sparse_coo_tensor_with_dims_and_tensors.default gives a tensor of layout torch.sparse_coo
  File "tests/test_refused.py", line N, in sparse_gradient
    return m.table(x.argmax(1))
  Only dense tensors can be planned: an nn.Embedding with sparse=False, say.

aten._to_sparse.default gives a tensor of layout torch.sparse_coo
  File "tests/test_refused.py", line N, in sparse_tensor
    return torch.sparse.mm(x.to_sparse(), m.linear.weight)
  Only dense tensors can be planned: an nn.Embedding with sparse=False, say.

aten._nested_tensor_from_tensor_list.default makes a nested tensor
  File "tests/test_refused.py", line N, in nested
    return torch.nested.nested_tensor([m.linear(x)[0], x[1]]).sum()
  Pad to one length, and mask the padding.

the model's forward makes a nested tensor
  File "tests/test_refused.py", line N, in jagged
    return torch.nested.nested_tensor([m.linear(x)[0], x[1]], layout=torch.jagged).sum()
  Pad to one length, and mask the padding.

cond takes functions, and a captured graph holds plain ops
  File "tests/test_refused.py", line N, in branches
    return torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y * 3, (m.linear(x),))
  Write it out: torch.where keeps both sides of a branch.

the model's forward asks for the values of a tensor with .numpy()
  File "tests/test_refused.py", line N, in leaves_torch
    return m.linear(x) * float(x.numpy().sum())
  Write it with torch alone.

aten._local_scalar_dense.default needs the values of a tensor, and a captured graph has none
  File "tests/test_refused.py", line N, in checks
    assert not torch.isnan(y).any()
  To log it, return it; call .item() on what the module returns. For a branch or mask, write torch.where.

aten._local_scalar_dense.default needs the values of a tensor, and a captured graph has none
  File "tests/test_refused.py", line N, in averages_all
    return m.norm(m.linear(x))
  To log it, return it; call .item() on what the module returns. For a branch or mask, write torch.where.

the model's forward makes copies with copy.deepcopy
  File "tests/test_refused.py", line N, in copies
    return copy.deepcopy(m.linear)(x)
  Copy in __init__, or copy a tensor with clone().

the model's backward finds that the forward has called backward already
  Leave that to the training loop, or use autograd.grad.

the model's backward uses torch.utils.checkpoint with use_reentrant=True
  Give it use_reentrant=False.""",
    )


def test_both_tracers_refuse_alike() -> None:
    for function in [writes, asks_for_its_shape, sparse_tensor, nested, branches, checks]:
        assert message(function, "aot") == message(function)


def turned(m: Any, x: Tensor) -> Tensor:
    """Rotary positions as complex numbers."""
    angles = torch.polar(torch.ones(4, 3), torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.1, 0.01])))
    y = torch.view_as_complex(m.linear(x).view(4, 3, 2)) * angles.to(torch.complex128)
    return torch.view_as_real(y).flatten(1).square()


COMPLEX = {
    "a complex output": lambda m, x: torch.complex(m.linear(x), x),
    "rotary positions": turned,
    "two outputs": lambda m, x: (m.linear(x).to(torch.complex128) @ torch.complex(x.t(), x.t()), m.linear(x)),
}


def test_complex_numbers_are_split_and_partial_like_others(float64: None) -> None:
    for name in COMPLEX:
        model, args = Model(COMPLEX[name]), (torch.randn(4, 6),)
        outputs, gradients = eager(model, args)
        for sizes in ({"x": 2, "y": 2}, {"x": 3}):
            plan = sbpc.plan(model, args, Mesh(**sizes))
            assert not plan.notes and plan.verify() > 5
            for each in (plan, *(random_plan(plan, seed) for seed in range(3))):
                assert compare(each, model, args, outputs, gradients) <= 1e-9


def cumulated(m: Any, x: Tensor) -> Tensor:
    return torch.complex(x, 2 * x).cumsum(0).cumsum(1)


def all_to_all_of_complex() -> Tensor:
    """A complex matrix that goes from columns to rows over real ranks."""
    torch.set_default_dtype(torch.float64)
    model = Model(cumulated)
    plan = sbpc.plan(model, (torch.ones(4, 6),), Mesh(x=2), train=False, inputs=["S(1)"], outputs=["S(0)"])
    assert any("all_to_all" in str(node.target) for node in plan.local.graph.nodes)
    return sbpc.parallelize(model, plan)(torch.ones(4, 3))


def test_complex_numbers_change_dims_between_ranks() -> None:
    expected = torch.outer(torch.arange(1.0, 5), torch.arange(1.0, 7)).double() * (1 + 2j)
    assert torch.equal(torch.cat(run_ranks(all_to_all_of_complex, 2)), expected)
