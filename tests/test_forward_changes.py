"""A forward that changes a number, keeps a tensor or draws other random numbers is refused with its line; scratch is planned."""

from __future__ import annotations

import copy
import functools
import random
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import sbpc
from sbpc import Mesh
from sbpc.errors import CaptureError, PlanError
from sbpc.graph.guards import Guards
from sbpc.graph.values import text_of
from tests.guarded import METHODS, Counts, Rope, X


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
    lines = re.sub(r'  File "tests/\w+\.py", line \d+, in ', "", text).splitlines()
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


COUNT, LAST, LIST, ARRAY, QUEUE, ITEMS = 0, None, [0.5], np.ones(2), deque([1.0]), iter(range(9))


class Knobs:
    """A class that is used as a configuration."""

    idle = 1


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
    (counts_in_a_global, "changes 'HERE:COUNT' from 0 to 1", "COUNT += 1"),
    (keeps_in_a_global, "keeps a tensor [4, 8] as 'HERE:LAST'", "LAST = h"),
    (counts_in_a_global_list, "changes 'HERE:LIST' from [0.5] to [0.5, 1.0]", "LIST.append(1.0)"),
    (counts_in_a_class, "changes 'HERE:Knobs.idle' from 1 to 2", "Knobs.idle += 1"),
    (counts_in_an_array, "changes 'HERE:ARRAY' from ndarray([1.0, 1.0]", "ARRAY[0] += 1"),
    (counts_in_a_deque, "changes 'HERE:QUEUE' from deque(1.0) to deque(2.0)", "QUEUE.append("),
    (takes_from_an_iterator, "reads 'HERE:ITEMS', a range_iterator", ""),
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
    said = str(caught.value).replace(f"global {__name__}", "HERE")
    assert what in said and line in said, said
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
