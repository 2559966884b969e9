"""Numbers in attributes are constants of a plan: one that changes afterwards is refused, as is what a forward changes or keeps itself."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import random
import re
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import CaptureError, PlanError
from sbpc.graph.guards import Guards, prefix_of
from sbpc.graph.values import text_of
from sbpc.plans import plan_bytes
from sbpc.runtime.module import unguarded
from tests import random_models
from tests.forging import sealed
from tests.processes import run_ranks

METHODS = ("light", "aot")


class Kind(Enum):
    MEAN = "mean"
    SUM = "sum"


@dataclass
class Rope:
    factor: float = 2.0


@dataclass
class Config:
    """Somebody's configuration, with one inside, and a number that the forward does not read."""

    width: int = 4
    rope: Rope = field(default_factory=Rope)
    idle: int = 1


@dataclass(slots=True)
class Slots:
    width: int = 4


class Alias:
    """As configurations of transformers: an attribute under another name."""

    def __init__(self) -> None:
        self.n_embd = 4

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__("n_embd" if name == "width" else name)


class Net(nn.Module):
    """A forward that reads numbers of all kinds from everywhere, and `idle`, which it does not read."""

    scale = 2.0  # of the class

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.act = nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU()
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.1))
        self.beta, self.whole, self.kind, self.dtype, self.extra = 0.0, True, Kind.MEAN, torch.float32, None
        self.sizes, self.weights, self.table = (2, 4), [1.0, 2.0], {"a": 1.0, "b": [3.0]}
        self.config, self.slots, self.alias, self.record, self.arguments = (
            Config(),
            Slots(),
            Alias(),
            SimpleNamespace(n=1),
            Namespace(n=1),
        )
        self.share, self.limit, self.idle = np.float32(0.5), math.nan, 1
        self.drops, self.ropes = [nn.Dropout(0.5)], {"a": Rope(), 1: (Rope(),)}

    def forward(self, x: Tensor) -> Tensor:
        h = self.tail(self.act(self.layer(self.drops[0](self.drop(x))))).to(self.dtype)
        numbers = [
            self.beta,
            self.sizes[0],
            sum(self.weights),
            self.table["a"],
            self.config.width,
            self.config.rope.factor,
        ]
        numbers += [self.slots.width, self.alias.width, self.record.n, self.arguments.n, float(self.share), self.scale]
        numbers += [self.ropes["a"].factor, self.ropes[1][0].factor]  # type: ignore[index, attr-defined]
        numbers += [1.0 if self.whole else 0.0, 0.0 if self.extra is None else 1.0, getattr(self, "late", 0.0)]
        if math.isnan(self.limit) and self.kind is Kind.MEAN:
            h = h * 2
        return h.square().mean() * sum(numbers)


def change(path: str, value: Any) -> Callable[[Any], None]:
    """What sets an attribute at a path."""
    *owners, name = path.split(".")

    def run(model: Any) -> None:
        for owner in owners:
            model = getattr(model, owner)
        setattr(model, name, value)

    return run


CHANGES = {
    "beta": change("beta", 1.0),
    "beta, an int for a float": change("beta", 0),
    "whole": change("whole", 1),
    "kind": change("kind", Kind.SUM),
    "dtype": change("dtype", torch.float64),
    "extra": change("extra", 2.0),
    "sizes": change("sizes", (3, 4)),
    "weights": lambda m: m.weights.append(3.0),
    "table": lambda m: m.table.update(a=2.0),
    "table, inside": lambda m: m.table["b"].append(1.0),
    "config.width": change("config.width", 5),
    "config.rope.factor": change("config.rope.factor", 5.0),
    "config": lambda m: setattr(m, "config", Config(width=6)),
    "slots.width": change("slots.width", 5),
    "alias.width": change("alias.n_embd", 5),
    "record": change("record.n", 2),
    "arguments": change("arguments.n", 2),
    "share": change("share", np.float64(0.5)),
    "limit": change("limit", 0.0),
    "scale": change("scale", 3.0),
    "late": change("late", 1.0),
    "drop.p": change("drop.p", 0.0),
    "act": change("act", nn.GELU()),
    "tail.1.negative_slope": lambda m: setattr(m.tail[1], "negative_slope", 0.2),
    "drops.0.p": lambda m: setattr(m.drops[0], "p", 0.0),
    "ropes.a.factor": lambda m: setattr(m.ropes["a"], "factor", 3.0),
    "ropes.1.0.factor": lambda m: setattr(m.ropes[1][0], "factor", 3.0),
    "tail.1": lambda m: m.tail.__setitem__(1, nn.LeakyReLU(0.1)),
}
FINE: dict[str, Callable[[Any], None]] = {  # an equal value, and what the forward does not read
    "beta": change("beta", -0.0 + 0.0),
    "limit": change("limit", float("nan")),
    "weights": change("weights", [1.0, 2.0]),
    "config": lambda m: setattr(m, "config", Config()),
    "idle": change("idle", 7),
    "config.idle": change("config.idle", 7),
    "new": change("new", 7),
}
X = torch.linspace(-1, 1, 32).view(4, 8)


