"""A program that was captured with the attention of CPUs runs with the kernels of the device on which it is placed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import sbpc
from sbpc import Mesh
from sbpc._compat import TorchDispatchMode
from sbpc.errors import PlanError
from sbpc.plans.step_programs import BACKWARD, FORWARD, StepPrograms
from sbpc.rules.proof.prove import STAND_INS
from sbpc.runtime.device_kernels import Choice, attend, placed
from sbpc.runtime.executors import code
from sbpc.runtime.prepared import prepared
from tests import cuda_cases
from tests.test_plan import refused

CPU = torch.device("cpu")


class Attend(nn.Module):
    """Attention of 3 heads over 5 tokens, causal or with a mask that hides other keys from every query."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(12, 36), causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (3, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = None if self.causal else torch.ones(5, 5, dtype=torch.bool).roll(2, 0).triu(-1)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal).square().sum()


class StandIns(TorchDispatchMode):
    """Formulas in the place of ops that only GPUs have; `seen` are those that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in STAND_INS:
            name = func.overloadpacket.__name__
            assert "flash" not in name or args[0].shape[-1] % 8 == 0, "flash attention refuses heads of another width"
            self.seen.add(name)
            return STAND_INS[func](*args, **{key: value for key, value in (kwargs or {}).items() if value is not None})
        return func(*args, **kwargs)


def results(plan: sbpc.Plan, values: list[Tensor], choose: Choice | None = None) -> list[Tensor]:
    """The loss and the gradients of a plan, whose forward and backward each take the kernels of `choose`."""
    programs, halves = StepPrograms(plan), []
    for name in (FORWARD, BACKWARD):
        gm = prepared(programs.program(name, 0), CPU, True, 0, 0)
        if choose is not None:
            attend(gm.graph, choose)
        halves.append(code(gm))
    place = torch.tensor([0])
    with torch.no_grad():
        loss, *saved = halves[0]([*values, place])
        return [loss, *halves[1]([*saved, torch.ones((), dtype=loss.dtype), place])]


@pytest.mark.usefixtures("float64")
def test_every_kernel_of_attention_gives_what_that_of_cpus_gives() -> None:
    for kernel, causal in [
        ("flash", True),
        ("efficient", True),
        ("efficient", False),
        ("formula", True),
        ("formula", False),
    ]:
        assert cuda_cases.FLASH.default in STAND_INS
        torch.manual_seed(0)
        model, x = Attend(causal), torch.randn(2, 5, 12)
        plan = sbpc.plan(model, (x,), Mesh(data=1))
        values = [*(parameter.detach() for parameter in model.parameters()), x]
        expected, mode = results(plan, values), StandIns()
        with mode:
            found = results(
                plan,
                values,
                lambda parts, mask, asked, k=kernel, c=causal: k if asked == c and (mask is None) == c else "none",
            )
        wanted = {f"_scaled_dot_product_{kernel}_attention{half}" for half in ("", "_backward")}
        assert mode.seen == (set() if kernel == "formula" else wanted)
        assert len(found) == len(expected) == 3
        for one, two in zip(found, expected):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("float64")
def test_attention_whose_logsumexp_is_read_by_more_than_its_backward_is_computed_by_the_formula() -> None:
    torch.manual_seed(0)
    model, x = Attend(True), torch.randn(2, 5, 12)
    local = placed(sbpc.plan(model, (x,), Mesh(data=1)).local, CPU)
    ahead = next(node for node in local.graph.nodes if "attention_for_cpu.default" in str(node.target))
    sums = next(user for user in ahead.users if user.args[1] == 1)
    with local.graph.inserting_after(sums):
        moved = local.graph.call_function(torch.ops.aten.clone.default, (sums,))
    sums.replace_all_uses_with(moved, lambda user: user is not moved)
    attend(local.graph, lambda *_: "flash")
    names = {getattr(node.target, "__name__", "") for node in local.graph.nodes}
    assert {"formula", "formula_back"} <= names and not {"flash", "flash_back"} & names


def test_an_op_that_the_device_has_not_is_refused_by_name() -> None:
    graph = Graph()
    q = graph.placeholder("q")
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    graph.output((graph.call_function(op, (q, q, q, None, True)),))
    message = refused(PlanError, lambda: placed(GraphModule(nn.Module(), graph), CPU))
    assert message.startswith("%_scaled_dot_product_efficient_attention_default is an op that is not there on cpu:")
    assert message.endswith("Plan again, with the model on cpu or on the meta device.")
