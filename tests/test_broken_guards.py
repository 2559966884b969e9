"""A number that is another than when the model was planned is refused however the plan is run; what cannot be guarded is not planned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import CaptureError, PlanError
from sbpc.graph.values import text_of
from sbpc.plans import plan_bytes
from sbpc.runtime.module import unguarded
from tests.forging import sealed
from tests.guarded import METHODS, Small, X
from tests.processes import run_ranks


def test_a_model_with_other_numbers_than_planned_is_refused_by_simulate() -> None:
    model = Small()
    plan = sbpc.plan(model, (X,), Mesh(p=2))
    model.beta = 1.0
    with pytest.raises(PlanError) as caught:
        sbpc.simulate(plan, model, (X,))
    assert_expected_inline(
        str(caught.value),
        """\
beta is 1.0, and was 0.0 when the model was planned: what a forward reads besides tensors is constant in its plan
  Plan anew; or once for each value, with pin=plan.parameters, and give the plans as parallelize(..., also=[...]), which also='auto' does.
  What changes from step to step is a buffer or an argument.""",
    )


def texts(*calls: Callable[[], Any]) -> list[str]:
    """What each call raises, by its first line."""
    found = []
    for call in calls:
        try:
            call()
            found.append("")
        except PlanError as error:
            found.append(str(error).splitlines()[0].partition(":")[0])
    return found


def every_way(plan: Any, other: Any, test: Any, loop: Any) -> dict[str, list[str]]:
    """What a changed number gives, by the way in which a module is run. other: a plan with another beta. test: for eval mode."""
    module: Any = sbpc.parallelize(Small(), plan, evaluate=test)
    module(X)
    module.step(X)
    found: dict[str, list[str]] = {}
    module.beta = 1.0
    found["call, step"] = texts(lambda: module(X), lambda: module.step(X))
    found["a copy"] = texts(lambda: copy.deepcopy(module)(X))
    module.eval()
    found["evaluate"] = texts(lambda: module(X))
    module.beta = 0.0
    found["set back"] = texts(
        lambda: module(X), lambda: module.train()(X), lambda: module.step(X), lambda: copy.deepcopy(module)(X)
    )
    module.act.eval()
    found["a layer in eval mode"] = texts(lambda: module(X), lambda: module.step(X))
    module.act.train()
    module.act = nn.LeakyReLU(0.1)
    found["another module"] = texts(lambda: module(X))
    both: Any = sbpc.parallelize(Small(), plan, also=[other])
    values = []
    for both.beta in (0.0, 1.0, 0.0):
        values += [both(X).item() - plain(both)(X).item(), both.step(X).item() - plain(both)(X).item()]
    both.beta = 2.0
    found["two plans"] = [f"{max(map(abs, values)):.4f}", *texts(lambda: both(X))]
    looped: Any = sbpc.parallelize(Small(), loop)
    looped.step(X)
    looped.act.negative_slope = 0.2
    found["a loop"] = texts(lambda: looped.step(X))
    changed = Small(1.0)
    found["another model"] = texts(lambda: sbpc.parallelize(changed, plan), lambda: sbpc.parallelize(changed, loop))
    found["another model, planned too"] = texts(lambda: sbpc.parallelize(changed, plan, also=[other]))
    return found


def plain(module: Any) -> Small:
    """The model with the weights and the number of a parallel module."""
    model = Small(module.beta)
    model.load_state_dict({name: value.full_tensor() for name, value in module.state_dict().items()})
    return model


def test_a_number_that_changes_is_refused_however_the_module_is_run() -> None:
    model, mesh = Small(), Mesh(p=1)
    plan = sbpc.plan(model, (X,), mesh)
    other = sbpc.plan(Small(1.0), (X,), mesh, pin=plan.parameters)
    test = sbpc.plan(model.eval(), (X,), mesh, train=False, pin=plan.parameters)
    loop = sbpc.plan(model.train(), (X,), mesh, microbatches=2)
    (found,) = run_ranks(every_way, 1, plan, other, test, loop)
    assert_expected_inline(
        "\n".join(f"{name}: {text}" for name, text in found.items()),
        """\
call, step: ['beta is 1.0, and was 0.0 when the model was planned', 'beta is 1.0, and was 0.0 when the model was planned']
a copy: ['beta is 1.0, and was 0.0 when the model was planned']
evaluate: ['beta is 1.0, and was 0.0 when the model was planned']
set back: ['', '', '', '']
a layer in eval mode: ['the module is in another mode (train or eval) than when it was planned', 'the module is in another mode (train or eval) than when it was planned']
another module: ['act is another module than before']
two plans: ['0.0000', 'beta is 2.0, and was 0.0 when the model was planned']
a loop: ['act.negative_slope is 0.2, and was 0.1 when the model was planned']
another model: ['beta is 1.0, and was 0.0 when the model was planned', 'beta is 1.0, and was 0.0 when the model was planned']
another model, planned too: ['']""",
    )


def test_guards_of_a_file_are_texts(tmp_path: Any) -> None:
    plan = sbpc.plan(Small(), (X,), Mesh(p=2))
    plan.save(tmp_path / "plan")
    assert sbpc.load(tmp_path / "plan").options.guards == plan.options.guards == {"act": ["a LeakyReLU"]} | {
        "forward": [text_of(Small.forward)], "act.inplace": ["False"], "act.negative_slope": ["0.1"], "beta": ["0.0"], "layer": ["a Linear"],
    }  # fmt: skip
    body = plan_bytes.read(tmp_path / "plan")
    for wrong in (None, ["beta"], {"beta": "0.0"}, {"beta": [0.0]}, {"beta": ["a\nb"]}, {"be\nta": ["0.0"]}):
        (tmp_path / "plan").write_bytes(sealed(body | {"options": body["options"] | {"guards": wrong}}))
        with pytest.raises(PlanError, match="Plan anew"):
            sbpc.load(tmp_path / "plan")


def test_a_bare_tree_of_weights_leaves_the_guards_of_a_plan() -> None:
    plan = sbpc.plan(Small(), (X,), Mesh(p=2))
    guards = dict(plan.options.guards)
    assert unguarded(plan).options.guards == {} and plan.options.guards == guards != {}


def test_a_scripted_part_is_refused_and_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1] = torch.jit.script(model[1])  # type: ignore[no-untyped-call]
    before = model[0].weight
    with pytest.raises(CaptureError, match="TorchScript module cannot be captured: '1' is one"):
        sbpc.plan(model, (X,), Mesh(p=2))
    assert model[0].weight is before


def test_a_simulation_in_another_mode_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    plan = sbpc.plan(model, (X,), Mesh(p=2))
    with pytest.raises(PlanError, match="is in another mode"):
        sbpc.simulate(plan, model.eval(), (X,))


class OneHot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (self.layer(x) * F.one_hot(labels, 8)).sum()


@pytest.mark.parametrize("method", METHODS)
def test_one_hot_vectors_are_captured(method: str) -> None:
    model, args = OneHot(), (X, torch.tensor([0, 3, 7, 3]))
    plan = sbpc.plan(model, args, Mesh(p=2), capture=method)
    assert torch.allclose(sbpc.simulate(plan, model, args).outputs, model(*args))