def test_every_kind_of_number_that_a_forward_reads_is_guarded() -> None:
    for method in METHODS:
        guards = sbpc.plan(Net(), (X,), Mesh(p=2), capture=method).options.guards
        for name, run in CHANGES.items():
            model = Net()
            kept = Guards(model, guards)
            assert kept.broken() is None and kept.broken() is None
            run(model)
            error = kept.broken()
            assert error is not None and str(error).startswith(name.partition(",")[0]), (method, name, error)
            assert kept.broken() is not None
        for name, run in FINE.items():
            model = Net()
            kept = Guards(model, guards)
            assert kept.broken() is None
            run(model)
            assert kept.broken() is None, (method, name)
            change("beta", 1.0)(model)
            assert kept.broken() is not None


def test_a_number_that_is_set_back_is_fine_again() -> None:
    model = Net()
    kept = Guards(model, sbpc.plan(model, (X,), Mesh(p=2)).options.guards)
    for beta, fine in ((0.0, True), (1.0, False), (1.0, False), (0.0, True)):
        model.beta = beta
        assert (kept.broken() is None) == fine
    model.config.width, model.config.rope = 5, Rope()
    assert kept.broken() is not None
    model.config.width = 4
    assert kept.broken() is None
    model.config.rope.factor = 5.0  # of the one that came later
    assert kept.broken() is not None


def test_texts_tell_values_apart_that_compare_equal_and_not_those_that_are_one() -> None:
    different = [
        1,
        1.0,
        True,
        "1",
        np.float64(1),
        np.int64(1),
        (1,),
        [1],
        {1},
        {1: 1},
        None,
        "None",
        -0.0,
        0.0,
        2**5000,
        2**5000 + 1,
    ]
    different += [
        list(range(500)),
        [*range(499), 7],
        Kind.MEAN,
        "mean",
        torch.float32,
        torch.relu,
        torch.sigmoid,
        nn.ReLU(),
        nn.GELU(),
    ]
    assert len(set(map(text_of, different))) == len(different)
    for one in (*different, math.nan, {"a", "b", "c"}, SimpleNamespace(a=1)):
        assert text_of(copy.deepcopy(one)) == text_of(one) and len(text_of(one)) < 200


class Counts(nn.Module):
    """What is asked for by name happens in the forward."""

    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.does, self.config = nn.Linear(8, 8), does, Config()
        self.calls, self.aux, self.cache, self.seen, self.first = 0, None, {}, [], None
        self.nested: dict[str, list[Any]] = {"features": []}

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        found = self.does(self, h)
        return (h * found if isinstance(found, Tensor) else h).square().mean()


def counts(m: Any, h: Tensor) -> None:
    m.calls += 1


def counts_below(m: Any, h: Tensor) -> None:
    m.config.rope.factor += 1


def counts_in_a_dict(m: Any, h: Tensor) -> None:
    cache = m.cache
    cache["calls"] = cache.get("calls", 0) + 1


def anneals(m: Any, h: Tensor) -> Tensor:
    m.first = 1.0 if m.first is None else m.first / 2
    return h * m.first


def behaves_otherwise_at_first(m: Any, h: Tensor) -> Tensor:
    if m.first is None:
        m.first = True
        return h * 2
    return h


def forgets(m: Any, h: Tensor) -> None:
    del m.calls


def turns_to_eval(m: Any, h: Tensor) -> None:
    m.layer.eval()


def keeps(m: Any, h: Tensor) -> None:
    m.layer.aux = h.square().mean()


def keeps_in_a_list(m: Any, h: Tensor) -> None:
    m.seen.append({"features": (h, h)})


def keeps_below_a_dict(m: Any, h: Tensor) -> None:
    m.cache.setdefault("features", []).append(h)
    m.cache.clear()
    m.nested["features"].append(h)


def keeps_in_a_dict(m: Any, h: Tensor) -> None:
    m.cache[h.shape] = h.detach()


def keeps_in_an_object(m: Any, h: Tensor) -> None:
    m.config.rope.features = h


def keeps_in_a_new_object(m: Any, h: Tensor) -> None:
    m.aux = Rope(h)


def keeps_an_argument(m: Any, h: Tensor) -> None:
    m.aux = [m.layer.weight, h]


def registers(m: Any, h: Tensor) -> None:
    m.register_buffer("mask", torch.ones(8))


def replaces(m: Any, h: Tensor) -> None:
    m.layer = nn.Identity()


LOST = (
    counts, counts_below, counts_in_a_dict, anneals, behaves_otherwise_at_first, forgets, turns_to_eval, keeps, keeps_in_a_list,
    keeps_below_a_dict, keeps_in_a_dict, keeps_in_an_object, keeps_in_a_new_object, keeps_an_argument, registers, replaces,
)  # fmt: skip


TO_DO = {
    "  Keep it in a buffer, pass it as an argument, or change it outside of the forward."
    " If it stays as the first call leaves it, run the model once before.": "BUFFER",
    "  Return it from the forward, or reset the attribute before the forward ends; make a constant in __init__, by register_buffer.": "RETURN",
    "  Make it in __init__: a program has the modules, parameters and buffers that there are.": "INIT",
    "  Run the model once before it is planned: the plan is then of the calls after the first.": "RUN",
}


@functools.cache
def refusal(does: Callable[[Any, Tensor], Any], method: str = "light") -> str:
    """The error of planning on one line: what, the line in its function without the frame that all have, and what to do in a word.

    The model stays as it was.
    """
    model = Counts(does)
    before, parts = copy.deepcopy(vars(model)), dict(vars(model.layer))
    with pytest.raises(CaptureError) as caught:
        sbpc.plan(model, (X,), Mesh(p=2), capture=method)
    now = vars(model)
    assert all(now[name] == before[name] for name in ("calls", "aux", "cache", "seen", "first", "config", "nested"))
    assert now.keys() == before.keys() and vars(model.layer) == parts and not hasattr(model.config.rope, "features")
    assert "__getattribute__" not in vars(nn.Module) and nn.Module.__setattr__.__module__.startswith("torch")
    what, *frames, to_do = str(caught.value).splitlines()
    text = "\n".join(frames).replace("\n    ", ": ")
    lines = re.sub(r'  File "tests/test_guards.py", line \d+, in ', "", text).splitlines()
    return " | ".join([what, *(line for line in lines if line != "forward: found = self.does(self, h)"), TO_DO[to_do]])


def test_what_a_forward_changes_or_keeps_is_refused_with_its_line_and_what_to_do() -> None:
    assert_expected_inline(
        "\n".join(map(refusal, LOST)),
        """\
the forward changes 'calls' from 0 to 1, and a program always computes as if it were 0 | counts: m.calls += 1 | BUFFER
the forward changes 'config.rope.factor' from 2.0 to 3.0, and a program always computes as if it were 2.0 | counts_below: m.config.rope.factor += 1 | BUFFER
the forward changes 'cache' from {'calls': 1} to {'calls': 2}, and a program always computes as if it were {'calls': 1} | counts_in_a_dict: cache = m.cache | BUFFER
the forward changes 'first' from 1.0 to 0.5, and a program always computes as if it were 1.0 | anneals: m.first = 1.0 if m.first is None else m.first / 2 | BUFFER
the forward sets 'first' to True, and computes something else in the next call | behaves_otherwise_at_first: m.first = True | RUN
the forward changes 'calls' from 0 to not there, and a program always computes as if it were 0 | BUFFER
the forward changes 'layer.training' from True to False, and a program always computes as if it were True | turns_to_eval: m.layer.eval() | BUFFER
the forward keeps a tensor [] as 'layer.aux', where no program puts one | keeps: m.layer.aux = h.square().mean() | RETURN
the forward keeps a tensor [4, 8] as 'seen', where no program puts one | keeps_in_a_list: m.seen.append({"features": (h, h)}) | RETURN
the forward keeps a tensor [4, 8] as 'nested', where no program puts one | keeps_below_a_dict: m.nested["features"].append(h) | RETURN
the forward keeps a tensor [4, 8] as 'cache', where no program puts one | keeps_in_a_dict: m.cache[h.shape] = h.detach() | RETURN
the forward keeps a tensor [4, 8] as 'config.rope.features', where no program puts one | keeps_in_an_object: m.config.rope.features = h | RETURN
the forward keeps a tensor [4, 8] as 'aux', where no program puts one | keeps_in_a_new_object: m.aux = Rope(h) | RETURN
the forward keeps a tensor [4, 8] as 'aux', where no program puts one | keeps_an_argument: m.aux = [m.layer.weight, h] | RETURN
the forward makes, replaces or deletes 'mask' | INIT
the forward makes, replaces or deletes 'layer' | INIT""",
    )


def test_both_tracers_refuse_alike_what_a_forward_changes_or_keeps() -> None:
    for does in LOST:
        assert refusal(does, "aot") == refusal(does)


def resets(m: Any, h: Tensor) -> Tensor:
    m.aux, m.calls = h * 2, m.calls + 1
    m.seen.append(h)
    found: Tensor = m.aux + m.calls
    m.aux, m.calls = None, 0
    m.seen.pop()
    return found


def sets_once(m: Any, h: Tensor) -> Tensor:
    if m.first is None:
        m.first = h.shape[0]
    m.rows, m.columns = h.shape  # which were not there
    m.layer.note = "mean"
    return h.view(m.rows * m.columns).view(m.rows, m.columns) * m.first


def sets_what_is_there(m: Any, h: Tensor) -> None:
    m.calls, m.cache = 0, dict(m.cache)


ALLOWED = {"resets": resets, "sets once": sets_once, "sets what is there": sets_what_is_there}


@pytest.mark.parametrize("method", METHODS)
def test_scratch_that_is_reset_and_what_only_the_first_call_sets_are_planned(method: str) -> None:
    for name, does in ALLOWED.items():
        model = Counts(does)
        before = dict(vars(model))
        plan = sbpc.plan(model, (X,), Mesh(p=2), capture=method)
        assert vars(model) == before, name
        assert torch.allclose(sbpc.simulate(plan, model, (X,)).outputs, model(X)), name
        kept = Guards(model, plan.options.guards)  # on the model as its own call has left it
        assert kept.broken() is None, name
        if name == "sets once":
            model.first = 5
            assert kept.broken() is not None


def test_a_forward_may_fill_a_memo_in_its_first_call() -> None:
    def memo(m: Any, h: Tensor) -> None:
        m.cache.setdefault("rows", h.shape[0])

    model = Counts(memo)
    plan = sbpc.plan(model, (X,), Mesh(p=2))
    assert plan.options.guards["cache"] == ["{}", "{'rows': 4}"] and model.cache == {}
    model(X)
    sbpc.simulate(plan, model, (X,))
    assert sbpc.plan(model, (X,), Mesh(p=2)).options.guards["cache"] == ["{'rows': 4}"]
    model.cache["rows"] = 5
    with pytest.raises(PlanError, match=r"cache is \{'rows': 5\}"):
        sbpc.simulate(plan, model, (X,))


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x.mean()


def test_a_loss_that_keeps_a_tensor_is_refused_and_its_numbers_are_guards() -> None:
    with pytest.raises(CaptureError, match=r"as 'the loss.last'"):
        sbpc.plan(nn.Linear(8, 8), (X,), Mesh(p=2), loss=Keeping())
    plan = sbpc.plan(nn.Linear(8, 8), (X,), Mesh(p=2), loss=nn.HuberLoss(delta=0.5), targets=(X,))
    assert plan.options.guards == {
        "the loss": ["a HuberLoss"],
        "the loss.delta": ["0.5"],
        "the loss.reduction": ["'mean'"],
    }


def test_layers_of_torch_may_keep_what_they_do() -> None:
    for layer in (nn.utils.weight_norm(nn.Linear(8, 8)), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))):  # type: ignore[no-untyped-call]
        plan = sbpc.plan(layer, (X,), Mesh(p=2))
        assert torch.allclose(sbpc.simulate(plan, layer, (X,)).outputs, layer(X))
    gru = nn.GRU(8, 8)
    assert "hidden_size" in sbpc.plan(gru, (X,), Mesh(p=2), capture="aot").options.guards


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


def test_a_model_with_other_numbers_than_planned_is_refused_by_simulate() -> None:
    model = Net()
    plan = sbpc.plan(model, (X,), Mesh(p=2))
    model.drop.p = 0.0
    with pytest.raises(PlanError) as caught:
        sbpc.simulate(plan, model, (X,))
    assert_expected_inline(
        str(caught.value),
        """\
drop.p is 0.0, and was 0.5 when the model was planned: what a forward reads besides tensors is constant in its plan
  Plan anew; or once for each value, with pin=plan.parameters, and give the plans as parallelize(..., also=[...]).
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


class Small(nn.Module):
    def __init__(self, beta: float = 0.0) -> None:
        super().__init__()
        self.layer, self.act, self.beta = nn.Linear(8, 8), nn.LeakyReLU(0.1), beta

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x)).square().mean() + self.beta


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


class Shaped(nn.Module):
    """Keeps the sizes of its argument, and a moment, and reads them after that alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.b, self.n, self.began = nn.Linear(8, 8), 0, 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.b, self.n = x.shape
        self.began = time.time()
        return self.layer(x).reshape(self.b * self.n).square().mean() + 0 * self.began


@pytest.mark.parametrize("method", ["light", "aot"])
def test_a_number_that_is_written_before_it_is_read_belongs_to_no_plan(method: str) -> None:
    model = Shaped()
    model(X[:2])
    plan = sbpc.plan(model, (X,), Mesh(p=2), capture=method)
    assert not {"b", "n", "began"} & plan.options.guards.keys()
    assert torch.allclose(sbpc.simulate(plan, model, (X,)).outputs, model(X))


def test_a_bare_tree_of_weights_leaves_the_guards_of_a_plan() -> None:
    plan = sbpc.plan(Small(), (X,), Mesh(p=2))
    guards = dict(plan.options.guards)
    assert unguarded(plan).options.guards == {} and plan.options.guards == guards != {}


class Drawn(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() * (2.0 if self.draw() < 0.5 else 1.0)


@pytest.mark.parametrize("method", ["light", "aot"])
@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_that_are_not_torchs_are_refused(draw: Callable[[], float], method: str) -> None:
    with pytest.raises(CaptureError, match=r"draws random numbers by '(random|numpy\.random)', a Random"):
        sbpc.plan(Drawn(draw), (X,), Mesh(p=2), capture=method)


class OfClass(nn.Module):
    beta = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.heads = nn.Linear(8, 8), functools.partial(F.leaky_relu, negative_slope=0.1), 4

    @functools.cached_property
    def scale(self) -> float:
        return self.heads**-0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.layer(x) * self.scale).square().mean() * self.beta


def test_attributes_of_a_class_partial_functions_and_cached_properties_are_guarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned = sbpc.plan(OfClass(), (X,), Mesh(p=2)).options.guards
    model = OfClass()
    guards = Guards(model, planned)
    assert guards.broken() is None and model.scale == 0.5 and guards.broken() is None
    with monkeypatch.context() as patch:
        patch.setattr(OfClass, "beta", 5.0)
        assert "beta is 5.0, and was 2.0" in str(guards.broken())
    assert guards.broken() is None
    model.act = functools.partial(F.leaky_relu, negative_slope=0.3)
    assert "'negative_slope': 0.3" in str(guards.broken())


class Knobs:
    """A class that is used as a configuration, with one inside."""

    beta, idle = 0.5, 1

    class Rope:
        factor = 2.0


@dataclass(eq=False)
class Watched:
    beta: float = 0.5
    idle: int = 1


BETA, LIST, TABLE, RECORD, CONFIG, ARRAY, COUNT, LAST = (
    0.5,
    [0.5],
    {"beta": 0.5},
    SimpleNamespace(beta=0.5),
    Watched(),
    np.ones(2),
    0,
    None,
)
ITEMS, QUEUE, LOSS = iter(range(9)), deque([1.0]), nn.HuberLoss(delta=0.5)


def beta_of() -> float:
    return BETA


def doubled(x: Any) -> Any:
    return x * 2


def made(beta: float) -> Callable[[Any], Any]:
    return lambda x: x * beta


def deep(model: Any) -> Any:
    return (lambda: sum(BETA for _ in range(1)))()


def tripled(x: Any) -> Any:
    return x * 3


class Kept(nn.Module):
    """Reads numbers from places of all kinds by a function that is given by name."""

    beta = 0.5

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer, self.reads, self.cfg, self.module = nn.Linear(8, 8), READS[name], Knobs, random_models
        self.act, self.made, self.part, self.t = (lambda x: x * 2), made(0.5), functools.partial(made(0.5)), 0.5
        self.array, self.scalar, self.queue, self.window = np.ones(3), np.bool_(True), deque([1.0]), slice(0, 4)
        self.args = Namespace(beta=0.5, idle=1)
        self.long, self.keys = [0.0] * 5000, {Kind.MEAN: Rope(), (1, 2): Rope(), "a.b": Rope(), True: Rope()}

    def own(self) -> float:
        return BETA

    @classmethod
    def of_class(cls) -> float:
        return cls.beta

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean() * self.reads(self)


READS: dict[str, Callable[[Any], Any]] = {
    "a global": lambda m: BETA,
    "a global of a function that is called": lambda m: beta_of(),
    "a global of a function inside": deep,
    "a global of a method": lambda m: m.own(),
    "a list": lambda m: LIST[0],
    "a dict": lambda m: TABLE["beta"],
    "a namespace": lambda m: RECORD.beta,
    "a whole namespace": lambda m: (getattr(RECORD, "be" + "ta"), RECORD.beta)[0],
    "parsed arguments": lambda m: m.args.beta,
    "an object": lambda m: CONFIG.beta,
    "an object by its name": lambda m: getattr(CONFIG, "be" + "ta"),
    "an array": lambda m: float(ARRAY[0]),
    "a module": lambda m: F.huber_loss(torch.ones(()), torch.zeros(())) * LOSS.delta,
    "a class": lambda m: Knobs.beta,
    "a class by its name": lambda m: getattr(Knobs, "beta"),  # noqa: B009
    "a class in a class": lambda m: Knobs.Rope.factor,
    "a function": lambda m: doubled(1.0),
    "of a module": lambda m: random_models.BETA,  # type: ignore[attr-defined]
    "of a module that is kept": lambda m: m.module.BETA,
    "a class that is kept": lambda m: m.cfg.beta,
    "of the class": lambda m: type(m).beta,
    "of the class by a method": lambda m: m.of_class(),
    "a lambda": lambda m: m.act(1.0),
    "a free variable": lambda m: m.made(1.0),
    "a free variable of a partial function": lambda m: m.part(1.0),
    "an array that is kept": lambda m: float(m.array[0]),
    "a number of numpy": lambda m: float(m.scalar),
    "a deque": lambda m: m.queue[0],
    "a slice": lambda m: float(m.window.stop),
    "a long list": lambda m: m.long[4000] + 1,
    "by an enum": lambda m: m.keys[Kind.MEAN].factor,
    "by a tuple": lambda m: m.keys[1, 2].factor,
    "by a text with a dot": lambda m: m.keys["a.b"].factor,
    "by vars": lambda m: vars(m)["t"],
    "by __dict__": lambda m: m.__dict__["t"],
    "a forward": lambda m: m.layer.in_features,
}


def patched(name: str, value: Any) -> Callable[[Any, pytest.MonkeyPatch], Any]:
    return lambda m, patch: patch.setitem(globals(), name, value)


OUTSIDE: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], Any], str]] = {
    "a global": (patched("BETA", 1.0), "global tests.test_guards:BETA is 1.0, and was 0.5"),
    "a global of a function that is called": (patched("BETA", 1), "global tests.test_guards:BETA is 1,"),
    "a global of a function inside": (patched("BETA", 1.0), "global tests.test_guards:BETA is 1.0"),
    "a global of a method": (patched("BETA", 1.0), "global tests.test_guards:BETA is 1.0"),
    "a list": (lambda m, p: p.setattr(sys.modules[__name__], "LIST", [1.0]), "global tests.test_guards:LIST is [1.0]"),
    "a dict": (lambda m, p: p.setitem(TABLE, "beta", 1.0), "global tests.test_guards:TABLE is {'beta': 1.0}"),
    "a namespace": (lambda m, p: p.setattr(RECORD, "beta", 1.0), "global tests.test_guards:RECORD.beta is 1.0"),
    "a whole namespace": (
        lambda m, p: p.setattr(RECORD, "beta", 1.0),
        "global tests.test_guards:RECORD is SimpleNamespace('beta': 1.0)",
    ),
    "parsed arguments": (lambda m, p: p.setattr(m.args, "beta", 1.0), "args.beta is 1.0"),
    "an object": (lambda m, p: p.setattr(CONFIG, "beta", 1.0), "global tests.test_guards:CONFIG.beta is 1.0"),
    "an object by its name": (
        lambda m, p: p.setattr(CONFIG, "beta", 1.0),
        "global tests.test_guards:CONFIG.beta is 1.0",
    ),
    "an array": (lambda m, p: ARRAY.__setitem__(0, 2.0), "global tests.test_guards:ARRAY is ndarray([2.0, 1.0]"),
    "a module": (lambda m, p: p.setattr(LOSS, "delta", 1.0), "global tests.test_guards:LOSS.delta is 1.0"),
    "a class": (lambda m, p: p.setattr(Knobs, "beta", 1.0), "global tests.test_guards:Knobs.beta is 1.0"),
    "a class by its name": (lambda m, p: p.setattr(Knobs, "beta", 1.0), "global tests.test_guards:Knobs.beta is 1.0"),
    "a class in a class": (
        lambda m, p: p.setattr(Knobs.Rope, "factor", 1.0),
        "global tests.test_guards:Knobs.Rope.factor is 1.0",
    ),
    "a function": (patched("doubled", tripled), "global tests.test_guards:doubled is tripled"),
    "of a module": (lambda m, p: p.setattr(random_models, "BETA", 1.0), "global tests.random_models:BETA is 1.0"),
    "of a module that is kept": (lambda m, p: p.setattr(random_models, "BETA", 1.0), "module.BETA is 1.0"),
    "a class that is kept": (lambda m, p: p.setattr(Knobs, "beta", 1.0), "cfg.beta is 1.0"),
    "of the class": (lambda m, p: p.setattr(Kept, "beta", 1.0), "__class__.beta is 1.0"),
    "of the class by a method": (lambda m, p: p.setattr(Kept, "beta", 1.0), "__class__.beta is 1.0"),
    "a lambda": (lambda m, p: setattr(m, "act", lambda x: x * 3), "act is "),
    "a free variable": (lambda m, p: setattr(m, "made", made(1.0)), "made is <lambda> (code "),
    "a free variable of a partial function": (
        lambda m, p: setattr(m, "part", functools.partial(made(1.0))),
        "part is partial",
    ),
    "an array that is kept": (
        lambda m, p: m.array.__setitem__(2, 3.0),
        "array is ndarray([1.0, 1.0, 3.0], (3,), float64), and was",
    ),
    "a number of numpy": (lambda m, p: setattr(m, "scalar", np.bool_(False)), "scalar is "),
    "a deque": (lambda m, p: m.queue.append(1.0), "queue is deque(1.0, 1.0), and was"),
    "a slice": (lambda m, p: setattr(m, "window", slice(0, 5)), "window is slice(0, 5, None)"),
    "a long list": (lambda m, p: m.long.__setitem__(4000, 1.0), "long is [0.0"),
    "by an enum": (lambda m, p: setattr(m.keys[Kind.MEAN], "factor", 1.0), "keys.[0].factor is 1.0"),
    "by a tuple": (lambda m, p: setattr(m.keys[1, 2], "factor", 1.0), "keys.[1].factor is 1.0"),
    "by a text with a dot": (lambda m, p: setattr(m.keys["a.b"], "factor", 1.0), "keys.[2].factor is 1.0"),
    "by vars": (lambda m, p: setattr(m, "t", 1.0), "t is 1.0"),
    "by __dict__": (lambda m, p: setattr(m, "t", 1.0), "t is 1.0"),
    "a forward": (lambda m, p: setattr(m.layer, "forward", torch.relu), "layer.forward is "),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_forward_reads_outside_of_its_attributes_is_guarded(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(random_models, "BETA", 0.5, raising=False)
    monkeypatch.setitem(globals(), "ARRAY", np.ones(2))
    change, message = OUTSIDE[name]
    plan = sbpc.plan(Kept(name), (X,), Mesh(p=2))
    plan.save(tmp_path / "plan")
    assert sbpc.load(tmp_path / "plan").options.guards == plan.options.guards
    model, before = Kept(name), Kept(name)
    kept = Guards(model, plan.options.guards)
    assert kept.broken() is None and kept.broken() is None
    monkeypatch.setattr(Knobs, "idle", 2)  # nothing reads these
    monkeypatch.setattr(CONFIG, "idle", 2)
    model.args.idle = 2
    assert kept.broken() is None
    change(model, monkeypatch)
    assert str(kept.broken()).startswith(message), kept.broken()
    change(before, monkeypatch)  # before it is bound
    assert str(Guards(before, plan.options.guards).broken()).startswith(message)


def counts_in_a_global(m: Any, h: Tensor) -> None:
    global COUNT
    COUNT += 1


def keeps_in_a_global(m: Any, h: Tensor) -> None:
    global LAST
    LAST = h  # type: ignore[assignment]


def counts_in_a_global_list(m: Any, h: Tensor) -> None:
    LIST.append(1.0)


def counts_in_a_class(m: Any, h: Tensor) -> None:
    Knobs.idle += 1


def counts_in_an_array(m: Any, h: Tensor) -> None:
    ARRAY[0] += 1


def counts_in_a_deque(m: Any, h: Tensor) -> None:
    QUEUE.append(QUEUE.popleft() + 1)


def takes_from_an_iterator(m: Any, h: Tensor) -> Tensor:
    return h * next(ITEMS)


def takes_from_its_own_iterator(m: Any, h: Tensor) -> Tensor:
    return h * next(m.items)


def counting() -> Callable[[Any, Tensor], None]:
    calls = 0

    def counts_in_a_free_variable(m: Any, h: Tensor) -> None:
        nonlocal calls
        calls += 1

    return counts_in_a_free_variable


REFUSED: tuple[tuple[Callable[[Any, Tensor], Any], str, str], ...] = (
    (counts_in_a_global, "changes 'global tests.test_guards:COUNT' from 0 to 1", "COUNT += 1"),
    (keeps_in_a_global, "keeps a tensor [4, 8] as 'global tests.test_guards:LAST'", "LAST = h"),
    (counts_in_a_global_list, "changes 'global tests.test_guards:LIST' from [0.5] to [0.5, 1.0]", "LIST.append(1.0)"),
    (counts_in_a_class, "changes 'global tests.test_guards:Knobs.idle' from 1 to 2", "Knobs.idle += 1"),
    (counts_in_an_array, "changes 'global tests.test_guards:ARRAY' from ndarray([1.0, 1.0]", "ARRAY[0] += 1"),
    (counts_in_a_deque, "changes 'global tests.test_guards:QUEUE' from deque(1.0) to deque(2.0)", "QUEUE.append("),
    (takes_from_an_iterator, "reads 'global tests.test_guards:ITEMS', a range_iterator", ""),
    (takes_from_its_own_iterator, "reads 'items', a range_iterator", "next(m.items)"),
    (counting(), "changes 'does' from {'calls': 0} to {'calls': 1}", "found = self.does(self, h)"),
)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("does", "what", "line"), REFUSED)
def test_what_a_forward_changes_outside_is_refused_and_put_back(
    does: Callable[[Any, Tensor], Any], what: str, line: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ARRAY", np.ones(2)), ("LIST", [0.5]), ("QUEUE", deque([1.0]))):
        monkeypatch.setitem(globals(), name, value)
    model = Counts(does)
    model.items = iter(range(9))
    with pytest.raises(CaptureError) as caught:
        sbpc.plan(model, (X,), Mesh(p=2), capture=method)
    assert what in str(caught.value) and line in str(caught.value), caught.value
    assert (COUNT, LAST, LIST, Knobs.idle, ARRAY.tolist(), list(QUEUE)) == (0, None, [0.5], 1, [1.0, 1.0], [1.0])
    assert "calls: 1" not in text_of(does)


PACKAGE = """
import itertools
CALLS, WARNED, IDS = 0, set(), itertools.count()
def scale(x):
    global CALLS
    CALLS, _ = CALLS + 1, WARNED.add(next(IDS))
    return x * 2
"""


def test_what_an_installed_package_counts_for_itself_refuses_no_plan(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "somebodys_package.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    package = __import__("somebodys_package")
    model = Counts(lambda m, h: package.scale(h))
    plan = sbpc.plan(model, (X,), Mesh(p=2))
    kept = Guards(model, plan.options.guards)
    assert package.CALLS == 1 and kept.broken() is None
    model(X)
    assert kept.broken() is None and not any("somebodys_package" in path for path in kept.planned)


def test_a_file_has_one_name_whether_it_is_run_or_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [
        {"__name__": name, "__file__": "/somewhere/train_it.py", "BETA": 1.0}
        for name in ("__main__", "train_it", "target_train_it")
    ]
    spec = SimpleNamespace(name="package.train")
    tables += [
        {"__name__": "__main__", "__file__": "/somewhere/package/train.py", "__spec__": spec},
        {"__name__": "__main__"},
    ]
    assert [prefix_of(table)[len("global ") :] for table in tables] == ["train_it:"] * 3 + [
        "package.train:",
        "__main__:",
    ]
    guards = {"global train_it:BETA": ["0.5"], "layer": ["a Linear"]}
    assert Guards(Small(), guards).broken() is None  # no such file has been run here
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(**tables[0]))  # type: ignore[arg-type]
    assert "train_it:BETA is 1.0, and was 0.5" in str(Guards(Small(), guards).broken())


def test_functions_that_another_python_compiled_are_not_compared() -> None:
    def text(function: Callable[..., Any]) -> str:
        return text_of(function)

    assert text(lambda x: x + 1) == text(lambda x: x + 1) != text(lambda x: x + 2)
    assert text(lambda x, a=1: x) != text(lambda x, a=2: x)
    model = Kept("a lambda")
    old = {"act": [text(lambda x: x + 1).replace(sys.implementation.cache_tag, "cpython-27")]}
    assert Guards(model, old).broken() is None and Guards(model, {"act": [text(lambda x: x + 1)]}).broken() is not None


def test_a_forward_in_a_function_is_guarded_for_the_variables_of_that_and_one_that_comes_later_is_refused() -> None:
    beta = 0.5

    class Inside(Small):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * beta

    model = Inside()
    plan = sbpc.plan(model, (X,), Mesh(p=2))
    kept = Guards(model, plan.options.guards)
    assert kept.broken() is None
    beta = 1.0
    assert "with {'beta': 1.0}, and was" in str(kept.broken())
    beta = 0.5
    assert kept.broken() is None
    model.layer.forward = model.act.forward  # type: ignore[method-assign]
    assert str(kept.broken()).startswith("layer.forward is another function than before")
    assert "layer.forward is forward, and was that of its class" in str(Guards(model, plan.options.guards).broken())


WEIGHT = 0.5


def weighted(out: Tensor, target: Tensor) -> Tensor:
    return WEIGHT * F.mse_loss(out, target)


def test_what_a_loss_reads_of_globals_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 8)
    plan = sbpc.plan(model, (X,), Mesh(p=2), loss=weighted, targets=(X,))
    sbpc.simulate(plan, model, (X, X))
    monkeypatch.setitem(globals(), "WEIGHT", 0.25)
    with pytest.raises(PlanError, match="WEIGHT"):
        sbpc.simulate(plan, model, (X, X))


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


class Chained(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return chain.f0(x)  # type: ignore[name-defined]  # noqa: F821


def test_a_long_chain_of_functions_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"def f{at}(x):\n    return f{at + 1}(x) if x is None else x\n" for at in range(2000)]
    (tmp_path / "chain_of_functions.py").write_text(
        "\n".join([*lines, "LAST = 2.0", "def f2000(x):\n    return x * LAST\n"])
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(globals(), "chain", importlib.import_module("chain_of_functions"))
    guards = sbpc.plan(Chained(), (X,), Mesh(p=2), train=False).options.guards
    assert any(path.endswith("chain_of_functions:LAST") for path in guards)


def test_another_forward_of_the_class_is_refused(tmp_path: Path) -> None:
    text = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return self.scaled(x)\n\n    def scaled(self, x):\n        return {} * x\n"
    nets = []
    for number, times in enumerate((2, 2, 100)):
        (tmp_path / f"net{number}.py").write_text(text.format(times) + "# a comment\n" * number)
        names: dict[str, Any] = {"__name__": "net"}
        exec(compile((tmp_path / f"net{number}.py").read_text(), "net.py", "exec"), names)
        nets.append(names["Net"]())
    sbpc.plan(nets[0], (X,), Mesh(p=2), train=False).save(tmp_path / "plan")
    plan = sbpc.load(tmp_path / "plan")
    sbpc.simulate(plan, nets[1], (X,))
    with pytest.raises(PlanError, match=r"scaled is scaled \(code .*was scaled \(code"):
        sbpc.simulate(plan, nets[2], (X,))
    type(nets[0]).forward = lambda self, x: x
    with pytest.raises(PlanError, match=r"forward is <lambda> "):
        sbpc.simulate(plan, nets[0], (X,))


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size) * 0.5


class Cached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * table(8)


@pytest.mark.parametrize("method", METHODS)
def test_a_function_that_remembers_tensors_does_not_remember_those_of_the_capture(method: str) -> None:
    plan = sbpc.plan(Cached(), (X,), Mesh(p=2), train=False, capture=method)
    assert torch.equal(Cached()(X), X * torch.arange(8) * 0.5)
    assert torch.equal(sbpc.simulate(plan, Cached(), (X,)).outputs, Cached()(X))
    table.cache_clear()
